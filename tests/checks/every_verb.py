"""A call of each verb of arrays, and both ways to run it: in one compiled call, and in Python."""

import numpy as np

import hpcdist as dist
from hpcdist.transport.shm.kernel import compiled

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
REDUCTIONS = "all_reduce", "reduce", "reduce_scatter"


def numbers(rank, shape, dtype):
    """Return what a rank contributes; sums of them round in 16 bits."""
    drawn = np.random.default_rng(rank).integers(0, 100, shape) / 7
    return np.asarray(drawn).astype(dtype)


def calls(rank, size, shape, dtype, root, place=np.asarray):
    """Return for each verb its arguments on this rank, and the array that gets its result.

    `place` says where the arrays lie.
    """
    op = SUM if dtype in "?i1u8c16" else AVG
    mine, out = place(numbers(rank, shape, dtype)), place(np.zeros(shape, dtype))
    blocks = [place(numbers(rank + r, shape, dtype)) for r in range(size)]
    one_array = place(np.stack(blocks))
    whole = place(np.zeros((size, *shape), dtype))
    parts = [place(np.zeros(shape, dtype)) for _ in range(size)]
    at_root = rank == root
    return {
        "barrier": ((), out),
        "all_reduce": ((mine, op), mine),
        "reduce": ((mine, root, op), mine if at_root else out),
        "reduce_scatter": ((out, one_array if root % 2 else blocks, op), out),
        "broadcast": ((mine, root), mine),
        "all_gather": ((whole, mine), whole),
        "gather": ((mine, parts if at_root else None, root), parts),
        "scatter": ((out, one_array if at_root else None, root), out),
        "alltoall": ((parts, blocks), parts),
        "alltoall_single": ((whole, one_array, None, None), whole),
    }


def is_compiled(dtype):
    """Whether there is a compiled loop for sums: float16 needs a processor that converts it."""
    return str(dtype) not in ("float16", "torch.float16") or "add_float16" in compiled.CODES


def without_splits(args):
    """Return arguments as they are given to the public functions."""
    return args[:2] if args[2:] == (None, None) else args
