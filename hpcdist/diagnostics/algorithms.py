"""`algorithm_rows`: which algorithm each operation uses, why, and which rule says so. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from hpcdist.diagnostics.probe import Job
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import volume
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.shm.control import PAYLOAD
from hpcdist.transport.tuning import EXPLAINED, Algorithm, TuningRule, TuningTable

NUMBERS = ("wide", "short")
ARRAYS = ("ordinary", "shared")


class Outcome(NamedTuple):
    """The algorithm, what that means, and why it is used."""

    algorithm: str
    meaning: str
    why: str


class Row(NamedTuple):
    """What becomes of one operation; `nbytes` are those of its largest contribution."""

    operation: str
    arrays: str
    numbers: str
    nbytes: int
    outcome: Outcome


_MPI = Algorithm.MPI.value, EXPLAINED[Algorithm.MPI]
ALONE = Outcome("none", "there is nobody to talk to", "one rank")
EAGER = Outcome(
    "eager",
    "written to the control block that the ranks share, together with the agreement",
    f"{volume(PAYLOAD)} or less",
)
NOT_SHARED = Outcome(*_MPI, "the ranks do not share memory")
NOT_PIPELINED = "pipelined needs the compiled kernel"
NO_HIERARCHY = "hierarchical needs shared memory in every node"


def algorithm_rows(
    job: Job, tuning_table: TuningTable, operations: Iterable[str], sizes: Sequence[int]
) -> list[Row]:
    """Return one row for each operation, kind of arrays, kind of numbers and size.

    Args:
        job: what was found.
        tuning_table: of the group of all ranks.
        operations: their names.
        sizes: bytes of the largest contribution.

    """
    return [
        Row(operation, arrays, numbers, nbytes, _outcome(job, tuning_table, operation, *at))
        for operation in operations
        for arrays in ARRAYS
        for numbers in NUMBERS
        for nbytes in sizes
        for at in [(nbytes, numbers == "short", arrays == "shared")]
    ]


def _outcome(
    job: Job, tuning_table: TuningTable, operation: str, nbytes: int, short: bool, shared: bool
) -> Outcome:
    if job.ranks == 1:
        return ALONE
    if job.one_node and not job.memory.shared:
        return NOT_SHARED
    if job.one_node and nbytes <= PAYLOAD:
        return EAGER
    kind = Kind[operation.upper()]
    if not job.one_node:  # between nodes one rule serves all numbers, and no array is shared
        algorithm, rule = tuning_table.explain(kind, nbytes, short=False, shared=False)
    else:
        algorithm, rule = tuning_table.explain(kind, nbytes, short=short, shared=shared)
        if shared and algorithm is not Algorithm.DIRECT:  # then as if it were an ordinary array
            algorithm, rule = tuning_table.explain(kind, nbytes, short=short, shared=False)
    why = _describe_rule(rule, job.tuning.rules)
    if algorithm is Algorithm.PIPELINED and not job.memory.pipe:
        return Outcome(*_MPI, f"{why}; {NOT_PIPELINED}")
    if algorithm is Algorithm.HIERARCHICAL and not job.memory.shared:
        return Outcome(*_MPI, f"{why}; {NO_HIERARCHY}")
    return Outcome(algorithm.value, EXPLAINED[algorithm], why)


def _describe_rule(rule: TuningRule | None, from_file: Sequence[TuningRule]) -> str:
    if rule is None:
        return "no rule says otherwise"
    limit = "" if rule.up_to is None else f", up to {volume(rule.up_to)}"
    return f"rule: {'tuning file' if rule in from_file else 'default'}{limit}"


# ---- rows for people


def folded(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the rows as text, joining those of one operation that fare alike."""
    return [
        {
            "operation": operation,
            "arrays": arrays,
            "sizes": ", ".join(map(volume, sizes)),
            "algorithm": outcome.algorithm,
            "why": outcome.why,
        }
        for operation, own in groupby(rows, lambda row: row.operation)
        for (arrays, outcome), sizes in _sizes_by_outcome(list(own)).items()
    ]


def _sizes_by_outcome(rows: Sequence[Row]) -> dict[tuple[str, Outcome], list[int]]:
    """Return the sizes at which a kind of arrays has an outcome."""
    found: dict[tuple[str, Outcome], list[int]] = {}
    for nbytes in dict.fromkeys(row.nbytes for row in rows):
        at_size = {(row.arrays, row.numbers): row.outcome for row in rows if row.nbytes == nbytes}
        for arrays, outcome in _kinds(at_size):
            found.setdefault((arrays, outcome), []).append(nbytes)
    return found


def _kinds(outcomes: dict[tuple[str, str], Outcome]) -> Iterator[tuple[str, Outcome]]:
    if len(set(outcomes.values())) == 1:
        yield "any", outcomes["ordinary", "wide"]
        return
    for arrays in ARRAYS:
        wide, short = (outcomes[arrays, numbers] for numbers in NUMBERS)
        yield arrays, wide
        if short != wide:
            yield f"{arrays}, 16-bit floats and means", short


def meanings(rows: Iterable[Row]) -> list[dict[str, str]]:
    """Return what the algorithms mean that occur in the rows."""
    found = dict.fromkeys((row.outcome.algorithm, row.outcome.meaning) for row in rows)
    return [{"algorithm": algorithm, "": meaning} for algorithm, meaning in found]
