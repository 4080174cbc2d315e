"""`Handshakes`: pairs of ranks tell each other what they mean to do, before they do it.

The pairwise counterpart of `agreement`, for operations in which only some ranks of a group take
part. Every rank writes a letter to each of its peers and waits for theirs. The waits are
polled, so a peer that does not come becomes a `CollectiveTimeout` that names it, and the letters of
the others are there all the same.

The nth handshake of a rank with another meets the other's nth with it. As in an `Agreement`
([Note: time limits] there), one that a rank has joined only after the other's deadline is void for
both: so a rank that has given up and one that comes late are in step again afterwards, and what a
rank did not wait for is thrown away when the next letter is looked for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from mpi4py import MPI

from hpcdist.errors import CollectiveTimeout, HpcdistError, RemoteError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.mpi.control import Control
from hpcdist.transport.mpi.tags import Tag
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import BEYOND_S, LEFT_GRACE_S, LISTEN_AFTER_S, poll


class _Letter(NamedTuple):
    """What one rank tells another; times in seconds since the epoch."""

    number: int
    arrived: float
    deadline: float
    content: Any


class Answers(NamedTuple):
    """What the peers have told, and why there is nothing from some of them."""

    told: dict[int, Any]
    troubles: dict[int, HpcdistError]


@final
class Handshakes:
    """Those of one rank of a group; `ranks` are the group's world ranks.

    `departed` returns the ranks of the group that will not come any more, and why.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        timeout_s: float,
        departed: Callable[[], Mapping[int, str]],
    ) -> None:
        self._comm, self._ranks, self._timeout_s = comm, ranks, timeout_s
        self._departed = departed
        self._control = Control(comm, Tag.LETTER)
        self._number: Counter[int] = Counter()

    def exchange(self, contents: Mapping[int, Any], what: str) -> Answers:
        """Send each peer its content and return theirs; the peers call this, too.

        Args:
            contents: for each peer (another rank of the group) what it is told; it pickles.
            what: what the ranks are about to do, for messages.

        """
        self._number.update(contents.keys())
        now = time.time()
        deadline = now + self._timeout_s
        sent = [
            self._control.tell(peer, _Letter(self._number[peer], now, deadline, content))
            for peer, content in contents.items()
        ]
        answers = Answers({}, {})
        letters = self._await(contents, sent, answers, what)
        for peer, letter in letters.items():
            if letter.arrived > deadline or now > letter.deadline:
                answers.troubles[peer] = self._void(peer, now - letter.deadline, what)
            else:
                answers.told[peer] = letter.content
        for peer in contents.keys() - letters.keys() - answers.troubles.keys():
            answers.troubles[peer] = self._missing(peer, what)
        return answers

    def _await(
        self, peers: Iterable[int], sent: list[MPI.Request], answers: Answers, what: str
    ) -> dict[int, _Letter]:
        """Take in the letters of `peers` until all are there, or no more will come."""
        letters: dict[int, _Letter] = {}
        waiting = set(peers)

        def complete() -> bool:
            for peer in [each for each in waiting if self._take(each, letters)]:
                waiting.discard(peer)
            # A large letter moves only while its sender is here.
            return not waiting and (bool(answers.troubles) or MPI.Request.Testall(sent))

        def listen(waited: float) -> None:
            if waited < LISTEN_AFTER_S:
                return
            gone = {rank: why for rank, why in self._departed().items() if rank in waiting}
            if gone and not poll(complete, LEFT_GRACE_S):
                for peer in gone.keys() & waiting:
                    answers.troubles[peer] = self._left(peer, gone[peer], what)
                    waiting.discard(peer)

        poll(complete, self._timeout_s + BEYOND_S, listen, wait=Wait(lambda: what))
        return letters

    def _take(self, peer: int, letters: dict[int, _Letter]) -> bool:
        """Find the letter of this handshake; discard those of given up ones."""
        for _, letter in self._control.heard(peer):
            if letter.number == self._number[peer]:
                letters[peer] = letter
                return True
        return False

    # ---- what can go wrong

    def _missing(self, peer: int, what: str) -> CollectiveTimeout:
        rank, own = self._ranks[peer], self._ranks[self._comm.rank]
        return CollectiveTimeout(
            f"{what} was not joined by rank {rank} within {self._timeout_s:g} s; missing ranks: "
            f"{rank}. Called at {call_site()}. Let rank {rank} have the messages that it exchanges "
            f"with rank {own} in one {what} of this group, too, at the same place among the "
            "group's operations, or pass a larger timeout to new_group or init_parallel_env",
            (rank,),
        )

    def _void(self, peer: int, late_s: float, what: str) -> CollectiveTimeout:
        rank, own = self._ranks[peer], self._ranks[self._comm.rank]
        late = own if late_s > 0 else rank
        other = rank if late_s > 0 else own
        return CollectiveTimeout(
            f"{what} of ranks {own} and {rank} was given up by rank {other}, whose time limit was "
            f"over when rank {late} joined it. Called at {call_site()}. Pass a larger timeout to "
            "new_group or init_parallel_env if ranks may be that far apart",
            (late,),
        )

    def _left(self, peer: int, why: str, what: str) -> RemoteError:
        rank = self._ranks[peer]
        return RemoteError(
            f"rank {rank} {why} and did not join {what}, called at {call_site()}; let every rank "
            "that messages are exchanged with take part",
            rank,
        )
