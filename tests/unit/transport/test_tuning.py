"""Which way an operation takes: rules, tuning files."""

import json

import pytest

from hpcdist.errors import UsageError
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.tuning import (
    DEFAULT,
    EXPLAINED,
    FORMAT,
    OPERATIONS,
    STAGED_UP_TO,
    Algorithm,
    TuningRule,
    TuningTable,
    possible_algorithms,
    read_rules,
    rules_as_json,
)

KiB, MiB = 1 << 10, 1 << 20
REDUCED = [Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER]
MOVED = [Kind.BROADCAST, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL]
SCANS = [Kind.SCAN, Kind.EXSCAN]


def algorithm(rules, kind=Kind.ALL_REDUCE, nbytes=100 * KiB, **circumstances):
    """Ask for wide numbers in ordinary arrays of four ranks on one node, unless told otherwise."""
    job = {"ranks": 4, "several_nodes": False, "attaches": True, "copies": "any"}
    job |= {name: circumstances.pop(name) for name in job.keys() & circumstances.keys()}
    given = {"short": False, "shared": False} | circumstances
    return TuningTable(rules, **job).algorithm(kind, nbytes, **given)


# ---- the default rules


@pytest.mark.parametrize("kind", [*REDUCED, *MOVED])
@pytest.mark.parametrize("nbytes", [9 * KiB, MiB, 1 << 40])
def test_shared_arrays_are_used_where_they_are(kind, nbytes):
    assert algorithm(DEFAULT, kind, nbytes, shared=True) is Algorithm.DIRECT
    assert algorithm(DEFAULT, kind, nbytes, shared=True, short=True) is Algorithm.DIRECT


@pytest.mark.parametrize("kind", REDUCED)
def test_ordinary_arrays_are_reduced_in_parts_if_numbers_are_short_or_arrays_small(kind):
    for ranks in (2, 4, 64):
        assert algorithm(DEFAULT, kind, 9 * KiB, ranks=ranks) is Algorithm.PIPELINED
    for job in ({"attaches": False}, {"ranks": 64}):
        assert algorithm(DEFAULT, kind, 1 << 40, short=True, **job) is Algorithm.PIPELINED


@pytest.mark.parametrize("kind", REDUCED)
@pytest.mark.parametrize("short", [False, True])
def test_large_ordinary_arrays_of_few_ranks_are_reduced_where_they_are_if_they_attach(kind, short):
    for ranks in (2, 4, 16):
        for nbytes in (5 * MiB, 1 << 40):
            found = algorithm(DEFAULT, kind, nbytes, ranks=ranks, short=short)
            assert found is Algorithm.ATTACHED


@pytest.mark.parametrize("job", [{"attaches": False}, {"ranks": 64}], ids=str)
def test_other_large_ordinary_arrays_are_reduced_in_parts_only_to_all(job):
    assert algorithm(DEFAULT, Kind.ALL_REDUCE, 1 << 40, **job) is Algorithm.PIPELINED
    assert algorithm(DEFAULT, Kind.REDUCE, 1 << 40, **job) is Algorithm.MPI
    assert algorithm(DEFAULT, Kind.REDUCE_SCATTER, 1 << 40, **job) is Algorithm.MPI


def test_what_arrays_are_not_fit_for_leaves_them_to_the_next_rule():
    table = TuningTable(DEFAULT, 4, several_nodes=False)
    way = {"short": False, "shared": False, "but": Algorithm.ATTACHED}
    assert table.algorithm(Kind.ALL_REDUCE, 5 * MiB, **way) is Algorithm.PIPELINED
    assert table.algorithm(Kind.REDUCE, 5 * MiB, **way) is Algorithm.MPI


@pytest.mark.parametrize("kind", [Kind.BROADCAST, *SCANS])
def test_ordinary_arrays_of_medium_size_that_are_read_more_than_once_are_staged(kind):
    assert algorithm(DEFAULT, kind, STAGED_UP_TO, attaches=False) is Algorithm.STAGED
    assert algorithm(DEFAULT, kind, STAGED_UP_TO + 1, attaches=False) is Algorithm.MPI


@pytest.mark.parametrize("kind", [*REDUCED, *MOVED])
def test_ordinary_arrays_of_medium_size_are_left_where_they_are_if_the_kernel_copies_fast(kind):
    slow, fast = (algorithm(DEFAULT, kind, 300 * KiB, copies=each) for each in ("any", "fast"))
    assert fast is Algorithm.ATTACHED
    assert slow is (Algorithm.PIPELINED if kind in REDUCED else Algorithm.STAGED)
    assert algorithm(DEFAULT, kind, 20 * KiB, copies="fast") is slow
    for each in "fast", "early":
        found = algorithm(DEFAULT, kind, 300 * KiB, copies=each, attaches=False)
        assert found in (slow, Algorithm.MPI)


@pytest.mark.parametrize("kind", [*REDUCED, *MOVED])
def test_two_ranks_leave_smaller_ones_there_too_where_few_are_copied_fast(kind):
    two, four = (
        [algorithm(DEFAULT, kind, 64 * KiB, ranks=ranks, copies=each) for each in ("early", "fast")]
        for ranks in (2, 4)
    )
    assert two[0] is Algorithm.ATTACHED
    assert four == [two[1]] * 2
    if kind in REDUCED:
        short = algorithm(DEFAULT, kind, 64 * KiB, ranks=2, copies="early", short=True)
        assert short is Algorithm.PIPELINED


def test_all_ranks_copy_a_large_ordinary_array_of_one_where_they_can_attach():
    assert algorithm(DEFAULT, Kind.BROADCAST, 9 * KiB, ranks=8) is Algorithm.ATTACHED
    for ranks in (2, 4, 8):
        assert algorithm(DEFAULT, Kind.BROADCAST, 1 << 40, ranks=ranks) is Algorithm.ATTACHED


@pytest.mark.parametrize("kind", MOVED)
def test_few_ranks_copy_to_memory_that_they_share_what_stays_in_their_caches(kind):
    for ranks in (2, 4):
        assert algorithm(DEFAULT, kind, 512 * KiB, ranks=ranks) is Algorithm.STAGED
        assert algorithm(DEFAULT, kind, 2 * MiB, ranks=ranks) is Algorithm.ATTACHED


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.name.lower() not in OPERATIONS])
def test_other_operations_are_left_to_mpi(kind):
    assert algorithm(DEFAULT, kind, 100) is Algorithm.MPI
    assert algorithm(DEFAULT, kind, 100, several_nodes=True) is Algorithm.MPI


@pytest.mark.parametrize("kind", [Kind[name.upper()] for name in OPERATIONS])
def test_between_nodes_large_arrays_take_the_lanes_where_that_saves_bytes(kind):
    large = Algorithm.MPI if kind is Kind.ALLTOALL else Algorithm.HIERARCHICAL
    for nbytes, found in ((64 * KiB, Algorithm.MPI), (64 * KiB + 1, large)):
        assert algorithm(DEFAULT, kind, nbytes, several_nodes=True) is found


def test_every_default_rule_can_be_followed():
    for rule in DEFAULT:
        several = rule.nodes == "several"
        assert rule.algorithm in possible_algorithms(
            rule.operation, rule.arrays, several_nodes=several
        )


def test_every_way_is_explained():
    assert set(EXPLAINED) == set(Algorithm)
    assert all(EXPLAINED.values())


# ---- how rules are read


def test_without_rules_mpi_does_everything():
    assert algorithm(()) is Algorithm.MPI


def test_the_first_rule_that_fits_is_followed():
    pipe, mpi = (
        TuningRule("all_reduce", "ordinary", each) for each in (Algorithm.PIPELINED, Algorithm.MPI)
    )
    assert algorithm([pipe, mpi]) is Algorithm.PIPELINED
    assert algorithm([mpi, pipe]) is Algorithm.MPI


def test_a_limit_belongs_to_what_it_limits():
    rules = [
        TuningRule("all_reduce", "ordinary", Algorithm.PIPELINED, up_to=100),
        TuningRule("all_reduce", "ordinary", Algorithm.MPI, up_to=200),
        TuningRule("all_reduce", "ordinary", Algorithm.PIPELINED, up_to=300),
    ]
    found = [algorithm(rules, nbytes=nbytes) for nbytes in (0, 99, 100, 101, 200, 201, 300, 301)]
    assert found == [Algorithm.PIPELINED] * 3 + [Algorithm.MPI] * 2 + [Algorithm.PIPELINED] * 2 + [
        Algorithm.MPI
    ]


def test_a_rule_is_for_its_operation_and_its_arrays_only():
    rules = [
        TuningRule("reduce", "ordinary", Algorithm.PIPELINED),
        TuningRule("broadcast", "shared", Algorithm.DIRECT),
    ]
    assert algorithm(rules, Kind.REDUCE) is Algorithm.PIPELINED
    assert algorithm(rules, Kind.ALL_REDUCE) is Algorithm.MPI
    assert algorithm(rules, Kind.REDUCE, shared=True) is Algorithm.MPI
    assert algorithm(rules, Kind.BROADCAST, shared=True) is Algorithm.DIRECT
    assert algorithm(rules, Kind.BROADCAST) is Algorithm.MPI


@pytest.mark.parametrize(
    ("numbers", "short", "wide"),
    [
        ("short", Algorithm.PIPELINED, Algorithm.MPI),
        ("wide", Algorithm.MPI, Algorithm.PIPELINED),
        ("any", Algorithm.PIPELINED, Algorithm.PIPELINED),
    ],
)
def test_a_rule_may_be_for_short_or_for_wide_numbers(numbers, short, wide):
    rules = [TuningRule("all_reduce", "ordinary", Algorithm.PIPELINED, numbers=numbers)]
    assert algorithm(rules, short=True) is short
    assert algorithm(rules, short=False) is wide


def test_a_rule_may_be_for_some_numbers_of_ranks_both_ends_included():
    rules = [TuningRule("all_reduce", "ordinary", Algorithm.PIPELINED, ranks=(3, 5))]
    found = [algorithm(rules, ranks=ranks) for ranks in (2, 3, 4, 5, 6)]
    assert found == [
        Algorithm.MPI,
        Algorithm.PIPELINED,
        Algorithm.PIPELINED,
        Algorithm.PIPELINED,
        Algorithm.MPI,
    ]


@pytest.mark.parametrize(
    ("nodes", "one", "several"),
    [
        ("one", Algorithm.PIPELINED, Algorithm.MPI),
        ("several", Algorithm.MPI, Algorithm.HIERARCHICAL),
        ("any", Algorithm.PIPELINED, Algorithm.HIERARCHICAL),
    ],
)
def test_a_rule_may_be_for_one_node_or_for_several(nodes, one, several):
    rules = [
        TuningRule("all_reduce", "ordinary", each, nodes=nodes)
        for each in (Algorithm.PIPELINED, Algorithm.HIERARCHICAL)
    ]
    assert algorithm(rules) is one
    assert algorithm(rules, several_nodes=True) is several


def test_rules_for_ways_that_an_operation_cannot_take_are_ignored():
    for operation, arrays, impossible in [
        ("all_reduce", "ordinary", Algorithm.DIRECT),
        ("all_reduce", "shared", Algorithm.HIERARCHICAL),
        ("broadcast", "ordinary", Algorithm.PIPELINED),
        ("scan", "shared", Algorithm.DIRECT),
        ("barrier", "ordinary", Algorithm.STAGED),
    ]:
        rules = [TuningRule(operation, arrays, impossible)]
        kind = Kind[operation.upper()]
        assert algorithm(rules, kind, shared=arrays == "shared") is Algorithm.MPI
        assert impossible not in possible_algorithms(operation, arrays, several_nodes=False)


@pytest.mark.parametrize("kind", REDUCED)
def test_what_is_reduced_is_not_staged_whatever_a_file_says(kind):
    rules = [TuningRule(kind.name.lower(), "ordinary", Algorithm.STAGED), *DEFAULT]
    assert algorithm(rules, kind) is algorithm(DEFAULT, kind)


def test_no_more_is_staged_than_fits():
    rules = [TuningRule("broadcast", "ordinary", Algorithm.STAGED)]
    assert algorithm(rules, Kind.BROADCAST, STAGED_UP_TO) is Algorithm.STAGED
    assert algorithm(rules, Kind.BROADCAST, STAGED_UP_TO + 1) is Algorithm.MPI


def test_the_rule_behind_a_way_can_be_asked_for():
    small = TuningRule("all_reduce", "ordinary", Algorithm.PIPELINED, up_to=100)
    tuning_table = TuningTable([small], 2, several_nodes=False)
    asked = {"short": False, "shared": False}
    assert tuning_table.explain(Kind.ALL_REDUCE, 100, **asked) == (Algorithm.PIPELINED, small)
    assert tuning_table.explain(Kind.ALL_REDUCE, 101, **asked) == (Algorithm.MPI, None)


@pytest.mark.parametrize("several_nodes", [True, False])
def test_the_way_and_its_explanation_agree(several_nodes):
    tuning_table = TuningTable(DEFAULT, 4, several_nodes=several_nodes)
    for kind in Kind:
        for nbytes in (0, 64 * KiB, 64 * KiB + 1, 512 * KiB, MiB, MiB + 1, 1 << 40):
            for short in (True, False):
                for shared in (True, False):
                    asked = {"short": short, "shared": shared}
                    found, _ = tuning_table.explain(kind, nbytes, **asked)
                    assert tuning_table.algorithm(kind, nbytes, **asked) is found


# ---- tuning files


def write(tmp_path, content):
    path = tmp_path / "tuning.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


MEASURED = (
    TuningRule("all_reduce", "ordinary", Algorithm.MPI, up_to=4096, numbers="short", ranks=(2, 8)),
    TuningRule("broadcast", "shared", Algorithm.MPI, nodes="any"),
)


def test_without_a_file_there_are_the_default_rules():
    assert read_rules(None) == DEFAULT


def test_the_rules_of_a_file_come_before_the_default_ones(tmp_path):
    path = write(tmp_path, {"format": FORMAT, "rules": rules_as_json(MEASURED)})
    assert read_rules(path) == (*MEASURED, *DEFAULT)
    assert algorithm(read_rules(path), Kind.BROADCAST, shared=True) is Algorithm.MPI
    assert algorithm(DEFAULT, Kind.BROADCAST, shared=True) is Algorithm.DIRECT


def test_rules_survive_being_written_and_read(tmp_path):
    rules = (*MEASURED, *DEFAULT)
    path = write(tmp_path, {"format": FORMAT, "rules": rules_as_json(rules)})
    assert read_rules(path)[: len(rules)] == rules


def test_what_is_not_said_is_the_default_and_what_is_unknown_is_passed_over(tmp_path):
    row = {"operation": "reduce", "arrays": "ordinary", "way": "pipe", "speedup": 2.5}
    path = write(tmp_path, {"format": FORMAT, "rules": [row], "measured_on": "some host"})
    assert read_rules(path)[0] == TuningRule("reduce", "ordinary", Algorithm.PIPELINED)


ROW = {"operation": "all_reduce", "arrays": "ordinary", "algorithm": "mpi"}


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
        (with_row(algorithm="teleport"), "teleport"),
        (with_row(algorithm=None), "None"),
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
