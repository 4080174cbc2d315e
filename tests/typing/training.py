"""Training a model of arrays: data, optimizer, checkpoint, and the stop that Slurm asks for."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import hpcdist as dist
from hpcdist import checkpoint, optim

Floats = npt.NDArray[np.float64]


class Line:
    def __init__(self) -> None:
        self.w = dist.Parameter(np.zeros(3))

    def named_parameters(self) -> Iterator[tuple[str, dist.Parameter]]:
        yield "w", self.w

    def __call__(self, x: Floats) -> Floats:
        return np.asarray(x @ self.w.data)


def step(model: dist.DataParallel, line: Line, x: Floats) -> float:
    y: Floats = model(x)
    line.w.grad = x.sum(axis=0) * (y - 1).mean()
    return float(y.mean())


def train(folder: Path) -> None:
    line = Line()
    model = dist.DataParallel(line, find_unused_parameters=True)
    optimizer: optim.Optimizer = dist.optim.Adam(model.named_parameters(), learning_rate=0.1)
    sharded = assert_type(dist.shard_dataset(np.ones((8, 3)), seed=1), dist.ShardedDataset)
    work = None
    for epoch in range(2):
        sharded.set_epoch(epoch)
        for batch in sharded.batches(2):
            optimizer.clear_grad()
            step(model, line, batch)
            dist.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        work = assert_type(
            checkpoint.save(state, folder, step=epoch, keep=2, async_save=True), dist.Work
        )
        if assert_type(dist.should_stop(), bool):
            break
    if work is not None:
        work.wait()
    assert_type(checkpoint.latest(folder), str | None)
    checkpoint.load({"model": model.state_dict()}, folder, strict=False)
    assert_type(model.comm_stats().buckets, int)
    with model.no_sync():
        step(model, line, np.ones((2, 3)))


def shard() -> None:
    line = Line()
    optimizer = dist.optim.SGD(line.named_parameters(), learning_rate=0.1, weight_decay=0.0)
    model, sharded, scaler = dist.group_sharded_parallel(line, optimizer, "os_g")
    step(model, line, np.ones((2, 3)))
    sharded.step()
    assert scaler is None


def indices() -> list[int]:
    return list(dist.DistributedSampler(10, shuffle=False, num_replicas=4, rank=1))


def main() -> None:
    dist.init_parallel_env()
    with TemporaryDirectory() as folder:
        train(Path(folder))
    shard()
    indices()


if __name__ == "__main__":
    main()
