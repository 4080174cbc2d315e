"""`limits`: what no library can beat, measured beside them: copies without any message.

All ranks copy as many bytes as each hands in, at the same time, each for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from hpcdist.arrays.device import DeviceRuntime
from hpcdist.arrays.libraries import NumpyArray
from hpcdist.bench.interleaved import Call
from hpcdist.bench.memory_kinds import Memory
from hpcdist.bench.rows import COPY, PINNED
from hpcdist.comm.group import Group
from hpcdist.transport.device.staged.pinned import Pinned
from hpcdist.transport.shm.heap import Heap


@contextmanager
def limits(memory: Memory, nbytes: int, group: Group) -> Iterator[dict[str, Call]]:
    """Give the copies of `nbytes` in `memory` that are its limits, by the names of their rows.

    Of a device that is the copy on it and, for what travels through the host, the one to locked
    host memory and back; the locked memory is there until the end of the block.
    """
    bytes_ = np.dtype(np.uint8)
    source, target = (memory.zeros(nbytes, bytes_, group) for _ in range(2))
    found: dict[str, Call] = {COPY: partial(np.copyto, target, source)}
    if memory.device is None:
        yield found
        return
    engine = memory.device.engine()
    pinned = Pinned(engine, Heap(0))
    out, back = (pinned.take(nbytes)[:nbytes] for _ in range(2))
    for each in (out, back):
        each.fill(0)
    try:
        yield {**found, PINNED: _through_host(engine, source, out, back, target)}
    finally:
        pinned.close()


def _through_host(
    engine: DeviceRuntime, source: NumpyArray, out: NumpyArray, back: NumpyArray, target: NumpyArray
) -> Call:
    """Return the copies to the host and from it, on streams of their own.

    Like an operation of hpcdist they begin when the current streams have come so far, and the
    current streams wait for them.
    """
    outward, inward = engine.new_stream(), engine.new_stream()

    def copy() -> None:
        current = engine.current_streams()
        for event in [engine.record(stream) for stream in current]:
            engine.wait_event(outward, event)
            engine.wait_event(inward, event)
        engine.copy_to_host(source, out, outward)
        engine.copy_to_device(back, target, inward)
        for event in (engine.record(outward), engine.record(inward)):
            for stream in current:
                engine.wait_event(stream, event)

    return copy
