"""Checkpoints: ``mpiexec -n 2 python checkpoint.py``, on the disk of ``--folder``.

`hpcdist.checkpoint` beside one process that writes and reads the same bytes one after the other,
as `dd conv=fsync` does, and beside `torch.distributed.checkpoint`. And the ways that ranks could
write files: one file for each, one for all by `pwrite`, one for all by MPI-IO. All that is
written is brought to disk, and all that is read comes from there, where the system lets go of the
pages it keeps (`posix_fadvise`).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from report import Report, read_options

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.bench.interleaved import Interleaved
from hpcdist.checkpoint import LocalSlice
from hpcdist.text import bandwidth, times

MIB = 1 << 20
LAYER = 4 * MIB
"""Bytes of each array."""

Task = tuple[Callable[[], Any], Callable[[], Any]]
"""What is done before, untimed, and what is timed."""


class Setting(NamedTuple):
    """What every candidate gets."""

    comm: MPI.Intracomm
    folder: Path
    nbytes: int
    """Of all ranks."""

    @property
    def memory(self) -> np.ndarray:
        """This rank's bytes as one run."""
        return np.random.default_rng(self.comm.rank).integers(
            0, 256, self.nbytes // self.comm.size, dtype=np.uint8
        )


def take_turns(comm: MPI.Intracomm, tasks: dict[str, Task], rounds: int) -> Interleaved:
    """Time every task once per round, in rotating order; the slowest rank counts."""
    names = list(tasks)
    taken = np.empty((rounds + 1, len(names)))
    for number in range(rounds + 1):  # the first round warms up
        for step in range(len(names)):
            lane = (number + step) % len(names)
            before, timed = tasks[names[lane]]
            before()
            comm.Barrier()
            began = perf_counter()
            timed()
            taken[number, lane] = comm.allreduce(perf_counter() - began, MPI.MAX)
    seconds = {name: taken[1:, lane] for lane, name in enumerate(names)}
    return Interleaved(seconds, {}, seconds)


def state_of(setting: Setting) -> dict[str, np.ndarray]:
    """Return this rank's half of every layer."""
    memory = setting.memory.view(np.float32)
    count = setting.nbytes // LAYER
    parts = memory.reshape(count, -1)
    return {f"layers.{number}.weight": parts[number] for number in range(count)}


def shards_of(setting: Setting, arrays: dict[str, np.ndarray]) -> dict[str, LocalSlice]:
    rank, size = setting.comm.rank, setting.comm.size
    return {
        name: LocalSlice(part, (size, part.size), offset=rank * part.size)
        for name, part in arrays.items()
    }


# ---- ways to write files


def nothing() -> None:
    """Prepare nothing."""


def removing(path: Path, comm: MPI.Intracomm) -> Callable[[], None]:
    def remove() -> None:
        comm.Barrier()
        if comm.rank == 0:
            path.unlink(missing_ok=True)
        comm.Barrier()

    return remove


def write_run(path: Path, memory: np.ndarray, offset: int = 0) -> None:
    """Write a run of bytes in blocks and bring it to disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    for start in range(0, memory.nbytes, MIB):
        os.pwrite(fd, memory[start : start + MIB], offset + start)
    os.fsync(fd)
    os.close(fd)


def raw_writers(setting: Setting) -> dict[str, Task]:
    comm, folder, _ = setting
    own = setting.memory
    everything = np.concatenate([own] * comm.size) if comm.rank == 0 else own[:0]
    one, shared, by_mpi = (folder / name for name in ("dd", "shared", "mpi-io"))
    mine = folder / f"rank-{comm.rank}"
    start = comm.rank * own.nbytes

    def sequential() -> None:
        if comm.rank == 0:
            write_run(one, everything)

    def collective() -> None:
        file = MPI.File.Open(comm, str(by_mpi), MPI.MODE_WRONLY | MPI.MODE_CREATE)
        file.Write_at_all(start, own)
        file.Sync()
        file.Close()

    def remove_own() -> None:
        mine.unlink(missing_ok=True)

    return {
        "one process": (removing(one, comm), sequential),
        "a file per rank": (remove_own, lambda: write_run(mine, own)),
        "one file, pwrite": (removing(shared, comm), lambda: write_run(shared, own, start)),
        "one file, MPI-IO": (removing(by_mpi, comm), collective),
    }


def forget(*paths: Path) -> None:
    """Let the system drop what it keeps of files or folders."""
    for path in paths:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def reading(setting: Setting, path: Path) -> Callable[[], None]:
    def before() -> None:
        setting.comm.Barrier()
        if setting.comm.rank == 0:
            forget(path)
        setting.comm.Barrier()

    return before


def sequential_reader(setting: Setting) -> Task:
    path = setting.folder / "dd"
    target = np.empty(setting.nbytes if setting.comm.rank == 0 else 0, np.uint8)

    def read() -> None:
        if setting.comm.rank == 0:
            fd = os.open(path, os.O_RDONLY)
            for start in range(0, target.nbytes, MIB):
                os.preadv(fd, [target[start : start + MIB]], start)
            os.close(fd)

    return reading(setting, path), read


# ---- candidates


def torch_tasks(setting: Setting, arrays: dict[str, np.ndarray]) -> tuple[Task, Task] | None:
    """Return saving and loading by torch's DTensors, over gloo; None without torch."""
    try:
        import torch
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard as Rows
    except ImportError:
        return None
    comm, path = setting.comm, setting.folder / "torch"
    os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(comm.bcast(20_000 + os.getpid() % 20_000))
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (comm.size,))
    state = {
        name: DTensor.from_local(torch.from_numpy(part).reshape(1, -1), mesh, [Rows(0)])
        for name, part in arrays.items()
    }
    save = (
        nothing,
        lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(path, overwrite=True)),
    )
    load = (reading(setting, path), lambda: dcp.load(state, checkpoint_id=path))
    return save, load


def contest(setting: Setting, rounds: int) -> tuple[Interleaved, Interleaved]:
    """Interleaved writing, then reading what was written."""
    arrays = state_of(setting)
    state, path = shards_of(setting, arrays), setting.folder / "hpcdist"
    writers = {
        **raw_writers(setting),
        "hpcdist": (nothing, lambda: checkpoint.save(state, path)),
    }
    readers = {
        "one process": sequential_reader(setting),
        "hpcdist": (reading(setting, path), lambda: checkpoint.load(state, path)),
        "hpcdist, read once": (
            reading(setting, path),
            lambda: checkpoint.load(state, path, check_first=False),
        ),
    }
    by_torch = torch_tasks(setting, arrays)
    if by_torch is not None:
        writers["torch"], readers["torch"] = by_torch
    return take_turns(setting.comm, writers, rounds), take_turns(setting.comm, readers, rounds)


def rows_of(interleave: Interleaved, nbytes: int) -> list[dict[str, Any]]:
    return [
        {
            "way": name,
            "bandwidth": nbytes / interleave.median(name),
            "/ one process": 1 / interleave.ratio(name, "one process"),
            "/ torch": 1 / interleave.ratio(name, "torch")
            if "torch" in interleave.seconds
            else None,
        }
        for name in interleave.seconds
    ]


def main() -> None:
    folder, nbytes = tempfile.gettempdir(), 512 * MIB
    if "--folder" in sys.argv:
        at = sys.argv.index("--folder")
        folder = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    options = read_options(__doc__, rounds=9)
    if options.quick:
        nbytes = 64 * MIB
    dist.init_parallel_env()
    comm = MPI.COMM_WORLD.Dup()
    made = Path(comm.bcast(tempfile.mkdtemp(dir=folder) if comm.rank == 0 else None))
    report = Report("checkpoint", options, comm)
    try:
        written, read = contest(Setting(comm, made, nbytes), options.rounds)
    finally:
        comm.Barrier()
        if comm.rank == 0:
            shutil.rmtree(made)
    shown = {
        "way": str,
        "bandwidth": bandwidth,
        "/ one process": times,
        "/ torch": lambda ratio: "" if ratio is None else times(ratio),
    }
    report.table(f"Writing {nbytes // MIB} MiB to disk", shown, rows_of(written, nbytes))
    report.table(f"Reading {nbytes // MIB} MiB from disk", shown, rows_of(read, nbytes))
    report.close()


if __name__ == "__main__":
    main()
