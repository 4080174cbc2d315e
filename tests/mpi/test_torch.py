"""torch tensors on the CPU: every dtype and layout, in place, and new ones are tensors."""

import numpy as np
import pytest

import hpcdist as dist

torch = pytest.importorskip("torch", minversion="2.11")

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
COMPLEX = [torch.complex64, torch.complex128]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + COMPLEX + UNSIGNED)
def test_tensors_of_every_dtype_are_reduced_in_place(dtype, rank, size):
    x = torch.full((3, 2), rank + 1).to(dtype)
    place = x.data_ptr()
    dist.all_reduce(x)
    assert x.data_ptr() == place
    assert (x.to(torch.complex128) == size * (size + 1) // 2).all()


@pytest.mark.parametrize("dtype", [torch.bool, *INTEGERS, *FLOATS, *COMPLEX, *UNSIGNED, *FLOAT8])
def test_tensors_of_every_dtype_move(dtype, rank, size):
    def made_by(each):
        return torch.full((4,), float((each + 1) % 2)).to(dtype)

    x, gathered = made_by(rank), []
    dist.all_gather(gathered, x)
    assert all(type(each) is torch.Tensor and each.dtype is dtype for each in gathered)
    assert all(same(each, made_by(source)) for source, each in enumerate(gathered))
    got = torch.zeros(4).to(dtype)
    work = dist.isend(x, (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    work.wait()
    assert same(got, made_by((rank - 1) % size))
    dist.broadcast(x, 0)
    assert same(x, made_by(0))


def same(x, y):
    return bytes(x.view(torch.uint8).tolist()) == bytes(y.view(torch.uint8).tolist())


def test_bool_tensors_are_or_and_and(rank, size):
    x = torch.tensor([rank == 0, True, False])
    y = x.clone()
    dist.all_reduce(x)
    dist.all_reduce(y, dist.ReduceOp.PROD)
    assert x.tolist() == [True, True, False]
    assert y.tolist() == [size == 1, True, False]


@pytest.mark.parametrize(
    "layout",
    [
        lambda: torch.zeros(4, 6),
        lambda: torch.zeros(6, 4).t(),
        lambda: torch.zeros(8, 12)[::2, ::2],
        lambda: torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.zeros(()),
        lambda: torch.zeros(0, 3),
        lambda: torch.zeros(10).as_strided((4, 2), (2, 1)),
        lambda: torch.zeros(4, 6, dtype=torch.bfloat16)[:, 1::2],
    ],
)
def test_tensors_of_every_layout_are_written(layout, rank, size):
    x = layout()
    x.fill_(rank + 1)
    dist.all_reduce(x)
    assert (x == size * (size + 1) // 2).all()
    x.fill_(rank)
    dist.broadcast(x, size - 1)
    assert (x == size - 1).all()


def test_a_leaf_that_requires_grad_is_reduced_without_touching_its_graph(rank, size):
    leaf = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    dist.all_reduce(leaf)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert (leaf.detach() == size * (size + 1) / 2).all()
    (leaf * 2).sum().backward()
    dist.all_reduce(leaf.grad)
    assert (leaf.grad == 2 * size).all()
    gathered = []
    dist.all_gather(gathered, leaf)
    assert not any(each.requires_grad for each in gathered)


def test_filled_lists_hold_tensors(rank, size):
    gathered, exchanged = [], []
    dist.gather(torch.full((rank + 1,), rank), gathered if rank == 0 else None)
    dist.alltoall(exchanged, [torch.tensor([rank, each]) for each in range(size)])
    if rank == 0:
        assert [each.tolist() for each in gathered] == [[each] * (each + 1) for each in range(size)]
    assert all(type(each) is torch.Tensor for each in gathered + exchanged)
    assert [each.tolist() for each in exchanged] == [[each, rank] for each in range(size)]


def test_tensors_and_arrays_meet_in_one_operation(rank, size):
    x = torch.ones(4) if rank % 2 else np.ones(4, "f4")
    dist.all_reduce(x)
    assert (np.asarray(x) == size).all()
    blocks = [torch.full((2,), float(each)) for each in range(size)]
    out = np.empty(2, "f4")
    dist.scatter(out, blocks if rank == 0 else None)
    assert (out == rank).all()
    rows = list(torch.zeros(size, 2))  # views of one tensor
    dist.all_gather(rows, torch.full((2,), float(rank)))
    assert [row[0].item() for row in rows] == list(range(size))


def test_tensors_travel_inside_objects(rank, size):
    gathered = []
    dist.all_gather_object(gathered, {"t": torch.full((9000,), rank)})
    assert all((each["t"] == source).all() for source, each in enumerate(gathered))
    gathered[0]["t"][0] = -1


def test_asynchronous_tensors_and_plans(rank, size):
    x = torch.ones(1000, dtype=torch.bfloat16)
    dist.all_reduce(x, sync_op=False).wait()
    assert (x == size).all()
    y = torch.ones(5)
    plan = dist.plan_all_reduce(y)
    for _ in range(2):
        plan.start().wait()
    plan.free()
    assert (y == size**2).all()


def test_a_new_numpy_array_is_made_like_a_tensor():
    x = dist.empty_like(torch.zeros(2, 3, dtype=torch.float64))
    assert isinstance(x, np.ndarray)
    assert (x.shape, x.dtype) == ((2, 3), np.float64)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: torch.zeros(3, device="meta"), "GPU memory|meta"),
        (lambda: torch.zeros(3, 3).to_sparse(), "to_dense"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "resolve_conj"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "no counterpart of torch.complex32"),
    ],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_without_plain_memory_are_refused_with_the_remedy(tensor, words, rank):
    with pytest.raises(dist.UsageError, match=words):
        dist.all_reduce(tensor())
    dist.barrier()


def test_trees_of_tensors_are_reduced_into_new_tensors(rank, size):
    total = size * (size + 1) // 2
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)
    tree = {"x": x, "short": torch.full((2,), rank + 1, dtype=torch.bfloat16), "n": rank + 1}
    got = dist.all_reduced(tree)
    assert got["n"] == total
    for name in ("x", "short"):
        assert type(got[name]) is torch.Tensor
        assert got[name].dtype is tree[name].dtype
        assert (got[name] == total).all()
    assert (x == rank + 1).all()
    mean = dist.all_reduced(torch.tensor(rank), dist.ReduceOp.AVG)
    assert mean.item() == (size - 1) / 2
