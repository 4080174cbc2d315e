"""Leaving in time: `on_preempt` and `should_stop`.

A scheduler announces the end of a job by a signal, to some process of it, at a moment that differs
between ranks. `should_stop`, called once per training step, lets all ranks leave at the same step.

The signal handler only records the signal. The ranks agree by an all_reduce of one number;
it takes a few microseconds, and waits for no rank longer than the averaging of the gradients does.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import numpy as np

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.session import is_simulated, resolve_group
from hpcdist.errors import UsageError
from hpcdist.transport.call.reduction import ReduceOp

Handler = Callable[[signal.Signals], Any]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_S = 2.0
"""Slurm and srun both send SIGTERM: what comes this soon is the same request."""


def on_preempt(handler: Handler | None = None) -> Callable[[], None]:
    """Listen for SIGTERM and SIGUSR1, and call `handler(signal)` once all ranks agree to stop.

    Local, on every rank, from the main thread; best right after `init_parallel_env`, because
    before it SIGTERM ends the process. Handlers that were installed before are called as well. A
    second SIGTERM, two seconds later or more, ends the process at once.

    Args:
        handler: called on every rank inside the call of `should_stop` that returns True, once,
            with the signal; it may use collectives. Without one, ask `should_stop`.

    Returns:
        A function that forgets `handler`, and stops listening when nobody else listens. At the
        end of the process that happens by itself.

    Raises:
        UsageError: the caller is not the main thread, or `handler` cannot be called.

    Example:
        >>> import hpcdist as dist
        >>> forget = dist.on_preempt(lambda signal: print("saving because of", signal.name))
        >>> forget()

    """
    if handler is not None and not callable(handler):
        raise UsageError(
            f"on_preempt needs a function of one argument, the signal, or None; got {handler!r}"
        )
    return _notice.listen(handler)


def should_stop(group: Group | None = None) -> bool:
    """Return whether a rank of `group` got SIGTERM or SIGUSR1; every rank gets the same answer.

    Collective: every rank calls it at the same place, usually once per training step. Once True,
    it stays True. The first call listens for the signals, as `on_preempt` does.

    Args:
        group: the ranks that agree; None for all.

    Returns:
        True on all ranks of the group or on none.

    Raises:
        UsageError: nobody listens yet, and the caller is not the main thread.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.should_stop()
        False

    """
    group = resolve_group(group)
    if not _notice.listens and not is_simulated():
        _notice.listen(None)
    received = np.array([_notice.received], dtype=np.int32)
    all_reduce(received, ReduceOp.MAX, group)
    if not group.is_member() or not received[0]:
        return False
    _notice.tell(signal.Signals(received[0]))
    return True


@final
class _Listener:
    """Somebody who listens, with a handler that is still to be called or None."""

    def __init__(self, handler: Handler | None) -> None:
        self.handler = handler


@final
class _Notice:
    """The signal that this process got, and who was there before for it."""

    def __init__(self) -> None:
        self.received = 0
        self._first_s: float | None = None
        self._listeners: list[_Listener] = []
        self._previous: dict[int, Any] = {}
        self._pid = 0

    @property
    def listens(self) -> bool:
        """Return whether the signals come here."""
        return bool(self._previous)

    def listen(self, handler: Handler | None) -> Callable[[], None]:
        """Install the signal handlers unless they are; return how to forget `handler`."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can only be listened for in the main thread, and this is thread "
                f"{threading.current_thread().name!r}: call hpcdist.on_preempt() in the main "
                "thread before others start"
            )
        listener = _Listener(handler)
        self._listeners.append(listener)
        if not self._previous:
            self._pid = os.getpid()
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
            atexit.register(self._end)

        def forget() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
                if not self._listeners:
                    self._stop_listening()

        return forget

    def tell(self, number: signal.Signals) -> None:
        """Call every handler that has not been called yet."""
        self.received = max(self.received, number)
        for listener in list(self._listeners):
            handler, listener.handler = listener.handler, None
            if handler is not None:
                handler(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Handle the signals; no communication and no output here."""
        if os.getpid() != self._pid:  # a child made by fork: its signals are its own affair
            self._restore()
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self._first_s is not None and now - self._first_s > _SAME_S:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._first_s = self._first_s or now
        self.received = max(self.received, number)
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _stop_listening(self) -> None:
        atexit.unregister(self._end)
        self._restore()
        self.received, self._first_s = 0, None
        self._listeners.clear()

    def _end(self) -> None:
        """End with the process: who was asked to leave is not killed on the way out.

        Slurm and srun both pass SIGTERM on, and on a busy node one of them comes late.
        """
        if self.received and os.getpid() == self._pid:
            for number in self._previous:
                signal.signal(number, signal.SIG_IGN)
        else:
            self._restore()

    def _restore(self) -> None:
        """Put the dispositions back that `listen` found, where they are still ours."""
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}


_notice = _Notice()
