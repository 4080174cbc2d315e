"""Groups, collectives, works, plans, messages, objects, errors, and ways to start ranks."""

import jax
import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import assert_type

import hpcdist as dist
from hpcdist import stream


def groups() -> None:
    world = assert_type(dist.init_parallel_env(timeout=60), dist.Group)
    evens = assert_type(dist.new_group(range(0, world.nranks, 2), name="evens"), dist.Group)
    assert_type(dist.get_group(0), dist.Group | None)
    assert_type([world.rank, world.nranks, world.id, dist.get_rank()], list[int])
    assert_type(world.ranks, list[int])
    assert_type(world.name + world.backend + dist.get_backend(), str)
    if evens.is_member():
        dist.barrier(evens)
    env = dist.ParallelEnv()
    assert_type([env.rank, env.world_size, env.local_rank, env.node_rank, env.device_id], list[int])


def collectives() -> None:
    x = np.ones(4, np.float32)
    work = assert_type(dist.all_reduce(x, op=dist.ReduceOp.MAX, sync_op=False), dist.Work)
    if not assert_type(work.is_completed(), bool):
        work.wait(timeout=60)
    gathered: list[npt.NDArray[np.float32]] = []
    dist.all_gather(gathered, x)
    shared = dist.zeros((dist.get_world_size(), 4), dtype=np.float32)
    dist.all_gather_into_tensor(shared, x)
    dist.broadcast(x, src=0)
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    received: list[npt.NDArray[np.float32]] = []
    dist.alltoall(received, list(shared))
    stream.all_reduce(x, use_calc_stream=True)
    plan = assert_type(dist.plan_all_reduce(x), dist.Plan)
    plan.start().wait()
    plan.free()


class OfCupy:
    """What arrays of CuPy have, which is not installed everywhere."""

    shape: tuple[int, ...] = (3,)

    @property
    def dtype(self) -> object:
        return np.dtype(np.float64)


class OfDLPack:
    def __dlpack__(self, *, stream: int | None = None) -> object:
        return stream


def arrays_of_any_library(tensor: torch.Tensor, array: jax.Array) -> None:
    dist.all_reduce(tensor)
    dist.all_reduce(array)
    dist.all_reduce(OfCupy())
    dist.all_gather([OfCupy()], OfCupy())
    dist.isend(OfDLPack(), 0).wait()
    dist.recv(bytearray(8), 0)
    dist.reduce(np.float64(1), 0)
    stream.broadcast(memoryview(bytearray(8)), 0)


def messages() -> None:
    x = np.arange(4)
    me, n = dist.get_rank(), dist.get_world_size()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, (me + 1) % n, tag=3),
            dist.P2POp(dist.irecv, np.empty_like(x), (me - 1) % n, tag=3),
        ]
    )
    for work in assert_type(works, list[dist.Work]):
        work.wait()
    assert_type(works[1].source, int)


def arrays_across_ranks() -> None:
    mesh = assert_type(dist.ProcessMesh([*range(dist.get_world_size())], ["x"]), dist.ProcessMesh)
    a = assert_type(dist.shard_tensor(np.ones((4, 3)), mesh, [dist.Shard(0)]), dist.DistArray)
    b = assert_type(dist.reshard(a, mesh, [dist.Shard(1)]), dist.DistArray)
    assert_type((2.0 * a[1:] + b[1:] ** 2) @ -b.T > 0, dist.DistArray)
    assert_type(a.sum(axis=0), dist.DistArray)
    dist.reshard(a, mesh, [dist.Shard(1)], out=b)
    work = assert_type(dist.reshard(b, mesh, [dist.Replicate()], async_op=True), dist.Work)
    work.wait()
    dist.dtensor_from_fn(np.zeros, mesh, [dist.Partial(dist.ReduceType.kRedMax)], (4, 3))
    dist.dtensor_from_local(np.ones(3), mesh, [dist.Shard(0)], shape=(3 * mesh.size,))
    assert_type(a.shape, tuple[int, ...])
    assert_type(a.placements, list[dist.Placement])
    dist.visualize_sharding(a)


def objects() -> None:
    reports: list[dict[str, int]] = []
    dist.all_gather_object(reports, {"rank": dist.get_rank()})
    assert_type(reports[0]["rank"], int)
    settings = ["a"] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(settings, src=0)


def errors() -> None:
    try:
        dist.barrier()
    except dist.CollectiveTimeout as error:
        assert_type(error.missing, tuple[int, ...])
    except dist.RemoteError as error:
        assert_type(error.rank, int)
        assert_type(error.traceback, str)
        assert_type(error.in_step, bool)
    except dist.HpcdistError:
        raise
    with dist.together() as ranks:
        assert_type(ranks.share(dist.get_rank), list[int])
    assert_type(dist.together().lead(square, 2, power=3), float)

    names: list[str] = []

    def listen(event: dist.Event) -> None:
        names.append(f"{event.name} {event.nbytes} {event.error}")

    dist.subscribe(listen)()


def square(base: int, power: float = 2) -> float:
    return float((base + dist.get_rank()) ** power)


def ranks() -> None:
    assert_type(dist.simulate(3, square, 1, power=2.0, timeout=30), list[float])


def processes() -> None:
    context = dist.spawn(square, args=(1,), nprocs=2, join=False)
    assert_type(context.join(timeout=60), bool)


def main() -> None:
    groups()
    collectives()
    messages()
    arrays_across_ranks()
    objects()
    errors()
    ranks()


if __name__ == "__main__":
    main()
