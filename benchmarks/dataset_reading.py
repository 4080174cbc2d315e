"""How fast files of records become columns, and a dataset in memory, beside other readers.

    python benchmarks/dataset_reading.py [MiB]

Each reader takes its turn, several times; what counts is the least processor time of all threads,
in MB of the file per second of a core. The ratio is to the reader beside it. `load` is
`load_into_memory` of the parquet file, beside pyarrow's whole table as NumPy arrays.
"""

import csv
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as arrow_dataset
import pyarrow.parquet as parquet

import hpcdist as dist
from hpcdist.data import multislot
from hpcdist.data.formats import Settings, open_format, slots_of

ROUNDS = 5
SLOTS = [(f"slot{i}", "int64") for i in range(26)]
USE = {
    "multislot": [*SLOTS, ("dense", "float32", (13,)), ("label", "int64", ())],
    "csv": [("id", "int64"), ("x", "float32"), ("y", "float32"), ("label", "int32")],
    "jsonl": [("words", "int64"), ("label", "int32", ()), ("text", "string")],
    "parquet": [],
}


def write_multislot(path, nbytes, rng):
    with open(path, "w") as file:
        while file.tell() < nbytes:
            ids, dense = rng.integers(0, 1 << 40, 26), rng.random(13)
            fields = [f"1 {each}" for each in ids] + ["13", *(f"{each:.4f}" for each in dense)]
            file.write(" ".join([*fields, "1", str(ids[0] % 2)]) + "\n")


def write_csv(path, nbytes, rng):
    with open(path, "w") as file:
        file.write("id,x,y,label\n")
        while file.tell() < nbytes:
            x, y = rng.random(2)
            file.write(f"{rng.integers(1 << 40)},{x:.6f},{y:.6f},{int(x * 10)}\n")


def write_jsonl(path, nbytes, rng):
    with open(path, "w") as file:
        while file.tell() < nbytes:
            words = rng.integers(0, 50_000, rng.integers(5, 40)).tolist()
            row = {"words": words, "label": len(words), "text": "a line of text " * 3}
            file.write(json.dumps(row) + "\n")


def write_parquet(path, nbytes, rng):
    rows = nbytes // 100
    lengths = rng.integers(1, 16, rows)
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    words = pa.ListArray.from_arrays(offsets, rng.integers(0, 50_000, int(lengths.sum())))
    text = pa.array([f"a line of text {i}" for i in range(rows)])
    table = pa.table({"x": rng.random(rows), "words": words, "text": text})
    parquet.write_table(table, path, row_group_size=1 << 17)


def ours(kind, path):
    for _ in open_format(kind, Settings(slots_of(USE[kind]))).read(path):
        pass


def with_numpy(path):
    taken, multislot._parser = multislot._parser, multislot._parse_numpy
    try:
        ours("multislot", path)
    finally:
        multislot._parser = taken


def split_by_python(path):
    with open(path, "rb") as file:
        for line in file:
            tokens, at = line.split(), 0
            while at < len(tokens):
                count = int(tokens[at])
                np.array(tokens[at + 1 : at + 1 + count]).astype(np.float64)
                at += 1 + count


def csv_of_python(path):
    with open(path) as file:
        rows = csv.reader(file)
        next(rows)
        np.array([[float(each) for each in row] for row in rows])


def json_of_python(path):
    with open(path) as file:
        for line in file:
            np.array(json.loads(line)["words"])


def dataset_of_arrow(path):
    for _ in arrow_dataset.dataset(path, format=path.suffix[1:]).to_batches():
        pass


def load(path):
    dataset = dist.InMemoryDataset()
    dataset.init(format="parquet", use_var=[], batch_size=512)
    dataset.set_filelist([str(path)])
    dataset.load_into_memory()


def table_of_arrow(path):
    for column in parquet.read_table(path, use_threads=False, memory_map=True).columns:
        whole = column.combine_chunks()
        for buffer in whole.buffers():
            np.frombuffer(buffer or b"", np.uint8)


CASES = {
    "multislot": (write_multislot, {"parser in NumPy": with_numpy, "Python": split_by_python}),
    "csv": (write_csv, {"pyarrow.dataset": dataset_of_arrow, "Python": csv_of_python}),
    "jsonl": (write_jsonl, {"Python": json_of_python}),
    "parquet": (write_parquet, {"pyarrow.dataset": dataset_of_arrow}),
    "load": (write_parquet, {"pyarrow.parquet": table_of_arrow}),
}


def seconds(read, path):
    begin = time.process_time()
    read(path)
    return time.process_time() - begin


def main():
    nbytes = int(sys.argv[1] if len(sys.argv) > 1 else 64) << 20
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for kind, (write, peers) in CASES.items():
            path = Path(folder) / f"part.{kind}"
            write(path, nbytes, rng)
            size = path.stat().st_size
            own = load if kind == "load" else partial(ours, kind)
            readers = {"hpcdist": own, **peers}
            taken = {name: [] for name in readers}
            for _ in range(ROUNDS):
                for name, read in readers.items():
                    taken[name].append(seconds(read, path))
            best = {name: min(each) for name, each in taken.items()}
            for name in readers:
                ratio = best[name] / best["hpcdist"]
                print(f"{kind:10} {name:16} {size / best[name] / 1e6:8.1f} MB/s {ratio:6.2f} x")


if __name__ == "__main__":
    main()
