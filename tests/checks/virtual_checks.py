"""What holds for training on virtual ranks: the same bits on groups of 1, 2, 3 ... ranks."""

import copy
import random
import tempfile
import threading
from hashlib import sha256

import numpy as np
import pytest
import rich.style  # noqa: F401  # draws from Python's generator, which simulated ranks share
from checks import Checks, assert_raised, everyone, outcome

import hpcdist as dist

torch = pytest.importorskip("torch", minversion="2.11")

from torch import nn  # noqa: E402

check = Checks()

STEPS = 6
ROWS = 4
"""Samples of a virtual rank in a step."""
BUILDING = threading.Lock()
"""Simulated ranks share torch's generator: they build their networks one after the other."""


class Noisy(nn.Module):
    """Adds random numbers of Python and of NumPy."""

    def forward(self, x):
        return x + random.random() + float(np.random.standard_normal())


def mlp():
    return nn.Sequential(
        nn.Linear(12, 9), Noisy(), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 5, bias=False)
    )


def convolution():
    return nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)),
        nn.Conv2d(1, 4, 3, padding=1).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48, 5),
    )


NETWORKS = {"mlp": mlp, "convolution": convolution}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


class Samples(torch.utils.data.Dataset):
    """Random numbers, of which each sample has its own."""

    def __init__(self, length):
        self.x = torch.randn(length, 12, generator=torch.Generator().manual_seed(1))
        self.y = torch.randn(length, 5, generator=torch.Generator().manual_seed(2))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Training:
    """A model on virtual ranks, with all that it needs to go on, and what it has reported."""

    def __init__(self, group, count, network="mlp", optimizer="adamw", level=None, steps=STEPS):
        torch.set_num_threads(1)
        with BUILDING:
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            layers = NETWORKS[network]()
        self.model = dist.DataParallel(layers, group=group, virtual_ranks=count)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        if level is not None:
            self.model, self.optimizer, self.scaler = dist.group_sharded_parallel(
                self.model, self.optimizer, level, self.scaler
            )
        samples = Samples(ROWS * count * steps)
        self.sampler = dist.DistributedSampler(samples, seed=3, group=group, virtual_ranks=count)
        batch_size = ROWS * len(self.model.virtual_ranks)
        own = torch.Generator()  # a loader would draw from that which simulated ranks share
        self.loader = torch.utils.data.DataLoader(
            samples, batch_size, sampler=self.sampler, generator=own
        )
        self.reported = []

    def backward(self, batch, scale=lambda loss: loss):
        losses = []
        for part in self.model.parts(batch):
            loss = (self.model(part.inputs) - part.targets).square().mean()
            scale(loss).backward()
            losses.append(loss.detach())
        self.reported.append(self.model.mean_of_parts(losses))

    def step(self, batch):
        self.optimizer.zero_grad()
        self.backward(batch)
        self.reported.append(dist.clip_grad_norm_(self.model, 0.7))
        self.optimizer.step()

    def state(self):
        """Return what is needed to go on."""
        names = "model", "optimizer", "sampler", "reported"
        return {name: getattr(self, name) for name in names}

    def digest(self):
        found = sha256(np.array(self.reported).tobytes())
        for name, value in self.model.state_dict().items():
            found.update(name.encode() + value.numpy().tobytes())
        return found.hexdigest()[:16]


def plainly(training):
    for batch in training.loader:
        training.step(batch)


def scaled(training):
    """Train with a scaler that finds an overflow in a virtual rank's gradient, and goes on."""
    for number, batch in enumerate(training.loader):
        training.optimizer.zero_grad()
        factor = torch.inf if number == 2 else 1.0
        training.backward(batch, lambda loss, by=factor: training.scaler.scale(loss) * by)
        training.scaler.step(training.optimizer)
        training.scaler.update()
        training.reported.append(training.scaler.get_scale())


def accumulating(training):
    """Train with two batches a step, in the ways that there are."""
    for number, batch in enumerate(training.loader):
        if number % 4 == 0:
            with training.model.no_sync():
                training.backward(batch)
        else:
            training.backward(batch)
        if number % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()


def in_halves(training):
    """Train with two passes through the model for each virtual rank."""
    for batch in training.loader:
        for part in training.model.parts(batch):
            for rows in (slice(None, 2), slice(2, None)):
                training.model(part.inputs[rows]).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)


WAYS = {"plain": plainly, "scaled": scaled, "accumulating": accumulating, "in halves": in_halves}


def on_groups(run):
    """Return what `run` gives on groups of the first 1, 2, 3 ... ranks, in every rank's words."""
    found = []
    for size in range(1, dist.get_world_size() + 1):
        group = dist.new_group(range(size))
        found.append(run(group) if group.is_member() else None)
    told = [each for rank in everyone(found) for each in rank if each is not None]
    assert len(told) == sum(range(1, dist.get_world_size() + 1))
    return told


def assert_equal(told):
    assert all(each == told[0] for each in told), told


def trained(group, way, count, *what):
    training = Training(group, count, *what)
    WAYS[way](training)
    return training.digest()


def same_bits_of(way, *what):
    def function():
        size = dist.get_world_size()
        for count in (size, 2 * size - 1 if size > 1 else 4):
            assert_equal(on_groups(lambda group, count=count: trained(group, way, count, *what)))

    function.__name__ = "_".join([*way.split(), *what, "has_the_same_bits_on_any_number_of_ranks"])
    return function


OFTEN = {("mlp", "scaled"), ("convolution", "accumulating")}
for _network, _optimizer in (("mlp", "adamw"), ("convolution", "sgd")):
    for _way in WAYS:
        _marks = () if (_network, _way) in OFTEN else (pytest.mark.thorough,)
        check.needing(*_marks)(same_bits_of(_way, _network, _optimizer))


# ---- sharded optimizers and gradients

LEVELS = None, "os", "os_g"


def at_all_levels(way, network, optimizer):
    def function():
        told = []
        for level in LEVELS:
            what = dist.get_world_size() + 1, network, optimizer, level
            told += on_groups(lambda group, what=what: trained(group, way, *what))
        assert_equal(told)

    words = *way.split(), network, optimizer, "has_the_same_bits_at_all_levels_of_sharding"
    function.__name__ = "_".join(words)
    return function


for _way in WAYS:
    _marks = () if _way == "scaled" else (pytest.mark.thorough,)
    check.needing(*_marks)(at_all_levels(_way, "mlp", "adamw"))
    check.needing(pytest.mark.thorough)(at_all_levels(_way, "convolution", "sgd"))


def layers_of_one_size():
    """Return as many parameters as ranks, and twice that, all equally large."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(2 * dist.get_world_size())]
    return nn.Sequential(*layers)


def nbytes(tensors):
    return sum(each.nbytes for each in tensors if each.dim())


@check
def each_rank_keeps_its_share_of_what_is_sharded():
    size = dist.get_world_size()
    layers = layers_of_one_size()
    whole = nbytes(layers.parameters())
    for level, gradients in (("os", whole), ("os_g", whole // size)):
        model = dist.DataParallel(layers_of_one_size(), virtual_ranks=size + 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        model, optimizer, _ = dist.group_sharded_parallel(model, optimizer, level)
        for _ in model.parts():
            model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        states = optimizer.optim.state.values()
        assert nbytes(each for state in states for each in state.values()) == 2 * whole // size
        kept = [each.grad for each in model.parameters() if each.grad is not None]
        assert nbytes(kept) == gradients


@check
def a_sharded_checkpoint_goes_on_with_the_same_bits_on_any_number_of_ranks():
    size = dist.get_world_size()
    count = size + 1
    whole = on_groups(lambda group: trained(group, "plain", count))
    path = everyone(tempfile.mkdtemp())[0]
    for saves, level in (size, "os"), (size - 1 or 1, "os_g"):
        group = dist.new_group(range(saves))
        if group.is_member():
            halted(group, path, count, 2, "mlp", "adamw", level)
        dist.barrier()
        goes_on = on_groups(lambda group, at=level: resumed(group, path, count, "mlp", "adamw", at))
        assert_equal([*whole, *goes_on])


@check
def the_state_of_an_optimizer_goes_on_with_the_same_bits_at_all_levels_on_any_number_of_ranks():
    size = dist.get_world_size()
    count = size + 1
    whole = on_groups(lambda group: trained(group, "plain", count))

    def without_optimizer(training):
        return {name: each for name, each in training.state().items() if name != "optimizer"}

    def goes_on(group, level, path, state):
        training = Training(group, count, "mlp", "adamw", level)
        dist.checkpoint.load(without_optimizer(training), path, group)
        training.optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps what it is given
        plainly(training)
        return training.digest()

    for saves, before, after in (
        (size, "os_g", "os"),
        (size - 1 or 1, "os", None),
        (1, None, "os_g"),
    ):
        path, state = everyone(tempfile.mkdtemp())[0], None
        group = dist.new_group(range(saves))
        if group.is_member():
            training = trained_until(2, group, count, "mlp", "adamw", before)
            dist.checkpoint.save(without_optimizer(training), path, group)
            state = training.optimizer.state_dict()
        what = after, path, everyone(state)[0]
        assert_equal([*whole, *on_groups(lambda group, what=what: goes_on(group, *what))])


@check
def the_norm_of_gradients_that_are_on_their_owners_is_that_of_all_or_refused():
    group = dist.new_group(range(dist.get_world_size()))
    norms = []
    for level in LEVELS:
        training = Training(group, dist.get_world_size(), level=level)
        training.backward(next(iter(training.loader)))
        parameters = list(training.model.parameters())
        norms.append(dist.clip_grad_norm_(parameters, np.inf))
        if level == "os_g":
            for function in (nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_):
                with pytest.raises(dist.UsageError, match="call hpcdist"):
                    function(iter(parameters), np.inf)
            with pytest.raises(dist.UsageError, match="some of the param"):
                dist.clip_grad_norm_(parameters[:1], np.inf)
        else:
            assert nn.utils.clip_grad_norm_(parameters, np.inf) == pytest.approx(norms[-1])
    assert_equal(everyone(norms))
    assert norms[0] == norms[1] == norms[2]


@check
def a_parameter_that_the_sharded_optimizer_lacks_is_told_of():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    model = dist.DataParallel(layers, virtual_ranks=dist.get_world_size())
    optimizer = torch.optim.SGD(layers[1].parameters(), 0.1)
    model, _, _ = dist.group_sharded_parallel(model, optimizer, "os_g")
    layers[0].requires_grad_(True)
    refused(lambda: [*model.parts()], "a parameter is trained now that the sharded optimizer")


# ---- other ranks go on


def trained_until(at, group, count, *what):
    """Return a training that has done so many steps."""
    training = Training(group, count, *what)
    for number, batch in enumerate(training.loader, 1):
        training.step(batch)
        if number == at:
            return training
    raise AssertionError(f"there are no {at} steps")


def halted(group, path, count, at, *what):
    """Train until a step, and save what is needed to go on."""
    dist.checkpoint.save(trained_until(at, group, count, *what).state(), path, group)


def resumed(group, path, count, *what):
    """Load what was saved, and train to the end."""
    training = Training(group, count, *what)
    dist.checkpoint.load(training.state(), path, group)
    for batch in training.loader:
        training.step(batch)
    return training.digest()


@check
def a_checkpoint_goes_on_with_the_same_bits_on_any_number_of_ranks():
    size = dist.get_world_size()
    count = size + 1
    whole = on_groups(lambda group: trained(group, "plain", count, "mlp"))
    path = everyone(tempfile.mkdtemp())[0]
    for saves in {1, size - 1 or 1, size}:
        group = dist.new_group(range(saves))
        if group.is_member():
            halted(group, path, count, 2, "mlp")
        dist.barrier()
        goes_on = on_groups(lambda group: resumed(group, path, count, "mlp"))
        assert_equal([*whole, *goes_on])


@check
def a_memory_goes_back_to_what_was_committed():
    count = dist.get_world_size() + 1
    training = Training(dist.new_group(range(dist.get_world_size())), count)
    memory = dist.Memory(state=training.state())
    found = []
    for _ in range(2):
        if found:
            assert memory.restore() == 1
            dist.barrier()  # simulated ranks share the generators, which all ranks set
            training.reported.clear()
        else:
            memory.commit(1)
        for batch in training.loader:
            training.step(batch)
        found.append(training.digest())
    assert_equal(found)


@check
def a_checkpoint_of_other_virtual_ranks_is_refused():
    size = dist.get_world_size()
    path = everyone(tempfile.mkdtemp())[0]
    group = dist.new_group(range(size))
    halted(group, path, size, 1, "mlp")
    refused(lambda: resumed(group, path, size + 1, "mlp"), "virtual_ranks", "CheckpointError")


@check
def gradients_that_wait_are_not_saved():
    model = dist.DataParallel(nn.Linear(1, 1), virtual_ranks=dist.get_world_size())
    with model.no_sync():
        for _ in model.parts():
            model(torch.ones(1, 1)).sum().backward()
    path = everyone(tempfile.mkdtemp())[0]
    refused(lambda: dist.checkpoint.save({"model": model}, path), "no_sync wait to be averaged")


# ---- what the numbers are


@check
def a_gradient_is_the_mean_over_virtual_ranks():
    size = dist.get_world_size()
    count = size + 1
    model = dist.DataParallel(nn.Linear(2, 1, bias=False).double(), virtual_ranks=count)
    for part in model.parts():
        (model(torch.ones(1, 2, dtype=torch.float64)) * (part.rank + 1)).sum().backward()
    np.testing.assert_allclose(model.weight.grad, (count + 1) / 2, rtol=1e-15)
    seen = [rank for own in everyone([*model.virtual_ranks]) for rank in own]
    assert seen == [*range(count)]


@check
def a_batch_is_dealt_to_the_virtual_ranks_that_live_here():
    size = dist.get_world_size()
    count, rows = 2 * size + 1, 3
    sampler = dist.DistributedSampler(count * rows, shuffle=False, virtual_ranks=count)
    model = dist.DataParallel(nn.Linear(1, 1), virtual_ranks=count)
    (batch,) = sampler.batches(rows * len(model.virtual_ranks))
    dealt = {}
    for part in model.parts({"x": torch.from_numpy(batch), "y": (batch, None, 2)}):
        dealt[part.rank] = part.batch["x"].tolist()
        assert part.batch["y"][0].tolist() == dealt[part.rank]
        assert part.batch["y"][1:] == (None, 2)
        model(torch.ones(1, 1)).sum().backward()
    found = {rank: each for own in everyone(dealt) for rank, each in own.items()}
    assert found == {rank: [rank, rank + count, rank + 2 * count] for rank in range(count)}


@check
def a_sampler_goes_on_with_virtual_ranks_where_it_was():
    size = dist.get_world_size()
    count = 2 * size + 1
    sampler = dist.DistributedSampler(count * 4, seed=1, virtual_ranks=count)
    batches = sampler.batches(len(sampler.virtual_ranks))
    before, state = next(batches), sampler.state_dict()
    after = dist.DistributedSampler(count * 4, seed=1)
    after.load_state_dict(state)
    samples = [each for own in everyone([*before, *after]) for each in own]
    assert {*samples} == {*range(count * 4)}


@check
def the_process_keeps_random_numbers_of_its_own():
    model = dist.DataParallel(nn.Linear(1, 1), virtual_ranks=dist.get_world_size() + 1)
    with BUILDING:
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        # simulated ranks share the process, and each other's would be between
        for _ in model.parts() if dist.get_world_size() == 1 else ():
            random.random(), np.random.random(), torch.rand(1)
            model(torch.ones(1, 1)).sum().backward()
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tolist() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])


@check
def evaluation_needs_no_parts():
    model = dist.DataParallel(nn.Linear(1, 1), virtual_ranks=dist.get_world_size())
    with torch.no_grad():
        model(torch.ones(1, 1))
    model.eval()
    model(torch.ones(1, 1))


@check
def a_frozen_parameter_has_no_gradient():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = dist.DataParallel(layers, virtual_ranks=dist.get_world_size() + 1)
    for frozen in (False, True, False):
        layers[0].requires_grad_(not frozen)
        for _ in model.parts():
            model(torch.ones(1, 2)).sum().backward()
        assert (layers[0].weight.grad is None) == frozen
        for each in layers.parameters():
            each.grad = None


# ---- what is refused


def refused(make, words, kind="UsageError"):
    """Every rank refuses, with these words."""
    assert_raised(outcome(make), kind, words)


@check
def what_cannot_be_promised_is_refused_before_anything_is_sent():
    size = dist.get_world_size()
    line = nn.Linear(1, 1)

    def model(layers=line, count=size, **options):
        return dist.DataParallel(layers, virtual_ranks=count, **options)

    refused(lambda: model(count=2.0), "virtual_ranks must be an integer")
    refused(lambda: model(count=0), "virtual_ranks must be an integer of at least 1")
    refused(lambda: model(count=True), "virtual_ranks must be an integer")
    if size > 1:
        refused(lambda: model(count=size - 1), f"less than the {size} ranks")
    refused(lambda: model(find_unused_parameters=True), "find_unused_parameters does not go")
    refused(lambda: model(nn.Sequential(line, nn.SyncBatchNorm(1))), "1 is a SyncBatchNorm")
    refused(lambda: model().register_comm_hook(None, None), "hook does not go with virtual_ranks")
    refused(lambda: model().join(), "join does not go with virtual_ranks")
    optimizer = torch.optim.SGD(line.parameters(), 1)
    for level, options, words in (
        ("p_g_os", {}, "level p_g_os does not go with virtual_ranks"),
        ("os", {"offload": True}, "offload does not go with virtual_ranks"),
        (
            "os",
            {"dp_group": dist.new_group(range(size))},
            "is sharded over all ranks that train it",
        ),
    ):
        refused(
            lambda at=level, how=options: dist.group_sharded_parallel(
                model(), optimizer, at, **how
            ),
            words,
        )
    refused(lambda: model()(torch.ones(1, 1)), "trains in `for part in model.parts(batch):`")
    refused(
        lambda: dist.DistributedSampler(9, tail="keep", virtual_ranks=size), "use 'pad' or 'drop'"
    )


@check
def ranks_with_other_numbers_of_virtual_ranks_are_told():
    if dist.get_world_size() > 1:
        count = dist.get_world_size() + dist.get_rank()
        told = outcome(lambda: dist.DataParallel(nn.Linear(1, 1), virtual_ranks=count))
        assert_raised(told, "MismatchError", "Give DataParallel the same virtual_ranks and seed")


@check
def a_rank_that_cannot_go_on_is_heard_of_on_all():
    size = dist.get_world_size()
    model = dist.DataParallel(nn.Linear(1, 1), virtual_ranks=2 * size)
    last = dist.get_rank() == size - 1

    def rows_that_cannot_be_dealt():
        for part in model.parts(torch.ones(3 if last else 4, 1)):
            model(part.batch).sum().backward()

    def no_backward():
        for _part in model.parts():
            if not last:
                model(torch.ones(1, 1)).sum().backward()

    def wrong_losses():
        model.mean_of_parts([1.0] * (3 if last else 2))

    for fails, words in (
        (rows_that_cannot_be_dealt, "cannot be dealt to 2 virtual ranks"),
        (no_backward, "has no gradient for weight, bias"),
        (wrong_losses, "but 3 values for them"),
    ):
        assert_raised(outcome(fails), "UsageError", words, [size - 1])
        assert model.weight.grad is None
