"""`NanWatch` on models of arrays: NaN is told once, by the rank on which it begins."""

import math

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.parallel.nan_watch import places_in


class Model:
    def __init__(self):
        self.w, self.b = dist.Parameter(np.ones(50)), dist.Parameter(np.ones(3))

    def named_parameters(self):
        return [("w", self.w), ("b", self.b)]


@pytest.mark.parametrize("name", ["w", "b"])
def test_nan_is_told_once_by_the_rank_on_which_it_begins(name, caplog):
    def train():
        model = Model()
        dist.DataParallel(model)
        for step in range(3):
            for own, each in model.named_parameters():
                wrong = own == name and (dist.get_rank(), step) == (1, 1)
                each.grad = np.full(each.shape, math.nan if wrong else 1.0)
            if step == 1:
                assert np.isnan(getattr(model, name).grad).all()

    dist.simulate(3, train)
    told = [each.getMessage() for each in caplog.records if "has NaN" in each.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("rank 1: ")
    assert f"{name!r} has NaN" in told[0]


def test_each_parameter_is_looked_at():
    sizes = [1, 5, 0, 1000]
    places = places_in(sizes)
    starts = np.cumsum([0, *sizes])
    seen = np.searchsorted(starts, places, side="right") - 1
    assert set(seen.tolist()) == {0, 1, 3}
    assert places.max() == sum(sizes) - 1
    assert places_in([]).size == 0
