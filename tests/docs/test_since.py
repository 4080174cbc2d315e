"""Each name of the reference tells the release that it came with."""

import re

import pytest
from docs_pages import ROOT

griffe = pytest.importorskip("griffe", reason="pip install 'hpcdist[docs]'")

from website import since  # noqa: E402


def test_a_name_is_of_the_release_that_recorded_it_or_of_the_one_being_made():
    records = {"all_reduce": "0.1.0", "Group.split": "0.2.0"}
    assert since.release_of("all_reduce", records, "0.3.0") == "0.1.0"
    assert since.release_of("scan", records, "0.3.0") == "0.3.0"
    assert since.release_of("scan", records, "0.2.0") == since.UNRELEASED  # 0.2.0 is out


CLASS = '''
class Group:
    """Some ranks.

    Attributes:
        rank: of this process.

    """

    def split(self):
        """Make parts."""

    def grid(self):
        """Make a grid."""
'''


def test_a_member_has_a_release_of_its_own_only_if_it_is_another_one(tmp_path, monkeypatch):
    (tmp_path / "since.txt").write_text("0.0.1 Group\n0.0.1 Group.split\n0.0.2 Group.grid\n")
    monkeypatch.setattr(since, "FILE", tmp_path / "since.txt")
    monkeypatch.setattr(since, "named", lambda: ["Group"])
    (tmp_path / "small.py").write_text(CLASS)
    extensions = griffe.load_extensions(since.Since)
    small = griffe.load("small", search_paths=[tmp_path], extensions=extensions)
    text = small["Group"].docstring.value
    assert text.index("Some ranks") < text.index("Since 0.0.1") < text.index("Attributes:")
    assert small["Group.split"].docstring.value == "Make parts."
    assert "Since 0.0.2" in small["Group.grid"].docstring.value


def test_a_release_has_recorded_its_names():
    changes = (ROOT / "CHANGELOG.md").read_text()
    released = set(re.findall(r"^## \[(\d.*?)\]", changes, re.M))
    assert released <= set(since.recorded().values()), "run python -m website.since"
