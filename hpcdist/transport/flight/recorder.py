"""The flight recorder: what this rank does is in a mapped file, readable from outside at any time.

Always on: `begin` and `end` around each operation take about a tenth of a microsecond. The file
is read by `hpcdist ps`, `top` and `dump` without a signal, without the global interpreter lock, and
outlives the process that is killed; `flight` says how it is laid out and read.

`flight/native/recorder.c` is the compiled recorder; `python_recorder` the same in Python, where
that is missing.
"""

from __future__ import annotations

import atexit
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcdist.compiled import expect
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.ending import tell_of_failure
from hpcdist.runtime.process import node_name
from hpcdist.text import in_short, read_short
from hpcdist.transport.call.call import PLACES
from hpcdist.transport.flight import layout, rings
from hpcdist.transport.flight.call_site import call_site, compiled, issued
from hpcdist.transport.flight.layout import STARTED

__all__ = ["STARTED", "begin", "end", "fail", "note"]

_U64 = struct.Struct("Q")

expect(
    compiled,
    RECORD=layout.RECORD.size,
    COUNTER=layout.COUNTER.size,
    **{
        name: getattr(layout, name)
        for name in (
            *("BEGUN", "ENDED", "FAILED", "STARTED", "COUNTERS", "COUNTERS_AT", "PID_AT"),
            *("RANK_AT", "HEAD_AT", "TEXT_USED_AT", "ABOUT_AT", "GROUPS_AT"),
        )
    },
)


def _in_python() -> Any:
    from hpcdist.transport.flight.python_recorder import PythonRecorder

    return PythonRecorder()


recorder: Any = _in_python() if compiled is None else compiled
for _family, _places in PLACES.items():
    recorder.layout(_family, *_places)

begin: Callable[[Any, int, int | None, int], int] = recorder.begin
"""``begin(call, group, sequence, flags)``: record that a call begins; returns its mark, or 0."""
note: Callable[[int, int, int, int, int, int], int] = recorder.note
"""``note(kind, group, sequence, nbytes, peer, flags)``: the same of what is no `Call`."""
end: Callable[[int], None] = recorder.end
"""Record that the operation of a mark has ended; once."""
fail: Callable[[int], None] = recorder.fail
"""Record that it has ended with an error."""


class _File:
    """The ring of this process; there is at most one."""

    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.path: Path | None = None
        self.pid = 0
        self.about: dict[str, Any] = {}
        self.epoch = 0
        self.makings: dict[tuple[int, ...], list[int]] = {}


_file = _File()
_waiting = threading.Lock()


def open_ring(about: Mapping[str, Any], roots: Sequence[str] = rings.ROOTS) -> None:
    """Begin to record in a file of this node; without one that can be made, do nothing.

    Args:
        about: what readers are told of the job, beside this process and its host.
        roots: folders in which it may be made, the preferred one first.

    """
    if _file.memory is not None:
        return
    pid = os.getpid()
    since = rings.born(pid)
    made = rings.make_ring(layout.TOTAL, f"{pid}-{since}", roots)
    if made is None:
        return
    descriptor, path = made
    try:
        memory = mmap.mmap(descriptor, layout.TOTAL)
    finally:
        os.close(descriptor)
    wall_ns = time.time_ns() - time.monotonic_ns()
    layout.HEADER.pack_into(
        memory, 0, layout.MAGIC, pid, since, -1, -1, layout.CAPACITY, 0, 8, layout.TEXT_BYTES,
        wall_ns, 0, 0, 0,
    )  # fmt: skip
    _file.memory, _file.path, _file.pid = memory, path, pid
    recorder.open(memory, layout.RECORDS_AT, layout.TEXT_AT)
    tell(
        host=node_name(),
        program=" ".join(sys.argv[:1]) or "python",
        ancestors=rings.ancestors(pid),
        **about,
    )
    atexit.register(close_ring)
    tell_of_failure(_note_failure)


def _note_failure(error: BaseException) -> None:
    """Tell readers of the exception that ends this process, and of whose death it is."""
    import traceback  # which takes time to import, and is wanted at the end only

    if os.getpid() == _file.pid:
        why = traceback.format_exception_only(error)[-1].strip()[:_WHY]
        tell(ended={"at": time.time(), "why": why, "dead": list(getattr(error, "ranks", ()))})


_WHY = 160


def job_name() -> str:
    """Return a name for the job of which this is rank 0: that of its node, and its number there."""
    return f"{node_name()}:{os.getpid()}"


class OwnJob(NamedTuple):
    """The job of this process: its name and size, and the ranks on this node."""

    name: str
    size: int
    here: tuple[int, ...]


def job() -> OwnJob | None:
    """Return which job this is; None before its world has started, or where nothing is recorded."""
    about = _file.about
    if _file.memory is None or "job" not in about:
        return None
    _, size = struct.unpack_from("qq", _file.memory, layout.RANK_AT)
    return OwnJob(about["job"], size, read_short(about["here"]))


def rank() -> int:
    """Return the rank of this process; -1 before its world has started."""
    if _file.memory is None:
        return -1
    found: int = struct.unpack_from("q", _file.memory, layout.RANK_AT)[0]
    return found


def is_open() -> bool:
    """Return whether this process records."""
    return _file.memory is not None


def tell(**about: Any) -> None:
    """Add to what readers are told of the job."""
    _file.about |= about
    if _file.memory is None:
        return
    words = json.dumps(_file.about).encode()
    place = add_text(words)
    if place:
        struct.pack_into("QQ", _file.memory, layout.ABOUT_AT, place, len(words))


def settle(rank: int, size: int, **about: Any) -> None:
    """Tell readers which rank this is, once the world has started or has changed.

    Groups that are entered from now on are others than those before, though they have the same ids.
    """
    _file.epoch += 1
    _file.makings.clear()
    if _file.memory is not None:
        struct.pack_into("qq", _file.memory, layout.RANK_AT, rank, size)
        tell(**about)


def worlds() -> int:
    """Return in how many worlds this process has been."""
    return _file.epoch


def count_worlds_from(worlds: int) -> None:
    """Let this process have been in so many worlds: a newcomer counts as those whom it joins."""
    _file.epoch = worlds


def enter_group(ranks: Sequence[int], number: int, name: str) -> int:
    """Tell readers of a group; return where it is in the text, 0 where nothing is recorded.

    Args:
        ranks: its world ranks, in its order.
        number: its id.
        name: for people.

    """
    if _file.memory is None:
        return 0
    words = json.dumps(
        {"id": number, "epoch": _file.epoch, "name": name, "ranks": _packed(ranks)}
    ).encode()
    before: int = _U64.unpack_from(_file.memory, layout.GROUPS_AT)[0]
    place = add_text(layout.GROUP.pack(0, len(words), before) + words)
    if place:
        _U64.pack_into(_file.memory, layout.GROUPS_AT, place)
    return place


def enter_making(ranks: Sequence[int]) -> tuple[int, int]:
    """Tell readers that this rank is about to make a group; return its place and its number.

    Of several groups of the same ranks, the first has number 1 on all of them.
    """
    key = tuple(ranks)
    made = _file.makings.get(key)
    if made is None:
        made = _file.makings[key] = [enter_group(ranks, -1, "new_group"), 0]
    made[1] += 1
    return made[0], made[1]


def _packed(ranks: Sequence[int]) -> str | list[int]:
    """Return ranks in short where that keeps their order."""
    in_order = all(a < b for a, b in pairwise(ranks))
    return in_short(ranks) if in_order else list(ranks)


def add_text(words: bytes) -> int:
    """Add to the text; return the place, 0 where there is no room, or nothing is recorded."""
    place: int = recorder.text(words)
    return place


def note_wait(words: str, waited_s: float) -> int:
    """Tell readers what this thread waits for, and where; return the slot, -1 for none.

    The thread of a queue waits beside the program, so its waits are none of the rank's.
    """
    memory = _file.memory
    if memory is None or issued.at is not None:
        return -1
    site, told = call_site().encode()[-120:], words.encode()
    since = time.monotonic_ns() - int(waited_s * 1e9)
    with _waiting:
        for slot in range(layout.WAITS):
            at = layout.WAITS_AT + slot * layout.WAIT_BYTES
            if _U64.unpack_from(memory, at)[0]:
                continue
            body = (site + told)[: layout.WAIT_BYTES - layout.WAIT.size]
            start = at + layout.WAIT.size
            memory[start : start + len(body)] = body
            layout.WAIT.pack_into(
                memory, at, 1, since, threading.get_ident(), len(site), len(body) - len(site)
            )
            return slot
    return -1


def forget_wait(slot: int) -> None:
    """End what `note_wait` has told."""
    if slot >= 0 and _file.memory is not None:
        _U64.pack_into(_file.memory, layout.WAITS_AT + slot * layout.WAIT_BYTES, 0)


def memory() -> mmap.mmap | None:
    """Return the ring of this process."""
    return _file.memory


def close_ring() -> None:
    """End the recording, and remove the file; another one may be opened after that."""
    _let_go()
    if _file.path is not None and _file.pid == os.getpid():
        rings.remove(_file.path)
    _file.path = None


def _let_go() -> None:
    """Record no longer; the file stays."""
    recorder.close()
    _file.memory = None
    _file.about, _file.makings = {}, {}


os.register_at_fork(after_in_child=_let_go)
