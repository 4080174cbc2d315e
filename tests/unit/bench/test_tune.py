"""From timings to rules: never slower than MPI, and no more rules than it takes."""

import json
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from hpcdist.bench.startup import busy
from hpcdist.bench.tune.command import chosen_rows, read_plan, write_tuning
from hpcdist.bench.tune.measure import Effort, Plan, algorithms_at, forced, points_of
from hpcdist.bench.tune.rules import (
    COPY_S,
    MARGIN,
    Cost,
    Step,
    Timing,
    costs_of,
    fewest_steps,
    good_shared_ways,
    good_ways,
    link_cost,
    merge_ranks,
    rules_from,
    tuned,
    way_at,
)
from hpcdist.errors import UsageError
from hpcdist.transport.base import LinkCost
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.tuning import (
    DEFAULT,
    OPERATIONS,
    STAGED_UP_TO,
    Algorithm,
    TuningRule,
    TuningTable,
    possible_algorithms,
    read_costs,
    read_rules,
    rules_as_json,
)

KiB, MiB = 1 << 10, 1 << 20
MPI, STAGED, PIPELINED, DIRECT, HIERARCHICAL, ATTACHED = Algorithm
SIZES = [16 * KiB << 2 * step for step in range(7)]


def timing(operation, nbytes, algorithm, ratio, *, arrays="ordinary", dtype="float32", **given):
    given = {"min_ratio": ratio, "ranks": 4, "nodes": "one", **given}
    return Timing(
        operation,
        arrays,
        dtype,
        nbytes,
        algorithm=algorithm,
        ratio=ratio,
        median_s=ratio,
        min_s=ratio,
        **given,
    )


def timings(operation, by_way, **given):
    """Return timings at `SIZES`; `by_way` has the ratios to MPI, None where a way cannot go."""
    return [
        timing(operation, nbytes, algorithm, ratio, **given)
        for algorithm, ratios in {MPI: [1] * len(SIZES), **by_way}.items()
        for nbytes, ratio in zip(SIZES, ratios, strict=False)
        if ratio is not None
    ]


def steps_in(rules, operation, arrays="ordinary", numbers="any"):
    key = operation, arrays, numbers
    return [
        Step(rule.up_to, rule.algorithm)
        for rule in rules
        if (rule.operation, rule.arrays, rule.numbers) == key
    ]


# ---- what is good enough


@pytest.mark.parametrize(
    ("ratio", "min_ratio", "wins"),
    [(0.5, 0.5, True), (0.96, 0.5, False), (0.5, 1.01, False), (0.94, 1.0, True)],
)
def test_a_way_must_win_in_the_median_and_not_lose_in_the_fastest_round(ratio, min_ratio, wins):
    costs = {MPI: Cost(1, 1), PIPELINED: Cost(ratio, min_ratio)}
    assert set(good_ways(costs)) == ({PIPELINED} if wins else {MPI})


def test_ways_as_fast_as_the_best_are_good_too():
    costs = {
        MPI: Cost(1, 1),
        PIPELINED: Cost(0.5, 0.5),
        STAGED: Cost(0.52, 0.5),
        DIRECT: Cost(0.6, 0.6),
    }
    assert set(good_ways(costs)) == {PIPELINED, STAGED}


@pytest.mark.parametrize(
    ("otherwise", "direct", "expected"),
    [
        (MPI, 0.5, {DIRECT}),
        (MPI, 1.2, {MPI}),
        (PIPELINED, 0.2, {DIRECT}),
        (PIPELINED, 0.4, {DIRECT, PIPELINED}),
        (PIPELINED, 0.8, {PIPELINED}),
    ],
)
def test_shared_arrays_stay_in_place_or_go_like_ordinary_ones(otherwise, direct, expected):
    costs = {MPI: Cost(1, 1), PIPELINED: Cost(0.4, 0.4), DIRECT: Cost(direct, direct)}
    assert set(good_shared_ways(costs, otherwise)) == expected


def test_the_slower_of_the_short_dtypes_counts():
    series = costs_of(
        [
            timing("reduce", KiB, PIPELINED, 0.5, dtype="bfloat16"),
            timing("reduce", KiB, PIPELINED, 0.9, dtype="float16", min_ratio=0.3),
            timing("reduce", KiB, PIPELINED, 0.1, dtype="float32"),
        ]
    )
    assert series["reduce", "ordinary", "short"][KiB][PIPELINED] == Cost(0.9, 0.5)
    assert series["reduce", "ordinary", "wide"][KiB][PIPELINED] == Cost(0.1, 0.1)


# ---- steps


def test_neighbouring_sizes_become_one_step():
    good = {size: {PIPELINED: 0.5} for size in SIZES[:3]} | {size: {MPI: 1} for size in SIZES[3:]}
    assert fewest_steps(good) == [Step(256 * KiB, PIPELINED), Step(None, MPI)]


def test_what_was_not_measured_is_left_to_mpi_and_else_shared_in_the_middle():
    assert fewest_steps({16 * KiB: {PIPELINED: 0.5}, MiB: {MPI: 1}, 4 * MiB: {PIPELINED: 0.5}}) == [
        Step(16 * KiB, PIPELINED),
        Step(2 * MiB, MPI),
        Step(None, PIPELINED),
    ]
    assert fewest_steps({16 * KiB: {STAGED: 0.5}, 16 * MiB: {DIRECT: 0.5}}) == [
        Step(512 * KiB, STAGED),
        Step(None, DIRECT),
    ]


def test_steps_end_where_small_sizes_end_and_where_staging_does():
    assert fewest_steps({64 * KiB: {PIPELINED: 0.5}}) == [Step(64 * KiB, PIPELINED)]
    assert fewest_steps({MiB: {STAGED: 0.5}, 16 * MiB: {PIPELINED: 0.5}})[0].up_to == STAGED_UP_TO


def test_a_step_takes_the_way_that_is_fastest_over_all_its_sizes():
    good = {KiB: {PIPELINED: 0.50, STAGED: 0.51}, 2 * KiB: {PIPELINED: 0.50, STAGED: 0.48}}
    assert fewest_steps(good) == [Step(2 * KiB, STAGED)]


good_at_a_size = st.dictionaries(
    st.sampled_from([PIPELINED, STAGED, DIRECT]), st.floats(0.1, 0.9), min_size=1
) | st.just({MPI: 1.0})


@given(st.lists(good_at_a_size, min_size=1, max_size=4))
def test_steps_are_good_at_every_size_and_there_are_no_fewer(good):
    by_size = dict(zip([KiB << step for step in range(len(good))], good, strict=True))
    steps = fewest_steps(by_size)
    assert all(way_at(steps, nbytes) in algorithms for nbytes, algorithms in by_size.items())
    changes = [
        1 + sum(a is not b for a, b in pairwise(algorithms)) for algorithms in product(*good)
    ]
    assert len(steps) == min(changes)


# ---- rules


def test_rules_name_the_group_and_numbers_that_fare_alike_share_them():
    measured = [
        each
        for dtype in ("float32", "bfloat16", "float16")
        for each in timings("all_reduce", {PIPELINED: [0.5] * 3 + [1.5] * 4}, dtype=dtype)
    ]
    assert rules_from(measured, 4, "one") == [
        TuningRule("all_reduce", "ordinary", PIPELINED, 256 * KiB, "any", (4, 4), "one"),
        TuningRule("all_reduce", "ordinary", MPI, None, "any", (4, 4), "one"),
    ]
    assert rules_from(measured, 8, "one") == []


def test_numbers_that_fare_differently_have_rules_of_their_own():
    measured = [
        *timings("reduce", {PIPELINED: [1.5] * 7}),
        *timings("reduce", {PIPELINED: [0.5] * 7}, dtype="bfloat16"),
    ]
    rules = rules_from(measured, 4, "one")
    assert steps_in(rules, "reduce", numbers="wide") == [Step(None, MPI)]
    assert steps_in(rules, "reduce", numbers="short") == [Step(None, PIPELINED)]


def test_the_dtype_makes_no_difference_where_bytes_are_moved_or_nodes_crossed():
    moved = rules_from(timings("broadcast", {STAGED: [0.5] * 4 + [None] * 3}), 4, "one")
    assert steps_in(moved, "broadcast") == [Step(MiB, STAGED), Step(None, MPI)]
    crossed = [
        *timings("all_reduce", {HIERARCHICAL: [0.5] * 7}, nodes="several"),
        *timings(
            "all_reduce", {HIERARCHICAL: [1.5] * 3 + [0.5] * 4}, nodes="several", dtype="float16"
        ),
    ]
    assert steps_in(rules_from(crossed, 4, "several"), "all_reduce") == [
        Step(512 * KiB, MPI),
        Step(None, HIERARCHICAL),
    ]


def test_shared_arrays_that_gain_nothing_in_place_take_the_way_of_ordinary_ones():
    measured = [
        *timings("alltoall", {STAGED: [0.3, 0.3, 1.5, 1.5] + [None] * 3}),
        *timings("alltoall", {DIRECT: [0.9] * 2 + [1.5] + [0.5] * 4}, arrays="shared"),
        *timings("alltoall", {STAGED: [0.3, 0.3, 1.5, 1.5] + [None] * 3}, arrays="shared")[7:],
    ]
    assert steps_in(rules_from(measured, 4, "one"), "alltoall", "shared") == [
        Step(64 * KiB, STAGED),
        Step(512 * KiB, MPI),
        Step(None, DIRECT),
    ]


def test_equal_neighbours_become_a_range_of_ranks():
    same = TuningRule("scan", "ordinary", STAGED, MiB)
    other = TuningRule("scan", "ordinary", MPI)
    found = merge_ranks(
        [same._replace(ranks=(n, n)) for n in (2, 4, 16)] + [other._replace(ranks=(8, 8))]
    )
    assert [(rule.algorithm, rule.ranks) for rule in found] == [
        (STAGED, (2, 4)),
        (MPI, (8, 8)),
        (STAGED, (16, 16)),
    ]


def test_an_operation_that_was_not_measured_everywhere_ends_a_range():
    rule = TuningRule("scan", "ordinary", STAGED, MiB)
    broadcast = TuningRule("broadcast", "ordinary", STAGED, MiB, ranks=(4, 4))
    found = merge_ranks([rule._replace(ranks=(2, 2)), broadcast, rule._replace(ranks=(8, 8))])
    assert [each.ranks for each in found if each.operation == "scan"] == [(2, 2), (8, 8)]


ratios = st.floats(0.2, 2.0)
measurements = st.lists(
    st.tuples(ratios, ratios, ratios), min_size=len(SIZES), max_size=len(SIZES)
).map(
    lambda rows: [
        each
        for nbytes, row in zip(SIZES, rows, strict=True)
        for algorithm, ratio in zip((MPI, ATTACHED, STAGED), (1.0, *row), strict=False)
        if algorithm is not STAGED or nbytes <= STAGED_UP_TO
        for each in [timing("gather", nbytes, algorithm, ratio, min_ratio=min(ratio, row[2]))]
    ]
)


@given(measurements)
def test_nothing_that_was_measured_becomes_slower_than_mpi(measured):
    tuning_table = TuningTable([*tuned(measured), *DEFAULT], 4, several_nodes=False)
    for nbytes, costs in costs_of(measured)["gather", "ordinary", "any"].items():
        algorithm = tuning_table.algorithm(Kind.GATHER, nbytes, short=False, shared=False)
        assert algorithm is MPI or costs[algorithm].ratio < 1 - MARGIN
        assert algorithm is MPI or costs[algorithm].min_ratio <= 1


# ---- the file


def test_a_written_file_is_read_back_before_the_default_rules(tmp_path):
    measured = timings("all_reduce", {PIPELINED: [0.5] * 7})
    rules = tuned(measured)
    path = tmp_path / "site.json"
    costs = {"one": LinkCost(1e-6, 2e-10)}
    write_tuning(str(path), {"mpi": "Open MPI 5"}, rules, measured, costs)
    assert read_rules(str(path)) == (*rules, *DEFAULT)
    assert read_costs(str(path)) == costs
    tuning = json.loads(path.read_text())
    assert tuning["format"] == 1
    assert tuning["made"].keys() == {"hpcdist", "mpi"}
    assert tuning["rules"] == rules_as_json(rules)
    assert len(tuning["measured"]) == len(measured)
    assert list(tmp_path.iterdir()) == [path]


def test_costs_that_were_not_measured_are_left_out(tmp_path):
    path = tmp_path / "site.json"
    for costs in ({}, {"several": {"alpha": 3e-6, "beta": 4e-10}}, {"one": {}, "several": {}}):
        given = {"format": 1, "rules": []} | ({"costs": costs} if costs else {})
        path.write_text(json.dumps(given))
        if "one" in costs:
            with pytest.raises(UsageError, match="not a usable tuning file: KeyError: 'alpha'"):
                read_costs(str(path))
        else:
            found = {nodes: cost._asdict() for nodes, cost in read_costs(str(path)).items()}
            assert found == costs
    assert read_costs(None) == {}
    path.write_text('{"format": 1, "rules": [], "costs": {"one": {"alpha": 0, "beta": 1}}}')
    with pytest.raises(UsageError, match="seconds above 0"):
        read_costs(str(path))


@given(
    st.floats(1e-7, 1e-4), st.floats(1e-11, 1e-8), st.integers(2, 64), st.integers(1 << 16, 1 << 26)
)
def test_costs_are_found_that_explain_what_was_measured(alpha, beta, ranks, nbytes):
    small = alpha * ((ranks - 1).bit_length() + 1)
    large = small + beta * nbytes * (ranks - 1) + COPY_S * nbytes * ranks
    found = link_cost(small, large, ranks, nbytes)
    assert found.alpha == pytest.approx(alpha)
    assert found.beta == pytest.approx(beta, rel=1e-3)
    assert link_cost(small, small, ranks, nbytes).beta > 0


def test_the_table_tells_the_way_and_its_gain():
    measured = timings("all_reduce", {PIPELINED: [0.5] * 3 + [1.5] * 4})
    row = chosen_rows(measured, TuningTable(tuned(measured), 4, several_nodes=False))[0]
    assert (row["operation"], row["arrays"]) == ("all_reduce", "ordinary, wide")
    assert (row["16 KiB"], row["64 MiB"]) == ("pipelined 2", "mpi")


# ---- what is possible


def test_rules_for_impossible_ways_are_ignored():
    rules = [
        TuningRule("scan", "shared", DIRECT),
        TuningRule("broadcast", "ordinary", PIPELINED),
        TuningRule("all_reduce", "ordinary", HIERARCHICAL, nodes="any"),
        TuningRule("broadcast", "ordinary", STAGED),
    ]
    one = TuningTable(rules, 4, several_nodes=False)
    assert one.algorithm(Kind.SCAN, MiB, short=False, shared=True) is MPI
    assert one.algorithm(Kind.BROADCAST, MiB, short=False, shared=False) is STAGED
    assert one.algorithm(Kind.BROADCAST, MiB + 1, short=False, shared=False) is MPI
    assert one.rules == (rules[3],)
    assert TuningTable(rules, 4, several_nodes=True).rules == (rules[2],)


@given(
    st.sampled_from(OPERATIONS),
    st.integers(1, 1 << 30),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_what_is_explained_is_what_is_done(operation, nbytes, short, shared, several):
    tuning_table = TuningTable(DEFAULT, 4, several_nodes=several)
    kind = Kind[operation.upper()]
    algorithm, rule = tuning_table.explain(kind, nbytes, short=short, shared=shared)
    assert algorithm is tuning_table.algorithm(kind, nbytes, short=short, shared=shared)
    assert algorithm is (MPI if rule is None else rule.algorithm)
    assert algorithm in possible_algorithms(operation, "shared", several_nodes=several)


@pytest.mark.parametrize("algorithm", [MPI, STAGED, PIPELINED, DIRECT])
def test_a_forced_way_is_taken_wherever_it_is_possible(algorithm):
    tuning_table = forced(algorithm, 4, "one")
    for operation in OPERATIONS:
        for arrays in ("ordinary", "shared"):
            found = tuning_table.algorithm(
                Kind[operation.upper()], MiB, short=False, shared=arrays == "shared"
            )
            possible = algorithm in possible_algorithms(operation, arrays, several_nodes=False)
            assert found is (algorithm if possible else MPI)


PLAN = Plan(OPERATIONS, (8, 64 * KiB, 4 * MiB), [4], Effort(2, 1e-3))


def test_only_where_there_is_a_choice_it_is_measured():
    points = points_of(PLAN, 4, "one")
    assert {point.operation for point in points} == set(OPERATIONS)
    assert {point.nbytes for point in points} == {64 * KiB, 4 * MiB}  # 8 bytes go on the board
    assert not any(point.arrays == "shared" for point in points if "scan" in point.operation)
    assert {point.dtype for point in points if point.operation == "broadcast"} == {"float32"}
    between = points_of(PLAN, 4, "several")
    assert {point.operation for point in between} == set(OPERATIONS)
    assert {point.arrays for point in between} == {"ordinary"}
    assert {point.nbytes for point in between} == {8, 64 * KiB, 4 * MiB}


def test_results_that_would_fill_a_node_are_left_out():
    plan = PLAN._replace(operations=("all_gather", "all_reduce"), sizes=(64 * MiB,))
    assert {point.operation for point in points_of(plan, 64, "one")} == {"all_reduce"}


def possible(point, nodes="one", **can):
    """Return what is measured where ranks can do everything but what is said."""
    return algorithms_at(point, nodes, **({"can_pipeline": True, "attaches": True} | can))


def test_ways_are_measured_up_to_their_limits():
    point = next(each for each in points_of(PLAN, 4, "one") if each.operation == "reduce")
    assert possible(point) == [MPI, PIPELINED, ATTACHED]
    assert possible(point, can_pipeline=False, attaches=False) == [MPI]
    assert possible(point._replace(operation="scan")) == [MPI, STAGED]
    assert possible(point._replace(operation="scan", nbytes=4 * MiB)) == [MPI]
    assert possible(point._replace(operation="all_reduce"), "several") == [MPI, HIERARCHICAL]


def test_only_ordinary_arrays_of_ranks_that_can_attach_are_measured_so():
    point = next(each for each in points_of(PLAN, 4, "one") if each.operation == "reduce")
    moved = point._replace(operation="gather")
    assert possible(moved) == [MPI, STAGED, ATTACHED]
    assert possible(moved, attaches=False) == [MPI, STAGED]
    assert possible(moved._replace(arrays="shared")) == [MPI, STAGED, DIRECT]
    assert possible(point._replace(nbytes=4 * MiB), attaches=False) == [MPI, PIPELINED]


# ---- the command line

GIVEN = {"operations": (), "sizes": "16K:1M:4", "ranks": None, "rounds": None, "quick": False}


def test_without_options_everything_is_measured_on_all_ranks():
    plan = read_plan(GIVEN, 8)
    assert plan.operations == OPERATIONS
    assert plan.sizes == (16 * KiB, 64 * KiB, 256 * KiB, MiB)
    assert plan.ranks == [8]
    quick = read_plan({**GIVEN, "quick": True, "rounds": 2, "ranks": "4,2"}, 8)
    assert quick.effort.rounds == 2
    assert quick.ranks == [2, 4]


def test_a_node_that_was_busy_is_told_of(monkeypatch):
    for load, said in ((0.3, 0), (2.5, 1)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0, 0))
        found = busy(SimpleNamespace(allgather=lambda own: [0.1, own]))
        assert len(found) == said
    assert "load 2.5" in found[0]


@pytest.mark.parametrize(
    ("option", "value", "nranks", "complaint"),
    [
        ("operations", ("barrier",), 4, "'barrier' has no choice"),
        ("ranks", "8", 4, "has 4 ranks"),
        ("ranks", "1,2", 4, "nobody to talk to"),
        ("ranks", None, 1, "start more"),
        ("sizes", "many", 4, "'many' is not a size"),
    ],
)
def test_what_cannot_be_measured_is_refused(option, value, nranks, complaint):
    with pytest.raises(UsageError, match=complaint):
        read_plan({**GIVEN, option: value}, nranks)
