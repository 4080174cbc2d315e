"""Sharded training of plain arrays on simulated ranks, and what is planned without any."""

import pytest
import sharding_checks
from hypothesis import given, strategies as st
from tiers import first_of

import hpcdist as dist
from hpcdist.parallel.sharding.partition import Item, lay_out, plan_layers, plan_units


@pytest.mark.parametrize("check", sharding_checks.check)
@pytest.mark.parametrize("size", first_of([3, 1]))
def test_on_simulated_ranks(size, check):
    dist.simulate(size, check, timeout=20)


@pytest.mark.parametrize("check", sharding_checks.check)
def test_when_layers_are_gathered_ahead(check, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", "always")
    dist.simulate(4, check, timeout=20)


# ---- plans


def items(*sizes, names=None):
    names = names or [f"p{number}" for number in range(len(sizes))]
    return [
        Item(name, (size,), size, 4 * size, "f4") for name, size in zip(names, sizes, strict=True)
    ]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 5))
def test_ranks_own_every_element_once(sizes, ranks):
    unit = lay_out(range(len(sizes)), items(*sizes), ranks)
    found = [[0] * size for size in sizes]
    for rank in range(ranks):
        for segment in unit.segments(rank):
            for step in range(segment.stop - segment.start):
                found[segment.parameter][segment.offset + step] += 1
                place = unit.starts[segment.parameter] + segment.offset + step
                assert place == rank * unit.share + segment.start + step
    assert found == [[1] * size for size in sizes]
    assert unit.share * ranks - sum(sizes) < ranks


def test_units_are_filled_in_order_of_registration_and_sent_last_first():
    units = plan_units(items(4, 4, 4, 4, 4), ranks=2, limit=32)
    assert [unit.indices for unit in units] == [(4,), (2, 3), (0, 1)]


def test_a_layer_stays_together_and_small_ones_join_the_next():
    names = ["a.w", "a.b", "norm.w", "b.w", "b.b", "c.w"]
    units = plan_layers(items(100, 10, 1, 100, 10, 100, names=names), ranks=2, least=100)
    assert [unit.indices for unit in units] == [(5,), (2, 3, 4), (0, 1)]


def test_names_without_a_dot_are_layers_of_their_own():
    units = plan_layers(items(4, 4, 4, names=["w1", "b1", "w2"]), ranks=1, least=1)
    assert [unit.indices for unit in units] == [(2,), (1,), (0,)]
