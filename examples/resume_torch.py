"""Train with torch, be killed at any moment, and go on, on any number of ranks.

    mpiexec -n 2 python examples/resume_torch.py --folder run    # kill it
    mpiexec -n 4 python examples/resume_torch.py --folder run    # goes on after the last save

The state is what the training uses: the objects themselves. The batches of all ranks together are
the same on any number of ranks that divides the batch of 96, and so are the losses, but for the
rounding of sums: other ranks add up the same numbers in another order.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import hpcdist as dist

SAMPLES, BATCH = 960, 96


def dataset():
    """Return inputs and wanted outputs, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs).sum(dim=1, keepdim=True)


def train_step(model, optimizer, scheduler, inputs, wanted):
    """Improve the parameters; return the mean loss over the batch of all ranks."""
    loss = (model(inputs) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()  # averages the gradients, too
    optimizer.step()
    scheduler.step()
    mean = loss.detach()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def train(state, options):
    """Train from where the state is up to the last step, and save it again and again."""
    model, optimizer, scheduler = (state[name] for name in ("model", "optimizer", "scheduler"))
    data, losses = state["data"], state["losses"]
    while len(losses) < options.steps:
        for inputs, wanted in data.batches(BATCH // dist.get_world_size()):
            losses.append(train_step(model, optimizer, scheduler, inputs, wanted))
            time.sleep(options.pause)
            if len(losses) % options.every == 0 or len(losses) == options.steps:
                step = len(losses)
                dist.checkpoint.save(state, options.folder, step=step, keep=2, async_save=True)
            if len(losses) == options.steps:
                return
        data.set_epoch(data.epoch + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between saves")
    parser.add_argument("--folder", type=Path, default=Path("run"))
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
    options = parser.parse_args()

    world = dist.init_parallel_env()
    torch.set_num_threads(1)  # the ranks of a node share its cores
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    model = dist.DataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5),
        "data": dist.shard_dataset(dataset(), seed=1),
        "losses": [],
    }
    if dist.checkpoint.latest(options.folder) is not None:
        dist.checkpoint.load(state, options.folder)
    if world.rank == 0:
        print(f"{world.nranks} ranks begin with step {len(state['losses'])}", flush=True)
    train(state, options)
    if world.rank == 0:
        losses = state["losses"]
        options.losses.write_text("".join(f"{loss!r}\n" for loss in losses))
        print(f"loss {losses[0]:.4f} became {losses[-1]:.4f} in {len(losses)} steps", flush=True)


if __name__ == "__main__":
    main()
