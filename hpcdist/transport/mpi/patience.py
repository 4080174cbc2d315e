"""Waits inside MPI: ranks have agreed on an operation, and something between them breaks.

MPI need not hear of a cable that is cut, or of a node that vanishes: it would wait for ever. So
nothing is waited for inside MPI beyond the time limit: requests are polled, and a verb that blocks
is left to another thread. When the limit is over the other ranks are asked. Those that wait in the
same operation answer; the others are missing. MPI cannot take back what it has begun, so the
group cannot be used any more, which the others are told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from mpi4py import MPI

from hpcdist.errors import CollectiveTimeout, TransportError
from hpcdist.transport.call.call import Call, label
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.flight.neighbours import call_sites
from hpcdist.transport.mpi.early import keep_for_ever
from hpcdist.transport.mpi.news import News
from hpcdist.transport.mpi.site import Site
from hpcdist.transport.waiting import activity
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import Ending, do_errands, poll, to_the_end

LOOK_S = 0.05
"""So often a rank answers the others while another thread is inside MPI for it."""


class Limited(Protocol):
    """What is asked here of an `MpiContext`."""

    ranks: Sequence[int]
    timeout_s: float
    site: Site
    news: News | None
    stopped: str


def finish(context: Limited, call: Call, requests: Sequence[MPI.Request]) -> None:
    """Wait until MPI has ended `requests`, a part of `call`, which all ranks are in."""
    finish_when(context, call, lambda: MPI.Request.Testall(requests), requests)


def finish_when(context: Limited, call: Call, is_done: Callable[[], bool], kept: Any) -> None:
    """Wait until `is_done`, which may go on with a part of `call` each time it is asked.

    `kept` holds the requests of MPI, which cannot be taken back where the limit ends the wait.
    """

    def wait() -> None:
        ended = poll(
            is_done,
            context.timeout_s,
            lambda _: _check_alive(context, call),
            wait=_wait_for(context, call),
        )
        if not ended:
            keep_for_ever([kept, call])
            _stop(context, call, _silent(context, call))

    if not is_done():
        to_the_end(wait, of_operation=True)


def await_thread(context: Limited, call: Call, ended: Ending) -> None:
    """Wait until another thread has ended `call` inside MPI; it tells nothing of its progress.

    So the limit is only over when a rank does not answer.
    """
    began = time.monotonic()
    with activity.noted(_wait_for(context, call), LOOK_S):
        while not ended.wait(LOOK_S):
            waited = time.monotonic() - began
            do_errands(waited)
            if waited < context.timeout_s:
                continue
            silent = _silent(context, call)
            if silent and not ended.is_set():
                keep_for_ever([call])
                _stop(context, call, silent)
            began = time.monotonic()


def check_going(context: Limited, call: Call) -> None:
    """Raise where an operation of the group has stopped on its way."""
    if context.stopped:
        raise TransportError(
            f"{label(call, context.ranks)} cannot begin at {call_site()}: {context.stopped} has "
            "stopped on its way (see the first error), and MPI cannot take it back: end the job"
        )


def _wait_for(context: Limited, call: Call) -> Wait:
    return Wait(lambda: label(call, context.ranks))


def _check_alive(context: Limited, call: Call) -> None:
    if set(context.site.deaths.known()).intersection(context.ranks):
        raise context.site.deaths.failure(label(call, context.ranks))


def _silent(context: Limited, call: Call) -> list[int]:
    """Return the ranks (of the group) that do not answer."""
    news = context.news
    if news is None:
        return []
    answers = news.ask(news.others, _wait_for(context, call), context.timeout_s)
    return sorted(set(news.others) - set(answers))


def _stop(context: Limited, call: Call, silent: Sequence[int]) -> NoReturn:
    context.stopped = what = label(call, context.ranks)
    missing = tuple(context.ranks[rank] for rank in silent)
    names = ", ".join(map(str, missing)) or "none (all answer, and nothing comes)"
    account = ""
    if context.news is not None:
        account = context.news.account(silent, {}, context.timeout_s)
        context.news.leave(f"has given up {what} on its way")
    error = CollectiveTimeout(
        f"{what} stopped on its way: for {context.timeout_s:g} s nothing has come; missing ranks: "
        f"{names}. Called at {call_site()}. Look at the network and the nodes of these ranks; "
        f"arrays of this operation are in an unknown state: end the job{account}",
        missing,
    )
    error.call_sites = call_sites(context.ranks)
    raise error
