"""CONTRIBUTING.md knows what it tells of."""

import re

from conditions import CONDITIONS, ROOT, chosen


def test_every_condition_of_other_machines_is_told_of():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("### On other machines")[2].partition("\n#")[0]
    told = set(re.findall(r"`([\w.-]+)`", section))
    for first, last in re.findall(r"`([\w.-]+)` to `([\w.-]+)`", section):
        kind, start = re.fullmatch(r"(.*?)(\d+)", first).groups()
        told |= {f"{kind}{n}" for n in range(int(start), int(last.removeprefix(kind)) + 1)}
    assert {each.name for each in CONDITIONS} <= told


def test_every_condition_has_a_machine_and_all_of_one_can_hold_together():
    groups = chosen([])
    named = [each.name for group in groups for each in group]
    assert sorted(named) == sorted(each.name for each in CONDITIONS)
    for group in groups:
        assert sum(each.clone is not None for each in group) <= 1
        kinds = [re.sub(r"-?\d+$", "", each.name) for each in group]
        assert len(set(kinds)) == len(kinds)


def test_conditions_that_are_asked_for_together_are_one_group():
    alone, both = chosen(["young", "no-shm+C"])
    assert [each.name for each in alone] == ["young"]
    assert {each.name for each in both} == {"no-shm", "C"}
