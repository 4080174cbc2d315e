"""An epoch of shuffled batches of text in one process, beside loaders of PyTorch's world.

    python benchmarks/dataset_peers.py [--quick]

Every contestant reads the same rows of about 300 bytes, from files of its own kind, and hands out
batches of 512 of them as bytes and offsets. In the first epoch it reads the files; in a later one
it has what it keeps. Megabytes are those of the text, per second of processor time of the process
and its workers, in the best of some rounds. How well rows are mixed is told beside: over all rows,
or inside of a buffer.

WebDataset and Mosaic's streaming are measured where they are installed.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from report import Report, read_options

import hpcdist as dist
from hpcdist.text import times

BATCH = 512
BUFFER = 10_000
SHARDS = 4

Epoch = Callable[[int], Iterator[Any]]
"""Iterates over the batches of an epoch: each a pair of bytes and offsets."""


class Contestant(NamedTuple):
    """What is measured: `write` makes its files, `open` reads what it keeps."""

    name: str
    mixes: str
    write: Callable[[Path, Sequence[bytes]], None]
    open: Callable[[Path], Epoch]


def rows_of(nbytes: int) -> list[bytes]:
    """Return rows of text."""
    random = np.random.default_rng(0)
    text = random.integers(97, 123, nbytes, np.uint8).tobytes()
    ends = np.cumsum(random.integers(40, 560, nbytes // 300))
    return [text[start:stop] for start, stop in pairwise([0, *ends[ends < nbytes].tolist()])]


def joined(rows: Sequence[bytes]) -> tuple[Any, Any]:
    """Return a batch of rows as bytes and offsets."""
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return np.frombuffer(b"".join(rows), np.uint8), offsets


# ---- files


def write_lines(folder: Path, rows: Sequence[bytes]) -> None:
    (folder / "text").write_bytes(b"\n".join(rows))


def write_arrow(folder: Path, rows: Sequence[bytes]) -> None:
    import pyarrow as pa

    table = pa.table({"txt": pa.array(rows, pa.large_string())})
    with pa.ipc.new_file(folder / "text.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=1 << 14)


def write_tars(folder: Path, rows: Sequence[bytes]) -> None:
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(shard, len(rows), SHARDS):
                member = tarfile.TarInfo(f"{number:08}.txt")
                member.size = len(rows[number])
                archive.addfile(member, BytesIO(rows[number]))


def write_mosaic(folder: Path, rows: Sequence[bytes]) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"txt": "bytes"}) as out:
        for row in rows:
            out.write({"txt": row})


# ---- epochs


def of_hpcdist(kind: str) -> Callable[[Path], Epoch]:
    def opened(folder: Path) -> Epoch:
        dataset = dist.InMemoryDataset()
        dataset.init(format=kind, use_var=[("txt", "string")], batch_size=BATCH)
        dataset.set_filelist([str(folder / f"*.{kind}")])
        dataset.load_into_memory()

        def epoch(number: int) -> Iterator[Any]:
            dataset.global_shuffle(epoch=number)
            for batch in dataset:
                yield batch["txt"]

        return epoch

    return opened


def of_torch(workers: int) -> Callable[[Path], Epoch]:
    def opened(folder: Path) -> Epoch:
        from torch.utils.data import DataLoader

        rows: Any = (folder / "text").read_bytes().split(b"\n")
        loader = DataLoader(rows, BATCH, shuffle=True, num_workers=workers, collate_fn=_as_tensors)
        return lambda number: iter(loader)

    return opened


def _as_tensors(rows: Sequence[bytes]) -> list[Any]:
    import torch

    values, offsets = joined(rows)
    return [torch.from_numpy(values.copy()), torch.from_numpy(offsets)]  # workers send tensors


def of_webdataset(folder: Path) -> Epoch:
    import webdataset

    shards = sorted(map(str, folder.glob("*.tar")))
    rows = webdataset.WebDataset(shards, shardshuffle=SHARDS).shuffle(BUFFER).to_tuple("txt")
    return lambda number: map(joined, rows.batched(BATCH, collation_fn=_firsts))


def _firsts(rows: Sequence[tuple[bytes]]) -> list[bytes]:
    return [row[0] for row in rows]


def of_mosaic(folder: Path) -> Epoch:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    data = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    loader = DataLoader(data, BATCH, collate_fn=_of_mosaic)
    return lambda number: iter(loader)


def _of_mosaic(rows: Sequence[dict[str, bytes]]) -> tuple[Any, Any]:
    return joined([row["txt"] for row in rows])


CONTESTANTS = (
    Contestant("hpcdist, arrow", "all rows", write_arrow, of_hpcdist("arrow")),
    Contestant("hpcdist, tar", "all rows", write_tars, of_hpcdist("tar")),
    Contestant("DataLoader, rows in memory", "all rows", write_lines, of_torch(0)),
    Contestant("DataLoader, 2 workers", "all rows", write_lines, of_torch(2)),
    Contestant("WebDataset", f"{BUFFER} rows", write_tars, of_webdataset),
    Contestant("Mosaic streaming", "blocks of rows", write_mosaic, of_mosaic),
)


# ---- measuring


def cpu_s() -> float:
    """Return the processor time of this process and of its workers that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(each: Contestant, folder: Path, rows: Sequence[bytes]) -> list[float]:
    """Return the processor time of a first epoch and of a later one."""
    taken, before = [], cpu_s()
    epoch = each.open(folder)
    for number in range(2):
        nbytes = count = 0
        for values, offsets in epoch(number):
            nbytes += len(values)
            count += len(offsets) - 1
        taken.append(cpu_s() - before)
        if (count, nbytes) != (len(rows), sum(map(len, rows))):
            raise RuntimeError(f"{each.name} gave {count} rows of {nbytes} bytes")
        before = cpu_s()
    return taken


def main() -> None:
    options = read_options(__doc__, rounds=5)
    report = Report("dataset_peers", options)
    rows = rows_of((16 if options.quick else 64) << 20)
    megabytes = sum(map(len, rows)) / 1e6
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        for number, each in enumerate(CONTESTANTS):
            folder = Path(home) / str(number)
            folder.mkdir()
            try:
                each.write(folder, rows)
                taken = [measured(each, folder, rows) for _ in range(options.rounds)]
            except ImportError as error:
                print(f"{each.name} is left out: {error}", file=sys.stderr)
                continue
            finally:
                shutil.rmtree(folder)
            first, later = (megabytes / min(epoch) for epoch in zip(*taken, strict=True))
            found.append({"epoch": each.name, "mixes": each.mixes, "first": first, "later": later})
    for row in found:
        row["hpcdist /"] = found[0]["later"] / row["later"]
    columns: dict[str, Any] = {"epoch": str, "mixes": str, "first": _rounded, "later": _rounded}
    report.table(f"MB per CPU-s, batches of {BATCH}", {**columns, "hpcdist /": times}, found)
    report.close()


def _rounded(number: float) -> str:
    return f"{number:.0f}"


if __name__ == "__main__":
    main()
