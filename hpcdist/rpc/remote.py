"""`Remote`: a handle of an object that lives on one rank and is used from any: an actor.

[Note: references] The owner of an object keeps it while there is a handle anywhere. It counts by
tokens: each handle has one, and each pickle of a handle, which stands for it while it travels. What
is told is a change, such as ``{token: +1}``; whichever of +1 and -1 comes first, the sum is right.

| what happens | what the owner is told |
|---|---|
| a handle is pickled | one more of the pickle's token, before the pickle leaves |
| it is unpickled | one more of the new handle's token, one less of the pickle's, in one message |
| a handle goes | one less of its token |

Messages of one rank to another arrive in order, so at any time some token of an object that may
still be used is above zero. A pickle that is never unpickled keeps its object until shutdown.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, final

from hpcdist.comm.session import simulated_rank, standing_for
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.rpc.agent import Agent, require_agent
from hpcdist.rpc.future import Future
from hpcdist.rpc.inline import inline, is_inline
from hpcdist.rpc.names import WorkerInfo

Token = tuple[int, int]
"""The rank that made it, and a number of that rank."""


class Address(NamedTuple):
    """Where an object is: the rank that owns it, its number there, and what it is, for messages."""

    owner: int
    number: int
    kind: str


def remote(
    to: int | str | WorkerInfo,
    cls: Callable[..., Any],
    /,
    *args: Any,
    concurrent: bool = False,
    **kwargs: Any,
) -> Remote:
    """Make an object on another rank, an actor; return a handle of it.

    The object lives until no handle of it is left on any rank, and at most until `shutdown`. It has
    a thread of its own, which makes it and runs the calls of its methods one after the other, those
    of one rank in the order in which they were made. A method that `inline` marks goes ahead.

    Args:
        to: where: a rank, name or `WorkerInfo`; this one, too.
        cls: a class, or any function: what it returns there is the object.
        args: arguments of `cls`.
        concurrent: run calls as they come, several at once, in the threads that run all calls of
            the rank. The object must be safe for that.
        kwargs: keyword arguments of `cls`.

    Raises:
        UsageError: `cls` cannot be called, or there is no such rank.
        RemoteError: what `cls` raised, with its traceback.

    Example:
        >>> import hpcdist as dist
        >>> from collections import deque
        >>> _ = dist.init_parallel_env()
        >>> dist.rpc.init_rpc()
        >>> queue = dist.rpc.remote(0, deque, [1, 2])
        >>> queue.append(3)
        >>> queue.popleft.rpc_async().wait()
        1
        >>> dist.rpc.shutdown()

    """
    actors = actors_here()
    if not callable(cls):
        raise UsageError(f"remote takes a class, or a function that makes an object, got {cls!r}")
    token = actors.new_token()
    making = actors.agent.call(to, _make, (cls, args, kwargs, concurrent, token))
    return Remote(making.wait(), token)


@final
class Remote:
    """A handle of an object on another rank; made by `remote`.

    ``r.method(...)`` calls a method and returns what it returns; ``r.method.rpc_async(...)``
    returns a future; see `RemoteMethod`. A handle can be an argument or a result of calls, or be
    sent by whatever pickles: whoever gets it uses the same object. Handles of one object are equal.

    Methods whose names begin with an underscore are not called from other ranks.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> names = rpc.remote("worker0", list, ["a", "b"])
        >>> names.append("c")
        >>> names.index("c")
        2
        >>> rpc.shutdown()

    """

    __slots__ = ("__weakref__", "_actors", "_address", "_token")

    def __init__(self, address: Address, token: Token) -> None:
        self._actors = actors_here()
        self._address = address
        self._token = token

    @property
    def owner(self) -> WorkerInfo:
        """The rank that has the object."""
        return self._actors.agent.directory[self._address.owner]

    def local(self) -> Any:
        """Return the object itself, on the rank that has it.

        Raises:
            UsageError: this is another rank, or RPC has been shut down.

        """
        me = self._actors.agent.me.rank
        if me != self._address.owner:
            raise UsageError(
                f"local() returns the object where it is, and this is rank {me}: {self!r}; call "
                "its methods, or call a function there by rpc_sync that has the handle as argument"
            )
        return self._actors.actor(self._address.number).object

    def __getattr__(self, name: str) -> RemoteMethod:
        if name.startswith("_"):
            raise AttributeError(f"{self!r} has no attribute {name!r}: it is private to its object")
        return RemoteMethod(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        token = self._actors.new_token()
        self._actors.tell(self._address, {token: 1})
        return _unpickled, (self._address, token)

    def __del__(self) -> None:
        with_token = getattr(self, "_token", None)
        if with_token is not None:
            self._actors.dropped.put((self._address, with_token))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._address[:2] == other._address[:2]

    def __hash__(self) -> int:
        return hash(self._address[:2])

    def __repr__(self) -> str:
        owner, _, kind = self._address
        return f"<Remote: {kind} on rank {owner}>"


@final
class RemoteMethod:
    """A method of an object on another rank, which can be called in several ways.

    Made by `Remote`, as one of its attributes.

    Example:
        >>> from hpcdist import rpc
        >>> rpc.init_rpc()
        >>> names = rpc.remote("worker0", list, ["a", "b"])
        >>> names.index.rpc_async("b").wait()
        1
        >>> rpc.shutdown()

    """

    __slots__ = ("_name", "_remote", "_timeout")

    def __init__(self, remote: Remote, name: str, timeout: Any = -1) -> None:
        self._remote, self._name, self._timeout = remote, name, timeout

    def rpc_async(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it; return a future of the result at once.

        Args:
            args: of the method, by position; they are pickled.
            kwargs: of the method, by name.

        """
        actors, address = self._remote._actors, self._remote._address
        method = _Method(address.number, self._name, address.kind)
        return actors.agent.call(address.owner, method, args, kwargs, self._timeout)

    def rpc_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; return its result, or raise its exception.

        Args:
            args: of the method, by position; they are pickled.
            kwargs: of the method, by name.

        """
        actors, address = self._remote._actors, self._remote._address
        if actors.agent.me.rank == address.owner:
            actor = actors.actor(address.number)
            if actor.thread is threading.current_thread():  # it would wait for itself
                return getattr(actor.object, self._name)(*args, **kwargs)
        return self.rpc_async(*args, **kwargs).wait()

    __call__ = rpc_sync

    def within(self, timeout: Any) -> RemoteMethod:
        """Return the method with a time limit of this many seconds for each call.

        Args:
            timeout: seconds (or a `datetime.timedelta`).

        """
        return RemoteMethod(self._remote, self._name, timeout)

    def __repr__(self) -> str:
        return f"<{self._name} of {self._remote!r}>"


def _unpickled(address: Address, token: Token) -> Remote:
    actors = actors_here()
    own = actors.new_token()
    actors.tell(address, {own: 1, token: -1})
    return Remote(address, own)


# ---- what the owner runs


def _make(
    cls: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    concurrent: bool,
    token: Token,
) -> Future[Address]:
    return actors_here().make(lambda: cls(*args, **kwargs), concurrent, token)


@final
@dataclass(frozen=True)
class _Method:
    """A function that calls a method of one of this rank's objects."""

    number: int
    name: str
    kind: str

    __hpcdist_inline__ = True  # it only puts the call into the object's queue

    @property
    def __hpcdist_name__(self) -> str:
        return f"{self.kind}.{self.name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return actors_here().actor(self.number).call(self.name, args, kwargs)


@inline
def _count(number: int, changes: dict[Token, int]) -> None:
    actors_here().count(number, changes)


def actors_here() -> Actors:
    """Return what this rank keeps of objects and handles."""
    agent = require_agent()
    if agent.actors is None:
        with _starting:
            if agent.actors is None:
                agent.actors = Actors(agent)
    found: Actors = agent.actors
    return found


_starting = threading.Lock()


@final
class Actors:
    """The objects that a rank has for others, and what it tells others of its handles."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.dropped: SimpleQueue[tuple[Address, Token] | None] = SimpleQueue()
        """Handles that went; putting something in is all that is safe while memory is freed."""
        self._lock = threading.Lock()
        self._actors: dict[int, Actor] = {}
        self._numbers = itertools.count()
        self._tokens = itertools.count()
        _thread(self._sweep, "rpc-handles")

    def new_token(self) -> Token:
        """Return a token that no other handle or pickle has."""
        return self.agent.me.rank, next(self._tokens)

    def tell(self, address: Address, changes: dict[Token, int]) -> None:
        """Report changed numbers of references to the owner of an object."""
        if address.owner == self.agent.me.rank:
            self.count(address.number, changes)
        else:
            self._send(address, changes)

    def _send(self, address: Address, changes: dict[Token, int]) -> None:
        """Send changes to the owner, after what was sent to it before."""
        self.agent.call(address.owner, _count, (address.number, changes))

    def _sweep(self) -> None:
        while (dropped := self.dropped.get()) is not None:
            address, token = dropped
            try:
                self._send(address, {token: -1})  # also here: calls that are on their way go first
            except Exception:  # the owner is gone, or this rank has shut down
                continue

    # ---- of this rank's objects

    def make(self, build: Callable[[], Any], concurrent: bool, token: Token) -> Future[Address]:
        """Make an object with one reference."""
        actor = Actor(self.agent.submit if concurrent else None)
        actor.references[token] = 1

        def settle() -> Address:
            try:
                actor.object = build()
            except BaseException:
                actor.end()
                raise
            with self._lock:
                number = next(self._numbers)
                self._actors[number] = actor
            return Address(self.agent.me.rank, number, type(actor.object).__qualname__)

        return actor.run(settle, "an object")

    def actor(self, number: int) -> Actor:
        """Return an actor of this rank."""
        with self._lock:
            actor = self._actors.get(number)
        if actor is None:
            raise UsageError(
                f"object {number} of rank {self.agent.me.rank} is gone: no handle of it was left, "
                "or RPC was shut down; keep a handle while others are on their way"
            )
        return actor

    def count(self, number: int, changes: dict[Token, int]) -> None:
        """Change the counts of an object's references; without any it goes."""
        with self._lock:
            actor = self._actors.get(number)
            if actor is None:
                return
            actor.references.update(changes)
            for token in changes:
                if not actor.references[token]:
                    del actor.references[token]
            if any(count > 0 for count in actor.references.values()):
                return
            del self._actors[number]
        actor.end()

    def close(self) -> None:
        """Release all objects, after the calls that wait for them."""
        with self._lock:
            actors, self._actors = list(self._actors.values()), {}
        for actor in actors:
            actor.end()
        self.dropped.put(None)


@final
class Actor:
    """One object: who refers to it, and where its calls run."""

    def __init__(self, begin: Callable[[Callable[[], None]], Any] | None) -> None:
        self.object: Any = None
        self.references: Counter[Token] = Counter()
        self.thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._begin = begin or self._calls.put
        """Lets a call run: on the pool, or in turn on its own thread."""
        if begin is None:
            self.thread = _thread(self._run, "rpc-actor")

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method; return a future of what it returns, or that itself if it is inline."""
        if is_inline(getattr(type(self.object), name, None)):
            return getattr(self.object, name)(*args, **kwargs)
        what = f"{name} of {type(self.object).__qualname__}"
        return self.run(lambda: getattr(self.object, name)(*args, **kwargs), what)

    def run(self, function: Callable[[], Any], what: str) -> Future[Any]:
        """Run a function when it is its turn; return the future of what it returns."""
        future: Future[Any] = Future(what)

        def run() -> None:
            try:
                result = function()
            except BaseException as error:
                failure = error
                future.settle(lambda: _raise(failure))
            else:
                future.settle(lambda: result)

        self._begin(run)
        return future

    def end(self) -> None:
        """Release the object after the calls that wait for it."""
        self._begin(self._forget)
        self._calls.put(None)

    def _forget(self) -> None:
        self.object = None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call


def _raise(error: BaseException) -> Any:
    raise error


def _thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that stands for this rank."""
    rank = simulated_rank()

    def run() -> None:
        with standing_for(rank):
            target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
