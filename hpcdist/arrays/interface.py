"""What hpcdist needs of an array library: `Library`; and of a device: `DeviceRuntime`.

A device is one whose memory the host cannot touch. Its array library brings the rest: its arrays
obey NumPy's own functions (NEP 13 and NEP 18), so lists are joined, arrays packed and numbers
converted by the same lines as in host memory. Work is put on streams, runs in their order, and is
waited for by events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hpcdist.named_tuple import NamedTuple

NumpyArray = np.ndarray[Any, Any]
Stream = Any
Event = Any
DeviceArray = Any


class DeviceView(NamedTuple):
    """An array's own memory on a device: `data` in a dtype its library knows, `dtype` the real."""

    data: Any
    dtype: np.dtype


class Library(NamedTuple):
    """`view` shows an array's own memory; `wrap` turns a fresh NumPy array into the library's.

    Of an array on a device, `view` is a `DeviceView`, `engine` finds the device that holds memory
    of such a view, and `wrap_device` turns fresh memory there, and its real dtype, into an array
    of the library. `remedy` is for messages: what to do about an array that cannot be written.
    """

    view: Callable[[Any], Any]
    wrap: Callable[[NumpyArray], Any]
    remedy: str = "pass a writable copy, for example numpy.array(x)"
    engine: Callable[[Any], Any] | None = None
    wrap_device: Callable[[Any, np.dtype], Any] | None = None


class DeviceRuntime(ABC):
    """One device of this process; `name` is for messages, as ``cuda:0``."""

    name: str
    failures: tuple[type[Exception], ...] = ()
    """What the device's functions raise when it fails."""

    @abstractmethod
    def current_streams(self) -> tuple[Stream, ...]:
        """Return the current stream of each library in use, each stream once.

        What the caller has computed is complete when they have come this far, and what he
        computes next is put on one of them.
        """

    @abstractmethod
    def new_stream(self) -> Stream:
        """Make a stream that does not wait for the default stream."""

    @abstractmethod
    def use(self) -> None:
        """Make the device the current one of this thread, which is hpcdist's own."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Make `stream` current for the array library inside the block, on this thread.

        Args:
            stream: of this device.

        """

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Return an event that is complete when `stream` has come to this point.

        Args:
            stream: of this device.

        """

    @abstractmethod
    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make `stream`, not the host, wait for `event`.

        Args:
            stream: of this device.
            event: what `record` returned.

        """

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Return whether `event` is complete, without blocking.

        Args:
            event: what `record` returned.

        """

    @abstractmethod
    def is_capturing(self, stream: Stream) -> bool:
        """Return whether `stream` records a graph instead of running.

        Args:
            stream: of this device.

        """

    @abstractmethod
    def address(self, array: DeviceArray) -> int:
        """Return the address of a contiguous array.

        Args:
            array: on this device.

        """

    @abstractmethod
    def copy_to_host(self, source: DeviceArray, target: NumpyArray, stream: Stream) -> None:
        """Put the copy of a contiguous array to host memory of equal size on `stream`.

        Args:
            source: on this device.
            target: in host memory.
            stream: of this device.

        """

    @abstractmethod
    def copy_to_device(self, source: NumpyArray, target: DeviceArray, stream: Stream) -> None:
        """Put the copy from host memory to a contiguous array of equal size on `stream`.

        Args:
            source: in host memory.
            target: on this device.
            stream: of this device.

        """

    @abstractmethod
    def pin(self, memory: NumpyArray) -> bool:
        """Lock host memory for direct copies until `unpin`; False where that is not allowed.

        Args:
            memory: of any dtype.

        """

    @abstractmethod
    def unpin(self, memory: NumpyArray) -> None:
        """Undo `pin`.

        Args:
            memory: what was pinned.

        """

    def align(self) -> None:
        """Make each current stream wait for the work queued on the others.

        For work on the array library's stream between arrays whose own library has another one.
        """
        streams = self.current_streams()
        if len(streams) == 1:
            return
        events = [self.record(stream) for stream in streams]
        for stream in streams:
            for event in events:
                self.wait_event(stream, event)
