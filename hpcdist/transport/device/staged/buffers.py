"""`StagingBuffers`: what staging needs of one device."""

from __future__ import annotations

from typing import NamedTuple

from hpcdist.arrays.device import DeviceRuntime, Stream
from hpcdist.transport.device.staged.pinned import Pinned


class StagingBuffers(NamedTuple):
    """Blocks of locked memory, and a stream per direction: copies of both overlap.

    `outward` is to the host; on `inward` a result is complete. `chunk_bytes` are copied at a time.
    """

    runtime: DeviceRuntime
    pinned: Pinned
    outward: Stream
    inward: Stream
    chunk_bytes: int
