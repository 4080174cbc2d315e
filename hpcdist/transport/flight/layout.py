"""How the file of a rank's flight recorder is laid out; `native/recorder.h` says the same in C.

A header with a counter for each kind of operation; slots for waits that have become long; a ring of
records of 64 bytes; and text, to which is only ever added: names of files, and groups. A place in
the text is a number of bytes from its beginning, 0 is none.
"""

from __future__ import annotations

import struct

from hpcdist.transport.call.kinds import ROOTED, Kind

MAGIC = b"HPCFLY01"
CAPACITY = 2048
"""Records of a ring, a power of two."""
TEXT_BYTES = 256 << 10

HEADER = struct.Struct("8sQQqqQQQQqQQQ")
"""See `flight_header_t` in `native/recorder.h`, which has the same fields in the same order."""
PID_AT, RANK_AT, HEAD_AT, TEXT_USED_AT, ABOUT_AT, GROUPS_AT = 8, 24, 48, 56, 80, 96
COUNTER = struct.Struct("QQQ")
"""operations ended, their bytes, the nanoseconds they took"""
COUNTERS_AT, COUNTERS = 256, 64

WAIT = struct.Struct("QQQHH")
"""1 where there is a wait, since when (ns), thread, bytes of its call site and of its words"""
WAITS_AT, WAITS, WAIT_BYTES = COUNTERS_AT + COUNTERS * COUNTER.size, 8, 256

RECORD = struct.Struct("QQQQIIIIiIHHBBH")
"""See `flight_record_t` in `native/recorder.h`, which has the same fields in the same order."""
RECORDS_AT = WAITS_AT + WAITS * WAIT_BYTES
TEXT_AT = RECORDS_AT + CAPACITY * RECORD.size
TOTAL = TEXT_AT + TEXT_BYTES

GROUP = struct.Struct("QII")
"""At the place of a group: the number of its last operation, bytes of the JSON that follows, and
the place of the group before."""

BEGUN, ENDED, FAILED = 1, 2, 3
STARTED = 1
"""Of a record's flags: the caller went on, the operation runs beside it."""

INIT, NEW_GROUP, RPC, PLAN = 40, 41, 42, 43
"""Kinds of what is recorded beside the operations of `Kind`."""

NAMES = {kind.value: kind.name.lower() for kind in Kind} | {
    INIT: "init_parallel_env",
    NEW_GROUP: "new_group",
    RPC: "rpc",
    PLAN: "plan",
}
"""The public names of the kinds that are recorded."""

SENDS = frozenset({Kind.SEND, Kind.SEND_OBJECT_LIST})
RECEIVES = frozenset({Kind.RECV, Kind.RECV_OBJECT_LIST})
SENT_FOR: dict[int, int] = {Kind.RECV: Kind.SEND, Kind.RECV_OBJECT_LIST: Kind.SEND_OBJECT_LIST}
"""What sends what a receive takes."""

WITH_PEER = ROOTED | SENDS | RECEIVES | {RPC}
"""Kinds that have a root, or another end."""
