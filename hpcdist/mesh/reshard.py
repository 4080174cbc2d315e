"""`reshard_to`: an array in another layout, in the way that is best for where its ranks are.

[Note: ways] Which way is decided by what all ranks know: the layouts, where the ranks and the
memory are. What every rank has already is copied. On one node the rest is one exchange, in which
each rank reads what it lacks out of the parts of others; an array that becomes whole of
contributions is better reduced by those who share the work. Between nodes, and on devices, the
planner's steps are ordinary collectives. From one mesh to another there is only the exchange.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.planner import Step, plan_reshard
from hpcdist.mesh.room import room_for
from hpcdist.mesh.routes import exchange_boxes
from hpcdist.mesh.steps import LOCAL, run_steps
from hpcdist.transport.base import Ended, Known, Work

Steps = tuple[Step, ...]


def reshard_to(a: DistArray, layout: Layout, *, out: DistArray | None = None) -> DistArray:
    """Return `a` in another layout of its shape: `a` itself, or new memory, or `out`.

    Collective over the ranks of both meshes, unless each rank has all of its new part.
    """
    if layout is a.layout and out is None:
        return a
    made, room = _result(a, layout, out)
    if not _takes_part(a.layout, layout):
        return made
    steps = steps_for(a, layout)
    if steps is None:
        exchange_boxes(a.local, a.layout, layout, room)
    else:
        run_steps(a.local, a.layout, steps, room)
    _settle(made, room)
    return made


def start_reshard(a: DistArray, layout: Layout, *, out: DistArray | None = None) -> Work:
    """Begin `reshard_to`, by an exchange if there is anything to communicate."""
    src = a.layout
    if not _takes_part(src, layout) or local_steps(src, layout, a.itemsize) is not None:
        return Ended(reshard_to(a, layout, out=out))
    made, room = _result(a, layout, out)
    return Resharding(exchange_boxes(a.local, src, layout, room, sync_op=False), made, room)


def steps_for(a: DistArray, layout: Layout) -> Steps | None:
    """Return the steps of [Note: ways]; None for one exchange."""
    src = a.layout
    if src.mesh != layout.mesh:
        return None
    steps = local_steps(src, layout, a.itemsize)
    if steps is not None:
        return steps
    on_host = type(a.local) is np.ndarray
    steps = plan_reshard(src, layout, a.itemsize)
    shares_the_work = any(step.verb == "all_reduce" for step in steps)
    return None if on_host and src.mesh.group.one_node and not shares_the_work else steps


def local_steps(src: Layout, dst: Layout, itemsize: int) -> Steps | None:
    """Return steps without communication, if there are."""
    if src.mesh != dst.mesh:
        return None
    steps = plan_reshard(src, dst, itemsize)
    return steps if all(step.verb in LOCAL for step in steps) else None


def _takes_part(src: Layout, dst: Layout) -> bool:
    """Return whether this rank is on either mesh."""
    return src.mesh.coordinate is not None or dst.mesh.coordinate is not None


def _result(a: DistArray, layout: Layout, out: DistArray | None) -> tuple[DistArray, Any]:
    """Return the array to be returned, and the memory in which this rank's part is made."""
    if out is None:
        room = room_for(layout, a.local)
        return DistArray._of(room, layout), room
    if not isinstance(out, DistArray) or out.layout is not layout or out.dtype != a.dtype:
        got = f"{out.dtype} {out.layout!r}" if isinstance(out, DistArray) else repr(type(out))
        raise UsageError(f"out must be a DistArray, {a.dtype} {layout!r}, got {got}")
    own = out.local
    if not getattr(own.flags, "writeable", True):
        raise UsageError("out is read-only; give an array that may be written")
    if own.flags.c_contiguous and not _overlap(own, a.local):
        return out, own
    return out, room_for(layout, a.local)


def _overlap(one: Any, other: Any) -> bool:
    """Return whether memory may be the same: on a device that is not asked."""
    on_host = type(one) is np.ndarray and type(other) is np.ndarray
    return not on_host or np.may_share_memory(one, other)


def _settle(made: DistArray, room: Any) -> None:
    if made.local is not room:
        made.local[...] = room


@final
class Resharding(Work):
    """An exchange under way; its result is the array in its new layout."""

    def __init__(self, exchange: Work, made: DistArray, room: Any) -> None:
        self._exchange, self._made, self._room = exchange, made, room

    @property
    def limit_s(self) -> float:
        """See `Work.limit_s`."""
        return self._exchange.limit_s

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the array is there."""
        self._exchange.wait(timeout)
        _settle(self._made, self._room)
        self._room = self._made.local
        return True

    def is_completed(self) -> bool:
        """Return whether the array is there."""
        return self._exchange.is_completed()

    def result(self) -> DistArray:
        """Wait, and return the array."""
        self.wait()
        return self._made

    def refuse_nested(self) -> None:
        """See `Work.refuse_nested`."""
        self._exchange.refuse_nested()

    def attend(self, waited: float) -> None:
        """See `Work.attend`."""
        self._exchange.attend(waited)

    def known(self) -> Known:
        """See `Work.known`."""
        return self._exchange.known()
