"""What one rank sends and keeps, step by step: ``mpiexec -n N python count.py FILE``.

It needs Open MPI, whose own counters see the messages inside of MPI's collectives, too. Rank 0
writes to FILE, for each step, the most of any rank. Where ranks survive, the last one dies, and the
others recover; that is all they do then.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import hpcdist as dist
from hpcdist.runtime.survival import can_recover

REPEATED = 4
_SIZE = 2  # MPI_T_PVAR_CLASS_SIZE


class Seen(NamedTuple):
    """What a rank has done so far; `peers` are the ranks that it has ever sent something to."""

    messages: int
    bytes: int
    peers: int
    python: int
    seconds: float


class Counters:
    """Those of Open MPI, of what this rank sends to each other one."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libmpi.so.40")
        self._session = ctypes.c_void_p()
        self._call("init_thread", 0, ctypes.byref(ctypes.c_int()))
        self._call("pvar_session_create", ctypes.byref(self._session))
        kinds = () if can_recover() else ("count", "size")  # ULFM leaves them out
        self._handles = [self._open(f"pml_monitoring_messages_{kind}") for kind in kinds]
        self._values = (ctypes.c_size_t * MPI.COMM_WORLD.size)()

    def _call(self, name: str, *arguments: Any) -> None:
        if self._library[f"MPI_T_{name}"](*arguments):
            raise SystemExit(f"MPI_T_{name} failed: this needs Open MPI with its monitoring")

    def _open(self, name: str) -> ctypes.c_void_p:
        index, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        world = ctypes.c_void_p(MPI._addressof(MPI.COMM_WORLD))
        out = ctypes.byref(handle), ctypes.byref(count)
        self._call("pvar_get_index", name.encode(), _SIZE, ctypes.byref(index))
        self._call("pvar_handle_alloc", self._session, index, world, *out)
        self._call("pvar_start", self._session, handle)
        return handle

    def look(self) -> Seen:
        sent = []
        for handle in self._handles:
            self._call("pvar_read", self._session, handle, self._values)
            sent.append(np.array(self._values, np.int64))
        gc.collect()
        python = tracemalloc.get_traced_memory()[0]
        messages, nbytes = sent or (np.zeros(1, np.int64),) * 2
        return Seen(
            int(messages.sum()),
            int(nbytes.sum()),
            int((messages > 0).sum()),
            python,
            time.process_time(),
        )


class Diary:
    """What each step has cost this rank."""

    def __init__(self) -> None:
        self._counters = Counters()
        self.found: dict[str, dict[str, float]] = {}

    def step(self, name: str, do: Callable[[], Any], times: int = 1) -> Any:
        """Do something on all ranks; what it costs is divided by how often it is done."""
        done: list[Any] = []
        before = self._counters.look()
        for _ in range(times):
            done.append(do())
        after = self._counters.look()
        self.found[name] = {
            key: (now - then) / times
            for key, then, now in zip(Seen._fields, before, after, strict=True)
        }
        return done

    def write(self, comm: MPI.Intracomm, path: str) -> None:
        told = comm.gather(self.found)
        if told is None:
            return
        most = {
            name: {key: max(each[name][key] for each in told) for key in Seen._fields}
            for name in self.found
        }
        Path(path).write_text(json.dumps(most))


def operations(ranks: int) -> dict[str, Callable[[], Any]]:
    x, many, found = np.ones(1), np.ones(ranks), np.empty(ranks)
    lists = list(many.reshape(ranks, 1)), list(found.reshape(ranks, 1))
    given, taken = lists if dist.get_rank() == 0 else (None, None)
    return {
        "barrier": dist.barrier,
        "all_reduce": lambda: dist.all_reduce(x),
        "reduce": lambda: dist.reduce(x, 0),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(x, many),
        "all_gather": lambda: dist.all_gather(found, x),
        "gather": lambda: dist.gather(x, taken, 0),
        "scatter": lambda: dist.scatter(x, given, 0),
        "alltoall": lambda: dist.alltoall_single(found, many),
        "all_gather_object": lambda: dist.all_gather_object([], 1),
    }


def main(path: str) -> None:
    tracemalloc.start()
    diary, comm = Diary(), MPI.COMM_WORLD
    diary.step("first Allreduce of MPI", lambda: comm.Allreduce(MPI.IN_PLACE, np.ones(1)))
    diary.step("init_parallel_env", dist.init_parallel_env)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    diary.step("first all_reduce", lambda: dist.all_reduce(np.ones(1)))
    if can_recover():
        diary.step("recover", lambda: lose_the_last(ranks))
        diary.write(dist.get_group().mpi_comm, path)
        with suppress(dist.RankFailure):  # some may have gone already
            dist.barrier()  # nobody goes before all is written: that would be another death
        os._exit(0)  # MPI_Finalize has nothing to add
    for name, do in operations(ranks).items():
        do()
        diary.step(name, do, REPEATED)
    for name, members in {"all": range(ranks), "pairs": (rank & ~1, rank | 1)}.items():
        diary.step(f"new_group of {name}", lambda these=members: dist.new_group([*these]), REPEATED)
    diary.write(comm, path)


def lose_the_last(ranks: int) -> None:
    if dist.get_rank() == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(np.ones(1))
    except dist.RankFailure:
        dist.recover()


if __name__ == "__main__":
    main(sys.argv[1])
