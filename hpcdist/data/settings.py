"""The settings of datasets: one row for each name, with its default and what it may be.

Names and defaults are Paddle's, and a few more. What cannot be honoured is refused where it would
change what is read; what only tunes Paddle's own transport has no effect.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from hpcdist.comm.group import Group
from hpcdist.data.bad_records import POLICIES
from hpcdist.data.formats import Settings, open_format
from hpcdist.data.shares import TAILS
from hpcdist.data.slots import slots_of
from hpcdist.data.spill import read_spill
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.named_tuple import NamedTuple


class Setting(NamedTuple):
    """A setting of a dataset.

    Attributes:
        default: its value if nobody says otherwise.
        read: returns a value as it is used, or raises `UsageError`.
        told: returns what must be the same on all ranks, by its `repr`: the value, unless a rank
            may have its own.

    """

    default: Any
    read: Callable[[str, Any], Any]
    told: Callable[[Any], Any] = lambda value: value


def _own(value: Any) -> None:
    """Let each rank have its own value."""


def _whole(least: int) -> Callable[[str, Any], int]:
    return lambda name, value: integer(value, name, least)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string, got {value!r}")
    return value


def _separator(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) != 1 or not value.isascii() or value in '"\r\n':
        raise UsageError(f"{name} must be one ASCII character, such as ';', got {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, got {value!r}")
    return value


def _one_of(*words: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in words:
            raise UsageError(f"{name} must be one of {', '.join(map(repr, words))}, got {value!r}")
        return str(value)

    return read


def _anything(name: str, value: Any) -> Any:
    return value


def _only(allowed: Any, remedy: str) -> Callable[[str, Any], Any]:
    """Refuse all values but one, which changes nothing."""

    def read(name: str, value: Any) -> Any:
        if value != allowed:
            raise UsageError(f"{name}={value!r} is not supported here: {remedy}")
        return value

    return read


def _group(name: str, value: Any) -> Group | None:
    if value is not None and not isinstance(value, Group):
        raise UsageError(f"{name} must be a Group from new_group, or None for all, got {value!r}")
    return value


def _seconds(name: str, value: Any) -> float | None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value <= threading.TIMEOUT_MAX):
        raise UsageError(f"{name} must be a number of seconds, or None for no limit, got {value!r}")
    return None if value is None else float(value)


def _use_var(name: str, value: Any) -> Any:
    return None if value is None else slots_of(value)


def _format(name: str, value: Any) -> str:
    open_format(value)
    return str(value)


def _read_ahead(name: str, value: Any) -> int | None:
    return None if value is None else _whole(0)(name, value)


def _spill(name: str, value: Any) -> Any:
    read_spill(value)  # refused where it is said; what is free is asked when rows are loaded
    return value


def _spills(value: Any) -> bool:
    """Let nodes have other folders, and other amounts of memory."""
    return value is not None and value is not False


BASE: Mapping[str, Setting] = {
    "batch_size": Setting(1, _whole(1)),
    "thread_num": Setting(1, _whole(1)),
    "use_var": Setting((), _use_var),
    "pipe_command": Setting("cat", _text),
    "input_type": Setting(0, _only(0, "a line is one sample; let pipe_command cut batches apart")),
    "fs_name": Setting("", _text),
    "fs_ugi": Setting(
        "", _only("", "credentials come from where the library of the file system looks for them")
    ),
    "download_cmd": Setting(
        "cat", _only("cat", "files are read where they are; give their URLs, or a pipe_command")
    ),
    "queue_num": Setting(-1, _whole(-1)),
    "format": Setting("multislot", _format),
    "columns": Setting(None, _use_var),
    "on_bad": Setting("raise", _one_of(*POLICIES)),
    "separator": Setting(",", _separator),
    "header": Setting(True, _flag),
    "max_line_bytes": Setting(Settings().max_line_bytes, _whole(1)),
    "block_bytes": Setting(Settings().block_bytes, _whole(1)),
    "pipe_timeout": Setting(None, _seconds),
    "allow_empty": Setting(False, _flag),
    "tail": Setting("pad", _one_of(*TAILS)),
    "seed": Setting(0, _whole(0)),
    "group": Setting(None, _group, _own),  # where ranks disagree about it, they cannot meet
}
"""Of all datasets."""

QUEUE: Mapping[str, Setting] = {**BASE, "shuffle_buffer": Setting(0, _whole(0))}
"""Of `QueueDataset`."""

IN_MEMORY: Mapping[str, Setting] = {
    **BASE,
    "spill": Setting(None, _spill, _spills),
    "read_ahead": Setting(None, _read_ahead),
    "data_feed_type": Setting("MultiSlotInMemoryDataFeed", _text),
    "merge_size": Setting(
        -1, _only(-1, "lines of one id are not merged; let pipe_command merge them")
    ),
    "parse_ins_id": Setting(False, _only(False, "make the id a slot of its own, or a column")),
    "parse_content": Setting(False, _only(False, "make it a slot of its own, or a column")),
    "fleet_send_batch_size": Setting(None, _anything, _own),
    "fleet_send_sleep_seconds": Setting(None, _anything, _own),
    "fea_eval": Setting(False, _flag),
    "candidate_size": Setting(10000, _whole(1)),
}
"""Of `InMemoryDataset`; the two that begin with ``fleet_send``, ``candidate_size`` and
``data_feed_type`` have no effect."""


def read_settings(
    table: Mapping[str, Setting], wanted: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Return the values of the settings that are wanted.

    Raises:
        UsageError: there is no such setting, or it cannot have this value.

    """
    for name in wanted:
        if name not in table:
            near = get_close_matches(name, table, 1)
            raise UsageError(
                f"{what} has no setting {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(table)}")
            )
    return {name: table[name].read(name, value) for name, value in wanted.items()}


def defaults(table: Mapping[str, Setting]) -> dict[str, Any]:
    """Return what each setting is if nobody says otherwise."""
    return {name: setting.default for name, setting in table.items()}
