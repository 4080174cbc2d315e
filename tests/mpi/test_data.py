"""Datasets shared among real ranks: together they have every sample, also after a resume."""

from itertools import chain

import numpy as np
import pytest

import hpcdist as dist


def of_all_ranks(mine):
    parts = []
    dist.all_gather_object(parts, mine)
    return list(chain(*parts))


@pytest.mark.parametrize("length", [0, 1, 7, 24, 101])
def test_the_ranks_together_have_every_sample_once(length):
    sharded = dist.shard_dataset(np.arange(length), tail="keep")
    assert sorted(of_all_ranks([int(x) for x in sharded])) == list(range(length))


@pytest.mark.parametrize("length", [1, 7, 24, 101])
def test_padded_ranks_have_every_sample_and_equally_many_batches(length):
    sharded = dist.shard_dataset({"x": np.arange(length)}, seed=2)
    batches = [batch["x"].tolist() for batch in sharded.batches(3)]
    assert {*of_all_ranks(list(chain(*batches)))} == {*range(length)}
    assert len({*of_all_ranks([len(batches)])}) == 1
    assert len({*of_all_ranks([len(sharded)])}) == 1


def test_all_ranks_say_the_same_of_where_they_stand_and_go_on_from_there(size):
    x = np.arange(10 * size + 3)
    sharded = dist.shard_dataset(x)
    batches = sharded.batches(2)
    seen = [*next(batches).tolist(), *next(batches).tolist()]
    states = of_all_ranks([sharded.state_dict()])
    assert all(state == states[0] for state in states)
    assert states[0]["consumed"] == 4 * size
    resumed = dist.shard_dataset(x, tail="keep")
    resumed.load_state_dict(states[0])
    seen += [int(sample) for sample in resumed]
    assert sorted(of_all_ranks(seen)) == x.tolist()


def test_fewer_ranks_can_go_on(rank, size):
    x = np.arange(6 * size + 1)
    sharded = dist.shard_dataset(x, seed=5)
    seen = next(sharded.batches(4)).tolist()
    state = sharded.state_dict()
    few = dist.new_group(range((size + 1) // 2))
    if few.is_member():
        resumed = dist.shard_dataset(x, seed=5, tail="keep", group=few)
        resumed.load_state_dict(state)
        seen += [int(sample) for sample in resumed]
    else:
        with pytest.raises(dist.UsageError, match=f"rank {rank} has no share of the data"):
            dist.shard_dataset(x, group=few)
    assert sorted(of_all_ranks(seen)) == x.tolist()
