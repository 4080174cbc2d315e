"""Point-to-point messages between ranks that are threads: letters in a shared box.

A send copies its data into a letter and has ended. Receives are matched with letters in the
order in which they were posted, as MPI does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, final

from hpcdist.arrays.parcel import Parcel
from hpcdist.errors import CollectiveTimeout, MismatchError
from hpcdist.transport.base import DONE, Work
from hpcdist.transport.call import ANY_SOURCE, Call, Kind, label
from hpcdist.transport.call_site import call_site
from hpcdist.transport.lane import seconds


class Letter:
    """A message that was sent and not yet received."""

    def __init__(self, source: int, to: int, call: Call) -> None:
        self.source, self.to, self.call = source, to, call
        self.data = None if call.send is None else call.send.reshape(-1).copy()
        self.parcels: list[Parcel] = [parcel.copy() for parcel in call.parcels]


@final
class LetterBox:
    """The messages of one rank of a group; `letters` and `changed` are shared by all ranks."""

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        letters: list[Letter],
        changed: threading.Condition,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.letters = letters
        self.changed = changed
        self.timeout_s = timeout_s
        self.posted: list[LocalReceive] = []

    def start(self, call: Call) -> Work:
        """Send a letter, or begin to wait for one."""
        with self.changed:
            if call.kind in (Kind.SEND, Kind.SEND_OBJECT_LIST):
                self.letters.append(Letter(self.rank, call.root, call))
                self.changed.notify_all()
                if call.ended is not None:
                    call.ended(None)
                return DONE
            receive = LocalReceive(self, call)
            self.posted.append(receive)
            return receive

    def advance(self) -> None:
        """Match letters with receives, in posting order; under the lock."""
        self.posted = [receive for receive in self.posted if not receive.match()]


@final
class LocalReceive(Work):
    """A receive of one rank."""

    def __init__(self, box: LetterBox, call: Call) -> None:
        self._box = box
        self._call = call
        self._ended = False
        self._error: Exception | None = None

    def match(self) -> bool:
        """Take the first letter that fits; True if nothing is left to match."""
        call = self._call
        for letter in self._box.letters:
            if not self._wanted(letter) or letter.call.dtype != call.dtype:
                continue
            self._ended = True
            if call.recv is not None:
                assert letter.data is not None
                if letter.data.size != call.recv.size:
                    self._error = self._mismatch(letter)
                    return True
                call.recv.reshape(-1)[...] = letter.data
            self._box.letters.remove(letter)
            self.source = self._box.ranks[letter.source]
            try:
                if call.finish is not None:
                    call.finish(letter.parcels if call.recv is None else None)
            except Exception as error:
                self._error = error
            if call.ended is not None:
                call.ended(self._error)
            return True
        return False

    @property
    def limit_s(self) -> float:
        """The time limit of the group."""
        return self._box.timeout_s

    def is_completed(self) -> bool:
        """Say whether the message has arrived."""
        with self._box.changed:
            if not self._ended:
                self._box.advance()
            return self._ended

    def wait(self, timeout: Any = None) -> bool:
        """Block until the message is in the array."""
        limit = seconds(timeout)
        limit = self._box.timeout_s if limit is None else limit
        deadline = time.monotonic() + limit
        with self._box.changed:
            while not self.is_completed():
                self._refuse_other_dtype()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise CollectiveTimeout(
                        f"{label(self._call, self._box.ranks)} got no message within {limit:g} s; "
                        f"called at {call_site()}"
                    )
                self._box.changed.wait(min(1.0, left))
        if self._error is not None:
            raise self._error
        return True

    def _wanted(self, letter: Letter) -> bool:
        call = self._call
        return (
            letter.to == self._box.rank
            and call.root in (ANY_SOURCE, letter.source)
            and letter.call.tag == call.tag
            and (letter.data is None) == (call.recv is None)
        )

    def _refuse_other_dtype(self) -> None:
        for letter in self._box.letters:
            if self._wanted(letter):
                self._box.posted.remove(self)
                self._ended, self._error = True, self._mismatch(letter)
                return

    def _mismatch(self, letter: Letter) -> MismatchError:
        ranks = self._box.ranks
        return MismatchError(
            f"rank {ranks[letter.source]} sent {label(letter.call, ranks)}, but rank "
            f"{ranks[self._box.rank]} receives {label(self._call, ranks)}; the message was not "
            "taken: receive it with an array of its size and dtype"
        )
