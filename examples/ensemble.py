"""An ensemble of model runs, whose ranks hand snapshots to ranks that analyse them, and go on.

    mpiexec -n 3 python examples/ensemble.py

The last third of the ranks analyse; the others integrate the members of the ensemble, which begin
in slightly different states. The model, that of Lorenz (1996), is chaotic as the weather is: the
spread of the members grows until they have nothing in common. The result has the same bits on any
number of ranks.
"""

import argparse
from collections import deque

import numpy as np

import hpcdist as dist

FORCING, TIME_STEP = 8.0, 0.05
AHEAD = 4
"""Snapshots that a rank has handed over at most while they are not yet taken in."""


class Analysis:
    """Takes snapshots of members and computes the statistics of those steps that are complete.

    It is an actor: it lives on a rank that analyses, and has one call at a time.
    """

    def __init__(self, members, variables):
        self.shape = members, variables
        self.incomplete = {}
        self.statistics = {}

    def take(self, step, members, states):
        """Take the states of some members after a step."""
        empty = np.empty(self.shape), set(range(self.shape[0]))
        ensemble, missing = self.incomplete.setdefault(step, empty)
        ensemble[members] = states
        missing.difference_update(members)
        if not missing:
            del self.incomplete[step]
            spread = np.sqrt(ensemble.var(axis=0, ddof=1).mean())
            self.statistics[step] = float(ensemble.mean()), float(spread)

    def found(self):
        """Return the mean and the spread after each step that is complete."""
        return self.statistics


def first_states(members, variables):
    """Return the states in which these members begin: one state, and a little noise."""
    calm = np.full(variables, FORCING)
    noise = [np.random.default_rng(member).normal(size=variables) for member in members]
    return calm + 1e-4 * np.reshape(noise, (len(members), variables))


def slope(x):
    return (np.roll(x, -1, 1) - np.roll(x, 2, 1)) * np.roll(x, 1, 1) - x + FORCING


def after_a_step(x):
    """Return the states a time step later, by the method of Runge and Kutta."""
    first = slope(x)
    second = slope(x + TIME_STEP / 2 * first)
    third = slope(x + TIME_STEP / 2 * second)
    fourth = slope(x + TIME_STEP * third)
    return x + TIME_STEP / 6 * (first + 2 * second + 2 * third + fourth)


def integrate(members, analyses, args):
    """Integrate some members; hand a snapshot to one of the analyses after every few steps."""
    x, handed_over = first_states(members, args.variables), deque()
    for step in range(args.steps + 1):
        if step % args.every == 0:
            analysis = analyses[step // args.every % len(analyses)]
            handed_over.append(analysis.take.rpc_async(step, members, x))  # and on it goes
        if len(handed_over) > AHEAD:
            handed_over.popleft().wait()
        x = after_a_step(x)  # a new array: the old one may be on its way
    for snapshot in handed_over:
        snapshot.wait()


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--members", type=int, default=24, help="2 or more")
    parser.add_argument("--variables", type=int, default=40)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps from snapshot to snapshot")
    args = parser.parse_args(words)

    world = dist.init_parallel_env()
    analysing = world.ranks[-max(1, world.nranks // 3) :]
    integrating = [rank for rank in world.ranks if rank not in analysing] or analysing
    dist.rpc.init_rpc()

    analyses = [None] * len(analysing)
    if world.rank == 0:
        analyses = [dist.rpc.remote(to, Analysis, args.members, args.variables) for to in analysing]
    dist.broadcast_object_list(analyses, 0)  # handles travel as other objects do

    statistics = {}
    if world.rank in integrating:
        group = dist.new_group(integrating)
        place = integrating.index(world.rank)
        integrate([*range(place, args.members, len(integrating))], analyses, args)
        dist.barrier(group)
        if world.rank == 0:
            for analysis in analyses:
                statistics.update(analysis.found())
            for step, (mean, spread) in sorted(statistics.items()):
                print(f"after {step:5} steps: mean {mean:6.3f}, spread {spread:8.5f}", flush=True)
    else:
        dist.rpc.serve()  # until all others have called shutdown
    dist.rpc.shutdown()
    return statistics


if __name__ == "__main__":
    main()
