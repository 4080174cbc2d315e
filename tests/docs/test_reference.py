"""The reference has every public name, the settings page every setting, and all links lead on."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from types import ModuleType

import pytest
from docs_pages import PAGES, ROOT, text_of

import hpcdist
from hpcdist.config import Config

REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
MKDOCS = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers.python")


def public_names():
    """Return what `import hpcdist` gives: its own functions and classes, `stream` and `launch`."""
    return sorted(
        name
        for name in dir(hpcdist)
        if not name.startswith("_") and (name in ("stream", "launch") or _is_ours(_value_of(name)))
    )


def _value_of(name):
    """Return what `hpcdist` has by a name, or where torch is missing a class in its place."""
    try:
        return getattr(hpcdist, name)
    except ImportError:
        return _NeedsTorch


class _NeedsTorch:
    """What is made of torch modules."""

    __module__ = "hpcdist.torch"


def _is_ours(value):
    module = getattr(value, "__module__", None) or ""
    return not isinstance(value, ModuleType) and module.startswith("hpcdist")


def referenced_names():
    return re.findall(r"^::: hpcdist\.(\S+)$", "\n".join(map(_read, REFERENCE)), re.M)


def _read(path):
    return path.read_text()


def test_every_public_name_is_in_the_reference_once():
    assert sorted(name for name in referenced_names() if "." not in name) == public_names()


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_a_docstring(name):
    assert _value_of(name).__doc__


def test_every_page_of_the_reference_is_in_its_index():
    index = _read(ROOT / "docs/reference/index.md")
    assert [path.name for path in REFERENCE if f"({path.name})" not in index] == ["index.md"]


# ---- settings


def settings():
    """Return the row that the settings page has for each field, made from the source."""
    source = ast.parse((ROOT / "hpcdist/config.py").read_text())
    classes = {node.name: node.body for node in source.body if isinstance(node, ast.ClassDef)}
    meaning = {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(classes["Config"])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    return [
        f"| `HPCDIST_{field.name.upper()}` | `{field.default}` | {meaning[field.name]} |"
        for field in fields(Config)
    ]


@pytest.mark.parametrize("row", settings())
def test_every_setting_has_its_row(row):
    assert row in text_of("docs/settings.md").splitlines()


def test_every_variable_of_hpcdist_is_a_setting_or_explained_there():
    used = {f"HPCDIST_{field.name.upper()}" for field in fields(Config)}
    for path in (ROOT / "hpcdist").rglob("*.py"):
        used |= set(re.findall(r"HPCDIST_[A-Z_]+[A-Z]\b", path.read_text()))
    told = set(re.findall(r"HPCDIST_[A-Z_]+\b", text_of("docs/settings.md")))
    assert used == told


# ---- links and the site


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not heading or heading in headings(target), link


def headings(path):
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.thorough
def test_the_site_builds_without_a_warning(tmp_path):
    for name in MKDOCS:
        top = name.partition(".")[0]
        if importlib.util.find_spec(top) is None or importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'hpcdist[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
