"""CuPy's arrays in checks that were written for NumPy's, and whether NCCL serves the ranks here."""

import numpy as np

from hpcdist.config import read_config
from hpcdist.testing.on_device import Arrays
from hpcdist.transport.device.nccl import binding


def why_not_nccl(gpus, ranks):
    """Say why NCCL does not connect so many ranks here; empty if it does."""
    provider = read_config().nccl_binding
    version = binding.version(provider)
    if not version:
        return binding.why_not(provider)
    if gpus < ranks and version < binding.SHARES_GPUS:
        return (
            f"{ranks} ranks, but CUDA sees {gpus} GPUs, and NCCL {version} is older than "
            f"{binding.SHARES_GPUS}: it has no NCCL_MULTI_RANK_GPU_ENABLE"
        )
    return ""


def arrays_of(cupy):
    known = "?bhilqBHILQefdFD"

    def to_device(array):
        if array.dtype.char not in known:
            return array  # CuPy has no such dtype: it stays on the host
        given = np.array(array, array.dtype.newbyteorder("="))
        if array.flags.c_contiguous:
            return cupy.asarray(given)
        room = cupy.zeros((*given.shape[:-1], given.shape[-1] * 2), given.dtype)[..., ::2]
        room[...] = cupy.asarray(given)
        return room

    def to_host(array):
        cupy.cuda.get_current_stream().synchronize()  # asnumpy does not where there is nothing
        return cupy.asnumpy(array)

    return Arrays(to_device, to_host, lambda array: isinstance(array, cupy.ndarray))
