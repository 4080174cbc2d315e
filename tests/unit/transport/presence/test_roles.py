"""Who is which rank after a death: the ranks that are left close up, spares take places."""

import itertools

import pytest

from hpcdist.transport.presence.roles import SPARE, Seat, Told, plan_groups, plan_roles


def left(size, dead, spares=(), generation=0):
    """Return what is told where ranks have died, and spares are there with these processes."""
    ranks = [Told(rank, size, generation, rank, rank // 2) for rank in range(size)]
    waiting = [Told(SPARE, 0, 0, process, node) for process, node in spares]
    return [each for each in ranks if each.rank not in dead] + waiting


def seats(size):
    return [Seat(rank, rank // 2) for rank in range(size)]


def test_without_spares_the_ranks_that_are_left_close_up():
    roles = plan_roles(left(5, {1, 3}))
    assert roles.renumbered == {0: 0, 2: 1, 4: 2}
    assert (roles.ranks, roles.lost, roles.taken) == ((0, 1, 2), (1, 3), {})


def test_a_spare_gets_the_number_of_the_dead_and_everybody_keeps_theirs():
    roles = plan_roles(left(4, {2}, [(4, 0), (5, 0)]), seats(4))
    assert roles.ranks == (0, 1, 3, 2, SPARE)
    assert roles.renumbered == {0: 0, 1: 1, 3: 3}
    assert (roles.lost, roles.gone, roles.taken) == ((2,), (2,), {2: 4})


@pytest.mark.parametrize("dead", [*itertools.combinations(range(5), 2)])
def test_with_one_spare_for_two_as_many_as_possible_keep_their_numbers(dead):
    roles = plan_roles(left(5, dead, [(5, 0)]), seats(5))
    kept = sum(old == new for old, new in roles.renumbered.items())
    others = [dead[1], dead[0]]
    assert roles.taken == {min(dead): 5}
    assert kept == max(sum(old < gone for old in roles.renumbered) for gone in others)
    assert sorted(roles.ranks) == [0, 1, 2, 3]


def test_a_spare_on_the_node_of_the_dead_comes_first():
    told = left(6, {3}, [(6, 0), (7, 1), (8, 1)])
    assert plan_roles(told, seats(6)).taken == {3: 7}
    assert plan_roles(told).taken == {3: 6}  # where nodes are not known the first one


def test_a_spare_on_another_node_is_better_than_none():
    assert plan_roles(left(4, {3}, [(4, 0)]), seats(4)).taken == {3: 4}


def test_who_is_a_rank_now_is_known_after_the_next_recovery_too():
    first = plan_roles(left(3, {0}, [(3, 9)]), seats(3))
    assert first.seats == (Seat(3, 9), Seat(1, 0), Seat(2, 1))
    told = [
        Told(rank, 3, first.generation, *first.seats[rank])
        for rank in (1, 2)  # the spare has died in its place
    ]
    second = plan_roles(told, first.seats)
    assert (second.lost, second.gone, second.generation) == ((0,), (3,), 2)
    assert second.seats == (Seat(1, 0), Seat(2, 1))


def test_spares_alone_have_no_world_to_go_on_with():
    roles = plan_roles([Told(SPARE, 0, 0, 4, 0), Told(SPARE, 0, 0, 5, 0)], seats(4))
    assert (roles.ranks, roles.lost, roles.seats) == ((SPARE, SPARE), (), ())


def test_a_group_with_a_rank_that_was_replaced_does_not_go_on():
    roles = plan_roles(left(3, {1}, [(3, 0)]))
    tables = [{(1, (0, 1)): 5.0, (2, (0, 2)): 7.0}, {}, {(2, (0, 2)): 7.0}]
    (kept,) = plan_groups(tables, roles)
    assert (kept.id, kept.before, kept.ranks, kept.timeout_s) == (2, (0, 2), (0, 2), 7.0)
