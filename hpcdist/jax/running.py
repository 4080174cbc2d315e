"""What a verb does when its turn has come, on NumPy arrays: new ones, or those of XLA's memory.

[Note: line] `hpcdist ps` and errors name the line of the program that an operation stands in. In a
compiled program that line is long left, so the operation is run by a function made for it, whose
code says that it stands there.

[Note: raised through XLA] XLA makes a text of what an operation raises, and JAX an error of its own
of that text. On one device a program with operations mostly runs on the thread of its caller, where
the frame of JAX that called XLA is below ours on the stack. When JAX's error reaches that frame,
Python tells whoever traces it, who raises the true one in its place. Where XLA calls back on a
thread of its own, as in some large programs, JAX's error stays.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, cast

import jax
import numpy as np

from hpcdist.comm import collectives, messages
from hpcdist.comm.group import Group
from hpcdist.comm.hot import in_place_of_main
from hpcdist.comm.session import resolve_group, simulated_rank, standing_for
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import PROC_NULL

NumpyArray = Any
Params = dict[str, Any]
_JAX = os.path.dirname(jax.__file__) + os.sep


class Site(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str


def operation(verb: str, params: Params) -> Callable[..., None]:
    """Return the function that runs an operation on arrays: what is given, and the results."""
    arguments = {**params}
    n, group, _, _ = (arguments.pop(name) for name in ("n", "group", "site", "several"))
    do = VERBS[verb]

    def run(*arrays: NumpyArray) -> None:
        at_hand: Group = resolve_group(group)
        if at_hand.nranks != n:
            raise UsageError(
                f"{verb} was traced for a group of {n} ranks, and {at_hand.name} has "
                f"{at_hand.nranks} now; call jax.clear_caches(), so that functions are traced again"
            )
        do(*arrays, group=at_hand, **arguments)

    return run


def beside(
    verb: str, shapes: Sequence[Any], run: Callable[..., None], *operands: Any
) -> tuple[NumpyArray, ...]:
    """Run an operation on `operands`; returns new arrays of `shapes`, which have dtypes, too."""
    arrays = [np.asarray(each) for each in operands]
    if verb in IN_PLACE:
        results = [np.array(each) for each in arrays]
    else:
        results = [np.empty(each.shape, each.dtype) for each in shapes]
    run(*arrays, *results)
    return tuple(results)


def called_back(
    verb: str, shapes: Sequence[Any], params: Params
) -> Callable[..., tuple[NumpyArray, ...]]:
    """Return the function of arrays that a compiled program calls back for an operation."""
    run = standing_at(params["site"], as_this_rank(operation(verb, params)))

    def operate(*operands: Any) -> tuple[NumpyArray, ...]:
        try:
            return beside(verb, shapes, run, *operands)
        except BaseException as error:
            if params["several"]:  # the other devices would wait inside XLA without end
                sys.excepthook(type(error), error, error.__traceback__)
            raise_from_caller(error)
            raise

    return operate


def called_in_place(verb: str, arrays: Sequence[Any], params: Params) -> Callable[..., str | None]:
    """Return the function of addresses that the compiled handler calls for an operation.

    There are `arrays`, which have a shape and a dtype: what is given, then the results; for a verb
    of `IN_PLACE` they are the same. Returned is the text of an error.
    """
    run = standing_at(params["site"], as_this_rank(operation(verb, params)))
    last: tuple[tuple[int, ...], list[NumpyArray]] = ((), [])

    def operate(*addresses: int) -> str | None:
        nonlocal last
        before, there = last
        if addresses != before:  # in a loop they stay the same
            there = [array_at(each, at) for each, at in zip(arrays, addresses, strict=True)]
            last = (addresses, there)
        try:
            run(*there)
        except BaseException as error:
            raise_from_caller(error)
            return f"{type(error).__name__}: {error}"
        return None

    return operate


def array_at(like: Any, address: int) -> NumpyArray:
    """Return the array in XLA's memory at `address`, of the shape and the dtype of `like`."""
    nbytes = like.size * like.dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(address) if nbytes else None
    return np.ndarray(like.shape, like.dtype, memory)


def as_this_rank(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does as `function` here, on threads of XLA, too."""
    rank = simulated_rank()
    if not rank:
        return in_place_of_main(function)

    def on_any_thread(*args: Any) -> None:
        with standing_for(rank):
            function(*args)

    return on_any_thread


def standing_at(site: Site, function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does as `function`, and stands at `site`; see [Note: line]."""
    standing: Any = eval(compile("lambda *args: function(*args)", site.file, "eval"), locals())
    standing.__code__ = standing.__code__.replace(
        co_firstlineno=site.line, co_name=site.function or "<module>"
    )
    return cast("Callable[..., None]", standing)


def raise_from_caller(error: BaseException) -> None:
    """Let `error` come out of the call of XLA: see [Note: raised through XLA]."""
    frames = list(_frames_of_jax(sys._getframe(1).f_back))
    if not frames:
        return
    before = [(frame, frame.f_trace) for frame in frames]
    tracing = sys.gettrace()

    def on_event(frame: FrameType, event: str, arg: Any) -> Any:
        is_itself = event == "exception" and arg[0] is type(error)
        if is_itself or (event != "exception" and frame is not frames[-1]):
            return on_event
        for each, traced in before:
            each.f_trace = traced
        sys.settrace(tracing)
        if event == "exception":
            raise error
        return None

    for frame in frames:
        frame.f_trace = on_event
    sys.settrace(tracing or (lambda *event: None))


def _frames_of_jax(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of JAX that `frame` is the first of, and that of their caller."""
    while frame is not None:
        yield frame
        if not frame.f_code.co_filename.startswith(_JAX):
            return
        frame = frame.f_back


# ---- the verbs: what is given, and where the result goes


def _all_reduce(x: NumpyArray, y: NumpyArray, *, op: int, group: Group) -> None:
    collectives.all_reduce(y, op, group)


def _reduce(x: NumpyArray, y: NumpyArray, *, dst: int, op: int, group: Group) -> None:
    collectives.reduce(y, dst, op, group)
    if group.world_rank != dst:
        y[...] = 0


def _reduce_scatter(x: NumpyArray, y: NumpyArray, *, op: int, group: Group) -> None:
    collectives.reduce_scatter(y, x, op, group)


def _broadcast(x: NumpyArray, y: NumpyArray, *, src: int, group: Group) -> None:
    collectives.broadcast(y, src, group)


def _all_gather(x: NumpyArray, y: NumpyArray, *, group: Group) -> None:
    collectives.all_gather(y, x, group)


def _gather(x: NumpyArray, y: NumpyArray, *, dst: int, group: Group) -> None:
    collectives.gather(x, y if group.world_rank == dst else None, dst, group)
    if group.world_rank != dst:
        y[...] = 0


def _scatter(x: NumpyArray, y: NumpyArray, *, src: int, group: Group) -> None:
    collectives.scatter(y, x if group.world_rank == src else None, src, group)


def _alltoall(x: NumpyArray, y: NumpyArray, *, group: Group) -> None:
    collectives.alltoall(y, x, group)


def _barrier(*, group: Group) -> None:
    collectives.barrier(group)


def _send(x: NumpyArray, *, dst: int, tag: int, group: Group) -> None:
    if dst != PROC_NULL:
        messages.send(x, dst, group, tag=tag)


def _recv(x: NumpyArray, y: NumpyArray, *, src: int, tag: int, group: Group) -> None:
    if src == PROC_NULL:
        y[...] = 0
    else:
        messages.recv(y, src, group, tag=tag)


def _sendrecv(x: NumpyArray, y: NumpyArray, *, dst: int, src: int, tag: int, group: Group) -> None:
    if src == dst == group.world_rank:
        y[...] = x
    elif dst == PROC_NULL:
        _recv(x, y, src=src, tag=tag, group=group)
    else:
        sending = messages.isend(x, dst, group, tag)
        _recv(x, y, src=src, tag=tag, group=group)
        sending.wait()


VERBS: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
    "send": _send,
    "recv": _recv,
    "sendrecv": _sendrecv,
}

IN_PLACE = {"all_reduce", "reduce", "broadcast"}
"""The verbs whose result has to begin with what is given."""
