"""`COSTS`: what each collective costs by the best algorithms known, one row per collective.

A cost counts latency *rounds* and bytes, in the tradition of Hockney (1994), whose time of a
message is ``alpha + bytes / bandwidth``; LogGP (Alexandrov, Ionescu, Schauser, Scheiman 1995)
calls the parts o + L and G. Bytes are counted twice: those that pass through the memory of a
rank, and those that pass through the network port of a node, in one direction. Combining what
arrives is in proportion to the bytes moved and is counted with them.

The rows follow Thakur, Rabenseifner, Gropp 2005 (Optimization of Collective Communication
Operations in MPICH) and Chan, Heimlich, Purkayastha, van de Geijn 2007 (Collective
communication: theory, practice, and experience). Between nodes there may be two algorithms, one
with few rounds and one with few bytes; the cheaper one counts.

All bytes are per byte of what a rank hands in: its own block for ``all_gather`` and ``gather``,
the whole input for ``reduce_scatter``, ``alltoall`` and (at the root) ``scatter``.
"""

from __future__ import annotations

from collections.abc import Callable

from hpcdist.named_tuple import NamedTuple


class Algorithm(NamedTuple):
    """How the nodes of a job exchange: both of (ranks on a node, nodes), at least two nodes."""

    rounds: Callable[[int, int], float]
    port: Callable[[int, int], float]
    """Bytes through the port of the busiest node, with all its ranks."""


class Cost(NamedTuple):
    """What one collective costs."""

    rounds: Callable[[int], float]
    """Latency rounds among the ranks of one node."""
    moved: Callable[[int], float]
    """Bytes through the memory of a rank, of all ranks of the job: what travels between nodes
    crosses the memory as well."""
    between: tuple[Algorithm, ...]


def log2(count: int) -> int:
    """Return how many times `count` things must be halved: the rounds of a tree."""
    return max(0, count - 1).bit_length()


def _tree(local: int, nodes: int) -> float:
    return log2(nodes)


def _others(count: int) -> float:
    """Return the share of everyone but oneself."""
    return (count - 1) / count


# Every rank of a node has a slice of its own: reduce-scatter inside the node, all_reduce of the
# slices between nodes, all at the same time, all-gather inside.
_SLICES = (
    Algorithm(_tree, lambda local, nodes: log2(nodes)),  # recursive doubling
    Algorithm(lambda local, nodes: 2 * log2(nodes), lambda local, nodes: 2 * _others(nodes)),
)
_BLOCKS = (Algorithm(_tree, lambda local, nodes: local * (nodes - 1)),)

COSTS: dict[str, Cost] = {
    "all_reduce": Cost(log2, lambda ranks: 2 * _others(ranks), _SLICES),
    "reduce": Cost(log2, lambda ranks: 2 * _others(ranks), _SLICES),
    "reduce_scatter": Cost(log2, _others, (Algorithm(_tree, lambda _, nodes: _others(nodes)),)),
    "broadcast": Cost(
        log2,
        lambda ranks: float(ranks > 1),
        (
            Algorithm(_tree, lambda local, nodes: log2(nodes)),  # a binomial tree
            Algorithm(  # scatter and all-gather
                lambda local, nodes: log2(nodes) + nodes - 1,
                lambda local, nodes: 2 * _others(nodes),
            ),
        ),
    ),
    "all_gather": Cost(log2, lambda ranks: ranks - 1, _BLOCKS),
    "gather": Cost(log2, lambda ranks: ranks - 1, _BLOCKS),
    "scatter": Cost(log2, _others, (Algorithm(_tree, lambda _, nodes: _others(nodes)),)),
    "alltoall": Cost(
        lambda ranks: ranks - 1,
        _others,
        (
            Algorithm(_tree, lambda local, nodes: local * log2(nodes) / 2),  # Bruck et al. 1997
            Algorithm(  # pairwise: a message to each rank elsewhere
                lambda local, nodes: local * (nodes - 1),
                lambda local, nodes: local * _others(nodes),
            ),
        ),
    ),
    "scan": Cost(log2, log2, (Algorithm(_tree, lambda local, nodes: local * log2(nodes)),)),
    "exscan": Cost(log2, log2, (Algorithm(_tree, lambda local, nodes: local * log2(nodes)),)),
    "barrier": Cost(log2, lambda _: 0.0, (Algorithm(_tree, lambda *_: 0.0),)),
    # one message between two ranks, on different nodes where there are several
    "latency": Cost(
        lambda ranks: float(ranks > 1),
        lambda ranks: float(ranks > 1),
        (Algorithm(lambda *_: 1.0, lambda *_: 1.0),),
    ),
}
_VARIANTS = {"all_gather_list": "all_gather", "alltoall_single": "alltoall"}
COPY = Cost(lambda _: 1.0, lambda _: 1.0, (Algorithm(lambda *_: 0.0, lambda *_: 0.0),))
"""The limit: every rank copies its bytes once."""

_UNAGREED = "barrier", "latency"
"""What hpcdist does without an agreement before it; a barrier is an agreement."""


def cost_of(case: str, library: str) -> Cost | None:
    """Return the row of a case of the benchmark, None if it has none.

    In hpcdist the ranks agree before a collective, which costs another tree of rounds.

    Example:
        >>> cost_of("all_reduce", "mpi4py").moved(4)
        1.5

    """
    if library == "copy":
        return COPY
    name = _VARIANTS.get(case, case)
    cost = COSTS.get(name)
    if cost is None or library != "hpcdist" or name in _UNAGREED:
        return cost
    return cost._replace(between=tuple(_agreed(each) for each in cost.between))


def _agreed(algorithm: Algorithm) -> Algorithm:
    return algorithm._replace(
        rounds=lambda local, nodes: algorithm.rounds(local, nodes) + log2(nodes)
    )
