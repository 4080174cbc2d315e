"""A program that trains on a grid, as mypy and pyright see it: strict, with nothing ignored."""

import numpy as np

import hpcdist as dist
from hpcdist import fleet


class Line:
    def __init__(self) -> None:
        self.w = dist.Parameter(np.zeros(2))

    def named_parameters(self) -> list[tuple[str, dist.Parameter]]:
        return [("w", self.w)]


def main() -> None:
    strategy = fleet.DistributedStrategy()
    strategy.fuse_grad_size_in_MB = 16
    strategy.sharding_configs = {"stage": 2}
    strategy.hybrid_configs["sharding_degree"] = -1
    told: str = strategy.report()
    made: fleet.Fleet = fleet.init(is_collective=True, strategy=strategy)

    grid = made.get_hybrid_communicate_group()
    same: fleet.HybridCommunicateGroup = fleet.get_hybrid_communicate_group()
    group: dist.Group = grid["mp"]
    place: int = grid.rank("dp") + same.degree("sharding") + group.nranks
    mode: dist.ParallelMode = grid.get_parallel_mode()

    line = Line()
    model = fleet.distributed_model(line)
    optimizer = fleet.distributed_optimizer(dist.optim.SGD(line.named_parameters(), 0.1))
    for _ in range(2):
        line.w.grad = np.ones(2)
        optimizer.step()

    index: int = fleet.worker_index()
    losses = fleet.util.all_reduce([0.5, index], "max", comm_world="worker")
    largest: float = float(losses.max())
    files: list[str] = fleet.util.get_file_shard(["a", "b"])
    fleet.util.print_on_rank(f"{told} {place} {mode} {largest} {files} {model}", 0)
    fleet.barrier_worker()
    fleet.collective_perf("allreduce", 1, {8: 1e6})


if __name__ == "__main__":
    main()
