"""Samplers and sharded datasets: what they give, where they stand, what they refuse."""

import json
import pickle
from collections import namedtuple
from itertools import chain

import numpy as np
import pytest
from requirements import needs_room_for_workers

import hpcdist as dist

Pair = namedtuple("Pair", "images labels")


def samplers(length, size, **options):
    return [
        dist.DistributedSampler(length, num_replicas=size, rank=rank, **options)
        for rank in range(size)
    ]


def on_one_rank(check):
    """Run the test in a world of one simulated rank."""

    def test():
        dist.simulate(1, check)

    test.__name__ = check.__name__
    return test


# ---- the sampler


def test_the_samplers_of_an_epoch_share_its_samples():
    shares = [list(each) for each in samplers(10, 3, tail="keep")]
    assert sorted(chain(*shares)) == list(range(10))
    assert all(type(index) is int for index in shares[0])


def test_the_length_is_the_number_of_indices():
    for tail in ("pad", "drop", "keep"):
        assert [len(each) for each in samplers(10, 3, tail=tail)] == [
            len(list(each)) for each in samplers(10, 3, tail=tail)
        ]


def test_every_epoch_has_another_order_and_the_same_epoch_the_same():
    (sampler,) = samplers(50, 1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_an_epoch_that_was_left_begins_again():
    (sampler,) = samplers(5, 1, shuffle=False)
    assert next(iter(sampler)) == 0
    assert list(sampler) == [0, 1, 2, 3, 4]


def test_no_samples_are_shared_as_none():
    for tail in ("pad", "drop", "keep"):
        assert [list(each) for each in samplers(0, 3, tail=tail)] == [[], [], []]


def test_fewer_samples_than_ranks_are_padded_kept_or_refused():
    assert [list(each) for each in samplers(2, 5, shuffle=False)] == [[0], [1], [0], [1], [0]]
    kept = [list(each) for each in samplers(2, 4, shuffle=False, tail="keep")]
    assert kept == [[0], [1], [], []]
    with pytest.raises(dist.UsageError, match="no rank would get a sample: 2 samples go to 5"):
        samplers(2, 5, tail="drop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": True}, "seed must be an integer of at least 0, got True"),
        ({"tail": "wrap"}, "tail must be one of"),
        ({"rank": 0}, "both of num_replicas and rank"),
        ({"num_replicas": 2}, "both of num_replicas and rank"),
        ({"num_replicas": 2, "rank": 2}, "rank must be less than num_replicas=2, got 2"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas must be an integer of at least 1"),
        ({"dataset": -3}, "length of the dataset must be an integer of at least 0, got -3"),
        ({"dataset": iter("abc")}, "needs a length .* got a str_"),
        ({"group": 7}, "group must be a Group"),
    ],
)
def test_wrong_arguments_of_a_sampler_are_refused(arguments, message):
    def check():
        with pytest.raises(dist.UsageError, match=message):
            dist.DistributedSampler(**{"dataset": 10, **arguments})

    dist.simulate(1, check)


def test_a_sampler_needs_a_world_or_a_place():
    with pytest.raises(dist.UsageError, match="init_parallel_env"):
        dist.DistributedSampler(10)


def test_only_members_of_a_group_have_a_share():
    def check():
        group = dist.new_group([0, 2])
        if dist.get_rank() == 1:
            with pytest.raises(dist.UsageError, match=r"not a member .* world ranks are \[0, 2\]"):
                dist.shard_dataset(np.arange(4), group=group)
            return []
        return [int(x) for x in dist.shard_dataset(np.arange(4), shuffle=False, group=group)]

    assert dist.simulate(3, check) == [[0, 2], [], [1, 3]]


# ---- where it stands


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_resume_with_other_ranks_gives_every_sample_once(before, after, steps):
    seen, states = [], []
    for sampler in samplers(23, before, seed=9):
        sampler.set_epoch(4)
        batches = sampler.batches(1)
        seen += [int(next(batches)[0]) for _ in range(steps)]
        states.append(sampler.state_dict())
    assert all(state == states[0] for state in states)
    state = pickle.loads(pickle.dumps(json.loads(json.dumps(states[0]))))
    for sampler in samplers(23, after, seed=9, tail="keep"):
        sampler.load_state_dict(state)
        assert sampler.epoch == 4
        sampler.set_epoch(4)
        rest = list(sampler)
        assert len(sampler) == len(rest)
        seen += rest
    assert sorted(seen) == list(range(23))


def test_the_end_of_an_epoch_is_the_start_of_the_next():
    for tail in ("pad", "drop", "keep"):
        for sampler in samplers(10, 4, tail=tail):
            list(sampler)
            assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (1, 0)
            assert sampler.epoch == 0
            sampler.set_epoch(1)
            assert sampler.state_dict() == samplers_state(sampler, epoch=1)


def samplers_state(sampler, epoch, consumed=0):
    return {**sampler.state_dict(), "epoch": epoch, "consumed": consumed}


def test_the_last_sample_ends_the_epoch_inside_the_loop():
    for sampler in samplers(8, 4):
        for _ in sampler:
            state = sampler.state_dict()
        assert (state["epoch"], state["consumed"]) == (1, 0)


def test_after_the_rest_of_an_epoch_the_whole_one_can_be_had_again():
    (sampler,) = samplers(10, 1, shuffle=False)
    sampler.load_state_dict(samplers_state(sampler, epoch=0, consumed=7))
    assert list(sampler) == [7, 8, 9]
    assert list(sampler) == list(range(10))


def test_a_rest_too_small_for_a_share_ends_the_epoch():
    for sampler in samplers(10, 4, tail="drop"):
        sampler.load_state_dict(samplers_state(sampler, epoch=2, consumed=9))
        assert list(sampler) == []
        assert sampler.state_dict() == samplers_state(sampler, epoch=3)


def test_what_was_really_consumed_can_be_less_than_what_was_handed_out():
    first, second = samplers(20, 2)
    list(first)
    state = first.state_dict(consumed=4)
    assert (state["epoch"], state["consumed"]) == (0, 8)
    second.load_state_dict(state)
    for _ in zip(range(3), second, strict=False):
        pass
    assert second.state_dict(consumed=2)["consumed"] == 12
    with pytest.raises(dist.UsageError, match="consumed=5 samples, but only 3 have been handed"):
        second.state_dict(consumed=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, "made with length=11, but here it is 10"),
        ({"seed": 1}, "made with seed=1, but here it is 0"),
        ({"shuffle": False}, "made with shuffle=False, but here it is True"),
        ({"consumed": 11}, "consumed 11 samples of 10"),
        ({"consumed": -1}, "the state's consumed must be an integer of at least 0, got -1"),
        ({"epoch": "one"}, "the state's epoch must be an integer of at least 0, got 'one'"),
    ],
)
def test_the_state_of_another_order_is_refused_and_changes_nothing(change, message):
    (sampler,) = samplers(10, 1)
    state = sampler.state_dict()
    with pytest.raises(dist.UsageError, match=message):
        sampler.load_state_dict({**state, **change})
    assert sampler.state_dict() == state


@pytest.mark.parametrize("state", [None, {}, {"epoch": 0}, [0, 1]])
def test_what_is_no_state_is_refused(state):
    (sampler,) = samplers(10, 1)
    with pytest.raises(dist.UsageError, match="this is not a state of a sampler"):
        sampler.load_state_dict(state)


@pytest.mark.parametrize("epoch", [-1, 1.5, None, True])
def test_an_epoch_is_an_integer(epoch):
    (sampler,) = samplers(10, 1)
    with pytest.raises(dist.UsageError, match="epoch must be an integer of at least 0"):
        sampler.set_epoch(epoch)


# ---- datasets


@on_one_rank
def test_an_array_gives_its_rows_and_arrays_of_rows():
    x = np.arange(10.0).reshape(5, 2)
    sharded = dist.shard_dataset(x, shuffle=False)
    assert len(sharded) == 5
    assert [row.tolist() for row in sharded] == x.tolist()
    assert [batch.tolist() for batch in sharded.batches(3)] == [x[:3].tolist(), x[3:].tolist()]
    assert [len(batch) for batch in sharded.batches(3, drop_last=True)] == [3]


@on_one_rank
def test_batches_have_a_length_and_are_there_again_in_the_next_epoch():
    sharded = dist.shard_dataset(np.arange(10), shuffle=False)
    for options, lengths in (({}, [4, 4, 2]), ({"drop_last": True}, [4, 4])):
        batches = sharded.batches(4, **options)
        assert len(batches) == len(lengths)
        for epoch in (0, 1):
            sharded.set_epoch(epoch)
            assert [len(batch) for batch in batches] == lengths


@on_one_rank
def test_arrays_in_a_tuple_list_dict_or_namedtuple_stay_together():
    x, y = np.arange(10) * 10, np.arange(10)
    for several in ((x, y), [x, y], Pair(x, y), {"x": x, "y": y}):
        sharded = dist.shard_dataset(several)
        for taken in (*sharded, *sharded.batches(4)):
            assert type(taken) is type(several)
            first, second = taken.values() if isinstance(taken, dict) else taken
            assert np.array_equal(first, second * 10)


@on_one_rank
def test_a_list_of_samples_and_a_map_style_dataset_give_lists_of_samples():
    class Squares:
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index**2

    for dataset in (Squares(), [0, 1, 4, 9], [np.float64(0), 1.0, 4.0, 9.0]):
        sharded = dist.shard_dataset(dataset, shuffle=False)
        assert list(sharded) == [0, 1, 4, 9]
        assert list(sharded.batches(3)) == [[0, 1, 4], [9]]
    assert list(dist.shard_dataset([(1, "one")]).batches(1)) == [[(1, "one")]]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ((np.zeros(3), np.zeros(4)), "equally long, got lengths 0: 3, 1: 4"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "equally long, got lengths 'x': 3, 'y': 4"),
        ([np.zeros(n) for n in range(1, 30)], r"lengths 0: 1, .*7: 8, \.\.\.;"),
        ((np.zeros(3), [1, 2, 3]), "must hold nothing else, got 1: list; make them arrays"),
        ({"x": [1, 2, 3]}, "must hold nothing else, got 'x': list"),
        ({}, "a dict cannot be shared"),
        (iter([1, 2]), "a list_iterator cannot be shared"),
        (np.float64(3), "a float64 cannot be shared"),
        ({1, 2}, "a set cannot be shared"),
    ],
)
def test_what_cannot_be_shared_is_refused(dataset, message):
    def check():
        with pytest.raises(dist.UsageError, match=message):
            dist.shard_dataset(dataset)

    dist.simulate(1, check)


@on_one_rank
def test_a_wrong_batch_size_is_refused_before_the_loop():
    with pytest.raises(dist.UsageError, match="batch_size must be an integer of at least 1, got 0"):
        dist.shard_dataset(np.zeros(3)).batches(0)


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_every_rank_has_equally_many_batches(tail):
    def check():
        sharded = dist.shard_dataset(np.arange(17), tail=tail)
        return [len(batch) for batch in sharded.batches(2)]

    assert len({tuple(counts) for counts in dist.simulate(5, check)}) == 1


def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks():
    def check(batch_size):
        sharded = dist.shard_dataset(np.arange(24), seed=3)
        return [batch.tolist() for batch in sharded.batches(batch_size)]

    def steps(size):
        ranks = dist.simulate(size, check, 12 // size)
        return [sorted(chain(*step)) for step in zip(*ranks, strict=True)]

    assert steps(1) == steps(2) == steps(3) == steps(4)


@on_one_rank
def test_the_loop_goes_on_where_it_was_saved():
    def train(sharded, seen, stop=None):
        for epoch in range(sharded.epoch, 3):
            sharded.set_epoch(epoch)
            for batch in sharded.batches(4):
                seen.append((epoch, batch.tolist()))
                if len(seen) == stop:
                    return

    whole = []
    train(dist.shard_dataset(np.arange(10)), whole)
    assert len(whole) == 9
    for stop in range(1, 9):
        stopped, resumed, seen = dist.shard_dataset(np.arange(10)), None, []
        train(stopped, seen, stop)
        resumed = dist.shard_dataset(np.arange(10))
        resumed.load_state_dict(stopped.state_dict())
        train(resumed, seen)
        assert seen == whole


# ---- torch


@on_one_rank
def test_torch_tensors_give_torch_tensors():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.arange(8).to(dtype)
        sharded = dist.shard_dataset({"x": x})
        for batch in sharded.batches(3):
            assert type(batch["x"]) is torch.Tensor
            assert batch["x"].dtype is dtype
        assert sorted(int(sample["x"]) for sample in sharded) == list(range(8))


def torch_data(length):
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    return data, data.TensorDataset(torch.arange(length))


@on_one_rank
def test_torch_datasets_give_lists_of_samples():
    _, dataset = torch_data(5)
    batches = list(dist.shard_dataset(dataset, shuffle=False).batches(3))
    assert [[int(x) for (x,) in batch] for batch in batches] == [[0, 1, 2], [3, 4]]


@on_one_rank
def test_torch_datasets_without_a_length_are_refused():
    data, _ = torch_data(1)

    class Stream(data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    with pytest.raises(dist.UsageError, match="a Stream cannot be shared"):
        dist.shard_dataset(Stream())


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than there are cores
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_takes_the_sampler_and_resumes_with_other_ranks(workers):
    data, dataset = torch_data(41)
    if workers:
        needs_room_for_workers()

    def loader(sampler):
        return data.DataLoader(dataset, batch_size=3, sampler=sampler, num_workers=workers)

    seen, states = [], []
    for sampler in samplers(len(dataset), 2, seed=1):
        consumed = 0
        for (batch,) in loader(sampler):
            seen += batch.tolist()
            consumed += len(batch)
            if consumed == 12:
                break
        states.append(sampler.state_dict(consumed))
    assert states[0] == states[1]
    assert states[0]["consumed"] == 24
    for sampler in samplers(len(dataset), 3, seed=1, tail="keep"):
        sampler.load_state_dict(states[0])
        assert len(loader(sampler)) == 2
        seen += [index for (batch,) in loader(sampler) for index in batch.tolist()]
    assert sorted(seen) == list(range(41))
