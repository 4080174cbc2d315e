"""Does an installation work? Alone, and started on several ranks: `hpcdist run -n 2 smoke.py`."""

import numpy as np

import hpcdist as dist
from hpcdist.transport.shm.kernel import compiled


def reduced():
    x = np.full(1000, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x[0]


def mpi_of(world):
    """Return what carries messages between ranks, in two words."""
    if world.nranks == 1:
        return "no MPI needed"
    from mpi4py import MPI

    return " ".join([MPI.get_vendor()[0], ".".join(map(str, MPI.get_vendor()[1]))])


def main():
    assert dist.simulate(3, reduced) == [6.0, 6.0, 6.0]
    world = dist.init_parallel_env()
    assert reduced() == world.nranks * (world.nranks + 1) / 2
    everyone = []
    dist.all_gather_object(everyone, world.rank)
    assert everyone == list(range(world.nranks))
    if world.rank == 0:
        kernel = "with" if compiled is not None else "without"
        ranks = "1 rank" if world.nranks == 1 else f"{world.nranks} ranks"
        print(
            f"hpcdist {dist.__version__} on {ranks}, {kernel} the compiled kernel, "
            f"{mpi_of(world)}, NumPy {np.__version__}"
        )


if __name__ == "__main__":
    main()
