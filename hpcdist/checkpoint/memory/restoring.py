"""`restore`: bring a state back to what was committed, on whatever ranks there are now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.boxes import strides_of
from hpcdist.checkpoint.boxes import Box
from hpcdist.checkpoint.copies import Copy
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.loading import compare, load_all, load_small, what_is_wanted
from hpcdist.checkpoint.matching import GROWING
from hpcdist.checkpoint.memory.choice import Choice, Nothing, choose
from hpcdist.checkpoint.memory.committing import nodes_of
from hpcdist.checkpoint.memory.moves import Move, Moves, Wish, plan_moves
from hpcdist.checkpoint.memory.random_state import set_random_state
from hpcdist.checkpoint.memory.vault import Catalog, Vault
from hpcdist.checkpoint.nodes import Node, build
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.reading import Wish as Filled, finisher, put, target_of
from hpcdist.comm.collectives import alltoall_single
from hpcdist.comm.together import Together
from hpcdist.named_tuple import NamedTuple


class Found(NamedTuple):
    """The step that all ranks go back to, as a rank learns of it."""

    run: int
    serial: int
    step: int
    structure: Node
    arrays: dict[str, Array]
    random: Node | None
    is_full: bool


def find(ranks: Together, vault: Vault, known: list[Choice]) -> Found | Nothing:
    """Agree on the step to go back to. Collective; the first rank notes its choice in `known`."""

    def decide(everyone: Sequence[list[Catalog]]) -> Sequence[Found | Nothing]:
        made = choose(everyone)
        if isinstance(made, Nothing):
            return [made] * ranks.size
        known.append(made)
        run, serial, step, structure, arrays, _, random, is_full = made
        return [Found(run, serial, step, structure, arrays, own, is_full) for own in random]

    return ranks.decide(vault.catalogs, decide)


def restore(
    ranks: Together, vault: Vault, state: Any, found: Found, known: Sequence[Choice]
) -> None:
    """Fill `state` with what was committed, in all bits. Collective.

    Args:
        ranks: those that restore.
        vault: what this rank keeps.
        state: what is filled, as by `checkpoint.load`.
        found: what `find` has returned.
        known: and noted.

    Raises:
        CheckpointError: the state is not like the one that was committed; on every rank, and
            nothing has changed.

    """
    where = f"what was committed in memory as step {found.step}"
    compared = compare(ranks, state, found.structure, found.arrays, where, what_is_wanted, GROWING)
    wanted = [(name, each) for name, parts in compared.matching.wanted.items() for each in parts]
    nodes = nodes_of(ranks)
    moves = ranks.decide(
        lambda: [Wish(name, each.box) for name, each in wanted],
        lambda wishes: plan_moves(known[0].stored, wishes, found.arrays, nodes),
    )
    load_small(ranks, compared.early)
    filled = [Filled(name, target_of(each, name, found.arrays), ()) for name, each in wanted]
    _bring(ranks, vault.bytes_of(found.serial), moves, filled, found.arrays)
    finish = finisher(filled)
    ranks.share(lambda: load_all(compared.late, finish))
    compared.fill(finish)
    if found.random is not None:
        set_random_state(build(found.random, _no_array))
    vault.run, vault.serial = found.run, max(vault.serial, found.serial)
    vault.keep_only(found.serial)


def _no_array(kind: str, name: str) -> Any:
    raise KeyError(name)


# ---- what travels


_Kept = dict[tuple[str, Box], NumpyArray]


def _bring(
    ranks: Together,
    kept: _Kept,
    moves: Moves,
    filled: Sequence[Filled],
    arrays: dict[str, Array],
) -> None:
    """Copy what is here, and exchange the rest. Collective."""
    itemsizes = {name: dtype_of_name(each.dtype).itemsize for name, each in arrays.items()}
    for each in moves.here:
        memory = filled[each.wish].target.memory
        put(each.copy, kept[each.name, each.box], 0, memory, itemsizes[each.name])
    for number in range(moves.rounds):
        sent = [each for each in moves.sent if each.round == number]
        received = [each for each in moves.received if each.round == number]
        outgoing = _packed(sent, kept, itemsizes)
        incoming = np.empty(sum(each.nbytes for each in received), np.uint8)
        alltoall_single(
            incoming,
            outgoing,
            ranks.group,
            in_split_sizes=_sizes([(each.target, each.nbytes) for each in sent], ranks.size),
            out_split_sizes=_sizes([(each.source, each.nbytes) for each in received], ranks.size),
        )
        begin = 0
        for each in sorted(received, key=lambda move: move.source):
            source, memory = incoming[begin : begin + each.nbytes], filled[each.wish].target.memory
            put(_from_run(each.copy), source, 0, memory, itemsizes[each.name])
            begin += each.nbytes


def _packed(sent: Sequence[Move], kept: _Kept, itemsizes: dict[str, int]) -> NumpyArray:
    """Return what is sent, one behind the other, in the order of the ranks that get it."""
    memory = np.empty(sum(each.nbytes for each in sent), np.uint8)
    begin = 0
    for each in sorted(sent, key=lambda move: move.target):
        into = memory[begin : begin + each.nbytes]
        put(_to_run(each.copy), kept[each.name, each.box], 0, into, itemsizes[each.name])
        begin += each.nbytes
    return memory


def _to_run(copy: Copy) -> Copy:
    """Return the copy of the same elements to memory in which they follow each other."""
    return copy._replace(target=0, target_strides=strides_of(copy.lengths))


def _from_run(copy: Copy) -> Copy:
    return copy._replace(source=0, source_strides=strides_of(copy.lengths))


def _sizes(moves: Sequence[tuple[int, int]], size: int) -> list[int]:
    """Return how many bytes there are for each rank."""
    sizes = [0] * size
    for rank, nbytes in moves:
        sizes[rank] += nbytes
    return sizes
