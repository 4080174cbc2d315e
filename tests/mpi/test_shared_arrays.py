"""Ordinary arrays of NumPy in memory that the ranks of a node share; on any number of ranks."""

import threading

import numpy as np
import pytest
from checks import needs_torch
from mpi4py import MPI

import hpcdist as dist
from hpcdist.transport.shm import ordinary

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
COUNT = 300_001
WHOSE = {
    "all": lambda rank: True,
    "odd": lambda rank: rank % 2 == 1,
    "first": lambda rank: rank == 0,
}
"""Which ranks have their arrays in shared memory."""

pytestmark = [
    pytest.mark.skipif(ordinary.LEAST is None, reason="needs the compiled blocks"),
    pytest.mark.two_ranks,
]


def values(rank, count=COUNT, dtype="f4"):
    """Return fractions, whose sums depend on the order of the additions; rounded, they do not."""
    return (np.sin(np.arange(count) + rank) * 10.0 ** (rank % 3)).astype(dtype)


def heap():
    return dist.get_group().transport.context.heap


def is_shared(array):
    return heap().offset_of(array) is not None


def all_reduce(x):
    dist.all_reduce(x)
    return x


def broadcast(x):
    dist.broadcast(x, SIZE - 1)
    return x


def all_gather(x):
    out = np.empty(SIZE * x.size, x.dtype)
    dist.all_gather(out, x)
    return out


def reduce_scatter(x):
    out = np.empty(x.size // SIZE, x.dtype)
    np.rint(x, out=x)  # MPI adds in an order of its own
    dist.reduce_scatter(out, x[: out.size * SIZE])
    return out


def alltoall(x):
    given = x[: x.size // SIZE * SIZE]
    out = np.empty_like(given)
    dist.alltoall_single(out, given)
    return out


def exchange_messages(x):
    out = np.empty_like(x)
    work = dist.isend(x, (RANK + 1) % SIZE)
    dist.recv(out, (RANK - 1) % SIZE)
    work.wait()
    return out


OPERATIONS = [all_reduce, broadcast, all_gather, reduce_scatter, alltoall, exchange_messages]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("whose", WHOSE)
def test_results_are_the_same_bits_wherever_the_arrays_of_a_rank_are(operation, whose):
    expected = operation(values(RANK))
    if WHOSE[whose](RANK):
        with dist.shared_memory():
            x = values(RANK) + np.float32(0)
            got = operation(x)
        assert is_shared(x) == is_shared(got) == (SIZE > 1)
    else:
        got = operation(values(RANK))
        assert not is_shared(got)
    assert got.tobytes() == expected.tobytes()


def test_views_and_slices_are_reduced_in_place():
    with dist.shared_memory():
        x = np.ones((3, 100_003))
    for part in (x[1], x[2, 7:90_007], x.reshape(-1)[5:200_005]):
        part[...] = RANK
        dist.all_reduce(part)
        assert (part == SIZE * (SIZE - 1) / 2).all()
    assert (x[0, :5] == 1).all()


def test_an_expression_may_be_communicated_and_dropped_at_once():
    a, b = np.ones(COUNT), np.full(COUNT, RANK, "f8")
    with dist.shared_memory():
        for turn in range(20):
            dist.all_reduce(total := a + b * turn)
            assert total[0] == total[-1] == SIZE + turn * SIZE * (SIZE - 1) / 2
            works = [dist.all_reduce(a + turn, sync_op=False) for _ in range(3)]
            dist.wait_all(works)


def test_threads_that_communicate_in_groups_of_their_own_may_share():
    groups = [dist.new_group() for _ in range(2)]
    found = [None] * len(groups)

    def work(number):
        with dist.shared_memory():
            for turn in range(5):
                dist.all_reduce(x := values(RANK + number + turn), group=groups[number])
        found[number] = x

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, group in enumerate(groups):
        dist.all_reduce(x := values(RANK + number + 4), group=group)
        assert found[number].tobytes() == x.tobytes()
        dist.destroy_process_group(group)


def test_arrays_outlive_the_world_and_are_ordinary_in_the_next(world_with):
    with dist.shared_memory():
        x = values(RANK).copy()
        world_with()
        y = values(RANK).copy()
    assert not is_shared(x)
    assert is_shared(y) == (SIZE > 1)
    assert x.tobytes() == y.tobytes()
    dist.all_reduce(x)
    dist.all_reduce(y)
    assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("settings", [{"share_arrays": 1}, {"share_arrays": 1, "kernel": "never"}])
def test_a_setting_does_it_for_the_whole_process(world_with, settings):
    try:
        world_with(**settings)
        found = []
        thread = threading.Thread(target=lambda: found.append(np.ones(COUNT)))
        thread.start()
        thread.join()
        assert is_shared(np.ones(COUNT)) == is_shared(found[0])
        assert is_shared(found[0]) == (SIZE > 1 and "kernel" not in settings)
        dist.all_reduce(found[0])
        assert (found[0] == SIZE).all()
    finally:
        ordinary.share_all(False)


def test_arrays_are_ordinary_where_the_heap_is_full(world_with):
    world_with(shared_heap_mb=1)
    with dist.shared_memory():
        arrays = [np.full(100_000, RANK, "f8") for _ in range(3)]
        for x in arrays:
            dist.all_reduce(x)
            assert (x == SIZE * (SIZE - 1) / 2).all()
        assert [is_shared(x) for x in arrays] == [SIZE > 1, False, False]


@needs_torch
def test_a_tensor_of_such_an_array_is_reduced_where_it_is():
    import torch

    with dist.shared_memory():
        x = values(RANK) + np.float32(0)
    tensor = torch.from_numpy(x)
    dist.all_reduce(tensor)
    expected = values(RANK)
    dist.all_reduce(expected)
    assert tensor.numpy().tobytes() == x.tobytes() == expected.tobytes()
    assert is_shared(tensor.numpy()) == (SIZE > 1)


@needs_torch
def test_what_fully_shard_sends_is_in_shared_memory(monkeypatch):
    import torch

    from hpcdist.torch.process_group import HpcdistProcessGroup

    made, make = [], HpcdistProcessGroup.allocate_tensor

    def allocate_tensor(self, size, **options):
        made.append(make(self, size, **options))
        return made[-1]

    monkeypatch.setattr(HpcdistProcessGroup, "allocate_tensor", allocate_tensor)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 32)
    expected = torch.nn.Linear(64, 32)
    expected.load_state_dict(model.state_dict())
    dist.fully_shard(model)
    x = torch.full((2, 64), 1.0 + RANK)
    model(x).sum().backward()
    x = torch.full((2, 64), 1.0 + (SIZE - 1) / 2)  # the mean over the ranks
    expected(x).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), expected.weight.grad)
    assert all(is_shared(each.numpy()) == (SIZE > 1) for each in made)
    assert SIZE == 1 or len(made) >= 3  # parameters; gradients, and their mean


@needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_a_process_group_makes_tensors_in_shared_memory(world, dtype):
    import torch

    from hpcdist.torch import process_group_of

    process_group = process_group_of(world)
    wanted = getattr(torch, dtype)
    assert process_group.supports_tensor_alloc(torch.device("cpu"))
    assert not process_group.supports_tensor_alloc(torch.device("cuda"))
    made = process_group.allocate_tensor(1000, dtype=wanted, device=torch.device("cpu"))
    assert (made.shape, made.dtype) == ((1000,), wanted)
    assert is_shared(made.view(torch.uint8).numpy()) == (SIZE > 1)
