"""A run beside a saved one: what has become slower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.bench.rows import KEY, Row, key_of
from hpcdist.named_tuple import NamedTuple


class Comparison(NamedTuple):
    """What two runs have in common, and what not.

    Attributes:
        compared: how many rows both have.
        regressions: the rows that are slower, with ``was_s``, ``median_ratio``, ``min_ratio``.
        missing: rows of the baseline that were not measured now.
        new: rows that the baseline has not.

    """

    compared: int
    regressions: list[Row]
    missing: list[Row]
    new: list[Row]


def compare(rows: Sequence[Row], baseline: Sequence[Row], tolerance: float) -> Comparison:
    """Compare a run with a saved one.

    A row is slower where its median and its minimum both are more than `tolerance` times the
    saved ones: noise lengthens the median, but seldom the fastest round.
    """
    saved = {key_of(row): row for row in baseline}
    now = {key_of(row) for row in rows}
    both = [_ratios(row, saved[key_of(row)]) for row in rows if key_of(row) in saved]
    return Comparison(
        len(both),
        [row for row in both if min(row["median_ratio"], row["min_ratio"]) > tolerance],
        [row for key, row in saved.items() if key not in now],
        [row for row in rows if key_of(row) not in saved],
    )


def _ratios(row: Row, was: Row) -> Row:
    return {name: row[name] for name in (*KEY, "median_s")} | {
        "was_s": was["median_s"],
        "median_ratio": row["median_s"] / was["median_s"],
        "min_ratio": row["min_s"] / was["min_s"],
    }


def summary(found: Comparison, tolerance: float) -> str:
    """Return in one line how the comparison went."""
    parts: list[Any] = [f"{found.compared} measurements compared with the baseline"]
    parts.append(f"{len(found.regressions)} more than {tolerance:g} times as slow")
    if found.missing:
        cases = ", ".join(sorted({row["case"] for row in found.missing}))
        parts.append(f"{len(found.missing)} of the baseline were not measured ({cases})")
    if found.new:
        parts.append(f"{len(found.new)} are new")
    return "; ".join(parts)
