"""`OnDevice`: the public API with all arrays on a device, for checks written for host arrays.

Arrays among the arguments are copied to the device, the function is called with the copies, and
what they hold afterwards is copied back. So the one contract of `contract` holds every transport
and every array library.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, final

import numpy as np

import hpcdist
from hpcdist.comm.exchanges import exchange
from hpcdist.errors import HpcdistError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.base import Plan
from hpcdist.transport.waiting.work import Work


class Arrays(NamedTuple):
    """A device's arrays: how to make one of a host array, and how to read it."""

    to_device: Callable[[Any], Any]
    to_host: Callable[[Any], Any]
    is_array: Callable[[Any], bool]


_OPERATIONS = frozenset(
    {
        *("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "broadcast"),
        *("all_gather", "all_gather_into_tensor", "gather", "scatter", "alltoall"),
        *("alltoall_single", "send", "recv", "isend", "irecv", "exchange"),
    }
)
_PLANS = frozenset({"plan_all_reduce", "plan_broadcast"})


@final
class OnDevice:
    """Stands in for the module `hpcdist`.

    Args:
        arrays: how arrays of the library are made and read.

    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def __getattr__(self, name: str) -> Any:
        if name == "P2POp":
            return self._message
        if name == "batch_isend_irecv":
            return self._batch
        function = exchange if name == "exchange" else getattr(hpcdist, name)
        if name in _OPERATIONS:
            return partial(self._operate, function)
        if name in _PLANS:
            return lambda *args, **options: self._plan(function, args, options)
        return function

    def _message(self, operate: Any, array: Any, *more: Any) -> tuple[_Moved, hpcdist.P2POp]:
        moved = _Moved(self._arrays)
        (function,) = operate.args
        return moved, hpcdist.P2POp(function, moved.out(array), *more)

    def _batch(self, messages: list[tuple[_Moved, hpcdist.P2POp]]) -> list[Work]:
        works = hpcdist.batch_isend_irecv([each for _, each in messages])
        return [_Arrived(work, moved) for work, (moved, _) in zip(works, messages, strict=True)]

    def _operate(self, function: Any, *args: Any, **options: Any) -> Any:
        moved = _Moved(self._arrays)
        work = function(*map(moved.out, args), **options)
        if options.get("sync_op", function.__name__ not in ("isend", "irecv")):
            work.wait()
            moved.back()
        return _Arrived(work, moved)

    def _plan(self, function: Any, args: Any, options: Any) -> Any:
        moved = _Moved(self._arrays)
        return _Planned(function(*map(moved.out, args), **options), moved)


@final
class _Moved:
    """The arguments of one call and their counterparts on the device."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._pairs: list[tuple[Any, Any]] = []
        self._lists: list[tuple[list[Any], list[Any]]] = []

    def out(self, value: Any) -> Any:
        """Return the counterpart of an argument."""
        if isinstance(value, np.ndarray):
            for host, device in self._pairs:  # an argument twice, or a view of another
                if host is value:
                    return device
            device = self._arrays.to_device(value)
            self._pairs.append((value, device))
            return device
        if isinstance(value, list):
            moved = [self.out(each) for each in value]
            self._lists.append((value, moved))
            return moved
        return value

    def again(self) -> None:
        """Copy to the device what the host arrays hold now."""
        for host, device in self._pairs:
            device[...] = self._arrays.to_device(host)

    def back(self) -> None:
        """Copy to the host what the device's arrays hold now."""
        for host, device in self._pairs:
            if host.flags.writeable:
                host[...] = self._read(device)
        is_array = self._arrays.is_array
        sent = any(is_array(device) for _, device in self._pairs)
        for given, moved in self._lists:
            if not given and moved:  # what was gathered lies where what was sent lies
                assert all(is_array(each) == sent for each in moved)
                given.extend(map(self._read, moved))

    def _read(self, array: Any) -> Any:
        """Return what an array holds, which stayed on the host if the device has no such dtype."""
        return self._arrays.to_host(array) if self._arrays.is_array(array) else array


@final
class _Arrived(Work):
    def __init__(self, work: Work, moved: _Moved) -> None:
        self._work, self._moved = work, moved
        self.source = work.source

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait(timeout)
        self.source = self._work.source
        self._moved.back()
        return True

    def attend(self, waited: float) -> None:
        self._work.attend(waited)

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done:
            with suppress(HpcdistError):  # its owner gets it from wait()
                self.wait()
        return done


@final
class _Planned(Plan):
    def __init__(self, plan: Plan, moved: _Moved) -> None:
        self._plan, self._moved = plan, moved

    def start(self) -> Work:
        self._moved.again()
        return _Arrived(self._plan.start(), self._moved)

    def free(self) -> None:
        self._plan.free()
