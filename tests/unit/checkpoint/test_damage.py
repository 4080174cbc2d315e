"""Whatever is in the place of a checkpoint: it is read right, or it is a `CheckpointError`."""

import base64
import copy
import json
import os
import re
import shutil
import struct
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from safetensors.numpy import load_file

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint.blocks import BLOCK, checksum

STATE = {
    "w": np.arange(6.0).reshape(2, 3),
    "large": np.arange(BLOCK + 100, dtype=np.uint8),
    "b": np.ones(3, ml_dtypes.bfloat16),
    "table": np.zeros(2, [("place", "f4", (3,)), ("name", "S4")]),
    "nothing": np.zeros((0, 3)),
    "scalar": np.float32(1.5),
    "values": [1, 2.5, None, True, "text", b"\0", 1 + 2j, float("inf"), 2**70, (1, {})],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    checkpoint.save(STATE, folder)
    return folder


def content_of(folder):
    return json.loads((Path(folder) / "checkpoint.json").read_bytes())["content"]


def forge(folder, content):
    """Write a manifest with a right checksum; `content` is text, or what becomes JSON."""
    if not isinstance(content, bytes):
        content = json.dumps(content, separators=(",", ":")).encode()
    head = b'{"xxh3_64":"%016x","content":' % checksum(content)
    Path(folder, "checkpoint.json").write_bytes(head + content + b"}")


@pytest.fixture
def forged(saved, tmp_path):
    """A copy of the checkpoint, and its manifest to change."""
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    return folder, content_of(folder)


def refused(folder):
    """Return what is said of a checkpoint that nothing accepts."""
    told = set()
    for use in (lambda: checkpoint.load(None, folder), lambda: checkpoint.verify(folder)):
        with pytest.raises(dist.CheckpointError) as caught:
            use()
        told.add(str(caught.value))
    output = Path(f"{folder}.safetensors")
    with pytest.raises(dist.CheckpointError):
        checkpoint.consolidate(folder, output)
    assert not output.exists()
    return " ".join(told)


def test_a_forged_manifest_that_is_right_is_read(forged):
    folder, content = forged
    forge(folder, content)
    assert (checkpoint.load(None, folder)["w"] == STATE["w"]).all()


def pieces(content, name="w"):
    return content["arrays"][name]["pieces"]


def cut(content):
    """Cut the array ``w`` of 6 elements into pieces of 3, one after the other."""
    file, offset, _, _, sums = pieces(content)[0]
    pieces(content)[:] = [[file, offset, 0, 3, sums], [file, offset + 24, 3, 3, sums]]


def quarter(content):
    """Cut the array ``w`` of 2 rows of 3 into boxes: the first two columns, and the third one."""
    file, offset, _, _, sums = pieces(content)[0]
    pieces(content)[:] = [
        [file, offset, 0, 0, 2, 2, sums],
        [file, offset + 32, 0, 2, 2, 1, sums],
    ]


def place(content, number=0, offsets=None, lengths=None):
    """Change the offsets or the lengths of a piece of the array ``w``."""
    piece = pieces(content)[number]
    half = len(piece) // 2 + 1
    offsets = piece[2:half] if offsets is None else offsets
    lengths = piece[half:-1] if lengths is None else lengths
    piece[2:-1] = [*offsets, *lengths]


def deep(levels):
    node = {"value": 1}
    for _ in range(levels):
        node = {"list": [node]}
    return node


CHANGES = {
    "no pieces": (
        lambda c: pieces(c).clear(),
        r"arrays\['w'\] must be covered once, but the elements \[0:6\] are in no piece",
    ),
    "a gap in front": (lambda c: place(c, offsets=[1], lengths=[5]), r"\[0:1\] are in no piece"),
    "a gap behind": (lambda c: place(c, lengths=[5]), r"\[5:6\] are in no piece"),
    "too long": (lambda c: place(c, lengths=[7]), r"inside of its shape, \(2, 3\), not '\[0:7\]'"),
    "a gap": (
        lambda c: (cut(c), place(c, 1, offsets=[4], lengths=[2])),
        r"\[3:4\] are in no piece",
    ),
    "an overlap": (
        lambda c: (cut(c), place(c, 1, offsets=[2], lengths=[4])),
        r"\[2:3\] are in two pieces",
    ),
    "a gap of boxes": (
        lambda c: (quarter(c), place(c, 1, lengths=[1, 1])),
        r"\[1:2, 2:3\] are in no piece",
    ),
    "an overlap of boxes": (
        lambda c: (quarter(c), place(c, 1, offsets=[0, 1], lengths=[2, 2])),
        r"\[0:2, 1:2\] are in two pieces",
    ),
    "a box beyond the array": (
        lambda c: (quarter(c), place(c, 1, lengths=[3, 1])),
        r"inside of its shape, \(2, 3\), not '\[0:3, 2:3\]'",
    ),
    "a box of three dimensions": (
        lambda c: (quarter(c), place(c, 1, offsets=[0, 2, 0], lengths=[2, 1, 1])),
        "inside of its shape",
    ),
    "a box without an offset": (
        lambda c: (quarter(c), place(c, 1, offsets=[0])),
        "a list of file, offset, box and checksums",
    ),
    "a box of no dimensions": (
        lambda c: place(c, offsets=[], lengths=[]),
        "a list of file, offset, box and checksums",
    ),
    "a negative offset": (lambda c: place(c, offsets=[-1]), "an integer from 0"),
    "a negative length": (lambda c: place(c, lengths=[-6]), "an integer from 0"),
    "an offset that is a list": (lambda c: place(c, offsets=[[0]]), r"an integer .*, not \[0\]"),
    "a length that is a truth": (lambda c: place(c, lengths=[True]), "an integer from 0"),
    "a huge length": (lambda c: place(c, lengths=[2**63]), "an integer from 0"),
    "an empty piece": (lambda c: place(c, lengths=[0]), "without an empty piece"),
    "an empty piece of an array": (
        lambda c: pieces(c).append([0, 0, 6, 0, ""]),
        "without an empty piece",
    ),
    "too many pieces of nothing": (
        lambda c: pieces(c, "nothing").append([9, 0, 0, 0, ""]),
        "files",
    ),
    "twice the same bytes": (
        lambda c: pieces(c, "b")[0].__setitem__(1, pieces(c)[0][1]),
        "places of their own",
    ),
    "beyond the file": (lambda c: pieces(c)[0].__setitem__(1, 10**15), "inside of its file"),
    "before the file": (lambda c: pieces(c)[0].__setitem__(1, -8), "an integer from 0"),
    "no such file": (lambda c: pieces(c)[0].__setitem__(0, 5), "in the files, not 5"),
    "the last file": (lambda c: pieces(c)[0].__setitem__(0, -1), "an integer from 0"),
    "few checksums": (
        lambda c: pieces(c, "large")[0].__setitem__(-1, "AAAAAAAAAAA="),
        "2 checksums",
    ),
    "odd checksums": (lambda c: pieces(c)[0].__setitem__(4, "***"), "base64"),
    "checksums that are a number": (lambda c: pieces(c)[0].__setitem__(4, 7), "text"),
    "a huge shape": (
        lambda c: c["arrays"]["w"].update(shape=[10**18]),
        r"\[6:1000000000000000000\] are in no piece",
    ),
    "a huge shape of nothing": (
        lambda c: c["arrays"]["nothing"].update(shape=[0, 2**62, 2**62]),
        "possible size",
    ),
    "a shape beyond all numbers": (lambda c: c["arrays"]["w"].update(shape=[2**70]), "an integer"),
    "a negative shape": (lambda c: c["arrays"]["w"].update(shape=[-2, -3]), "an integer from 0"),
    "a shape of truths": (lambda c: c["arrays"]["w"].update(shape=[True, 6]), "an integer from 0"),
    "a shape of floats": (lambda c: c["arrays"]["w"].update(shape=[2.0, 3]), "an integer from 0"),
    "many dimensions": (lambda c: c["arrays"]["w"].update(shape=[6] + [1] * 99), "dimensions"),
    "a dtype of objects": (lambda c: c["arrays"]["w"].update(dtype="O"), "a dtype, not 'O'"),
    "a dtype of nothing": (lambda c: c["arrays"]["w"].update(dtype="V0"), "a dtype"),
    "a dtype that is a number": (lambda c: c["arrays"]["w"].update(dtype=8), "a dtype, not 8"),
    "a dtype that is a truth": (lambda c: c["arrays"]["w"].update(dtype=True), "a dtype"),
    "a dtype of the module": (lambda c: c["arrays"]["w"].update(dtype="finfo"), "a dtype"),
    "an odd structure of a dtype": (lambda c: c["arrays"]["w"].update(dtype=[["a"]]), "a dtype"),
    "a huge dtype": (lambda c: c["arrays"]["w"].update(dtype=["f8", [2**40, 2**40]]), "a dtype"),
    "a wider dtype": (
        lambda c: c["arrays"]["w"].update(dtype="complex128"),
        "places of their|insi",
    ),
    "an array without a node": (lambda c: c["structure"]["dict"].pop(0), "of these arrays"),
    "a node without an array": (lambda c: c["arrays"].pop("w"), "of these arrays"),
    "an array named twice": (
        lambda c: c["structure"]["dict"].append(["again", {"array": "w"}]),
        "of these arrays",
    ),
    "a scalar with a shape": (
        lambda c: c["structure"]["dict"][0].__setitem__(1, {"scalar": "w"}),
        "a scalar",
    ),
    "a tensor of a table": (
        lambda c: c["structure"]["dict"][3].__setitem__(1, {"tensor": "table"}),
        "a dtype of tensor",
    ),
    "a node of an unknown kind": (lambda c: c.update(structure={"pickle": "x"}), "a wrong value"),
    "a node of two kinds": (lambda c: c.update(structure={"list": [], "dict": []}), "a node"),
    "a node that is none": (lambda c: c.update(structure=None), "a node"),
    "a deep state": (lambda c: c.update(structure=deep(150)), "at most 100 containers"),
    "equal keys": (
        lambda c: c["structure"]["dict"].append(["w", {"value": 1}]),
        "without equal keys",
    ),
    "a key that is a list": (lambda c: c["structure"]["dict"].append([[], {"value": 1}]), "a key"),
    "a value that is a list": (lambda c: c.update(structure={"value": [1]}), "a wrong value"),
    "odd bytes": (lambda c: c.update(structure={"bytes": "\u00e9"}), "a wrong value"),
    "an odd complex number": (lambda c: c.update(structure={"complex": ["1"]}), "a wrong value"),
    "an odd float": (lambda c: c.update(structure={"float": "one"}), "a wrong value"),
    "a number of hexes": (lambda c: c.update(structure={"int": 5}), "a wrong value"),
    "a file above": (lambda c: c["files"][0].__setitem__(0, "../x.safetensors"), "in this folder"),
    "an absolute file": (lambda c: c["files"][0].__setitem__(0, "/etc/passwd"), "in this folder"),
    "a file with a NUL": (
        lambda c: c["files"][0].__setitem__(0, f"{'0' * 12}-0\0.safetensors"),
        "in this folder",
    ),
    "a file that is a number": (lambda c: c["files"][0].__setitem__(0, 3), "in this folder"),
    "a file named twice": (lambda c: c["files"].append(c["files"][0]), "must be different"),
    "no files": (lambda c: c.update(files=[]), "in the files"),
    "files that are an object": (lambda c: c.update(files={}), "a list"),
    "a file of another size": (lambda c: c["files"][0].__setitem__(1, 10**9), "were saved"),
    "a file of negative size": (lambda c: c["files"][0].__setitem__(1, -1), "an integer from 0"),
    "no version": (lambda c: c.pop("version"), "an object with"),
    "version 0": (lambda c: c.update(version=0), "an integer from 1"),
    "version 2 with boxes": (
        lambda c: (quarter(c), c.update(version=2)),
        "a piece must be a list of 5",
    ),
    "version 4": (lambda c: c.update(version=4), "of version 4, .*; install a newer one"),
    "version true": (lambda c: c.update(version=True), "an integer from 1"),
    "version 2.5": (lambda c: c.update(version=2.5), "an integer from 1"),
    "version text": (lambda c: c.update(version="2"), "an integer from 1"),
    "other blocks": (lambda c: c.update(block=1), "an integer from 1048576"),
    "a negative step": (lambda c: c.update(step=-1), "an integer from 0"),
    "no ranks": (lambda c: c.update(ranks=0), "an integer from 1"),
    "something more": (lambda c: c.update(more=1), "an object with"),
    "arrays that are a list": (lambda c: c.update(arrays=[]), "an object"),
    "an array that is a list": (lambda c: c["arrays"].update(w=[]), "an object with"),
    "a piece too short": (lambda c: pieces(c)[0].pop(), "a list of file, offset, box"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_with_a_wrong_entry_is_damaged(forged, name):
    folder, content = forged
    change, message = CHANGES[name]
    change(content)
    forge(folder, content)
    told = refused(folder)
    assert re.search(message, told), told


OLD_CHANGES = {
    "a gap in front": (lambda c: pieces(c)[0].__setitem__(2, 1), r"\[0:1\] are in no piece"),
    "a gap": (lambda c: pieces(c)[1].__setitem__(2, 10), r"\[9:10\] are in no piece"),
    "an overlap": (lambda c: pieces(c)[1].__setitem__(2, 8), r"\[8:9\] are in two|inside of|sums"),
    "too long": (lambda c: pieces(c)[1].__setitem__(3, 43), "inside of its shape"),
    "backwards": (lambda c: pieces(c)[1].__setitem__(3, 8), "inside of its shape"),
    "no piece": (lambda c: pieces(c).clear(), r"\[0:42\] are in no piece"),
    "a piece too long": (lambda c: pieces(c)[0].insert(2, 0), "a list of file, offset, box"),
    "version 3 with runs": (lambda c: c.update(version=3), "inside of its shape|are in two"),
}


@pytest.mark.parametrize("name", OLD_CHANGES)
def test_a_manifest_of_version_2_with_a_wrong_entry_is_damaged(tmp_path, name):
    folder = tmp_path / "copy"
    shutil.copytree(Path(__file__).parent / "data/checkpoints/shards-2", folder)
    content = content_of(folder)
    change, message = OLD_CHANGES[name]
    change(content)
    forge(folder, content)
    told = refused(folder)
    assert re.search(message, told), told


@pytest.mark.parametrize("divide", [cut, quarter])
def test_pieces_in_any_order_are_put_together(forged, tmp_path, divide):
    folder, content = forged
    expected = STATE["w"].reshape(-1)[[0, 1, 3, 4, 2, 5]] if divide is quarter else STATE["w"]
    (file,) = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
    divide(content)
    with open(file, "r+b") as data:
        data.seek(pieces(content)[0][1])
        data.write(expected.tobytes())
        for piece in pieces(content):
            data.seek(piece[1])
            nbytes = 8 * int(np.prod(piece[len(piece) // 2 + 1 : -1]))
            piece[-1] = base64.b64encode(struct.pack("<Q", checksum(data.read(nbytes)))).decode()
    pieces(content).reverse()
    forge(folder, content)
    assert (checkpoint.load(None, folder)["w"] == STATE["w"]).all()
    checkpoint.consolidate(folder, tmp_path / "all")
    assert (load_file(tmp_path / "all")["w"] == STATE["w"]).all()


TEXTS = {
    "nothing": b"",
    "a list": b'[1,"hpcdist checkpoint"]',
    "text": b'"hpcdist checkpoint"',
    "cut": b'{"format":"hpcdist checkpoint","version":2,',
    "a number without end": b'{"format":"hpcdist checkpoint","version":' + b"9" * 5000 + b"}",
    "NaN": b'{"format":"hpcdist checkpoint","version":NaN}',
    "two entries of a name": b'{"format":"hpcdist checkpoint","version":9,"version":2}',
    "no UTF-8": b'{"format":"hpcdist checkpoint","version":"\xff"}',
    "very deep": b'{"format":"hpcdist checkpoint","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"format":"hpcdist checkpoint","a":'
    + b'{"a":' * 50_000
    + b"1"
    + b"}" * 50_001,
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_no_manifest_is_damaged(forged, name):
    folder, _ = forged
    forge(folder, TEXTS[name])
    assert "damaged" in refused(folder) or "does not belong" in refused(folder)


def test_a_deep_dtype_is_damaged(forged):
    folder, content = forged
    text = json.dumps(content, separators=(",", ":"))
    nested = '"dtype":' + "[" * 900 + "]" * 900
    forge(folder, text.replace('"dtype":"float64"', nested, 1).encode())
    assert "damaged" in refused(folder)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"\0" * 300, b'{"xxh3_64":', b'{"format": "other"}', b"\xff\xfe"],
)
def test_other_peoples_json_is_no_checkpoint(tmp_path, text):
    (tmp_path / "checkpoint.json").write_bytes(text)
    assert "does not belong" in refused(tmp_path)
    assert (tmp_path / "checkpoint.json").read_bytes() == text


# ---- every other change

JUNK = [
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.5, 1e300, "", "x", "..", "\0",
    "O", "array", [], {}, [[]], [None], {"list": []}, {"array": "w"}, {"value": 1}, {"a": 1},
]  # fmt: skip


def places(value, path=()):
    """Give the paths of all that is in a manifest."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items if isinstance(value, (dict, list)) else ():
        if isinstance(child, (dict, list)):
            yield from places(child, (*path, key))
        else:
            yield (*path, key)


def changed(content, path, action, junk):
    """Return a copy of a manifest in which one place is other."""
    content = copy.deepcopy(content)
    if not path:
        return junk
    target = content
    for key in path[:-1]:
        target = target[key]
    if action == "remove":
        del target[path[-1]]
    elif action == "double" and isinstance(target, list):
        target.append(copy.deepcopy(target[path[-1]]))
    else:
        target[path[-1]] = junk
    return content


def same(found, expected):
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(map(same, found.values(), expected.values()))
    return found == expected


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_change_is_a_checkpoint_error_or_reads_only_what_was_saved(saved, data):
    """What no check can see, such as another name or number among the values, does no harm."""
    content = content_of(saved)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(content))))
        action = data.draw(st.sampled_from(["replace", "remove", "double"]))
        content = changed(content, path, action, data.draw(st.sampled_from(JUNK)))
        if not isinstance(content, (dict, list)):
            break
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "copy"
        shutil.copytree(saved, folder)
        forge(folder, content)
        bounded(folder)


def bounded(folder):
    """Load what may be damaged; what is loaded is not larger than the files."""
    try:
        found = checkpoint.load(None, folder)
    except dist.CheckpointError:
        return
    values = found.values() if type(found) is dict else ()
    arrays = [each for each in values if isinstance(each, np.ndarray)]
    on_disk = sum(path.stat().st_size for path in Path(folder).iterdir())
    assert sum(each.nbytes for each in arrays) <= on_disk


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_cut_or_flip_of_a_file_is_a_checkpoint_error(saved, data):
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "copy"
        shutil.copytree(saved, folder)
        path = data.draw(st.sampled_from(sorted(folder.iterdir())))
        text = bytearray(path.read_bytes())
        position = data.draw(st.integers(0, len(text) - 1))
        if data.draw(st.booleans()):
            path.write_bytes(text[:position])
        else:
            text[position] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(text)
        try:
            found = checkpoint.load(None, folder)
        except dist.CheckpointError:
            return
        assert path.suffix == ".safetensors"  # its header, which only other programs read
        assert all(same(found[key], STATE[key]) for key in STATE if key != "values")
        with pytest.raises(dist.CheckpointError, match="its header"):
            checkpoint.verify(folder)


@pytest.mark.parametrize("size", [1, 3])
def test_the_headers_of_files_are_verified(size, tmp_path):
    def save():
        return checkpoint.save(
            {"w": np.arange(6.0), f"own.{dist.get_rank()}": np.ones(3, "f4")}, tmp_path
        )

    dist.simulate(size, save)
    assert checkpoint.verify(tmp_path).ranks == size
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    text = path.read_bytes()
    for old, new in ((b'"F32"', b'"I32"'), (b'"own', b'"not'), (b"[3]", b"[4]")):
        assert old in text
        path.write_bytes(text.replace(old, new, 1))
        with pytest.raises(dist.CheckpointError, match=rf"{path.name}.*its header"):
            checkpoint.verify(tmp_path)
    path.write_bytes(text)
    checkpoint.verify(tmp_path)


def test_damage_is_an_error_on_all_ranks(forged):
    folder, content = forged
    pieces(content).clear()
    forge(folder, content)

    def load():
        state = {"w": np.zeros((2, 3))}
        with pytest.raises(dist.CheckpointError, match=r"arrays\['w'\] must be covered"):
            checkpoint.load(state, folder)
        with pytest.raises(dist.CheckpointError, match="covered"):
            checkpoint.verify(folder)
        dist.barrier()
        return state["w"].sum()

    assert dist.simulate(3, load) == [0, 0, 0]


def test_the_command_shows_names_as_they_are_and_obeys_none(tmp_path):
    from click.testing import CliRunner

    from hpcdist.checkpoint.command import checkpoint as command

    names = ["[/red]", "[bold]x", "a\x1b[2Jb", "\nline"]
    checkpoint.save({name: np.ones(1) for name in names}, tmp_path)
    done = CliRunner().invoke(command, ["ls", str(tmp_path)])
    assert done.exit_code == 0, done.exception
    assert "\x1b[2J" not in done.output
    assert all(shown in done.output for shown in ("[/red]", "[bold]x", r"a\x1b[2Jb", r"\nline"))


def test_the_command_tells_of_damage_without_a_traceback(forged):
    from click.testing import CliRunner

    from hpcdist.checkpoint.command import checkpoint as command

    folder, content = forged
    content["arrays"]["w"]["shape"] = [10**18]
    forge(folder, content)
    for words in (["ls"], ["verify"], ["consolidate"]):
        arguments = [*words, str(folder)] + [f"{folder}.out"] * (words == ["consolidate"])
        done = CliRunner().invoke(command, arguments)
        assert done.exit_code == 1, done
        assert isinstance(done.exception, SystemExit), done.exception
        assert "is damaged" in done.output
    assert not os.path.exists(f"{folder}.out")
