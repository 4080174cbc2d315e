"""Ranks die, each in the middle of another operation: ``dying.py FOLDER WAY ...``.

The ranks that there are repeat an operation until one or two of them die in it, then recover, and
go on with the next way. Each rank that is left writes a line of JSON about what it noticed.
"""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time

import numpy as np

import hpcdist as dist
from hpcdist.comm.surviving import is_of_a_death

PATIENCE_S = 60.0
folder, *ways = sys.argv[1:]
world = dist.init_parallel_env(timeout=PATIENCE_S)
process = world.rank


def after(world, by=1):
    return (world.rank + by) % world.nranks


def same(found, expected):
    if not np.all(np.asarray(found) == expected):
        raise AssertionError(f"{found} is not {expected}")


def total(world):
    return sum(range(1, world.nranks + 1))


def own(world, size=50):
    return np.full(size, world.rank + 1.0)


def wait(work):
    work.wait()


def in_thread(work):
    """Wait on another thread; raise here what was raised there."""
    errors = []

    def run():
        try:
            work.wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def until_completed(work):
    """Ask again and again whether a work has ended; then wait for it."""
    while not work.is_completed():
        time.sleep(1e-4)
    work.wait()


# ---- collectives


def all_reduce(size, end=wait, sync_op=True, new=np.full):
    def operate(world):
        array = new(size, 0.0)
        array[:] = world.rank + 1
        end(dist.all_reduce(array, sync_op=sync_op))
        same(array, total(world))

    return operate


def many_at_once(world):
    arrays = [own(world, 500) for _ in range(8)]
    works = [dist.all_reduce(array, sync_op=False) for array in arrays]
    dist.wait_all(works)
    same(arrays, total(world))


def reduce(world):
    array = own(world)
    dist.reduce(array, 0)
    if world.rank == 0:
        same(array, total(world))


def broadcast(world):
    array = own(world)
    dist.broadcast(array, after(world, -world.rank - 1))
    same(array, world.nranks)


def reduce_scatter(world):
    array = np.empty(5)
    dist.reduce_scatter(array, [own(world, 5)] * world.nranks)
    same(array, total(world))


def scan(world):
    array = own(world)
    dist.scan(array)
    same(array, sum(range(1, world.rank + 2)))


def all_gather(world):
    blocks = []
    dist.all_gather(blocks, own(world))
    same(blocks, np.arange(1, world.nranks + 1)[:, None])


def all_gather_uneven(world):
    blocks = []
    dist.all_gather(blocks, own(world, world.rank + 1))
    for rank, block in enumerate(blocks):
        same(block, rank + 1)
        same(block.size, rank + 1)


def gather(world):
    blocks = [np.empty(50) for _ in range(world.nranks)] if world.rank == 0 else None
    dist.gather(own(world), blocks, 0)


def scatter(world):
    array = np.empty(50)
    dist.scatter(array, [own(world)] * world.nranks if world.rank == 0 else None, 0)
    same(array, 1)


def alltoall_single(size):
    def operate(world):
        array = np.empty((world.nranks, size))
        dist.alltoall_single(array, np.full((world.nranks, size), world.rank + 1.0))
        same(array, np.arange(1, world.nranks + 1)[:, None])

    return operate


def alltoall_uneven(world):
    sizes = [1 + (world.rank + other) % 3 for other in range(world.nranks)]
    array = np.empty(sum(sizes))
    dist.alltoall_single(
        array,
        np.full(sum(sizes), 1.0 + world.rank),
        in_split_sizes=sizes,
        out_split_sizes=sizes,
    )
    same(array, np.repeat(np.arange(1, world.nranks + 1), sizes))


def all_reduced(world):
    same(dist.all_reduced(world.rank + 1), total(world))


def stream_all_reduce(world):
    array = own(world)
    dist.stream.all_reduce(array, sync_op=False).wait()
    same(array, total(world))


def stream_on_the_calculation(world):
    array = own(world)
    dist.stream.all_reduce(array, use_calc_stream=True)
    same(array, total(world))


def coroutine(world):
    import asyncio

    async def main():
        array = own(world)
        await dist.all_reduce(array, sync_op=False)
        same(array, total(world))

    asyncio.run(main())


# ---- objects


def all_gather_object(nbytes):
    def operate(world):
        found = []
        dist.all_gather_object(found, (world.rank, bytes(nbytes)))
        assert [rank for rank, _ in found] == list(range(world.nranks))

    return operate


def broadcast_object_list(world):
    found = [world.rank, bytes(10)]
    dist.broadcast_object_list(found, 0)
    assert found[0] == 0


def gather_object(world):
    dist.gather_object(world.rank, [None] * world.nranks if world.rank == 0 else None, 0)


def scatter_object_list(world):
    found = [None]
    dist.scatter_object_list(found, list(range(world.nranks)) if world.rank == 0 else None, 0)
    assert found == [world.rank]


def all_to_all_object(world):
    found = []
    dist.all_to_all_object(found, [(world.rank, each) for each in range(world.nranks)])
    assert found == [(each, world.rank) for each in range(world.nranks)]


# ---- messages


def ring(size, end=wait):
    def operate(world):
        array = np.empty(size)
        works = [
            dist.isend(own(world, size), after(world)),
            dist.irecv(array, after(world, -1)),
        ]
        for work in works:
            end(work)
        same(array, after(world, -1) + 1)

    return operate


def batch(world):
    array = np.empty(50)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own(world), after(world)),
            dist.P2POp(dist.irecv, array, after(world, -1)),
        ]
    )
    dist.wait_all(works)
    same(array, after(world, -1) + 1)


def from_any(world):
    """Everybody sends to rank 0, which takes what comes, and answers."""
    array = own(world)
    if world.rank:
        dist.send(array, 0)
        dist.recv(array, 0)
    else:
        sources = []
        for _ in range(world.nranks - 1):
            work = dist.irecv(array, None)
            work.wait()
            sources.append(work.source)
        for source in sources:
            dist.send(array, source)


def wait_for_any(world):
    array = np.empty(50)
    works = [dist.irecv(array, after(world, -1)), dist.isend(own(world), after(world))]
    while works:
        works.pop(dist.wait_any(works)[0])


def messages_of_objects(world):
    sent = dist.send_object_list([world.rank], after(world), sync_op=False)
    found = [None]
    dist.recv_object_list(found, after(world, -1))
    sent.wait()
    assert found == [after(world, -1)]


# ---- what is made once


def plan(make):
    def prepare(world):
        array = own(world)
        made = make(array)

        def operate(world):
            made.start().wait()

        return operate

    return prepare


def in_pairs(world):
    """Everybody is in two groups of two or three."""
    groups = [dist.new_group([first, (first + 1) % world.nranks]) for first in range(world.nranks)]

    def operate(world):
        for first, group in enumerate(groups):
            if world.rank in (first, (first + 1) % world.nranks):
                array = own(world)
                dist.all_reduce(array, group=group)

    return operate


def new_group(world):
    group = dist.new_group(range(world.nranks))
    dist.destroy_process_group(group)


def new_group_that_stays(world):
    dist.new_group(range(world.nranks))


def barrier(world):
    dist.barrier()


# ---- what is made of these


def memory(world):
    weights = {"w": own(world, 5000), "mine": np.full(3, 7.0)}
    kept = dist.Memory(weights, every=1, name=f"memory {world.generation}")
    steps = iter(range(1 << 20))

    def operate(world):
        kept.commit(next(steps))
        kept.restore()

    return operate


def save(world):
    weights = {"w": np.full(5000, 7.0)}
    paths = (f"{folder}/{world.generation}-{number}" for number in range(1 << 20))

    def operate(world):
        path = next(paths)
        dist.checkpoint.save(weights, path)
        dist.checkpoint.load(weights, path)
        same(weights["w"], 7)

    return operate


def save_in_the_background(world):
    weights = {"w": np.full(5000, 7.0)}
    paths = (f"{folder}/{world.generation}-{number}" for number in range(1 << 20))
    return lambda world: dist.checkpoint.save(weights, next(paths), async_save=True).wait()


def arrays(world):
    mesh = dist.ProcessMesh(list(range(world.nranks)), dim_names=["x"])
    whole = np.arange(40.0 * world.nranks).reshape(-1, 2)

    def operate(world):
        spread = dist.shard_tensor(whole, mesh, [dist.Shard(0)])
        again = dist.reshard(
            spread, mesh, [dist.Shard(1) if 2 % world.nranks == 0 else dist.Replicate()]
        )
        same(dist.unshard_dtensor(again), whole)

    return operate


def data_parallel(world):
    class Line:
        def __init__(self):
            self.w = dist.Parameter(np.ones(500))

        def named_parameters(self):
            return [("w", self.w)]

        def __call__(self):
            return self.w

    line = Line()
    model = dist.DataParallel(line)

    def operate(world):
        model()
        line.w.grad = own(world, 500)
        dist.average_gradients([line.w])
        same(line.w.grad, total(world) / world.nranks)

    return operate


def together(world):
    with dist.together():
        pass


def sleepy():
    time.sleep(2e-3)
    return 3


def rpc(world):
    dist.rpc.init_rpc()

    def operate(world):
        futures = [dist.rpc.rpc_async(each, sleepy) for each in range(world.nranks)]
        for future in futures:
            assert future.wait() == 3

    return operate


def rpc_by_mpi(world):
    dist.rpc.init_rpc(link="mpi")
    return lambda world: [dist.rpc.rpc_sync(each, sleepy) for each in range(world.nranks)]


# ---- torch


def of_torch(make):
    def prepare(world):
        import torch
        import torch.distributed as tdist

        import hpcdist.torch

        hpcdist.torch.init()
        return make(torch, tdist)

    return prepare


def torch_verb(call):
    def make(torch, tdist):
        def operate(world):
            call(torch, tdist, world, torch.full((40,), world.rank + 1.0))

        return operate

    return of_torch(make)


def torch_coalesced(torch, tdist, world, tensor):
    works = tdist.batch_isend_irecv(
        [
            tdist.P2POp(tdist.isend, tensor, after(world)),
            tdist.P2POp(tdist.irecv, torch.empty(40), after(world, -1)),
        ]
    )
    for work in works:
        work.wait()


def torch_send(torch, tdist, world, tensor):
    if world.rank % 2 == 0:
        if world.rank + 1 < world.nranks:
            tdist.send(tensor, world.rank + 1)
    else:
        tdist.recv(tensor, world.rank - 1)
    tdist.barrier()


def torch_objects(torch, tdist, world, tensor):
    found = [None] * world.nranks
    tdist.all_gather_object(found, world.rank)
    assert found == list(range(world.nranks))


def torch_functional(torch, tdist, world, tensor):
    import torch.distributed._functional_collectives as functional

    functional.all_reduce(tensor, "sum", tdist.group.WORLD).sum().item()


def torch_ddp(torch, tdist):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 30))

    def operate(world):
        model(torch.ones(2, 30)).sum().backward()

    return operate


def torch_own_ddp(torch, tdist):
    model = dist.DataParallel(torch.nn.Linear(30, 30))

    def operate(world):
        model(torch.ones(2, 30)).sum().backward()

    return operate


def torch_fsdp(torch, tdist):
    from torch.distributed.fsdp import fully_shard

    mesh = tdist.device_mesh.init_device_mesh("cpu", (tdist.get_world_size(),))
    model = fully_shard(torch.nn.Linear(30, 30), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def operate(world):
        optimizer.zero_grad()
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()

    return operate


def torch_zero(torch, tdist):
    module = torch.nn.Linear(30, 30)
    model, optimizer, _ = dist.group_sharded_parallel(
        module, torch.optim.AdamW(module.parameters(), 1e-3), "p_g_os"
    )

    def operate(world):
        optimizer.zero_grad()
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()

    return operate


TORCH = {
    "all_reduce": lambda torch, tdist, world, x: tdist.all_reduce(x),
    "async all_reduce": lambda torch, tdist, world, x: tdist.all_reduce(x, async_op=True).wait(),
    "future": lambda torch, tdist, world, x: tdist.all_reduce(x, async_op=True).get_future().wait(),
    "broadcast": lambda torch, tdist, world, x: tdist.broadcast(x, 0),
    "reduce": lambda torch, tdist, world, x: tdist.reduce(x, 0),
    "all_gather": lambda torch, tdist, world, x: tdist.all_gather(
        [torch.empty(40) for _ in range(world.nranks)], x
    ),
    "all_gather_into_tensor": lambda torch, tdist, world, x: tdist.all_gather_into_tensor(
        torch.empty(40 * world.nranks), x
    ),
    "reduce_scatter_tensor": lambda torch, tdist, world, x: tdist.reduce_scatter_tensor(
        torch.empty(40), torch.ones(40 * world.nranks)
    ),
    "reduce_scatter": lambda torch, tdist, world, x: tdist.reduce_scatter(
        torch.empty(40), [x] * world.nranks
    ),
    "gather": lambda torch, tdist, world, x: tdist.gather(
        x, [torch.empty(40) for _ in range(world.nranks)] if world.rank == 0 else None
    ),
    "scatter": lambda torch, tdist, world, x: tdist.scatter(
        torch.empty(40), [x] * world.nranks if world.rank == 0 else None
    ),
    "all_to_all_single": lambda torch, tdist, world, x: tdist.all_to_all_single(
        torch.empty(world.nranks), torch.ones(world.nranks)
    ),
    "all_to_all": lambda torch, tdist, world, x: tdist.all_to_all(
        [torch.empty(40) for _ in range(world.nranks)], [x] * world.nranks
    ),
    "barrier": lambda torch, tdist, world, x: tdist.barrier(),
    "monitored_barrier": lambda torch, tdist, world, x: tdist.monitored_barrier(),
    "send": torch_send,
    "batch": torch_coalesced,
    "objects": torch_objects,
    "functional": torch_functional,
    "new_group": lambda torch, tdist, world, x: tdist.new_group(list(range(world.nranks))),
}


def always(operate):
    return lambda world: operate


WAYS = {
    "small": always(all_reduce(3)),
    "through the board": always(all_reduce(5000)),
    "ordinary": always(all_reduce(200_000)),
    "shared": always(all_reduce(50_000, new=lambda size, _: dist.zeros(size))),
    "asynchronous": always(all_reduce(5000, sync_op=False)),
    "waited for on a thread": always(all_reduce(5000, in_thread, sync_op=False)),
    "asked for": always(all_reduce(5000, until_completed, sync_op=False)),
    "many at once": always(many_at_once),
    "coroutine": always(coroutine),
    "reduce": always(reduce),
    "broadcast": always(broadcast),
    "reduce_scatter": always(reduce_scatter),
    "scan": always(scan),
    "all_gather": always(all_gather),
    "all_gather, uneven": always(all_gather_uneven),
    "gather": always(gather),
    "scatter": always(scatter),
    "alltoall_single": always(alltoall_single(50)),
    "alltoall_single, large": always(alltoall_single(20_000)),
    "alltoall, uneven": always(alltoall_uneven),
    "all_reduced": always(all_reduced),
    "barrier": always(barrier),
    "stream": always(stream_all_reduce),
    "stream of the calculation": always(stream_on_the_calculation),
    "all_gather_object": always(all_gather_object(10)),
    "all_gather_object, large": always(all_gather_object(200_000)),
    "broadcast_object_list": always(broadcast_object_list),
    "gather_object": always(gather_object),
    "scatter_object_list": always(scatter_object_list),
    "all_to_all_object": always(all_to_all_object),
    "ring": always(ring(50)),
    "ring, large": always(ring(200_000)),
    "ring, on a thread": always(ring(50, in_thread)),
    "ring, asked for": always(ring(50, until_completed)),
    "batch": always(batch),
    "any source": always(from_any),
    "wait_any": always(wait_for_any),
    "messages of objects": always(messages_of_objects),
    "plan of all_reduce": plan(lambda array: dist.plan_all_reduce(array)),
    "plan of broadcast": plan(lambda array: dist.plan_broadcast(array, 0)),
    "plan of barrier": plan(lambda array: dist.plan_barrier()),
    "plan of all_gather": plan(lambda array: dist.plan_all_gather([], array)),
    "in pairs": in_pairs,
    "new_group": always(new_group),
    "new_group that stays": always(new_group_that_stays),
    "together": always(together),
    "memory": memory,
    "save": save,
    "save in the background": save_in_the_background,
    "arrays": arrays,
    "data parallel": data_parallel,
    "rpc": rpc,
    "rpc by mpi": rpc_by_mpi,
    **{f"torch {name}": torch_verb(call) for name, call in TORCH.items()},
    "torch DDP": of_torch(torch_ddp),
    "torch DataParallel": of_torch(torch_own_ddp),
    "torch FSDP2": of_torch(torch_fsdp),
    "torch ZeRO": of_torch(torch_zero),
}
"""By name: what prepares an operation on all ranks, and returns it."""


def victims_of(world, number):
    """Return who dies in this turn: the first, one in the middle, the last, or two at once."""
    last = world.nranks - 1
    return [(0,), (last // 2,), (last,), (0, last)][number % 4]


def noticed(operate, world):
    """Repeat an operation until something is raised, and return that."""
    until = time.monotonic() + PATIENCE_S
    try:
        while time.monotonic() < until:
            operate(world)
    except BaseException as error:
        return error
    return None


def failure_in(error):
    """Return what says who has died, an error or its cause."""
    while error is not None and not isinstance(error, dist.RankFailure):
        error = error.__cause__ or error.__context__
    return error


def die_soon(numbers):
    """Have the system end this process at a moment, whatever it does."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, numbers.uniform(0.002, 0.03))


for number, way in enumerate(ways):
    victims = victims_of(world, number)
    operate = WAYS[way](world)
    dist.barrier()
    if world.rank in victims:
        die_soon(random.Random(f"{way} {process}"))
    error, rank = noticed(operate, world), world.rank
    found = failure_in(error)
    told = {
        "way": way,
        "process": process,
        "raised": type(error).__name__,
        "is_failure": isinstance(error, dist.RankFailure),
        "is_remote": isinstance(error, dist.RemoteError),
        "is_of_a_death": is_of_a_death(error),
        "named": getattr(found, "ranks", getattr(error, "rank", None)),
        "has_site": os.path.basename(__file__) in str(error),
        "victims": victims,
        "words": str(error),
    }
    began = time.monotonic()
    with contextlib.suppress(NameError):
        del operate
    world = dist.recover(PATIENCE_S)
    told["seconds"], told["lost"], told["rank"] = time.monotonic() - began, world.lost, rank
    same(dist.all_reduced(1), world.nranks)
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
