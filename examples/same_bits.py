"""Train twice with the same bits, the second time with a rank that dies.

    hpcdist run --survive -n 4 python examples/same_bits.py --kill 2@25

Eight virtual ranks train a network with dropout and batch norm on four ranks. Then they train the
same again, and rank 2 dies at step 25: its virtual ranks move to the others, which go on from step
20. Both print a fingerprint of all weights and losses, and it is the same one, as it is with
another -n.
"""

import argparse
import hashlib
import os
import signal

import numpy as np
import torch
from torch import nn

import hpcdist as dist

ROWS = 16
"""Samples of a virtual rank in a step."""


def network():
    """Return a network in which each virtual rank has random numbers and statistics of its own."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 1)
    )


def samples(length):
    """Return points, and a wave over them."""
    points = torch.rand(length, 8, generator=torch.Generator().manual_seed(2)) * 2 - 1
    return torch.utils.data.TensorDataset(points, torch.sin(3 * points).mean(1, keepdim=True))


def fingerprint(model, losses):
    """Return what is another one if a bit differs."""
    found = hashlib.sha256(losses.tobytes())
    for weights in model.state_dict().values():
        found.update(weights.numpy().tobytes())
    return found.hexdigest()


def die_if_asked(world, kill, step):
    """End this process without a word, if it is the one that is to die, and now."""
    if kill == (world.rank, step) and world.generation == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@dist.survive
def train(world, name, options, kill=None):
    """Train on the ranks that there are, return losses; called again after a recovery."""
    torch.set_num_threads(1)
    count = options.virtual_ranks
    model = dist.DataParallel(network(), virtual_ranks=count)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    data = samples(ROWS * count * options.steps)
    sampler = dist.DistributedSampler(data, virtual_ranks=count)
    losses = np.zeros(options.steps)
    memory = dist.Memory(model, optimizer, sampler, state={"losses": losses}, every=10, name=name)
    steps = memory.steps(options.steps)  # restores the sampler, too: begin with it
    for step, (points, waves) in zip(steps, batches(data, sampler, model), strict=False):
        die_if_asked(world, kill, step)
        of_parts = []
        for part in model.parts((points, waves)):
            loss = (model(part.inputs) - part.targets).square().mean()
            loss.backward()
            of_parts.append(loss.detach())
        dist.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = model.mean_of_parts(of_parts)
    if world.rank == 0:
        print(f"{name:>11} on {world.nranks} ranks: {fingerprint(model, losses)}", flush=True)
    return losses


def batches(data, sampler, model):
    """Yield the batches of the virtual ranks that live here."""
    size = ROWS * len(model.virtual_ranks)
    yield from torch.utils.data.DataLoader(data, batch_size=size, sampler=sampler)


def rank_at_step(text):
    """Read ``RANK@STEP``."""
    rank, _, step = text.partition("@")
    return int(rank), int(step)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--virtual-ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill", type=rank_at_step, metavar="RANK@STEP", help="let a rank die")
    parser.add_argument("--losses", action="store_true", help="print the losses of all steps, too")
    options = parser.parse_args()
    found = [train("undisturbed", options), train("with a death", options, options.kill)]
    if options.losses and dist.get_rank() == 0:
        for losses in found:
            print("losses", *losses)


if __name__ == "__main__":
    main()
