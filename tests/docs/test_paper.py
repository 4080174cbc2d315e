"""The paper cites what its bibliography has, and all of that."""

import re

from docs_pages import ROOT

PAPER = (ROOT / "paper/paper.md").read_text()
BIBLIOGRAPHY = (ROOT / "paper/paper.bib").read_text()


def test_the_paper_cites_what_the_bibliography_has():
    cited = set(re.findall(r"@([\w-]+)", PAPER))
    assert cited == set(re.findall(r"^@\w+{([\w-]+),", BIBLIOGRAPHY, re.M))
