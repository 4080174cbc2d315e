"""`settle`: from the rows that ranks have read to a store that has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import barrier
from hpcdist.comm.together import Together
from hpcdist.config import read_config
from hpcdist.data.columns import Columns, Schema, same_schema
from hpcdist.data.layout import Extent, extent_of, laid, nbytes_of, nothing, pour, summed
from hpcdist.data.nodes import Nodes
from hpcdist.data.spill import Spill, node_memory
from hpcdist.data.store import Loaded, Parts, Store, Whole
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import volume


class Settled(NamedTuple):
    """Where rows are.

    Attributes:
        store: has them.
        schema: theirs.
        rows: how many each rank has read.
        nbytes: of all rows.
        in_files: whether they are in files.
        why_parted: why the ranks of a node do not share them, in a sentence.

    """

    store: Store
    schema: Schema
    rows: list[int]
    nbytes: int
    in_files: bool
    why_parted: str = ""


def settle(
    parts: list[Columns], ranks: Together, spill: Spill | None, schema: Schema | None = None
) -> Settled:
    """Make a store of what the ranks have read; it is empty in `parts` afterwards. Collective.

    Args:
        parts: this rank's rows, those of rank 0 first in the order of the files.
        ranks: the ranks.
        spill: where rows go that have no room.
        schema: of a rank without rows, if it is known.

    Raises:
        UsageError: ranks have read different columns.
        OSError: there is no room.

    """
    known = same_schema([rows.schema() for rows in parts]) if parts else schema
    told = ranks.share(lambda: (known, _extent(parts, known), _limits(spill)))
    schemas = [each for each, *_ in told if each is not None]
    common = same_schema(schemas) if schemas else ()
    extents = [extent if extent is not None else nothing(common) for _, extent, _ in told]
    limits = _Limits(*map(min, zip(*(each for *_, each in told), strict=True)))
    rows = [extent.rows for extent in extents]
    at, whole = summed(common, extents[: ranks.rank]), summed(common, extents)
    source = Loaded(parts, at.rows)
    nbytes, nodes = nbytes_of(common, whole), nodes_of(ranks)
    per_node = nbytes * nodes.most // ranks.size
    folder = spill.folder if spill is not None and per_node > limits.in_memory else None
    room = limits.shared * nodes.most
    memory = _memory_of_node(nbytes if nodes.are_one else 0, per_node, room, ranks, nodes, folder)
    settled = partial(Settled, schema=common, rows=rows, nbytes=nbytes, in_files=bool(folder))
    if isinstance(memory, str):
        apart = Parts(source, common, ranks, Nodes.apart(ranks.size), folder)
        return settled(apart, why_parted=memory)
    if not nodes.are_one:
        return settled(Parts(source, common, ranks, nodes, folder))
    return settled(_whole(memory, source, common, whole, at, ranks))


class _Limits(NamedTuple):
    """Bytes that each node has for rows; the least of all ranks, so that all go the same way."""

    in_memory: float
    """Of a node: more go to its files."""
    shared: float
    """For each rank, of memory that the ranks of a node share."""


def _limits(spill: Spill | None) -> _Limits:
    in_memory = math.inf if spill is None else spill.nbytes
    return _Limits(in_memory, read_config().shared_heap_mb * (1 << 20))


def _extent(parts: Sequence[Columns], schema: Schema | None) -> Extent | None:
    return None if schema is None else summed(schema, list(map(extent_of, parts)))


def nodes_of(ranks: Together) -> Nodes:
    """Return the ranks that are processes of one node, where that is known."""
    nodes = () if ranks.group is None else ranks.group.open_transport().nodes
    return Nodes.of(nodes or range(ranks.size))


def _memory_of_node(
    nbytes: int, per_node: int, room: float, ranks: Together, nodes: Nodes, folder: str | None
) -> NumpyArray | str:
    """Return so much memory that the ranks of a node share; why they cannot, in a sentence.

    On a node there are at most `per_node` bytes of rows, and `room` to share. Collective.
    """
    if folder is None and nodes.most > 1 and per_node > room:
        return (
            f"{volume(per_node)} of rows are more than the {volume(room)} that the "
            "ranks of this node may share (HPCDIST_SHARED_HEAP_MB for each), so they are "
            "exchanged through messages; allow more, or set spill="
        )
    memory = node_memory(nbytes, ranks, nodes, folder)
    if isinstance(memory, str):
        return f"the ranks of this node cannot share their rows ({memory}), so they exchange them"
    return memory


def _whole(
    memory: NumpyArray, source: Loaded, schema: Schema, extent: Extent, at: Extent, ranks: Together
) -> Whole:
    rows = laid(memory, schema, extent)
    for index in range(len(source)):
        at = pour(source.chunk(index)[0], rows, at)
        source.forget(index)
    if ranks.group is not None and ranks.size > 1:
        barrier(ranks.group)
    return Whole(rows, ranks.rank)
