"""`DistArray`: an array of which each rank of a mesh holds the part that a layout gives it.

Nothing here communicates. What arrays can do (operators, NumPy's functions) is put into the class
by the modules that know the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.libraries import Library, register_library
from hpcdist.comm.session import current_session
from hpcdist.errors import UsageError
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.process_mesh import ProcessMesh


@final
class DistArray:
    """An array spread over the ranks of a mesh; each rank has its part of it.

    Made by `shard_tensor`, `dtensor_from_fn` and `dtensor_from_local`. Its shape, dtype and so on
    are those of the whole array, and need no communication.

    Attributes:
        local: this rank's part, an ordinary array. Empty on a rank outside the mesh.
        layout: which part each rank has.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks)
        >>> a = dist.shard_tensor(np.arange(6.0), mesh, [dist.Shard(0)])
        >>> a.shape, a.local.shape
        ((6,), (6,))

    """

    __slots__ = ("__weakref__", "base", "layout", "local", "sources")
    __hash__ = None  # type: ignore[assignment]  # == compares elements

    local: Any
    layout: Layout
    base: DistArray
    """Only of views: the array whose elements they show."""
    sources: tuple[Any, ...]
    """Only of what was moved where NumPy has a view: weak references to what it was taken of."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "a DistArray is made from what the ranks have: shard_tensor takes the whole array on "
            "every rank, dtensor_from_local each rank's part, dtensor_from_fn a function that "
            "makes it"
        )

    @staticmethod
    def _of(local: Any, layout: Layout) -> DistArray:
        """Return the array with this part on this rank; the caller has checked that it fits."""
        made = _new(DistArray)
        made.local = local
        made.layout = layout
        return made

    if TYPE_CHECKING:  # what `operators` puts in, in kinds

        def __add__(self, other: Any) -> DistArray: ...
        def __neg__(self) -> DistArray: ...
        def __divmod__(self, other: Any) -> tuple[DistArray, DistArray]: ...
        def __eq__(self, other: object) -> DistArray: ...  # type: ignore[override]
        def __ne__(self, other: object) -> DistArray: ...  # type: ignore[override]
        def __getitem__(self, key: Any) -> DistArray: ...
        def __setitem__(self, key: Any, value: Any) -> None: ...
        def __iter__(self) -> Iterator[DistArray]: ...
        def __contains__(self, value: Any) -> bool: ...
        def __array_namespace__(self, *, api_version: str | None = None) -> Any: ...
        def _method(self, *args: Any, **options: Any) -> DistArray: ...
        def _whole(self, what: str) -> Any: ...
        def nonzero(self) -> tuple[DistArray, ...]: ...  # noqa: D102
        def fill(self, value: Any) -> None: ...  # noqa: D102
        def item(self, *index: Any) -> Any: ...  # noqa: D102
        def tolist(self) -> Any: ...  # noqa: D102
        def halo(self, depth: Any, boundary: Any = None) -> AbstractContextManager[Any]: ...  # noqa: D102
        def neighbour(  # noqa: D102
            self, axis: int = 0, offset: int = 1, boundary: Any = None
        ) -> AbstractContextManager[Any]: ...

        __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = __add__
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __add__
        __rpow__ = __rmatmul__ = __rlshift__ = __rrshift__ = __rand__ = __ror__ = __rxor__ = __add__
        __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = __add__
        __ipow__ = __imatmul__ = __ilshift__ = __irshift__ = __iand__ = __ior__ = __ixor__ = __add__
        __lshift__ = __rshift__ = __and__ = __or__ = __xor__ = __add__
        __lt__ = __le__ = __gt__ = __ge__ = __add__
        __rdivmod__ = __divmod__
        __pos__ = __invert__ = __abs__ = __neg__
        sum = prod = min = max = any = all = mean = var = std = argmin = argmax = _method
        cumsum = cumprod = dot = trace = take = repeat = argsort = clip = round = astype = _method
        reshape = ravel = flatten = transpose = swapaxes = squeeze = copy = conj = _method
        conjugate = to_device = _method

        @property
        def T(self) -> DistArray: ...  # noqa: N802, D102 - NumPy's name

        @property
        def flat(self) -> Any: ...  # noqa: D102

        @flat.setter
        def flat(self, value: Any) -> None: ...

        mT = real = imag = T  # noqa: N815 - the standard's name

    # ---- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the whole array."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole array."""
        size = 1
        for length in self.layout.shape:
            size *= length
        return size

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.local.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.local.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, each element counted once."""
        return self.size * self.itemsize

    @property
    def process_mesh(self) -> ProcessMesh:
        """The mesh that it is spread over."""
        return self.layout.mesh

    @property
    def placements(self) -> list[Placement]:
        """The placement along each axis of the mesh."""
        return [*self.layout.placements]

    @property
    def device(self) -> str:
        """Where the parts are: ``"cpu"``, or the name of this rank's device."""
        engine = device_runtime_of(self.local)
        return "cpu" if engine is None else engine.name

    def is_dist(self) -> bool:
        """Return True."""
        return True

    # ---- one number

    def __len__(self) -> int:
        if not self.layout.shape:
            raise TypeError("len() of a DistArray without dimensions")
        return self.layout.shape[0]

    def __bool__(self) -> bool:
        return bool(self._one("its truth value"))

    def __int__(self) -> int:
        return int(self._one("int()"))

    def __float__(self) -> float:
        return float(self._one("float()"))

    def __complex__(self) -> complex:
        return complex(self._one("complex()"))

    def __index__(self) -> int:
        if self.layout.shape:
            raise TypeError(
                f"only an array without dimensions can be an index, not one of shape {self.shape}"
            )
        return self._one("an index").__index__()  # type: ignore[no-any-return]

    def _one(self, what: str) -> Any:
        if self.size != 1:
            raise UsageError(
                f"{what} needs an array of one element, but this DistArray has the shape "
                f"{self.shape}; reduce it first, for example by .sum(), .any() or .all()"
            )
        return self._whole(what).reshape(())

    # ---- to NumPy and to words

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        whole = self._whole("a NumPy array")
        if copy is None:
            return np.asarray(whole, dtype)
        wanted = self.local.dtype if dtype is None else np.dtype(dtype)
        if copy is False and (wanted != self.local.dtype or whole is not self.local):
            raise ValueError(f"a NumPy array of {wanted} needs a copy of {self.layout!r}")
        return np.array(whole, wanted, copy=copy)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        whole = self._whole("another library's array")
        if whole is not self.local:
            if copy is False:
                raise BufferError(f"an array that is whole needs a copy of {self.layout!r}")
            whole = whole.copy()  # one that may be written to
        given = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return whole.__dlpack__(**{key: each for key, each in given.items() if each is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.local.__dlpack_device__()
        return int(kind), int(number)

    def _check_here(self, what: str) -> None:
        """Refuse what needs values that this rank may not have."""
        if self.layout.is_replicated and self._box() is not None:
            return
        if self.layout.is_replicated:
            raise UsageError(
                f"{what} of a DistArray on {self.process_mesh} is asked for on a rank outside "
                "that mesh; reshard it onto a mesh that has all ranks first"
            )
        raise UsageError(
            f"{what} needs the whole array, but this rank has only its part of {self.layout!r}; "
            "call dist.unshard_dtensor(a) on all ranks of the mesh for a copy of the whole "
            f"({self.nbytes:,} bytes), or take this rank's part, a.local"
        )

    def _box(self) -> Any:
        """Return this rank's box of the array; None outside the mesh."""
        here = self.layout.mesh.coordinate if current_session() is not None else None
        return None if here is None else self.layout.box(here)

    def __repr__(self) -> str:
        places, box = ", ".join(map(repr, self.placements)), self._box()
        told = f"{self.shape}, {self.dtype}, [{places}] on {self.process_mesh}"
        if box is None:
            nothing = "" if current_session() is None else "; this rank has nothing"
            return f"DistArray({told}{nothing})"
        held = ", ".join(f"{lo}:{hi}" for lo, hi in box)
        return f"DistArray({told}; this rank has [{held}])\n{self.local!r}"

    def __format__(self, spec: str) -> str:
        if self.layout.shape:
            if spec:
                raise TypeError(f"a format such as {spec!r} is for one number, not {self.shape}")
            return repr(self)
        if not spec and (self._box() is None or not self.layout.is_replicated):
            return repr(self)
        return format(self._one("a format")[()], spec)

    # ---- copies

    def __copy__(self) -> DistArray:
        return DistArray._of(self.local.copy(), self.layout)

    def __deepcopy__(self, memo: Any) -> DistArray:
        return self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a DistArray cannot be pickled, because each rank has only its part of it: pickle "
            "dist.unshard_dtensor(a), or a.local and make it again by dist.dtensor_from_local"
        )


_new = object.__new__


def _refused(array: DistArray) -> NoReturn:
    raise UsageError(
        "a DistArray is not an array of one rank, though DLPack takes it for one if it is whole; "
        "pass this rank's part, a.local, or a copy of the whole, dist.unshard_dtensor(a)"
    )


register_library(DistArray, Library(_refused, np.asarray))
