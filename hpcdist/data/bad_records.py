"""`BadRecords`: what becomes of records that are malformed: an error, or they are left out."""

from __future__ import annotations

from typing import final

from hpcdist.errors import DatasetError, UsageError
from hpcdist.named_tuple import NamedTuple

POLICIES = ("raise", "skip", "count")
_KEPT = 100


class BadRecord(NamedTuple):
    """A record that is malformed, and why."""

    file: str
    line: int
    """Counted from 1; in files without lines the record, so counted."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@final
class BadRecords:
    """How many records were malformed, and the first of them.

    Args:
        on_bad: "raise" a `DatasetError` at the first; "skip" them without a word; "count" them,
            which is to be told at the end (`summary`).

    """

    def __init__(self, on_bad: str = "raise") -> None:
        if on_bad not in POLICIES:
            raise UsageError(
                f"on_bad must be one of {', '.join(map(repr, POLICIES))}, got {on_bad!r}"
            )
        self.on_bad = on_bad
        self.count = 0
        self.first: list[BadRecord] = []

    def __repr__(self) -> str:
        return f"BadRecords({self.on_bad!r}, {self.count})"

    def add(self, record: BadRecord) -> None:
        """Note a malformed record.

        Raises:
            DatasetError: `on_bad` is "raise".

        """
        if self.on_bad == "raise":
            raise DatasetError(
                f'{record}; mend the file, or pass on_bad="skip" to leave such records out'
            )
        self.count += 1
        if len(self.first) < _KEPT:
            self.first.append(record)

    def summary(self, shown: int = 3) -> str:
        """Return in words how many records were left out, and the first of them; "" for none."""
        if not self.count:
            return ""
        first = "; ".join(map(str, self.first[:shown]))
        return f"{self.count} malformed records were left out, such as {first}"
