"""torch's own engines on backend "hpcdist": what they compute is what they compute on gloo.

A scenario is a function of a `Job` that uses torch.distributed and returns tensors. It runs twice
in this job, first on gloo, then on hpcdist, and every rank compares its tensors: bit by bit on two
ranks, where a sum has one order only.
"""

import itertools
import tempfile
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from checks import ROUNDED
from mpi4py import MPI

torch = pytest.importorskip("torch", minversion="2.11")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import nn as dist_nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import (  # noqa: E402
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.algorithms.model_averaging.averagers import (  # noqa: E402
    PeriodicModelAverager,
)
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import (  # noqa: E402
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.pipelining import (  # noqa: E402
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import hpcdist.torch  # noqa: E402, F401

dist = torch.distributed

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore:{message}")
    for message in [
        r".*torch\.distributed.* deprecated:FutureWarning",
        r"FSDP2-wrapped module .* returned a view:UserWarning",
        r"`torch\.jit\.\w+` is deprecated:DeprecationWarning",  # by torch.distributed.optim
        r"Dynamo does not know how to trace:UserWarning",  # options of torch's operations
    ]
]

FULL = StateDictOptions(full_state_dict=True)


class Job(NamedTuple):
    """Where a scenario runs; all ranks see `folder`, which does not exist yet."""

    rank: int
    size: int
    folder: Path


class Scenario(NamedTuple):
    run: object
    least: int
    """Number of ranks it needs."""
    multiple: int
    rtol: float
    """How close the two backends come, where their sums differ in order or precision."""


SCENARIOS = {}
ROUNDED_32 = 2**6 * torch.finfo(torch.float32).eps
"""What the 64 roundings of a short training in float32 make of 1."""


def scenario(name=None, least=1, multiple=1, rtol=ROUNDED, **options):
    """Make a scenario of a function; several, if applied several times with different options."""

    def register(function):
        title = name or function.__name__.replace("_", " ")
        assert title not in SCENARIOS
        SCENARIOS[title] = Scenario(lambda job: function(job, **options), least, multiple, rtol)
        return function

    return register


# ---- what is trained


def network(*widths):
    torch.manual_seed(7)
    widths = widths or (6, 18, 17, 3)
    layers = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (nn.Linear(before, after), nn.Tanh())
    ]
    return nn.Sequential(*layers[:-1])


def batch(step, rank, rows=4):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return (model(x) - y).square().mean()


def momentum(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train(model, job, optimizer=None, steps=3):
    optimizer = optimizer or momentum(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, job.rank).backward()
        optimizer.step()
    return model


def weights(model):
    """Return the whole state dict on every rank."""
    state = get_model_state_dict(model, options=FULL)
    return {key: value.clone() for key, value in state.items()}


# ---- DistributedDataParallel


@scenario("DDP")
@scenario("DDP in many buckets", bucket_cap_mb=1e-4)
@scenario("DDP with gradients that are views of buckets", gradient_as_bucket_view=True)
@scenario("DDP with a static graph", static_graph=True)
def ddp(job, **options):
    return weights(train(DistributedDataParallel(network(), **options), job))


@scenario("DDP with buffers")
def ddp_buffers(job):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    return weights(train(DistributedDataParallel(model), job))


@scenario("DDP with accumulated gradients")
def ddp_no_sync(job):
    model = DistributedDataParallel(network())
    optimizer = momentum(model)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if part < 2 else nullcontext():
                loss_of(model, 3 * step + part, job.rank).backward()
        optimizer.step()
    return weights(model)


class Branches(nn.Module):
    """A stem and branches, of which a call uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.stem = nn.Linear(6, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(6))
        self.used = 0

    def forward(self, x):
        self.used += 1
        branch = (self.used + int(10 * x[0, 0].abs())) % 5  # the last one is never used
        return self.branches[branch](self.stem(x))


@scenario("DDP with unused parameters")
def ddp_unused(job):
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    return weights(train(model, job, steps=5))


@scenario("DDP with a sparse embedding")
def ddp_sparse(job):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([step, job.rank, 2 * job.rank, 8])).square().sum().backward()
        optimizer.step()
    return weights(model)


def scaled_sum(size, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * (2 / size))


def gathered_mean(size, bucket):
    buffer = bucket.buffer()
    rows = torch.empty(size * len(buffer))
    work = dist.all_gather_into_tensor(rows, buffer, async_op=True)
    return work.get_future().then(lambda done: rows.view(size, -1).mean(0))


HOOKS = {
    "of torch": lambda size: (None, default_hooks.allreduce_hook),
    "in float16": lambda size: (None, default_hooks.fp16_compress_hook),
    "PowerSGD": lambda size: (
        powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
        powerSGD_hook.powerSGD_hook,
    ),
    "that sums": lambda size: (size, scaled_sum),
    "that gathers": lambda size: (size, gathered_mean),
}


@scenario("DDP with a hook of torch", hook="of torch")
@scenario("DDP with a hook in float16", hook="in float16", rtol=1e-2)
@scenario("DDP with the hook PowerSGD", hook="PowerSGD", rtol=1e-3)
@scenario("DDP with a hook that sums", hook="that sums")
@scenario("DDP with a hook that gathers", hook="that gathers")
def ddp_hook(job, hook):
    # gloo dead-locks where callbacks of several buckets issue collectives
    model = DistributedDataParallel(network(), bucket_cap_mb=1 if hook == "PowerSGD" else 1e-3)
    model.register_comm_hook(*HOOKS[hook](job.size))
    return weights(train(model, job, steps=5))


@scenario("DDP with uneven inputs")
def ddp_join(job):
    model = DistributedDataParallel(network())
    with model.join():
        train(model, job, steps=2 + job.rank)
    return weights(model)


def zero(model):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)


@scenario("Join of DDP and ZeroRedundancyOptimizer")
def join_of_two(job):
    model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    optimizer = zero(model)
    with Join([model, optimizer]):
        train(model, job, optimizer, steps=2 + job.rank % 2)
    return weights(model)


@scenario("ZeroRedundancyOptimizer")
def zero_redundancy(job):
    model = DistributedDataParallel(network())
    optimizer = zero(model)
    train(model, job, optimizer)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if job.rank == 0 else {}
    moments = {f"moment {key}": value["exp_avg"] for key, value in state.items()}
    return weights(model) | moments


@scenario()
def model_averaging(job):
    model = network()
    optimizer, averager = momentum(model), PeriodicModelAverager(period=2, warmup_steps=1)
    for step in range(4):
        train(model, job, optimizer, steps=1 + step)
        averager.average_parameters(model.parameters())
    return weights(model)


@scenario()
def post_local_sgd(job):
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = DistributedDataParallel(network())
    state = post_localSGD_hook.PostLocalSGDState(None, dist.group.WORLD, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    train(model, job, PostLocalSGDOptimizer(momentum(model), averager), steps=5)
    return weights(model)


# ---- fully sharded


@scenario("FSDP1", least=2, rtol=ROUNDED_32, strategy=ShardingStrategy.FULL_SHARD)
@scenario("FSDP1 of gradients", least=2, rtol=ROUNDED_32, strategy=ShardingStrategy.SHARD_GRAD_OP)
def fsdp1(job, strategy):
    torch.set_default_dtype(torch.float32)  # its clip_grad_norm_ takes nothing wider
    model = FullyShardedDataParallel(
        network(),
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, nn.Linear),
        sharding_strategy=strategy,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    train(model, job)
    norm = model.clip_grad_norm_(0.1)
    return weights(model) | {"norm": norm}


def sharded(model, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_REDUCED_IN_FLOAT32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@scenario("FSDP2")
@scenario("FSDP2 that keeps its parameters", reshard_after_forward=False)
@scenario("FSDP2 that keeps them on some ranks", reshard_after_forward=2, multiple=2)
@scenario("FSDP2 in bfloat16", mp_policy=BF16, rtol=3e-2)
@scenario("FSDP2 in bfloat16 and float32", mp_policy=BF16_REDUCED_IN_FLOAT32, rtol=3e-2)
def fsdp2(job, **options):
    return weights(train(sharded(network(), **options), job))


@scenario("FSDP2 by columns")
def fsdp2_by_columns(job):
    def columns(parameter):
        return Shard(1) if parameter.shape[1:] == (12,) else None

    return weights(train(sharded(network(6, 12, 12, 3), shard_placement_fn=columns), job))


@scenario("FSDP2 with accumulated and clipped gradients")
def fsdp2_accumulate(job):
    model = sharded(network())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    norms = {}
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            loss_of(model, 2 * step + part, job.rank).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norms[f"norm {step}"] = norm.full_tensor()
        optimizer.step()
    return weights(model) | norms


@scenario("FSDP2 of replicas", least=4, multiple=4)
def hsdp(job):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return weights(train(sharded(network(), mesh=mesh), job))


# ---- tensors across ranks

MLP = {"0": ColwiseParallel(), "2": RowwiseParallel()}


@scenario()
def tensor_parallel(job):
    mesh = init_device_mesh("cpu", (job.size,))
    model = parallelize_module(network(6, 12, 3), mesh, MLP)
    same_data = job._replace(rank=0)
    return weights(train(model, same_data))


@scenario("tensor parallel and FSDP2", least=4, multiple=4)
def two_dimensional(job):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(network(6, 12, 3), mesh["tensor"], MLP)
    model = sharded(model, mesh=mesh["data"])
    return weights(train(model, job._replace(rank=mesh.get_local_rank("data"))))


@scenario()
def dtensors(job):
    mesh = init_device_mesh("cpu", (job.size,))
    torch.manual_seed(3)
    x, w = torch.randn(7, 6), torch.randn(6, 5)
    rows = distribute_tensor(x, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    leaf = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()
    product = columns @ leaf  # a sum over ranks
    (product.redistribute(mesh, [Shard(0)]) ** 2).sum().backward()
    return {
        "rows": rows.to_local(),
        "columns": columns.to_local(),
        "whole": columns.full_tensor(),
        "copy": rows.redistribute(mesh, [Replicate()]).to_local(),
        "product": product.full_tensor().detach(),
        "by rows": (rows @ distribute_tensor(w, mesh, [Replicate()])).full_tensor(),
        "mean": rows.mean(0).full_tensor(),
        "maximum": rows.max().full_tensor(),
        "gradient": leaf.grad.full_tensor(),
    }


@scenario()
def collectives_with_gradients(job):
    leaf = torch.full((job.size * 2,), job.rank + 1.5, requires_grad=True)
    out = torch.empty_like(leaf)
    results = {
        "sum": dist_nn.all_reduce(leaf * 2),
        "rows": torch.stack(dist_nn.all_gather(leaf.sin())),
        "block": dist_nn.reduce_scatter(torch.empty(2), list((leaf**2).chunk(job.size))),
        "exchanged": dist_nn.all_to_all_single(out, leaf.cos()),
        "shared": dist_nn.broadcast(leaf * 3, 0),
    }
    sum((each * each).sum() for each in results.values()).backward()
    return {key: each.detach() for key, each in results.items()} | {"gradient": leaf.grad}


# ---- compiled programs


def of_neighbours(x, job):
    y, received = x * 2, torch.zeros_like(x)
    sending = dist.P2POp(dist.isend, y, (job.rank + 1) % job.size)
    receiving = dist.P2POp(dist.irecv, received, (job.rank - 1) % job.size)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return received + 1


def of_messages(x, job):
    received = torch.zeros_like(x)
    if job.rank % 2 == 0 and job.rank + 1 < job.size:
        dist.send(x * 2, job.rank + 1)
    elif job.rank % 2:
        dist.recv(received, job.rank - 1)
    return received + x


def of_lists(verb, x, job):
    parts = [x * (each + 1) for each in range(job.size)]
    found = [torch.zeros_like(x) for _ in parts]
    root = job.rank == 0
    if verb == "gather":
        dist.gather(x * 2, found if root else None, 0)
    elif verb == "scatter":
        dist.scatter(found[0], parts if root else None, 0)
    elif verb == "reduce_scatter":
        dist.reduce_scatter(found[0], parts)
    elif verb == "all_to_all":
        dist.all_to_all(found, parts)
    else:
        dist.all_gather(found, x * 2)
    return torch.stack(found).cos()


def of_one(verb, x, job):
    y = x * 2
    work = verb(y)
    z = x.sin()
    if work is not None:
        work.wait()
    return y + z


def of_blocks(verb, x, job):
    size = x.numel() * job.size if verb is dist.all_gather_into_tensor else x.numel() // job.size
    y = torch.zeros(x.numel() if verb is dist.all_to_all_single else size)
    verb(y, x.reshape(-1) * 2)
    return y.cos()


COMPILED = {
    "of neighbours": of_neighbours,
    "of messages": of_messages,
    **{
        verb: partial(of_lists, verb)
        for verb in ("gather", "scatter", "reduce_scatter", "all_to_all", "all_gather")
    },
    "broadcast": partial(of_one, lambda y: dist.broadcast(y, 0)),
    "all_reduce": partial(of_one, dist.all_reduce),
    "all_reduce later": partial(of_one, lambda y: dist.all_reduce(y, async_op=True)),
    "barrier": partial(of_one, lambda _: dist.barrier()),
    "reduce": partial(of_one, lambda y: dist.reduce(y, 0, async_op=True)),
    **{
        verb.__name__: partial(of_blocks, verb)
        for verb in (
            dist.all_gather_into_tensor,
            dist.reduce_scatter_tensor,
            dist.all_to_all_single,
        )
    },
}


@scenario(least=2)
def compiled_programs(job):
    torch.manual_seed(10 + job.rank)
    x, found = torch.randn(12, job.size), {}
    for name, program in COMPILED.items():
        torch._dynamo.reset()
        compiled = torch.compile(lambda x, program=program: program(x, job), backend="eager")
        found[name] = compiled(x) + compiled(x + 1)
    if job.rank != 0:  # its sums are of no use elsewhere
        del found["reduce"]
    return found


@scenario("DDP, compiled, with buffers")
def compiled_ddp(job):
    torch.manual_seed(7)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = DistributedDataParallel(model)
    optimizer = momentum(model)
    train(torch.compile(model, backend="aot_eager"), job, optimizer)
    return weights(model)


# ---- checkpoints


def adam(model):
    return torch.optim.Adam(model.parameters(), 0.01)


@scenario()
def checkpoints_of_another_sharding(job):
    model = sharded(network(6, 12, 3))
    optimizer = adam(model)
    train(model, job, optimizer)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=job.folder)
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (job.size,))
    other = parallelize_module(network(6, 12, 3), mesh, MLP)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    others = adam(other)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(other, others), strict=True))
    dcp.load(loaded, checkpoint_id=job.folder)
    set_state_dict(
        other, others, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    before = weights(other)
    assert all(torch.equal(before[key], value) for key, value in weights(model).items())
    train(other, job._replace(rank=0), others)
    return {f"loaded {key}": value for key, value in before.items()} | weights(other)


@scenario()
def checkpoints_written_in_the_background(job):
    model = train(sharded(network()), job)
    group = dist.new_group()  # its collectives run beside those of the training
    state = {"model": get_model_state_dict(model)}
    saving = dcp.async_save(state, checkpoint_id=job.folder, process_group=group)
    written = weights(model)
    train(model, job)
    saving.result()
    changed = weights(model)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=job.folder)
    set_model_state_dict(model, state["model"])
    restored = weights(model)
    assert all(torch.equal(restored[key], value) for key, value in written.items())
    assert not any(torch.equal(changed[key], value) for key, value in written.items())
    return restored


@scenario()
def whole_state_dicts_from_the_first_rank(job):
    torch.manual_seed(5)
    model = sharded(network())
    given = {key: torch.rand(value.shape) for key, value in weights(model).items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(given) if job.rank == 0 else {}, options=options)
    got = weights(model)
    assert all(torch.equal(got[key], value) for key, value in given.items())
    whole = get_model_state_dict(model, options=StateDictOptions(True, cpu_offload=True))
    assert bool(whole) == (job.rank == 0)
    return got


# ---- pipelines


@scenario("a pipeline GPipe", least=2, schedule=ScheduleGPipe)
@scenario("a pipeline 1F1B", least=2, schedule=Schedule1F1B)
def pipeline(job, schedule):
    torch.manual_seed(10 + job.rank)
    part = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    stage = PipelineStage(part, job.rank, job.size, torch.device("cpu"))
    running = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = momentum(part)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        x, _ = batch(step, 0, rows=8)
        first, last = job.rank == 0, job.rank == job.size - 1
        running.step(
            *([x] if first else []), **({"target": x.flip(0), "losses": losses} if last else {})
        )
        optimizer.step()
    assert len(losses) == (4 if job.rank == job.size - 1 else 0)
    return dict(part.state_dict()) | {f"loss {each}": loss for each, loss in enumerate(losses)}


# ---- the comparison


@pytest.fixture(autouse=True)
def _one_thread_in_float64():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def store(_start):
    """A store for gloo; hpcdist needs none."""
    comm = MPI.COMM_WORLD
    limit = timedelta(seconds=60)
    if comm.rank == 0:
        opened = dist.TCPStore("127.0.0.1", 0, comm.size, True, limit, wait_for_workers=False)
        comm.bcast(opened.port)
    else:
        opened = dist.TCPStore("127.0.0.1", comm.bcast(None), comm.size, False, limit)
    yield opened
    comm.Barrier()


@pytest.fixture
def folder(rank):
    with tempfile.TemporaryDirectory() if rank == 0 else nullcontext() as own:
        yield Path(MPI.COMM_WORLD.bcast(own))
        MPI.COMM_WORLD.Barrier()


@contextmanager
def torch_on(backend, **arguments):
    dist.init_process_group(backend, **arguments)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCENARIOS)
def test_engines_compute_what_they_compute_on_gloo(name, store, folder, rank, size):
    run, least, multiple, rtol = SCENARIOS[name]
    if size < least or size % multiple:
        pytest.skip(f"needs a multiple of {max(least, multiple)} ranks")
    own = dist.PrefixStore(name, store)
    with torch_on("gloo", store=own, rank=rank, world_size=size):
        wanted = run(Job(rank, size, folder / "gloo"))
    with torch_on("hpcdist"):
        got = run(Job(rank, size, folder / "hpcdist"))
    assert wanted
    assert got.keys() == wanted.keys()
    exact = size <= 2 and rtol < 1e-2
    for key, value in wanted.items():
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": rtol, "atol": rtol}
        torch.testing.assert_close(
            got[key], value, **tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("engine", [DistributedDataParallel, sharded])
def test_training_is_training_of_one_process_on_all_batches(engine, rank, size):
    alone = network()
    optimizer = momentum(alone)
    for step in range(3):
        optimizer.zero_grad()
        for each in range(size):
            x, y = batch(step, each)
            ((alone(x) - y).square().mean() / size).backward()
        optimizer.step()
    with torch_on("hpcdist"):
        model = engine(network())
        optimizer = momentum(model)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(step, rank)
            (model(x) - y).square().mean().backward()
            optimizer.step()
        got = weights(model)
    before = network().state_dict()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(got[key], value, rtol=ROUNDED, atol=ROUNDED)
        assert not torch.allclose(before[key], value)


@pytest.mark.thorough
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("engine", [DistributedDataParallel, sharded])
def test_a_rank_that_does_not_come_is_an_error_of_the_others(engine, rank, size):
    MPI.COMM_WORLD.Barrier()
    with torch_on("hpcdist", timeout=timedelta(seconds=1)):
        model = engine(network())
        if rank != size - 1:
            with pytest.raises(RuntimeError, match="was not joined by all ranks"):
                loss_of(model, 0, rank).backward()
        MPI.COMM_WORLD.Barrier()
