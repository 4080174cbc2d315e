"""Files are dealt by bytes, in their order; what is wrong with a list is told by name."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as some

import hpcdist as dist
from hpcdist.data.files import File, Piece, agree_on, deal

SIZES = some.lists(some.integers(0, 40), max_size=8)


@given(sizes=SIZES, ranks=some.integers(1, 9), seed=some.integers(0, 255))
def test_every_byte_is_dealt_once_and_in_order(sizes, ranks, seed):
    cut = [bool(seed >> place & 1) for place in range(len(sizes))]
    pieces = [piece for mine in deal(sizes, ranks, cut) for piece in mine]
    assert len(deal(sizes, ranks, cut)) == ranks
    for file, size in enumerate(sizes):
        own = [piece for piece in pieces if piece.file == file]
        starts = [piece.start for piece in own]
        assert starts == sorted(starts)
        if not cut[file]:
            assert own == [Piece(file, 0, size)]
        assert [b for p in own for b in range(p.start, p.stop)] == list(range(size))
    assert [piece.file for piece in pieces] == sorted(piece.file for piece in pieces)


@given(sizes=SIZES, ranks=some.integers(1, 9))
def test_shares_of_files_that_can_be_cut_differ_by_a_byte(sizes, ranks):
    shares = [sum(p.stop - p.start for p in mine) for mine in deal(sizes, ranks)]
    assert max(shares) - min(shares) <= 1


@given(sizes=SIZES, ranks=some.integers(1, 9))
def test_shares_of_whole_files_are_off_by_less_than_a_file(sizes, ranks):
    shares = [sum(p.stop for p in mine) for mine in deal(sizes, ranks, cut=False)]
    assert max(shares) <= sum(sizes) / ranks + max(sizes, default=0) + 1


@pytest.fixture
def folder(tmp_path):
    for name, text in {"b.txt": "bb", "a.txt": "a", "empty.txt": "", "c.csv": "ccc"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "inner").mkdir()
    return tmp_path


def test_paths_patterns_and_urls_name_files(folder):
    one, two = str(folder / "a.txt"), str(folder / "b.txt")
    assert agree_on([folder / "c.csv", f"{folder}/[ab].txt", f"file://{two}"]) == [
        File(str(folder / "c.csv"), 3),
        File(one, 1),
        File(two, 2),
        File(f"file://{two}", 2),
    ]
    assert agree_on([f"file://{folder}/[ab].txt"]) == [File(one, 1), File(two, 2)]


def test_urls_have_patterns_in_their_last_part():
    fsspec = pytest.importorskip("fsspec")
    for name in "ba":
        with fsspec.open(f"memory://test_files/{name}.txt", "wb") as file:
            file.write(b"xyz")
    assert agree_on(["memory://test_files/*.txt"]) == [
        File("memory://test_files/a.txt", 3),
        File("memory://test_files/b.txt", 3),
    ]


def test_a_file_whose_name_looks_like_a_pattern_is_itself(tmp_path):
    (tmp_path / "part[1].txt").write_text("x")
    assert agree_on([tmp_path / "part[1].txt"]) == [File(str(tmp_path / "part[1].txt"), 1)]
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe_file("/itself/part[1].txt", b"xyz")
    assert agree_on(["memory://itself/part[1].txt"]) == [File("memory://itself/part[1].txt", 3)]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none.txt", "there is no such file"),
        ("empty.txt", "is empty"),
        ("inner", "is a folder; list its files"),
        ("*.none", "no file has such a name"),
    ],
)
def test_what_cannot_be_read_is_named(folder, name, told):
    with pytest.raises(dist.DatasetError) as caught:
        agree_on([folder / "a.txt", folder / name])
    assert f"{folder / name}: {told}" in str(caught.value)


def test_empty_files_may_be_allowed(folder):
    (found,) = agree_on([folder / "empty.txt"], allow_empty=True)
    assert found.size == 0


def test_files_without_permission_are_named():
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_text("something")
        path.chmod(0)
        Path(folder).chmod(0o755)
        try:
            if user == 0:  # who reads everything
                os.seteuid(65534)
            with pytest.raises(dist.DatasetError, match=r"a\.txt: PermissionError"):
                agree_on([path])
        finally:
            os.seteuid(user)


def test_many_faults_are_told_by_the_first_of_them(folder):
    with pytest.raises(dist.DatasetError, match=r"20 of 20 files .*; and 12 more$"):
        agree_on([folder / f"{i}.txt" for i in range(20)])


@pytest.mark.parametrize("files", ["a.txt", 5, None, [5], [""], []])
def test_what_is_no_list_of_paths_is_refused(files):
    with pytest.raises(dist.UsageError, match="list of"):
        agree_on(files)
