"""States of torch modules and optimizers on grids: what is saved on one is loaded on another."""

import pytest
from checks import ROUNDED

torch = pytest.importorskip("torch", minversion="2.11")

from torch import nn  # noqa: E402

import hpcdist as dist  # noqa: E402
from hpcdist.parallel import hybrid_options as asked  # noqa: E402
from hpcdist.parallel.hybrid import HybridCommunicateGroup  # noqa: E402
from hpcdist.parallel.topology import CommunicateTopology  # noqa: E402
from hpcdist.torch.hybrid import distribute_model, distribute_optimizer  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("and_the_world_goes_on"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
    pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning"),
]

AXES = ["dp", "sharding", "sep", "mp"]
WORDS, WIDTH, ROWS = 7, 4, 6


class Tied(nn.Module):
    """Guesses words: a weight with two names, buffers of both kinds, and a state of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.logits = nn.Linear(WIDTH, WORDS, bias=False)
        self.logits.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.note = "new"

    def forward(self, ids):
        return self.logits(torch.tanh(self.inner(self.words(ids))) * self.scale)

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def trainee(how, maker=torch.optim.Adam, dtype=torch.float64):
    """Return grid, model and optimizer; all ranks are along the axis `how` begins with."""
    axis, _, stage = how.partition("/")
    degrees = [dist.get_world_size() if axis == each else 1 for each in AXES]
    grid = HybridCommunicateGroup(CommunicateTopology(list(AXES), degrees))
    options = asked.HybridOptions(sharding=asked.Sharding(stage=int(stage or 1)))
    module = Tied().to(dtype)
    optimizer = maker(module.parameters(), 0.05)
    model = distribute_model(module, grid, options)
    return grid, model, distribute_optimizer(optimizer, grid, options)


def step(model, optimizer, turn):
    """Train on a batch that all ranks have."""
    ids = torch.randint(WORDS, (2, ROWS), generator=torch.Generator().manual_seed(turn))
    nn.functional.cross_entropy(model(ids[0]).double(), ids[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same(model, other, atol=ROUNDED):
    pairs = zip(model.named_parameters(), other.named_parameters(), strict=True)
    for (name, mine), (_, theirs) in pairs:
        torch.testing.assert_close(
            whole(mine), whole(theirs), rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


OTHERS = ["mp", "sep", "sharding/1", "sharding/2", "sharding/3"]
PAIRS = [*(("dp", each) for each in OTHERS), *((each, "dp") for each in OTHERS)]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_tied_weight_and_a_buffer_that_is_not_saved_fit_every_other_grid(before, after, folder):
    _, model, optimizer = trainee(before)
    step(model, optimizer, 0)
    with torch.no_grad():
        model.module.seen += 2
        model.module.scale += 1
    model.module.note = "trained"
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    _, other, again = trainee(after)
    dist.checkpoint.load({"model": other, "optimizer": again}, folder)
    assert other.module.note == "trained"
    torch.testing.assert_close(other.module.seen, torch.full((3,), 2.0).double())
    torch.testing.assert_close(other.module.scale, torch.ones(1).double())
    with torch.no_grad():
        other.module.scale += 1
    step(model, optimizer, 1)
    step(other, again, 1)
    assert_same(other, model)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["dp", *OTHERS])
def test_a_grid_is_brought_back_from_the_memories_of_all_ranks_but_one(how):
    _, model, optimizer = trainee(how)
    step(model, optimizer, 0)
    memory = dist.Memory(model, optimizer)
    memory.commit(1)
    _, other, again = trainee(how)
    brought = dist.Memory(other, again)
    if dist.get_rank() == 0 or dist.get_rank() < dist.get_world_size() - 1:
        brought._vault = memory._vault
    assert brought.restore() == 1
    assert_same(other, model, atol=0)
    step(model, optimizer, 1)
    step(other, again, 1)
    assert_same(other, model, atol=0)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("direction", ["to the shards", "from them"])
def test_states_of_sharded_models_have_the_names_of_the_others(level, direction, folder):
    plain, inner = dist.DataParallel(Tied()), Tied()
    adam = torch.optim.Adam(inner.parameters())
    models = [plain, dist.group_sharded_parallel(inner, adam, level)[0]]
    modules = [plain.module, inner]
    if direction == "from them":
        models.reverse(), modules.reverse()
    with torch.no_grad():
        for each in modules[0].parameters():
            each *= 2
        modules[0].seen += 2
    modules[0].note = "trained"
    dist.checkpoint.save({"model": models[0]}, folder)
    dist.checkpoint.load({"model": models[1]}, folder)
    assert modules[1].note == "trained"
    torch.testing.assert_close(modules[1].seen, torch.full((3,), 2.0))
    assert_same(models[0], models[1], atol=0)


def test_a_state_without_a_name_of_a_tied_weight_is_refused():
    _, model, _ = trainee("mp")
    state = model.state_dict()
    del state["logits.weight"]
    if hasattr(model, "load_sharded_state_dict"):
        with pytest.raises(dist.UsageError, match=r"the state has no 'logits\.weight'"):
            model.load_sharded_state_dict(state)
    with pytest.raises(RuntimeError, match=r"logits\.weight"):
        model.load_state_dict(state)


# ---- before the first step

MAKERS = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "SGD, dampened": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, dampening=0.5),
    "Adam": torch.optim.Adam,
    "NAdam": torch.optim.NAdam,
    "ASGD": lambda p, lr: torch.optim.ASGD(p, lr, t0=1),
    "Rprop": torch.optim.Rprop,
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr / 10, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("how", ["dp", "sharding/1", "sharding/3"])
def test_saving_before_the_first_step_changes_no_step(how, name, folder):
    if (name, how) == ("Rprop", "sharding/3"):
        pytest.skip("torch's Rprop cannot step DTensors")
    maker = MAKERS[name]
    _, model, optimizer = trainee(how, maker)
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    _, loaded, again = trainee(how, maker)
    dist.checkpoint.load({"model": loaded, "optimizer": again}, folder)
    plain = Tied().double()
    alone = maker(plain.parameters(), 0.05)
    for turn in range(3):
        for pair in ((model, optimizer), (loaded, again), (plain, alone)):
            step(*pair, turn)
    assert_same(model, plain)
    assert_same(loaded, plain)


@pytest.mark.parametrize("how", ["dp", "sharding/1"])
def test_momentum_that_was_saved_after_a_step_goes_on(how, folder):
    maker = MAKERS["SGD, dampened"]
    _, model, optimizer = trainee(how, maker)
    step(model, optimizer, 0)
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, folder)
    _, loaded, again = trainee(how, maker)
    dist.checkpoint.load({"model": loaded, "optimizer": again}, folder)
    for turn in (1, 2):
        step(model, optimizer, turn)
        step(loaded, again, turn)
    assert_same(loaded, model, atol=0)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "SGD, dampened"])
def test_master_weights_are_saved_before_the_first_step(name, folder):
    pair = trainee("sharding/1", MAKERS[name], torch.bfloat16)[1:]
    with torch.no_grad():
        for each in pair[0].parameters():
            each *= 2
    dist.checkpoint.save({"model": pair[0], "optimizer": pair[1]}, folder)
    loaded, other = (trainee("sharding/1", MAKERS[name], torch.bfloat16)[1:] for _ in range(2))
    dist.checkpoint.load({"model": loaded[0], "optimizer": loaded[1]}, folder)
    with torch.no_grad():
        for each in other[0].parameters():
            each *= 2
    for turn in range(3):
        for each in (pair, loaded, other):
            step(*each, turn)
    assert_same(pair[0], other[0], atol=0)
    assert_same(loaded[0], other[0], atol=0)
