"""Train through time limits and preemptions: stop in time, save, and go on from there.

    sbatch slurm/requeue.sbatch losses.txt python examples/preemptible.py

The losses of all steps are in losses.txt once the training has finished. They are the same to the
last digit however often it was interrupted: the state holds all that the next step depends on.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np

import hpcdist as dist

BATCH = 128


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


def share_of_batch(seed, step):
    """Return this rank's part of the batch of a step; it depends on nothing else."""
    inputs = np.random.default_rng((seed, step)).normal(size=(BATCH, 8))
    return inputs[dist.get_rank() :: dist.get_world_size()]


def train_step(model, inputs, rate):
    """Improve the parameters; return the mean loss over the batch."""
    size = dist.get_world_size()
    hidden, answers = model(inputs)
    errors = answers - np.sin(inputs).sum(axis=1)
    loss = np.array([errors @ errors])
    dist.all_reduce(loss)
    # times size: DataParallel takes the mean over the ranks
    model.backward(inputs, hidden, 2 * errors * size / BATCH)
    for parameter in model.parameters():
        parameter.data -= rate * parameter.grad
    return loss[0] / BATCH


def save(path, network, losses):
    """Write the state; a job that is killed here leaves the last one as it was."""
    if dist.get_rank() == 0:
        arrays = {name: parameter.data for name, parameter in network.named_parameters()}
        with Path(f"{path}.new").open("wb") as file:
            np.savez(file, losses=losses, **arrays)
            file.flush()
            os.fsync(file.fileno())
        Path(f"{path}.new").replace(path)
    dist.barrier()


def load(path, network):
    """Read the state on rank 0, whose parameters all ranks get; return the losses so far."""
    found = [[]]
    if dist.get_rank() == 0 and path.exists():
        with np.load(path) as state:
            for name, parameter in network.named_parameters():
                parameter.data[...] = state[name]
            found = [state["losses"].tolist()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", type=Path, default=Path("state.npz"))
    parser.add_argument("--losses", type=Path, default=Path("losses.txt"))
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
    options = parser.parse_args()

    world = dist.init_parallel_env()
    dist.on_preempt()  # from here on a signal no longer ends the process
    network = Network(options.seed)
    losses = load(options.state, network)
    model = dist.DataParallel(network)  # every rank gets the parameters of rank 0
    if world.rank == 0:
        print(f"{world.nranks} ranks begin with step {len(losses)}", flush=True)
    for step in range(len(losses), options.steps):
        losses.append(train_step(model, share_of_batch(options.seed, step), options.rate))
        time.sleep(options.pause)
        if dist.should_stop():
            save(options.state, network, losses)
            if world.rank == 0:
                print(f"saved after step {step}: somebody wants the nodes", flush=True)
            return
    save(options.state, network, losses)
    if world.rank == 0:
        options.losses.write_text("".join(f"{loss!r}\n" for loss in map(float, losses)))
        print(f"loss {losses[0]:.4f} became {losses[-1]:.4f} in {len(losses)} steps", flush=True)


if __name__ == "__main__":
    main()
