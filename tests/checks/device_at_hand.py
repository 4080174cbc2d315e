"""The device of tests that say nothing of which: a GPU if there is one, else the slow device.

`DEVICE.array` puts numbers on it, `DEVICE.numbers` reads them, and its arrays are `DeviceArray`s.
"""

from typing import final

from hpcdist.runtime import gpu
from hpcdist.testing import slow_device


@final
class Gpu:
    """The current GPU of this rank, with CuPy's arrays."""

    def __init__(self):
        import cupy

        self._cupy = cupy
        self.array, self.numbers = cupy.array, cupy.asnumpy

    @property
    def name(self):
        return f"cuda:{self._cupy.cuda.Device().id}"


if gpu.count():
    import cupy

    DEVICE, DeviceArray = Gpu(), cupy.ndarray
else:
    DEVICE, DeviceArray = slow_device.DEVICE, slow_device.SlowArray
