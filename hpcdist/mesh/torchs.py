"""torch beside arrays: `to_dtensor` and `from_dtensor`, and who serves torch's own tensors.

`shard_tensor` and its family make arrays. What takes part in torch's autograd, parameters and
DTensors, they leave to torch's DTensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcdist.arrays.libraries import row_of
from hpcdist.errors import UsageError
from hpcdist.lazy import load
from hpcdist.mesh.dist_array import DistArray
from hpcdist.text import an

_MODULE = "hpcdist.torch.mesh"
_OURS = (DistArray, np.ndarray)
_SERVED = {("torch", "Parameter"): _MODULE, ("torch", "DTensor"): _MODULE}


def torchs_own(value: Any) -> Any:
    """Return the module that serves `value`, if it is a parameter or DTensor of torch, or None."""
    if type(value) in _OURS:
        return None
    row = row_of(type(value), _SERVED)
    return None if row is None else load(row)


def to_dtensor(a: DistArray) -> Any:
    """Return a DTensor of torch that shares this rank's part with `a`.

    It has process groups of hpcdist. Collective over the mesh when its first DTensor is made.

    Args:
        a: an array, cut as `Shard` cuts.

    Raises:
        UsageError: the array is cut otherwise, or has a placement that torch does not have; torch
            is not installed.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(list(range(world.nranks)), dim_names=["x"])
        >>> a = dist.shard_tensor(np.ones((4, 6)), mesh, [dist.Shard(0)])
        >>> dist.to_dtensor(a).shape
        torch.Size([4, 6])

    """
    if not isinstance(a, DistArray):
        raise UsageError(f"to_dtensor takes a DistArray, got {an(type(a).__name__)}")
    try:
        module = load(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError(
            "to_dtensor needs torch, which is not installed: pip install 'hpcdist[torch]'"
        ) from error
    return module.to_dtensor(a)


def from_dtensor(t: Any) -> DistArray:
    """Return an array that shares this rank's part with a DTensor of torch. Local.

    Args:
        t: a DTensor; gradients stay behind.

    Raises:
        UsageError: it is not a DTensor, or has a placement that arrays do not have.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(list(range(world.nranks)), dim_names=["x"])
        >>> a = dist.shard_tensor(np.ones((4, 6)), mesh, [dist.Shard(0)])
        >>> dist.from_dtensor(dist.to_dtensor(a)).shape
        (4, 6)

    """
    module = torchs_own(t)
    if module is None:
        raise UsageError(
            f"from_dtensor takes a DTensor of torch, got {an(type(t).__name__)}; shard_tensor "
            "makes an array of a tensor that every rank has"
        )
    made: DistArray = module.from_dtensor(t)
    return made
