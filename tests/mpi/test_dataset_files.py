"""The ranks agree on the files of a dataset, and read all of their records once, in order."""

from contextlib import suppress

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.data.columns import Columns
from hpcdist.data.files import agree_on, deal
from hpcdist.data.formats import Settings, open_format, slots_of

pytestmark = pytest.mark.mpi

USE = [("id", "int64", ()), ("x", "float32")]


def shared_folder(tmp_path):
    """Return the first rank's folder, on every rank."""
    return dist.together().lead(lambda: tmp_path)


def lines(first, count):
    return "".join(f"1 {i} {i % 3} {'0.5 ' * (i % 3)}\n" for i in range(first, first + count))


def written(folder, counts):
    """Write files of so many records, on the first rank; return their names on all."""

    def write():
        first = 0
        for place, count in enumerate(counts):
            (folder / f"part-{place}").write_text(lines(first, count))
            first += count

    dist.together().lead(write)
    return [str(folder / f"part-{place}") for place in range(len(counts))]


def read(names, **settings):
    """Return the ids that this rank reads."""
    format = open_format("multislot", Settings(slots_of(USE), **settings))
    files = agree_on(names)
    cut = [format.can_cut(file.path) for file in files]
    mine = deal([file.size for file in files], dist.get_world_size(), cut)[dist.get_rank()]
    parts = [
        part
        for piece in mine
        for part in format.read(files[piece.file].path, start=piece.start, stop=piece.stop)
    ]
    return Columns.concat(parts)["id"].values.tolist() if parts else []


@pytest.mark.parametrize("counts", [[200], [3, 90, 1, 40], [1]])
@pytest.mark.parametrize("command", ["cat", "cat | cat"])
def test_the_ranks_read_all_records_once_and_in_order(tmp_path, counts, command):
    names = written(shared_folder(tmp_path), counts)
    with dist.together():
        mine = read(names, pipe_command=command)
    everything = [each for ids in dist.together().share(lambda: mine) for each in ids]
    assert everything == list(range(sum(counts)))


def test_one_file_is_shared_by_all_ranks(tmp_path):
    names = written(shared_folder(tmp_path), [400])
    counts = dist.together().share(lambda: len(read_alone(names)))
    assert max(counts) - min(counts) < 400 / len(counts)


def read_alone(names):
    format = open_format("multislot", Settings(slots_of(USE)))
    with open(names[0], "rb") as file:
        size = len(file.read())
    (piece,) = deal([size], dist.get_world_size())[dist.get_rank()]
    parts = format.read(names[0], start=piece.start, stop=piece.stop)
    return np.concatenate([part["id"].values for part in parts])


@pytest.mark.parametrize("fault", ["missing", "empty", "folder"])
def test_a_file_that_cannot_be_read_is_named_on_every_rank(tmp_path, fault):
    folder = shared_folder(tmp_path)
    names = written(folder, [5, 5, 5])

    def spoil():
        (folder / "part-1").unlink()
        if fault == "empty":
            (folder / "part-1").touch()
        elif fault == "folder":
            (folder / "part-1").mkdir()

    dist.together().lead(spoil)
    with pytest.raises(dist.DatasetError, match=r"1 of 3 files.*part-1: "):
        agree_on(names)
    assert len(agree_on([names[0], names[2]])) == 2


def test_ranks_that_list_other_files_are_named(tmp_path):
    if dist.get_world_size() < 2:
        pytest.skip("one rank agrees with itself")
    names = written(shared_folder(tmp_path), [5, 5])
    last = dist.get_world_size() - 1
    mine = names[:1] if dist.get_rank() == last else names
    with pytest.raises(dist.MismatchError, match=rf"than rank 0 do rank {last}: it lists 1 files"):
        agree_on(mine)
    mine = names[::-1] if dist.get_rank() == last else names
    with pytest.raises(dist.MismatchError, match=rf"rank {last}: file 0 is '.*part-1' instead"):
        agree_on(mine)
    assert len(agree_on(names)) == 2


def test_a_list_that_is_none_on_one_rank_is_an_error_on_all(tmp_path):
    names = written(shared_folder(tmp_path), [5])
    error = dist.UsageError if dist.get_rank() == 0 else dist.RemoteError
    with pytest.raises(error, match="files must be a list of paths"):
        agree_on("part-0" if dist.get_rank() == 0 else names)
    assert len(agree_on(names)) == 1


def test_a_malformed_record_of_one_rank_is_an_error_on_all(tmp_path):
    folder = shared_folder(tmp_path)

    def write():
        (folder / "part").write_text(lines(0, 50) + "oops\n" + lines(50, 50))

    dist.together().lead(write)
    with pytest.raises((dist.DatasetError, dist.RemoteError), match="part:51: "), dist.together():
        read([folder / "part"])
    with dist.together():
        mine = read([folder / "part"], on_bad="skip")
    assert sum(map(len, dist.together().share(lambda: mine))) == 100


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("cat; exit 3", "exit code 3"),
        ("sleep 1000", "has written nothing for"),
        ("cat >/dev/null", "has written nothing; pass allow_empty=True"),
    ],
)
def test_a_command_that_fails_is_an_error_on_all(tmp_path, command, told):
    names = written(shared_folder(tmp_path), [5, 5])
    with pytest.raises((dist.DatasetError, dist.RemoteError), match=told), dist.together():
        read(names, pipe_command=command, pipe_timeout=5)


def test_a_member_of_a_group_agrees_with_the_group_alone(tmp_path):
    names = written(shared_folder(tmp_path), [5])
    group = dist.new_group(list(range(dist.get_world_size() - 1)) or [0])
    if group.is_member():
        assert len(agree_on(names, group)) == 1
    else:
        with suppress(dist.UsageError):
            agree_on(names, group)
            pytest.fail("who is not in the group cannot agree")
    dist.barrier()
