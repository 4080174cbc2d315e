"""Simulated ranks take turns with the generators of random numbers."""

import random

import pytest

from hpcdist.comm.simulate import simulate
from hpcdist.parallel.virtual.streams import GENERATORS, Streams


def draw(rank):
    with Streams(range(2), 2, 0, GENERATORS).turn() as give:
        give(rank)
        return random.random()


def test_who_has_left_its_loop_by_an_error_keeps_no_other_rank_from_its_turn():
    def leave():
        turn = Streams(range(2), 2, 0, GENERATORS).turn()
        turn.__enter__()(0)
        kept.append(turn)  # as the traceback of an error does
        raise ValueError("the drill")

    kept = []
    with pytest.raises(ValueError, match="the drill"):
        simulate(1, leave)
    expected = draw(0)
    before = random.getstate()
    kept.clear()
    assert random.getstate() == before
    assert draw(0) == expected
