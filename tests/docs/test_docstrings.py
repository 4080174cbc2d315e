"""The reader of docstrings that the reference is made with."""

import pytest
from docs_pages import ROOT

griffe = pytest.importorskip("griffe", reason="pip install 'hpcdist[docs]'")

MODULE = '''
def doubled(x):
    """Return twice a number.

    Example:
        >>> doubled(2)
        4

    """


def begun() -> Work:
    """Begin something.

    Example:
        >>> _ = begun()

    """
'''


@pytest.fixture
def sections(tmp_path):
    """Return what reads the sections of a function's docstring."""
    (tmp_path / "arithmetic.py").write_text(MODULE)
    extensions = griffe.load_extensions(str(ROOT / "website/docstrings.py"))
    module = griffe.load("arithmetic", search_paths=[tmp_path], extensions=extensions)
    return lambda name: module[name].docstring.parse("google")


def test_an_example_is_code_and_not_a_quotation(sections):
    text, examples = sections("doubled")
    assert (text.kind.value, examples.kind.value) == ("text", "examples")
    ((kind, code),) = examples.value
    assert (kind.value, code) == ("examples", ">>> doubled(2)\n4")


def test_a_work_that_is_returned_is_told_before_the_example(sections):
    text, returns, examples = sections("begun")
    assert [each.kind.value for each in (text, returns, examples)] == [
        "text",
        "returns",
        "examples",
    ]
    assert "`Work`" in returns.value[0].description


def test_the_site_reads_docstrings_by_it():
    assert "extensions: [website/docstrings.py, " in (ROOT / "mkdocs.yml").read_text()
