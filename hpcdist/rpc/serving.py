"""`serve`: what a rank does that only answers others."""

from __future__ import annotations

from hpcdist.rpc.agent import require_agent
from hpcdist.rpc.future import Future
from hpcdist.rpc.inline import inline


def serve() -> None:
    """Answer calls until all others have called `shutdown` or `serve`, however long that takes.

    The rank waits without using the processor. It then still has to call `shutdown`, as all do.

    Raises:
        RemoteError: a rank has gone without `shutdown`.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.rpc.init_rpc()
        >>> dist.rpc.serve()
        >>> dist.rpc.shutdown()

    """
    agent = require_agent()
    agent.done.settle(lambda: None)
    others = [agent.call(info, _until_done) for info in agent.infos if info != agent.me]
    for done in others:
        done.wait()


@inline
def _until_done() -> Future[None]:
    return require_agent().done


@inline
def calls() -> bool:
    """Return whether this rank may have calls to make: it has not called `serve` or `shutdown`."""
    return not require_agent().done.done()
