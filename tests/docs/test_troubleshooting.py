"""What troubleshooting says of errors is what the library says."""

import ast
import builtins
import re

import pytest
from docs_pages import ROOT, text_of

import hpcdist as dist

TABLE = text_of("docs/troubleshooting.md").partition("## By error text")[2]
ROWS = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", TABLE, re.M)


@pytest.fixture(scope="module")
def strings():
    """Return all texts of the sources, those of f-strings in pieces."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "hpcdist").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and _is_text(node)]


def _is_text(node):
    return isinstance(node.value, str)


@pytest.mark.parametrize(("words", "kind"), ROWS)
def test_a_message_in_the_table_is_one_of_the_library(strings, words, kind):
    assert any(words in text for text in strings)
    assert issubclass(getattr(dist, kind, None) or getattr(builtins, kind), Exception)


def test_the_table_is_found():
    assert len(ROWS) == TABLE.partition("## ")[0].count("\n| `")
