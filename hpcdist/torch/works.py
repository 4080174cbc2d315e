"""`TorchWork`: an hpcdist operation as torch.distributed sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as c10d

from hpcdist.comm.group import Group
from hpcdist.transport.waiting.work import Work


@final
class TorchWork(c10d.Work):  # type: ignore[misc] # torch is untyped
    """One operation of torch's, made of one or more of hpcdist's.

    An exception of the operation is raised by `wait` and by the future; torch's own
    ``_create_work_from_future`` would swallow it.
    """

    def __init__(self, group: Group, tensors: Sequence[torch.Tensor], parts: int) -> None:
        super().__init__()
        self._group = group
        self._tensors = list(tensors)
        self._left = parts
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]]
        self.works: list[Work] = []
        """What to wait for; filled by whoever starts the parts."""

    def ended(self, error: BaseException | None) -> None:
        """Note that one part has ended; the `Call.ended` of the parts."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            signal = self._signal if self._left == 0 else None
        if signal is not None:
            signal.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation has ended; raise what went wrong."""
        limit = _seconds(timeout)
        for work in self.works:
            work.wait(limit)
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        return self._left == 0 or all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        """Return whether the operation has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None."""
        return self._error

    def synchronize(self) -> None:
        """Alias of `wait()`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the group rank a message came from, once it has arrived."""
        return self._group.get_group_rank(self.works[0].source)

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the tensors that were written; it fails with a `RuntimeError`.

        It is made by ``then``: what ``Future.set_exception`` sets, C++ takes for a result.
        """
        with self._lock:
            if self._signal is None:
                self._signal = torch.futures.Future()
                self._future = self._signal.then(self._outcome)
                over = self._left == 0
            else:
                over = False
        if over:
            self._signal.set_result(None)
        return self._future

    def _outcome(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


@final
class AllOf(c10d.Work):  # type: ignore[misc] # torch is untyped
    """Several works as one: what torch gets at the end of a coalesced block.

    Args:
        works: what to wait for.
        tensors: what they have written, where it is other tensors than their own.

    """

    def __init__(self, works: list[c10d.Work], tensors: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._works, self._tensors = works, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Wait for all."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all have ended well."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """Alias of `wait()`."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that were written."""
        own = (tensor for work in self._works for tensor in work.result())
        return list(own) if self._tensors is None else self._tensors

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Return a future of all of them, or of the tensors that they have written together."""
        futures = torch.futures.collect_all([work.get_future() for work in self._works])
        return futures if self._tensors is None else futures.then(self._outcome)

    def _outcome(self, futures: torch.futures.Future[list[Any]]) -> Any:
        for each in futures.value():
            each.value()  # raises what went wrong
        return self._tensors


def _seconds(timeout: Any) -> float | None:
    """Turn torch's timeout into ours; it says "none" with zero or less."""
    if isinstance(timeout, timedelta):
        timeout = timeout.total_seconds()
    return timeout if timeout is not None and timeout > 0 else None
