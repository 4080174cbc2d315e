"""Checkpoints in memory, on simulated ranks: what some of them lose, others bring back.

The loss of ranks is pretended: a group of fewer ranks goes on with what these have kept, or a rank
with nothing takes part. A test with ranks that die is in ``tests/launch``.
"""

import random
from itertools import chain

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.checkpoint import LocalSlice
from hpcdist.checkpoint.memory import committing, keeper, vault as vaults


def taken_over(memory, group, state, *, empty=False, **options):
    """Return a memory that has what another one kept, or nothing, for the ranks of `group`."""
    made = dist.Memory(**state, group=group, **options)
    made._vault = vaults.Vault() if empty else memory._vault
    made._vault.world_generation = -1
    return made


def division(rank, size, length=20):
    """Return what a rank has of an array that is cut evenly."""
    cuts = [length * each // size for each in range(size + 1)]
    return cuts[rank], cuts[rank + 1]


def training(group):
    """Return a state: weights that all have, and moments of which each rank has a part."""
    start, stop = division(group.rank, group.nranks)
    moments = LocalSlice(np.zeros(stop - start), (20,), offset=start)
    return {
        "model": {"weights": np.zeros((3, 2), np.float32)},
        "optimizer": {"moments": moments, "steps": 0},
    }


def train(state, step):
    """Change the state as all ranks do in a step."""
    state["model"]["weights"] += np.float32(1 / (step + 3))
    moments = state["optimizer"]["moments"]
    moments.data[...] += np.arange(20)[moments.offset :][: moments.data.size] * step + 0.1
    state["optimizer"]["steps"] = step + 1


def expected(group, steps):
    state = training(group)
    for step in range(steps):
        train(state, step)
    return state


def same(state, other):
    return (
        (state["model"]["weights"] == other["model"]["weights"]).all()
        and (state["optimizer"]["moments"].data == other["optimizer"]["moments"].data).all()
        and state["optimizer"]["steps"] == other["optimizer"]["steps"]
    )


def trained(group, steps, **options):
    state = training(group)
    memory = dist.Memory(**state, every=4, group=group, **options)
    for step in memory.steps(steps):
        train(state, step)
    return memory, state


def committed(group, steps, **options):
    """Train without an end, so that nothing goes to the disk."""
    state = training(group)
    memory = dist.Memory(**state, every=4, group=group, **options)
    for step in memory.steps(steps + 1):
        if step == steps:
            break
        train(state, step)
    return memory, state


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_state_is_brought_back_in_all_bits(size):
    def on_rank():
        group = dist.get_group()
        memory, state = trained(group, 6)
        train(state, 100)
        assert memory.restore() == 6
        return same(state, expected(group, 6))

    assert dist.simulate(size, on_rank) == [True] * size


@pytest.mark.parametrize("lost", [(0,), (2,), (4,), (0, 2), (1, 4)])
def test_fewer_ranks_go_on_with_what_those_that_are_gone_had(lost):
    def on_rank():
        world = dist.get_group()
        memory, _ = trained(world, 6)
        left = dist.new_group([rank for rank in range(5) if rank not in lost])
        if not left.is_member():
            return True
        state = training(left)
        again = taken_over(memory, left, state)
        return again.restore() == 6 and same(state, expected(left, 6))

    assert dist.simulate(5, on_rank) == [True] * 5


def test_a_spare_that_has_nothing_takes_the_place_of_a_rank():
    def on_rank():
        world = dist.get_group()
        first = dist.new_group([0, 1, 2])
        second = dist.new_group([0, 2, 3])
        memory = trained(first, 5)[0] if first.is_member() else None
        if not second.is_member():
            return True
        state = training(second)
        again = taken_over(memory, second, state, empty=world.rank == 3)
        assert again.restore() == 5
        other = training(second)
        # what it has committed again is whole: any one may be lost now
        once_more = taken_over(again, second, other, empty=world.rank == 0)
        return once_more.restore() == 5 and same(other, expected(second, 5))

    assert dist.simulate(4, on_rank) == [True] * 4


def without_a_rank_and_its_buddy(**options):
    """Return the ranks that are left, their state and a memory; None on those that are lost."""
    memory, _ = trained(dist.get_group(), 10, **options)
    left = dist.new_group([2, 3])
    if not left.is_member():
        return None
    state = training(left)
    return left, state, taken_over(memory, left, state, **options)


def test_where_a_rank_is_lost_with_its_copy_the_step_on_disk_is_loaded(tmp_path, capsys):
    folder = str(tmp_path / "run")

    def on_rank():
        found = without_a_rank_and_its_buddy(path=folder, every_on_disk=5)
        if found is None:
            return True
        left, state, memory = found
        return memory.restore() == 10 and same(state, expected(left, 10))

    assert dist.simulate(4, on_rank) == [True] * 4
    told = capsys.readouterr().err
    assert "rank(s) 0" in told
    assert f"going on with step 10, the last one in {folder}" in told
    assert told.count("\n") == 1


def test_where_a_rank_is_lost_with_its_copy_and_there_is_no_path_all_ranks_say_so():
    def on_rank():
        found = without_a_rank_and_its_buddy()
        if found is not None:
            with pytest.raises(dist.CheckpointError, match=r"cannot go on: .* there is no path="):
                found[2].restore()
        return True

    assert dist.simulate(4, on_rank) == [True] * 4


def test_before_the_first_step_on_disk_a_state_that_is_made_anew_begins_again(tmp_path, capsys):
    folder = str(tmp_path / "run")

    def on_rank():
        memory, _ = committed(dist.get_group(), 10, path=folder)
        left = dist.new_group([2, 3])
        if not left.is_member():
            return True
        again = taken_over(memory, left, training(left), path=folder)
        return again.restore() == 0

    assert dist.simulate(4, on_rank) == [True] * 4
    told = capsys.readouterr().err
    assert f"{folder} has no checkpoint yet, so the training begins again" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("old", [{2}, {2, 3}])
def test_a_state_that_some_ranks_have_trained_does_not_begin_again(old, tmp_path):
    def on_rank():
        memory, state = committed(dist.get_group(), 10, path=tmp_path)
        left = dist.new_group([2, 3])
        if not left.is_member():
            return True
        again = taken_over(memory, left, state, path=tmp_path)
        again._is_new = dist.get_rank() not in old
        with pytest.raises(dist.CheckpointError, match=r"cannot go on: .* has no checkpoint"):
            again.restore()
        return True

    assert dist.simulate(4, on_rank) == [True] * 4


def test_a_training_that_starts_again_goes_on_with_the_last_step_on_disk(tmp_path):
    def on_rank():
        group = dist.get_group()
        trained(group, 6, path=tmp_path, every_on_disk=3)
        state = training(group)
        memory = dist.Memory(**state, path=tmp_path)
        return memory.restore() == 6 and same(state, expected(group, 6))

    assert dist.simulate(2, on_rank) == [True] * 2


def test_two_copies_outlive_two_neighbours():
    def on_rank():
        world = dist.get_group()
        memory, _ = trained(world, 6, copies=2)
        left = dist.new_group([0, 3])
        if not left.is_member():
            return True
        state = training(left)
        return taken_over(memory, left, state).restore() == 6 and same(state, expected(left, 6))

    assert dist.simulate(4, on_rank) == [True] * 4


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1, 2]])
def test_on_unequal_nodes_a_whole_node_may_be_lost(nodes, copies, monkeypatch):
    monkeypatch.setattr(committing, "nodes_of", lambda ranks: nodes[: ranks.size])

    def on_rank():
        world = dist.get_group()
        memory, _ = trained(world, 6, copies=copies)
        left = dist.new_group([rank for rank in world.ranks if nodes[rank] != 1])
        if not left.is_member():
            return True
        state = training(left)
        return taken_over(memory, left, state).restore() == 6 and same(state, expected(left, 6))

    assert all(dist.simulate(len(nodes), on_rank))


def test_a_commit_that_some_ranks_did_not_end_is_forgotten_or_whole():
    def on_rank(ended):
        world = dist.get_group()
        memory, state = trained(world, 4)
        train(state, 4)
        memory.commit(5)
        if world.rank not in ended:
            memory._vault.generations.pop()
        again = taken_over(memory, world, state)
        step = again.restore()
        assert same(state, expected(world, step))
        return step

    assert dist.simulate(3, on_rank, ended=(1, 2)) == [5] * 3
    assert dist.simulate(3, on_rank, ended=(1,)) == [4] * 3


@pytest.mark.parametrize("seed", range(8))
def test_whoever_dies_in_a_commit_the_others_go_back_to_a_step_that_is_whole(seed):
    choices = random.Random(seed)
    size = choices.randint(2, 5)
    ended = {rank for rank in range(size) if choices.random() < 0.5}
    lost = choices.randrange(size)

    def on_rank():
        world = dist.get_group()
        memory, state = trained(world, 4)
        train(state, 4)
        memory.commit(5)
        if world.rank not in ended:
            memory._vault.generations.pop()
        left = dist.new_group([rank for rank in range(size) if rank != lost])
        if not left.is_member():
            return None
        state = training(left)
        step = taken_over(memory, left, state).restore()
        assert same(state, expected(left, step))
        return step

    steps = {step for step in dist.simulate(size, on_rank) if step is not None}
    assert steps < {4, 5}
    assert len(steps) == 1


def test_two_steps_are_kept_and_their_memory_is_used_again():
    def on_rank():
        memory, _ = trained(dist.get_group(), 30)
        (last,) = memory._vault.generations[-1:]
        assert [each.step for each in memory._vault.generations] == [28, 30]
        before = {id(block.memory) for each in memory._vault.generations for block in each.blocks}
        memory.commit(31)
        memory.commit(32)
        after = {id(block.memory) for each in memory._vault.generations for block in each.blocks}
        assert last.step == 30
        return before == after

    assert dist.simulate(2, on_rank) == [True] * 2


def test_a_new_memory_begins_anew_unless_ranks_have_been_lost(monkeypatch):
    def on_rank():
        group = dist.get_group()
        trained(group, 4)
        assert dist.Memory(**training(group)).restore() == 0
        memory, _ = trained(group, 6)
        monkeypatch.setattr(keeper, "_recoveries", lambda: 1)
        state = training(group)
        assert dist.Memory(**state).restore() == 6
        return same(state, expected(group, 6)) and memory.restore() == 6

    assert on_rank_alone(on_rank)


def on_rank_alone(function):
    (result,) = dist.simulate(1, function)
    return result


@pytest.mark.parametrize("on_disk", [False, True])
def test_lists_become_as_long_as_they_were(on_disk, tmp_path):
    def on_rank():
        losses = [0.5]
        state = {"losses": losses, "x": np.zeros(2)}
        memory = dist.Memory(state=state, path=tmp_path, every_on_disk=2)
        losses.append(0.25)
        memory.commit(2)
        losses.append(0.125)
        again = taken_over(memory, None, {"state": state}, path=tmp_path, empty=on_disk)
        return again.restore(), losses, state["losses"] is losses

    assert on_rank_alone(on_rank) == (2, [0.5, 0.25], True)


def test_names_tell_memories_apart():
    def on_rank():
        one, other = {"x": np.zeros(2)}, {"y": np.ones(3)}
        memories = [dist.Memory(one, name="one"), dist.Memory(other, name="other")]
        for each in memories:
            each.commit(1)
        one["x"] += 1
        other["y"] += 1
        assert memories[0].restore() == 1
        return one["x"].tolist(), other["y"].tolist()

    assert on_rank_alone(on_rank) == ([0, 0], [2, 2, 2])


def test_random_numbers_go_on_where_they_were():
    def on_rank():
        memory = dist.Memory({"x": np.zeros(1)})
        np.random.seed(3)
        random.seed(4)
        np.random.standard_normal()  # half of a pair is left
        random.gauss(0, 1)
        memory.commit(1)
        numbers = [[np.random.standard_normal(), random.gauss(0, 1), random.random()]]
        memory.restore()
        return [*numbers, [np.random.standard_normal(), random.gauss(0, 1), random.random()]]

    first, second = on_rank_alone(on_rank)
    assert first == second


def test_torchs_random_numbers_go_on_where_they_were():
    torch = pytest.importorskip("torch")

    def on_rank():
        memory = dist.Memory({"x": np.zeros(1)})
        memory.commit(1)
        first = torch.rand(3)
        memory.restore()
        return torch.equal(first, torch.rand(3))

    assert on_rank_alone(on_rank)


def test_a_sampler_goes_on_where_it_was_with_fewer_ranks():
    def on_rank():
        sampler = dist.DistributedSampler(24, seed=5)
        memory = dist.Memory({"x": np.zeros(1)}, sampler=sampler)
        whole = [*dist.DistributedSampler(24, seed=5, num_replicas=1, rank=0)]
        handed_out = iter(sampler)
        for _ in range(2):
            next(handed_out)
        memory.commit(2)
        for _ in range(2):
            next(handed_out)
        left = dist.new_group([0, 2, 3])
        if not left.is_member():
            return True
        again = dist.DistributedSampler(24, seed=5, group=left, tail="keep")
        taken_over(memory, left, {"model": {"x": np.zeros(1)}, "sampler": again}).restore()
        rest = []
        dist.all_gather_object(rest, [*again], left)
        return sorted(chain(*rest)) == sorted(whole[8:])

    assert dist.simulate(4, on_rank) == [True] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to keep; give it model=, optimizer= or state="),
        ({"model": {}, "every": 0}, "every must be an integer of at least 1, got 0"),
        ({"model": {}, "copies": -1}, "copies must be an integer of at least 0, got -1"),
        (
            {"model": {}, "every_on_disk": 1.5},
            "every_on_disk must be an integer of at least 1, got 1.5",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, message):
    def on_rank():
        with pytest.raises(dist.UsageError, match=message):
            dist.Memory(**options)
        return True

    assert on_rank_alone(on_rank)


def refused(size, commit):
    """Return what each rank is told when they commit states that do not fit."""

    def on_rank():
        with pytest.raises(dist.HpcdistError) as caught:
            commit(dist.get_rank())
        return f"{type(caught.value).__name__}: {caught.value}"

    return dist.simulate(size, on_rank)


def test_a_state_that_one_rank_cannot_keep_is_told_to_all():
    def commit(rank):
        dist.Memory({"x": object() if rank == 1 else 1}).commit(1)

    for told in refused(3, commit):
        assert "'model.x' is an object, which cannot be saved" in told


def test_ranks_that_commit_different_steps_are_told():
    for told in refused(3, lambda rank: dist.Memory({"x": 1}).commit(rank // 2)):
        assert told.startswith("MismatchError: rank 0 commits step 0, but rank 2 step 1")


def test_ranks_whose_numbers_differ_are_told():
    for told in refused(2, lambda rank: dist.Memory({"x": rank}).commit(1)):
        assert "different things to save at 'model.x'" in told


def test_a_state_of_another_shape_is_refused_and_nothing_changes():
    def on_rank():
        memory = dist.Memory({"x": np.zeros(3), "y": np.ones(2)})
        memory.commit(1)
        other = {"x": np.full(3, 7.0), "y": np.ones(4)}
        with pytest.raises(dist.CheckpointError, match="committed in memory as step 1 is not one"):
            taken_over(memory, None, {"model": other}).restore()
        return other["x"].tolist()

    assert dist.simulate(2, on_rank) == [[7.0] * 3] * 2


def test_a_memory_tells_what_it_has():
    def on_rank():
        return repr(trained(dist.get_group(), 4)[0])

    shown = dist.simulate(2, on_rank)[0]
    assert shown == "<Memory 'memory': model, optimizer of 2 ranks, 368 bytes here of steps [0, 4]>"
