"""`guard`: a rank that dies leaves no other one waiting in CUDA for ever.

Who reads an array or synchronizes a stream waits in CUDA, CUDA for NCCL's kernel, and that one for
the dead. No function of hpcdist is called meanwhile, so where a job goes on after deaths a thread
looks for them, and aborts the communicator. The numbers of what was under way are void then; the
next call raises the `RankFailure`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcdist.runtime.survival import can_recover

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext

_EVERY_S = 0.1


def has_lost(context: MpiContext) -> bool:
    """Return whether a rank of the group is known to be dead. Local."""
    return not set(context.ranks).isdisjoint(context.site.deaths.known())


def guard(context: MpiContext, is_over: Callable[[], bool], abort: Callable[[], None]) -> None:
    """Call `abort` as soon as a rank of the group has died, unless it `is_over` by then. Local."""

    def watch() -> None:
        while not is_over():
            time.sleep(_EVERY_S)
            if not is_over() and has_lost(context):
                abort()

    if can_recover() and context.threads:
        threading.Thread(target=watch, name="hpcdist-nccl-guard", daemon=True).start()
