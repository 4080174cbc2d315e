"""Embeddings in tables learn what embeddings in one process learn."""

import numpy as np
import pytest

import hpcdist as dist

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from hpcdist.torch import SparseEmbedding, sparse_embedding  # noqa: E402

IDS, DIM, RATE, STEPS = 12, 3, 0.5, 3


def initial(ids, dim):
    return np.sin(np.asarray(ids)[:, None] * dim + np.arange(dim)).astype(np.float32)


WHOLE = torch.from_numpy(initial(np.arange(IDS), DIM))
OPTIONS = {"optimizer": ("sgd", {"learning_rate": RATE}), "initializer": initial}


def batches(rank, step):
    """Return ids, where their bags begin, and what the outputs are multiplied with."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids = torch.randint(IDS, (8,), generator=generator)
    return ids, torch.tensor([0, 3, 3, 7]), torch.rand(4, DIM, generator=generator)


def dense(pooling, padding_idx, size):
    """Return the rows that one process learns from the batches of all ranks."""
    bag = nn.EmbeddingBag(IDS, DIM, mode=pooling, padding_idx=padding_idx)
    bag.weight.data.copy_(WHOLE)
    if padding_idx is not None:
        bag.weight.data[padding_idx] = 0
    optimizer = torch.optim.SGD(bag.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(size):
            ids, offsets, factors = batches(rank, step)
            ((bag(ids, offsets) * factors).sum() / size).backward()
        optimizer.step()
    return bag.weight.detach()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_bags_learn_what_a_dense_embedding_learns(pooling, padding_idx, size):
    def train():
        rank = dist.init_parallel_env().rank
        bag = SparseEmbedding("bags", DIM, pooling=pooling, padding_idx=padding_idx, **OPTIONS)
        for step in range(STEPS):
            ids, offsets, factors = batches(rank, step)
            (bag(ids, offsets) * factors).sum().backward()
        return bag.pull(torch.arange(IDS))

    wanted = dense(pooling, padding_idx, size)
    for rows in dist.simulate(size, train):
        torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-6)


def test_rows_have_the_shape_of_their_ids_and_bags_may_be_rows():
    def look():
        dist.init_parallel_env()
        ids = torch.tensor([[1, 2], [1, 5]])
        rows = SparseEmbedding("rows", DIM, **OPTIONS)(ids)
        bags = SparseEmbedding("rows", DIM, pooling="sum", **OPTIONS)(ids)
        assert torch.equal(rows, WHOLE[ids])
        torch.testing.assert_close(bags, WHOLE[ids].sum(1))
        with torch.no_grad():
            assert not SparseEmbedding("rows", DIM, **OPTIONS)(ids).requires_grad

    dist.simulate(2, look)


def test_the_function_finds_its_table_by_name_and_learns():
    def train():
        dist.init_parallel_env()
        SparseEmbedding("words", DIM, **OPTIONS)
        ids = torch.tensor([4, 4, 9])
        sparse_embedding(ids, [IDS, DIM], param_attr="words").sum().backward()
        rows = sparse_embedding(ids, [IDS, DIM], is_test=True, param_attr="words")
        assert not rows.requires_grad
        return rows

    wanted = WHOLE[[4, 4, 9]] - RATE * torch.tensor([2.0, 2.0, 1.0])[:, None]
    for rows in dist.simulate(2, train):
        torch.testing.assert_close(rows, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "bfloat16"])
def test_rows_have_the_dtype_that_the_function_is_told(dtype):
    def look():
        dist.init_parallel_env()
        rows = sparse_embedding(torch.arange(3), [IDS, DIM], param_attr="words", dtype=dtype)
        assert str(rows.dtype).endswith(str(dtype))
        rows.sum().backward()

    dist.simulate(1, look)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: SparseEmbedding("a", DIM, pooling="max"), "pooling must be one of"),
        (lambda: SparseEmbedding("a", DIM, pooling="sum")(torch.arange(3)), "without offsets"),
        (lambda: SparseEmbedding("a", DIM)(torch.arange(3), torch.tensor([0])), "are of bags"),
        (lambda: sparse_embedding(torch.arange(3), [IDS, DIM]), "by a name"),
        (lambda: sparse_embedding(torch.arange(3), [DIM], param_attr="a"), "two numbers"),
        (
            lambda: sparse_embedding(
                torch.arange(3), [IDS, DIM], param_attr="a", table_class="GraphTable"
            ),
            "table_class must be one of",
        ),
    ],
)
def test_wrong_arguments_are_named(wrong, words):
    def look():
        dist.init_parallel_env()
        with pytest.raises(dist.UsageError, match=words):
            wrong()

    dist.simulate(1, look)
