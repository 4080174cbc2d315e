"""`hot`: the collectives in one compiled call each, where everything is usual.

A function of `hot` takes what the public one of its name takes, by position, and runs the operation
or returns None: then nothing has happened, and `dispatch` is the way. What is usual is said in
`transport/_hot.c`: small ordinary arrays of NumPy, on a group on one node of which nothing is under
way, with ``sync_op=True``, nobody who listens, on the main thread. Others ranks may come the other
way: what is posted is the same.

Where the other ranks let this one wait, or mean something else, the operation is handed over to
`go_on`, whose errors, time limits and waits are those of `dispatch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from hpcdist.comm import describe
from hpcdist.comm.describe_messages import describe_send
from hpcdist.comm.dispatch import described
from hpcdist.comm.group import Group
from hpcdist.comm.session import here
from hpcdist.events import listeners
from hpcdist.transport.base import DONE, Work
from hpcdist.transport.call import Call
from hpcdist.transport.hot import is_here
from hpcdist.transport.kernel import compiled
from hpcdist.transport.queue import inside
from hpcdist.transport.reduction import ReduceOp
from hpcdist.transport.shm.control import SPINS

VERBS: dict[str, Callable[..., Call]] = {
    "barrier": describe.barrier,
    "all_reduce": describe.all_reduce,
    "reduce": describe.reduce,
    "reduce_scatter": describe.reduce_scatter,
    "broadcast": describe.broadcast,
    "all_gather": describe.all_gather,
    "gather": describe.gather,
    "scatter": describe.scatter,
    "alltoall": describe.alltoall,
}
"""In the order of the table in `_hot.c`."""

MESSAGES = "send", "recv"
"""They go through mailboxes (`transport/_mail.c`), if they are small and usual in the same way."""


@inside(lambda local: local["group"].transport.queue)
def go_on(group: Group, describe: Callable[..., Call], args: tuple[Any, ...]) -> Work:
    """End an operation that the hot path has posted; it holds the turn of the group meanwhile."""
    transport: Any = group.transport
    transport.end_posted(described(group, describe, *args))
    return DONE


def await_taken(group: Group, tensor: Any, dst: int, tag: int) -> None:
    """Wait while the receiver reads a large message that the hot path has offered to it."""
    transport: Any = group.transport
    transport.await_taken(describe_send(group, tensor, dst, tag))


def _nothing(*args: Any) -> None:
    """Leave the operation to `dispatch`."""


def _join() -> Any:
    """Return the compiled functions, once they know what they need; else such as do nothing."""
    if not is_here():
        return SimpleNamespace(**dict.fromkeys((*VERBS, *MESSAGES), _nothing))
    compiled.hot_join(
        np.ndarray,
        Group,
        ReduceOp,
        here,
        listeners,
        go_on,
        DONE,
        tuple(VERBS.values()),
        threading.main_thread().ident,
        SPINS,
    )
    compiled.mail_join(await_taken)
    return SimpleNamespace(
        **{verb: getattr(compiled, f"hot_{verb}") for verb in (*VERBS, *MESSAGES)}
    )


hot = _join()
