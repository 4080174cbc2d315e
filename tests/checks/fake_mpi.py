"""MPI, a clock and processes that are made up: what talks over MPI is tested without a launcher.

`run(size, program, seed=...)` runs ``program(comm)`` on as many ranks, which are threads of which
one runs at a time. At every call of MPI, and wherever a rank sleeps, the seed decides who goes on,
and how long each message is on its way; so a run can be repeated, and another seed is another order
of events. Time passes only here: a wait of an hour takes a moment.

`FakeComm` keeps what MPI promises: messages of one rank to another do not overtake each other,
small ones are on their way at once, a large one moves only while both of its ranks call MPI.
"""

import ctypes
import pickle
import threading
from collections import UserDict, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from mpi4py import MPI

from hpcdist.transport.mpi import (
    agreement,
    early,
    handshake,
    matching,
    messages,
    news,
    progress,
    rendezvous,
    requests,
)
from hpcdist.transport.waiting import activity, polling

EAGER = 64 << 10
"""Messages of more bytes are large."""

HANGS_AFTER_S = 10_000.0
_STEP_S = 1e-6
_NAP_S = 10e-3
"""What who polls sleeps at most: more than in earnest, for it is what a run consists of."""
_BEGINNING_S = 1e9
_TIMED = (polling, activity, agreement, rendezvous, handshake, matching, news)
_OVER_MPI = (early, handshake, matching, messages, progress, requests)


class Hangs(Exception):
    """What a rank gets that waits for ever."""


@dataclass
class _Rank:
    number: int
    ahead_s: float
    """How much its clock shows more than that of others, of the time of day."""
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    wakes_at: float | None = 0.0
    """None: it has ended."""
    in_mpi_at: float = 0.0
    """When it last let MPI proceed."""


@dataclass
class _Mail:
    source: int
    tag: int
    data: bytes
    arrives_at: float
    moved: Callable[[], bool] = lambda: False
    """Tells whether all of it has come."""

    @property
    def is_large(self) -> bool:
        return len(self.data) > EAGER


class World:
    """The ranks of a run, whose turn it is, and what is on its way between them."""

    def __init__(self, size: int, seed: int, skew_s: float, slowest_s: float) -> None:
        self.size, self.now = size, 0.0
        self.ways_s = (0.0, 1e-5, 1e-3, slowest_s)
        self.random = Random(seed)
        self.ranks = [_Rank(number, self.random.uniform(0, skew_s)) for number in range(size)]
        self.mail: defaultdict[tuple[int, int], list[_Mail]] = defaultdict(list)
        self.joined: defaultdict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
        self.local = threading.local()

    # ---- whose turn it is

    def sleep(self, seconds: float = 0.0) -> None:
        """Let time pass, and other ranks go on."""
        own: _Rank = self.local.rank
        own.wakes_at = self.now + seconds
        self._next(own)
        if self.now > HANGS_AFTER_S:
            raise Hangs

    def step(self) -> None:
        """Pass a moment in MPI, after which another rank may go on."""
        self.now += _STEP_S
        self.local.rank.in_mpi_at = self.now
        if self.random.random() < 0.2:
            self.sleep()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Block, as MPI does."""
        pause_s = 1e-5
        while not done():
            self.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 10.0)

    def _next(self, own: _Rank) -> None:
        alive = [rank for rank in self.ranks if rank.wakes_at is not None]
        if not alive:
            return
        self.now = max(self.now, min(rank.wakes_at for rank in alive))
        chosen = self.random.choice([rank for rank in alive if rank.wakes_at <= self.now])
        if chosen is not own:
            chosen.turn.release()
            if own.wakes_at is not None:
                own.turn.acquire()

    def run(self, program: Callable[[Any], Any]) -> list[Any]:
        """Run `program` on all ranks; return what it returned, or raised, on each."""
        outcomes: list[Any] = [None] * self.size

        def live(rank: _Rank) -> None:
            self.local.rank = rank
            rank.turn.acquire()
            try:
                outcomes[rank.number] = program(FakeComm(self, rank.number, 0))
            except BaseException as error:
                outcomes[rank.number] = error
            rank.wakes_at = None
            self._next(rank)

        threads = [
            threading.Thread(target=live, args=(rank,), name=f"hpcdist-{rank.number}", daemon=True)
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        self.random.choice(self.ranks).turn.release()
        for thread in threads:
            thread.join()
        return outcomes

    # ---- what modules get instead of `time`

    def time(self) -> float:
        return _BEGINNING_S + self.now + self.local.rank.ahead_s

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def thread_time(self) -> float:
        return self.monotonic()

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


class FakeComm:
    """The communicator `context` of one rank; it has what hpcdist uses."""

    def __init__(self, world: World, rank: int, context: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._context, self._contexts = context, 0
        self._collectives = 0

    def Dup(self) -> "FakeComm":
        self._contexts += 1
        return FakeComm(self.world, self.rank, self._context * 100 + self._contexts)

    def Get_attr(self, keyval: int) -> int:
        assert keyval == MPI.TAG_UB
        return 1 << 23

    # ---- sending

    def isend(self, content: Any, to: int, tag: int) -> "Request":
        return self._send(pickle.dumps(content), to, tag)

    def Isend(self, spec: list[Any], to: int, tag: int) -> "Request":
        return self._send(_packed(spec), to, tag)

    def _send(self, data: bytes, to: int, tag: int) -> "Request":
        world = self.world
        box = world.mail[self._context, to]
        arrives_at = world.now + world.random.uniform(0, world.random.choice(world.ways_s))
        mail = _Mail(self.rank, int(tag), data, arrives_at)
        earlier = [each.arrives_at for each in box if each.source == self.rank]
        mail.arrives_at = max([arrives_at, *earlier])
        box.append(mail)
        world.step()
        return Request(world, lambda: not mail.is_large or mail.moved())

    # ---- receiving

    def _find(self, source: int, tag: int) -> _Mail | None:
        self.world.step()
        for mail in self.world.mail[self._context, self.rank]:
            fits = source in (MPI.ANY_SOURCE, mail.source) and tag in (MPI.ANY_TAG, mail.tag)
            if fits and mail.arrives_at <= self.world.now:
                return mail
        return None

    def _take(self, mail: _Mail) -> "Request":
        """Begin to receive."""
        world, now = self.world, self.world.now
        world.mail[self._context, self.rank].remove(mail)
        ready_at = now + world.random.uniform(0, 1e-4)
        ranks = [world.ranks[mail.source], world.ranks[self.rank]] if mail.is_large else []
        mail.moved = lambda: world.now >= ready_at and all(each.in_mpi_at > now for each in ranks)
        return Request(world, mail.moved)

    def Iprobe(self, source: int, tag: int, status: MPI.Status | None = None) -> bool:
        mail = self._find(source, tag)
        if mail is not None and status is not None:
            _fill(status, mail)
        return mail is not None

    def improbe(self, source: int, tag: int) -> SimpleNamespace | None:
        mail = self._find(source, tag)
        if mail is None:
            return None
        request = self._take(mail)

        def recv(status: MPI.Status | None = None) -> Any:
            self.world.wait_until(request.Test)
            if status is not None:
                _fill(status, mail)
            return pickle.loads(mail.data)

        return SimpleNamespace(recv=recv)

    def Irecv(self, spec: list[Any], source: int, tag: int) -> "Request":
        mail = self._find(source, tag)
        assert mail is not None, "hpcdist receives what it has found, and nothing else"
        _unpack(mail.data, spec)
        return self._take(mail)

    def Recv(self, spec: list[Any], source: int, tag: int) -> None:
        self.world.wait_until(self.Irecv(spec, source, tag).Test)

    # ---- collectives

    def Iallreduce(self, mine: list[Any], least: list[Any], op: MPI.Op) -> "Request":
        assert op == MPI.MIN
        joined = self._join(mine[0].copy())

        def done() -> bool:
            if len(joined) < self.size:
                return False
            for place in range(mine[1]):
                least[0][place] = min(each[place] for each in joined.values())
            return True

        return Request(self.world, done)

    def Allreduce_init(self, *_: Any) -> None:
        raise NotImplementedError  # as before MPI-4

    def Allgather(self, mine: Any, everyone: Any) -> None:
        joined = self._join(mine.copy())
        self.world.wait_until(lambda: len(joined) == self.size)
        for rank in range(self.size):
            everyone.reshape(self.size, -1)[rank] = joined[rank].reshape(-1)

    def _join(self, content: Any) -> dict[int, Any]:
        self._collectives += 1
        joined = self.world.joined[self._context, self._collectives]
        joined[self.rank] = content
        self.world.step()
        return joined


class Request:
    """An operation under way; once it has ended it stays so."""

    def __init__(self, world: World, done: Callable[[], bool]) -> None:
        self._world = world
        self._done: Callable[[], bool] | None = done

    def Test(self) -> bool:
        self._world.step()
        if self._done is not None and self._done():
            self._done = None
        return self._done is None


def _runs(spec: list[Any]) -> list[memoryview]:
    """Return the memory that a specification of `datatypes` names: a block, or scattered runs."""
    buffer, count, datatype = spec
    if datatype == MPI.BYTE:
        return [memoryview(np.asarray(buffer).reshape(-1)).cast("B")[:count]]
    (_, *lengths), places, *_ = datatype.Get_contents()
    return [
        memoryview((ctypes.c_char * length).from_address(place)).cast("B")
        for length, place in zip(lengths, places, strict=True)
    ]


def _packed(spec: list[Any]) -> bytes:
    return b"".join(_runs(spec))


def _unpack(data: bytes, spec: list[Any]) -> None:
    runs = _runs(spec)
    assert len(data) == sum(map(len, runs)), "a receive of another size corrupts memory"
    for run_ in runs:
        run_[:], data = data[: len(run_)], data[len(run_) :]


def _fill(status: MPI.Status, mail: _Mail) -> None:
    status.Set_source(mail.source)
    status.Set_tag(mail.tag)
    status.Set_elements(MPI.BYTE, len(mail.data))


# ---- what a process has once, and here every rank


class _OwnList:
    def __init__(self, world: World) -> None:
        self._lists: defaultdict[int, list[Any]] = defaultdict(list)
        self._world = world

    def _own(self) -> list[Any]:
        return self._lists[self._world.local.rank.number]

    def append(self, item: Any) -> None:
        self._own().append(item)

    def remove(self, item: Any) -> None:
        self._own().remove(item)

    def __contains__(self, item: Any) -> bool:
        return item in self._own()

    def __iter__(self) -> Any:
        return iter(self._own())


class _OwnDict(UserDict):
    def __init__(self, world: World) -> None:
        self._dicts: defaultdict[int, dict[Any, Any]] = defaultdict(dict)
        self._world = world

    @property
    def data(self) -> dict[Any, Any]:
        return self._dicts[self._world.local.rank.number]


class _OwnLock:
    def __init__(self, world: World) -> None:
        self._locks = defaultdict(threading.RLock)
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._locks[self._world.local.rank.number], name)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _OneThread:
    """MPI as a process sees it that has no thread for progress, and requests that are made up."""

    Request = SimpleNamespace(
        Testall=lambda requests: all([each.Test() for each in requests])  # noqa: C419 (tests each)
    )

    @staticmethod
    def Query_thread() -> int:
        return MPI.THREAD_SERIALIZED

    def __getattr__(self, name: str) -> Any:
        return getattr(MPI, name)


_ALONE = SimpleNamespace(
    **{name: getattr(threading, name) for name in ("Lock", "RLock", "Thread", "get_ident")},
    main_thread=threading.current_thread,
    enumerate=lambda: [threading.current_thread()],
)
"""`threading`, as a rank sees it whose program has one thread."""


Program = Callable[[FakeComm], Any]


def run(
    size: int, program: Program, *, seed: int, skew_s: float = 0.0, slowest_s: float = 0.05
) -> list[Any]:
    """Run ``program(comm)`` on all ranks; return what each returned, or raised.

    Args:
        size: the number of ranks.
        program: what each does.
        seed: decides on the order of events.
        skew_s: how much the clocks of the ranks may differ.
        slowest_s: how long a message may be on its way.

    """
    world = World(size, seed, skew_s, slowest_s)
    names = (
        *("time", "monotonic", "perf_counter", "thread_time"),
        *("time_ns", "monotonic_ns", "sleep"),
    )
    clock = SimpleNamespace(**{name: getattr(world, name) for name in names})
    with ExitStack() as stack:
        for module in _TIMED:
            stack.enter_context(patch.object(module, "time", clock))
        for module in _OVER_MPI:
            stack.enter_context(patch.object(module, "MPI", _OneThread()))
        stack.enter_context(patch.object(news, "threading", _ALONE))
        stack.enter_context(patch.object(polling, "_LONGEST_SLEEP_S", _NAP_S))
        stack.enter_context(patch.object(polling, "_errands", _OwnList(world)))
        stack.enter_context(patch.object(polling, "_at_it", _OwnLock(world)))
        stack.enter_context(patch.object(activity, "_waits", _OwnDict(world)))
        return world.run(program)


def results(size: int, program: Program, *, seed: int, **chance: float) -> list[Any]:
    """Do `run`, and raise what any rank raised."""
    outcomes = run(size, program, seed=seed, **chance)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes
