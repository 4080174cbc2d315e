"""Every format gives the same records, whole and in pieces, packed or not, from paths and URLs."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import shlex
import sys
import tarfile
import tracemalloc

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.data import text as text_module
from hpcdist.data.columns import Columns
from hpcdist.data.files import deal
from hpcdist.data.formats import TABLE, Settings, open_format, slots_of

ROWS = 40
NUMBERS = {"id": np.int64, "x": np.float64, "k": np.int32}


def record(i):
    """Return row i: a number of each kind, text, and a list that may be empty."""
    return {"id": i * 10**9, "x": i / 7, "k": -i, "s": f"né {i}", "l": list(range((i + 1) % 4))}


# ---- one file of each kind, and what is asked of it


def as_multislot(rows):
    return "".join(
        f"1 {r['id']} 1 {r['x']!r} 1 {r['k']} {len(r['l'])} {' '.join(map(str, r['l']))}\n"
        for r in rows
    ).encode()


def as_csv(rows):
    lines = [f'{r["id"]},"{r["s"]}",{r["x"]!r},{r["k"]}\n' for r in rows]
    return ("id,s,x,k\n" + "".join(lines)).encode()


def as_jsonl(rows):
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()


def as_npy(rows):
    dtype = list(NUMBERS.items())
    out = io.BytesIO()
    np.save(out, np.array([tuple(r[name] for name in NUMBERS) for r in rows], dtype))
    return out.getvalue()


def as_tar(rows):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i, row in enumerate(rows):
            for name, value in row.items():
                data = " ".join(map(str, value)) if name == "l" else str(value)
                member = tarfile.TarInfo(f"set/{i:04}.{name}")
                member.size = len(data.encode())
                archive.addfile(member, io.BytesIO(data.encode()))
    return out.getvalue()


def table_of(rows):
    pa = pytest.importorskip("pyarrow")
    kinds = [pa.int64(), pa.float64(), pa.int32(), pa.string(), pa.list_(pa.int64())]
    return pa.Table.from_pylist(
        rows, pa.schema(list(zip(["id", "x", "k", "s", "l"], kinds, strict=True)))
    )


def as_parquet(rows):
    import pyarrow.parquet as parquet

    out, table = io.BytesIO(), table_of(rows)
    parquet.write_table(table, out, row_group_size=7)
    return out.getvalue()


def as_arrow(rows):
    import pyarrow as pa

    out, table = io.BytesIO(), table_of(rows)
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return out.getvalue()


def as_stream(rows):
    import pyarrow as pa

    out, table = io.BytesIO(), table_of(rows)
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return out.getvalue()


SINGLE = [("id", "int64", ()), ("x", "float64", ()), ("k", "int32", ())]
LIST, STRING = ("l", "int64"), ("s", "string")
KINDS = {
    "multislot": ("multislot", as_multislot, [*SINGLE, LIST]),
    "csv": ("csv", as_csv, [*SINGLE, STRING]),
    "jsonl": ("jsonl", as_jsonl, [*SINGLE, LIST, STRING]),
    "npy": ("npy", as_npy, SINGLE),
    "tar": ("tar", as_tar, [*SINGLE, LIST, STRING]),
    "parquet": ("parquet", as_parquet, [*SINGLE, LIST, STRING]),
    "arrow": ("arrow", as_arrow, [*SINGLE, LIST, STRING]),
    "stream": ("arrow", as_stream, [*SINGLE, LIST, STRING]),
}
NEED_ARROW = ("parquet", "arrow", "stream")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_text = pytest.mark.parametrize("kind", ["multislot", "csv", "jsonl"])


def by_arrow(codec):
    """Return what packs bytes by a codec of Arrow, into two streams one after the other."""

    def pack(data):
        pyarrow = pytest.importorskip("pyarrow")
        out = pyarrow.BufferOutputStream()
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            packed = pyarrow.BufferOutputStream()
            with pyarrow.CompressedOutputStream(packed, codec) as file:
                file.write(part)
            out.write(packed.getvalue())
        return out.getvalue().to_pybytes()

    return pack


PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": by_arrow("zstd"),
    ".lz4": by_arrow("lz4"),
}


def opened(kind, use=None, **settings):
    name, _, slots = KINDS[kind]
    settings.setdefault("block_bytes", 100)
    return open_format(name, Settings(slots=slots_of(slots if use is None else use), **settings))


def written(kind, folder, count=ROWS, name=None):
    if kind in NEED_ARROW:
        pytest.importorskip("pyarrow")
    path = folder / (name or f"part.{kind}")
    data = KINDS[kind][1]([record(i) for i in range(count)])
    path.write_bytes(PACK.get(path.suffix, bytes)(data))
    return str(path)


def check(parts, kind, numbers):
    """See that parts hold these records, whole and of the dtypes asked for."""
    parts = list(parts)
    if not numbers:
        assert not sum(map(len, parts))
        return
    rows = Columns.concat(parts)
    slots = KINDS[kind][2]
    assert rows.names == tuple(slot[0] for slot in slots)
    assert len(rows) == len(numbers)
    for got, i in zip(rows, numbers, strict=True):
        for name, dtype, *_ in slots:
            want = record(i)[name]
            if name != "s":
                assert got[name].dtype == dtype
                want = np.array(want, dtype)
            assert np.array_equal(got[name], want), (name, i)


@pytest.fixture(params=["arrow", "python"])
def _with_and_without_arrow(request, monkeypatch):
    if request.param == "arrow":
        pytest.importorskip("pyarrow")
        return
    made = text_module._Rows.__init__

    def without(self, *args):
        made(self, *args)
        self._faults = None

    monkeypatch.setattr(text_module._Rows, "__init__", without)


@every_kind
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
@pytest.mark.usefixtures("_with_and_without_arrow")
def test_a_file_gives_its_records_in_order(kind, block, tmp_path):
    parts = opened(kind, block_bytes=block).read(written(kind, tmp_path))
    check(parts, kind, range(ROWS))


@every_kind
@pytest.mark.parametrize("ranks", [2, 3, 17])
def test_the_pieces_of_a_file_give_each_record_once_and_in_order(kind, ranks, tmp_path):
    path = written(kind, tmp_path)
    size = (tmp_path / f"part.{kind}").stat().st_size
    format = opened(kind)
    assert format.can_cut(path)
    dealt = deal([size], ranks)
    parts = [list(format.read(path, start=a, stop=b)) for p in dealt for _, a, b in p]
    check([part for piece in parts for part in piece], kind, range(ROWS))
    if kind != "parquet":  # most of a small one are its last bytes
        assert sum(map(bool, parts)) > 1, "one rank has read it all"


@every_kind
def test_an_open_file_is_read_like_a_path(kind, tmp_path):
    with open(written(kind, tmp_path), "rb") as file:
        check(opened(kind).read(file), kind, range(ROWS))


@every_kind
def test_a_url_is_read_like_a_path(kind, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    with open(written(kind, tmp_path), "rb") as file:
        data = file.read()
    url = f"memory://test_formats/part.{kind}"
    with fsspec.open(url, "wb") as file:
        file.write(data)
    half = len(data) // 2
    format = opened(kind)
    check(format.read(url), kind, range(ROWS))
    pieces = [format.read(url, start=a, stop=b) for a, b in [(0, half), (half, len(data))]]
    check([part for piece in pieces for part in piece], kind, range(ROWS))


@pytest.mark.parametrize("end", PACK)
@pytest.mark.parametrize("kind", ["multislot", "csv", "jsonl", "tar", "npy"])
def test_packed_files_are_whole_pieces(kind, end, tmp_path):
    path = written(kind, tmp_path, name=f"part.{kind}{end}")
    format = opened(kind)
    assert not format.can_cut(path)
    check(format.read(path, start=0, stop=50), kind, range(ROWS))
    assert list(format.read(path, start=50, stop=99)) == []


@pytest.mark.parametrize("kind", ["multislot", "csv", "jsonl", "tar", "npy"])
def test_files_go_through_a_command(kind, tmp_path):
    path = written(kind, tmp_path)
    for command in ("cat | cat", f"cat '{path}'"):
        format = opened(kind, pipe_command=command)
        assert not format.can_cut(path)
        check(format.read(path), kind, range(ROWS))
    with open(path, "rb") as file:
        check(opened(kind, pipe_command="tee /dev/null").read(file), kind, range(ROWS))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_files_that_are_not_read_from_the_front_go_through_no_command(kind):
    with pytest.raises(dist.UsageError, match="cannot go through pipe_command 'zcat'"):
        opened(kind, pipe_command="zcat")


@every_text
@pytest.mark.usefixtures("_with_and_without_arrow")
def test_line_ends_and_empty_lines_change_nothing(kind, tmp_path):
    path = tmp_path / "part"
    data = KINDS[kind][1]([record(i) for i in range(5)])
    path.write_bytes(data.replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    check(opened(kind).read(path), kind, range(5))
    path.write_bytes(data.replace(b"\n", b"\n\n \r\n"))
    check(opened(kind).read(path), kind, range(5))


@every_text
def test_an_empty_file_has_no_records(kind, tmp_path):
    path = tmp_path / "part"
    path.write_bytes(as_csv([]) if kind == "csv" else b"")
    check(opened(kind).read(path), kind, [])


def test_columns_are_found_by_their_names_in_any_order(tmp_path):
    for kind in ("csv", "jsonl", "parquet", "npy", "tar"):
        use = [("k", "int64", ()), ("id", "uint64", ())]
        rows = Columns.concat(list(opened(kind, use).read(written(kind, tmp_path))))
        assert rows.names == ("k", "id")
        assert rows["k"].values.tolist() == [-i for i in range(ROWS)]
        assert rows["id"].values.dtype == np.uint64


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow", "npy", "tar"])
def test_files_tell_their_columns_where_nobody_asks_for_any(kind, tmp_path):
    rows = Columns.concat(list(opened(kind, []).read(written(kind, tmp_path))))
    want = {"csv": ("id", "s", "x", "k"), "npy": ("id", "x", "k")}
    assert rows.names == want.get(kind, ("id", "x", "k", "s", "l"))
    if kind != "tar":
        assert rows["id"].values.tolist() == [i * 10**9 for i in range(ROWS)]
    else:
        assert rows["s"].row(3) == "né 3".encode()


@pytest.mark.parametrize("block", [1, 100, 4 << 20])
def test_a_csv_tells_the_same_columns_in_all_of_its_pieces(block, tmp_path):
    path = tmp_path / "part"
    path.write_bytes(b"i,x,s\n\n1,0.5,\n22,1.5,b\n")
    format = opened("csv", ["i", "x", "s"], block_bytes=block)
    size = path.stat().st_size
    pieces = [list(format.read(path, start=at, stop=at + 1)) for at in range(size)]
    rows = Columns.concat([part for piece in pieces for part in piece])
    assert rows["i"].values.tolist() == [1, 22]
    assert rows["x"].values.tolist() == [0.5, 1.5]
    assert [row["s"] for row in rows] == ["", "b"]


@pytest.mark.usefixtures("_with_and_without_arrow")
@pytest.mark.parametrize("first", [b"", b"1\n", b'1,"a\n', b"1,\xff\n", b"1,\0\n"])
def test_the_first_good_record_of_a_csv_tells_what_its_columns_are(first, tmp_path):
    path = tmp_path / "part"
    path.write_bytes(b"i,x\n" + first)
    assert list(opened("csv", ["i", "x"], on_bad="skip").read(path)) == []
    path.write_bytes(b"i,x\n" + first + b"2,0.5\n")
    format = opened("csv", ["i", "x"], on_bad="skip")
    (rows,) = format.read(path)
    assert (rows["i"].values.tolist(), rows["x"].values.tolist()) == ([2], [0.5])
    assert format.bad.count == bool(first)


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow", "npy"])
def test_a_column_that_a_file_has_not_is_told_with_those_that_it_has(kind, tmp_path):
    with pytest.raises(dist.DatasetError, match=r"part\.\w+.*there is no (column|field) 'z'.*id"):
        list(opened(kind, ["z"]).read(written(kind, tmp_path)))


# ---- malformed records


BAD_LINES = {
    "multislot": [
        (b"1 x", "'x' is not valid as int64"),
        (b"1 5 1 0.5 1 6", "the line ends before slot 'l'"),
    ],
    "csv": [
        (b"1,a,0.5", "there are 3 fields, not 4"),
        (b"1.5,a,0.5,6", "'id' is '1.5', which is not valid as int64"),
        (b"1,a,,6", "'x' is '', which is not valid as float64"),
        (b"1,a,0.5,3000000000", "'k' is 3000000000, which is not valid as int32"),
        (b'1,"a,0.5,6', "unexpected end of data"),
        (b'1,"a"b,0.5,6', "expected after"),
        (b"0x10,a,0.5,6", "'id' is '0x10', which is not valid as int64"),
    ],
    "jsonl": [
        (b'{"id": 1', "Expecting"),
        (b"[1]", "the line is [1], not an object"),
        (b"null", "the line is None, not an object"),
        (2 * b'{"id": 1, "x": 1, "k": 1, "s": "a", "l": []}', "Extra data"),
        (b'{"id": 1, "x": 1, "k": 1, "s": "a"}', "there is no 'l'"),
        (b'{"id": null, "x": 1, "k": 1, "s": "a", "l": []}', "'id' is None, which is not valid"),
        (b'{"id": 1.5, "x": 1, "k": 1, "s": "a", "l": []}', "'id' is 1.5, which is not valid"),
        (b'{"id": 1, "x": "1", "k": 1, "s": "a", "l": []}', "'x' is '1', which is not valid"),
        (b'{"id": 1, "x": 1, "k": 1, "s": 5, "l": []}', "'s' is 5, which is not text"),
        (b'{"id": 1, "x": 1, "k": 1, "s": "a", "l": 7}', "'l' is 7, which is not a list"),
        (b'{"id": 1, "x": 1, "k": 1, "s": "a", "l": [null]}', "'l' is None, which is not valid"),
        (b'{"id": 1, "id": 2, "x": 1, "k": 1, "s": "a", "l": []}', "'id' comes twice"),
    ],
}
for _kind, _start in {"csv": b"1,a", "jsonl": b'{"id": 1'}.items():
    BAD_LINES[_kind] += [(_start + b"\xff", "invalid UTF-8: byte 0xff at")]
    BAD_LINES[_kind] += [(_start + b"\0", "there is a NUL byte")]


@pytest.mark.usefixtures("_with_and_without_arrow")
@pytest.mark.parametrize(
    ("kind", "line", "reason"), [(kind, *bad) for kind, lines in BAD_LINES.items() for bad in lines]
)
def test_a_malformed_line_is_named_by_file_and_line(kind, line, reason, tmp_path):
    lines = KINDS[kind][1]([record(i) for i in range(6)]).splitlines(keepends=True)
    at = len(lines) - 3
    path = tmp_path / "part"
    path.write_bytes(b"".join([*lines[:at], line + b"\n", *lines[at:]]))
    with pytest.raises(dist.DatasetError) as caught:
        list(opened(kind).read(path))
    assert str(caught.value).startswith(f"{path}:{at + 1}: ")
    assert reason in str(caught.value)
    for policy, block in itertools.product(("skip", "count"), (1, 1 << 20)):
        format = opened(kind, on_bad=policy, block_bytes=block)
        check(format.read(path), kind, range(6))
        assert (format.bad.count, format.bad.first[0][:2]) == (1, (str(path), at + 1))
        assert reason in format.bad.summary()


def numbers_as(kind, numbers):
    """Return a file with these texts as numbers of a column x, and an infinity that is one."""
    if kind == "multislot":
        return "".join(f"1 {each}\n" for each in [*numbers, "inf"]).encode()
    if kind == "csv":
        return "\n".join(["x", *numbers, "inf"]).encode()
    if kind == "jsonl":
        return "\n".join(f'{{"x": {each}}}' for each in [*numbers, "Infinity"]).encode()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for i, each in enumerate([*numbers, "inf"]):
            member = tarfile.TarInfo(f"{i}.x")
            member.size = len(each)
            archive.addfile(member, io.BytesIO(each.encode()))
    return out.getvalue()


@pytest.mark.usefixtures("_with_and_without_arrow")
@pytest.mark.parametrize("kind", ["multislot", "csv", "jsonl", "tar"])
@pytest.mark.parametrize(
    ("dtype", "large"), [("float32", "1e39"), ("float32", "-1e400"), ("float64", "1e400")]
)
def test_a_number_too_large_for_its_slot_is_malformed_and_an_infinity_is_not(kind, dtype, large):
    data = numbers_as(kind, ["1.5", large, "1" + "0" * 400, "1e-400", "3.4028235e38"])
    line = 3 if kind == "csv" else 2
    with pytest.raises(
        dist.DatasetError,
        match=f":{line}: .*x.*{large[-2:]}.* (too large for|not valid as) {dtype}",
    ):
        list(opened(kind, [("x", dtype, ())]).read(io.BytesIO(data)))
    lenient = opened(kind, [("x", dtype, ())], on_bad="skip")
    found = np.concatenate([part["x"].values for part in lenient.read(io.BytesIO(data))])
    assert found.tolist() == np.array([1.5, 0, 3.4028235e38, np.inf], dtype).tolist()
    assert lenient.bad.count == 2


@pytest.mark.parametrize("kind", ["parquet", "npy"])
def test_a_column_with_a_number_too_large_for_its_slot_is_refused(kind, tmp_path):
    for last in (1e39, np.inf):
        out = io.BytesIO()
        if kind == "npy":
            np.save(out, np.array([1.5, last]))
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pytest.importorskip("pyarrow").table({"x": [1.5, last]}), out)
        read = opened(kind, [("x", "float32", ())]).read(io.BytesIO(out.getvalue()))
        if last == np.inf:
            assert next(read)["x"].values.tolist() == [1.5, np.inf]
        else:
            with pytest.raises(dist.DatasetError, match=r"1e\+39, which is too large for float32"):
                next(read)


def test_truths_of_an_archive_are_words_or_bits():
    def of(text):
        data = numbers_as("tar", [text]).replace(b"inf", b"1  ")
        return next(opened("tar", [("x", "bool", ())]).read(io.BytesIO(data)))["x"].values[0]

    assert [of(each) for each in ("0", "false", "1", "True")] == [False, False, True, True]
    with pytest.raises(dist.DatasetError, match="'yes' is not valid as bool"):
        of("yes")


@every_text
def test_a_malformed_line_in_a_later_piece_has_its_number_in_the_file(kind, tmp_path):
    lines = KINDS[kind][1]([record(i) for i in range(30)]).splitlines(keepends=True)
    path = tmp_path / "part"
    path.write_bytes(b"".join([*lines[:21], b"?\n", *lines[21:]]))
    for start in (1, len(b"".join(lines[:10])), len(b"".join(lines[:10])) + 1):
        with pytest.raises(dist.DatasetError, match=r"part:22: "):
            list(opened(kind).read(path, start=start, stop=path.stat().st_size))


@every_text
def test_a_line_beyond_the_bound_is_refused_by_its_number(kind, tmp_path):
    lines = KINDS[kind][1]([record(i) for i in range(6)]).splitlines(keepends=True)
    path = tmp_path / "part"
    path.write_bytes(b"".join([*lines[:4], b"1 " * 5000 + b"\n", *lines[4:]]))
    with pytest.raises(dist.DatasetError, match="part:5: the line is longer than max_line_bytes"):
        list(opened(kind, max_line_bytes=500).read(path))
    check(opened(kind, max_line_bytes=500, on_bad="skip").read(path), kind, range(6))


@pytest.mark.parametrize(
    ("on_bad", "told"),
    [
        ("raise", "part:2: the line is longer than max_line_bytes"),
        ("skip", "part: EndlessLine: a line has not ended after"),
    ],
)
def test_a_line_without_end_from_a_command_is_refused(on_bad, told, tmp_path, monkeypatch):
    monkeypatch.setattr("hpcdist.data.lines._ENDLESS_NBYTES", 1 << 20)
    (tmp_path / "part").write_bytes(b"1 5\n")
    format = open_format(
        "multislot",
        Settings(
            slots_of([("x", "int64", ())]),
            pipe_command="cat; yes | tr -d '\\n'",
            max_line_bytes=10_000,
            block_bytes=4096,
            on_bad=on_bad,
        ),
    )
    with pytest.raises(dist.DatasetError, match=told):
        list(format.read(tmp_path / "part"))


def test_a_line_of_10_gib_is_refused_with_the_memory_of_its_bound(tmp_path):
    path, most = tmp_path / "part", 1 << 20
    path.write_bytes(b"1 5\n")
    os.truncate(path, 10 << 30)  # a hole, which takes no room
    use = slots_of([("x", "int64", ())])
    format = open_format("multislot", Settings(use, max_line_bytes=most, block_bytes=most))
    tracemalloc.start()
    try:
        with pytest.raises(dist.DatasetError, match="part:2: the line is longer than max_line"):
            list(format.read(path))
        assert tracemalloc.get_traced_memory()[1] < 32 * most
    finally:
        tracemalloc.stop()


@every_kind
def test_nothing_at_all_is_no_records_where_that_is_allowed(kind, tmp_path):
    path = tmp_path / "part"
    path.write_bytes(b"")
    assert list(opened(kind, allow_empty=True).read(path)) == []
    if TABLE[KINDS[kind][0]].is_stream:
        path.write_bytes(b"something")
        format = opened(kind, pipe_command="cat >/dev/null", allow_empty=True)
        assert list(format.read(path)) == []


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream"])
def test_nulls_are_malformed_and_named_by_their_record(kind, tmp_path):
    pytest.importorskip("pyarrow")
    rows = [record(i) for i in range(20)]
    rows[11] |= {"x": None}
    rows[13] |= {"l": [1, None]}
    rows[17] |= {"l": None}
    path = tmp_path / "part"
    path.write_bytes(KINDS[kind][1](rows))
    with pytest.raises(dist.DatasetError, match="part:12: column 'x' has a null"):
        list(opened(kind).read(path))
    format = opened(kind, on_bad="skip")
    check(format.read(path), kind, [i for i in range(20) if i not in (11, 13, 17)])
    assert [bad.line for bad in format.bad.first] == [12, 14, 18]


def test_lists_of_the_wrong_length_are_malformed(tmp_path):
    for kind in ("parquet", "jsonl", "tar"):
        format = opened(kind, [("id", "int64", ()), ("l", "float32", (3,))], on_bad="skip")
        rows = Columns.concat(list(format.read(written(kind, tmp_path))))
        assert rows["l"].values.shape == (ROWS // 4, 3)
        assert rows["id"].values.tolist() == [i * 10**9 for i in range(2, ROWS, 4)]
        assert format.bad.first[0].line == 1
        assert "has 1 values, not 3" in format.bad.first[0].reason


def test_members_that_are_missing_or_no_numbers_are_malformed(tmp_path):
    path = tmp_path / "part.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in [("a.x", b"1"), ("b.x", b"no"), ("c.y", b"1"), ("d.x", b"4")]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    use = ["__key__", ("x", "int64", ())]
    format = opened("tar", use, on_bad="count")
    rows = Columns.concat(list(format.read(path)))
    assert [(row["__key__"], row["x"]) for row in rows] == [("a", 1), ("d", 4)]
    assert [str(bad).split(": ", 1)[1][:12] for bad in format.bad.first] == [
        "record 'b': ",
        "record 'c': ",
    ]


@pytest.mark.parametrize("kind", ["parquet", "arrow", "npy", "tar"])
def test_a_damaged_file_is_named(kind, tmp_path):
    path = written(kind, tmp_path)
    with open(path, "rb") as file:
        data = file.read()
    for damaged in (b"", b"nonsense " * 200, data[: len(data) // 2]):
        (tmp_path / "damaged").write_bytes(damaged)
        if kind == "tar" and not damaged:  # which is how a tar without members may end
            continue
        with pytest.raises(dist.DatasetError, match="damaged"):
            list(opened(kind).read(tmp_path / "damaged"))


def test_an_archive_that_has_been_cut_anywhere_or_has_a_damaged_header_is_refused(tmp_path):
    whole = as_tar([record(i) for i in range(4)])
    (tmp_path / "part.tar").write_bytes(whole)
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    pieces = [whole[:at] for at in (*range(1, end, 300), *range(512, end + 512, 512))]
    for at in range(0, end, 1024):  # a header, and a block of data
        pieces.append(whole[: at + 5] + b"!" + whole[at + 6 :])
    for damaged in pieces:
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(dist.DatasetError, match="damaged"):
            list(opened("tar").read(tmp_path / "damaged"))
    for end in PACK:
        packed = bytearray(PACK[end](whole))
        packed[-6 if end == ".gz" else len(packed) // 2] ^= 4  # within the checksum, or the data
        (tmp_path / f"damaged.tar{end}").write_bytes(packed)
        with pytest.raises(dist.DatasetError, match=rf"damaged\.tar\{end}: "):
            list(opened("tar").read(tmp_path / f"damaged.tar{end}"))


@pytest.mark.parametrize("end", [".gz", ".bz2", ".xz"])
def test_a_file_that_was_packed_in_parts_is_whole_or_refused(end, tmp_path):
    lines = as_jsonl([record(i) for i in range(ROWS)]).splitlines(keepends=True)
    first, second = (PACK[end](b"".join(part)) for part in (lines[: ROWS // 2], lines[ROWS // 2 :]))
    path = tmp_path / f"part.jsonl{end}"
    for between in (b"", bytes(8)):
        path.write_bytes(first + between + second + between)
        check(opened("jsonl").read(path), "jsonl", range(ROWS))
    for at in (1, 10, 20, len(second) // 2, -3):
        damaged = bytearray(second)
        damaged[at] ^= 1
        path.write_bytes(first + damaged)
        with pytest.raises(dist.DatasetError, match=rf"part\.jsonl\{end}: \w+: "):
            list(opened("jsonl", on_bad="skip").read(path))


@pytest.mark.parametrize("kind", ["arrow", "stream"])
def test_text_that_lies_outside_of_a_damaged_file_is_refused(kind, tmp_path):
    pa = pytest.importorskip("pyarrow")
    out, table = io.BytesIO(), pa.table({"s": pa.array(["aa", "bb", "cc"])})
    make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
    with make(out, table.schema) as writer:
        writer.write_table(table)
    data = bytearray(out.getvalue())
    offsets = np.array([0, 2, 4, 6], "<i4").tobytes()
    data[data.find(offsets) + 7] = 0x41
    (tmp_path / "part").write_bytes(data)
    with pytest.raises(dist.DatasetError, match="part: ArrowInvalid"):
        list(opened("arrow", [STRING]).read(tmp_path / "part"))
    (tmp_path / "part").write_bytes(out.getvalue()[:-40])
    with pytest.raises(dist.DatasetError, match="part: "):
        list(opened("arrow", [STRING]).read(tmp_path / "part"))


@pytest.mark.parametrize("end", PACK)
def test_packed_text_that_is_damaged_or_has_another_name_is_told(end, tmp_path):
    path = written("csv", tmp_path, name=f"part.csv{end}")
    with open(path, "rb") as file:
        data = file.read()
    (tmp_path / "part.csv").write_bytes(data)
    for piece in ({}, {"start": len(data) // 2}):
        with pytest.raises(dist.DatasetError, match=rf"part\.csv: is packed, as \{end} files are"):
            list(opened("csv", on_bad="skip").read(str(tmp_path / "part.csv"), **piece))
    (tmp_path / f"part.csv{end}").write_bytes(data[:-9])
    with pytest.raises(dist.DatasetError, match=rf"part\.csv\{end}: \w+: "):
        list(opened("csv", on_bad="skip").read(path))


def test_what_unpacks_a_file_is_named_where_it_is_missing(tmp_path, monkeypatch):
    path = written("csv", tmp_path, name="part.csv.zst")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(dist.UsageError, match=r"need pyarrow: .*pipe_command='zstd -dc'"):
        list(opened("csv").read(path))


def test_a_command_gets_what_it_unpacks_itself(tmp_path):
    path = written("csv", tmp_path, name="part.csv.xz")
    unpack = f"{shlex.quote(sys.executable)} -c 'import lzma, shutil, sys\n"
    unpack += "shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)'"
    check(opened("csv", pipe_command=unpack).read(path), "csv", range(ROWS))


def test_a_table_cannot_be_unpacked_while_it_is_read(tmp_path):
    path = written("parquet", tmp_path, name="part.parquet.zst")
    with pytest.raises(dist.DatasetError, match="cannot be unpacked while it is read; unpack it"):
        list(opened("parquet").read(path))


def test_packed_text_that_is_cut_off_is_named(tmp_path):
    path = written("csv", tmp_path, name="part.csv.gz")
    with open(path, "rb") as file:
        data = file.read()
    for damaged in (data[:-9], b"nonsense"):
        (tmp_path / "part.csv.gz").write_bytes(damaged)
        with pytest.raises(dist.DatasetError, match=r"part\.csv\.gz: (EOFError|BadGzipFile)"):
            list(opened("csv").read(path))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(dist.DatasetError, match="none: FileNotFoundError"):
        list(opened("csv").read(tmp_path / "none"))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(dist.UsageError, match="format must be one of 'multislot', 'csv'"):
        open_format("xml")
    with pytest.raises(dist.UsageError, match="on_bad must be one of 'raise', 'skip', 'count'"):
        open_format("csv", Settings(on_bad="ignore"))
    for name in ("max_line_bytes", "block_bytes"):
        with pytest.raises(dist.UsageError, match=f"{name} must be a number of bytes"):
            open_format("csv", Settings(**{name: 0}))
    assert set(TABLE) == {kind for kind, _, _ in KINDS.values()}


def test_a_column_of_a_type_that_datasets_have_not_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"z": [{"a": 1}]}), tmp_path / "part")
    with pytest.raises(dist.DatasetError, match="part: column 'z' is of Arrow's type struct"):
        list(opened("parquet", []).read(tmp_path / "part"))
    parquet.write_table(pa.table({"z": ["text"]}), tmp_path / "part")
    with pytest.raises(dist.DatasetError, match="'z' is string in the file, not int64"):
        list(opened("parquet", [("z", "int64")]).read(tmp_path / "part"))


def test_kinds_of_arrow_become_columns(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    table = pa.table(
        {
            "flag": pa.array([True, False, True]),
            "word": pa.array(["a", "bb", "a"]).dictionary_encode(),
            "pair": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32(), 2)),
            "raw": pa.array([b"", b"\0", b"xy"], pa.large_binary()),
        }
    )
    parquet.write_table(table, tmp_path / "part")
    rows = Columns.concat(list(opened("parquet", []).read(tmp_path / "part")))
    assert rows["flag"].values.tolist() == [True, False, True]
    assert [row["word"] for row in rows] == ["a", "bb", "a"]
    assert rows["pair"].values.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert [row["raw"] for row in rows] == [b"", b"\0", b"xy"]
