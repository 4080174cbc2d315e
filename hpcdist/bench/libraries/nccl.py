"""NCCL alone, through CuPy: the shortest program that does the same, on the same arrays.

Collectives and messages are put on the current stream, and the host waits for nothing. What NCCL
2.27 has no function for is a group of sends and receives (NCCL user guide, "Point-to-point
communication").
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from hpcdist.arrays.device import DeviceRuntime
from hpcdist.bench.interleaved import Call
from hpcdist.bench.memory_kinds import MEMORIES
from hpcdist.bench.task import Array, Library, Maker, Messages, Task
from hpcdist.bench.unavailable import Unavailable, agree, complaint
from hpcdist.config import read_config
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime import gpu
from hpcdist.transport.device.choose import Ability, shared_gpus
from hpcdist.transport.device.nccl import binding


def start(comm: Any, _whole: bool) -> Library:
    """Return NCCL with a communicator of its own for the ranks of `comm`. Collective."""
    cuda = MEMORIES["cuda"].device
    assert cuda is not None
    agree(comm, cuda.missing() or binding.why_not())
    engine = cuda.engine()
    _check_own_gpus(comm, engine)
    nccl = _import_nccl()
    key = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
    made: list[Any] = []
    agree(comm, complaint(lambda: made.append(nccl.NcclCommunicator(comm.size, key, comm.rank))))
    return library_of(Wire(nccl, made[0], engine))


def _import_nccl() -> Any:
    from cupy.cuda import nccl

    return nccl


def _check_own_gpus(comm: Any, engine: DeviceRuntime) -> None:
    """Check that no two ranks share a GPU, unless NCCL allows it as asked for. Collective."""
    hosts, config = comm.allgather(socket.gethostname()), read_config()
    own = Ability(comm.rank, hosts.index(hosts[comm.rank]), gpu.uuid_of(engine.name), {})
    shared = shared_gpus(comm.allgather(own))
    asked = config.share_gpu and config.device_backend == "nccl"
    if asked:
        gpu.let_nccl_share()
    refuses = shared and not (asked and binding.version() >= binding.SHARES_GPUS)
    agree(comm, f"{shared[0]} share a GPU, which NCCL refuses" if refuses else "")


class Wire(NamedTuple):
    """NCCL's functions (`cupy.cuda.nccl`), a communicator, and the device that it is for."""

    nccl: Any
    communicator: Any
    engine: DeviceRuntime

    def at(self, array: Array) -> int:
        """Return the address of an array."""
        return self.engine.address(array)

    def stream(self) -> int:
        """Return the handle of the current stream."""
        return int(self.engine.current_streams()[0].ptr)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Issue messages as one operation: none waits for another."""
        self.nccl.groupStart()
        try:
            yield
        finally:
            self.nccl.groupEnd()


def library_of(wire: Wire) -> Library:
    """Return the candidate that calls NCCL by `wire`."""
    calls = {**_reductions(wire), **_moves(wire)}
    begin = partial(_begin, wire)
    return Library("nccl", calls, _messages(wire), begin, None, wire.communicator.destroy)


# ---- collectives


def _reductions(wire: Wire) -> dict[str, Maker]:
    def all_reduce(task: Task) -> Call:
        return _all_reduce(wire, task, wire.stream())

    def reduce(task: Task) -> Call:
        codes = _codes(wire.nccl, task)
        if codes is None:
            return partial(_refuse, task)
        at = wire.at(task.x)
        call = wire.communicator.reduce
        return partial(call, at, at, task.x.size, *codes, 0, wire.stream())

    def reduce_scatter(task: Task) -> Call:
        codes = _codes(wire.nccl, task)
        if codes is None:
            return partial(_refuse, task)
        call = wire.communicator.reduceScatter
        given, out = wire.at(task.x), wire.at(task.out)
        return partial(call, given, out, task.out.size, *codes, wire.stream())

    return {make.__name__: make for make in (all_reduce, reduce, reduce_scatter)}


def _all_reduce(wire: Wire, task: Task, stream: int) -> Call:
    codes = _codes(wire.nccl, task)
    if codes is None:
        return partial(_refuse, task)
    at = wire.at(task.x)
    return partial(wire.communicator.allReduce, at, at, task.x.size, *codes, stream)


def _codes(nccl: Any, task: Task) -> tuple[int, int] | None:
    """Return NCCL's numbers of the dtype and the operator; None where it has not both."""
    names = task.x.dtype.name.upper(), task.op
    dtype, op = (getattr(nccl, f"NCCL_{name}", None) for name in names)
    return None if dtype is None or op is None else (dtype, op)


def _refuse(task: Task) -> None:
    raise Unavailable(f"NCCL does not compute {task.op} of {task.x.dtype.name}")


def _moves(wire: Wire) -> dict[str, Maker]:
    """Return the collectives that only move; they move bytes."""
    byte = wire.nccl.NCCL_UINT8

    def broadcast(task: Task) -> Call:
        at, call = wire.at(task.x), wire.communicator.broadcast
        return partial(call, at, at, task.x.nbytes, byte, 0, wire.stream())

    def all_gather(task: Task) -> Call:
        given, out = wire.at(task.x), wire.at(task.out)
        call = wire.communicator.allGather
        return partial(call, given, out, task.x.nbytes, byte, wire.stream())

    def alltoall(task: Task) -> Call:
        nbytes = task.x.nbytes // task.size
        given, out, stream = wire.at(task.x), wire.at(task.out), wire.stream()
        send, recv = wire.communicator.send, wire.communicator.recv

        def exchange() -> None:
            with wire.together():
                for rank in range(task.size):
                    send(given + rank * nbytes, nbytes, byte, rank, stream)
                    recv(out + rank * nbytes, nbytes, byte, rank, stream)

        return exchange

    return {
        "broadcast": broadcast,
        "all_gather": all_gather,
        "alltoall": alltoall,
        "alltoall_single": alltoall,
    }


# ---- messages


def _messages(wire: Wire) -> Messages:
    """Return messages on the current stream; those that are begun go together in `wait`."""
    send, recv = wire.communicator.send, wire.communicator.recv

    def sent(verb: Callable[..., Any], array: Array, peer: int) -> Call:
        at, nbytes = wire.at(array), array.nbytes
        return partial(verb, at, nbytes, wire.nccl.NCCL_UINT8, peer, wire.stream())

    def put_together(begun: list[Call]) -> None:
        with wire.together():
            for each in begun:
                each()

    return Messages(
        lambda array: array,
        lambda array, to: sent(send, array, to)(),
        lambda array, source: sent(recv, array, source)(),
        partial(sent, send),
        partial(sent, recv),
        put_together,
    )


# ---- overlap


class _Begun(NamedTuple):
    """An operation on a stream of its own, with the event of its end."""

    engine: DeviceRuntime
    done: Any

    def wait(self) -> None:
        for stream in self.engine.current_streams():
            self.engine.wait_event(stream, self.done)


def _begin(wire: Wire, task: Task) -> Call:
    """Return what begins an all_reduce beside the current stream."""
    engine = wire.engine
    own = engine.new_stream()
    put = _all_reduce(wire, task, int(own.ptr))

    def begin() -> _Begun:
        for stream in engine.current_streams():
            engine.wait_event(own, engine.record(stream))
        put()
        return _Begun(engine, engine.record(own))

    return begin
