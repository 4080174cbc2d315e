"""paddle.distributed on gloo: its calls are spelled as hpcdist's.

Paddle's processes cannot be started twice with other ranks, so it takes part where all ranks of
the job do.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

from hpcdist.bench.interleaved import Call
from hpcdist.bench.libraries.hpcdist import array_calls, message_calls, object_calls
from hpcdist.bench.task import Array, Library, Task
from hpcdist.bench.unavailable import Unavailable, agree, require_module

_OPS = ("SUM", "MAX", "MIN", "PROD", "AVG")


def start(comm: Any, whole: bool) -> Library:
    """Return paddle.distributed on gloo, over the ranks of `comm`. Collective."""
    require_module(comm, "paddle")
    if not whole or comm.size == 1:
        raise Unavailable("paddle takes part only where all ranks of a larger job do")
    _tell_paddle(comm)
    paddle = _import_paddle(comm)
    verbs = paddle.distributed
    group = verbs.init_parallel_env()
    ops = {name: getattr(verbs.ReduceOp, name) for name in _OPS}

    def tensor_of(array: Array) -> Any:
        return paddle.to_tensor(array, place=paddle.CPUPlace())

    def begin(task: Task) -> Call:
        tensor = tensor_of(task.x)
        return lambda: verbs.all_reduce(tensor, ops[task.op], group, sync_op=False)

    calls = {**array_calls(verbs, group, ops, tensor_of), **object_calls(verbs, group)}
    messages = message_calls(verbs, group, tensor_of)
    return Library("paddle", calls, messages, begin, None, lambda: None)


def _import_paddle(comm: Any) -> Any:
    try:
        paddle, reason = importlib.import_module("paddle"), ""
    except Exception as error:  # whatever a broken installation raises
        paddle, reason = None, f"paddle cannot be imported: {error}"
    agree(comm, reason)
    return paddle


def _tell_paddle(comm: Any) -> None:
    """Set what Paddle reads from the environment where it starts."""
    with socket.socket() as free:
        free.bind(("", 0))
        endpoint = f"{socket.gethostname()}:{free.getsockname()[1]}"
    endpoints = comm.allgather(endpoint)
    os.environ.update(
        PADDLE_DISTRI_BACKEND="gloo",
        PADDLE_TRAINER_ID=str(comm.rank),
        PADDLE_TRAINERS_NUM=str(comm.size),
        PADDLE_CURRENT_ENDPOINT=endpoints[comm.rank],
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_MASTER=endpoints[0],
    )
