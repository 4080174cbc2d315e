"""What training engines make of their common arguments: the group, and the size of buckets."""

from __future__ import annotations

from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.errors import UsageError, UsageTypeError

_MiB = 1 << 20

DEFAULT_MB = 25
"""The usual bucket across nodes: large enough for the network's full bandwidth."""

NODE_MB = 8
"""Inside one node: the first bucket leaves earlier, and stays in the processor's cache."""


def training_group(group: Group | None) -> Group:
    """Return the group to train on; a rank outside it gets a `UsageError`."""
    group = resolve_group(group)
    if group.transport is None:
        raise UsageError(
            f"rank {group.world_rank} is not in group {group.name} (ranks {group.ranks}), so it "
            "cannot train there; build DataParallel on the members only"
        )
    return group


def bucket_limits(group: Group, usual_mb: float, last_mb: float) -> tuple[int, int]:
    """Return the bytes of the bucket that is reduced last, and of the others."""
    for name, size in (("comm_buffer_size", usual_mb), ("last_comm_buffer_size", last_mb)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not 0 <= size < 1 << 40:
            raise UsageTypeError(f"{name} must be a number of MiB, at least 0, got {size!r}")
    if usual_mb == DEFAULT_MB and group.one_node:
        usual_mb = NODE_MB
    return int(min(last_mb, usual_mb) * _MiB), int(usual_mb * _MiB)
