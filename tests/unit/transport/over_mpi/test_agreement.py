"""Ranks agree, or none of them does: in any order of events, with MPI and a clock made up."""

from contextlib import suppress
from functools import partial
from random import Random

import pytest
from fake_mpi import results, run
from interrupted_at import InterruptError, interrupted_at

from hpcdist.errors import CollectiveTimeout, MismatchError, RemoteError, UsageError
from hpcdist.transport.call.call import Barrier, Objects, Refusal
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.mpi import agreement as agreement_module, exchange as exchange_module
from hpcdist.transport.mpi.agreement import Agreement
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.exchange import reduced_exchange
from hpcdist.transport.mpi.news import Circles, Count, News
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.waiting.polling import add_errand, poll

SEEDS = range(8)
LIMIT_S = 2.0
VOID, AGREED = "void", "agreed"


def world_ranks(comm):
    return tuple(10 * (rank + 1) for rank in range(comm.size))


def agreement_of(comm):
    ranks = world_ranks(comm)
    made = Agreement(comm, ranks, LIMIT_S, reduced_exchange(comm))
    count = Count(lambda: made.sequence, lambda: made.sequence, lambda rank: 0)
    made.news = News(comm, ranks, Allowance(0), Circles(), count, Deaths())
    add_errand(lambda waited: made.news.listen())
    return made


def barrier(detail=0, error=None):
    return Barrier(detail=detail) if error is None else Refusal(Kind.BARRIER, 0, error)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_learn_the_range_of_details_again_and_again(size, seed):
    def program(comm):
        agree = agreement_of(comm)
        return [agree(barrier(detail=10 * comm.rank + turn)) for turn in range(3)]

    ranges = [(turn, 10 * (size - 1) + turn) for turn in range(3)]
    assert results(size, program, seed=seed) == [ranges] * size


def test_an_interrupt_at_any_moment_finds_an_operation_begun_or_not():
    def program(comm, moment):
        agree, raised = agreement_of(comm), []
        with suppress(InterruptError):
            if comm.rank == 0:
                with interrupted_at(moment, agreement_module, exchange_module) as raised:
                    agree(barrier())
        agree.recount()
        if agree.sequence == 0:
            agree(barrier())
        elif raised:
            agree.note_left()
        return [agree(barrier(detail=comm.rank)) for _ in range(2)], agree.sequence, bool(raised)

    for moment in range(10_000):
        (found, number, raised), other = results(2, partial(program, moment=moment), seed=moment)
        assert found == [(0, 1)] * 2
        assert number == 3
        assert other == (found, number, False)
        if not raised:
            break
    assert moment > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_what_one_rank_cannot_do_is_raised_on_all_and_the_next_operation_is_fine(seed):
    def program(comm):
        agree, own = agreement_of(comm), UsageError("no such dtype")
        with pytest.raises(UsageError if comm.rank == 1 else RemoteError, match="no such") as info:
            agree(barrier(error=own if comm.rank == 1 else None))
        if comm.rank == 1:
            assert info.value is own
        else:
            assert info.value.rank == 20
        return agree(barrier(7))

    assert results(3, program, seed=seed) == [(7, 7)] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_ranks_that_call_different_operations_all_hear_of_it(seed):
    def program(comm):
        agree = agreement_of(comm)
        call = barrier() if comm.rank else Objects(Kind.ALL_GATHER_OBJECT, ())
        with pytest.raises(MismatchError, match=r"ranks 20, 30: barrier.*"):
            agree(call)
        return agree(barrier(7))

    assert results(3, program, seed=seed) == [(7, 7)] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_does_not_come_is_named_and_one_that_comes_late_finds_it_void(seed):
    def program(comm):
        agree = agreement_of(comm)
        if comm.rank == 2:
            comm.world.sleep(1.5 * LIMIT_S)
        with pytest.raises(CollectiveTimeout) as info:
            agree(barrier())
        if comm.rank < 2:
            assert info.value.missing == (30,)
            assert LIMIT_S <= comm.world.now <= 2 * LIMIT_S
        else:
            assert "given up" in str(info.value)
        return agree(barrier(7))

    assert results(3, program, seed=seed) == [(7, 7)] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_leaves_is_missed_at_once_and_known_to_have_left(seed):
    def program(comm):
        agree = agreement_of(comm)
        gone = []
        agree.news.membership.subscribe(lambda rank, why: gone.append((rank, why)))
        if comm.rank == 1:
            agree.news.leave("has ended")
            return None
        with pytest.raises(RemoteError, match="rank 20 has ended and did not join") as info:
            agree(barrier())
        assert info.value.rank == 20
        assert comm.world.now < LIMIT_S / 2
        membership = agree.news.membership
        assert membership.members == (10, 30)
        return gone, dict(membership.departed)

    found = results(3, program, seed=seed)
    assert found[0] == found[2] == ([(20, "has ended")], {20: "has ended"})


@pytest.mark.parametrize("seed", range(30))
def test_either_all_ranks_agree_on_an_operation_or_none(seed):
    """However late they come, and though their clocks differ by nearly as much as they may."""
    size, turns = 2 + seed % 3, 4
    late = (0.0, 0.01, LIMIT_S - 0.1, LIMIT_S, LIMIT_S + 0.1, LIMIT_S + 0.6, 3.5 * LIMIT_S)

    def program(comm):
        agree, chance = agreement_of(comm), Random(1000 * seed + comm.rank)
        for turn in range(turns):
            pause_s = chance.choice(late) + chance.uniform(0, 0.1)
            if chance.random() < 0.5:
                comm.world.sleep(pause_s)
            else:
                poll(lambda: False, pause_s)  # in which it answers
            try:
                yield turn, agree(Objects(Kind.ALL_GATHER_OBJECT, (), root=turn)) and AGREED
            except CollectiveTimeout:
                yield turn, VOID

    found = results(size, lambda comm: dict(program(comm)), seed=seed, skew_s=0.45)
    for turn in range(turns):
        assert len({each[turn] for each in found}) == 1, (turn, found)


def test_a_clock_that_jumps_voids_nothing():
    def program(comm):
        agree = agreement_of(comm)
        for turn, jump_s in enumerate((0, 1e5, -1e5)):
            comm.world.local.rank.ahead_s += jump_s * comm.rank
            assert agree(barrier(detail=turn)) == (turn, turn)

    results(3, program, seed=0)


def test_a_rank_that_never_comes_leaves_nobody_hanging():
    def program(comm):
        if comm.rank:
            comm.world.sleep(100 * LIMIT_S)
            return None
        agree = agreement_of(comm)
        for _ in range(3):
            with pytest.raises(CollectiveTimeout) as info:
                agree(barrier())
            assert info.value.missing == (20, 30)
        assert not agree.is_settled()
        assert not agree.close()
        return comm.world.now

    began = 3 * LIMIT_S
    assert began < run(3, program, seed=0)[0] < 2 * began
