"""The pages are short enough to be read: a fact stands once, and other pages link to it."""

import re

from docs_pages import ROOT

MOST = 60_000
CODE = re.compile(r"^( *)(```+).*?^\1\2\s*$", re.M | re.S)


def test_the_pages_without_code_have_at_most_60_000_words():
    pages = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    words = [word for page in pages for word in CODE.sub("", page).split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= MOST
