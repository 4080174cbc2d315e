"""`Model`: what one collective of one library takes, on any number of nodes; and `Network`.

The time on N nodes with L ranks each is a sum of products: what `costs` counts times seconds that
`fitting` finds, none below 0.

| term | counts | seconds per |
|---|---|---|
| ``rounds`` | rounds among the L ranks of a node | round (alpha) |
| ``shared`` | bytes through the memory of all ranks of a node | byte: one memory for all |
| ``core`` | bytes through the memory of one rank | byte: what its core does by itself |
| ``call`` | 1 | call |
| ``late`` | rounds, of arrays above a size | round: messages that are no longer sent at once |
| ``beyond`` | bytes as in ``shared``, above a number of them | byte: the cache is full |
| ``port_rounds``, ``port`` | rounds and bytes between nodes | round and byte of the network |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hpcdist.bench.costs import Algorithm, Cost, cost_of
from hpcdist.named_tuple import NamedTuple


class Network(NamedTuple):
    """What joins the nodes; the defaults are those of HDR InfiniBand, one port of 200 Gb/s a node.

    Attributes:
        alpha_s: seconds for a small message between two nodes.
        bytes_per_s: bytes per second through the port of a node, in each direction at once.

    """

    alpha_s: float = 1.5e-6
    bytes_per_s: float = 25e9

    def __str__(self) -> str:
        return f"network of {1e6 * self.alpha_s:g} us, {1e-9 * self.bytes_per_s:g} GB/s a node"


HDR = Network()


class Model(NamedTuple):
    """The fitted cost of one case of one library.

    Attributes:
        case: the collective, as in the rows; so are `library`, `dtype` and `memory`.
        seconds: of each term (see the module) that was fitted.
        late_from: arrays of more bytes pay ``late``.
        cache: bytes of all ranks of a node above which each pays ``beyond``.
        local: the largest number of ranks on one node that was measured.
        nodes: the largest number of nodes that was measured.
        sizes: the smallest and largest array measured; None where there is none (a barrier).
        residual: median relative error at the points it was fitted to.
        points: how many these were.

    """

    case: str
    library: str
    dtype: str | None
    memory: str | None
    seconds: Mapping[str, float]
    late_from: float
    cache: float
    local: int
    nodes: int
    sizes: tuple[int, int] | None
    residual: float
    points: int

    def network(self, default: Network = HDR) -> Network:
        """Return the network that was fitted, or `default` where one node was measured."""
        if self.nodes == 1:
            return default
        per_byte = self.seconds.get("port", 0.0)
        return Network(self.seconds.get("port_rounds", 0.0), 1 / per_byte if per_byte else math.inf)

    def time_of(self, local: int, nodes: int, nbytes: int, network: Network = HDR) -> float:
        """Return seconds on `nodes` nodes of `local` ranks for arrays of `nbytes`."""
        known = self.network(network)
        seconds = {**self.seconds, "port_rounds": known.alpha_s, "port": 1 / known.bytes_per_s}
        counts = counts_of(self._cost, local, nodes, nbytes, known, self.late_from, self.cache)
        return sum(seconds.get(term, 0.0) * count for term, count in counts.items())

    def travels(self, local: int, nodes: int) -> bool:
        """Return whether anything goes between the nodes; copying does not."""
        return any(each.rounds(local, nodes) > 0 for each in self._cost.between)

    @property
    def _cost(self) -> Cost:
        cost = cost_of(self.case, self.library)
        assert cost is not None
        return cost


def counts_of(
    cost: Cost,
    local: int,
    nodes: int,
    nbytes: int,
    network: Network,
    late_from: float,
    cache: float,
) -> dict[str, float]:
    """Return how often each term is paid."""
    rounds, moved = cost.rounds(local), cost.moved(local * nodes) * nbytes
    counts = {
        "rounds": rounds,
        "shared": local * moved,
        "core": moved,
        "call": 1.0,
        "late": rounds * (nbytes > late_from),
        "beyond": max(0.0, local * moved - cache),
    }
    if nodes > 1:
        best = _cheapest(cost.between, local, nodes, nbytes, network)
        counts["port_rounds"] = best.rounds(local, nodes)
        counts["port"] = best.port(local, nodes) * nbytes
    return counts


def _cheapest(
    algorithms: Sequence[Algorithm], local: int, nodes: int, nbytes: int, network: Network
) -> Algorithm:
    def seconds(each: Algorithm) -> float:
        sent_s = each.port(local, nodes) * nbytes / network.bytes_per_s
        return network.alpha_s * each.rounds(local, nodes) + sent_s

    return min(algorithms, key=seconds)
