"""Eager operations: the root of a small broadcast or scatter gives its data and goes on.

See [Note: eager operations] in `hpcdist/transport/shm/native/eager.h`.
"""

import time
from contextlib import nullcontext

import numpy as np
import pytest
from interrupted_drill import interrupts

import hpcdist as dist
from hpcdist.transport.shm.control import EAGER_BYTES, MOST_EAGER
from hpcdist.transport.shm.hot import switched_off


class Unmade:
    """What can be pickled, and not be made again."""

    def __reduce__(self):
        return divmod, (1, 0)


@pytest.fixture(autouse=True)
def _eager_here(size, world, and_the_world_goes_on):
    if size == 1 or world.transport.hot is None or not world.flight:
        pytest.skip("the ranks do not share memory by the compiled kernel")
    control = world.transport.context.node.control
    before = control.most_eager
    control.most_eager = MOST_EAGER
    yield
    dist.barrier()
    control.most_eager = before


def scatter_from(root, x, values):
    dist.scatter(x, np.array(values) if dist.get_rank() == root else None, root)


def objects_from(root, given):
    """Return the one that is given to all, and the one of these ranks."""
    is_root, ranks = dist.get_rank() == root, range(dist.get_world_size())
    found, mine = [given if is_root else None], []
    dist.broadcast_object_list(found, root)
    dist.scatter_object_list(mine, [(given, rank) for rank in ranks] if is_root else None, root)
    return found[0], mine[0]


def test_the_root_goes_on_before_anybody_has_come(rank, size):
    """Else nobody would ever come: the others wait for what the root sends afterwards."""
    dist.barrier()
    for turn in range(3):
        x, word = np.full(3, rank + turn), np.zeros(1)
        part = np.zeros(1)
        if rank:
            dist.recv(word, 0)
        dist.broadcast(x, 0)
        scatter_from(0, part, np.arange(size) * 1.0)
        found = objects_from(0, {"turn": turn})
        if rank == 0:
            for other in range(1, size):
                dist.send(word, other)
        assert (x == turn).all()
        assert part[0] == rank
        assert found == ({"turn": turn}, ({"turn": turn}, rank))


def test_ranks_with_a_core_each_hear_of_a_disagreement_in_the_call_itself(rank, size, world):
    world.transport.context.node.control.most_eager = 0
    with pytest.raises(dist.MismatchError, match="nothing was sent"):
        broadcast_of(2 + (rank == size - 1))


def test_a_root_is_never_further_ahead_than_there_are_places(rank, size):
    dist.barrier()
    ahead, x, word = MOST_EAGER, np.zeros(1), np.zeros(1)
    if rank:
        dist.recv(word, 0)
    for turn in range(3 * ahead):
        x[0] = turn if rank == 0 else -1
        dist.broadcast(x, 0)
        assert x[0] == turn
        if rank == 0 and turn == ahead - 1:
            for other in range(1, size):
                dist.send(word, other)


@pytest.mark.parametrize(
    "cold", [lambda rank: False, lambda rank: rank == 0, lambda rank: rank > 0]
)
def test_many_in_a_row_arrive_whoever_gives_and_takes_them_in_python(cold, rank, size):
    for turn in range(2 * MOST_EAGER + 3):
        root, n = turn % size, turn % (EAGER_BYTES // 8 + 1) if turn % 5 else EAGER_BYTES
        x, part = np.full(n, float(rank)), np.zeros(1)
        if cold((rank - turn) % size):
            with switched_off():
                dist.broadcast(x, root)
                scatter_from(root, part, np.arange(size) + 10.0 * turn)
        else:
            dist.broadcast(x, root, sync_op=turn % 3 > 0).wait()
            scatter_from(root, part, np.arange(size) + 10.0 * turn)
        assert (x == root).all()
        assert part[0] == rank + 10 * turn
        if turn % 11 == 0:
            dist.all_reduce(x)
            assert (x == root * size).all()


@pytest.mark.parametrize(
    "cold", [lambda rank: False, lambda rank: rank == 0, lambda rank: rank > 0]
)
@pytest.mark.parametrize("nbytes", [1, EAGER_BYTES - 32, EAGER_BYTES, 100 * EAGER_BYTES])
def test_objects_arrive_whoever_takes_them_in_python_and_however_long_they_are(
    nbytes, cold, rank, size
):
    for turn in range(2 * MOST_EAGER + 3):
        root, given = turn % size, [turn, "x" * (nbytes - turn % 2)]
        with switched_off() if cold((rank - turn) % size) else nullcontext():
            assert objects_from(root, given) == (given, (given, rank))
        if turn % 11 == 0:
            dist.barrier()


def broadcast_of(n):
    dist.broadcast(np.zeros(n), 0)


ODD = {
    "nothing": lambda: None,
    "another operation": dist.barrier,
    "another shape": lambda: broadcast_of(3),
    "a large array": lambda: broadcast_of(5000),
    "another root": lambda: dist.broadcast(np.zeros(2), 1),
}
"""What one rank means, where the others take part in a broadcast of two numbers from rank 0."""


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("before", [0, 1, MOST_EAGER])
def test_ranks_that_disagree_all_hear_of_it_at_the_next_call_and_go_on(
    before, cold, odd, rank, size
):
    def disagree():
        if rank == size - 1:
            ODD[odd]()
        else:
            with switched_off() if cold and rank else nullcontext():
                broadcast_of(2)
        dist.all_reduce(np.zeros(1))

    for _ in range(before):
        broadcast_of(1)
    with pytest.raises(dist.MismatchError) as caught:
        disagree()
    words = str(caught.value)
    assert "broadcast(shape (2,), float64, root 0)" in words
    name = {"nothing": "all_reduce(", "another operation": "barrier()"}.get(odd, "broadcast(shape")
    assert f"rank {size - 1}: {name}" in words
    assert sorted(caught.value.call_sites) == [*range(size)]
    assert all(__file__ in site for site in caught.value.call_sites.values())
    x = np.ones(1)
    dist.all_reduce(x)
    assert x[0] == size


@pytest.mark.parametrize("cold", [False, True])
def test_ranks_that_disagree_in_a_broadcast_of_objects_hear_of_it_at_the_next_call(
    cold, rank, size
):
    mine = [rank] * (1 + (rank == size - 1))

    def disagree():
        with switched_off() if cold and rank else nullcontext():
            dist.broadcast_object_list(mine, 0)
        dist.barrier()

    with pytest.raises(dist.MismatchError) as caught:
        disagree()
    words = str(caught.value)
    assert "broadcast_object_list(1 object, root 0)" in words
    assert f"rank {size - 1}: broadcast_object_list(2 objects, root 0)" in words
    assert all(__file__ in site for site in caught.value.call_sites.values())
    if rank == size - 1:
        assert mine == [rank] * 2
    assert objects_from(0, 7) == (7, (7, rank))


@pytest.mark.parametrize("cold", [False, True])
def test_an_object_that_cannot_be_made_is_an_error_of_who_takes_it_alone(cold, rank):
    with switched_off() if cold else nullcontext():
        if rank == 0:
            dist.broadcast_object_list([Unmade()], 0)
        else:
            with pytest.raises(ZeroDivisionError):
                dist.broadcast_object_list([None], 0)
    assert objects_from(0, 7) == (7, (7, rank))
    dist.barrier()


def test_who_means_something_else_does_not_take_what_was_given(rank, size):
    x = np.full(2 + (rank == size - 1), float(rank))

    def disagree():
        dist.broadcast(x, 0)
        dist.barrier()

    with pytest.raises(dist.MismatchError):
        disagree()
    if rank == size - 1:
        assert (x == rank).all()


@pytest.mark.parametrize("operation", [dist.broadcast, dist.reduce])
def test_a_rank_that_cannot_take_part_tells_the_root_why(operation, rank, size):
    def refuse():
        operation([] if rank == size - 1 else np.zeros(2), 0)
        dist.barrier()

    with pytest.raises(dist.UsageError if rank == size - 1 else dist.RemoteError) as caught:
        refuse()
    assert rank == size - 1 or f"rank {size - 1} cannot take part" in str(caught.value)
    x = np.ones(1)
    dist.all_reduce(x)
    assert x[0] == size


def test_what_was_given_before_an_error_is_forgotten_with_it(rank, size):
    def fail():
        dist.all_gather_object([None] * (9 if rank == size - 1 else 0), rank)

    for _ in range(2):
        broadcast_of(2)
        with pytest.raises(dist.UsageError if rank == size - 1 else dist.RemoteError):
            fail()
        dist.barrier()


def test_a_small_object_follows_what_was_given(rank):
    given = [rank]
    for turn in range(MOST_EAGER // 2):
        x = np.full(1, rank + turn)
        dist.broadcast(x, 1)
        assert x[0] == turn + 1
    dist.broadcast_object_list(given, 1)
    assert given == [1]


def test_a_rank_that_has_given_up_twice_is_in_step_afterwards(rank, size):
    """So what it has left out is not eager: it takes back an agreement for each."""
    group, late = dist.new_group(timeout=0.5), size - 1
    group.transport.context.node.control.most_eager = MOST_EAGER
    x, word = np.ones(2), np.zeros(1)
    if rank != late:
        dist.recv(word, late)
    with pytest.raises(dist.CollectiveTimeout):
        dist.all_reduce(x, group=group)
    with pytest.raises(dist.CollectiveTimeout):
        dist.broadcast(x, 0, group=group)
    if rank == late:
        for other in range(late):
            dist.send(word, other)
    group.transport.set_timeout(60)
    for value in range(3):
        x[:] = value
        dist.all_reduce(x, group=group)
        assert (x == value * size).all()
    dist.destroy_process_group(group)


def test_after_a_disagreement_operations_have_one_number_on_all_ranks(rank, size, world):
    def disagree():
        for _ in range(4):
            dist.broadcast(np.zeros(2 + (rank == 1)), 0)
        dist.barrier()

    dist.barrier()
    with pytest.raises(dist.MismatchError):
        disagree()
    dist.barrier()
    numbers = []
    dist.all_gather_object(numbers, world.issued)
    assert len(set(numbers)) == 1
    assert world.transport.context.agreement.begun > 0


# ---- reductions


def reduce_of(n, root=0, op=dist.ReduceOp.SUM):
    x = np.ones(n)
    dist.reduce(x, root, op=op)
    return x


def in_python(here):
    return switched_off() if here else nullcontext()


WHO = {
    "nobody": lambda rank, root: False,
    "the root": lambda rank, root: rank == root,
    "the others": lambda rank, root: rank != root,
    "one": lambda rank, root: rank == (root + 1) % dist.get_world_size(),
}
"""Who comes to an operation by Python."""


@pytest.mark.parametrize("cold", [False, True])
def test_who_gives_to_the_root_of_a_reduction_goes_on_before_it_has_come(cold, rank, size):
    """Else the root would never come: it waits for what the others send afterwards."""
    dist.barrier()
    for turn in range(MOST_EAGER):
        x, word = np.full(3, float(rank + turn)), np.zeros(1)
        if rank == 0:
            for other in range(1, size):
                dist.recv(word, other)
        with in_python(cold and rank == 0):
            dist.reduce(x, 0, sync_op=turn % 2 > 0).wait()
        if rank:
            dist.send(word, 0)
        assert (x == (sum(range(size)) + size * turn if rank == 0 else rank + turn)).all()


@pytest.mark.parametrize("cold", WHO)
def test_a_root_that_comes_first_waits_for_all(cold, rank, size):
    word = np.zeros(1)
    for turn in range(5):
        x = np.full(2, rank + 1.0)
        if rank == size - 1:
            dist.recv(word, 0)
            time.sleep(0.02)
        if rank == 0:
            dist.send(word, size - 1)
        with in_python(WHO[cold](rank, 0)):
            dist.reduce(x, 0, sync_op=turn % 2 > 0).wait()
        assert rank or (x == size * (size + 1) / 2).all()


@pytest.mark.parametrize("cold", WHO)
@pytest.mark.parametrize("dtype", ["f8", "f4", "i2", "c16", "?"])
def test_reductions_have_the_same_bits_whoever_gives_and_takes_in_python(
    dtype, cold, rank, size, world
):
    control, draw = world.transport.context.node.control, np.random.default_rng(rank)
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG]
    ops = ops[: {"c": 1, "i": 2, "?": 2}.get(dtype[0], 3)]
    for turn in range(2 * MOST_EAGER + 3):
        item, root, op = np.dtype(dtype).itemsize, turn % size, ops[turn % len(ops)]
        n = [1, EAGER_BYTES // item, EAGER_BYTES // item + 1, 0, 33][turn % 5]
        given = (draw.standard_normal(n) * 100).astype(dtype)
        x, expected = given.copy(), given.copy()
        with in_python(WHO[cold](rank, root)):
            dist.reduce(x, root, op=op)
        if turn % 7 == 0:
            control.most_eager = 0
            dist.reduce(expected, root, op=op)
            control.most_eager = MOST_EAGER
            assert x.tobytes() == expected.tobytes()
        elif rank != root:
            assert x.tobytes() == given.tobytes()


ODD_REDUCED = {
    "nothing": lambda: None,
    "another operation": dist.barrier,
    "another shape": lambda: reduce_of(3),
    "another operator": lambda: reduce_of(2, op=dist.ReduceOp.MAX),
    "a large array": lambda: reduce_of(5000),
    "another root": lambda: reduce_of(2, 1),
    "a broadcast": lambda: dist.broadcast(np.zeros(2), dist.get_rank()),
    "an object": lambda: dist.broadcast_object_list([1], dist.get_rank()),
}
"""What one rank means, where the others reduce two numbers to rank 0."""


@pytest.mark.parametrize("odd", ODD_REDUCED)
@pytest.mark.parametrize("cold", WHO)
@pytest.mark.parametrize("who", ["the root", "another"])
@pytest.mark.parametrize("before", [0, 1, MOST_EAGER])
def test_ranks_that_disagree_in_a_reduction_all_hear_of_it_and_go_on(
    before, who, cold, odd, rank, size
):
    other = 0 if who == "the root" else size - 1

    def disagree():
        with in_python(WHO[cold](rank, 0)):
            if rank == other:
                ODD_REDUCED[odd]()
            else:
                reduce_of(2)
        dist.all_reduce(np.zeros(1))

    for _ in range(before):
        reduce_of(1)
    with pytest.raises(dist.MismatchError) as caught:
        disagree()
    assert "reduce(shape (2,), float64, SUM, root 0)" in str(caught.value)
    assert sorted(caught.value.call_sites) == [*range(size)]
    assert all(__file__ in site for site in caught.value.call_sites.values())
    assert (reduce_of(1) == (size if rank == 0 else 1)).all()
    dist.barrier()


@pytest.fixture
def hasty():
    """A group whose root gives up soon."""
    group = dist.new_group(timeout=60)
    group.transport.context.node.control.most_eager = MOST_EAGER
    dist.barrier(group)
    group.transport.set_timeout(0.5)
    yield group
    dist.destroy_process_group(group)


@pytest.fixture
def late(rank, size, hasty):
    """The rank that comes to a reduction of `hasty` when the root lets it."""
    if size == 2:
        pytest.skip("only where another rank gives does the root wait for one that does not")
    if rank == size - 1:
        dist.recv(np.zeros(1), 0)
    return size - 1


def let(late):
    dist.send(np.zeros(1), late)


def reduce_late(group, late, rank, cold=False, around=nullcontext):
    """Reduce to the first rank, once all but the late one have given."""
    x, word = np.ones(2), np.zeros(1)
    for other in range(1, late if rank == 0 else 0):
        dist.recv(word, other)
    with around(), in_python(cold and rank == 0):
        dist.reduce(x, 0, group=group)
    if 0 < rank < late:
        dist.send(word, 0)
    return x


def check_in_step(group, rank, size):
    x = np.ones(2)
    for n in range(1, 3):
        dist.reduce(x, 0, group=group)
        dist.broadcast(x, 0, group=group)
        assert (x == size**n).all()
    dist.all_reduce(x, group=group)
    assert (x == size**3).all()


@pytest.mark.parametrize("cold", [False, True])
def test_a_root_names_who_has_not_given_in_time_and_is_in_step_afterwards(
    cold, rank, size, hasty, late
):
    if rank:
        assert (reduce_late(hasty, late, rank) == 1).all()
    else:
        with pytest.raises(dist.CollectiveTimeout) as caught:
            reduce_late(hasty, late, rank, cold)
        assert caught.value.missing == (late,)
        assert "reduce(shape (2,), float64, SUM, root 0)" in str(caught.value)
        let(late)
    hasty.transport.set_timeout(60)
    check_in_step(hasty, rank, size)


@pytest.mark.parametrize("cold", [False, True])
def test_a_root_that_is_interrupted_while_it_waits_is_in_step_afterwards(
    cold, rank, size, hasty, late
):
    hasty.transport.set_timeout(60)
    if rank:
        assert (reduce_late(hasty, late, rank) == 1).all()
    else:
        reduce_late(hasty, late, rank, cold, interrupts)
        let(late)
    check_in_step(hasty, rank, size)


def test_a_root_that_nobody_waits_for_names_who_has_not_given(rank, size, hasty, late):
    x, word = np.ones(2), np.zeros(1)
    for other in range(1, late if rank == 0 else 0):
        dist.recv(word, other)
    work = dist.reduce(x, 0, group=hasty, sync_op=False)
    if 0 < rank < late:
        dist.send(word, 0)
    if rank == 0:
        with pytest.raises(dist.CollectiveTimeout) as caught:
            work.wait()
        assert caught.value.missing == (late,)
        let(late)
    hasty.transport.set_timeout(60)
    if rank:
        work.wait()
    check_in_step(hasty, rank, size)


def test_nobody_is_missing_where_nothing_is_waited_for(rank, size):
    group = dist.new_group()
    dist.barrier(group)
    assert group.transport.hot.not_given() == []
    dist.destroy_process_group(group)
