"""Files of one array: `open_array` lets each rank read its box, `save_array` write one."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.boxes import slices
from hpcdist.checkpoint.blocks import opened, write_at
from hpcdist.checkpoint.host_copies import to_read
from hpcdist.checkpoint.storage import named, sync_folder
from hpcdist.checkpoint.together import of_group
from hpcdist.comm.alarms import is_alarm
from hpcdist.comm.session import require_session
from hpcdist.errors import CheckpointError, MismatchError, UsageError
from hpcdist.mesh.agreement import refuse
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout, layout_of
from hpcdist.mesh.placements import Placement, Shard
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh
from hpcdist.mesh.reducing import check_reducible, has_the_value, neutral_of
from hpcdist.mesh.reshard import reshard_to
from hpcdist.mesh.room import room_for
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an

# ---- reading


def open_array(
    source: str | os.PathLike[str],
    mesh: ProcessMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    dtype: Any = None,
    casting: str = "same_kind",
) -> DistArray:
    """Read an array from a file, each rank its own part. Collective over the mesh.

    What fails on one rank is raised on all of them. A rank outside the mesh looks at the file only
    for shape and dtype.

    Args:
        source: an ``.npy`` file, which is mapped into memory; a ``.zarr`` array, or one in a group
            as ``"f.zarr/name"`` or ``"f.zarr::name"``, by the extra ``hpcdist[zarr]``; or a dataset
            of an HDF5 file as ``"f.h5::/name"``, by the extra ``hpcdist[hdf5]``. The same on every
            rank.
        mesh: the ranks; None for `get_mesh()`, or all in a row if there is none.
        placements: what each axis of the mesh does; None to cut the first dimension over all ranks.
        dtype: of the result; None for that of the file.
        casting: which conversions to `dtype` are allowed, as in ``numpy.can_cast``; "unsafe"
            allows all, such as those of floats to integers.

    Raises:
        CheckpointError: the file is missing, damaged or of another kind; on every rank.
        UsageError: the placements do not fit, the source is of no known kind, or the library for
            it is not installed; on every rank.
        MismatchError: the ranks open different things; on every rank.

    Example:
        >>> import numpy as np, hpcdist as dist, os, tempfile
        >>> world = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "a.npy")
        ...     np.save(path, np.arange(6))
        ...     dist.open_array(path).local
        array([0, 1, 2, 3, 4, 5])

    """
    mesh = _as_mesh(mesh)
    found: list[DistArray] = []

    def read() -> str:
        found.append(_read(source, mesh, placements, dtype, casting))
        return f"{named(source)} as {found[0].dtype} {found[0].layout!r}"

    ranks = of_group(None if mesh.coordinate is None else mesh.group, words="hpcdist.open_array")
    ranks.decide(read, lambda told: _alike(told, ranks.ranks))
    return found[0]


def _as_mesh(mesh: Any) -> ProcessMesh:
    if mesh is None:
        return get_mesh() or ProcessMesh(require_session().world.ranks)
    if not isinstance(mesh, ProcessMesh):
        raise refuse(mesh, UsageError(f"the mesh must be a ProcessMesh, got {mesh!r}"))
    return mesh


def _alike(told: Sequence[str], ranks: Sequence[int]) -> list[None]:
    """Raise `MismatchError` where ranks say different things; return an answer for each."""
    for rank, words in zip(ranks, told, strict=True):
        if words != told[0]:
            raise MismatchError(
                f"the ranks mean different arrays: rank {ranks[0]} {told[0]}, but rank {rank} "
                f"{words}; let all ranks of the mesh make the same call"
            )
    return [None] * len(told)


def _read(
    source: str | os.PathLike[str],
    mesh: ProcessMesh,
    placements: Sequence[Placement] | None,
    dtype: Any,
    casting: str,
) -> DistArray:
    """Read this rank's part."""
    path, inside = _parted(named(source))
    with _format_of(path).open(path, inside) as stored:
        shape = tuple(stored.shape)
        kind = _as_dtype(stored.dtype if dtype is None else dtype, path)
        _check_casting(stored.dtype, kind, casting, path)
        if placements is None:
            placements = [Shard(0)] * (mesh.ndim if shape else 0)
        layout = layout_of(mesh, shape, placements)
        check_reducible(layout, kind)
        room, here = room_for(layout, np.empty(0), kind), mesh.coordinate
        if here is not None:
            _fill(room, stored, layout, path)
    return DistArray._of(room, layout)


def _as_dtype(dtype: Any, path: str) -> np.dtype[Any]:
    """Return a dtype of fixed size in native byte order."""
    try:
        return dtype_row(np.dtype(dtype).newbyteorder("=")).numpy
    except TypeError:
        raise UsageError(f"{path} cannot be opened as dtype {dtype!r}, which NumPy lacks") from None


def _check_casting(stored: Any, wanted: np.dtype[Any], casting: Any, path: str) -> None:
    if casting not in _CASTINGS:
        raise UsageError(f"casting must be one of {', '.join(_CASTINGS)}, got {casting!r}")
    if wanted != stored and not np.can_cast(stored, wanted, casting):
        raise UsageError(
            f"{path} has {stored}, which is not converted to {wanted} with casting={casting!r}; "
            "open it as it is, or allow it by casting='unsafe'"
        )


_CASTINGS = ("no", "equiv", "safe", "same_kind", "unsafe")


def _fill(room: Any, stored: Any, layout: Layout, path: str) -> None:
    here = layout.mesh.coordinate
    assert here is not None
    if not has_the_value(layout, here):
        room[...] = neutral_of(layout, room.dtype)
    elif room.size:
        with _naming(path):
            room[...] = stored[slices(layout.box(here))]


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Raise a library's error about a file as an error of all ranks."""
    try:
        yield
    except (CheckpointError, UsageError, FileNotFoundError, PermissionError, MemoryError):
        raise
    except Exception as error:  # libraries have errors of many kinds for damaged files
        if is_alarm(error):
            raise
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}; it may be damaged, or of "
            "another kind than its name says"
        ) from error


# ---- formats


class _Format(NamedTuple):
    """How files with these endings are opened: `open` yields what has shape, dtype and indices."""

    endings: tuple[str, ...]
    open: Callable[[str, str], Any]
    """A context manager; takes the path, and the name of the array in the file."""


@contextmanager
def _open_npy(path: str, inside: str) -> Iterator[Any]:
    if inside:
        raise UsageError(f"{path} holds one array without a name; leave out ::{inside}")
    with _naming(path):
        _check_regular(path)
        with _parsing:
            stored = np.lib.format.open_memmap(path, mode="r")
    yield stored


_parsing = threading.Lock()
"""Headers are parsed one at a time: Python 3.11 may fail where threads parse at once."""


@contextmanager
def _open_hdf5(path: str, inside: str) -> Iterator[Any]:
    h5py = _library("h5py", "hdf5", path)
    with _naming(path):
        _check_regular(path)
        file = h5py.File(path, "r")
    with file:
        with _naming(path):
            stored = file.get(inside) if inside else None
        if not isinstance(stored, h5py.Dataset):
            raise UsageError(
                f"{path} has no dataset {inside!r}, but {', '.join(file) or 'nothing'}; name one "
                f"as {path}::/name"
            )
        yield stored


@contextmanager
def _open_zarr(path: str, inside: str) -> Iterator[Any]:
    zarr = _library("zarr", "zarr", path)
    if not os.path.exists(path):
        raise FileNotFoundError(2, "No such file or directory", path)
    inside = inside.strip("/")
    is_there = not inside or os.path.exists(os.path.join(path, inside))
    with _naming(path):
        stored = zarr.open(store=path, path=inside, mode="r") if is_there else None
    if not isinstance(stored, zarr.Array):
        raise UsageError(
            f"{path} has no array {inside!r}, but {_arrays_in(path)}; name one as {path}/name"
        )
    yield stored


def _arrays_in(path: str) -> str:
    """Return the names of the first arrays in a group of Zarr's."""
    found: list[str] = []
    for base, folders, names in os.walk(path):
        folders.sort()
        if _has_array(base, names):
            folders.clear()  # these are chunks
            found += [os.path.relpath(base, path)] * (base != path)
        if len(found) > _SHOWN:
            break
    return ", ".join([*found[:_SHOWN], *["..."] * (len(found) > _SHOWN)]) or "none at all"


def _has_array(folder: str, names: Sequence[str]) -> bool:
    if "zarr.json" not in names:
        return ".zarray" in names
    with suppress(OSError, ValueError, AttributeError), open(f"{folder}/zarr.json") as file:
        return bool(json.load(file).get("node_type") == "array")
    return False


_SHOWN = 8


def _library(name: str, extra: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{path} is read by {name}, which is not installed here ({error}); install it, for "
            f"example by pip install 'hpcdist[{extra}]'"
        ) from error


_FORMATS = (
    _Format((".npy",), _open_npy),
    _Format((".h5", ".hdf5", ".nc"), _open_hdf5),
    _Format((".zarr",), _open_zarr),
)


def _parted(source: str) -> tuple[str, str]:
    """Return the path, and the name inside the file that follows it behind ``::``."""
    endings = "|".join(re.escape(ending) for each in _FORMATS for ending in each.endings)
    found = re.fullmatch(rf"(.*?(?:{endings})/?)(?:::(.*))?", source, re.DOTALL)
    found = found or re.fullmatch(r"(.*?\.zarr)/(.*)", source, re.DOTALL)  # as its folders have it
    return (found[1], found[2] or "") if found else (source, "")


def _check_regular(path: str) -> None:
    """Refuse what would keep a reader waiting, such as a FIFO."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(f"{path} is not a file; open_array reads regular files")


def _format_of(path: str) -> _Format:
    for each in _FORMATS:
        if path.rstrip("/").endswith(each.endings):
            return each
    known = ", ".join(ending for each in _FORMATS for ending in each.endings)
    raise UsageError(f"{path!r} does not end like a file of arrays; known are {known}")


# ---- writing


def save_array(path: str | os.PathLike[str], array: DistArray) -> None:
    """Write an array to one ``.npy`` file, each rank a part of it. Collective over the mesh.

    The file has the whole array, for `open_array` and for `numpy.load`. It appears when all is on
    disk; whatever fails before, what was there is unchanged. A symbolic link stays one: the file
    that it leads to is replaced. The parts travel first, so that each rank writes rows that follow
    each other: it takes memory for them, unless the array is cut in this way already.
    Contributions of a `Partial` are reduced.

    Args:
        path: a file in a folder that exists; the same on every rank.
        array: what to write.

    Raises:
        CheckpointError: it cannot be written; on every rank.
        UsageError: ``.npy`` has no such dtype, or the path ends otherwise; on every rank.
        MismatchError: the ranks write different arrays or files; on every rank.

    Example:
        >>> import numpy as np, hpcdist as dist, os, tempfile
        >>> world = dist.init_parallel_env()
        >>> a = dist.shard_tensor(np.eye(2), dist.ProcessMesh(world.ranks), [dist.Shard(1)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "a.npy")
        ...     dist.save_array(path, a)
        ...     np.load(path)
        array([[1., 0.],
               [0., 1.]])

    """
    if not isinstance(array, DistArray):
        wrong = UsageError(
            f"save_array writes a DistArray, got {an(type(array).__name__)}; numpy.save writes an "
            "array that one rank has"
        )
        raise refuse(None, wrong)
    mesh = array.process_mesh
    if mesh.coordinate is None:
        return
    ranks = of_group(mesh.group, words="hpcdist.save_array")

    def begin(told: Sequence[tuple[str, str]]) -> list[_Begun]:
        _alike([words for _, words in told], ranks.ranks)
        return [_begin(told[0][0], array)] * ranks.size

    begun = ranks.decide(lambda: _checked(path, array), begin)
    try:
        rows = reshard_to(array, layout_of(mesh, array.shape, [Shard(0)] * _cuts(array)))
        ranks.decide(
            lambda: _write(begun, rows),
            lambda _: _finish(begun, ranks.size),
            undo=lambda: _remove(begun.new),
        )
    except BaseException:
        if ranks.leads:
            _remove(begun.new)
        raise


class _Begun(NamedTuple):
    """A file that is being written under the name `new`; its elements begin after `start` bytes."""

    path: str
    new: str
    start: int


def _checked(path: str | os.PathLike[str], array: DistArray) -> tuple[str, str]:
    """Return the path, and in words what is written."""
    name = named(path)
    if not name.endswith(".npy"):
        raise UsageError(f"save_array writes .npy files, got {name!r}; end it in .npy")
    if np.dtype(array.dtype.str) != array.dtype and array.dtype.names is None:
        raise UsageError(
            f"an .npy file has no dtype {array.dtype}; hpcdist.checkpoint.save keeps it, and "
            "float32 is a dtype of .npy"
        )
    return name, f"{name} as {array.dtype} {array.layout!r}"


def _begin(path: str, array: DistArray) -> _Begun:
    """Make the file, with its header and of its size."""
    path = _behind_links(path)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header,
        {
            "descr": np.lib.format.dtype_to_descr(array.dtype),
            "fortran_order": False,
            "shape": array.shape,
        },
    )
    first = header.getvalue()
    begun = _Begun(path, f"{path}.{secrets.token_hex(6)}.new", len(first))
    try:
        with opened(begun.new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as fd:
            os.ftruncate(fd, len(first) + array.nbytes)
            write_at(fd, memoryview(first), 0)
            os.fsync(fd)
    except BaseException:
        _remove(begun.new)
        raise
    return begun


def _behind_links(path: str) -> str:
    """Return the path of the file that is replaced: a symbolic link stays one."""
    if not os.path.islink(path):
        return path
    target = os.path.realpath(path)
    if os.path.islink(target):
        raise CheckpointError(f"{path} is a symbolic link that leads only to other links")
    return target


def _cuts(array: DistArray) -> int:
    """Return how many axes of the mesh cut the first dimension when rows are written."""
    return array.process_mesh.ndim if array.ndim else 0


def _write(begun: _Begun, rows: DistArray) -> None:
    """Write the rows of this rank, and bring them to disk."""
    here = rows.process_mesh.coordinate
    assert here is not None
    if not rows.local.size or (not rows.ndim and any(here)):
        return
    before = rows.layout.box(here)[0][0] * (rows.size // rows.shape[0]) if rows.ndim else 0
    memory = to_read(rows.local, begun.path, 0, rows.local.size)
    with opened(begun.new, os.O_WRONLY | os.O_NOFOLLOW) as fd:
        write_at(fd, memory, begun.start + before * rows.itemsize)
        os.fsync(fd)


def _finish(begun: _Begun, size: int) -> list[None]:
    """Move the new file to its path; return an empty answer for each of `size` ranks."""
    os.replace(begun.new, begun.path)
    sync_folder(os.path.dirname(begun.path))
    return [None] * size


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
