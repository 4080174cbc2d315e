"""How the host waits for a device: polled, with a time limit, while MPI goes on."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.arrays.device import DeviceRuntime, Event
from hpcdist.errors import CollectiveTimeout
from hpcdist.transport.call.call import Call, label
from hpcdist.transport.waiting.polling import poll


def wait_on_host(runtime: DeviceRuntime, event: Event, timeout_s: float) -> bool:
    """Block the host until `event` is complete, or the time is over; return whether it is."""
    return poll(lambda: runtime.is_done(event), timeout_s)


def arrive(runtime: DeviceRuntime, event: Event, timeout_s: float) -> None:
    """Block the host until `event` is complete; `CollectiveTimeout` when the time is over."""
    if not wait_on_host(runtime, event, timeout_s):
        raise CollectiveTimeout(
            f"{runtime.name} has not finished its earlier work within {timeout_s:g} s; look for "
            "the kernel that blocks its streams"
        )


def await_end(event: Event, call: Call, ranks: Sequence[int], timeout_s: float) -> None:
    """Block the host until `event`, the end of `call`; `CollectiveTimeout` when time is over."""
    assert call.device is not None
    if not wait_on_host(call.device, event, timeout_s):
        raise CollectiveTimeout(
            f"{label(call, ranks)} has not ended on {call.device.name} within {timeout_s:g} s; "
            "look for what holds up its streams"
        )
