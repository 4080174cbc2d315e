"""CONTRIBUTING.md knows what it tells of."""

import re

from conditions import CONDITIONS, ROOT


def test_every_condition_of_other_machines_is_told_of():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("### On other machines")[2].partition("\n#")[0]
    told = set(re.findall(r"`([\w.-]+)`", section))
    for first, last in re.findall(r"`([\w.-]+)` to `([\w.-]+)`", section):
        kind, start = re.fullmatch(r"(.*?)(\d+)", first).groups()
        told |= {f"{kind}{n}" for n in range(int(start), int(last.removeprefix(kind)) + 1)}
    assert {each.name for each in CONDITIONS} <= told
