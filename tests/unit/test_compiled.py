"""Which compiled parts are there, and what is said of those that are not."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpcdist
from hpcdist import compiled
from hpcdist.compiled import NOT_COMPILED, PARTS, expect, load, missing

HERE = [name for name in PARTS if name not in missing()]


def hide(monkeypatch, name):
    """Let a part be looked for anew."""
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_every_part_has_its_sources_beside_its_package():
    for name in PARTS:
        folder = Path(hpcdist.__file__).parents[1].joinpath(*name.split(".")[:-1])
        assert [*folder.rglob("native/*.c")], name


def test_a_part_that_nobody_has_made_is_none(monkeypatch):
    monkeypatch.setattr(compiled, "PARTS", {"hpcdist.ps._other": "others"})
    assert load("hpcdist.ps._other") is None
    assert missing() == {"hpcdist.ps._other": NOT_COMPILED}


@pytest.mark.skipif(not HERE, reason="nothing was compiled here")
def test_a_part_is_loaded_where_it_was_made():
    for name in HERE:
        assert load(name).__name__.rpartition(".")[2] == name.rpartition(".")[2]


@pytest.mark.skipif(not HERE, reason="nothing was compiled here")
def test_a_part_that_does_not_load_is_named_with_the_reason(monkeypatch, tmp_path):
    name = HERE[-1]
    folder = tmp_path.joinpath(*name.split(".")[:-1])
    folder.mkdir(parents=True)
    suffix = "".join(Path(load(name).__file__).suffixes)
    (folder / f"{name.rpartition('.')[2]}{suffix}").write_bytes(b"no library")
    hide(monkeypatch, name)
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "hpcdist" / "compiled.py"))
    assert missing()[name].startswith("does not load: ")


def test_a_part_that_was_compiled_for_another_number_is_refused():
    there = SimpleNamespace(__name__="hpcdist.ps._native", __file__="x.so", NUMBERS={"LANES": 8})
    expect(there, LANES=8)
    expect(None, LANES=4)
    with pytest.raises(ImportError, match=r"with LANES = 8, and Python has 4: compile it again"):
        expect(there, LANES=4)
    with pytest.raises(ImportError, match="MOST = None, and Python has 3"):
        expect(there, MOST=3)
