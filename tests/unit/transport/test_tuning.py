"""Which way an operation takes: rules, tuning files."""

import json

import pytest

from hpcdist.errors import UsageError
from hpcdist.transport.call import Kind
from hpcdist.transport.select import (
    DEFAULT,
    EXPLAINED,
    FORMAT,
    OPERATIONS,
    STAGED_UP_TO,
    Rule,
    Selection,
    Way,
    possible_ways,
    read_rules,
    rules_as_json,
)

KiB, MiB = 1 << 10, 1 << 20
REDUCED = [Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER]
MOVED = [Kind.BROADCAST, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL]
SCANS = [Kind.SCAN, Kind.EXSCAN]


def way(rules, kind=Kind.ALL_REDUCE, nbytes=100 * KiB, **circumstances):
    """Ask for wide numbers in ordinary arrays of four ranks on one node, unless told otherwise."""
    given = {"short": False, "shared": False, "ranks": 4, "several_nodes": False} | circumstances
    ranks, several_nodes = given.pop("ranks"), given.pop("several_nodes")
    return Selection(rules, ranks, several_nodes=several_nodes).way(kind, nbytes, **given)


# ---- the default rules


@pytest.mark.parametrize("kind", [*REDUCED, *MOVED])
@pytest.mark.parametrize("nbytes", [9 * KiB, MiB, 1 << 40])
def test_shared_arrays_are_used_where_they_are(kind, nbytes):
    assert way(DEFAULT, kind, nbytes, shared=True) is Way.DIRECT
    assert way(DEFAULT, kind, nbytes, shared=True, short=True) is Way.DIRECT


@pytest.mark.parametrize("kind", REDUCED)
def test_ordinary_arrays_are_reduced_in_parts_if_numbers_are_short_or_arrays_small(kind):
    assert way(DEFAULT, kind, 1 << 40, short=True) is Way.PIPE
    assert way(DEFAULT, kind, 9 * KiB) is Way.PIPE


def test_large_ordinary_arrays_are_reduced_in_parts_only_to_all():
    assert way(DEFAULT, Kind.ALL_REDUCE, 1 << 40) is Way.PIPE
    assert way(DEFAULT, Kind.REDUCE, 1 << 40) is Way.MPI
    assert way(DEFAULT, Kind.REDUCE_SCATTER, 1 << 40) is Way.MPI


@pytest.mark.parametrize("kind", [Kind.BROADCAST, *SCANS])
def test_ordinary_arrays_of_medium_size_that_are_read_more_than_once_are_staged(kind):
    assert way(DEFAULT, kind, STAGED_UP_TO) is Way.STAGED
    assert way(DEFAULT, kind, STAGED_UP_TO + 1) is Way.MPI


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.name.lower() not in OPERATIONS])
def test_other_operations_are_left_to_mpi(kind):
    assert way(DEFAULT, kind, 100) is Way.MPI
    assert way(DEFAULT, kind, 100, several_nodes=True) is Way.MPI


def test_between_nodes_large_reductions_take_the_lanes_and_all_else_is_left_to_mpi():
    assert way(DEFAULT, Kind.ALL_REDUCE, 64 * KiB, several_nodes=True) is Way.MPI
    assert way(DEFAULT, Kind.ALL_REDUCE, 64 * KiB + 1, several_nodes=True) is Way.LANES
    for kind in (*MOVED, *SCANS, Kind.REDUCE, Kind.REDUCE_SCATTER):
        for shared in (True, False):
            assert way(DEFAULT, kind, several_nodes=True, shared=shared) is Way.MPI


def test_every_default_rule_can_be_followed():
    for rule in DEFAULT:
        several = rule.nodes == "several"
        assert rule.way in possible_ways(rule.operation, rule.arrays, several_nodes=several)


def test_every_way_is_explained():
    assert set(EXPLAINED) == set(Way)
    assert all(EXPLAINED.values())


# ---- how rules are read


def test_without_rules_mpi_does_everything():
    assert way(()) is Way.MPI


def test_the_first_rule_that_fits_is_followed():
    pipe, mpi = (Rule("all_reduce", "ordinary", each) for each in (Way.PIPE, Way.MPI))
    assert way([pipe, mpi]) is Way.PIPE
    assert way([mpi, pipe]) is Way.MPI


def test_a_limit_belongs_to_what_it_limits():
    rules = [
        Rule("all_reduce", "ordinary", Way.PIPE, up_to=100),
        Rule("all_reduce", "ordinary", Way.MPI, up_to=200),
        Rule("all_reduce", "ordinary", Way.PIPE, up_to=300),
    ]
    found = [way(rules, nbytes=nbytes) for nbytes in (0, 99, 100, 101, 200, 201, 300, 301)]
    assert found == [Way.PIPE] * 3 + [Way.MPI] * 2 + [Way.PIPE] * 2 + [Way.MPI]


def test_a_rule_is_for_its_operation_and_its_arrays_only():
    rules = [Rule("reduce", "ordinary", Way.PIPE), Rule("broadcast", "shared", Way.DIRECT)]
    assert way(rules, Kind.REDUCE) is Way.PIPE
    assert way(rules, Kind.ALL_REDUCE) is Way.MPI
    assert way(rules, Kind.REDUCE, shared=True) is Way.MPI
    assert way(rules, Kind.BROADCAST, shared=True) is Way.DIRECT
    assert way(rules, Kind.BROADCAST) is Way.MPI


@pytest.mark.parametrize(
    ("numbers", "short", "wide"),
    [("short", Way.PIPE, Way.MPI), ("wide", Way.MPI, Way.PIPE), ("any", Way.PIPE, Way.PIPE)],
)
def test_a_rule_may_be_for_short_or_for_wide_numbers(numbers, short, wide):
    rules = [Rule("all_reduce", "ordinary", Way.PIPE, numbers=numbers)]
    assert way(rules, short=True) is short
    assert way(rules, short=False) is wide


def test_a_rule_may_be_for_some_numbers_of_ranks_both_ends_included():
    rules = [Rule("all_reduce", "ordinary", Way.PIPE, ranks=(3, 5))]
    found = [way(rules, ranks=ranks) for ranks in (2, 3, 4, 5, 6)]
    assert found == [Way.MPI, Way.PIPE, Way.PIPE, Way.PIPE, Way.MPI]


@pytest.mark.parametrize(
    ("nodes", "one", "several"),
    [("one", Way.PIPE, Way.MPI), ("several", Way.MPI, Way.LANES), ("any", Way.PIPE, Way.LANES)],
)
def test_a_rule_may_be_for_one_node_or_for_several(nodes, one, several):
    rules = [Rule("all_reduce", "ordinary", each, nodes=nodes) for each in (Way.PIPE, Way.LANES)]
    assert way(rules) is one
    assert way(rules, several_nodes=True) is several


def test_rules_for_ways_that_an_operation_cannot_take_are_ignored():
    for operation, arrays, impossible in [
        ("all_reduce", "ordinary", Way.DIRECT),
        ("all_reduce", "shared", Way.LANES),
        ("broadcast", "ordinary", Way.PIPE),
        ("scan", "shared", Way.DIRECT),
        ("barrier", "ordinary", Way.STAGED),
    ]:
        rules = [Rule(operation, arrays, impossible)]
        kind = Kind[operation.upper()]
        assert way(rules, kind, shared=arrays == "shared") is Way.MPI
        assert impossible not in possible_ways(operation, arrays, several_nodes=False)


def test_no_more_is_staged_than_fits():
    rules = [Rule("broadcast", "ordinary", Way.STAGED)]
    assert way(rules, Kind.BROADCAST, STAGED_UP_TO) is Way.STAGED
    assert way(rules, Kind.BROADCAST, STAGED_UP_TO + 1) is Way.MPI


def test_the_rule_behind_a_way_can_be_asked_for():
    small = Rule("all_reduce", "ordinary", Way.PIPE, up_to=100)
    selection = Selection([small], 2, several_nodes=False)
    asked = {"short": False, "shared": False}
    assert selection.explain(Kind.ALL_REDUCE, 100, **asked) == (Way.PIPE, small)
    assert selection.explain(Kind.ALL_REDUCE, 101, **asked) == (Way.MPI, None)


@pytest.mark.parametrize("several_nodes", [True, False])
def test_the_way_and_its_explanation_agree(several_nodes):
    selection = Selection(DEFAULT, 4, several_nodes=several_nodes)
    for kind in Kind:
        for nbytes in (0, 64 * KiB, 64 * KiB + 1, 512 * KiB, MiB, MiB + 1, 1 << 40):
            for short in (True, False):
                for shared in (True, False):
                    asked = {"short": short, "shared": shared}
                    found, _ = selection.explain(kind, nbytes, **asked)
                    assert selection.way(kind, nbytes, **asked) is found


# ---- tuning files


def write(tmp_path, content):
    path = tmp_path / "tuning.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


MEASURED = (
    Rule("all_reduce", "ordinary", Way.MPI, up_to=4096, numbers="short", ranks=(2, 8)),
    Rule("broadcast", "shared", Way.MPI, nodes="any"),
)


def test_without_a_file_there_are_the_default_rules():
    assert read_rules(None) == DEFAULT


def test_the_rules_of_a_file_come_before_the_default_ones(tmp_path):
    path = write(tmp_path, {"format": FORMAT, "rules": rules_as_json(MEASURED)})
    assert read_rules(path) == (*MEASURED, *DEFAULT)
    assert way(read_rules(path), Kind.BROADCAST, shared=True) is Way.MPI
    assert way(DEFAULT, Kind.BROADCAST, shared=True) is Way.DIRECT


def test_rules_survive_being_written_and_read(tmp_path):
    rules = (*MEASURED, *DEFAULT)
    path = write(tmp_path, {"format": FORMAT, "rules": rules_as_json(rules)})
    assert read_rules(path)[: len(rules)] == rules


def test_what_is_not_said_is_the_default_and_what_is_unknown_is_passed_over(tmp_path):
    row = {"operation": "reduce", "arrays": "ordinary", "way": "pipe", "speedup": 2.5}
    path = write(tmp_path, {"format": FORMAT, "rules": [row], "measured_on": "some host"})
    assert read_rules(path)[0] == Rule("reduce", "ordinary", Way.PIPE)


ROW = {"operation": "all_reduce", "arrays": "ordinary", "way": "mpi"}


def with_row(**changes):
    return {"format": FORMAT, "rules": [ROW | changes]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "JSONDecodeError"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ("null", "TypeError"),
        ({}, "format"),
        ({"format": FORMAT}, "rules"),
        ({"format": FORMAT + 1, "rules": []}, f"format {FORMAT + 1}, expected {FORMAT}"),
        ({"format": "1", "rules": []}, "format 1"),
        ({"format": FORMAT, "rules": 3}, "TypeError"),
        ({"format": FORMAT, "rules": [3]}, "TypeError"),
        ({"format": FORMAT, "rules": [{}]}, "TypeError"),
        (with_row(operation="all_reducee"), "unknown operation 'all_reducee'"),
        (with_row(way="teleport"), "teleport"),
        (with_row(way=None), "None"),
        (with_row(ranks=[2]), "ValueError"),
        (with_row(ranks=["a", "b"]), "ValueError"),
        (with_row(ranks=None), "TypeError"),
        (with_row(operation=7), "7"),
        (with_row(arrays="sharedd"), "sharedd"),
        (with_row(numbers="tiny"), "tiny"),
        (with_row(nodes="two"), "two"),
        (with_row(up_to="64k"), "64k"),
    ],
)
def test_a_file_that_is_no_tuning_file_is_refused_with_its_name(tmp_path, content, words):
    path = write(tmp_path, content)
    with pytest.raises(UsageError) as refused:
        read_rules(path)
    assert f"HPCDIST_TUNING={path} is not a usable tuning file" in str(refused.value)
    assert words in str(refused.value)
    assert "hpcdist tune" in str(refused.value)


def test_a_file_that_is_not_there_is_refused_with_its_name(tmp_path):
    path = str(tmp_path / "nowhere.json")
    with pytest.raises(UsageError, match=r"HPCDIST_TUNING=.*nowhere\.json.*FileNotFoundError"):
        read_rules(path)


def test_a_binary_file_is_refused_with_its_name(tmp_path):
    path = tmp_path / "tuning.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="HPCDIST_TUNING="):
        read_rules(str(path))
