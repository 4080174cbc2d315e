"""Waits inside MPI: ranks have agreed on an operation, and something between them breaks.

MPI need not hear of a cable that is cut, or of a node that vanishes: it would wait for ever. So
nothing is waited for inside MPI beyond the time limit: requests are polled (`PolledComm`), and a
verb that blocks is left to another thread. When the limit is over the other ranks are asked. Those
that wait in the same operation answer; the others are missing. MPI cannot take back what it has
begun, so the group cannot be used any more, which the others are told.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from itertools import chain, filterfalse
from typing import Any, NoReturn, Protocol, final

from mpi4py import MPI

from hpcdist.errors import CollectiveTimeout, TransportError
from hpcdist.transport.call.call import Call, label
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.flight.neighbours import call_sites
from hpcdist.transport.mpi.early import keep_for_ever
from hpcdist.transport.mpi.news import News
from hpcdist.transport.mpi.site import Site
from hpcdist.transport.waiting import activity
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import (
    Ending,
    at_once,
    do_errands,
    poll,
    step,
    to_the_end,
)

LOOK_S = 0.05
"""So often a rank answers the others while another thread is inside MPI for it."""

_TIMES_ASKED = 3
"""A rank on a busy node may be late with an answer."""

POLLED_UP_TO = {
    Kind.BARRIER: math.inf,
    Kind.ALL_REDUCE: math.inf,
    Kind.REDUCE: math.inf,
    Kind.BROADCAST: math.inf,
    Kind.ALL_GATHER: 16,
    Kind.GATHER: 16,
    Kind.SCATTER: 16,
    Kind.ALLTOALL: 16,
}
"""Up to so many ranks small operations are polled, which is some 20 us faster than a thread.

What Open MPI does without blocking is a tree where there is no limit here; elsewhere each rank
sends to each other one, or to the next.
"""


class Limited(Protocol):
    """What is asked here of an `MpiContext`."""

    ranks: Sequence[int]
    timeout_s: float
    site: Site
    news: News | None
    stopped: str
    under_way: list[None]


Named = Callable[[], str]
"""Tells in words what is under way; keeps its arrays alive as long as MPI may use them."""


def finish(context: Limited, what: Named, requests: Sequence[MPI.Request]) -> None:
    """Wait until MPI has ended `requests`, a part of an operation which all ranks are in."""
    finish_when(context, what, lambda: MPI.Request.Testall(requests), requests)


def finish_when(context: Limited, what: Named, is_done: Callable[[], bool], kept: Any) -> None:
    """Wait until `is_done`, which may go on with a part of the operation each time it is asked.

    The limit is only over when a rank does not answer: the network may be slow. `kept` holds the
    requests of MPI, which cannot be taken back then.
    """
    failed: list[MPI.Exception] = []

    def is_over() -> bool:
        try:
            return is_done()
        except MPI.Exception as error:
            failed.append(error)
            return True

    def wait() -> None:
        if is_over():
            return
        while not poll(
            is_over,
            context.timeout_s,
            lambda _: _check_alive(context, what),
            wait=Wait(what),
        ):
            silent = _silent(context, what)
            if silent and not is_over():
                _stop(context, what(), silent)

    try:
        to_the_end(wait, of_operation=True)
        if failed:
            raise failed[0]
    except BaseException:
        keep_for_ever([kept, what])  # MPI may still use the arrays
        raise


def await_thread(context: Limited, what: Named, ended: Ending) -> None:
    """Wait until another thread has ended an operation inside MPI.

    It tells nothing of its progress. So the limit is only over when a rank does not answer.
    """
    began = time.monotonic()
    with activity.noted(Wait(what), LOOK_S):
        while not ended.wait(LOOK_S):
            waited = time.monotonic() - began
            do_errands(waited)
            if waited < context.timeout_s:
                continue
            silent = _silent(context, what)
            if silent and not ended.is_set():
                keep_for_ever([what])
                _stop(context, what(), silent)
            began = time.monotonic()


@final
class PolledComm(MPI.Intracomm):
    """A communicator whose verbs do not block inside MPI, but are polled, as long as `finish` says.

    All ranks have to use it for an operation, or none: MPI has other messages for its blocking
    collectives.
    """

    limited: Limited
    what: Named
    """What is under way."""


_IS_NONE = partial(operator.is_, None)

_Begin = Callable[..., Sequence[Iterator[Any]]]
"""Returns what begins a verb, as steps of `at_once`."""


def _single(name: str) -> _Begin:
    begin = getattr(MPI.Intracomm, f"I{name.lower()}")
    return lambda *args: [step(begin, *args)]


def _sendrecv(comm: MPI.Intracomm, *args: Any) -> Sequence[Iterator[Any]]:
    return [step(comm.Irecv, *args[3:]), step(comm.Isend, *args[:3])]


_SINGLE = (
    "Allgather", "Allgatherv", "Allreduce", "Alltoall", "Alltoallv", "Bcast", "Exscan", "Gather",
    "Gatherv", "Recv", "Reduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Scatter",
    "Send",
)  # fmt: skip
_BEGIN = {name: _single(name) for name in _SINGLE} | {"Sendrecv": _sendrecv}


def _polled(begin: _Begin) -> Callable[..., None]:
    """Return a verb that no interrupt leaves while MPI has its arrays."""

    def verb(self: PolledComm, *args: Any) -> None:
        requests: list[MPI.Request] = []

        def is_done() -> bool:
            if not requests:  # it is noted in the same moment as begun
                noted = step(self.limited.under_way.__setitem__, slice(None), (None,))
                at_once(requests, filterfalse(_IS_NONE, chain(noted, *begin(self, *args))))
            return MPI.Request.Testall(requests)

        finish_when(self.limited, self.what, is_done, requests)

    return verb


for _name, _begin in _BEGIN.items():
    setattr(PolledComm, _name, _polled(_begin))


def check_going(context: Limited, call: Call) -> None:
    """Raise where an operation of the group has stopped on its way."""
    if context.stopped:
        raise TransportError(
            f"{label(call, context.ranks)} cannot begin at {call_site()}: {context.stopped} has "
            "stopped on its way (see the first error), and MPI cannot take it back: end the job"
        )


def _check_alive(context: Limited, what: Named) -> None:
    if set(context.site.deaths.known()).intersection(context.ranks):
        raise context.site.deaths.failure(what())


def _silent(context: Limited, what: Named) -> list[int]:
    """Return the ranks (of the group) that do not answer."""
    news = context.news
    silent = set() if news is None else set(news.others)
    for _ in range(_TIMES_ASKED):
        if news is not None and silent:
            silent -= news.ask(sorted(silent), Wait(what), context.timeout_s).keys()
    return sorted(silent)


def _stop(context: Limited, what: str, silent: Sequence[int]) -> NoReturn:
    context.stopped = what
    left: Container[int] = () if context.news is None else context.news.left  # they have told
    silent = [rank for rank in silent if rank not in left] or silent
    missing = tuple(context.ranks[rank] for rank in silent)
    account = ""
    if context.news is not None:
        account = context.news.account(silent, {}, context.timeout_s)
        context.news.leave(f"has given up {what} on its way")
    error = CollectiveTimeout(
        f"{what} stopped on its way: for {context.timeout_s:g} s nothing has come; missing ranks: "
        f"{', '.join(map(str, missing))}. Called at {call_site()}. Look at the network and the "
        "nodes of these ranks; arrays of this operation are in an unknown state: end the job"
        f"{account}",
        missing,
    )
    error.call_sites = call_sites(context.ranks)
    raise error
