"""`stats`: what this rank has called and run, by function."""

from __future__ import annotations

from typing import Any, final

from hpcdist.rpc.agent import require_agent
from hpcdist.text import duration, volume


@final
class Stats(dict[str, dict[str, Any]]):
    """A dict by the name of the function; printed it is a table, the busiest function first."""

    def __str__(self) -> str:
        rows = [_HEADERS, *(_row(name, each) for name, each in self._busiest_first())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_line(row, widths) for row in rows)

    def _busiest_first(self) -> list[tuple[str, dict[str, Any]]]:
        return sorted(self.items(), key=lambda item: (-item[1]["run_s"], item[0]))


def stats() -> Stats:
    """Return statistics of this rank's calls, made and served, since `init_rpc`. Local.

    Returns:
        A dict with a dict for each function, by its name:

        - ``calls``: how often this rank has called it;
        - ``served``: how often it has run here;
        - ``bytes_in``, ``bytes_out``: bytes that came, and that were sent: arguments and results;
        - ``queue_s``: seconds that calls waited here for a thread;
        - ``run_s``: seconds that they ran here;
        - ``late``: answers that came when their caller had given up.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> dist.rpc.init_rpc()
        >>> dist.rpc.rpc_sync(0, abs, (-1,))
        1
        >>> counters = dist.rpc.stats()["builtins.abs"]
        >>> counters["served"]
        1
        >>> dist.rpc.shutdown()

    """
    counters = dict(require_agent().counters)
    return Stats((name, _fields(each)) for name, each in counters.items())


def _fields(counter: Any) -> dict[str, Any]:
    return {name: getattr(counter, name) for name in _FIELDS}


_FIELDS = ("calls", "served", "bytes_in", "bytes_out", "queue_s", "run_s", "late")
_HEADERS = ("function", "calls", "served", "in", "out", "queued", "ran", "late")


def _row(name: str, counter: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        str(counter["calls"]),
        str(counter["served"]),
        volume(counter["bytes_in"]),
        volume(counter["bytes_out"]),
        duration(counter["queue_s"]),
        duration(counter["run_s"]),
        str(counter["late"]),
    )


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join([row[0].ljust(len(first)), *others]).rstrip()
