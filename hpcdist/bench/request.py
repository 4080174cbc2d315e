"""`Request`: what the command line asks for, read and checked before anything is measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hpcdist.bench.cases import CASES, KINDS, choose_cases
from hpcdist.bench.libraries import PEERS
from hpcdist.bench.memory_kinds import HOST, devices, host_memories
from hpcdist.bench.plan import Plan
from hpcdist.bench.plots import check_plot
from hpcdist.bench.rows import Row
from hpcdist.bench.runfile import check_writable, read_run
from hpcdist.bench.task import read_dtype
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import read_counts, read_sizes
from hpcdist.transport.call.reduction import ReduceOp


class Request(NamedTuple):
    """What is to be measured, and what is to be made of it."""

    plan: Plan
    json_file: str | None = None
    plot: str | None = None
    baseline: str | None = None
    tolerance: float = 1.25
    predict: tuple[int, ...] = ()
    source: str | None = None


def spread_against(words: Sequence[str]) -> list[str]:
    """Return the command line with the words after ``--against`` joined by commas.

    They end at an option, at the name of a case or of a set of cases.
    """
    known = {*CASES, *KINDS, "all"}
    found: list[str] = []
    names: list[str] | None = None
    for word in words:
        if names is not None and not word.startswith("-") and word not in known:
            names.append(word)
            continue
        if names:
            found.append(",".join(names))
        names = [] if word == "--against" else None
        found.append(word)
    return found + ([",".join(names)] if names else [])


def read_request(given: Mapping[str, Any]) -> Request:
    """Turn the values of the options into a request; `UsageError` names what is wrong."""
    device = _device(given["device"])
    plan = Plan(
        cases=choose_cases(given["cases"], on_device=device != HOST),
        sizes=read_sizes(given["sizes"]) if given["sizes"] else None,
        ranks=_counts(given["ranks"]) or None,
        dtypes=_words("--dtype", given["dtype"], None),
        memories=_memories(device, given["memory"]),
        op=_words("--op", given["op"].upper(), _OPS)[0],
        against=_words("--against", ",".join(given["against"]), PEERS, least=0),
        rounds=given["rounds"],
        quick=given["quick"],
    )
    items = {name: read_dtype(name).itemsize for name in plan.dtypes}
    are_typed = any(CASES[each].typed for each in plan.cases)
    for size in plan.sizes or () if are_typed else ():
        if all(size % item for item in items.values()):
            raise UsageError(f"--sizes: {size} bytes are no whole number of {', '.join(items)}")
    predict = _counts(given["predict"])
    if given["source"] and not predict:
        raise UsageError("--from FILE is for --predict: say for how many ranks, as --predict 8,64")
    same = ("json_file", "plot", "baseline", "tolerance", "source")
    return Request(plan, predict=predict, **{name: given[name] for name in same})


_OPS = [op.name for op in ReduceOp][:5]
"""Those that have a meaning for floats."""


def _counts(text: str | None) -> tuple[int, ...]:
    return tuple(dict.fromkeys(read_counts(text.split(",")))) if text else ()


def _device(name: str) -> str:
    if name not in devices():
        raise UsageError(f"--device: {name} is unknown; there is {', '.join(devices())}")
    return name


def _memories(device: str, words: str | None) -> tuple[str, ...]:
    if device == HOST:
        return _words("--memory", words or "ordinary", host_memories())
    if words:
        raise UsageError(f"--memory is a kind of host memory: leave it out with --device {device}")
    return (device,)


def _words(
    option: str, text: str, known: Collection[str] | None, least: int = 1
) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(filter(None, text.replace(",", " ").split())))
    unknown = [word for word in words if known is not None and word not in known]
    if unknown or len(words) < least:
        what = f"{', '.join(unknown)} is unknown" if unknown else "a name is missing"
        there = f"; there is {', '.join(known)}" if known is not None else ""
        raise UsageError(f"{option}: {what}{there}")
    return words


def check_request(request: Request, nranks: int) -> list[Row]:
    """Check what needs files and the number of ranks; return the rows of the baseline."""
    beyond = [size for size in request.plan.ranks or () if size > nranks]
    if beyond:
        raise UsageError(f"--ranks {max(beyond)}, but this job has {nranks} ranks")
    if request.json_file:
        check_writable(request.json_file)
    if request.plot:
        check_plot(request.plot)
    rows: list[Row] = read_run(request.baseline)["rows"] if request.baseline else []
    return rows
