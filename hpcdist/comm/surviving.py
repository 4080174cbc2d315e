"""`survive`: a function that is called again on the ranks that are left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, overload

from hpcdist.comm.collectives import barrier
from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.group import Group, world_of
from hpcdist.comm.recovery import recover
from hpcdist.comm.session import require_session
from hpcdist.errors import RankFailure, UsageError

P = ParamSpec("P")
T = TypeVar("T")
OnRanks = Callable[Concatenate[Group, P], T]
"""A function whose first argument is the group of all ranks."""


@overload
def survive(function: OnRanks[P, T], /) -> Callable[P, T]: ...


@overload
def survive(
    *, attempts: int = ..., timeout: float | None = ...
) -> Callable[[OnRanks[P, T]], Callable[P, T]]: ...


def survive(
    function: OnRanks[P, T] | None = None,
    /,
    *,
    attempts: int = 10,
    timeout: float | None = None,
) -> Callable[P, T] | Callable[[OnRanks[P, T]], Callable[P, T]]:
    """Call a function; when a rank dies in it, call it again on the ranks left and on spares.

    A decorator. What it returns is called without the first argument, which the function gets: the
    group of all ranks, of which there may be fewer each time. It is collective: all ranks call it,
    and it returns when the function has returned on all. It calls `init_parallel_env` if that was
    not done: a spare waits there, and enters the function when the others are called again. The
    function creates anew what it trains, and a `Memory` brings it back to the last commit.

    Args:
        function: takes the group, and what it is called with.
        attempts: how often it is called, at most.
        timeout: seconds that a recovery may take; None for the time limit of the groups.

    Returns:
        The function to be called; if only options are given, a decorator.

    Raises:
        RankFailure: by the last attempt, or because too few ranks are left.
        UsageError: `attempts` is less than 1.

    Example:
        >>> import hpcdist as dist
        >>> @dist.survive
        ... def train(world, steps):
        ...     return [step * world.nranks for step in range(steps)]
        >>> train(3)
        [0, 1, 2]

    """
    if attempts < 1:
        raise UsageError(f"attempts must be at least 1, got {attempts!r}")
    if function is None:
        return lambda given: _surviving(given, attempts, timeout)
    return _surviving(function, attempts, timeout)


def _surviving(function: OnRanks[P, T], attempts: int, timeout: float | None) -> Callable[P, T]:
    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        init_parallel_env()

        def once() -> T:
            result = function(world_of(require_session()), *args, **kwargs)
            barrier()  # who is ready does not leave those alone that may need it
            return result

        for _ in range(attempts - 1):
            try:
                return once()
            except Exception as error:
                if not is_of_a_death(error):
                    raise
            recover(timeout)
        return once()

    return run


def is_of_a_death(error: BaseException | None) -> bool:
    """Return whether an error came of the death of a rank, or while that was handled."""
    while error is not None and not _tells_of_a_death(error):
        error = error.__cause__ or error.__context__
    return error is not None


def _tells_of_a_death(error: BaseException) -> bool:
    """Return whether it is a `RankFailure`, or what torch's C++ makes of one: its text."""
    as_text = f"{RankFailure.__name__}: "
    return isinstance(error, RankFailure) or (type(error) is RuntimeError and as_text in str(error))
