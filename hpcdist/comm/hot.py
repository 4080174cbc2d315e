"""`hot`: the collectives in one compiled call each, where everything is usual.

A function of `hot` takes what the public one of its name takes, by position, `group` and `sync_op`
last, and runs the operation or returns None: then nothing has happened, and `dispatch` is the way.
`in_one_call` makes the public functions try it first, without a frame of Python. What is usual is
said in `transport/shm/native/hot.h`: small ordinary arrays in host memory and small objects, on a
group on one node of which nothing is under way, nobody who listens, on the main thread. Other ranks
may come the other way: what is posted is the same. With ``sync_op=False`` it is for small arrays
only.

Where the other ranks let this one wait, or mean something else, the operation is handed over to
`go_on`, whose errors, time limits and waits are those of `dispatch`.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np

from hpcdist.arrays.pickled import EAGER, OUT_OF_BAND, join
from hpcdist.comm import describe, describe_objects
from hpcdist.comm.alarms import is_alarm, raise_alarm
from hpcdist.comm.describe_messages import (
    describe_recv,
    describe_send,
    describe_send_objects,
    replace_objects,
)
from hpcdist.comm.dispatch import described, dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.pieces import LARGE_NBYTES, note_unpickled
from hpcdist.errors import UsageError
from hpcdist.events import listeners
from hpcdist.transport.call.call import Call
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.shm.control import SPINS
from hpcdist.transport.shm.hot import HotTransport, is_here, meet
from hpcdist.transport.shm.kernel import compiled
from hpcdist.transport.waiting.queue import ending
from hpcdist.transport.waiting.work import DONE, Work

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
    "alltoall_single": describe.alltoall_single,
}
"""In the order of the table in `hot_plan.c`."""

MESSAGES = "send", "recv", "send_object_list", "recv_object_list"
"""They go through mailboxes (`shm/native/mail.h`), if they are small and usual in the same way."""


OBJECT_VERBS: dict[str, Callable[..., Call]] = {
    "broadcast_object_list": describe_objects.broadcast_object_list,
    "all_gather_object": describe_objects.all_gather_object,
    "gather_object": describe_objects.gather_object,
    "scatter_object_list": describe_objects.scatter_object_list,
    "all_to_all_object": describe_objects.all_to_all_object,
}
"""In the order of the table in `hot_objects.c`."""

_Packed = tuple[tuple[bytes, ...], tuple[Sequence[memoryview], ...]]


def _transport(group: Group) -> HotTransport:
    return cast("HotTransport", group.transport)  # it has offered its `hot` or its `mail`


def go_on(
    group: Group, describe: Callable[..., Call], args: tuple[Any, ...], packed: _Packed | None
) -> Work:
    """End an operation that the hot path has posted; it holds the turn of the group meanwhile."""
    _transport(group).end_posted(described(group, describe, *args, *_as_argument(packed)))
    return DONE


def start(
    group: Group,
    describe: Callable[..., Call],
    args: tuple[Any, ...],
    mark: int,
    state: int,
    kept: tuple[Any, ...] = (),
) -> Work:
    """Return the work of an operation that the hot path has begun, and that may take its time.

    Others may read what is `kept`, arrays of lists among it, until it has ended.
    """
    work = _transport(group).start_posted(described(group, describe, *args), state, kept)
    if mark:
        work.recorded(mark)
    return work


def end(group: Group, describe: Callable[..., Call], args: tuple[Any, ...], state: int) -> Work:
    """End an operation on large arrays, which stands as `hot_large.c` says, in the same turn."""
    _transport(group).end_posted(described(group, describe, *args), state)
    return DONE


def take_back(
    group: Group, describe: Callable[..., Call], args: tuple[Any, ...], packed: _Packed | None
) -> None:
    """Take back what an operation has lent that has failed; in the same turn.

    It may have been left by an interrupt before anything of `go_on` or `end` was done.
    """
    _transport(group).take_back(described(group, describe, *args, *_as_argument(packed)))


@ending
def unpack(group: Group, target: list[Any], pickles: list[bytes], whole: bool) -> None:
    """Replace what is in a list, by one list or by an object for each pickle, in the same way."""
    try:
        target[:] = loads(pickles[0]) if whole else [loads(each) for each in pickles]
    except Exception as error:
        note_unpickled(error)
        raise


def leave(
    group: Group, describe: Callable[..., Call], args: tuple[Any, ...], packed: _Packed
) -> Work:
    """Run an operation of which the hot path has done no more than to pickle."""
    return dispatch(group, True, describe, *args, *_as_argument(packed))


def _as_argument(packed: _Packed | None) -> tuple[Any, ...]:
    return () if packed is None else ([join(*each) for each in zip(*packed, strict=True)],)


def await_copied(group: Group, tensor: Any, peer: int, tag: int, is_sent: bool) -> None:
    """Wait while the other rank copies a large message that the hot path has begun."""
    describe = describe_send if is_sent else describe_recv
    _transport(group).await_copied(describe(group, tensor, peer, tag))


def not_packed(group: Group | None, kind: int, error: Exception) -> None:
    """Raise what kept an object from being pickled if it is an alarm, which does not come twice.

    The others are told; a message has no `group`.
    """
    if group is not None:
        failure = UsageError(f"an object cannot be pickled: {error}")
        failure.__cause__ = error
        raise_alarm(group, list(Kind)[kind], failure)
    elif is_alarm(error):
        raise error


loads = pickle.loads


def in_place_of_main(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does as `function`, on another thread for which the main one waits."""
    if not is_here():
        return function
    main, ident, let = threading.main_thread().ident, threading.get_ident, compiled.hot_thread

    def on_any_thread(*args: Any) -> Any:
        thread = ident()
        if thread == main:
            return function(*args)
        let(thread)
        try:
            return function(*args)
        finally:
            let(main)

    return on_any_thread


def _nothing(*args: Any) -> None:
    """Leave the operation to `dispatch`."""


def _join() -> Any:
    """Return the compiled functions, once they know what they need; else such as do nothing."""
    if not is_here():
        return SimpleNamespace(**dict.fromkeys((*VERBS, *OBJECT_VERBS, *MESSAGES), _nothing))
    compiled.hot_join(
        np.ndarray,
        Group,
        ReduceOp,
        listeners,
        go_on,
        start,
        end,
        take_back,
        DONE,
        tuple(VERBS.values()),
        meet,
        threading.main_thread().ident,
        SPINS,
    )
    compiled.hot_join_objects(
        tuple(OBJECT_VERBS.values()),
        pickle.dumps,
        unpack,
        leave,
        not_packed,
        EAGER,
        OUT_OF_BAND,
        LARGE_NBYTES,
    )
    compiled.mail_join(await_copied)
    compiled.mail_join_objects(describe_send_objects, loads, replace_objects)
    names = (*VERBS, *OBJECT_VERBS, *MESSAGES)
    return SimpleNamespace(**{verb: getattr(compiled, f"hot_{verb}") for verb in names})


hot = _join()

_F = TypeVar("_F", bound=Callable[..., Any])


def in_one_call(function: _F) -> _F:
    """Return `function`, which is tried in the compiled call of its name first.

    So no frame of Python is made where all is usual, and none looked through for the call site,
    which takes as long as the ranks' exchange. What is returned looks like `function`, as what
    `functools.cache` returns does.
    """
    if not is_here():
        return function
    code, name = function.__code__, function.__name__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    last = ("dst_in_group", "src_in_group") if name in MESSAGES else ("group", "sync_op")
    order = sorted(names, key=lambda each: each in last)
    by_place = function.__defaults__ or ()
    defaults = dict(zip(names[code.co_argcount - len(by_place) :], by_place, strict=False))
    defaults |= function.__kwdefaults__ or {}
    verb = compiled.Verb(
        function,
        getattr(hot, name),
        names,
        tuple(defaults.get(each, ...) for each in names),
        tuple(map(order.index, names)),
        code.co_argcount,
    )
    also = "__annotations__"  # not among them since Python 3.14
    assigned = *functools.WRAPPER_ASSIGNMENTS, also
    return cast("_F", functools.update_wrapper(verb, function, assigned))
