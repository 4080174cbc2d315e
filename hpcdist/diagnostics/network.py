"""What lies between the nodes: how their clocks differ, how fast each pair of them is.

One rank of each node measures. Pairs exchange large messages in the rounds of a tournament, so that
they are measured side by side and no node is in two of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median_high
from typing import Any

import numpy as np

from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.mpi import load_mpi

BUDGET_S = 2.0
"""Seconds for which pairs of nodes are measured."""
SLOW = 0.5
"""A pair is slow below this part of the median."""
_NBYTES = 1 << 20
_ROUND_TRIPS = 8
_AGAIN = 8
"""How many pairs that seem slow are measured again at most."""
_TAG = 7


class Link(NamedTuple):
    """How fast messages of 1 MiB go between two nodes, named by their numbers."""

    nodes: tuple[int, int]
    bytes_per_s: float


class Network(NamedTuple):
    """What was measured between the nodes.

    Attributes:
        names: of the nodes, by their numbers.
        skews: seconds by which the clock of each node is ahead of the first one's.
        links: of the pairs that were measured, in at most `BUDGET_S`.

    """

    names: tuple[str, ...] = ()
    skews: tuple[float, ...] = ()
    links: tuple[Link, ...] = ()


def measure(comm: Any, nodes: Sequence[int], names: Sequence[str] | None) -> Network | None:
    """Return what lies between the nodes, None except on rank 0. Collective over `comm`.

    Args:
        comm: an mpi4py communicator.
        nodes: for each rank the first rank of its node.
        names: of the ranks' nodes; needed on rank 0.

    """
    first = nodes[comm.rank] == comm.rank
    leaders = comm.Split(0 if first else load_mpi().UNDEFINED, comm.rank)
    if not first:
        return None
    try:
        skews, links = measure_skews(leaders), measure_links(leaders)
    finally:
        leaders.Free()
    if names is None or skews is None or links is None:
        return None
    return Network(_distinct([names[rank] for rank in sorted(set(nodes))]), skews, links)


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Give different names to nodes that have the same one."""
    if len(set(names)) == len(names):
        return tuple(names)
    return tuple(f"{name}/{number}" for number, name in enumerate(names))


# ---- clocks


def measure_skews(comm: Any) -> tuple[float, ...] | None:
    """Return by how many seconds each rank's clock is ahead of rank 0's; None elsewhere.

    Collective. The time there is compared with the middle of a round trip, of which the shortest
    counts. Reference: D. L. Mills, Internet Time Synchronization, 1991.
    """
    if comm.rank:
        for _ in range(_ROUND_TRIPS):
            comm.Recv(np.empty(1), source=0, tag=_TAG)
            comm.Send(np.array([time.time()]), dest=0, tag=_TAG)
        return None
    return (0.0, *(_skew(comm, peer) for peer in range(1, comm.size)))


def _skew(comm: Any, peer: int) -> float:
    there = np.empty(1)
    found = []
    for _ in range(_ROUND_TRIPS):
        began = time.time()
        comm.Send(there, dest=peer, tag=_TAG)
        comm.Recv(there, source=peer, tag=_TAG)
        ended = time.time()
        found.append((ended - began, float(there[0]) - (began + ended) / 2))
    return min(found)[1]


# ---- bandwidth


def pairings(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which each of `count` players meets each other one once.

    Reference: the circle method of round-robin tournaments.

    Example:
        >>> pairings(3)
        [[(1, 2)], [(0, 2)], [(0, 1)]]

    """
    players = list(range(count)) + [-1] * (count % 2)
    half, rounds = len(players) // 2, []
    for _ in range(len(players) - 1):
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        players = [players[0], players[-1], *players[1:-1]]
    return rounds


def measure_links(comm: Any, budget_s: float = BUDGET_S) -> tuple[Link, ...] | None:
    """Return the links between all ranks of `comm`, None except on rank 0. Collective.

    After `budget_s` no further round begins. A pair that seems slow is measured again, with nothing
    beside it, and the better figure counts.
    """
    rounds = pairings(comm.size)
    began, own = time.perf_counter(), []
    for pairs in rounds:
        if not comm.bcast(time.perf_counter() - began < budget_s):
            break
        own += _play(comm, pairs, budget_s / len(rounds))
    found = _gather(comm, own)
    seen = {link.nodes: link.bytes_per_s for link in found}
    for link in comm.bcast(slow_links(found)[:_AGAIN]):
        (again,) = _gather(comm, _play(comm, [link.nodes], budget_s / _AGAIN)) or (link,)
        seen[link.nodes] = max(link.bytes_per_s, again.bytes_per_s)
    links = tuple(Link(nodes, rate) for nodes, rate in seen.items())
    return links if comm.rank == 0 else None


def _play(comm: Any, pairs: Sequence[tuple[int, int]], limit_s: float) -> list[Link]:
    """Return this rank's link in a round, if it is the first of a pair."""
    pair = next((pair for pair in pairs if comm.rank in pair), None)
    if pair is None:
        return []
    rate = _exchange(comm, pair, limit_s)
    return [Link(pair, rate)] if comm.rank == pair[0] else []


def _gather(comm: Any, own: list[Link]) -> list[Link]:
    """Return the links of all ranks in order on rank 0, none elsewhere. Collective."""
    return sorted(link for links in comm.gather(own) or () for link in links)


def _exchange(comm: Any, pair: tuple[int, int], limit_s: float) -> float:
    """Return the bytes per second between this rank and its partner, from the best round trip."""
    peer = sum(pair) - comm.rank
    message = np.zeros(_NBYTES, np.uint8)
    _round_trip(comm, pair, peer, message[:1])  # connects
    first_s = _round_trip(comm, pair, peer, message)
    count = np.array([max(1, min(_ROUND_TRIPS, int(limit_s / first_s)))])
    if comm.rank == pair[0]:
        comm.Send(count, dest=peer, tag=_TAG)
    else:
        comm.Recv(count, source=peer, tag=_TAG)
    times = [_round_trip(comm, pair, peer, message) for _ in range(int(count[0]))]
    return 2 * _NBYTES / min(first_s, *times)


def _round_trip(comm: Any, pair: tuple[int, int], peer: int, message: Any) -> float:
    began = time.perf_counter()
    if comm.rank == pair[0]:
        comm.Send(message, dest=peer, tag=_TAG)
        comm.Recv(message, source=peer, tag=_TAG)
    else:
        comm.Recv(message, source=peer, tag=_TAG)
        comm.Send(message, dest=peer, tag=_TAG)
    return time.perf_counter() - began


# ---- judgement; pure


def middle(links: Sequence[Link]) -> float:
    """Return the median of the links in bytes per second; of an even number the faster one."""
    return median_high(link.bytes_per_s for link in links)


def slow_links(links: Sequence[Link]) -> list[Link]:
    """Return the links slower than half the median; of one or two none can be called slow.

    Example:
        >>> links = [Link((0, 1), 9e9), Link((0, 2), 1e9), Link((1, 2), 8e9)]
        >>> slow_links(links)
        [Link(nodes=(0, 2), bytes_per_s=1000000000.0)]

    """
    if len(links) < 3:
        return []
    limit = SLOW * middle(links)
    return [link for link in links if link.bytes_per_s < limit]


def slow_nodes(links: Sequence[Link]) -> list[int]:
    """Return the nodes that are slow to every other node while others are not."""
    slow = {link.nodes for link in slow_links(links)}
    nodes = {node for link in links for node in link.nodes}
    own = {node: {link.nodes for link in links if node in link.nodes} for node in nodes}
    return sorted(node for node in nodes if len(own[node]) > 1 and own[node] <= slow)
