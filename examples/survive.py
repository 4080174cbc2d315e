"""Train on when ranks die, with spares in their places, or with fewer ranks.

    hpcdist run --survive -n 4 python examples/survive.py --kill 2@25
    hpcdist run --survive --spares 1 -n 4 python examples/survive.py --kill 2@25

It loses rank 2 at step 25; the others go back to step 20, which they have in their
memories, and end the training. A batch is the same for any number of ranks, so the loss is, too,
but for the rounding of sums. A spare waits until it is needed, and gets from the others' memories
what rank 2 had: not even the rounding is another. With more of --kill the next one dies after each
recovery.
"""

import argparse
import os
import signal
import time

import numpy as np

import hpcdist as dist

BATCH = 120


class Network:
    """8 numbers, one hidden layer, 1 number."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.inner = dist.Parameter(random.normal(0, 0.5, (8, 32)))
        self.outer = dist.Parameter(random.normal(0, 0.2, 32))

    def named_parameters(self):
        return vars(self).items()

    def __call__(self, inputs):
        """Return the hidden units and the answer to each input."""
        hidden = np.tanh(inputs @ self.inner.data)
        return hidden, hidden @ self.outer.data

    def backward(self, inputs, hidden, slopes):
        """Assign the gradients, last layer first, from the slopes of the loss in the answers."""
        self.outer.grad = hidden.T @ slopes
        self.inner.grad = inputs.T @ (slopes[:, None] * self.outer.data * (1 - hidden**2))


def share_of_batch(world, seed, step):
    """Return this rank's part of the batch of a step; it depends on nothing else."""
    inputs = np.random.default_rng((seed, step)).normal(size=(BATCH, 8))
    return inputs[world.rank :: world.nranks]


def train_step(world, network, model, optimizer, inputs):
    """Improve the parameters; return the mean loss over the batch."""
    hidden, answers = model(inputs)
    errors = answers - np.sin(inputs).sum(axis=1)
    # times the number of ranks: the gradients become the mean over the ranks
    network.backward(inputs, hidden, 2 * errors * world.nranks / BATCH)
    optimizer.step()
    optimizer.clear_grad()
    return dist.all_reduced(float(errors @ errors)) / BATCH


def die_if_asked(world, kills, step):
    """End this process without a word, if it is the next one that is to die, and now."""
    if world.generation < len(kills) and kills[world.generation] == (world.rank, step):
        os.kill(os.getpid(), signal.SIGKILL)


@dist.survive
def train(world, options):
    """Train on the ranks that there are; called again after each recovery."""
    network = Network(options.seed)
    model, optimizer, _ = dist.group_sharded_parallel(
        network, dist.optim.Adam(network.named_parameters(), options.rate), "os"
    )
    losses = np.zeros(options.steps)
    memory = dist.Memory(
        model, optimizer, state={"losses": losses}, every=options.every, path=options.path
    )
    for step in memory.steps(options.steps):
        die_if_asked(world, options.kill, step)
        inputs = share_of_batch(world, options.seed, step)
        losses[step] = train_step(world, network, model, optimizer, inputs)
        if step % options.every == 0 and world.rank == 0:
            print(f"step {step} on {world.nranks} ranks: loss {losses[step]:.6f}", flush=True)
        time.sleep(options.pause)
    if world.rank == 0:
        print(f"loss {losses[0]:.6f} became {losses[-1]:.6f} in {options.steps} steps", flush=True)


def rank_at_step(text):
    """Read ``RANK@STEP``."""
    rank, _, step = text.partition("@")
    return int(rank), int(step)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between commits")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", help="a folder for checkpoints on disk, in case a node is lost")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
    parser.add_argument(
        "--kill", type=rank_at_step, action="append", default=[], metavar="RANK@STEP",
        help="let a rank die; again for a second one after the first recovery",
    )  # fmt: skip
    train(parser.parse_args())


if __name__ == "__main__":
    main()
