"""`StagingBuffers`: what staging needs of one device."""

from __future__ import annotations

from collections import deque

from hpcdist.arrays.device import DeviceRuntime, Event, Stream
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Message
from hpcdist.transport.device.staged.pinned import Pinned


class StagingBuffers(NamedTuple):
    """Blocks of locked memory, and a stream per direction: copies of both overlap.

    `outward` is to the host; on `inward` a result is complete. `chunk_bytes` are copied at a time.
    `landing` keeps the messages that are copied to the device, and whose memory the device's
    library would give to others when nobody has them, until the events.
    """

    runtime: DeviceRuntime
    pinned: Pinned
    outward: Stream
    inward: Stream
    chunk_bytes: int
    landing: deque[tuple[Message, Event]]
