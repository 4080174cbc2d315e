"""`broadcast_states`: the same contents on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hpcdist.arrays.buffer import as_buffer
from hpcdist.comm.collectives import broadcast
from hpcdist.comm.group import Group
from hpcdist.parallel.fused import fused


def broadcast_states(arrays: Sequence[Any], group: Group, src: int) -> list[Any]:
    """Give all `arrays` the contents they have on rank `src`, few operations for many arrays.

    Collective over `group`; shapes and dtypes must be equal (see `verify_states`).

    Args:
        arrays: of any library; tensors that require grad are changed without autograd noticing.
        group: the ranks that take part.
        src: a world rank.

    Returns:
        The arrays: the same objects where they can be written, new ones where they cannot (JAX).

    """
    buffers = [as_buffer(array, f"array {index}") for index, array in enumerate(arrays)]
    return fused(buffers, group, partial(broadcast, src=src, group=group))
