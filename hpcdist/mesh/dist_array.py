"""`DistArray`: an array of which each rank of a mesh holds the part that a layout gives it.

Nothing here communicates. What arrays can do (operators, NumPy's functions) is put into the class
by the modules that know the rules.
"""

from __future__ import annotations

from typing import Any, NoReturn, final

import numpy as np

from hpcdist.arrays.device import device_runtime_of
from hpcdist.comm.session import current_session
from hpcdist.errors import UsageError
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.process_mesh import ProcessMesh


@final
class DistArray:
    """An array spread over the ranks of a mesh; each rank has its part of it.

    Made by `shard_tensor`, `dtensor_from_fn` and `dtensor_from_local`. What is told of it is of
    the whole array, and needs no communication.

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

    __slots__ = ("__weakref__", "layout", "local")
    __hash__ = None  # type: ignore[assignment]  # == compares elements

    local: Any
    layout: Layout

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "a DistArray is made from what the ranks have: shard_tensor takes the whole array on "
            "every rank, dtensor_from_local each rank's part, dtensor_from_fn what makes it"
        )

    @staticmethod
    def _of(local: Any, layout: Layout) -> DistArray:
        """Return the array with this part on this rank; the caller has checked that it fits."""
        made = _new(DistArray)
        made.local = local
        made.layout = layout
        return made

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
    def placements(self) -> tuple[Placement, ...]:
        """What each axis of the mesh does to it."""
        return tuple(self.layout.placements)

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

    def item(self) -> Any:
        """Return the one element of an array that has no other, as a Python number."""
        return self._one("item()").item()

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
                f"only an array without dimensions is an index, not one of shape {self.shape}"
            )
        return self._one("an index").__index__()  # type: ignore[no-any-return]

    def _one(self, what: str) -> Any:
        if self.size != 1:
            raise UsageError(
                f"{what} is of one element, but this DistArray has the shape {self.shape}; reduce "
                "it first, for example by .sum(), .any() or .all()"
            )
        self._check_here(what)
        return self.local.reshape(())

    # ---- to NumPy and to words

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        self._check_here("a NumPy array")
        if copy is None:
            return np.asarray(self.local, dtype)
        wanted = self.local.dtype if dtype is None else np.dtype(dtype)
        if copy is False and wanted != self.local.dtype:
            raise ValueError(f"a NumPy array of {wanted} needs a copy of the one of {self.dtype}")
        return np.array(self.local, wanted, copy=copy)

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
