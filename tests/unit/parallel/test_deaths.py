"""A rank dies in a backward pass: the others end it at once, and the model can go on."""

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.parallel import averager


class TwoArrays:
    def __init__(self):
        self.first, self.second = (dist.Parameter(np.zeros(300_000)) for _ in range(2))

    def named_parameters(self):
        return [("first", self.first), ("second", self.second)]

    def __call__(self, x):
        return x


@pytest.mark.parametrize("overlap", ["never", "always"])
def test_the_pass_ends_and_the_next_one_begins_with_the_first_bucket(overlap, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    all_reduce, sent = averager.all_reduce, []

    def dying(*args):
        sent.append(args)
        raise dist.RankFailure("rank 3 died", [3])

    def on_rank():
        net = TwoArrays()
        model = dist.DataParallel(net, comm_buffer_size=1)
        monkeypatch.setattr(averager, "all_reduce", dying)
        model(1)
        with pytest.raises(dist.RankFailure):
            net.second.grad = np.ones(300_000)
        assert len(sent) == 1
        monkeypatch.setattr(averager, "all_reduce", all_reduce)
        model(1)
        net.second.grad = np.full(300_000, 2.0)
        net.first.grad = np.full(300_000, 3.0)
        return net.first.grad[0], net.second.grad[-1]

    assert dist.simulate(1, on_rank) == [(3.0, 2.0)]
