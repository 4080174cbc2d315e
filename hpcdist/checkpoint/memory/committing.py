"""`commit`: keep what all ranks hold, and copies of it. Nothing is written to a disk.

Ranks tell each other in a few numbers how far they are. Only when what one of them holds is new do
they plan again. Then each copies its own parts, and sends its buddies what these do not have.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.checkpoint.holdings import Views, all_held, part_of
from hpcdist.checkpoint.memory.buddies import plan_buddies
from hpcdist.checkpoint.memory.keeping import Keeping, Kept, plan_keeping
from hpcdist.checkpoint.memory.random_state import random_state
from hpcdist.checkpoint.memory.vault import Block, Generation, Header, Vault
from hpcdist.checkpoint.plan import Held
from hpcdist.checkpoint.state import describe_state, merge_nodes
from hpcdist.comm.collectives import all_gather_into_tensor, alltoall_single
from hpcdist.comm.objects import all_to_all_object
from hpcdist.comm.together import Together
from hpcdist.errors import MismatchError
from hpcdist.named_tuple import NamedTuple


class _Planned(NamedTuple):
    """A plan, and what it was made for."""

    held: list[Held]
    place: tuple[Any, ...]
    keeping: Keeping


class _Taken(NamedTuple):
    """A state, taken apart."""

    header: Header
    views: Views
    held: list[Held]


class _Note(NamedTuple):
    """The numbers that ranks exchange at the begin of a commit."""

    failed: int
    is_new: int
    structure: int
    step: int
    run: int
    serial: int


def commit(ranks: Together, vault: Vault, state: Any, step: int, copies: int) -> None:
    """Keep `state` as that of `step`, with so many copies of each part. Collective.

    Raises:
        UsageError: something in the state cannot be kept; on every rank.
        MismatchError: the ranks differ about the step, or about what there is; on every rank.

    """
    taken, error = _take(state)
    nodes = nodes_of(ranks)
    place = (*ranks.ranks, *nodes, copies, vault.world_generation)
    known = vault.plan
    is_new = known is None or taken is None or known[:2] != (taken.held, place)
    note = _Note(
        error is not None,
        is_new,
        0 if taken is None else _digest(taken.header.structure),
        step,
        vault.run,
        vault.serial,
    )
    notes = [_Note(*row) for row in _gathered(ranks, note)]
    _check_notes(ranks, notes, error)
    assert taken is not None
    if len({each.structure for each in notes}) > 1:
        ranks.decide(
            lambda: taken.header.structure,
            lambda nodes: [merge_nodes(list(nodes), ranks.ranks) and None] * ranks.size,
        )
    if any(each.is_new for each in notes):
        buddies = plan_buddies(nodes, copies)
        keeping = ranks.decide(
            lambda: taken.held, lambda held: plan_keeping(held, ranks.ranks, buddies)
        )
        vault.plan = _Planned(taken.held, place, keeping)
    vault.begin(max(each.run for each in notes), max(each.serial for each in notes) + 1)
    vault.add(_generation(ranks, vault, taken, vault.plan.keeping, step))


def nodes_of(ranks: Together) -> Sequence[int]:
    """Return for each rank a number of its node."""
    transport = None if ranks.group is None else ranks.group.transport
    return (() if transport is None else transport.nodes) or [0] * ranks.size


def _take(state: Any) -> tuple[_Taken | None, Exception | None]:
    """Take a state apart; or return what is wrong with it, for all ranks to hear."""
    try:
        structure, views = describe_state(state)
        random, _ = describe_state(random_state())
        return _Taken(Header(structure, random), views, all_held(views)), None
    except Exception as error:
        return None, error


def _digest(structure: Any) -> int:
    return zlib.crc32(json.dumps(structure).encode())


def _gathered(ranks: Together, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all ranks. Collective."""
    mine = np.array(numbers, np.int64)
    if ranks.size == 1:
        return [mine.tolist()]
    everyone = np.empty((ranks.size, len(mine)), np.int64)
    all_gather_into_tensor(everyone.reshape(-1), mine, ranks.group)
    found: list[list[int]] = everyone.tolist()
    return found


def _check_notes(ranks: Together, notes: Sequence[_Note], error: Exception | None) -> None:
    """Raise an error of one rank on every rank. Collective if there is one."""

    def fail() -> None:
        if error is not None:
            raise error

    if any(each.failed for each in notes):
        ranks.share(fail)
    for rank, each in zip(ranks.ranks, notes, strict=True):
        if each.step != notes[0].step:
            raise MismatchError(
                f"rank {ranks.ranks[0]} commits step {notes[0].step}, but rank {rank} step "
                f"{each.step}; let all ranks commit after the same step"
            )


def _generation(
    ranks: Together, vault: Vault, taken: _Taken, keeping: Keeping, step: int
) -> Generation:
    own = vault.take(sum(each.nbytes for each in keeping.own))
    here = [vault.take(sum(each.nbytes for each in copied.here)) for copied in keeping.copies]

    def copy() -> None:
        _copy(keeping.own, taken.views, own)
        for copied, memory in zip(keeping.copies, here, strict=True):
            _copy(copied.here, taken.views, memory)

    _all_do(ranks, copy)
    headers = _exchange_headers(ranks, keeping, taken.header)
    sent = [
        memory
        for turn in range(len(keeping.sendings))
        for memory in _exchange(ranks, vault, keeping, turn, own)
    ]
    blocks = [
        Block(parts, memory)
        for copied, received, copies in zip(keeping.copies, sent, here, strict=True)
        for parts, memory in ((copied.sent, received), (copied.here, copies))
    ]
    return Generation(
        vault.run,
        vault.serial,
        step,
        ranks.size,
        ranks.rank,
        headers,
        [Block(keeping.own, own), *(block for block in blocks if block.parts)],
    )


def _copy(parts: Sequence[Kept], views: Views, memory: NumpyArray) -> None:
    begin = 0
    for share, _, nbytes in parts:
        if nbytes:
            source = part_of(share, views[share.name]).memory
            memory[begin : begin + nbytes] = np.frombuffer(source, np.uint8)
        begin += nbytes


def _all_do(ranks: Together, do: Any) -> None:
    """Call `do` on every rank; raise on all what one of them fails with. Collective."""
    error: Exception | None = None
    try:
        do()
    except Exception as reason:
        error = reason

    def fail() -> None:
        if error is not None:
            raise error

    if any(failed for (failed,) in _gathered(ranks, [error is not None])):
        ranks.share(fail)


def _exchange_headers(ranks: Together, keeping: Keeping, own: Header) -> dict[int, Header]:
    """Send this rank's header to its buddies; return it with those that were received."""
    headers = {ranks.rank: own}
    if keeping.sendings:
        buddies = {each.buddy for each in keeping.sendings}
        received: list[Header | None] = []
        sent = [own if rank in buddies else None for rank in range(ranks.size)]
        all_to_all_object(received, sent, ranks.group)
        headers |= {rank: each for rank, each in enumerate(received) if each is not None}
    return headers


def _exchange(
    ranks: Together, vault: Vault, keeping: Keeping, turn: int, own: NumpyArray
) -> list[NumpyArray]:
    """Send the first of this rank's parts to a buddy; return those of others, in their order."""
    sending = keeping.sendings[turn]
    arriving = {
        each.owner: sum(part.nbytes for part in each.sent)
        for each in keeping.copies
        if each.turn == turn
    }
    memory = vault.take(sum(arriving.values()))
    alltoall_single(
        memory,
        own[: sending.nbytes],
        ranks.group,
        in_split_sizes=_sizes({sending.buddy: sending.nbytes}, ranks.size),
        out_split_sizes=_sizes(arriving, ranks.size),
    )
    if len(arriving) == 1:
        return [memory]  # whole, so that it can be used again
    ends = [*accumulate(arriving.values())]
    return [memory[end - nbytes : end] for end, nbytes in zip(ends, arriving.values(), strict=True)]


def _sizes(nbytes: Mapping[int, int], size: int) -> list[int]:
    return [nbytes.get(rank, 0) for rank in range(size)]
