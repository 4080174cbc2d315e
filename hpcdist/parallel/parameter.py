"""`Parameter`: an array that is trained, and its gradient.

On its own a parameter keeps its gradient itself. A data-parallel model gives it a `GradSlot`: a
place in one of the model's buckets, and whom to tell when the gradient has been written, so that
buckets travel while the backward pass goes on.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, final

import numpy as np

from hpcdist.arrays.device import device_runtime_of, on_device
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray, in_kind, library_of, view_of
from hpcdist.arrays.transfer import near, on_host
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an

_FAMILIES = ("float", "complex")
_ndarray = np.ndarray


class GradSlot(NamedTuple):
    """Where a model keeps the gradient of one of its parameters.

    `before_write(position, error)` is called before the gradient is written, where
    `intercept[position]` is set (with an error: always, and instead of it),
    `after_write(position)` after that, `before_read(position)` before it is read.
    """

    memory: NumpyArray
    position: int
    intercept: bytearray
    before_write: Callable[[int, UsageError | None], None]
    after_write: Callable[[int], None]
    before_read: Callable[[int], None]
    owner: weakref.ref[Any]
    adds: bytearray
    """At `position`: whether assigning a gradient adds it to one that is there."""


@final
class Parameter:
    """An array that is trained.

    Args:
        data: a NumPy, CuPy, JAX or torch array (of torch: in host memory) of floats or complex
            numbers; kept, not copied.
        requires_grad: whether it takes gradients; without, it may have any dtype.
        group: the ranks that have the same parameter, where these are not all ranks of its model:
            the copies of an expert, or of a slice of a weight.

    Attributes:
        name: what its model calls it; for messages.
        requires_grad: whether it takes gradients.
        has_grad: whether it has a gradient.
        group: as given. `DataParallel` averages its gradient over these ranks.

    Raises:
        UsageError: `data` is not an array, or cannot have a gradient.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> w = dist.Parameter(np.zeros(3))
        >>> w.grad = np.ones(3)
        >>> w.data -= 0.1 * w.grad
        >>> w
        Parameter([-0.1, -0.1, -0.1])

    """

    __slots__ = (
        "__weakref__",
        "_data",
        "_memory",
        "_shown",
        "_slot",
        "_unshard",
        "_wrap",
        "group",
        "has_grad",
        "name",
        "requires_grad",
    )

    def __init__(self, data: Any, requires_grad: bool = True, group: Group | None = None) -> None:
        library = library_of(data)
        view = view_of(data)
        family = dtype_row(view.dtype).family
        if requires_grad and family not in _FAMILIES:
            raise UsageError(
                f"a Parameter of dtype {view.dtype} cannot be trained; give it floats or complex "
                "numbers, or pass requires_grad=False"
            )
        if requires_grad and library.engine is None and on_device(view):
            raise UsageError(
                f"a Parameter cannot be {an(type(data).__name__)} on a GPU; give it a CuPy array "
                "(cupy.from_dlpack(x)), or train a torch.nn.Module"
            )
        self._data = data
        self._unshard: Callable[[], Any] | None = None
        self._wrap = library.wrap
        self._memory: NumpyArray | None = None
        self._shown: Any = None
        self._slot: GradSlot | None = None
        self.name = ""
        self.requires_grad = bool(requires_grad)
        self.group = group
        self.has_grad = False

    @property
    def data(self) -> Any:
        """The array; assign one of the same shape and dtype to replace it.

        Where the model is sharded (``p_g_os``), reading it gathers the parts that other ranks
        hold: collective, and the array cannot be written.
        """
        return self._data if self._unshard is None else self._unshard()

    @data.setter
    def data(self, data: Any) -> None:
        old = self._data
        if data is old:
            return
        if self._unshard is not None:
            raise UsageError(
                f"{self._label()} is sharded: no rank holds all of it; change it through its "
                "optimizer, or load_state_dict of the model"
            )
        view, mine = view_of(data), view_of(old)
        if view.shape != mine.shape or view.dtype != mine.dtype:
            raise UsageError(
                f"{self._label()} is {mine.dtype} of shape {mine.shape}, but was assigned data of "
                f"{view.dtype} and shape {view.shape}; both must be alike"
            )
        if type(data) is type(old):
            self._data = data
        elif isinstance(data, np.ndarray) and isinstance(old, np.ndarray):
            self._data = in_kind(old, view)
        else:
            self._data = self._wrap(near(mine, view).copy())

    @property
    def grad(self) -> Any:
        """The gradient or None, always in the same memory; assigning copies into it.

        In a model that is data-parallel, reading it waits until it has been averaged, and assigning
        adds to what passes in `no_sync` have left, until that has been averaged. For JAX each
        reading gives a new array. Assigning says that it is ready; to change it afterwards,
        write into it: ``p.grad[...] *= 0.5``.

        Raises:
            UsageError: another shape or dtype than the data was assigned.

        """
        slot = self._slot
        if slot is not None:
            slot.before_read(slot.position)
        if not self.has_grad:
            return None
        return self._shown if self._shown is not None else self._wrap(self._own_memory())

    @grad.setter
    def grad(self, gradient: Any) -> None:
        if gradient is not None:
            self._take(gradient, adding=False)
        elif self.has_grad:
            if self._slot is not None:
                self._slot.before_read(self._slot.position)
            self.has_grad = False

    def accumulate(self, gradient: Any) -> None:
        """Add `gradient` to `grad`, or set it if there is none, and say that it is ready.

        Args:
            gradient: an array of the data's shape and dtype; it is copied.

        Raises:
            UsageError: it has another shape or dtype than the data.

        """
        self._take(gradient, adding=True)

    def memory(self) -> NumpyArray | None:
        """Return a writable NumPy view of the gradient; None without one.

        What is on a device is seen by the device's library.
        """
        return self._memory if self.grad is not None else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the data."""
        return tuple(self._data.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the data, as its library writes it."""
        return self._data.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NumpyArray:
        data = self.data
        view = view_of(data)
        if copy or (dtype is not None and dtype != view.dtype):
            return np.array(view, dtype)
        return view

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.data, self.requires_grad, self.name)

    def __copy__(self) -> Parameter:
        return _restored(self.data, self.requires_grad, self.name, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        data = copy.deepcopy(self.data, memo)  # the group is that of the ranks, not of the copy
        return _restored(data, self.requires_grad, self.name, self.group)

    def __repr__(self) -> str:
        words = self._describe()
        name = f", name={self.name!r}" if self.name else ""
        frozen = "" if self.requires_grad else ", requires_grad=False"
        return f"Parameter({words}{name}{frozen})"

    def _describe(self) -> str:
        if self._unshard is not None:  # to see all of it is collective
            return f"sharded {view_of(self._data).dtype} of shape {self.shape}"
        return np.array2string(on_host(view_of(self._data)), separator=", ", threshold=20)

    # ---- for models

    def is_free(self) -> bool:
        """Return whether no model has given the parameter a slot, or that model is gone."""
        return self._slot is None or self._slot.owner() is None

    def owner(self) -> Any:
        """Return the model that keeps the gradient, or None."""
        return None if self._slot is None else self._slot.owner()

    def shard(self, unshard: Callable[[], Any]) -> None:
        """Give the array away: from now on `data` is what `unshard` returns.

        Args:
            unshard: returns the whole array; may be collective.

        """
        shape, dtype = self.shape, view_of(self._data).dtype
        # One zero seen as the whole array: shape and dtype stay known without its memory.
        self._unshard, self._data = unshard, np.broadcast_to(np.zeros((), dtype), shape)

    def move(self, memory: NumpyArray) -> None:
        """Keep the gradient in `memory`, of its shape and dtype, from now on. For the slot.

        Args:
            memory: of the data's shape and dtype.

        """
        self._place(memory)

    def detach(self) -> None:
        """Give back the memory of the gradient, which is lost; the slot `move`s it when written.

        Until then it is the memory that the slot came with.
        """
        assert self._slot is not None
        self._memory, self._shown = self._slot.memory, None
        self.has_grad = False

    def attach(self, slot: GradSlot) -> None:
        """Keep the gradient in `slot` from now on; one that is there moves along.

        Args:
            slot: where the gradient's memory is, and who is told of writes and reads.

        """
        if self.has_grad:
            slot.memory[...] = self._own_memory()
        self._slot = slot
        self._place(slot.memory)

    # ---- the gradient

    def _take(self, gradient: Any, *, adding: bool) -> None:
        slot, memory = self._slot, self._memory
        if memory is None:
            memory = self._own_memory()
        source = gradient if type(gradient) is _ndarray else self._seen(gradient)
        if source.shape != memory.shape or source.dtype != memory.dtype:
            self._refuse(
                f"{self._label()} is {memory.dtype} of shape {memory.shape}, but its gradient "
                f"has dtype {source.dtype} and shape {source.shape}; both must be alike"
            )
        if type(source) is not type(memory) and device_runtime_of(source) is not device_runtime_of(
            memory
        ):
            self._refuse(
                f"{self._label()} is in memory of {_place(memory)}, but its gradient in that of "
                f"{_place(source)}; copy it first, for example by cupy.asarray or cupy.asnumpy"
            )
        if slot is not None and slot.intercept[slot.position]:
            slot.before_write(slot.position, None)
            memory = self._memory  # the slot may have got memory only now
            assert memory is not None
        if slot is not None and slot.adds[slot.position] and source is not memory:
            adding = True
        if adding and self.has_grad:
            np.add(memory, source, out=memory)
        elif source is not memory:
            memory[...] = source
        self.has_grad = True
        if slot is not None:
            slot.after_write(slot.position)

    def _seen(self, gradient: Any) -> NumpyArray:
        if gradient is self._shown:
            return self._own_memory()
        try:
            return view_of(gradient)
        except UsageError as error:
            self._refuse(f"the gradient of {self._label()}: {error}")

    def _refuse(self, why: str) -> NoReturn:
        """Raise; on the model's other ranks, too, where they wait for this gradient."""
        error = UsageError(why)
        if self._slot is not None:
            self._slot.before_write(self._slot.position, error)
        raise error

    def _own_memory(self) -> NumpyArray:
        if self._memory is None:
            if not self.requires_grad:
                self._refuse(f"{self._label()} takes no gradient; make it with requires_grad=True")
            self._place(np.empty_like(self.__array__(), order="C"))
        assert self._memory is not None
        return self._memory

    def _place(self, memory: NumpyArray) -> None:
        """Keep the gradient in `memory`, and show it as an array of the data's library."""
        self._memory = memory
        shown = self._wrap(memory)
        # A library that copies (JAX) would show old numbers after the next write.
        shares = np.may_share_memory(view_of(shown), memory)
        self._shown = shown if shares else None

    def _label(self) -> str:
        return f"parameter {self.name!r}" if self.name else "a parameter"


def _place(memory: NumpyArray) -> str:
    engine = device_runtime_of(memory)
    return "the host" if engine is None else engine.name


def _restored(data: Any, requires_grad: bool, name: str, group: Group | None = None) -> Parameter:
    """Build the copy of a parameter from a pickle: free of its model, without gradient."""
    parameter = Parameter(data, requires_grad, group)
    parameter.name = name
    return parameter
