"""`shard_dataloader`: the batches of a loader of one process, as arrays across the ranks of a mesh.

What is batched is as in one process: rank after rank, the parts of a batch are its samples in
their order. Arrays become `DistArray`s and torch's tensors DTensors, each by its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, final

from hpcdist.arrays.libraries import row_of
from hpcdist.comm.objects import tell_all
from hpcdist.errors import UsageError
from hpcdist.lazy import load
from hpcdist.mesh.api import dtensor_from_local
from hpcdist.mesh.placements import Placement, Replicate, Shard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.named_tuple import NamedTuple


class Place(NamedTuple):
    """Where the batches of this rank go: its mesh, and which part of them it has."""

    mesh: ProcessMesh
    axis: int | None
    part: int
    parts: int

    def rows(self, length: int) -> slice:
        """Return which rows of a batch of `length` are this rank's."""
        share = -(-length // self.parts)
        first = min(self.part * share, length)
        return slice(first, min(first + share, length))

    @property
    def placements(self) -> list[Placement]:
        """The placements of a batch."""
        return [Shard(0) if axis == self.axis else Replicate() for axis in range(self.mesh.ndim)]


class Part(NamedTuple):
    """What this rank has of a batch of `length` samples."""

    batch: Any
    length: int


def shard_dataloader(
    dataloader: Any,
    meshes: ProcessMesh | Sequence[ProcessMesh],
    input_keys: Sequence[str] | None = None,
    shard_dims: Sequence[str] | Sequence[int] | str | int | None = None,
    is_dataset_splitted: bool = False,
    dense_tensor_idx: Sequence[Sequence[int]] | None = None,
) -> ShardDataloader:
    """Spread the batches of a loader over meshes; together the ranks get those of one process.

    A ``torch.utils.data.DataLoader`` loads this rank's samples only; where it shuffles, the order
    is that of a `DistributedSampler`, the same on all ranks. From any other iterable of batches,
    each rank takes its rows. No sample is lost or repeated: a last batch that is smaller is cut as
    `Shard` cuts, so that some ranks may have no row of it.

    Args:
        dataloader: its batches are arrays or tensors, or dicts, lists or tuples of them, with one
            row per sample. The same on every rank, unless `is_dataset_splitted`.
        meshes: where the batches go; several: the first of them for the first entry of a batch, and
            so on. A rank gets None for entries that are on meshes without it.
        input_keys: the entries of a batch that is a dict, if there are several meshes.
        shard_dims: the axis of the mesh that cuts batches, or one for each mesh; None gives every
            rank whole batches.
        is_dataset_splitted: the loader has this rank's part of the data already; all parts of a
            batch must be as long as `Shard` cuts them, which is checked.
        dense_tensor_idx: for each entry of a batch, which of its tensors stay ordinary ones.

    Raises:
        UsageError: a wrong argument; a rank is in more than one mesh.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(world.ranks, ["dp"])
        >>> batches = [(np.ones((4, 2)), np.arange(4)), (np.ones((3, 2)), np.arange(3))]
        >>> loader = dist.shard_dataloader(batches, mesh, shard_dims="dp")
        >>> for x, y in loader:
        ...     print(x.shape, y.placements)
        (4, 2) [Shard(0)]
        (3, 2) [Shard(0)]

    """
    return ShardDataloader(
        dataloader, meshes, input_keys, shard_dims, is_dataset_splitted, dense_tensor_idx
    )


@final
class ShardDataloader:
    """Batches across ranks, one by one. Made by `shard_dataloader`.

    Attributes:
        mesh: the mesh that this rank is in.

    """

    def __init__(
        self,
        dataloader: Any,
        meshes: ProcessMesh | Sequence[ProcessMesh],
        input_keys: Sequence[str] | None = None,
        shard_dims: Sequence[str] | Sequence[int] | str | int | None = None,
        is_dataset_splitted: bool = False,
        dense_tensor_idx: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if is_dataset_splitted and shard_dims is None:
            raise UsageError("shard_dims must be set when is_dataset_splitted is True")
        self._meshes = _listed(meshes)
        self._keys = _keys(input_keys, self._meshes)
        self._place = _place_of(self._meshes, shard_dims)
        self._dense = [{*each} for each in dense_tensor_idx or ()]
        if not isinstance(dataloader, Iterable):
            raise UsageError(f"dataloader must be an iterable of batches, got {dataloader!r}")
        self._source: Any = (
            Source(dataloader, self._place, told_part)
            if is_dataset_splitted
            else _source_of(dataloader, self._place)
        )

    @property
    def mesh(self) -> ProcessMesh:
        """The mesh that this rank is in."""
        return self._place.mesh

    @property
    def axis(self) -> int | None:
        """The number of the axis of the mesh that cuts batches; None if none does."""
        return self._place.axis

    def __len__(self) -> int:
        """Return the number of batches, the same on all ranks."""
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        for part in self._source:
            yield self._spread(part)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`: a torch loader that shuffles has another order in each.

        Args:
            epoch: the number of the epoch, from 0.

        """
        set_epoch = getattr(self._source, "set_epoch", None)
        if set_epoch is None:
            raise UsageError(
                f"set_epoch({epoch!r}) is for a torch DataLoader that shuffles; the loader at hand "
                "has an order of its own"
            )
        set_epoch(epoch)

    def __repr__(self) -> str:
        mesh, axis = self._place.mesh, self._place.axis
        cut = "whole" if axis is None else f"cut along {mesh.names[axis]!r}"
        return f"ShardDataloader(batches {cut}, {mesh!r})"

    def _spread(self, part: Part) -> Any:
        """Return a batch across ranks, of what this rank has of it."""
        batch = part.batch
        if isinstance(batch, Mapping):
            return {
                key: self._entry(each, part.length, index)
                for index, (key, each) in enumerate(self._in_order(batch))
            }
        if isinstance(batch, (list, tuple)):
            return [self._entry(each, part.length, index) for index, each in enumerate(batch)]
        return self._entry(batch, part.length, 0)

    def _in_order(self, batch: Mapping[str, Any]) -> list[tuple[str, Any]]:
        missing = [key for key in self._keys or () if key not in batch]
        if missing:
            raise UsageError(
                f"input_keys has {missing[0]!r}, but a batch has {', '.join(map(str, batch))}"
            )
        return [(key, batch[key]) for key in self._keys or batch]

    def _entry(self, entry: Any, length: int, index: int) -> Any:
        mesh = self._meshes[min(index, len(self._meshes) - 1)]
        if mesh != self._place.mesh:
            return None
        dense = self._dense[index] if index < len(self._dense) else set()
        if isinstance(entry, (list, tuple)):
            return [
                each if number in dense else self._tensor(each, length)
                for number, each in enumerate(entry)
            ]
        return entry if 0 in dense else self._tensor(entry, length)

    def _tensor(self, value: Any, length: int) -> Any:
        if not getattr(value, "shape", ()):
            return value  # a number, a string: nothing to cut
        rows = self._place.rows(length)
        if value.shape[0] != rows.stop - rows.start:
            raise UsageError(
                f"this rank has {value.shape[0]} of the {length} rows of a batch, but must have "
                f"{rows.stop - rows.start}: arrays of a batch need one row per sample; name those "
                "that have none by dense_tensor_idx"
            )
        spread = _spreading(value)
        shape = (length, *value.shape[1:])
        return spread(value, self._place.mesh, self._place.placements, shape=shape)


_SPREADING = {("torch", "Tensor"): "hpcdist.torch.mesh:from_local"}
_SOURCES = {("torch", "DataLoader"): "hpcdist.torch.loader:source_of"}


def _spreading(value: Any) -> Callable[..., Any]:
    row = row_of(type(value), _SPREADING)
    return dtensor_from_local if row is None else load(row)


def _source_of(dataloader: Any, place: Place) -> Any:
    row = row_of(type(dataloader), _SOURCES)
    if row is None:
        return Source(dataloader, place, rows_of)
    return load(row)(dataloader, place)


# ---- where batches come from


@final
class Source:
    """The batches of a loader; `part_of` returns what this rank has of each."""

    def __init__(
        self, dataloader: Any, place: Place, part_of: Callable[[Any, Place], Part]
    ) -> None:
        self._dataloader, self._place, self._part_of = dataloader, place, part_of

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Part]:
        for batch in self._dataloader:
            yield self._part_of(batch, self._place)


def rows_of(batch: Any, place: Place) -> Part:
    """Return this rank's rows of a batch that every rank has as a whole."""
    length = length_of(batch)
    return Part(taken(batch, place.rows(length)), length)


def told_part(batch: Any, place: Place) -> Part:
    """Return this rank's part of a batch, of which every rank has its own. Collective."""
    assert place.axis is not None
    group = place.mesh.get_group(place.mesh.names[place.axis])
    own = place.part, length_of(batch)
    told: list[tuple[int, int]] = tell_all("a batch of a ShardDataloader", own, group)
    lengths = [length for _, length in sorted(told)]
    _check_lengths(lengths, place)
    return Part(batch, sum(lengths))


def _check_lengths(lengths: Sequence[int], place: Place) -> None:
    total = sum(lengths)
    cuts = [place._replace(part=part).rows(total) for part in range(len(lengths))]
    wanted = [rows.stop - rows.start for rows in cuts]
    if wanted != list(lengths):
        raise UsageError(
            f"the parts of a batch have {', '.join(map(str, lengths))} rows, but must have "
            f"{', '.join(map(str, wanted))}; split the dataset evenly, or let "
            "shard_dataloader do it"
        )


def length_of(batch: Any) -> int:
    """Return how many rows the arrays of a batch have."""
    for each in _leaves(batch):
        shape = getattr(each, "shape", ())
        if shape:
            return int(shape[0])
    raise UsageError(f"a batch needs an array with one row per sample, got {batch!r}")


def taken(batch: Any, rows: slice) -> Any:
    """Return the given rows of all arrays of a batch."""
    if isinstance(batch, Mapping):
        return {key: taken(each, rows) for key, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [taken(each, rows) for each in batch]
    return batch[rows] if getattr(batch, "shape", ()) else batch


def _leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        for each in batch:
            yield from _leaves(each)
    else:
        yield batch


# ---- arguments


def _listed(meshes: Any) -> list[ProcessMesh]:
    listed = [meshes] if isinstance(meshes, ProcessMesh) else meshes
    if not isinstance(listed, (list, tuple)) or not listed:
        raise UsageError(f"meshes must be a ProcessMesh or a list of them, got {meshes!r}")
    wrong = [each for each in listed if not isinstance(each, ProcessMesh)]
    if wrong:
        raise UsageError(f"meshes must be a ProcessMesh or a list of them, got {wrong[0]!r}")
    seen: dict[int, ProcessMesh] = {}
    for mesh in listed:
        for rank in mesh.ranks:
            if seen.setdefault(rank, mesh) != mesh:
                raise UsageError(f"process_id {rank} is in more than one mesh: {listed!r}")
    return list(listed)


def _keys(input_keys: Any, meshes: Sequence[ProcessMesh]) -> list[str] | None:
    if input_keys is None:
        return None
    if isinstance(input_keys, str) or not isinstance(input_keys, Sequence):
        raise UsageError(f"input_keys must be a list of keys, got {input_keys!r}")
    if len(meshes) > 1 and len(input_keys) != len(meshes):
        raise UsageError(
            f"input_keys must have a key for each of the {len(meshes)} meshes, got {input_keys!r}"
        )
    return list(input_keys)


def _place_of(meshes: Sequence[ProcessMesh], shard_dims: Any) -> Place:
    listed = shard_dims if isinstance(shard_dims, (list, tuple)) else [shard_dims] * len(meshes)
    if len(listed) == 1:
        listed = [*listed] * len(meshes)
    if len(listed) != len(meshes):
        raise UsageError(
            f"shard_dims must be the axis of the mesh or one for each of the {len(meshes)} meshes, "
            f"got {shard_dims!r}"
        )
    for mesh, dim in zip(meshes, listed, strict=True):
        place = mesh.coordinate
        if place is None:
            continue
        if dim is None:
            return Place(mesh, None, 0, 1)
        axis = mesh.axis(dim)
        return Place(mesh, axis, place[axis], mesh.sizes[axis])
    raise UsageError(
        f"this rank is in none of the meshes {list(meshes)!r}; call shard_dataloader on the ranks "
        "of the meshes only"
    )
