"""The cost model: fitted to times made of known numbers, and what it says of other ranks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcdist.bench.costs import COSTS, cost_of, log2
from hpcdist.bench.fitting import fit_nonnegative
from hpcdist.bench.predict import Network, explain, fit, predict, step_time
from hpcdist.errors import UsageError

SIZES = [8 << shift for shift in range(0, 24, 3)]
ALPHA, PER_BYTE = 3e-6, 2e-10
CASES = sorted(set(COSTS) - {"barrier"})


def row(case, ranks, nbytes, seconds, *, nodes=1, library="hpcdist", dtype="float32"):
    return {
        "case": case,
        "library": library,
        "dtype": dtype,
        "memory": "ordinary",
        "nbytes": nbytes,
        "ranks": ranks,
        "nodes": nodes,
        "median_s": seconds,
        "min_s": 0.9 * seconds,
        "p99_s": 2 * seconds,
    }


def seconds_of(case, ranks, nbytes, alpha=ALPHA, per_byte=PER_BYTE):
    """Rounds, and the bytes of all ranks of one node through its memory."""
    cost = cost_of(case, "hpcdist")
    return alpha * cost.rounds(ranks) + per_byte * ranks * cost.moved(ranks) * nbytes


def measured(case="all_reduce", ranks=(2,), sizes=SIZES, **known):
    return [row(case, p, n, seconds_of(case, p, n, **known)) for p in ranks for n in sizes]


def over_network(case, local, nodes, nbytes, network):
    """The same on several nodes, by the cheaper algorithm between them."""
    cost = cost_of(case, "hpcdist")
    between = min(
        network.alpha_s * each.rounds(local, nodes)
        + each.port(local, nodes) * nbytes / network.bytes_per_s
        for each in cost.between
    )
    moved = PER_BYTE * local * cost.moved(local * nodes) * nbytes
    return ALPHA * cost.rounds(local) + moved + between


# ---- what is fitted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [(2,), (4,), (2, 4, 8)])
def test_known_latency_and_bandwidth_are_found_again(case, ranks):
    (model,) = fit(measured(case, ranks))
    assert model.seconds["rounds"] == pytest.approx(ALPHA, rel=0.01)
    assert model.seconds["shared"] == pytest.approx(PER_BYTE, rel=0.01)
    assert model.residual < 0.001
    assert model.points == len(ranks) * len(SIZES)


def test_with_several_numbers_of_ranks_cores_and_memory_are_told_apart():
    rows = measured(ranks=(2, 4, 8))
    for each in rows:
        cost = COSTS["all_reduce"]
        each["median_s"] += 5e-10 * cost.moved(each["ranks"]) * each["nbytes"] + 7e-6
    (model,) = fit(rows)
    assert model.seconds["shared"] == pytest.approx(PER_BYTE, rel=0.01)
    assert model.seconds["core"] == pytest.approx(5e-10, rel=0.01)
    assert model.seconds["call"] == pytest.approx(7e-6, rel=0.01)
    assert model.seconds["rounds"] == pytest.approx(ALPHA, rel=0.01)


def test_a_step_in_the_latency_and_a_full_cache_are_found():
    rows = measured(sizes=[8 << shift for shift in range(24)])
    for each in rows:
        each["median_s"] += 40e-6 * (each["nbytes"] > 4096)
        each["median_s"] += 3e-10 * max(0, 2 * each["nbytes"] - (8 << 20))
    (model,) = fit(rows)
    assert model.late_from == 4096
    assert model.cache == 8 << 20
    assert model.seconds["late"] == pytest.approx(40e-6, rel=0.01)
    assert model.seconds["beyond"] == pytest.approx(3e-10, rel=0.01)


@pytest.mark.parametrize("case", ["all_reduce", "reduce_scatter", "broadcast", "all_gather"])
def test_the_network_is_found_in_rows_of_several_nodes(case):
    network = Network(alpha_s=4e-6, bytes_per_s=5e9)
    rows = measured(case, ranks=(2, 4))
    for nodes in (2, 4, 8):
        for n in SIZES:
            taken = over_network(case, 4, nodes, n, network)
            rows.append(row(case, 4 * nodes, n, taken, nodes=nodes))
    (model,) = fit(rows)
    assert model.network().alpha_s == pytest.approx(4e-6, rel=0.01)
    assert model.network().bytes_per_s == pytest.approx(5e9, rel=0.01)
    (told,) = predict([model], [64], [1 << 20])
    assert told["seconds"] == pytest.approx(over_network(case, 4, 16, 1 << 20, network), rel=0.01)
    assert told["assumed"] == "a network as between 8 nodes"


def test_one_rank_a_node_tells_the_network_although_no_node_was_measured_alone():
    network = Network(alpha_s=2e-6, bytes_per_s=1e10)
    cost = cost_of("all_reduce", "hpcdist")
    rows = []
    for nodes in (2, 4, 8):
        for n in SIZES:
            taken = min(
                network.alpha_s * each.rounds(1, nodes) + each.port(1, nodes) * n / 1e10
                for each in cost.between
            )
            rows.append(row("all_reduce", nodes, n, taken, nodes=nodes))
    (model,) = fit(rows)
    assert model.network().alpha_s == pytest.approx(2e-6, rel=0.01)
    assert model.network().bytes_per_s == pytest.approx(1e10, rel=0.01)


@settings(max_examples=25, derandomize=True)  # a bound that one noise in thousands exceeds
@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.5e-6, 1e-4),
    st.floats(1e-11, 1e-9),
    st.sampled_from(["all_reduce", "all_gather", "broadcast"]),
)
def test_noise_of_ten_percent_moves_predictions_by_little(seed, alpha, per_byte, case):
    noise = np.random.default_rng(seed)
    rows = measured(case, ranks=(2, 4), alpha=alpha, per_byte=per_byte)
    for each in rows:
        each["median_s"] *= noise.uniform(0.9, 1.1)
    models = fit(rows)
    for size in (8, 1 << 26):
        (told,) = predict(models, [4], [size])
        assert told["seconds"] == pytest.approx(seconds_of(case, 4, size, alpha, per_byte), rel=0.2)
    assert models[0].residual < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_no_reason_for_steps_and_full_caches(seed):
    noise = np.random.default_rng(seed)
    rows = measured(sizes=[8 << shift for shift in range(0, 24, 2)])
    for each in rows:
        each["median_s"] *= noise.uniform(0.95, 1.05)
    (model,) = fit(rows)
    assert (model.late_from, model.cache) == (math.inf, math.inf)


def test_one_slow_measurement_does_not_bend_the_rest():
    rows = measured(sizes=[8 << shift for shift in range(24)])
    rows[10]["median_s"] *= 50
    (told,) = predict(fit(rows), [2], [1 << 24])
    assert told["seconds"] == pytest.approx(seconds_of("all_reduce", 2, 1 << 24), rel=0.1)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 6))
def test_least_squares_are_the_best_of_all_that_are_not_negative(seed, columns, more):
    draw = np.random.default_rng(seed)
    table, wanted = draw.normal(size=(columns + more, columns)), draw.normal(size=columns + more)
    found = fit_nonnegative(table, wanted)
    slope = table.T @ (table @ found - wanted)
    assert (found >= 0).all()
    assert (slope > -1e-8).all()
    assert slope[found > 0] == pytest.approx(0, abs=1e-8)


# ---- what is predicted


@pytest.mark.parametrize("case", [*CASES, "barrier"])
@pytest.mark.parametrize("local", [1, 2, 8])
def test_more_ranks_or_more_bytes_never_take_less_time(case, local):
    rows = measured(case, ranks=(2, 8), sizes=SIZES if case != "barrier" else [0])
    ranks, sizes = [2**shift for shift in range(13)], [0, 1, *SIZES, 1 << 30]
    told = predict(fit(rows), ranks, sizes, ranks_per_node=local)
    columns = len(sizes) if case != "barrier" else 1
    seconds = np.array([each["seconds"] for each in told]).reshape(len(ranks), columns)
    assert (np.diff(seconds, axis=0) >= -1e-15).all()
    assert (np.diff(seconds, axis=1) >= -1e-15).all()


def test_where_it_was_measured_the_model_is_as_far_off_as_it_says():
    draw = np.random.default_rng(3)
    rows = measured(ranks=(2, 4, 8))
    for each in rows:
        each["median_s"] *= draw.uniform(0.8, 1.2)
    models = fit(rows)
    told = predict(models, [2, 4, 8], SIZES)
    pairs = zip(told, rows, strict=True)
    errors = [abs(each["seconds"] / known["median_s"] - 1) for each, known in pairs]
    assert np.median(errors) == pytest.approx(models[0].residual)
    assert 0.01 < models[0].residual < 0.2


def test_many_nodes_pay_each_network_port_once_and_the_rounds_by_the_logarithm():
    network = Network(alpha_s=2e-6, bytes_per_s=1e10)
    models = fit(measured(ranks=(8,)))
    (small,) = predict(models, [4096], [0], network=network)
    (large,) = predict(models, [4096], [1 << 28], network=network)
    assert small["nodes"] == 512
    assert small["seconds"] == pytest.approx(ALPHA * 3 + 2e-6 * (9 + 9))  # agreed, then reduced
    by_port, by_memory = 2 * (1 << 28) / 1e10, PER_BYTE * 8 * 2 * (1 << 28)
    assert large["seconds"] == pytest.approx(by_port + by_memory, rel=0.01)


def test_mpi4py_does_not_agree_first():
    rows = [{**each, "library": "mpi4py"} for each in measured()] + measured("barrier", sizes=[0])
    raw = predict(fit(rows), [8], [0], network=Network(alpha_s=1.0))[0]
    assert raw["library"] == "mpi4py"
    assert raw["seconds"] == pytest.approx(2, rel=0.01)


def test_a_prediction_says_what_it_assumes():
    models = fit(measured(ranks=(2, 4)))
    [here, there, crowded, large] = [
        predict(models, [ranks], [size], ranks_per_node=local)[0]["assumed"]
        for ranks, size, local in [(4, 64, 4), (8, 64, 4), (8, 64, 8), (2, 1 << 40, None)]
    ]
    assert here == ""
    assert there == "network of 1.5 us, 25 GB/s a node"
    assert crowded == "8 ranks on a node as 4"
    assert large == f"sizes beyond 8 to {SIZES[-1]} bytes"


def test_a_barrier_is_predicted_once_for_all_sizes():
    rows = [row("barrier", 2, None, 3e-6)]
    told = predict(fit(rows), [2, 8], [8, 1024])
    assert [(each["ranks"], each["nbytes"]) for each in told] == [(2, None), (8, None)]
    assert told[0]["seconds"] == pytest.approx(3e-6)


def test_variants_of_a_collective_are_models_of_their_own_with_its_cost():
    rows = [{**each, "case": "all_gather_list"} for each in measured("all_gather")]
    rows += measured("all_gather")
    models = fit(rows)
    assert [model.case for model in models] == ["all_gather_list", "all_gather"]
    assert models[0].seconds == pytest.approx(models[1].seconds)


def test_copying_does_not_use_the_network():
    rows = [row("all_reduce", 2, n, 1e-7 + n * 1e-10, library="copy") for n in SIZES]
    models = fit(rows + measured())
    here, there = predict(models[:1], [2, 512], [1 << 20])
    assert here["seconds"] == there["seconds"]
    assert there["nodes"] == 256
    assert there["assumed"] == ""


def test_cases_without_a_cost_are_left_out():
    assert [model.case for model in fit([*measured(), row("training", 2, None, 0.1)])] == [
        "all_reduce"
    ]


def test_explained_are_latency_bandwidth_and_how_far_off_it_is():
    (told,) = explain(fit(measured(ranks=(4,))))
    assert told["alpha_us"] == pytest.approx(1e6 * ALPHA, rel=0.01)
    assert told["GB_per_s"] == pytest.approx(1e-9 / (4 * PER_BYTE), rel=0.01)
    assert told["residual"] < 0.001
    assert told["points"] == len(SIZES)


# ---- a training step


def test_a_step_is_computing_and_what_of_the_buckets_is_not_hidden():
    models = fit(measured(ranks=(4,)))
    bucket, rest = 25 << 20, 10 << 20
    sent = 2 * seconds_of("all_reduce", 4, bucket) + seconds_of("all_reduce", 4, rest)
    nbytes = 2 * bucket + rest
    assert step_time(models, 1.0, nbytes, 4) == pytest.approx(1 + sent, rel=0.01)
    assert step_time(models, 1.0, nbytes, 4, hidden=0.75) == pytest.approx(1 + sent / 4, rel=0.01)
    assert step_time(models, 0.01, nbytes, 4, hidden=1.0) == pytest.approx(sent, rel=0.01)
    assert step_time(models, 1.0, 0, 4) == 1.0
    assert step_time(models, 1.0, nbytes, 1) == 1.0


def test_a_step_uses_the_model_of_ordinary_float32_arrays():
    half = [{**each, "dtype": "bfloat16", "median_s": 1.0} for each in measured()]
    slow = fit(half)
    assert step_time(slow, 0.0, 1 << 20, 2) == pytest.approx(
        predict(slow, [2], [1 << 20])[0]["seconds"]
    )
    known = pytest.approx(seconds_of("all_reduce", 2, 1 << 20), rel=0.01)
    assert step_time(fit(half + measured()), 0.0, 1 << 20, 2) == known


# ---- what is refused


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "no row is of a collective of the library 'hpcdist'"),
        ([{**measured()[0], "library": "mpi4py"}], "no row is of a collective"),
        ([row("training", 2, None, 0.1)], "no row is of a collective"),
        (measured(sizes=[64]), "1 size was measured"),
        ([row("all_reduce", 1, n, 1e-6) for n in SIZES], "measured on one rank only"),
        ([{"case": "all_reduce", "library": "hpcdist"}], "has no ranks, median_s"),
        ([row("all_reduce", 2, 8, 0.0)], "0 s on 2 ranks"),
        ([row("all_reduce", 2, 8, math.nan)], "nan s on 2 ranks"),
        ([row("all_reduce", 2, 8, 1e-6, nodes=4)], "2 ranks of 4 nodes"),
    ],
)
def test_rows_that_cannot_be_fitted_are_named(rows, said):
    with pytest.raises(UsageError, match=said):
        fit(rows)


@pytest.mark.parametrize(
    "asked",
    [
        {"ranks": []},
        {"ranks": [0]},
        {"sizes": []},
        {"sizes": [-1]},
        {"ranks_per_node": 0},
        {"network": Network(bytes_per_s=0)},
        {"network": Network(alpha_s=-1e-6)},
    ],
)
def test_impossible_predictions_are_refused(asked):
    with pytest.raises(UsageError, match="got"):
        predict(fit(measured()), **{"ranks": [2], "sizes": [8], **asked})


@pytest.mark.parametrize("wrong", [{"hidden": 1.5}, {"compute_s": -1.0}, {"gradient_bytes": -1}])
def test_impossible_steps_are_refused(wrong):
    with pytest.raises(UsageError, match="a step has"):
        step_time(fit(measured()), **{"compute_s": 1.0, "gradient_bytes": 8, "ranks": 2, **wrong})


def test_a_step_needs_the_model_of_all_reduce():
    with pytest.raises(UsageError, match="model of all_reduce"):
        step_time(fit(measured("all_gather")), 1.0, 8, 2)


# rounds and bytes of a rank among 4 ranks of one node; rounds and bytes through the port of a node,
# for each algorithm, of 4 nodes with 2 ranks each
@pytest.mark.parametrize(
    ("case", "rounds", "moved", "between"),
    [
        ("all_reduce", 2, 1.5, [(2, 2), (4, 1.5)]),
        ("reduce", 2, 1.5, [(2, 2), (4, 1.5)]),
        ("reduce_scatter", 2, 0.75, [(2, 0.75)]),
        ("scatter", 2, 0.75, [(2, 0.75)]),
        ("broadcast", 2, 1, [(2, 2), (5, 1.5)]),
        ("all_gather", 2, 3, [(2, 6)]),
        ("gather", 2, 3, [(2, 6)]),
        ("alltoall", 3, 0.75, [(2, 2), (6, 1.5)]),
        ("scan", 2, 2, [(2, 4)]),
        ("exscan", 2, 2, [(2, 4)]),
        ("barrier", 2, 0, [(2, 0)]),
        ("latency", 1, 1, [(1, 1)]),
    ],
)
def test_what_a_collective_costs_by_the_literature(case, rounds, moved, between):
    cost = COSTS[case]
    assert (cost.rounds(4), cost.moved(4)) == (rounds, moved)
    assert [(each.rounds(2, 4), each.port(2, 4)) for each in cost.between] == between


def test_every_collective_with_a_cost_is_checked_here():
    (marks,) = test_what_a_collective_costs_by_the_literature.pytestmark
    assert {case for case, *_ in marks.args[1]} == set(COSTS)


def test_one_rank_alone_pays_nothing_but_the_call():
    rows = measured(ranks=(1, 2))
    for each in rows:
        each["median_s"] += 1e-6
    (told,) = predict(fit(rows), [1], [1 << 20])
    assert told["seconds"] == pytest.approx(1e-6, rel=0.02)


def test_the_rounds_of_a_tree():
    assert [log2(ranks) for ranks in (1, 2, 3, 4, 5, 8, 4096)] == [0, 1, 2, 2, 3, 3, 12]
