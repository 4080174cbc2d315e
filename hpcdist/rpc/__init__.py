"""RPC: call functions on other ranks, which answer while they compute.

Read in this order: `names` (who can be called), `frames` (what is written), `trust` (who may
connect), `links` and `reception` (the sockets, both sides), `passing` (memory instead of bytes),
`pickling` and `outcome` (calls and results as bytes), `future`, `serve` (the threads),
`switchboard` (the links of a rank), `agent` (a rank's part in all this), `start` (`init_rpc`). On
these stand `executor`, `remote`, `broadcast`, `serving` and `stats`.
"""

from __future__ import annotations

from typing import Any

from hpcdist.rpc.agent import require_agent
from hpcdist.rpc.broadcast import broadcast as broadcast
from hpcdist.rpc.executor import Executor as Executor
from hpcdist.rpc.future import Future as Future, check_may_wait as _check_may_wait
from hpcdist.rpc.inline import inline as inline
from hpcdist.rpc.names import WorkerInfo as WorkerInfo
from hpcdist.rpc.remote import Remote as Remote, RemoteMethod as RemoteMethod, remote as remote
from hpcdist.rpc.serving import serve as serve
from hpcdist.rpc.start import init_rpc as init_rpc, shutdown as shutdown
from hpcdist.rpc.stats import Stats as Stats, stats as stats


def rpc_sync(to: Any, fn: Any, args: Any = None, kwargs: Any = None, timeout: Any = -1) -> Any:
    """Call ``fn(*args, **kwargs)`` on a rank and return the result.

    Args:
        to: the name of the rank, its world rank, or its `WorkerInfo`.
        fn: a function that is sent by its name; a lambda or a function inside a function is sent as
            it is, if cloudpickle is installed.
        args: its arguments, a tuple or a list. Large arrays in them are not copied.
        kwargs: its arguments by name.
        timeout: seconds (or a `datetime.timedelta`) for the answer; 0, negative or None for no
            limit.

    Raises:
        RemoteError: the function failed, and this is also of the type that it raised, with its
            traceback there; or the rank has gone.
        CollectiveTimeout: there was no answer in time; it is dropped when it comes.
        UsageError: an argument is wrong; nothing was sent.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> rpc.rpc_sync("worker0", max, (2, 3))
        3
        >>> rpc.shutdown()

    """
    _check_may_wait("the answer of a call")
    return require_agent().call(to, fn, args, kwargs, timeout).wait()


def rpc_async(
    to: Any, fn: Any, args: Any = None, kwargs: Any = None, timeout: Any = -1
) -> Future[Any]:
    """Call a function on a rank, and return a `Future` of the result; see `rpc_sync`.

    Returns when the arguments have left this rank, so arrays among them may be changed.

    Args:
        to: the name of the rank, its world rank, or its `WorkerInfo`.
        fn: a function, sent as by `rpc_sync`.
        args: its arguments, a tuple or a list.
        kwargs: its arguments by name.
        timeout: seconds (or a `datetime.timedelta`) for the answer; 0, negative or None for no
            limit. The future ends with `CollectiveTimeout` after them.

    Raises:
        UsageError: an argument is wrong; nothing was sent. What goes wrong later, the future
            raises.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> future = rpc.rpc_async("worker0", max, (2, 3))
        >>> future.wait()
        3
        >>> rpc.shutdown()

    """
    return require_agent().call(to, fn, args, kwargs, timeout)


def get_worker_info(name: Any = None) -> WorkerInfo:
    """Return the entry of a rank, by name or number. Local.

    Args:
        name: the name or the world rank; None for this rank itself.

    Raises:
        UsageError: no rank has this name or number.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> rpc.get_worker_info("worker0").rank
        0
        >>> rpc.shutdown()

    """
    agent = require_agent()
    return agent.me if name is None else agent.directory.find(name)


def get_all_worker_infos() -> list[WorkerInfo]:
    """Return all ranks that can be called, in order of rank. Local.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> rpc.get_all_worker_infos()[0].name
        'worker0'
        >>> rpc.shutdown()

    """
    return list(require_agent().infos)


def get_current_worker_info() -> WorkerInfo:
    """Return this rank's own entry. Local.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> rpc.get_current_worker_info().name
        'worker0'
        >>> rpc.shutdown()

    """
    return require_agent().me
