"""DataParallel on torch modules: exact, and clear about what is wrong."""

import copy
import gc
import math
import pickle
import warnings
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.errors import notes_of

torch = pytest.importorskip("torch", minversion="2.11")

from torch import nn  # noqa: E402

import hpcdist.torch  # noqa: E402
from hpcdist.torch import SyncBatchNorm  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*find_unused_parameters:UserWarning"),
    pytest.mark.usefixtures("and_the_world_goes_on"),
]


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed():
    torch.set_num_threads(1)
    torch.manual_seed(7)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Branches(nn.Module):
    """A stem and branches, of which a call uses some."""

    def __init__(self, branches=3):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 2) for _ in range(branches))

    def forward(self, x, used):
        stem = self.stem(x)
        return sum(self.branches[index](stem).square().sum() for index in used)


def batch(step, rows=12):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def mean_loss(model, x, y):
    return (model(x) - y).square().mean()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
}


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def everywhere(value):
    told = []
    dist.all_gather_object(told, value)
    return told


# ---- the same as one process on the whole batch


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process_on_the_whole_batch(name, rank, size):
    alone = network().double()
    model = dist.DataParallel(network().double())
    model.load_state_dict(alone.state_dict())
    ours, theirs = (OPTIMIZERS[name](each.parameters()) for each in (model, alone))
    for step in range(5):
        x, y = (part.double() for part in batch(step))
        ours.zero_grad()
        mean_loss(model, x[rank::size], y[rank::size]).backward()
        ours.step()
        theirs.zero_grad()
        mean_loss(alone, x, y).backward()
        theirs.step()
    tolerance = 1e-9 if size in (1, 2, 3, 4) else 1e-6
    torch.testing.assert_close(weights(model), weights(alone), rtol=tolerance, atol=1e-12)


# What is trained in each step: modules of `network` by number.
TURNS = [(4,), (4,), (2, 4), (0, 2, 4), (0,), (), (0,), (0, 4), (0, 2, 4)]


@pytest.mark.parametrize("unused", [False, True])
def test_what_is_trained_may_change_between_steps(unused, rank, size):
    alone = network().double()
    held = network().double()
    held.load_state_dict(alone.state_dict())
    model = None
    for step, turn in enumerate(TURNS):
        for module in (held, alone):
            for index in (0, 2, 4):
                module[index].requires_grad_(index in turn)
        model = model or dist.DataParallel(held, find_unused_parameters=unused)
        x, y = (part.double() for part in batch(step))
        for trained, mine in ((model, slice(rank, None, size)), (alone, slice(None))):
            trained.zero_grad()
            mean_loss(trained, x[mine].requires_grad_(), y[mine]).backward()
            with torch.no_grad():
                for each in trained.parameters():
                    if each.grad is not None:
                        each -= 0.1 * each.grad
        torch.testing.assert_close(weights(held), weights(alone), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_are_averaged_also_where_the_dtype_changes_later(dtype, rank, size):
    model = dist.DataParallel(nn.Linear(2, 1))
    for each in (torch.float32, dtype):
        model.to(each).zero_grad()
        model(torch.full((1, 2), rank + 1, dtype=each)).sum().backward()
        assert model.weight.grad.tolist() == [[(size + 1) / 2] * 2]


def test_layers_that_come_later_are_trained_from_the_weights_of_the_first_rank(rank, size):
    model = dist.DataParallel(network())
    mean_loss(model, *batch(0)).backward()
    torch.manual_seed(rank)
    model.module[4] = nn.Linear(8, 3)
    mean_loss(model, *(part[rank::size] for part in batch(1))).backward()
    told = everywhere([weights(model).tolist(), model.module[4].weight.grad.tolist()])
    assert all(each == told[0] for each in told)


@pytest.mark.parametrize("compress", [None, "int8"])
def test_a_copy_of_a_model_trains_apart_from_it(compress, rank, size):
    model = dist.DataParallel(network(), compress=compress)
    mean_loss(model, *batch(rank)).backward()
    twin = copy.deepcopy(model)
    assert torch.equal(weights(twin), weights(model))
    for each, step in ((model, 1), (twin, 2)):
        each.zero_grad()
        mean_loss(each, *batch(step + rank)).backward()
        told = everywhere(torch.cat([p.grad.reshape(-1) for p in each.parameters()]).tolist())
        assert all(grads == told[0] for grads in told)
    grads = zip(model.parameters(), twin.parameters(), strict=True)
    assert not any(torch.equal(ours.grad, theirs.grad) for ours, theirs in grads)


def test_an_average_of_the_weights_over_the_steps_is_kept(rank):
    model = dist.DataParallel(network())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for step in range(3):
        optimizer.zero_grad()
        mean_loss(model, *batch(step + rank)).backward()
        optimizer.step()
        averaged.update_parameters(model)
        seen.append(weights(model))
    torch.testing.assert_close(weights(averaged), torch.stack(seen).mean(0))
    with torch.no_grad():
        assert averaged(batch(0)[0]).shape == (12, 3)


def test_who_saves_a_whole_model_is_told_what_to_save(tmp_path):
    model = dist.DataParallel(network())
    for save in (pickle.dumps, lambda each: torch.save(each, tmp_path / "model")):
        with pytest.raises(dist.UsageError, match=r"save model.state_dict\(\), or model.module"):
            save(model)
        save(model.module)


def test_ranks_that_train_other_layers_from_some_step_on_all_hear_of_it(rank, size):
    if size == 1:
        pytest.skip("one rank differs from nobody")
    model = dist.DataParallel(network())
    mean_loss(model, *batch(0)).backward()
    model.module[0].requires_grad_(rank < size - 1)
    with pytest.raises(dist.MismatchError):
        mean_loss(model, *batch(1)).backward()
    model.module[0].requires_grad_(True)
    model.zero_grad()
    mean_loss(model, *batch(2)).backward()
    told = everywhere(model.module[0].weight.grad.numpy().tobytes())
    assert len(set(told)) == 1


def test_nan_is_told_once_by_the_rank_on_which_it_begins(rank, size, caplog):
    model = dist.DataParallel(network())
    for step in range(4):
        factor = math.nan if (rank, step) == (size - 1, 1) else 1.0
        model.zero_grad()
        (factor * mean_loss(model, *batch(step))).backward()
        with torch.no_grad():
            for each in model.parameters():
                each -= 0.1 * each.grad
    told = [each.getMessage() for each in caplog.records if "has NaN" in each.getMessage()]
    assert len(told) == (rank == size - 1 > 0)
    for each in told:
        assert f"rank {rank}: " in each
        assert "0.weight" in each
    assert size == 1 or weights(model).isnan().all()


def test_a_scaler_of_ours_steps_an_optimizer_of_torch(rank, size):
    model = dist.DataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = dist.GradScaler(init_loss_scaling=8.0)
    alone = network()
    alone.load_state_dict(model.state_dict())
    x, y = batch(0)
    mean_loss(alone, x, y).backward()
    with torch.no_grad():
        for each in alone.parameters():
            each -= 0.1 * each.grad
    scaler.scale(mean_loss(model, x[rank::size], y[rank::size])).backward()
    assert scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(weights(model), weights(alone))
    optimizer.zero_grad()
    scaler.scale(mean_loss(model, x, y) * (math.inf if rank == size - 1 else 1.0)).backward()
    assert not scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    torch.testing.assert_close(weights(model), weights(alone))
    with pytest.raises(dist.UsageError, match=r"optimizer of hpcdist\.optim or torch\.optim"):
        scaler.step(object())


def test_ranks_keep_the_same_bits(rank, size):
    model = dist.DataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step * size + rank)
        mean_loss(model, x, y).backward()
        optimizer.step()
    told = everywhere(weights(model).numpy().tobytes())
    assert len(set(told)) == 1


def test_gradients_accumulated_under_no_sync_are_averaged_with_the_next(rank, size):
    model, alone = dist.DataParallel(network()), network()
    alone.load_state_dict(model.state_dict())
    for step in range(3):
        x, y = batch(step)
        with model.no_sync() if step < 2 else nullcontext():
            mean_loss(model, x[rank::size], y[rank::size]).backward()
        mean_loss(alone, x, y).backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_the_forward_decides_whether_gradients_are_averaged(inside, rank, size):
    model = dist.DataParallel(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), rank + 1.0)
    with model.no_sync() if inside == "forward" else nullcontext():
        loss = model(x).sum()
    with model.no_sync() if inside == "backward" else nullcontext():
        loss.backward()
    mean = (size + 1) / 2
    assert model.weight.grad.item() == (rank + 1 if inside == "forward" else mean)


def test_uneven_numbers_of_batches_are_fine_with_join(rank, size):
    model = dist.DataParallel(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    start = model.weight.item()
    with model.join():
        for _ in range(rank + 1):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    expected = start - sum((size - step) / size for step in range(size))
    assert everywhere(model.weight.item()) == pytest.approx([expected] * size)


def test_join_can_divide_by_the_ranks_that_are_left(rank, size):
    model = dist.DataParallel(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    start = model.weight.item()
    with model.join(divide_by_initial_world_size=False):
        for _ in range(rank + 1):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    assert everywhere(model.weight.item()) == pytest.approx([start - size] * size)


@pytest.mark.parametrize("after", ["the loader", "the forward pass"])
@pytest.mark.parametrize("steps", [1, 5], ids=["have ended their loops", "train on"])
def test_who_leaves_join_with_an_error_is_named_by_the_others(after, steps, rank, size):
    model = dist.DataParallel(nn.Linear(2, 1))
    last = rank == size - 1

    def train():
        with model.join():
            for step in range(3 if last else steps):
                if step < 2 or not last or after == "the forward pass":
                    loss = model(torch.ones(1, 2)).sum()
                if step == 2 and last:
                    raise KeyError("a sample")
                loss.backward()

    with pytest.raises(KeyError if last else dist.RemoteError) as caught:
        train()
    if not last:
        assert f"rank {size - 1}: left the join of its model with KeyError" in str(caught.value)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert everywhere(model.module.weight.grad.tolist()) == [[[1.0, 1.0]]] * size


@pytest.mark.parametrize("kind", [KeyError, dist.UsageError])
def test_who_leaves_join_before_steps_that_stay_on_a_rank_is_named_by_the_others(kind, rank, size):
    model = dist.DataParallel(nn.Linear(2, 1))

    def train():
        with model.join():
            for step in range(4 + rank):
                if step == 1 and rank == 0:
                    raise kind("a sample")
                with nullcontext() if step % 3 == 0 else model.no_sync():
                    model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(dist.RemoteError if rank else kind) as caught:
        train()
    assert "a sample" in str(caught.value)
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert everywhere(model.module.weight.grad.tolist()) == [[[1.0, 1.0]]] * size


def test_a_step_that_fails_in_join_may_be_left_out(rank, size):
    model = dist.DataParallel(nn.Linear(2, 1), check_nan=True)
    failed = 0
    with model.join():
        for step in range(2 + rank):
            factor = math.nan if step == 1 and rank == 0 else 1.0
            try:
                (factor * model(torch.ones(1, 2)).sum()).backward()
            except (dist.UsageError, dist.RemoteError):
                failed += 1
            model.zero_grad()
    assert failed == 1
    model(torch.ones(1, 2)).sum().backward()
    assert everywhere(model.module.weight.grad.tolist()) == [[[1.0, 1.0]]] * size


def test_who_has_left_its_loop_in_join_hears_of_a_gradient_that_is_not_a_number(rank, size):
    model = dist.DataParallel(nn.Linear(2, 1), check_nan=True)
    last = rank == size - 1

    def train():
        with model.join():
            for step in range(1 + 2 * last):
                factor = math.nan if step == 2 else 1.0
                (factor * model(torch.ones(1, 2)).sum()).backward()

    with pytest.raises(dist.UsageError if last else dist.RemoteError, match="has NaN"):
        train()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    assert everywhere(model.module.weight.grad.tolist()) == [[[1.0, 1.0]]] * size


# ---- a rank fails by itself, in the middle of a step


class _Fails(torch.autograd.Function):
    """The identity, whose backward fails when it is told to."""

    now = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        if _Fails.now:
            raise KeyError("in the backward pass")
        return slope


class Chain(nn.Module):
    """Layers of a bucket each, with a place to fail before the first bucket or after some."""

    def __init__(self, where):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.where = where

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = _Fails.apply(x) if (self.where, index) in IN_CHAIN else x
            x = torch.tanh(layer(x))
        return _Fails.apply(x) if self.where == "before all buckets" else x


IN_CHAIN = {("after a bucket", 2), ("after two buckets", 1), ("after all buckets", 0)}


def chain(where, **options):
    """Return a model, and one for one process."""
    alone, held = Chain(where).double(), Chain(where).double()
    held.load_state_dict(alone.state_dict())
    return dist.DataParallel(held, comm_buffer_size=2e-4, **options), alone


def steps_equal_one_process(model, alone, steps, rank, size):
    for step in steps:
        x = [batch(step * size + each, 3)[0].double() for each in range(size)]
        model.zero_grad()
        alone.zero_grad()
        model(x[rank].requires_grad_()).square().sum().backward()
        (sum(alone(each).square().sum() for each in x) / size).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("where", ["before all buckets", "after a bucket", "after two buckets"])
@pytest.mark.parametrize("unused", [False, True])
def test_a_backward_pass_that_raises_on_one_rank_fails_on_all(
    unused, where, steps_before, overlap, rank, size, monkeypatch
):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    model, alone = chain(where, find_unused_parameters=unused)
    steps_equal_one_process(model, alone, range(steps_before), rank, size)
    last = rank == size - 1
    for again in range(2):
        monkeypatch.setattr(_Fails, "now", last)
        loss = model(batch(rank, 3)[0].double()).square().sum()
        with pytest.raises(KeyError if last else dist.RemoteError) as caught:
            loss.backward()
        monkeypatch.setattr(_Fails, "now", False)
        if not last:
            words = f"rank {size - 1}: an exception has ended its last backward pass"
            assert words in str(caught.value)
        steps_equal_one_process(model, alone, range(again + 4, again + 6), rank, size)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_rank_that_raises_after_its_buckets_have_gone_keeps_nobody_waiting(
    steps_before, rank, size, monkeypatch
):
    model, alone = chain("after all buckets")
    steps_equal_one_process(model, alone, range(steps_before), rank, size)
    last = rank == size - 1
    monkeypatch.setattr(_Fails, "now", last)
    x = batch(rank, 3)[0].double().requires_grad_()
    # Before the buckets are arranged there is an operation to call off, later there is none.
    kind = KeyError if last else dist.RemoteError
    with nullcontext() if steps_before and not last else pytest.raises(kind):
        model(x).square().sum().backward()
    monkeypatch.setattr(_Fails, "now", False)
    steps_equal_one_process(model, alone, range(4, 6), rank, size)


def test_who_fails_in_a_backward_pass_cannot_go_through_it_again(rank, size, monkeypatch):
    model, alone = chain("after a bucket")
    last = rank == size - 1
    monkeypatch.setattr(_Fails, "now", last)
    loss = model(batch(rank, 3)[0].double()).square().sum()
    with pytest.raises(KeyError if last else dist.RemoteError):
        loss.backward(retain_graph=True)
    monkeypatch.setattr(_Fails, "now", False)
    if last:
        with pytest.raises(dist.UsageError, match="call the model again"):
            loss.backward()
    steps_equal_one_process(model, alone, range(4, 6), rank, size)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
@pytest.mark.parametrize("where", ["the loader", "the forward pass", "the backward pass"])
@pytest.mark.parametrize("unused", [False, True])
def test_after_a_failure_told_by_together_training_goes_on(
    unused, where, steps_before, rank, size, monkeypatch
):
    model, alone = chain("after a bucket", find_unused_parameters=unused)
    steps_equal_one_process(model, alone, range(steps_before), rank, size)
    last = rank == size - 1

    def step():
        with dist.together(model.process_group.group):
            if last and where == "the loader":
                raise KeyError("a sample")
            loss = model(batch(rank, 3)[0].double()).square().sum()
            if last and where == "the forward pass":
                raise KeyError("a sample")
            monkeypatch.setattr(_Fails, "now", last)
            loss.backward()

    with pytest.raises(KeyError if last else dist.RemoteError):
        step()
    monkeypatch.setattr(_Fails, "now", False)
    steps_equal_one_process(model, alone, range(4, 7), rank, size)


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("where", ["the forward pass", "the backward pass"])
@pytest.mark.parametrize("unused", [False, True])
def test_who_leaves_join_in_a_step_calls_off_all_its_buckets(
    unused, where, steps_before, counts, rank, size, monkeypatch
):
    model, alone = chain("after a bucket", find_unused_parameters=unused)
    last = rank == size - 1

    def train():
        with model.join(divide_by_initial_world_size=not counts):
            for step in range(steps_before + (rank > 0 or size == 1)):
                loss = model(batch(rank, 3)[0].double()).square().sum()
                if step == steps_before and last and where == "the forward pass":
                    raise KeyError("a sample")
                monkeypatch.setattr(_Fails, "now", step == steps_before and last)
                loss.backward()

    with pytest.raises(KeyError if last else dist.RemoteError):
        train()
    monkeypatch.setattr(_Fails, "now", False)
    steps_equal_one_process(model, alone, range(4, 7), rank, size)


def fails_in_the_middle(model, loss, here):
    with dist.together(model.process_group.group):
        if here:
            raise KeyError("a sample")
        loss.backward()


def test_sparse_gradients_are_averaged_after_a_failure(rank, size):
    model = dist.DataParallel(nn.Embedding(size + 2, 3, sparse=True))
    last = rank == size - 1
    for step in range(4):
        model.zero_grad()
        loss = model(torch.tensor([rank, size])).sum()
        if step % 2 == 0:
            loss.backward()
            expected = torch.full((size + 2, 3), 1 / size)
            expected[size], expected[size + 1] = 1, 0
            torch.testing.assert_close(model.weight.grad.to_dense(), expected)
            continue
        with pytest.raises(KeyError if last else dist.RemoteError):
            fails_in_the_middle(model, loss, last)


# ---- parameters that are not used


@pytest.mark.parametrize(
    "steps",
    [
        lambda rank: [[0], [0], [0]],
        lambda rank: [[0, 1] if rank == 0 else [0], [0, 2]],
        lambda rank: [[step % 3] for step in range(4)],
        lambda rank: [[(rank + step) % 3] for step in range(4)],
    ],
    ids=["on all ranks", "on some ranks", "changing per step", "changing per rank and step"],
)
def test_unused_parameters_contribute_zeros(steps, rank, size):
    model = dist.DataParallel(Branches(), find_unused_parameters=True)
    alone = Branches()
    alone.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone))
    x = torch.arange(4.0).view(1, 4) / 4
    for step in range(len(steps(0))):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        model(x + rank, steps(rank)[step]).backward()
        (sum(alone(x + each, steps(each)[step]) for each in range(size)) / size).backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
        ours.step()
        theirs.step()
    torch.testing.assert_close(weights(model), weights(alone))


def test_what_passes_in_no_sync_have_used_counts_when_less_is_trained_from_then_on(rank, size):
    model = dist.DataParallel(Branches(), find_unused_parameters=True)
    x = torch.ones(1, 4)
    for step in range(3):
        model.module.stem.requires_grad_(step == 0)
        with model.no_sync():
            model(x, [0, 1] if rank == 0 else [0]).backward()
        own = model.module.branches[1].weight.grad
        of_first = torch.zeros(2, 4) if own is None else own.clone()
        dist.broadcast(of_first, 0)
        model(x, [0]).backward()
        torch.testing.assert_close(model.module.branches[1].weight.grad, of_first / size)
        assert model.module.branches[2].weight.grad is None
        model.zero_grad()


@pytest.mark.parametrize("unused", [False, True])
def test_what_passes_in_no_sync_have_left_is_averaged_though_it_is_frozen(unused, rank, size):
    model = dist.DataParallel(network(), find_unused_parameters=unused)
    frozen = model.module[0].weight
    with model.no_sync():
        mean_loss(model, *batch(rank)).backward()
    expected = frozen.grad / size
    dist.all_reduce(expected)
    frozen.requires_grad_(False)
    mean_loss(model, *batch(rank)).backward()
    torch.testing.assert_close(frozen.grad, expected)
    assert len(set(everywhere(frozen.grad.sum().item()))) == 1


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("who", ["one", "all"])
def test_a_call_without_a_backward_pass_changes_nothing_in_no_sync(unused, who, rank, size):
    model = dist.DataParallel(nn.Linear(1, 1, bias=False), find_unused_parameters=unused)
    x, mean = torch.ones(1, 1), (size + 1) / 2
    for _ in range(3):
        for _ in range(2):
            if rank == 0 or who == "all":  # evaluates, and has gradients on
                model.eval()
                model(x)
                model.train()
            with model.no_sync():
                model(x * (rank + 1)).sum().backward()
        assert model.weight.grad.item() == 2 * (rank + 1)
        model(x * 10 * (rank + 1)).sum().backward()
        assert model.weight.grad.item() == 12 * mean
        model.zero_grad()


def test_a_backward_pass_of_a_forward_before_one_in_no_sync_is_an_error(rank, size):
    model = dist.DataParallel(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), rank + 1.0)
    loss = model(x).sum()
    with model.no_sync():
        model(x).sum().backward()
    with pytest.raises(dist.UsageError, match="in `no_sync` came between"):
        loss.backward()
    model.zero_grad()
    model(x).sum().backward()
    assert model.weight.grad.item() == (size + 1) / 2


@pytest.mark.parametrize("overlap", ["never", "always"])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_an_unused_parameter_is_an_error_that_names_it(
    overlap, steps_before, rank, size, monkeypatch
):
    monkeypatch.setenv("HPCDIST_OVERLAP", overlap)
    model = dist.DataParallel(Branches(), comm_buffer_size=0)
    x = torch.ones(1, 4)
    for _ in range(steps_before):
        model(x, [0, 1, 2]).backward()
    for _ in range(2):
        with pytest.raises(dist.HpcdistError, match=r"branches\.1\.weight, branches\.1\.bias") as e:
            model(x, [0, 1, 2] if rank else [0, 2]).backward()
        assert isinstance(e.value, dist.UsageError if rank == 0 else dist.RemoteError)
        model.zero_grad()
    model(x, [0, 1, 2]).backward()
    assert (
        everywhere(model.stem.weight.grad.sum().item()).count(model.stem.weight.grad.sum().item())
        == size
    )


# ---- what a model is told


def test_a_second_backward_through_one_forward_is_an_error():
    model = dist.DataParallel(nn.Linear(2, 1))
    loss = model(torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(dist.UsageError, match="second backward pass"):
        loss.backward()
    model(torch.ones(1, 2)).sum().backward()


def test_gradients_with_respect_to_the_input_are_no_backward_pass(rank, size):
    model = dist.DataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (model(x).sum() + slope.square().sum()).backward()
    expected = (size + 1) / 2 + 2 * model.weight.detach()
    torch.testing.assert_close(model.weight.grad, expected.view(1, 2))


def test_the_input_may_have_gradients_before_the_parameters_do(rank, size):
    model = dist.DataParallel(nn.Linear(2, 1, bias=False))
    x = torch.full((1, 2), rank + 1.0, requires_grad=True)
    output = model(x).sum()
    torch.autograd.grad(output, x, retain_graph=True)
    output.backward()
    assert model.weight.grad.tolist() == [[(size + 1) / 2] * 2]


def slopes(energy, x):
    """Return the slopes of an energy; if that is a model's output, the last bias has no part."""
    x = x.clone().requires_grad_()
    return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]


def forces(model, x):
    """Return slopes in which all parameters have a part."""
    return -slopes(lambda x: model(x).square().sum(1).sqrt(), x)


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_a_loss_of_forces_alone_is_averaged(unused, compress, rank, size):
    alone = network().double() if compress is None else network()
    model = dist.DataParallel(
        copy.deepcopy(alone), find_unused_parameters=unused, compress=compress
    )
    for step in range(4):
        x = batch(step)[0].to(alone[0].weight.dtype)
        for each, own in ((model, slice(rank, None, size)), (alone, slice(None))):
            each.zero_grad()
            forces(each, x[own]).square().mean().backward()
        largest = max(float(each.grad.abs().max()) for each in alone.parameters())
        close = largest * (1e-9 if compress is None else 0.05)
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            if 12 % size == 0:
                torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=close)


def test_a_loss_of_slopes_without_a_parameter_is_an_error_that_names_it():
    model = dist.DataParallel(network())
    for _ in range(3):
        with pytest.raises(dist.UsageError, match=r"no gradient for 4\.bias in"):
            slopes(model, batch(0)[0]).square().mean().backward()
        model.zero_grad()
    mean_loss(model, *batch(1)).backward()
    assert len(set(everywhere(model.module[0].weight.grad.sum().item()))) == 1


def test_a_parameter_without_part_in_a_loss_of_slopes_counts_as_zeros(rank, size):
    alone = network().double()
    model = dist.DataParallel(copy.deepcopy(alone), find_unused_parameters=True)
    for step in range(4):
        x = batch(step)[0].double()
        losses = [
            slopes(alone, x[each::size]).square().mean()
            + (mean_loss(alone, *(part.double() for part in batch(step))) if each == 0 else 0)
            for each in range(size)
        ]
        alone.zero_grad()
        (sum(losses) / size).backward()
        model.zero_grad()
        loss = slopes(model, x[rank::size]).square().mean()
        if rank == 0:  # the bias takes part on one rank
            loss = loss + mean_loss(model, *(part.double() for part in batch(step)))
        loss.backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_an_output_without_part_in_the_loss_counts_as_zeros(rank, size):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(2))

        def forward(self, x):
            return [head(x) for head in self.heads]

    model = dist.DataParallel(Heads(), find_unused_parameters=True)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(1, 2))[rank % 2].sum().backward()
        for which, head in enumerate(model.module.heads):
            share = len(range(which, size, 2)) / size
            wanted = torch.full((1, 2), share)
            torch.testing.assert_close(head.weight.grad if share else wanted, wanted)


@pytest.mark.parametrize("way", ["a method", "the module"])
def test_a_gradient_that_comes_from_no_call_of_the_model_is_told_of_once(way, size):
    class Net(nn.Linear):
        def loss(self, x):
            return self(x).square().mean()

    model = dist.DataParallel(Net(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    loss = model.loss if way == "a method" else lambda x: model.module(x).mean()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            loss(torch.ones(4, 2)).backward()
    assert [each.category for each in told] == [UserWarning] * (size > 1)
    assert all("comes from no call of the DataParallel model" in f"{each}" for each in told)
    assert all(each.filename == __file__ for each in told)


def test_a_gradient_that_comes_from_a_call_of_another_model_is_no_matter():
    shared = nn.Linear(2, 2)
    models = [dist.DataParallel(each) for each in (shared, nn.Sequential(shared, nn.Linear(2, 1)))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in models:
            model(torch.ones(1, 2)).sum().backward()


def test_a_model_that_nobody_has_any_more_goes():
    model = dist.DataParallel(nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_is_set_on_a_model_is_set_in_its_module():
    model = dist.DataParallel(nn.Linear(2, 1))
    model.bias = None
    assert model.module.bias is None
    with pytest.raises(dist.UsageError, match="the module of a wrapper stays"):
        model.module = nn.Linear(2, 1)


def apart(model, x):
    with model.no_sync():
        model(x).sum().backward()
        model.module(x).sum().backward()


def apart_until_the_backward(model, x):
    with model.no_sync():
        output = model(x)
    output.sum().backward()


def with_two_forwards(model, x):
    (model(x) + model(x) + model.module(x)).sum().backward()


def to_the_input(model, x):
    torch.autograd.grad(model.module(x).sum(), list(model.parameters()))


@pytest.mark.parametrize("step", [apart, apart_until_the_backward, with_two_forwards, to_the_input])
@pytest.mark.filterwarnings("error")
def test_gradients_that_may_stay_on_a_rank_are_nothing_to_warn_of(step):
    model = dist.DataParallel(nn.Linear(2, 1))
    for _ in range(2):
        step(model, torch.ones(1, 2))


@pytest.mark.parametrize("steps_before", [0, 1, 2])
def test_evaluating_on_one_rank_keeps_nobody_waiting(steps_before, rank):
    model = dist.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for _ in range(steps_before):
        model(torch.ones(3, 2)).sum().backward()
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(3, 2))
        model.eval()
        model(torch.ones(3, 2))
        model.train()


def test_two_forwards_and_one_backward(rank, size):
    model = dist.DataParallel(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), float(rank))
    (model(x).sum() + model(x + 1).sum()).backward()
    assert model.weight.grad.item() == pytest.approx(sum(2 * r + 1 for r in range(size)) / size)


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_gradient_of_nan_names_the_parameter_and_the_rank(where, rank, size):
    wrong = 0 if where == "first" else size - 1
    model = dist.DataParallel(network(), check_nan=True)
    x, y = batch(0)
    model.module[2].weight.register_hook(
        lambda grad: grad * float("nan") if rank == wrong else grad
    )
    with pytest.raises(dist.HpcdistError, match=rf"rank {wrong}: the gradient of 2.weight has NaN"):
        mean_loss(model, x, y).backward()


def test_a_parameter_or_layer_that_a_model_is_given_is_its_modules(rank, size):
    model = dist.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    model.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    setattr(model, "1", layer := nn.Linear(2, 1))
    assert model.module.scale is model.scale
    assert model.module[1] is layer
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    assert len({str(each) for each in everywhere(layer.weight.grad.tolist())}) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device_ids": [0]}, "leave it out"),
        ({"output_device": 0}, "leave it out"),
        ({"module": nn.Tanh()}, "first argument, layers"),
        ({"process_group": None}, "its argument group"),
    ],
)
def test_arguments_of_torch_are_told_from_ours(arguments, words):
    with pytest.raises(TypeError, match=rf"takes no {next(iter(arguments))}: .*{words}"):
        dist.DataParallel(nn.Linear(2, 1), **arguments)


def test_what_is_no_model_to_wrap_is_refused():
    with pytest.raises(dist.UsageError, match="data-parallel already"):
        dist.DataParallel(dist.DataParallel(nn.Linear(2, 1)))
    with pytest.raises(dist.UsageError, match="the class Linear; make an instance"):
        dist.DataParallel(nn.Linear)


def test_a_model_without_parameters_to_train_is_refused():
    with pytest.raises(dist.UsageError, match="does not have any parameters to train"):
        dist.DataParallel(nn.Tanh())
    with pytest.raises(dist.UsageError, match="does not have any parameters to train"):
        dist.DataParallel(nn.Linear(2, 2).requires_grad_(False))


def test_what_one_rank_cannot_do_is_refused_on_all(rank, size):
    model = nn.Linear(2, 2).requires_grad_(rank != size - 1)
    with pytest.raises(dist.HpcdistError, match=rf"rank {size - 1}: This model does not have any"):
        dist.DataParallel(model)
    with pytest.raises(dist.HpcdistError, match=rf"rank {size - 1}: comm_buffer_size must be"):
        dist.DataParallel(nn.Linear(2, 2), comm_buffer_size=-1 if rank == size - 1 else 25)


def test_lazy_parameters_are_refused():
    with pytest.raises(dist.UsageError, match=r"weight.* no shape yet"):
        dist.DataParallel(nn.LazyLinear(2))


def test_a_rank_outside_the_group_is_refused(rank):
    hpcdist.torch.init()
    group = dist.new_group([0])
    if rank == 0:
        model = dist.DataParallel(nn.Linear(2, 1), group=group)
        model(torch.ones(1, 2)).sum().backward()
    else:
        with pytest.raises(dist.UsageError, match=rf"rank {rank} is not in group"):
            dist.DataParallel(nn.Linear(2, 1), group=group)


def test_a_first_module_on_some_ranks_alone_says_that_all_begin_together(rank, size):
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if size == 1:
        return
    group = dist.new_group([0])
    act = dist.barrier if rank else lambda: dist.DataParallel(nn.Linear(2, 1), group=group)
    with pytest.raises(dist.MismatchError) as caught:
        act()
    if rank == 0:
        assert "call hpcdist.torch.init() on all ranks before" in notes_of(caught.value)[-1]


DIFFERENT = {
    "name": (nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)}), "b.we"),
    "shape": (nn.Linear(2, 2), nn.Linear(3, 2), r"\(2, 3\)"),
    "dtype": (nn.Linear(2, 2), nn.Linear(2, 2).double(), "float64"),
    "training": (nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), "not trained"),
    "order": (
        nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}),
        nn.ModuleDict([("b", nn.Linear(2, 2)), ("a", nn.Linear(2, 2))]),
        "'b.weight'",
    ),
    "buffer": (nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), "running_mean"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_models_that_differ_between_ranks_are_refused_on_all(what, rank, size):
    if size == 1:
        pytest.skip("one rank differs from nobody")
    one, other, words = DIFFERENT[what]
    one.extra, other.extra = nn.Linear(1, 1), nn.Linear(1, 1)
    with pytest.raises(dist.MismatchError, match=words):
        dist.DataParallel(other if rank == size - 1 else one)


# ---- states


def test_all_ranks_start_from_the_first(rank, size):
    torch.manual_seed(rank)
    model = dist.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    told = everywhere([tensor.numpy().tobytes() for tensor in model.state_dict().values()])
    assert all(each == told[0] for each in told)


def test_buffers_keep_in_step(rank, size):
    model = dist.DataParallel(nn.BatchNorm1d(2))
    for step in range(3):
        model(torch.randn(4, 2) + rank + step).sum().backward()
    model(torch.zeros(4, 2))
    first = everywhere(model.num_batches_tracked.item())
    assert first == [4] * size
    model(torch.zeros(4, 2)).sum().backward()
    model(torch.zeros(4, 2))
    means = everywhere(model.running_mean.tolist())
    assert all(each == pytest.approx(means[0]) for each in means)


def test_names_have_no_prefix_and_attributes_fall_through():
    inner = network()
    inner.motto = "festina lente"
    model = dist.DataParallel(inner)
    assert list(model.state_dict()) == list(inner.state_dict())
    assert [name for name, _ in model.named_parameters()] == list(inner.state_dict())
    assert len(list(model.parameters())) == len(list(inner.parameters()))
    assert model.motto == "festina lente"
    assert model.module is inner
    assert isinstance(model, nn.Module)
    assert isinstance(model, dist.DataParallel)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.no_such_thing


@pytest.mark.parametrize("name", ["load_state_dict", "set_state_dict", "set_dict", "load_dict"])
def test_states_are_loaded_under_every_name(name):
    model, other = dist.DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)
    getattr(model, name)(other.state_dict())
    assert torch.equal(model.weight, other.weight)


def test_the_checkpoint_tools_of_torch_see_plain_names():
    from torch.distributed.checkpoint import state_dict as tools

    model = dist.DataParallel(network())
    optimizer = torch.optim.Adam(model.parameters())
    mean_loss(model, *batch(0)).backward()
    optimizer.step()
    state, optimizer_state = tools.get_state_dict(model, optimizer)
    assert set(state) == set(model.state_dict())
    assert set(optimizer_state["state"]) == set(model.state_dict())


# ---- kinds of gradients


def test_sparse_embeddings_are_averaged(rank, size):
    model = dist.DataParallel(nn.Embedding(size + 2, 3, sparse=True))
    model(torch.tensor([rank, size])).sum().backward()
    expected = torch.full((size + 2, 3), 1 / size)
    expected[size], expected[size + 1] = 1, 0
    torch.testing.assert_close(model.weight.grad.to_dense(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_every_float_are_averaged(dtype, rank, size):
    model = dist.DataParallel(nn.Embedding(4, 3, dtype=dtype))
    model(torch.arange(4)).mul(rank + 1).sum().backward()
    assert model.weight.grad.tolist() == [[(size + 1) / 2] * 3] * 4


def test_gradients_are_held_once(size):
    model = dist.DataParallel(network())
    for step in range(3):
        mean_loss(model, *batch(step)).backward()
    storages = {
        p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes()
        for p in model.parameters()
    }
    assert sum(storages.values()) == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_hook_of_ones_own_averages_the_buckets(rank, size):
    seen = []

    def hook(state, bucket):
        seen.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer().fill_(state))
        return future

    model = dist.DataParallel(network())
    model.register_comm_hook(5.0, hook)
    mean_loss(model, *batch(rank)).backward()
    assert seen
    assert all(bool((p.grad == 5).all()) for p in model.parameters())
    with pytest.raises(dist.UsageError, match="already"):
        model.register_comm_hook(None, hook)


def test_power_sgd_learns(rank, size):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = dist.DataParallel(network())
    state = powerSGD_hook.PowerSGDState(model.process_group, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = mean_loss(model, *batch(0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(set(everywhere(weights(model).numpy().tobytes()))) == 1


def test_the_statistics_count_what_was_sent(size, monkeypatch):
    monkeypatch.setenv("HPCDIST_OVERLAP", "always")
    model = dist.DataParallel(network())
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    for step in range(4):
        mean_loss(model, *batch(step)).backward()
    stats = model.comm_stats()
    assert stats.backwards == 4
    assert stats.nbytes == (4 * nbytes if size > 1 else 0)
    assert (stats.comm_s > 0) == (size > 1)
    assert 0 <= stats.hidden <= 1


# ---- groups and batch normalization


def test_groups_train_apart(rank, size):
    half = [each for each in range(size) if each % 2 == rank % 2]
    model = dist.DataParallel(nn.Linear(1, 1, bias=False), group=dist.new_group(half))
    model(torch.full((1, 1), float(rank))).sum().backward()
    assert model.weight.grad.item() == pytest.approx(np.mean(half))


@pytest.mark.parametrize("dims", [0, 2])
def test_sync_batch_norm_is_batch_norm_of_the_whole_batch(dims, rank, size):
    rows = [each + 2 for each in range(size)]
    shape = (sum(rows), 3, *[4] * dims)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    slope = torch.randn(shape, generator=torch.Generator().manual_seed(2)).double()
    mine = slice(sum(rows[:rank]), sum(rows[: rank + 1]))
    kind = {0: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims]
    plain = kind(3).double()
    sync = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(kind(3).double()))[0]
    x, part = whole.clone().requires_grad_(), whole[mine].clone().requires_grad_()
    for _ in range(2):
        expected, found = plain(x), sync(part)
        torch.testing.assert_close(found, expected[mine])
    expected.backward(slope)
    found.backward(slope[mine])
    torch.testing.assert_close(part.grad, x.grad[mine])
    torch.testing.assert_close(sync.running_mean, plain.running_mean)
    torch.testing.assert_close(sync.running_var, plain.running_var)
    total = sync.weight.grad.clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, plain.weight.grad)
    torch.testing.assert_close(sync.eval()(part), plain.eval()(x)[mine])
