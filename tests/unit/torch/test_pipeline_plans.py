"""Schedules and segments of pipelines: tables that are right for any number of ranks."""

import itertools
from collections import Counter

import pytest

pytest.importorskip("torch", minversion="2.11")

from hpcdist.errors import UsageError
from hpcdist.fleet.fields import FIELDS
from hpcdist.torch.pipeline.schedule import (
    NAMES,
    RULES,
    Action,
    bubble_of,
    needs,
    plan_pipeline,
    predict_bubble,
    rank_of,
    stages_of,
    times_of,
    unit_cost,
)
from hpcdist.torch.pipeline.segments import costs_by_name, plan_segments

CASES = [
    (schedule, ranks, micros, chunks)
    for schedule, ranks, micros, chunks in itertools.product(
        RULES, (1, 2, 3, 4, 7), (1, 2, 3, 4, 8, 13), (1, 2, 3)
    )
    if schedule != "ZBV" or chunks == 2
]


def in_words(actions):
    return " ".join(f"{each.kind}{each.micro}" for each in actions)


def done_at_once(plan):
    """Return in which order ranks that take turns can do their actions, as far as they get."""
    done, ahead = [], [list(actions) for actions in plan.table]
    while True:
        before = len(done)
        for actions in ahead:
            while actions and all(each in done for each in needs(actions[0], plan)):
                done.append(actions.pop(0))
        if len(done) == before:
            return done


@pytest.mark.parametrize(("schedule", "ranks", "micros", "chunks"), CASES)
def test_a_plan_has_every_action_once_where_its_stage_is_and_never_waits_in_a_circle(
    schedule, ranks, micros, chunks
):
    plan = plan_pipeline(schedule, ranks, micros, chunks)
    kinds = "FIW" if RULES[schedule].splits else "FB"
    wanted = {
        Action(kind, stage, micro)
        for kind in kinds
        for stage in range(ranks * chunks)
        for micro in range(micros)
    }
    assert Counter(itertools.chain(*plan.table)) == dict.fromkeys(wanted, 1)
    for rank, actions in enumerate(plan.table):
        assert all(plan.rank_of(each.stage) == rank for each in actions)
    assert set(done_at_once(plan)) == wanted


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micros", [1, 2, 4, 9, 16])
@pytest.mark.parametrize("schedule", ["FThenB", "1F1B"])
def test_without_chunks_the_bubble_is_the_one_of_the_books(schedule, ranks, micros):
    expected = (ranks - 1) / (micros + ranks - 1)
    assert predict_bubble(schedule, ranks, micros) == pytest.approx(expected)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 3), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["VPP", "LoopedBFS"])
def test_chunks_divide_the_bubble(schedule, ranks, chunks, rounds):
    micros = rounds * ranks
    expected = (ranks - 1) / (chunks * micros + ranks - 1)
    assert predict_bubble(schedule, ranks, micros, chunks) == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_weights_fill_two_thirds_of_the_bubble_of_1f1b(ranks, rounds):
    micros = rounds * ranks
    idle = predict_bubble("ZBH1", ranks, micros)
    assert idle == pytest.approx((ranks - 1) / (3 * micros + ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["ZBV", "ZBVPP"])
def test_chunks_divide_what_weights_leave(schedule, ranks, rounds):
    plan = plan_pipeline(schedule, ranks, rounds * ranks, 2)
    of_the_books = 6 * plan.microbatches + ranks - 1
    assert of_the_books <= max(own[-1].end for own in times_of(plan)) <= of_the_books + 1


def test_nobody_waits_for_gradients_of_what_the_first_stage_is_given():
    assert [unit_cost(Action(kind, 0, 0)) for kind in "FBIW"] == [1, 2, 0, 2]
    assert [unit_cost(Action(kind, 1, 0)) for kind in "FBIW"] == [1, 2, 1, 1]


def most_under_way(actions, released_by):
    under_way = most = 0
    for each in actions:
        under_way += (each.kind == "F") - (each.kind == released_by)
        most = max(most, under_way)
    return most


@pytest.mark.parametrize(("ranks", "micros"), [(2, 8), (4, 4), (4, 16), (8, 24)])
def test_no_rank_keeps_more_than_the_schedule_promises(ranks, micros):
    for rank, actions in enumerate(plan_pipeline("1F1B", ranks, micros).table):
        assert most_under_way(actions, "B") == min(micros, ranks - rank)
    for actions in plan_pipeline("FThenB", ranks, micros).table:
        assert most_under_way(actions, "B") == micros
    for actions in plan_pipeline("ZBH1", ranks, micros).table:
        assert most_under_way(actions, "W") <= ranks
    for actions in plan_pipeline("ZBV", ranks, micros, 2).table:
        assert most_under_way(actions, "W") <= 2 * ranks


def test_1f1b_is_what_it_is_called():
    first, last = plan_pipeline("1F1B", 2, 4).table
    assert in_words(first) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert in_words(last) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_without_training_there_are_forward_passes_only():
    settings = itertools.product(("FThenB", "1F1B"), (1, 2, 3), ("loop", "V"))
    for schedule, chunks, placement in settings:
        plan = plan_pipeline(schedule, 3, 5, chunks, placement, training=False)
        assert {each.kind for each in itertools.chain(*plan.table)} == {"F"}
        assert len(done_at_once(plan)) == 3 * 5 * chunks


def test_every_name_is_one_of_a_rule():
    assert {*NAMES.values()} == {*RULES}
    for name in NAMES:
        assert plan_pipeline(name, 2, 3, 2).schedule == name


def test_stages_on_a_loop_and_on_a_v():
    assert [rank_of(stage, 3, "loop") for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of(stage, 3, "V") for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert stages_of(0, 3, 2, "V") == [0, 5]


def test_what_is_no_plan_is_refused():
    with pytest.raises(UsageError, match=r"no schedule '1f1b'.*'1F1B'"):
        plan_pipeline("1f1b", 2, 2)
    with pytest.raises(UsageError, match="at least 1 rank"):
        plan_pipeline("1F1B", 2, 0)
    with pytest.raises(UsageError, match="placement='V'"):
        plan_pipeline("ZBV", 2, 4, 2, "loop")
    with pytest.raises(UsageError, match="num_virtual_pipeline_stages=2"):
        plan_pipeline("ZBV", 2, 4, 1)


def test_a_slow_stage_shows_in_the_bubble():
    def cost(action):
        return 3.0 if action.stage == 1 else 1.0

    plan = plan_pipeline("FThenB", 2, 1)
    spans = times_of(plan, cost)
    assert [(each.begin, each.end) for each in spans[0]] == [(0, 1), (7, 8)]
    assert bubble_of(spans) == 0.5


# ---- segments


def test_layers_go_evenly_into_stages_the_longer_ones_last():
    assert plan_segments([1] * 10, 4) == [0, 2, 4, 7, 10]
    assert plan_segments([1] * 4, 4) == [0, 1, 2, 3, 4]
    assert plan_segments([1] * 5, 1) == [0, 5]


def all_plans(layers, stages):
    for inner in itertools.combinations(range(1, layers), stages - 1):
        yield [0, *inner, layers]


def costs_in(bounds, costs):
    return [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(20))
def test_the_most_expensive_stage_is_as_cheap_as_can_be(seed):
    import random

    made = random.Random(seed)
    layers = made.randint(1, 9)
    stages = made.randint(1, layers)
    costs = [made.choice([0, 1, 2, 5, 0.5]) for _ in range(layers)]
    planned = costs_in(plan_segments(costs, stages), costs)
    best = min(max(costs_in(each, costs)) for each in all_plans(layers, stages))
    assert max(planned) == best


def test_layers_are_found_by_the_names_of_their_classes():
    names = ["Embedding", "Block", "Block", "Block", "Block", "Norm", "Head"]
    costs = costs_by_name(names, "layer:block", 2)
    assert plan_segments(costs, 2) == [0, 3, 7]
    with pytest.raises(UsageError, match=r"finds 4 layers for 5 stages.*Embedding, Block, Norm"):
        costs_by_name(names, "layer:Block", 5)
    with pytest.raises(UsageError, match="use 'uniform'"):
        costs_by_name(names, "even", 2)
    with pytest.raises(UsageError, match="no regular expression"):
        costs_by_name(names, "layer:(", 2)


def test_bounds_are_taken_as_they_are():
    assert plan_segments([1] * 6, 3, [0, 1, 2]) == [0, 1, 2, 6]
    assert plan_segments([1] * 6, 3, (0, 1, 2, 6)) == [0, 1, 2, 6]
    for wrong in ([0, 1], [1, 2, 3], [0, 2, 2], [0, 3, 2], [0, 1, 2, 5], [0, 1, 6], [0, 1.5, 3]):
        with pytest.raises(UsageError, match="does not cut 6 layers into 3 stages"):
            plan_segments([1] * 6, 3, wrong)


def test_costs_are_numbers_of_at_least_0():
    for wrong in ([1, -1], [1, float("nan")], [float("inf"), 1]):
        with pytest.raises(UsageError, match="cost numbers of at least 0"):
            plan_segments(wrong, 2)
    with pytest.raises(UsageError, match="seg_method is 3; use 'uniform'"):
        plan_segments([1] * 6, 3, 3)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UsageError, match="3 layers cannot be cut into 4 stages"):
        plan_segments([1] * 3, 4)


def test_a_strategy_takes_every_name_of_a_schedule():
    assert {*FIELDS["pipeline_configs"]["schedule_mode"].choices} == {*NAMES}
