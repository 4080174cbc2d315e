"""`SwitchboardTransport`: ranks are processes that talk to one server."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import Any, final

from hpcdist.arrays.pickled import Pickled
from hpcdist.errors import CollectiveTimeout, MismatchError, RemoteError, UsageError
from hpcdist.runtime.place import Place
from hpcdist.transport.base import Plan, StartedWorld, Transport, WorldRequest
from hpcdist.transport.call.call import (
    ANY_SOURCE,
    MESSAGES,
    AnyMessage,
    Call,
    Collective,
    Message,
    Objects,
    Reduction,
    Refusal,
    label,
)
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.presence.membership import Membership
from hpcdist.transport.threads.collectives import VERBS, check_fit
from hpcdist.transport.waiting.queue import seconds
from hpcdist.transport.waiting.work import DONE, Known, Work
from hpcdist_switchboard.board import BoardManager, Group, Posted

_SENDS = (Kind.SEND, Kind.SEND_OBJECT_LIST)


@final
class SwitchboardTransport(Transport):
    """This rank of one group; each collective is one round of `Board.meet`."""

    backend = "SWITCHBOARD"
    one_node = True

    @classmethod
    def start_world(cls, request: WorldRequest) -> StartedWorld:
        """Connect with the server that ``python -m hpcdist_switchboard`` has started."""
        told, rank = os.environ.get("SWITCHBOARD"), int(os.environ.get("SWITCHBOARD_RANK", 0))
        if told is None:
            raise UsageError("no switchboard was found; start with python -m hpcdist_switchboard")
        address, key, number = told.split()
        board, size = _board(address, key), int(number)
        place = Place(rank, size, rank, size, 0, 1, "switchboard")
        connect = partial(cls, board, (tuple(range(size)), 0), rank, request.timeout_s)
        return StartedWorld(place, [socket.gethostname()] * size, range(size), connect)

    def __init__(self, board: Any, group: Group, rank: int, timeout_s: float) -> None:
        self.ranks, _ = self.group = group
        self.rank, self.size = rank, len(self.ranks)
        self.world_rank = self.ranks[rank]
        self.timeout_s = timeout_s
        self.board = board
        self.membership = Membership(self.ranks, self._listen)
        self._issued = 0
        self._made: dict[tuple[int, ...], int] = {}
        self._one_by_one = ThreadPoolExecutor(1)
        self._issuing = threading.Lock()

    def run(self, call: Call) -> Any:
        """Start and wait."""
        work = self.start(call)
        work.wait()
        return work if isinstance(call, MESSAGES) else work.result()

    def start(self, call: Call) -> Work:
        """Send, post a receive, or queue a collective."""
        call = _on_host(call)
        if call.kind in _SENDS:
            content = call.data.reshape(-1) if isinstance(call, Message) else _copied(call.pickles)
            data = pickle.dumps(content, 5)
            self.board.send(self._message(call, self.rank, call.root, data))
            _end(call, None)
            return DONE
        if isinstance(call, MESSAGES):
            return Receiving(self, call, self._message(call, call.root, self.rank))
        with self._issuing:
            self._issued += 1
            return Joining(self, call, self._issued, self._one_by_one.submit)

    def _message(self, call: AnyMessage, source: int, to: int, data: bytes | None = None) -> Posted:
        size = call.data.size if isinstance(call, Message) else 0
        world = [each if each == ANY_SOURCE else self.ranks[each] for each in (source, to)]
        words = f"{label(call, self.ranks)} from {_named(world[0])} with tag {call.tag}"
        words = f"{words} in the group of ranks {[*self.ranks]}, called at {call_site()}"
        return Posted(self.group, *world, call.tag, call.dtype, size, words, data)

    def perform(self, call: Collective, number: int, words: str) -> Any:
        """Tell all ranks the call, and compute from what they tell."""
        if call.begin is not None:
            call.begin()
        offer = pickle.dumps(
            (str(call.error or ""), label(call, self.ranks), call.fingerprint(), _bare(call)), 5
        )
        told = self.board.meet(self.group, number, self.world_rank, offer, words, self.timeout_s)
        if call.error is not None:
            raise call.error
        calls = self._agreed([pickle.loads(each) for each in told], call)
        check_fit(calls, self.ranks)
        result = VERBS[call.kind](calls)[self.rank]
        return result if call.finish is None else call.finish(result)

    def _agreed(self, told: list[Any], own: Collective) -> list[Any]:
        """Return the calls of all ranks, this one's with its own arrays."""
        errors, labels, fingerprints, calls = zip(*told, strict=True)
        for world, words, error in zip(self.ranks, labels, errors, strict=True):
            if error:
                raise RemoteError(
                    f"{words} was called off because rank {world} cannot take part: {error}",
                    world,
                    in_step=True,
                )
        if len(set(fingerprints)) > 1:
            lines = [f"\n  rank {rank}: {each}" for rank, each in zip(self.ranks, labels)]  # noqa: B905
            raise MismatchError(f"the ranks disagree; nothing was sent:{''.join(lines)}")
        if isinstance(own, Reduction):
            calls = [call._replace(rule=own.rule) for call in calls]
        return [own if rank == self.rank else call for rank, call in enumerate(calls)]

    def plan(self, call: Collective) -> Plan | None:
        """Have nothing faster than starting anew."""
        return None

    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[SwitchboardTransport, int]:
        """Make a group of the same server, and gather the ids that are free."""
        world = tuple(self.ranks[rank] for rank in ranks)
        nth = self._made[world] = self._made.get(world, 0) + 1
        rank = world.index(self.world_rank)
        made = SwitchboardTransport(self.board, (world, nth), rank, timeout)
        kind, own = Kind.ALL_GATHER_OBJECT, Pickled(str(next_id).encode())
        ids = Objects(kind, (own,)) if error is None else Refusal(kind, 0, error)
        return made, max(int(pickled.meta) for pickled in made.run(ids))

    def synchronize(self, *, on_device: bool = False) -> None:
        """Wait for what is queued."""
        self._one_by_one.submit(int).result()

    def reopen(self) -> SwitchboardTransport:
        """Go on counting: late ranks may still be in an operation from before."""
        again = SwitchboardTransport(self.board, self.group, self.rank, self.timeout_s)
        again._issued = self._issued
        return again

    def leave(self, why: str) -> None:
        """Tell the server."""
        self.board.leave(self.world_rank, why)

    def _listen(self) -> None:
        for rank, why in self.board.departed().items():
            if rank in self.ranks:
                self.membership.note(rank, why)

    def together_at_end(self) -> bool:
        """Say no: each rank leaves for itself."""
        return False

    def close(self) -> None:
        """End what is queued."""
        self._one_by_one.shutdown()


@final
class Joining(Work):
    """A collective: one job of the group's thread."""

    def __init__(
        self,
        transport: SwitchboardTransport,
        call: Collective,
        number: int,
        submit: Callable[..., Future[Any]],
    ) -> None:
        self._transport, self._number = transport, number
        self._words = (
            f"{label(call, transport.ranks)}, operation #{number} of the group of ranks "
            f"{[*transport.ranks]}, called at {call_site()}"
        )
        self._future = submit(self._perform, call)

    def _perform(self, call: Collective) -> Any:
        try:
            result = self._transport.perform(call, self._number, self._words)
        except BaseException as error:
            _end(call, error)
            raise
        _end(call, None)
        return result

    def wait(self, timeout: Any = None) -> bool:
        limit = seconds(timeout)
        soon = 0.1 if limit is None else min(0.1, limit)
        if not self._has_ended(soon):
            self._transport.board.hold(
                self._transport.group, self._number, self._transport.world_rank
            )
            if not self._has_ended(limit):
                raise CollectiveTimeout(f"{self._words} has not ended within {limit:g} s of wait()")
        self._future.result()
        return True

    def _has_ended(self, within_s: float | None) -> bool:
        return bool(wait([self._future], within_s).done)

    def is_completed(self) -> bool:
        return self._future.done()

    def result(self) -> Any:
        self.wait()
        return self._future.result()

    def known(self) -> Known:
        return Known(self._words, self.is_completed())


@final
class Receiving(Work):
    """A receive: the server has its number."""

    def __init__(self, transport: SwitchboardTransport, call: AnyMessage, wanted: Posted) -> None:
        self._transport, self._call = transport, call
        self._words = wanted.words
        self._number = transport.board.post(wanted)
        self._has_ended, self._error = False, None

    @property
    def limit_s(self) -> float:
        return self._transport.timeout_s

    def is_completed(self) -> bool:
        return self._ends_within(0.0)

    def wait(self, timeout: Any = None) -> bool:
        limit = seconds(timeout)
        own = self._transport.timeout_s if limit is None else None
        if not self._ends_within(own if limit is None else limit, own):
            raise CollectiveTimeout(f"{self._words} got no message within {limit:g} s")
        if self._error is not None:
            raise self._error
        return True

    def _ends_within(self, wait_s: float | None, limit: float | None = None) -> bool:
        """Take the message if it comes, or give up when `limit`, the group's, is over."""
        if self._has_ended:
            return True
        try:
            message = self._transport.board.take(self._number, wait_s, limit)
            if message is None:
                return False
            self.source = message.source
            self._store(pickle.loads(message.data))
        except Exception as error:
            self._error = error
        self._has_ended = True
        _end(self._call, self._error)
        return True

    def _store(self, data: Any) -> None:
        call = self._call
        if isinstance(call, Message):
            call.data.reshape(-1)[...] = data
        if call.finish is not None:
            call.finish(None if isinstance(call, Message) else data)

    def known(self) -> Known:
        return Known(self._words, self._has_ended, self._error)


@cache
def _board(address: str, key: str) -> Any:
    """Connect with the server, once and for good.

    A proxy that is collected closes the connection of the thread that happens to do it, which
    another proxy of the same board may be sending through.
    """
    manager = BoardManager(address, key.encode())
    manager.connect()
    return manager.board()


def _end(call: Call, error: BaseException | None) -> None:
    if call.ended is not None:
        call.ended(error)


def _on_host(call: Call) -> Call:
    """Call off what is in the memory of a device, on all ranks."""
    if call.device is None:
        return call
    error = UsageError(f"the switchboard sends arrays in host memory, not on {call.device.name}")
    if isinstance(call, MESSAGES):
        raise error
    return Refusal(call.kind, call.root, error, ended=call.ended)


def _bare(call: Collective) -> Collective | None:
    """Return `call` without what cannot be pickled, or need not be told."""
    if isinstance(call, Refusal):
        return None
    call = call._replace(begin=None, finish=None, ended=None)
    if isinstance(call, Reduction):
        return call._replace(rule=None)  # that of the rank that reads it is the same
    return call._replace(pickles=_copied(call.pickles)) if isinstance(call, Objects) else call


def _copied(pickles: Sequence[Pickled]) -> list[Pickled]:
    return [each.copy() for each in pickles]


def _named(rank: int) -> str:
    return "any rank" if rank == ANY_SOURCE else f"rank {rank}"
