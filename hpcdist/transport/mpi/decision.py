"""What the numbers of an agreement mean, and the errors it can end with: computed, nothing is sent.

Every rank contributes six integers: the fingerprint of its call, and its negative; the `detail` of
the call, and its negative; its deadline, and the negative of its arrival, in nanoseconds. All ranks
get the least of each. See `agreement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from hpcdist.arrays.dtypes import dtype_row, name_of_code
from hpcdist.errors import CollectiveTimeout, HpcdistError, MismatchError, RemoteError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Collective, Distribution, Objects, Reduction, label
from hpcdist.transport.call.kinds import Family, Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.flight.neighbours import call_sites
from hpcdist.transport.shm.control import Six

NEVER = 1 << 62
CANNOT = -1, -NEVER
"""In place of a fingerprint and its negative: never opposite numbers, whatever the others say."""

LATE: Six = (0, 0, 0, 0, 0, -NEVER)
"""What a rank contributes that comes after everyone's deadline: it makes the operation void."""


class Verdict(Enum):
    """What the ranks did not agree on."""

    VOID = "a rank came after another one's deadline"
    MISMATCH = "the ranks called different operations, or one cannot take part"


def decide(least: Six) -> tuple[int, int] | Verdict:
    """Return the smallest and the largest `detail` of ranks that agree, else why they do not."""
    number, opposite, detail, greatest, deadline, arrival = least
    if -arrival > deadline:
        return Verdict.VOID
    if number != -opposite:
        return Verdict.MISMATCH
    return detail, -greatest


def voided(what: str, least: Six, arrived_ns: int, rank: int) -> CollectiveTimeout:
    """Return what is raised in a void operation, on world rank `rank`; [Note: time limits]."""
    deadline_ns = least[4]
    late_s = (arrived_ns - deadline_ns) / 1e9
    late = f"this rank joined {late_s:.1f} s after that" if late_s > 0 else "a rank was late"
    if deadline_ns == 0:  # `LATE`
        late = "that rank has gone on to later operations since"
    return CollectiveTimeout(
        f"{what} was given up by a rank whose time limit was over: {late}. Called "
        f"at {call_site()}. Pass a larger timeout to new_group or init_parallel_env if ranks "
        "may be that far apart",
        (rank,) if late_s > 0 else (),
    )


class Called(NamedTuple):
    """An operation in words, and the line that called it."""

    call: str
    site: str


class Told(NamedTuple):
    """What ranks that do not agree tell each other: what they called, and why they cannot."""

    call: str
    site: str
    failure: tuple[str, str] | None = None
    """The words of the error, and its traceback."""
    earlier: tuple[Called, ...] = ()
    """What it has done since the last agreement; [Note: eager operations] in `eager.h`."""
    begun: int = 0
    """How many operations it has begun."""


def eager_call(told: tuple[Any, ...], ranks: Sequence[int]) -> Called:
    """Return in words what `Hot.earlier` tells of an operation; `ranks`: see `label`."""
    if len(told) == len(Called._fields):
        return Called(*told)
    kind, op, root, code, shape, file, line = told
    nothing: Any = None
    of_kind = Kind(kind)  # type: ignore[call-arg] # one of them, by its number
    call: Collective
    if of_kind.family is Family.OBJECTS:
        call = Objects(of_kind, (), shape, root)
    else:
        dtype = dtype_row(np.dtype(name_of_code(code)))
        arrays = of_kind, None, nothing, dtype, shape, root
        is_reduced = of_kind.family is Family.REDUCTION
        call = Reduction(*arrays, ReduceOp(op), nothing) if is_reduced else Distribution(*arrays)
    return Called(label(call, ranks), f"{file}:{line}" if file else "an unknown line")


def _first_difference(told: Mapping[int, Told]) -> dict[int, Called]:
    """Return what each rank has called where they differ first."""
    rows = {rank: (*each.earlier, Called(each.call, each.site)) for rank, each in told.items()}
    for at in range(max(map(len, rows.values()))):
        found = {rank: row[min(at, len(row) - 1)] for rank, row in rows.items()}
        if len({each.call for each in found.values()}) > 1:
            break
    return found


def disagreement(what: str, told: Mapping[int, Told]) -> HpcdistError:
    """Return what all ranks raise, from what each has told; a rank that cannot raises its own."""
    for rank, each in told.items():
        if each.failure is not None:
            return RemoteError(
                f"{what} was called off on all ranks because rank {rank} cannot "
                f"take part: {each.failure[0]}",
                rank,
                each.failure[1],
                in_step=True,
            )
    called = _first_difference(told)
    calls = {rank: f"{each.call} at {each.site}" for rank, each in called.items()}
    for rank, each in told.items():
        if called[rank] in each.earlier:
            calls[rank] += f", and had gone on to {each.call} at {each.site}"
    error = mismatch(what, calls, sent=any(each.earlier for each in told.values()))
    error.call_sites = {rank: each.site for rank, each in called.items()}
    return error


def mismatch(what: str, calls: Mapping[int, str], *, sent: bool = False) -> MismatchError:
    """Build the error that lists, per distinct call and line, the ranks that made it.

    `sent` says that some of them may have taken what others gave.
    """
    nothing = "" if sent else "; nothing was sent"
    ranks_of: dict[str, list[int]] = {}
    for rank, words in calls.items():
        ranks_of.setdefault(words, []).append(rank)
    lines = [
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {words}"
        for words, ranks in ranks_of.items()
    ]
    return MismatchError(
        f"the ranks disagree in {what}{nothing}:\n" + "\n".join(lines) + "\nLet every "
        "rank call the same operations in the same order, with equal shape, dtype, op and root"
    )


def not_joined(
    what: str, missing: Sequence[int], limit_s: float, account: str, ranks: Sequence[int] = ()
) -> CollectiveTimeout:
    """Return the error of a rank whose time is over; `ranks` are those of the group."""
    names = ", ".join(map(str, missing)) or "none (a rank answers but does not proceed)"
    error = CollectiveTimeout(
        f"{what} was not joined by all ranks within {limit_s:g} s; "
        f"missing ranks: {names}. Called at {call_site()}. Look at what these ranks do "
        f"instead, or pass a larger timeout to new_group or init_parallel_env{account}",
        tuple(missing),
    )
    error.call_sites = call_sites(ranks)
    return error


def not_begun(what: str, missing: Sequence[int], limit_s: float, account: str) -> CollectiveTimeout:
    """Return the error of a rank whose time is over before all have ended what it gave up."""
    return CollectiveTimeout(
        f"{what} cannot begin: missing ranks {tuple(missing)} have not joined an earlier "
        f"operation that timed out, nor come within {limit_s:g} s more{account}",
        tuple(missing),
    )
