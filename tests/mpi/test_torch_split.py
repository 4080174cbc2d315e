"""`split`, and rows on their way to experts, of tensors with gradients, on ranks of MPI."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.torch.mesh import device_mesh_of  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]
SIZE = (7, 5)  # goes evenly into no number of ranks


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def parameters():
    return [torch.nn.Parameter(drawn(*each, seed=3)) for each in (SIZE, SIZE[1:])]


def expected(x, weight, bias):
    """Return the result of one process, and the gradients of x, weight and bias."""
    x = x.clone().requires_grad_()
    result = x @ weight + bias
    (result**2).sum().backward()
    return result.detach(), x.grad, weight.grad, bias.grad


def close(one, other):
    return torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def cut(length, rank, size):
    """Return where the part of a rank is."""
    share = -(-length // size)
    return slice(min(rank * share, length), min(rank * share + share, length))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_linear_layer_and_its_gradients_are_those_of_one_process(axis, rank, size):
    x, (weight, bias) = drawn(4, 3, 7), parameters()
    result, of_x, of_weight, of_bias = expected(x, *parameters())
    x.requires_grad_()
    found = dist.split(x, SIZE, "linear", axis, size, weight_attr=weight, bias_attr=bias)
    assert close(found, result)
    (found**2).sum().backward()
    assert close(x.grad, of_x)
    own = cut(SIZE[axis], rank, size)
    where = (own,) if axis == 0 else (slice(None), own)
    assert close(weight.grad[where], of_weight[where])
    assert close(bias.grad[own] if axis else bias.grad, of_bias[own] if axis else of_bias)


@pytest.mark.parametrize("axis", [0, 1])
def test_weights_on_the_mesh_get_their_gradients_there(axis, size):
    mesh = dist.ProcessMesh([*range(size)], ["mp"])
    x, (weight, bias) = drawn(4, 7), parameters()
    result, _, of_weight, of_bias = expected(x, *parameters())
    weight = dist.shard_tensor(weight, mesh, [dist.Shard(axis)])
    bias = dist.shard_tensor(bias, mesh, [dist.Shard(0) if axis else dist.Replicate()])
    with mesh:
        found = dist.split(x, SIZE, "linear", axis, size, weight_attr=weight, bias_attr=bias)
    assert close(found, result)
    (found**2).sum().backward()
    assert close(weight.grad.full_tensor(), of_weight)
    assert close(bias.grad.full_tensor(), of_bias)


def test_a_layer_cut_by_outputs_and_one_cut_by_inputs_follow_each_other(rank, size):
    x, first, second = drawn(4, 7), drawn(*SIZE), drawn(*SIZE[::-1], seed=1)
    x.requires_grad_()
    options = {"num_partitions": size, "bias_attr": False}
    inner = dist.split(x, SIZE, "linear", 1, gather_out=False, weight_attr=first, **options)
    assert inner.shape[-1] == cut(5, rank, size).stop - cut(5, rank, size).start
    found = dist.split(inner.tanh(), SIZE[::-1], "linear", 0, weight_attr=second, **options)
    (found**2).sum().backward()
    alone = x.detach().clone().requires_grad_()
    result = (alone @ first).tanh() @ second
    (result**2).sum().backward()
    assert close(found, result)
    assert close(x.grad, alone.grad)


def test_an_embedding_and_its_gradients_are_those_of_one_process(rank, size):
    numbers, weight = torch.tensor([[0, 6, 3], [2, 2, 5]]), parameters()[0]
    alone = parameters()[0]
    found = dist.split(numbers, SIZE, "embedding", 0, size, weight_attr=weight)
    assert close(found, alone[numbers])
    (found**2).sum().backward()
    (alone[numbers] ** 2).sum().backward()
    own = cut(7, rank, size)
    assert close(weight.grad[own], alone.grad[own])


def test_on_a_grid_the_batch_stays_cut_along_the_other_axis(size):
    rows = 1 if size % 2 else 2
    mesh = dist.ProcessMesh(np.arange(size).reshape(rows, -1), ["dp", "mp"])
    x, (weight, bias) = drawn(6, 7), parameters()
    result, of_x, of_weight, of_bias = expected(x, *parameters())
    given = DTensor.from_local(
        x.chunk(rows)[mesh.coordinate[0]].clone().requires_grad_(),
        device_mesh_of(mesh),
        [Shard(0), Replicate()],
    )
    given.retain_grad()
    weight = dist.shard_tensor(weight, mesh, [dist.Replicate(), dist.Shard(1)])
    bias = dist.shard_tensor(bias, mesh, [dist.Replicate(), dist.Shard(0)])
    parts = mesh.get_dim_size("mp")
    found = dist.split(given, SIZE, "linear", 1, parts, weight_attr=weight, bias_attr=bias)
    assert isinstance(found, DTensor)
    assert tuple(found.placements) == (Shard(0), Replicate())
    assert close(found.full_tensor(), result)
    (found**2).sum().backward()
    assert close(given.grad.full_tensor(), of_x)
    assert close(weight.grad.full_tensor(), of_weight)
    assert close(bias.grad.full_tensor(), of_bias)


def test_a_weight_that_is_drawn_is_that_of_the_seed_on_any_number_of_ranks(size):
    drawings = []
    for axis in (0, 1):
        torch.manual_seed(5)
        drawings.append(dist.split(torch.eye(7), SIZE, "linear", axis, size))
    torch.manual_seed(5)
    weight = torch.nn.init.xavier_uniform_(torch.empty(SIZE))
    for found in drawings:
        assert torch.allclose(found, weight, atol=1e-6)
        assert found.requires_grad


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight_attr": torch.ones(2, 2)}, "weight_attr must be an array of the shape"),
        ({"x": torch.ones(4, 9)}, "the last dimension of x must be 7"),
        ({"operation": "embedding"}, "an embedding takes integers"),
        ({"operation": "embedding", "x": torch.tensor([9])}, "must name entries 0 to 6"),
    ],
)
def test_what_one_rank_gets_wrong_all_ranks_hear_of(changed, message, rank, size):
    right = {"x": drawn(4, 7), "size": SIZE, "operation": "linear", "num_partitions": size}
    bad = rank == size - 1
    with pytest.raises(dist.UsageError if bad else dist.RemoteError, match=message):
        dist.split(**(right | changed if bad else right))
    dist.barrier()


def test_with_one_partition_a_batch_stays_cut(rank, size):
    mesh = dist.ProcessMesh([*range(size)], ["dp"])
    x, (weight, bias) = drawn(4 * size, 7), parameters()
    result, _, of_weight, of_bias = expected(x, *parameters())
    given = DTensor.from_local(x.chunk(size)[rank], device_mesh_of(mesh), [Shard(0)])
    weight, bias = (dist.shard_tensor(each, mesh, [dist.Replicate()]) for each in (weight, bias))
    found = dist.split(given, SIZE, "linear", weight_attr=weight, bias_attr=bias)
    assert tuple(found.placements) == (Shard(0),)
    assert close(found.full_tensor(), result)
    (found**2).sum().backward()
    assert close(weight.grad.full_tensor(), of_weight)
    assert close(bias.grad.full_tensor(), of_bias)


# ---- experts


def test_rows_go_to_experts_and_back_and_so_do_their_gradients(rank, size):
    experts = 2
    counts = np.random.default_rng(0).integers(0, 4, (size, size, experts))  # of, to, expert
    local, world = counts[rank].reshape(-1), counts[:, rank].reshape(-1)
    rows = int(local.sum())
    x = drawn(rows, 3, seed=rank).requires_grad_()
    at_experts = dist.utils.global_scatter(x, torch.tensor(local), torch.tensor(world))
    expected = []
    for expert in range(experts):
        for other in range(size):
            theirs = drawn(int(counts[other].sum()), 3, seed=other)
            before = int(counts[other, :rank].sum() + counts[other, rank, :expert].sum())
            expected.append(theirs[before : before + counts[other, rank, expert]])
    assert torch.equal(at_experts, torch.cat(expected))
    back = dist.utils.global_gather(at_experts * (rank + 1), local, world)
    to = np.repeat(np.arange(size), counts[rank].sum(1))
    factor = torch.tensor(to + 1.0)[:, None]
    assert torch.equal(back, x * factor)
    back.sum().backward()
    assert torch.equal(x.grad, factor.expand(rows, 3))


def test_counts_that_do_not_fit_on_one_rank_are_an_error_on_all(rank, size):
    counts, x = np.ones(size, int), torch.ones(size, 2)
    wrong = [
        (x[:-1], counts, counts, "x must have the .* rows that local_count adds up to"),
        (x, counts - 2, counts, "local_count must be a list of integers of at least 0"),
        (x, counts, np.ones((size, 1), int), "global_count must be a list of integers"),
        (x, counts, np.empty(0, int), "must have a number for each expert of each"),
    ]
    bad = rank == size - 1
    for arguments in wrong:
        *given, message = arguments if bad else (x, counts, counts, arguments[-1])
        with pytest.raises(dist.UsageError if bad else dist.RemoteError, match=message):
            dist.utils.global_scatter(*given)
    assert torch.equal(dist.utils.global_scatter(x, counts, counts), x)
