"""`StagingBuffers`: what staging needs of one device, and how the host waits for a device."""

from __future__ import annotations

from typing import NamedTuple

from hpcdist.arrays.device import DeviceRuntime, Event, Stream
from hpcdist.errors import CollectiveTimeout
from hpcdist.transport.device.staged.pinned import Pinned
from hpcdist.transport.polling import poll


class StagingBuffers(NamedTuple):
    """What staging needs of one device: blocks of locked memory and a stream per direction."""

    engine: DeviceRuntime
    pinned: Pinned
    outward: Stream
    inward: Stream
    chunk_bytes: int


def wait_on_host(engine: DeviceRuntime, event: Event, timeout_s: float) -> bool:
    """Block the host until `event` is complete, or the time is over; say whether it is."""
    return poll(lambda: engine.is_done(event), timeout_s)


def arrive(engine: DeviceRuntime, event: Event, timeout_s: float) -> None:
    """Block the host until `event` is complete; `CollectiveTimeout` when the time is over."""
    if not wait_on_host(engine, event, timeout_s):
        raise CollectiveTimeout(
            f"{engine.name} has not come to the end of what was computed before within "
            f"{timeout_s:g} s; look for what holds up its streams"
        )
