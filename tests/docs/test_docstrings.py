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
'''


@pytest.fixture
def sections(tmp_path):
    (tmp_path / "arithmetic.py").write_text(MODULE)
    extensions = griffe.load_extensions(str(ROOT / "website/docstrings.py"))
    module = griffe.load("arithmetic", search_paths=[tmp_path], extensions=extensions)
    return module["doubled"].docstring.parse("google")


def test_an_example_is_code_and_not_a_quotation(sections):
    kinds = [section.kind.value for section in sections]
    assert kinds == ["text", "examples"]
    ((kind, code),) = sections[1].value
    assert (kind.value, code) == ("examples", ">>> doubled(2)\n4")


def test_the_site_reads_docstrings_by_it():
    assert "extensions: [website/docstrings.py, " in (ROOT / "mkdocs.yml").read_text()
