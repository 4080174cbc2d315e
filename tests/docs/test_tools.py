"""What the documentation tells users of training tools to write is in the programs that are run."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
ROWS = dict(
    re.findall(r"^\| (\w+) \| (.*?) \|", PAGE.partition("### Training tools")[2], re.M | re.I)
)
PROGRAMS = sorted((ROOT / "tests" / "tools").glob("with_*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_of_a_tool_has_what_the_documentation_says(program):
    tool = program.stem.removeprefix("with_")
    (row,) = [row for name, row in ROWS.items() if name.lower() == tool]
    text = _without_spaces(program.read_text()).replace("sys.argv[1]", '"hpcdist"')
    assert _without_spaces("import hpcdist.torch") in text
    for code in re.findall(r"`(.*?)`", row):
        start = _without_spaces(code).removesuffix(")")  # more arguments may follow
        assert start in text, f"{code} is not in {program.name}"


def _without_spaces(text):
    return re.sub(r"\s+", "", text)
