"""Pipelines over MPI: gradients, weights and failures are those of one process."""

import numpy as np
import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", minversion="2.11")

from pipeline_checks import (  # noqa: E402
    CHECKS,
    batch,
    filled,
    in_step,
    linear,
    options,
    pipeline,
)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.comm.making import limited  # noqa: E402
from hpcdist.parallel.hybrid import HybridCommunicateGroup  # noqa: E402
from hpcdist.parallel.topology import CommunicateTopology  # noqa: E402
from hpcdist.torch.hybrid import distribute_model, distribute_optimizer  # noqa: E402
from hpcdist.torch.model_parallel.functions import copy_to  # noqa: E402
from hpcdist.torch.model_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from hpcdist.torch.pipeline import (  # noqa: E402
    LayerDesc,
    PipelineLayer,
    PipelineParallel,
    SharedLayerDesc,
)


@pytest.mark.parametrize("check", CHECKS)
def test_on_mpi(check):
    check()


@pytest.mark.thorough
@pytest.mark.parametrize("check", CHECKS)
def test_between_nodes(check, world_with):
    world_with(ranks_per_node=1)  # no shared memory
    check()


def described(count):
    return [LayerDesc(nn.Linear, 6, 6) for _ in range(count)]


def test_described_layers_are_drawn_alike_for_any_number_of_stages(rank, size):
    torch.manual_seed(7 if rank == 0 else rank)  # the first rank's counts
    model = PipelineLayer(described(2 * size))
    after = torch.rand(1)
    torch.manual_seed(7)
    whole = PipelineLayer(described(2 * size), group=dist.new_group([rank]))
    expected = whole.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name])
    assert rank or torch.rand(1) == after
    values = torch.cat([each.flatten() for each in whole.parameters()])
    assert len(values.unique()) > 0.9 * len(values)


def test_a_checkpoint_fits_any_number_of_stages(rank, size, folder):
    def made(group=None):
        layers = [filled(nn.Linear(6, 6), index) for index in range(2 * size)]
        model = PipelineLayer(layers, loss_fn=functional.mse_loss, group=group)
        return PipelineParallel(model, None, options())

    model = made()
    model.forward_backward_pipeline(batch(8))
    with torch.no_grad():
        for each in model.parameters():
            each.sub_(0.1 * each.grad)
    dist.checkpoint.save({"model": model}, folder)
    other = made(dist.new_group([rank]))
    dist.checkpoint.load({"model": other}, folder, other.module.group)
    mine = model.state_dict()
    expected = other.state_dict()
    for name, value in mine.items():
        assert torch.equal(value, expected[name])
    dist.checkpoint.load({"model": made()}, folder)
    told = []
    dist.all_gather_object(told, sum(float(each.sum()) for each in mine.values()))
    whole = sum(float(each.sum()) for each in expected.values())
    np.testing.assert_allclose(sum(told), whole)


# ---- with other axes of a grid

WORDS, WIDTH, ROWS = 12, 8, 16


class Mlp(nn.Module):
    """A block whose weights are cut over mp."""

    def __init__(self, group):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnParallelLinear(
            WIDTH, 16, has_bias=True, gather_output=False, mp_group=group
        )
        self.down = RowParallelLinear(16, WIDTH, input_is_parallel=True, mp_group=group)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def language_model(grid):
    """Return a model that guesses words, tied at its ends, on a grid."""
    torch.manual_seed(5)
    mp = grid["mp"]

    def logits_of(layer, x):
        return functional.linear(copy_to(x, mp), layer.weight)

    entropy = ParallelCrossEntropy(mp)
    ends = (VocabParallelEmbedding, None, "weight", WORDS, WIDTH)
    layers = [
        SharedLayerDesc("words", *ends, mp_group=mp),
        *(LayerDesc(Mlp, mp) for _ in range(4)),
        SharedLayerDesc(
            "words", VocabParallelEmbedding, logits_of, "weight", WORDS, WIDTH, mp_group=mp
        ),
    ]
    return PipelineLayer(
        layers, loss_fn=lambda x, labels: entropy(x, labels).mean(), group=grid["pp"]
    )


class Trainee:
    """A model, its optimizer, and its losses, on a grid of some ranks."""

    def __init__(self, degrees, group=None):
        topology = CommunicateTopology(["data", "pipe", "sharding", "model"], degrees)
        self.grid = HybridCommunicateGroup(topology, group=group)
        self.copies = self.grid.fused("dp", "sharding")
        strategy = options(micro=ROWS // 4 // self.copies.nranks, steps=4)
        self.model = distribute_model(language_model(self.grid), self.grid, strategy)
        self.optimizer = distribute_optimizer(
            torch.optim.AdamW(self.model.parameters(), 0.05), self.grid, strategy, clip_norm=0.5
        )

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        words = torch.randint(WORDS, (ROWS, 5), generator=generator)
        mine = words.chunk(self.copies.nranks)[self.copies.rank]
        loss = self.model.train_batch((mine[:, :-1], mine[:, 1:]), self.optimizer)
        dist.all_reduce(loss, dist.ReduceOp.AVG, self.copies)
        return loss.item()

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}


ALONE = (1, 1, 1, 1)
GRIDS = [
    *((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)),
    *((2, 2, 1, 1), (1, 2, 2, 1), (1, 2, 1, 2), (1, 4, 1, 1)),
    *((2, 2, 1, 2), (1, 2, 2, 2), (2, 2, 2, 1), (2, 1, 2, 2), (1, 2, 4, 1), (4, 2, 1, 1)),
    *((1, 4, 1, 2), (1, 4, 2, 1), (2, 4, 1, 1), (1, 2, 1, 4), (1, 1, 4, 2)),
    pytest.param((2, 2, 2, 2), marks=pytest.mark.slow),
    pytest.param((1, 4, 2, 2), marks=pytest.mark.slow),
]
"""Degrees of dp, pp, sharding and mp."""


@pytest.fixture
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("degrees", GRIDS)
def test_a_grid_trains_as_one_process_and_goes_on_in_one(
    degrees, rank, size, folder, in_double_precision
):
    if np.prod(degrees) != size:
        pytest.skip("for another number of ranks")
    trainee = Trainee(degrees)
    alone = Trainee(ALONE, dist.new_group([rank]))
    for number in range(4):
        assert trainee.step(number) == pytest.approx(alone.step(number), rel=1e-9, abs=1e-9)
    dist.checkpoint.save(trainee.state, folder)
    other = Trainee(ALONE, dist.new_group([rank]))
    dist.checkpoint.load(other.state, folder, other.grid["pp"])
    back = Trainee(degrees)
    dist.checkpoint.load(back.state, folder)
    for number in range(4, 6):
        expected = pytest.approx(alone.step(number), rel=1e-9, abs=1e-9)
        assert other.step(number) == expected
        assert back.step(number) == expected


def test_a_rank_that_fails_beside_others_of_its_stage_fails_on_all(rank, size):
    if ROWS % size:
        pytest.skip("the samples cannot be dealt evenly")
    pp, mp = next(each for each in [(2, 2), (1, 2), (1, 1)] if size % np.prod(each) == 0)
    trainee = Trainee((size // (pp * mp), pp, 1, mp))
    failing = size - 1

    def fails(module, inputs):
        raise KeyError("drill")

    mlp = next(each for each in trainee.model.modules() if isinstance(each, Mlp))
    if rank == failing:
        hook = mlp.register_forward_pre_hook(fails)
    with pytest.raises(KeyError if rank == failing else dist.RemoteError, match="drill") as caught:
        trainee.step(0)
    if rank != failing:
        assert caught.value.rank == failing
    else:
        hook.remove()
    assert all(each.grad is None for each in trainee.model.parameters())
    expected = Trainee(ALONE, dist.new_group([rank])).step(1)
    assert trainee.step(1) == pytest.approx(expected, rel=1e-5)


def test_a_rank_that_is_elsewhere_costs_the_others_their_time_limit_once(rank, size, world):
    model = pipeline([linear(each) for each in range(size)])
    if size > 1:
        with limited(world.transport, 0.5):
            for each in range(1, size if rank == 0 else 0):  # until all others have given up
                MPI.COMM_WORLD.recv(source=each)
            with pytest.raises(dist.CollectiveTimeout) as caught:
                model.forward_backward_pipeline(batch(4 * max(4, size)))
        if rank:
            MPI.COMM_WORLD.send(None, 0)
            assert "within 0.5 s" in str(caught.value)
            assert "within 1 s" in str(caught.value.__notes__)
    in_step()
    model.forward_backward_pipeline(batch(4 * max(4, size)))


def test_an_optimizer_that_counts_parameters_is_not_saved_by_stages(size, folder):
    if size == 1:
        pytest.skip("one rank has all stages")
    model = PipelineLayer(described(2 * size), loss_fn=functional.mse_loss)
    model = PipelineParallel(model, None, options())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(dist.UsageError, match=r"fleet\.distributed_optimizer"):
        dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)


def test_a_stage_without_weights_is_saved_and_loaded_with_the_others(rank, size, folder):
    def made(ranks=None):
        bounds = [0, *range(2, size + 1)] if ranks is None else [0]
        rows = [filled(nn.Linear(6, 6), 1), filled(nn.Linear(6, 6), 2)]
        rows += [nn.Tanh() for _ in range(size - 1)]
        layers = PipelineLayer(rows, loss_fn=functional.mse_loss, seg_method=bounds, group=ranks)
        model = PipelineParallel(layers, None, options())
        adam = torch.optim.Adam(model.parameters(), 0.1)
        return model, distribute_optimizer(adam, model.grid)

    model, optimizer = made()
    model.train_batch(batch(8), optimizer)
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    again, whole = made(), made(dist.new_group([rank]))
    dist.checkpoint.load({"model": again[0], "optimizer": again[1]}, folder)
    group = whole[0].module.group
    dist.checkpoint.load({"model": whole[0], "optimizer": whole[1]}, folder, group)
    losses = []
    for number in range(2):
        expected = model.train_batch(batch(8, number), optimizer)
        losses = [each.train_batch(batch(8, number), own) for each, own in (again, whole)]
        for loss in losses:
            torch.testing.assert_close(loss, expected)


def test_the_ranks_of_a_topology_are_a_pipeline(size):
    topology = CommunicateTopology(["data", "pipe"], [1, size])
    layers = PipelineLayer(described(size), size, topology)
    assert layers.group.ranks == list(range(size))
