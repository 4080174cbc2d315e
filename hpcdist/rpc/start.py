"""`init_rpc`, `shutdown`: the ranks meet by MPI, and from then on call each other by sockets."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpcdist.comm.collectives import barrier
from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.group import Group
from hpcdist.comm.making import limited
from hpcdist.comm.session import Session, current_session, require_session
from hpcdist.comm.together import together
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.named_tuple import NamedTuple
from hpcdist.rpc import trust
from hpcdist.rpc.agent import AGENT, Agent, limit_of, require_agent
from hpcdist.rpc.links import Address, Door, door_on_node, own_networks
from hpcdist.rpc.names import Directory, WorkerInfo, check_name
from hpcdist.rpc.networks import addresses
from hpcdist.rpc.reception import Reception
from hpcdist.rpc.switchboard import Contact, Setup
from hpcdist.runtime.mpi import load_mpi


class _Introduction(NamedTuple):
    """What a rank tells the others at the start."""

    contact: Contact
    token: bytes
    link: str


def init_rpc(
    name: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    master_endpoint: str | None = None,
    *,
    group: Group | None = None,
    threads: int = 8,
    max_threads: int = 64,
    interface: str | None = None,
    link: str = "auto",
    max_links: int | None = None,
) -> None:
    """Let this rank call the others, and be called by them. Collective over the group.

    Calls `init_parallel_env` if that has not been done.

    Args:
        name: how others call this rank; ``"worker"`` and its rank by default. Names differ.
        rank: this rank, which the launcher has set already; anything else is an error.
        world_size: the number of ranks, likewise.
        master_endpoint: accepted for Paddle's sake; MPI has met the ranks.
        group: the ranks that take part; None for all.
        threads: how many threads stay when there is nothing to do.
        max_threads: how many calls this rank runs at a time, not counting those that wait for calls
            of their own.
        interface: the network between nodes, as ``"ib0"`` or an address; default: any by which the
            ranks reach each other, or ``HPCDIST_RPC_INTERFACE``.
        link: ``"auto"``: Unix sockets inside a node, TCP between nodes; ``"tcp"``: TCP everywhere;
            ``"mpi"``: messages of MPI, where sockets are forbidden: a thread that asks for them
            takes a core of each rank.
        max_links: connections that stay open while they are not in use; beyond, those that were not
            used longest are closed, and made again when they are needed. None for half of the
            descriptors that the process may have.

    Raises:
        UsageError: two ranks have the same name, or an argument is wrong: on every rank.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc("master")
        >>> rpc.get_worker_info().name
        'master'
        >>> rpc.shutdown()

    """
    if group is None and current_session() is None:
        init_parallel_env()
    session = require_session()
    members = together(group)
    assert members.group is not None
    me, one_node = session.world.rank, members.group.one_node
    doors: list[Door] = []

    def introduce() -> _Introduction:
        if session[AGENT] is not None:
            raise UsageError(
                "init_rpc has been called before, and what it began is not over; call shutdown() "
                "before the next one"
            )
        _check_place(rank, me, "rank")
        _check_place(world_size, members.size, "world_size")
        integer(threads, "threads", 1)
        integer(max_threads, "max_threads", 1)
        if max_links is not None:
            integer(max_links, "max_links", 1)
        if link == "mpi":
            _check_mpi(members.group)
        else:
            _open_doors(doors, link, interface, one_node=one_node)
        contact = _contact(session, check_name(name, me), doors)
        return _Introduction(contact, trust.random_token(), link)

    try:
        told = members.share(introduce)
        directory = Directory(each.contact.info for each in told)
        _check_links({each.contact.info.rank: each.link for each in told})
    except BaseException:
        for door in doors:
            door.close()
        raise
    token = told[0].token
    session[AGENT] = agent = Agent(
        Setup(
            me,
            {each.contact.info.rank: each.contact for each in told},
            directory,
            token,
            Reception(token, me, doors),
            threads,
            max_threads,
            members.group,
            members.group.mpi_comm.Dup() if link == "mpi" else None,
            _half_of_all() if max_links is None else max_links,
        )
    )
    agent.open()  # now a function that is called finds it on the session


def shutdown(graceful: bool = True, timeout: Any = None) -> None:
    """End RPC on this rank: it makes and accepts no more calls.

    Collective over the group if `graceful`: every rank goes on answering until all have called
    this, and have their own answers.

    Args:
        graceful: wait for the others, and for what this rank has called.
        timeout: seconds that this may take; default: the time limit of the group.

    Raises:
        CollectiveTimeout: not all ranks came; it names them. RPC has ended on this rank.
        RemoteError: a rank has left without this.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> rpc.shutdown()

    """
    session, agent = require_session(), require_agent()
    limit_s = None if timeout is None else limit_of(timeout)
    try:
        if graceful:
            until = time.monotonic() + (session.timeout_s if limit_s is None else limit_s)
            agent.await_own_calls(until)
            agent.done.settle(lambda: None)
            left_s = limit_s and max(until - time.monotonic(), _SOON_S)
            with limited(agent.group.transport, left_s):
                barrier(agent.group)
    finally:
        session[AGENT] = None
        agent.close(f"rank {agent.me.rank} ({agent.me.name}) has called shutdown")


_SOON_S = 0.1
"""What ranks are given at least to meet."""


def _open_doors(doors: list[Door], link: str, interface: str | None, *, one_node: bool) -> None:
    """Listen where other ranks may come from."""
    if link not in _LINKS:
        raise UsageError(f"link must be one of {', '.join(_LINKS)}, got {link!r}")
    if link == "auto":
        doors.append(door_on_node())
    if link == "tcp" or not one_node:
        wanted = interface if interface is not None else read_config().rpc_interface
        for host in addresses(own_networks(), wanted):
            doors.append(Door(Address(host)))


_LINKS = ("auto", "tcp", "mpi")


def _half_of_all() -> int:
    """Return half of the descriptors that this process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else max(soft // 2, 1)


def _check_mpi(group: Any) -> None:
    if group.mpi_comm is None:
        raise UsageError("link='mpi' needs ranks of MPI, and these are simulated; use 'auto'")
    mpi = load_mpi()
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise UsageError(
            "link='mpi' needs an MPI that several threads may call (MPI_THREAD_MULTIPLE), which "
            "this one does not allow; use 'auto'"
        )


def _check_links(links: Mapping[int, str]) -> None:
    first, *others = links
    for rank in others:
        if links[rank] != links[first]:
            raise UsageError(
                f"init_rpc got link={links[first]!r} on rank {first}, but {links[rank]!r} on rank "
                f"{rank}; give all ranks the same"
            )


def _contact(session: Session, name: str, doors: Sequence[Door]) -> Contact:
    on_node = tuple(door.address for door in doors if door.address.name)
    between = tuple(door.address for door in doors if not door.address.name)
    host, port, _ = (*between, Address("127.0.0.1"))[0]
    node = session.whereabouts.node_rank, os.stat("/proc/self/ns/net").st_ino
    return Contact(WorkerInfo(name, session.world.rank, host, port), node, on_node, between)


def _check_place(given: Any, actual: int, what: str) -> None:
    if given is not None and given != actual:
        raise UsageError(
            f"init_rpc got {what}={given!r}, but it is {actual} here, as the launcher has started "
            f"the ranks; leave {what} out"
        )
