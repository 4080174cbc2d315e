"""What hpcdist is, in one line: pyproject.toml has it, and everybody else says the same."""

import re

import pytest
from click.testing import CliRunner
from docs_pages import ROOT

import hpcdist
from hpcdist.launch.cli import main

TAGLINE = re.search(r'^description = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
PLACES = [
    "README.md",
    "mkdocs.yml",
    "CITATION.cff",
    "docs/index.md",
    "hpcdist/launch/modulefile.py",
    "packaging/conda-forge/recipe.yaml",
    "packaging/easybuild/hpcdist-*.eb",
    "packaging/spack/package.py",
]


@pytest.mark.parametrize("place", PLACES)
def test_a_file_says_what_hpcdist_is_as_the_package_does(place):
    (path,) = ROOT.glob(place)
    assert TAGLINE in path.read_text()


def test_the_package_and_its_command_say_what_hpcdist_is():
    assert hpcdist.__doc__.splitlines()[0] == f"{TAGLINE}."
    shown = CliRunner().invoke(main, ["--help"], terminal_width=120).output
    assert TAGLINE in " ".join(shown.split())
