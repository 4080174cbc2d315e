"""`open_context`: the parts of a group over MPI are put together here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mpi4py import MPI

from hpcdist.transport.call.call import Collective
from hpcdist.transport.mpi.agreement import Agreement
from hpcdist.transport.mpi.context import MpiContext
from hpcdist.transport.mpi.exchange import (
    GATHERED_UP_TO,
    gathered_exchange,
    reduced_exchange,
    shared_exchange,
)
from hpcdist.transport.mpi.intranode import check_off
from hpcdist.transport.mpi.matching import Matching
from hpcdist.transport.mpi.messages import Messages
from hpcdist.transport.mpi.news import Count, News
from hpcdist.transport.mpi.share_node import open_node
from hpcdist.transport.mpi.site import Site
from hpcdist.transport.shm.node import SharedNode
from hpcdist.transport.waiting.queue import CollectiveQueue

_MiB = 1 << 20


def open_context(
    user_comm: MPI.Intracomm,
    ranks: Sequence[int],
    timeout_s: float,
    site: Site,
    run_inside: Callable[[Collective], Any],
    parent: SharedNode | None = None,
) -> MpiContext:
    """Put the parts of a group together. Collective.

    Args:
        user_comm: its ranks.
        ranks: their numbers in the world.
        timeout_s: the time limit of operations.
        site: what all groups have in common.
        run_inside: runs an operation in the middle of another one.
        parent: the memory of a group on one node that has all these ranks, if there is one.

    """
    duplicate = site.communicators.duplicate
    comm, ranks = duplicate(user_comm), tuple(ranks)
    one_node = len({site.nodes[rank] for rank in ranks}) == 1
    messages = Messages(
        duplicate(user_comm), ranks, timeout_s, site.allowance, site.circles, site.deaths
    )
    progress = partial(comm.Iprobe, MPI.ANY_SOURCE, MPI.ANY_TAG)
    shares = one_node and comm.size > 1
    node = open_node(comm, ranks, site, timeout_s, progress, parent) if shares else None
    queue = CollectiveQueue(f"hpcdist-group-{ranks[0]}-{comm.size}")
    if node is not None:
        messages.open_mail(node)
    agreement = news = slots = None
    if comm.size > 1:
        if node is None:
            exchange, check = reduced_exchange(comm), None
            if comm.size <= GATHERED_UP_TO:
                exchange, slots = gathered_exchange(comm)
        else:
            exchange, check = shared_exchange(node.control, progress), node.check_alive
        agreement = Agreement(comm, ranks, timeout_s, exchange, check)
        if node is not None:
            agreement.node, agreement.check_off = node, partial(check_off, node)
            agreement.clock_ns = 0  # the node has one
        news = _make_news(comm, ranks, site, agreement, messages.matching, queue)
    return MpiContext(
        comm=comm,
        ranks=ranks,
        timeout_s=timeout_s,
        site=site,
        one_node=one_node,
        piece_bytes=int(site.config.piece_mb * _MiB) if one_node else 1 << 30,
        threads=MPI.Query_thread() >= MPI.THREAD_MULTIPLE,
        messages=messages,
        node=node,
        slots=slots,
        tuning_table=site.table(
            comm.size,
            several_nodes=not one_node,
            attaches=node is not None and node.attaches,
            copies="any" if node is None else node.copies,
        ),
        queue=queue,
        agreement=agreement,
        news=news,
        run_inside=partial(queue.turn.call, run_inside),
    )


def _make_news(
    comm: MPI.Intracomm,
    ranks: Sequence[int],
    site: Site,
    agreement: Agreement,
    matching: Matching,
    queue: CollectiveQueue,
) -> News:
    """Connect a group's agreement and its messages, which tell each other's news."""
    count = Count(
        lambda: agreement.sequence,
        lambda: agreement.begun + len(queue.queued),
        matching.sent_to,
    )
    news = News(comm, ranks, site.allowance, site.circles, count, site.deaths)
    agreement.news = matching.news = news
    return news
