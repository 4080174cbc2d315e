"""`verify_states`: whether all ranks have the same arrays, and if not, where they first differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from hpcdist.arrays.buffer import Buffer
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.dispatch import decline
from hpcdist.comm.group import Group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.session import resolve_group
from hpcdist.errors import MismatchError, UsageError
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp

T = TypeVar("T")
State = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype of one array, in words that all ranks can compare."""

_REMEDIES = {
    "parameter": "Build the same model, with the same layers in the same order, on every rank",
    "gradient": "Let the same parameters have a gradient on every rank",
    "value": "Pass the same keys, with values of the same kinds, on every rank",
    "array": "Pass trees of the same structure, shapes and dtypes on every rank",
    "file": "List the same files in the same order on every rank; sorted() makes an order",
    "layer": "Make the same layers, with the same arguments and cut in the same way, on every rank",
    "optimizer": "Give fleet.distributed_optimizer one of the same class on every rank",
    "input": "Let ranks that share each layer (mp) read the same samples: give their sampler the "
    "rank along dp",
    "option": "Make the optimizer of the same parameters, with the same options, on every rank",
    "group": "Add the same parameters, with the same options, on every rank",
    "condition": "Give DataParallel the same virtual_ranks and seed, group_sharded_parallel the "
    "same level, and torch as many threads, on every rank",
    "setting": "Give fleet.init the same strategy and degrees on every rank",
}


def verify_states(
    named: Iterable[State],
    group: Group | None = None,
    noun: str = "parameter",
    error: UsageError | None = None,
) -> None:
    """Check that all ranks have the same arrays, in the same order. Collective over `group`.

    Args:
        named: name, shape and name of the dtype of each array.
        group: the ranks to compare; None for all.
        noun: what they are, for the message: a key of `_REMEDIES`.
        error: why this rank cannot go on, if it cannot; every rank then raises.

    Raises:
        MismatchError: two ranks differ; on every rank, naming the first difference.
        UsageError: this rank gave `error`.
        RemoteError: another rank did.

    """
    group = resolve_group(group)
    if error is not None:
        decline(group, Kind.ALL_REDUCE, error)
    states = tuple((str(name), tuple(shape), str(dtype)) for name, shape, dtype in named)
    everyone = differing(states, group)
    if everyone is not None:
        raise MismatchError(first_difference(everyone, group.ranks, noun))


def differing(told: tuple[T, ...], group: Group) -> list[tuple[T, ...]] | None:
    """Return what all ranks tell, if any two tell different things; else None. Collective.

    The ranks compare a digest, and tell the rest only where the digests differ.
    """
    mark = _digest(told)
    extremes = np.array([mark, -mark])
    all_reduce(extremes, ReduceOp.MIN, group)
    return None if extremes[0] == -extremes[1] else tell_all("a comparison", told, group)


@contextmanager
def verifying(group: Group | None = None, noun: str = "parameter") -> Iterator[list[State]]:
    """Look at what this rank was given, in a block; then `verify_states`. Collective at its end.

    The block adds the states that are compared to its list. A `UsageError` in it waits until all
    ranks are at the end, and is raised on every rank, as that of `verify_states`: one that left at
    once would leave the others waiting. In the block nothing may communicate.

    Args:
        group: as in `verify_states`.
        noun: as in `verify_states`.

    """
    states: list[State] = []
    problem = None
    try:
        yield states
    except UsageError as error:
        problem = error
    verify_states(states, group, noun, problem)


@lru_cache(maxsize=64)
def _digest(told: tuple[Any, ...]) -> int:
    return int.from_bytes(blake2b(repr(told).encode(), digest_size=7).digest(), "little")


def first_difference(
    everyone: Sequence[Sequence[State]], ranks: Sequence[int], noun: str = "parameter"
) -> str:
    """Return where the states of two of the `ranks` first differ, and what to do about it."""
    for position, states in enumerate(zip_longest(*everyone)):
        for rank, state in zip(ranks, states, strict=True):
            if state != states[0]:
                return (
                    f"the ranks have different {noun}s; the first difference is {noun} {position}, "
                    f"counted from 0: rank {ranks[0]} has {_describe_state(states[0])}, but rank "
                    f"{rank} has {_describe_state(state)}. {_REMEDIES[noun]}"
                )
    return f"the ranks have different {noun}s"


def _describe_state(state: State | None) -> str:
    if state is None:
        return "no more"
    name, shape, dtype = state
    return f"{name!r} of shape {shape}, {dtype}" if dtype else repr(name)


def state_of(name: str, buffer: Buffer) -> State:
    """Return what ranks compare of an array."""
    return name, buffer.shape, buffer.dtype.name
