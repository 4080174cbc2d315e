"""`Sockets`: what calls between ranks (`hpcdist.rpc`) would go by. Local."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from hpcdist.diagnostics.machine import named
from hpcdist.diagnostics.problem import Check, Problem
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.rpc.links import Address, Door, door_on_node, own_networks, reason
from hpcdist.rpc.networks import addresses


class Sockets(NamedTuple):
    """What a rank may open.

    Attributes:
        host: the node.
        networks: names and addresses by which others would try this rank, the best first.
        why_not: why it cannot listen inside its node, or between nodes.
        by_value: whether functions without a name can be sent.

    """

    host: str = ""
    networks: tuple[str, ...] = ()
    why_not: str = ""
    by_value: bool = True


def try_sockets(host: str, wanted: str | None) -> Sockets:
    """Open what `init_rpc` would open, and close it; `wanted` are the networks of the settings."""
    by_value = find_spec("cloudpickle") is not None
    try:
        door_on_node().close()
        networks = own_networks()
        names = {address: name for name, address in networks.items()}
        chosen = addresses(networks, wanted)
        for address in chosen:
            Door(Address(address)).close()
    except OSError as error:
        return Sockets(host, (), reason(error), by_value)
    except UsageError as error:
        return Sockets(host, (), str(error), by_value)
    return Sockets(host, tuple(f"{names[each]} ({each})" for each in chosen), "", by_value)


# ---- judgement; pure


def describe_sockets(ranks: Sequence[Sockets], *, one_node: bool) -> str:
    """Describe the sockets and networks by which calls travel.

    Example:
        >>> here, there = Sockets("a", ("ib0 (10.0.0.1)",)), Sockets("b", ("ib0 (10.0.0.2)",))
        >>> describe_sockets([here, there], one_node=False)
        'Unix sockets in a node, TCP between nodes by ib0'

    """
    text = "Unix sockets"
    if not one_node:
        networks = dict.fromkeys(rank.networks[0].split()[0] for rank in ranks if rank.networks)
        text += f" in a node, TCP between nodes by {', '.join(networks) or 'no network'}"
    if not all(rank.by_value for rank in ranks):
        text += "; no cloudpickle, so functions without a name cannot be sent"
    return text


def socket_problems(ranks: Sequence[Sockets]) -> Iterator[Problem]:
    """Give what keeps ranks from calling each other."""
    reasons: dict[str, list[str]] = {}
    for rank in ranks:
        if rank.why_not:
            reasons.setdefault(rank.why_not, []).append(rank.host)
    for why, hosts in reasons.items():
        what, _, remedy = why.partition("; there are ")
        yield Problem(
            Check.CALLS,
            False,
            f"on {named(list(dict.fromkeys(hosts)))} ranks cannot listen for calls: {what}",
            f"there are {remedy}" if remedy else "init_rpc(link='mpi') sends them by MPI",
        )
