"""What a verb does when its turn has come: NumPy arrays in, new ones out.

[Note: line] `hpcdist ps` and errors name the line of the program that an operation stands in. In a
compiled program that line is long left, so the operation is run by a function made for it, whose
code says that it stands there.

[Note: raised through XLA] XLA makes a text of what a callback raises, and JAX an error of its own
of that text. On one device a program with callbacks mostly runs on the thread of its caller, where
the frame of JAX that called XLA is below ours on the stack. When JAX's error reaches that frame,
Python tells whoever traces it, who raises the true one in its place. Where XLA calls back on a
thread of its own, as in some large programs, JAX's error stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from hpcdist.comm import collectives, messages
from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError

NumpyArray = Any
_JAX = os.path.dirname(jax.__file__) + os.sep


class Site(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str


def run(verb: str, operands: Any, params: dict[str, Any]) -> tuple[NumpyArray, ...]:
    """Run an operation now, on arrays whose values are here."""
    arguments = {**params}
    n, _, _ = (arguments.pop(name) for name in ("n", "site", "several"))
    group: Group = resolve_group(arguments.pop("group"))
    if group.nranks != n:
        raise UsageError(
            f"{verb} was traced for a group of {n} ranks, and {group.name} has {group.nranks} now; "
            "call jax.clear_caches(), so that functions are traced again"
        )
    return VERBS[verb](*map(np.asarray, operands), group=group, **arguments)


def program(verb: str, params: dict[str, Any]) -> Callable[..., tuple[NumpyArray, ...]]:
    """Return the function that a compiled program calls back for an operation."""
    standing_there = at(params["site"])

    def called_back(*operands: Any) -> tuple[NumpyArray, ...]:
        try:
            results: tuple[NumpyArray, ...] = standing_there(run, verb, operands, params)
        except BaseException as error:
            if params["several"]:  # the other devices would wait inside XLA without end
                sys.excepthook(type(error), error, error.__traceback__)
            raise_from_caller(error)
            raise
        return results

    return called_back


def at(site: Site) -> Callable[..., Any]:
    """Return a function that calls its first argument, and stands at `site`; see [Note: line]."""
    call: Any = eval(compile("lambda function, *args: function(*args)", site.file, "eval"))
    call.__code__ = call.__code__.replace(
        co_firstlineno=site.line, co_name=site.function or "<module>"
    )
    return cast("Callable[..., Any]", call)


def raise_from_caller(error: BaseException) -> None:
    """Let `error` come out of the call of XLA: see [Note: raised through XLA]."""
    frames = list(_frames_of_jax(sys._getframe(2)))
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


# ---- the verbs


def _all_reduce(x: NumpyArray, *, op: int, group: Group) -> tuple[NumpyArray, ...]:
    y = np.array(x)
    collectives.all_reduce(y, op, group)
    return (y,)


def _reduce(x: NumpyArray, *, dst: int, op: int, group: Group) -> tuple[NumpyArray, ...]:
    y = np.array(x)
    collectives.reduce(y, dst, op, group)
    return (y if group.world_rank == dst else np.zeros_like(y),)


def _reduce_scatter(x: NumpyArray, *, op: int, group: Group) -> tuple[NumpyArray, ...]:
    y = np.empty(x.shape[1:], x.dtype)
    collectives.reduce_scatter(y, x, op, group)
    return (y,)


def _broadcast(x: NumpyArray, *, src: int, group: Group) -> tuple[NumpyArray, ...]:
    y = np.array(x)
    collectives.broadcast(y, src, group)
    return (y,)


def _all_gather(x: NumpyArray, *, group: Group) -> tuple[NumpyArray, ...]:
    y = np.empty((group.nranks, *x.shape), x.dtype)
    collectives.all_gather(y, x, group)
    return (y,)


def _gather(x: NumpyArray, *, dst: int, group: Group) -> tuple[NumpyArray, ...]:
    y = np.zeros((group.nranks, *x.shape), x.dtype)
    collectives.gather(x, y if group.world_rank == dst else None, dst, group)
    return (y,)


def _scatter(x: NumpyArray, *, src: int, group: Group) -> tuple[NumpyArray, ...]:
    y = np.empty(x.shape[1:], x.dtype)
    collectives.scatter(y, x if group.world_rank == src else None, src, group)
    return (y,)


def _alltoall(x: NumpyArray, *, group: Group) -> tuple[NumpyArray, ...]:
    y = np.empty_like(x)
    collectives.alltoall(y, x, group)
    return (y,)


def _barrier(*, group: Group) -> tuple[NumpyArray, ...]:
    collectives.barrier(group)
    return ()


def _send(x: NumpyArray, *, dst: int, tag: int, group: Group) -> tuple[NumpyArray, ...]:
    messages.send(x, dst, group, tag=tag)
    return ()


def _recv(x: NumpyArray, *, src: int, tag: int, group: Group) -> tuple[NumpyArray, ...]:
    y = np.zeros_like(x)
    messages.recv(y, src, group, tag=tag)
    return (y,)


def _sendrecv(
    x: NumpyArray, *, dst: int, src: int, tag: int, group: Group
) -> tuple[NumpyArray, ...]:
    if src == dst == group.world_rank:
        return (x,)
    y = np.zeros_like(x)
    sending = messages.isend(x, dst, group, tag)
    messages.recv(y, src, group, tag=tag)
    sending.wait()
    return (y,)


VERBS: dict[str, Callable[..., tuple[NumpyArray, ...]]] = {
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
