"""The members of a new group find each other, or all hear why not: in any order of events."""

from random import Random

import pytest
from fake_mpi import results

from hpcdist.errors import CollectiveTimeout, RemoteError
from hpcdist.transport.mpi.early import Allowance
from hpcdist.transport.mpi.news import Circles, Count, News
from hpcdist.transport.mpi.rendezvous import PATIENCE_S, Rendezvous
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.waiting.polling import add_errand

SEEDS = range(8)
LIMIT_S = 2.0


def rendezvous_of(comm):
    ranks = tuple(10 * (rank + 1) for rank in range(comm.size))
    news = News(comm, ranks, Allowance(0), Circles(), Count(int, int, lambda rank: 0), Deaths())
    add_errand(lambda waited: news.listen())
    return Rendezvous(comm, ranks, news)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_members_agree_on_the_largest_id_and_other_ranks_take_no_part(seed):
    def program(comm):
        if comm.rank == 1:
            return None
        return rendezvous_of(comm).meet((2, 0, 3), comm.rank, LIMIT_S)

    assert results(4, program, seed=seed) == [3, None, 3, 3]


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_that_are_made_at_once_do_not_disturb_each_other(seed):
    """Each rank makes its groups in the same order; a group may be made again."""
    groups = [(0, 1, 2, 3), (1, 2), (3, 0), (2, 3), (1, 2), (0, 1, 2, 3)]

    def program(comm):
        meet = rendezvous_of(comm).meet
        mine = [(number, each) for number, each in enumerate(groups) if comm.rank in each]
        return [(number, meet(each, 10 * number + comm.rank, LIMIT_S)) for number, each in mine]

    for rank, found in enumerate(results(4, program, seed=seed)):
        expected = enumerate(groups)
        assert found == [(n, 10 * n + max(each)) for n, each in expected if rank in each]


@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("absent", [{0}, {1}, {2}, {4}, {6}, {4, 6}])
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_members_that_do_not_come_are_named(seed, absent, size):
    """Also where others report by way of them."""
    absent, ranks = {rank % size for rank in absent}, tuple(range(size))

    def program(comm):
        if comm.rank in absent:
            return None
        with pytest.raises(CollectiveTimeout, match=r"new_group\(\[10, 20, 30") as info:
            rendezvous_of(comm).meet(ranks, 5, LIMIT_S)
        assert comm.world.now < 2 * LIMIT_S
        return info.value.missing

    found = results(size, program, seed=seed)
    named = absent if 0 not in absent else {0}
    assert set(found) - {None} == {tuple(10 * (rank + 1) for rank in sorted(named))}


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("absent", [{0}, {1}, {4, 6}])
@pytest.mark.parametrize("seed", SEEDS[:4])
def test_who_waits_for_members_that_have_left_alone_is_told_at_once(seed, absent, size):
    """The last one comes late: until then the first one waits for it, too."""
    absent, ranks, late_s = {rank % size for rank in absent}, tuple(range(size)), 3 * LIMIT_S
    has_left, last = min(absent), max(set(ranks) - absent)

    def program(comm):
        here = rendezvous_of(comm)
        if comm.rank in absent:
            here._news.leave("has ended")
            return
        if comm.rank == last:
            comm.world.sleep(late_s)
        with pytest.raises(RemoteError, match=f"rank {10 * (has_left + 1)}.*: it has ended"):
            here.meet(ranks, 5, 100 * LIMIT_S)
        assert comm.world.now < late_s + LIMIT_S

    results(size, program, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("unable", "size"), [(0, 3), (2, 3), (4, 9), (8, 9)])
def test_what_a_member_cannot_do_is_raised_on_the_others_and_they_can_meet_again(
    seed, unable, size
):
    def program(comm):
        here, ranks = rendezvous_of(comm), tuple(range(size))
        if comm.rank == unable:
            here.call_off(ranks, "no such backend")
        else:
            with pytest.raises(RemoteError, match="no such backend") as info:
                here.meet(ranks, 5, LIMIT_S)
            assert info.value.rank == 10 * (unable + 1)
        return here.meet(ranks, comm.rank, LIMIT_S)

    assert results(size, program, seed=seed) == [size - 1] * size


@pytest.mark.parametrize("size", [5, 16, 37])
def test_a_member_sends_and_hears_by_the_logarithm_of_the_members(size):
    ranks, sent, most = tuple(range(size)), [0] * size, 2 * (size - 1).bit_length()

    def program(comm):
        def counted(content, to, tag, isend=comm.isend):
            sent[comm.rank] += 1
            return isend(content, to, tag)

        comm.isend = counted
        return rendezvous_of(comm).meet(ranks, 3, LIMIT_S)

    assert results(size, program, seed=1) == [3] * size
    assert max(sent) <= most


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", [1, 3, 7])
def test_who_comes_late_is_waited_for_no_longer_than_that(late, seed):
    def program(comm):
        here = rendezvous_of(comm)
        comm.world.sleep(1.0 if comm.rank == late else 0.0)
        here.meet(tuple(range(9)), 1, LIMIT_S)
        return comm.world.now

    assert max(results(9, program, seed=seed)) < 1.0 + PATIENCE_S


def test_members_below_one_that_is_interrupted_hear_who_it_was():
    def program(comm):
        here = rendezvous_of(comm)
        if comm.rank == 2:
            here._report.tell = stop_after(here._report.tell)
        try:
            return here.meet((0, 1, 2, 3), 1, LIMIT_S)
        except KeyboardInterrupt:
            return "interrupted"
        except CollectiveTimeout as error:
            assert comm.world.now < LIMIT_S
            return error.missing

    def stop_after(tell):
        def tell_and_stop(*args):
            tell(*args)
            raise KeyboardInterrupt

        return tell_and_stop

    assert results(4, program, seed=1) == [1, 1, "interrupted", (30,)]


def test_nothing_is_kept_of_meetings_that_have_ended():
    """Nor of reports that come when the others have given up."""
    ranks = 0, 1, 2

    def program(comm):
        here = rendezvous_of(comm)
        if comm.rank == 2:
            comm.world.sleep(2 * LIMIT_S)
        with pytest.raises(CollectiveTimeout):
            here.meet(ranks, 1, LIMIT_S)
        comm.world.sleep(10 * LIMIT_S - comm.world.now)
        here.meet(ranks[::-1], 1, LIMIT_S)
        return len(here._meetings)

    assert results(3, program, seed=1) == [0, 0, 0]


@pytest.mark.parametrize("seed", range(40))
def test_either_all_members_meet_or_none(seed):
    """However late they come; a communicator that only some create hangs for ever."""
    ranks = tuple(range((2, 3, 4, 7)[seed % 4]))
    late = (0.0, 0.01, LIMIT_S - 0.1, LIMIT_S, LIMIT_S + 0.1, 2 * LIMIT_S)

    def program(comm):
        here, chance = rendezvous_of(comm), Random(1000 * seed + comm.rank)
        for turn in range(5):
            comm.world.sleep(chance.choice(late))
            try:
                yield turn, here.meet(ranks, 10 * turn + comm.rank, LIMIT_S)
            except CollectiveTimeout:
                yield turn, None

    found = results(len(ranks), lambda comm: dict(program(comm)), seed=seed, skew_s=0.4)
    met = [[each[turn] for turn in range(5) if each[turn] is not None] for each in found]
    assert all(each == met[0] for each in met), found  # of meetings, each has an id of its own


class InterruptAt:
    """The interrupts of a rank, of which there is one from a moment on."""

    def __init__(self, world, moment_s):
        self.world, self.moment_s = world, moment_s

    def __bool__(self):
        return self.world.now >= self.moment_s


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("interrupted", [0, 1, 8])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_an_interrupted_member_leaves_soon_and_the_others_hear_of_it_when_they_come(
    seed, interrupted, size
):
    ranks, interrupted, late_s = tuple(range(size)), interrupted % size, 5 * LIMIT_S

    def program(comm):
        here, comes_late = rendezvous_of(comm), comm.rank == (interrupted + 1) % size
        comm.world.sleep(late_s if comes_late else 0.0)
        interrupts = InterruptAt(comm.world, 0.5) if comm.rank == interrupted else ()
        with pytest.raises(RemoteError, match="it was interrupted") as info:
            here.meet(ranks, 1, 100 * LIMIT_S, interrupts)
        assert info.value.rank == 10 * (interrupted + 1)
        assert comm.world.now < (LIMIT_S if interrupts else late_s + LIMIT_S)
        return here.meet(ranks, comm.rank, 100 * LIMIT_S)

    assert results(size, program, seed=seed) == [size - 1] * size


@pytest.mark.parametrize("seed", range(16))
def test_either_all_members_meet_or_none_whenever_they_are_interrupted(seed):
    ranks = tuple(range((2, 3, 4, 7)[seed % 4]))
    late = (0.0, 0.001, 0.01, 0.1, LIMIT_S / 2)

    def program(comm):
        here, chance = rendezvous_of(comm), Random(1000 * seed + comm.rank)
        for turn in range(5):
            comm.world.sleep(chance.choice(late))
            at_s = comm.world.now + chance.choice((*late, 1000.0, 1000.0))
            try:
                interrupts = InterruptAt(comm.world, at_s)
                yield turn, here.meet(ranks, 10 * turn + comm.rank, 10 * LIMIT_S, interrupts)
            except RemoteError:
                yield turn, None

    found = results(len(ranks), lambda comm: dict(program(comm)), seed=seed)
    for turn in range(5):
        assert {each[turn] for each in found} in ({None}, {10 * turn + ranks[-1]}), found


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("absent", [{0}, {1}, {0, 2}])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_members_that_have_missed_meetings_take_part_in_the_next(seed, absent, size):
    ranks, absent = tuple(range(size)), {rank % size for rank in absent}

    def program(comm):
        here = rendezvous_of(comm)
        for missed in range(3):
            if comm.rank not in absent:
                with pytest.raises(CollectiveTimeout):
                    here.meet(ranks, missed, LIMIT_S)
            comm.world.sleep(3 * LIMIT_S * (missed + 1) - comm.world.now)
        return [here.meet(ranks, 10 * turn + comm.rank, LIMIT_S) for turn in range(3)]

    assert results(size, program, seed=seed) == [[10 * t + size - 1 for t in range(3)]] * size
