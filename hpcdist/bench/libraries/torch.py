"""torch.distributed on gloo, on the ranks MPI has started; and the torch side of `data_parallel`.

`start_gloo` and `stop_gloo` are for programs that use torch.distributed themselves.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from hpcdist.bench.interleaved import Call
from hpcdist.bench.libraries.hpcdist import wait_for_all
from hpcdist.bench.networks import RATE, Batch, Weights
from hpcdist.bench.task import Array, Library, Maker, Messages, Task
from hpcdist.bench.unavailable import Unavailable, require_module

_LOOPBACK = "127.0.0.1"


def start(comm: Any, _whole: bool) -> Library:
    """Return torch.distributed on gloo, over the ranks of `comm`. Collective."""
    require_module(comm, "torch")
    torch_dist = start_gloo(comm)
    if torch_dist is None:
        raise Unavailable("torch cannot be imported")
    ops = torch_dist.ReduceOp
    calls = {**_array_calls(torch_dist), **_object_calls(torch_dist)}
    verbs = torch_dist.send, torch_dist.recv, torch_dist.isend, torch_dist.irecv
    messages = Messages(tensor_of, *verbs, wait_for_all)

    def begin(task: Task) -> Call:
        op = getattr(ops, task.op)
        return partial(torch_dist.all_reduce, tensor_of(task.x), op, async_op=True)

    return Library("torch", calls, messages, begin, _ddp, partial(stop_gloo, torch_dist))


def start_gloo(comm: Any) -> Any:
    """Return `torch.distributed`, started over the ranks of `comm`; None without torch.

    Collective. The ranks meet at a port of rank 0's node, of the loopback where all are on one.
    Gloo itself picks the interface by the host's name, or as ``GLOO_SOCKET_IFNAME`` says.
    """
    try:
        import torch.distributed as torch_dist
    except ImportError:
        return None
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")  # renamed verbs
    hosts = comm.allgather(socket.gethostname())
    host = _LOOPBACK if len(set(hosts)) == 1 else hosts[0]
    store = None
    if comm.rank == 0:
        store = torch_dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = comm.bcast(store.port if store is not None else None)
    if store is None:
        store = torch_dist.TCPStore(host, port)
    torch_dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    return torch_dist


def stop_gloo(torch_dist: Any) -> None:
    """End what `start_gloo` began. Collective."""
    if torch_dist is not None:
        torch_dist.destroy_process_group()


def tensor_of(array: Array) -> Any:
    """Return a torch tensor on the memory of a NumPy array, bfloat16 included."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("i2")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _tensors(arrays: list[Array]) -> list[Any]:
    return [tensor_of(array) for array in arrays]


def _array_calls(torch_dist: Any) -> dict[str, Maker]:
    def op_of(task: Task) -> Any:
        return getattr(torch_dist.ReduceOp, task.op)

    def all_reduce(task: Task) -> Call:
        return partial(torch_dist.all_reduce, tensor_of(task.x), op_of(task))

    def reduce(task: Task) -> Call:
        return partial(torch_dist.reduce, tensor_of(task.x), 0, op_of(task))

    def reduce_scatter(task: Task) -> Call:
        out, x = tensor_of(task.out), tensor_of(task.x)
        return partial(torch_dist.reduce_scatter_tensor, out, x, op_of(task))

    def broadcast(task: Task) -> Call:
        return partial(torch_dist.broadcast, tensor_of(task.x), 0)

    def all_gather(task: Task) -> Call:
        return partial(torch_dist.all_gather_into_tensor, tensor_of(task.out), tensor_of(task.x))

    def all_gather_list(task: Task) -> Call:
        return partial(torch_dist.all_gather, _tensors(task.parts), tensor_of(task.x))

    def gather(task: Task) -> Call:
        parts = _tensors(task.parts) if task.rank == 0 else None
        return partial(torch_dist.gather, tensor_of(task.x), parts, 0)

    def scatter(task: Task) -> Call:
        parts = _tensors(task.parts) if task.rank == 0 else None
        return partial(torch_dist.scatter, tensor_of(task.out), parts, 0)

    def alltoall_single(task: Task) -> Call:
        return partial(torch_dist.all_to_all_single, tensor_of(task.out), tensor_of(task.x))

    def barrier(_: Task) -> Call:
        return partial(torch_dist.barrier)

    def new_group(_: Task) -> Call:
        return lambda: torch_dist.destroy_process_group(torch_dist.new_group())

    reductions = all_reduce, reduce, reduce_scatter
    moves = broadcast, all_gather, all_gather_list, gather, scatter, alltoall_single
    return {make.__name__: make for make in (*reductions, *moves, barrier, new_group)}


def _object_calls(torch_dist: Any) -> dict[str, Maker]:
    def broadcast_object_list(task: Task) -> Call:
        things = [task.thing if task.rank == 0 else None]
        return partial(torch_dist.broadcast_object_list, things, 0)

    def all_gather_object(task: Task) -> Call:
        return lambda: torch_dist.all_gather_object([None] * task.size, task.thing)

    return {
        "broadcast_object_list": broadcast_object_list,
        "all_gather_object": all_gather_object,
    }


# ---- training


def can_use(device: str) -> bool:
    """Return whether torch, which is installed, has a usable device of this name."""
    import torch

    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())


def torch_network(weights: Weights, device: str = "cpu") -> Any:
    """Return the perceptron of these weights as a torch module; on a CPU it uses one thread."""
    import torch

    torch.set_num_threads(1)
    layers: list[Any] = []
    for matrix, bias in weights:
        linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(matrix))
            if bias is not None:
                linear.bias.copy_(torch.from_numpy(bias))
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1]).to(device)


def torch_step(model: Any, batch: Batch, device: str = "cpu") -> Callable[[], None]:
    """Return what trains `model` (plain or parallel) on one batch."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), RATE)
    x, y = (torch.from_numpy(array).to(device) for array in batch)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def _ddp(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)
