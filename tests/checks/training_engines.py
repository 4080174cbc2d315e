"""Trainings by every engine whose weights are the same in all bits on any number of ranks.

The gradients do not depend on the weights, and are sums of whole numbers over a batch that all
ranks share, so that no sum is rounded whatever its order. Only virtual ranks need none of that.
"""

import hashlib
import threading

import numpy as np

import hpcdist as dist
from hpcdist import checkpoint

BATCH = 8


def share(number):
    """Return this rank's samples of a step, each of 6 whole numbers, and the number of ranks."""
    samples = np.random.default_rng(number).integers(-4, 5, (BATCH, 6)).astype(float)
    return samples[dist.get_rank() :: dist.get_world_size()], dist.get_world_size()


class Line:
    """Two arrays."""

    def __init__(self):
        numbers = np.random.default_rng(1)
        self.w = dist.Parameter(numbers.standard_normal((6, 5)))
        self.b = dist.Parameter(numbers.standard_normal(7))

    def named_parameters(self):
        return [("w", self.w), ("b", self.b)]

    def __call__(self, samples):
        return samples

    def backward(self, samples, size):
        """Assign gradients whose mean over the ranks is the sum over the batch."""
        sums = samples.sum(axis=0) * size
        self.b.grad = np.full(7, sums[0])
        self.w.grad = np.repeat(sums[:, None], 5, axis=1)


class Training:
    """A model, its optimizer, and `step`, which does a step."""

    def __init__(self, model, optimizer, step):
        self.model, self.optimizer, self._step = model, optimizer, step

    def step(self, number):
        self._step(self.model, self.optimizer, *share(number))


def _arrays(group, make):
    line = Line()
    model, optimizer = make(line, dist.optim.AdamW(line.named_parameters(), 0.1))

    def step(model, optimizer, samples, size):
        model(samples)
        line.backward(samples, size)
        optimizer.step()
        for parameter in (line.w, line.b):
            parameter.grad = None

    return Training(model, optimizer, step)


def array_data_parallel(group):
    return _arrays(group, lambda line, optimizer: (dist.DataParallel(line, group=group), optimizer))


def zero_of_arrays(level):
    def sharded(line, optimizer, group):
        return dist.group_sharded_parallel(line, optimizer, level, group=group, segment_size=0)[:2]

    return lambda group: _arrays(group, lambda line, optimizer: sharded(line, optimizer, group))


def _network():
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Flatten()).double()


def _adam(module):
    import torch

    return torch.optim.AdamW(module.parameters(), 0.1)


def _step_of_torch(model, optimizer, samples, size):
    import torch

    optimizer.zero_grad()
    (model(torch.from_numpy(samples)).sum() * size).backward()
    optimizer.step()


def torch_data_parallel(group):
    model = dist.DataParallel(_network(), group=group)
    return Training(model, _adam(model), _step_of_torch)


VIRTUAL_RANKS = 8
BUILDING = threading.Lock()
"""Simulated ranks share torch's generator: they build their networks one after the other."""


def _on_virtual_ranks(module, optimizer, group, level):
    model = dist.DataParallel(module, group=group, virtual_ranks=VIRTUAL_RANKS)
    if level is None:
        return model, optimizer
    return dist.group_sharded_parallel(model, optimizer, level)[:2]


def torch_virtual_ranks(level=None, autocast=False):
    """Return a training whose gradients are rounded, on random numbers of its virtual ranks."""

    def make(group):
        import torch

        torch.set_num_threads(1)
        with BUILDING:
            torch.manual_seed(3)
            layers = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.4)
            module = torch.nn.Sequential(*layers, torch.nn.Linear(5, 3))
        model, optimizer = _on_virtual_ranks(module, _adam(module), group, level)

        def step(number):
            optimizer.zero_grad()
            for part in model.parts():
                samples = torch.Generator().manual_seed(100 * number + part.rank)
                x = torch.randn(4, 6, generator=samples)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(x).square().mean()
                loss.backward()
            dist.clip_grad_norm_(model, 0.5)
            optimizer.step()

        training = Training(model, optimizer, None)
        training.step = step
        return training

    return make


def virtual_ranks_of_arrays(level=None):
    """Return the same of arrays, whose gradients depend on the weights."""

    def make(group):
        line = Line()
        optimizer = dist.optim.AdamW(line.named_parameters(), 0.1)
        model, optimizer = _on_virtual_ranks(line, optimizer, group, level)

        def step(number):
            for part in model.parts():
                x = np.random.default_rng([number, part.rank]).normal(size=(4, 6))
                slopes = np.tanh(x @ line.w.data) * (np.random.random((4, 5)) > 0.3)
                line.b.grad = line.b.data * slopes.sum()
                line.w.grad = x.T @ slopes / 4
            dist.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.clear_grad()

        training = Training(model, optimizer, None)
        training.step = step
        return training

    return make


def fully_sharded(group):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import hpcdist.torch

    hpcdist.torch.init()
    mesh = DeviceMesh("cpu", group.ranks)  # collective over all ranks
    if not group.is_member():
        return None
    model = fully_shard(_network(), mesh=mesh)
    return Training(model, _adam(model), _step_of_torch)


def zero_of_torch(level):
    def make(group):
        module = _network()
        model, optimizer, _ = dist.group_sharded_parallel(
            module, _adam(module), level, group=group, segment_size=0
        )
        return Training(model, optimizer, _step_of_torch)

    return make


LEVELS = "os", "os_g", "p_g_os"
ENGINES = {
    "data parallel": array_data_parallel,
    **{f"arrays {level}": zero_of_arrays(level) for level in LEVELS},
    "torch data parallel": torch_data_parallel,
    "torch virtual ranks": torch_virtual_ranks(),
    "torch virtual ranks, bfloat16": torch_virtual_ranks(autocast=True),
    "arrays, virtual ranks": virtual_ranks_of_arrays(),
    **{f"torch virtual ranks {level}": torch_virtual_ranks(level) for level in ("os", "os_g")},
    **{
        f"arrays, virtual ranks {level}": virtual_ranks_of_arrays(level) for level in ("os", "os_g")
    },
    "torch fsdp2": fully_sharded,
    **{f"torch {level}": zero_of_torch(level) for level in LEVELS},
}
"""By name: what makes a `Training` of the ranks of a group."""


def everything(training, path, group):
    """Return all arrays and numbers of a training by name, by way of a checkpoint on disk."""
    checkpoint.save({"model": training.model, "optimizer": training.optimizer}, path, group)
    return _leaves(checkpoint.load(None, path, group))


def fingerprint(found):
    """Return a text that is another one if a bit differs."""
    digest = hashlib.sha256()
    for name, value in sorted(found.items()):
        content = repr(value).encode() if value.dtype.hasobject else value.tobytes()
        digest.update(f"{name} {value.dtype} {value.shape}".encode() + content)
    return digest.hexdigest()


def _leaves(state, path=""):
    if isinstance(state, dict):
        pairs = [_leaves(each, f"{path}.{name}") for name, each in state.items()]
    elif isinstance(state, (list, tuple)):
        pairs = [_leaves(each, f"{path}.{index}") for index, each in enumerate(state)]
    else:
        return {path: np.asarray(state)}
    return {name: each for found in pairs for name, each in found.items()}
