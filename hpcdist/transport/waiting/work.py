"""`Work`: an operation under way, and works of operations that have ended."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, final

from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.flight.recorder import end
from hpcdist.transport.waiting.coroutines import until_ended
from hpcdist.transport.waiting.unheard import Failure


class Known(NamedTuple):
    """What a process knows of an operation without asking anyone; for words."""

    what: str
    ended: bool | None = None
    """None where that is not known."""
    error: BaseException | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.what}, failed with {type(self.error).__name__}"
        return {None: self.what, False: f"{self.what}, under way", True: f"{self.what}, ended"}[
            self.ended
        ]


class Work(ABC):
    """An operation under way; it keeps its buffers alive until it has ended.

    `source` is the world rank a message came from, once a receive has ended.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> x = np.ones(3)
        >>> work = dist.all_reduce(x, sync_op=False)
        >>> total = sum(range(1000))  # what does not need x
        >>> work.wait()
        True

    """

    source: int = -1
    _failure: Failure | None = None
    """What went wrong in an operation that tells of it later."""
    _is_detached = False
    _site = ""
    """The line of the program that began such an operation."""

    @property
    def limit_s(self) -> float:
        """Seconds after which `wait` gives up; infinity where the operation ends by itself."""
        return math.inf

    @abstractmethod
    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation has ended and return True.

        Args:
            timeout: seconds (or a `datetime.timedelta`) this wait may take; the operation goes
                on when it is over.

        Raises:
            CollectiveTimeout: not every rank joined in time.
            HpcdistError: what went wrong in the operation itself.

        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether the operation has ended, without blocking."""

    def synchronize(self) -> None:
        """Alias of `wait`."""
        self.wait()

    def result(self) -> Any:
        """Wait, and return what the operation returned (gathered objects, for example)."""
        self.wait()
        return None

    def refuse_nested(self) -> None:  # noqa: B027 (most operations end by themselves)
        """Raise `UsageError` if this thread is inside the operation that this work waits for."""

    def attend(self, waited: float) -> None:  # noqa: B027 (few operations can tell)
        """End the operation with an error if it cannot end otherwise; called in long waits.

        Args:
            waited: the seconds waited so far.

        """

    def detach(self) -> None:
        """Leave the operation to itself: nobody will wait for it, or needs to hear of its error.

        Else an error that nobody waits for is written to stderr, and the program ends with 1.
        """
        self._is_detached = True
        if self._failure is not None:  # it may have failed before
            self._failure.hear()

    def _fail(self, error: BaseException) -> None:
        """Keep an error for `wait`."""
        self._failure = Failure(error, self.known().what, self._site)
        if self._is_detached:
            self._failure.hear()

    def left_over(self) -> str:
        """Return the operation and the line that began it; nothing if nobody has to hear."""
        return "" if self._is_detached else f"{self.known().what}, called at {self._site}"

    def known(self) -> Known:
        """Return the known facts about the operation, without asking MPI or a device."""
        return Known("operation")

    def recorded(self, mark: int) -> None:
        """Record the end of the operation in the record with this mark.

        An operation that cannot tell its end has ended, for the recorder, when it was begun.

        Args:
            mark: what `recorder.begin` has returned.

        """
        end(mark)

    def __repr__(self) -> str:
        source = f", from rank {self.source}" if self.source >= 0 else ""
        return f"<Work: {self.known()}{source}>"

    def __await__(self) -> Generator[Any, None, Work]:
        """Wait in a coroutine of asyncio, whose event loop goes on; ``await work`` is `work`.

        Raises what `wait` raises. The operation goes on when the coroutine is cancelled.
        """
        return until_ended(self).__await__()


@final
class Done(Work):
    """The work of an operation that ended before its function returned."""

    def __init__(self, source: int = -1) -> None:
        self.source = source

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def known(self) -> Known:
        """See `Work.known`."""
        return Known("operation", True)


DONE = Done()


@final
class Ended(Work):
    """An operation that ended before its function returned, with its result."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def result(self) -> Any:
        """Return the result."""
        return self._value

    def known(self) -> Known:
        """See `Work.known`."""
        return Known("operation", True)
