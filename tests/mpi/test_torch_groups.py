"""DataParallel on torch modules of which some parameters have a group of their own."""

import math

import numpy as np
import pytest

import hpcdist as dist

torch = pytest.importorskip("torch", minversion="2.11")

import torch.distributed as c10d  # noqa: E402
from checks import assert_raised, outcome  # noqa: E402
from torch import nn  # noqa: E402

import hpcdist.torch  # noqa: E402

pytestmark = pytest.mark.usefixtures("and_the_world_goes_on")

EXPERTS = 2


class Mixture(nn.Module):
    """A layer that all ranks have, and the expert of this rank."""

    def __init__(self, number, group=None, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 4).double()
        self.experts = nn.ModuleDict()
        for each in range(EXPERTS):
            expert = nn.Linear(4, 4).double()  # all are drawn, so that each has its own numbers
            if each == number:
                self.experts["mine"] = expert
        for parameter in self.experts.parameters():
            parameter.hpcdist_group = group

    def forward(self, x, through=True):
        hidden = torch.tanh(self.first(x))
        return self.experts["mine"](hidden) if through else hidden


@pytest.fixture
def number(rank):
    return rank % EXPERTS


@pytest.fixture
def group(number):
    group = dist.get_group(0).split(number)
    yield group
    dist.destroy_process_group(group)


def rows(turn, rank):
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(2))


def loss_of(model, turn, rank):
    x, y = rows(turn, rank)
    return (model(x) - y).square().sum()


def in_one_process(size, turns, limit=math.inf):
    """Train all experts without hpcdist; return the first layer, the experts, and the norms."""
    models = [Mixture(number) for number in range(min(EXPERTS, size))]
    for model in models[1:]:
        model.first = models[0].first
    first, norms = models[0].first, []
    for turn in range(turns):
        total = sum(loss_of(models[each % EXPERTS], turn, each) for each in range(size))
        total.backward()
        with torch.no_grad():
            for p in first.parameters():
                p.grad /= size
            for number, model in enumerate(models):
                for p in model.experts.parameters():
                    p.grad /= len(range(number, size, EXPERTS))
            every = [*first.parameters(), *(p for m in models for p in m.experts.parameters())]
            norms.append(float(sum(p.grad.square().sum() for p in every).sqrt()))
            factor = min(1.0, limit / (norms[-1] + 1e-6))
            for p in every:
                p -= 0.05 * factor * p.grad
                p.grad = None
    return models, norms


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("quiet", [0, 1])
def test_experts_train_as_in_one_process(overlap, quiet, number, group, rank, size, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    module = Mixture(number, group)
    model = dist.DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for turn in range(3):
        optimizer.zero_grad()
        for _ in range(quiet):  # a pass whose gradients are taken back
            with model.no_sync():
                loss_of(model, turn, rank).backward()
            with model.no_sync():
                (-loss_of(model, turn, rank)).backward()
        loss_of(model, turn, rank).backward()
        optimizer.step()
    models, _ = in_one_process(size, 3)
    mine = models[number]
    for (name, p), q in zip(module.named_parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: name + m)


def test_the_norm_counts_every_parameter_once(number, group, rank, size):
    module = Mixture(number, group)
    model = dist.DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    models, norms = in_one_process(size, 3, limit=0.5)
    for turn, expected in enumerate(norms):
        optimizer.zero_grad()
        loss_of(model, turn, rank).backward()
        np.testing.assert_allclose(dist.clip_grad_norm_(model, 0.5), expected, rtol=1e-9)
        optimizer.step()
    for p, q in zip(module.parameters(), models[number].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-12)
    with pytest.raises(dist.UsageError, match="pass the DataParallel model"):
        dist.clip_grad_norm_(module.parameters(), 1.0)


def test_members_begin_with_the_same_expert(number, group, rank):
    module = Mixture(number, group, seed=rank)
    dist.DataParallel(module)
    for p, q in zip(
        module.experts.parameters(), Mixture(number, seed=number).experts.parameters(), strict=True
    ):
        assert torch.equal(p, q)
    assert torch.equal(module.first.weight, Mixture(0, seed=0).first.weight)


def test_a_module_may_have_nothing_but_experts(number, group, rank, size):
    module = nn.Linear(2, 1, bias=False)
    module.weight.hpcdist_group = group
    model = dist.DataParallel(module)
    for turn in range(3):
        model.zero_grad()
        model(torch.full((1, 2), float(rank + turn))).sum().backward()
        mean = np.mean(range(number, size, EXPERTS)) + turn
        assert module.weight.grad.tolist() == [[mean, mean]]


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters:UserWarning")
def test_unused_experts_are_averaged_with_zeros(number, group, rank, size):
    module = Mixture(number, group)
    model = dist.DataParallel(module, find_unused_parameters=True)
    x, _ = rows(0, 0)
    model(x, through=rank == 0).sum().backward()
    if number == 0:
        members = len(range(0, size, EXPERTS))
        bias = module.experts["mine"].bias.grad
        torch.testing.assert_close(bias, torch.full_like(bias, 3 / members))
    else:
        assert module.experts["mine"].bias.grad is None
    assert module.first.weight.grad is not None


def test_an_unused_expert_is_an_error_on_all_ranks(number, group, rank, size):
    module = Mixture(number, group)
    model = dist.DataParallel(module)
    x, _ = rows(0, 0)

    def backward():
        model(x, through=rank != size - 1).sum().backward()

    for _ in range(2):
        told = outcome(backward)
        assert_raised(told, "UsageError", "no gradient for experts.mine.weight", [size - 1])
    model.zero_grad()
    loss_of(model, 0, rank).backward()
    assert module.first.weight.grad is not None


def test_nan_in_an_expert_is_an_error_on_all_ranks(number, group, rank, size):
    module = Mixture(number, group)
    model = dist.DataParallel(module, check_nan=True)
    x, _ = rows(0, 0)

    def backward():
        factor = math.nan if rank == size - 1 else 1.0
        module.experts["mine"].bias.register_hook(lambda gradient: gradient * factor)
        model(x).sum().backward()

    assert_raised(outcome(backward), "UsageError", "experts.mine.bias has NaN", [size - 1])


def test_experts_that_differ_are_named_on_all_ranks(rank, size):
    if size < 3:
        pytest.skip("in a group of all ranks the module itself differs")
    both = dist.new_group([0, size - 1])
    module = nn.Sequential(nn.Linear(2, 2))
    if both.is_member():
        module.append(nn.Linear(2, 2 + rank))
        for p in module[1].parameters():
            p.hpcdist_group = both
    told = outcome(lambda: dist.DataParallel(module))
    words = [f"in the group of ranks [0, {size - 1}]", "'1.weight' of shape"]
    assert_raised(told, "MismatchError", words)
    dist.destroy_process_group(both)


def test_what_cannot_be_done_is_refused(number, group, size):
    if size == 1:
        pytest.skip("one rank has no other group")
    module = Mixture(number, group)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with pytest.raises(dist.UsageError, match="use DataParallel"):
        dist.group_sharded_parallel(module, optimizer, "os")
    model = dist.DataParallel(module)
    with pytest.raises(dist.UsageError, match="cannot be averaged in join"), model.join():
        pass
    module = Mixture(number, "experts")
    with pytest.raises(dist.UsageError, match=r"parameter 'experts\.mine\.weight' is 'exp"):
        dist.DataParallel(module)


def test_torch_has_a_new_world_where_hpcdist_has_one(world_with):
    """Whoever ends hpcdist and starts it again trains a new model as if it were the first."""
    hpcdist.torch.init()
    world_with()
    model = dist.DataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    mean = (dist.get_world_size() + 1) / 2
    assert next(model.parameters()).grad.tolist() == [[mean, mean]]


def test_arrays_of_a_new_world_are_not_sent_through_groups_of_the_old_one(world_with, size):
    """Torch remembers what operations return by mesh, and takes meshes of equal ranks for one."""
    from torch.distributed import tensor as dtensor

    def are_sent_over(mesh):
        parts = dtensor.distribute_tensor(torch.ones(size), mesh, [dtensor.Shard(0)])
        return parts.detach().full_tensor().tolist() == [1.0] * size

    hpcdist.torch.init()
    group = c10d.new_group([*range(size)], use_local_synchronization=True)
    assert are_sent_over(c10d.DeviceMesh.from_group(group, "cpu"))
    c10d.destroy_process_group()
    world_with()
    hpcdist.torch.init()
    assert are_sent_over(c10d.init_device_mesh("cpu", (size,)))
