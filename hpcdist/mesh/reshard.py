"""`reshard_to`: an array in another layout, in the way that is best for where its ranks are.

[Note: ways] Which way is decided by what all ranks know: the layouts, where the ranks and the
memory are. What every rank has already is copied. On one node the rest is one exchange, in which
each rank reads what it lacks out of the parts of others; a large array that becomes whole of
contributions is better reduced by ranks that share the work. Between nodes, and on devices, the
planner's steps are ordinary collectives. From one mesh to another there is only the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np

from hpcdist.comm.environment import begun_session
from hpcdist.comm.group import Group
from hpcdist.comm.session import Slot, here
from hpcdist.errors import UsageError
from hpcdist.mesh.agreement import agree, refuse
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.planner import Costs, Step, costs_of, plan_reshard
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.mesh.room import room_of, shape_here
from hpcdist.mesh.routes import Route, follow, joint_mesh, route_of
from hpcdist.mesh.steps import LOCAL, run_steps
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.waiting.work import Ended, Known, Work


def reshard_to(a: DistArray, layout: Layout, *, out: DistArray | None = None) -> DistArray:
    """Return `a` in another layout of its shape: `a` itself, or new memory, or `out`.

    Collective over the ranks of both meshes, unless each rank has all of its new part.
    """
    if layout is a.layout and out is None:
        return a
    move = _move_of(a, layout)
    made, room = _result(a, layout, out, move)
    steps = _agreed_steps(a, move)
    if steps is not None:
        run_steps(a.local, a.layout, steps, room)
    else:
        assert move.route is not None
        follow(move.route, move.group, a.local, room)
    _settle(made, room)
    return made


def start_reshard(a: DistArray, layout: Layout, *, out: DistArray | None = None) -> Work:
    """Begin `reshard_to`, by an exchange if there is anything to communicate."""
    move = _move_of(a, layout)
    if move.route is None:
        return Ended(reshard_to(a, layout, out=out))
    made, room = _result(a, layout, out, move)
    return Resharding(follow(move.route, move.group, a.local, room, sync_op=False), made, room)


class Move(NamedTuple):
    """What this rank does, as long as its groups live, so that an array gets another layout."""

    steps: tuple[Step, ...] | None
    """None where there is only the exchange."""
    route: Route | None
    """None where nothing is communicated."""
    group: Group | None
    """Whose ranks communicate."""
    exchanges: bool
    """Whether arrays of the host better take the exchange than the steps."""
    shape: tuple[int, ...]
    """Of this rank's part of the result."""


def _move_of(a: DistArray, layout: Layout) -> Move:
    moves = (here.session or begun_session())[_MOVES]
    move: Move = moves(a.layout, layout, a.local.dtype.itemsize)
    if move.group is not None and move.group.is_closed:
        moves.cache_clear()
        move = moves(a.layout, layout, a.local.dtype.itemsize)
    return move


def _move(src: Layout, dst: Layout, itemsize: int) -> Move:
    shape = shape_here(dst)
    if src.mesh.coordinate is None and dst.mesh.coordinate is None:
        return Move((), None, None, False, shape)
    steps = steps_of(src, dst, itemsize)
    if steps is not None and all(step.verb in LOCAL for step in steps):
        return Move(steps, None, None, False, shape)
    group = joint_mesh(src.mesh, dst.mesh).group
    exchanges = group.one_node and not _shares_the_work(src, dst, itemsize, steps or ())
    return Move(steps, route_of(src, dst, group.world_rank), group, exchanges, shape)


_MOVES: Slot[Any] = Slot(lambda: lru_cache(maxsize=1024)(_move))


def steps_of(src: Layout, dst: Layout, itemsize: int) -> tuple[Step, ...] | None:
    """Return by which steps one layout becomes another; see [Note: ways]."""
    if src.mesh != dst.mesh:
        return None
    return plan_reshard(src, dst, itemsize, costs_here(src.mesh))


def costs_here(mesh: ProcessMesh) -> tuple[Costs, ...]:
    """Return what moving data along the axes of a mesh costs in this job."""
    transport = begun_session().world.transport
    assert transport is not None
    return costs_of(mesh.crosses_nodes, transport.costs)


def _shares_the_work(src: Layout, dst: Layout, itemsize: int, steps: Sequence[Step]) -> bool:
    """Return whether ranks better reduce for each other what all of them get."""
    if not any(step.verb == "all_reduce" for step in steps):
        return False
    reduced = [
        axis for axis, kind in enumerate(src.partial) if kind not in (None, dst.partial[axis])
    ]
    copies = math.prod([src.mesh.sizes[axis] for axis in reduced])
    return dst.nbytes_local(itemsize) * copies >= _WORTH_SHARING


_WORTH_SHARING = 1 << 19
"""Bytes that a rank combines by itself as fast as by an all_reduce."""


def _agreed_steps(a: DistArray, move: Move) -> tuple[Step, ...] | None:
    """Return the steps that are best here, on which the ranks have agreed; None for an exchange."""
    steps, route = move.steps, move.route
    if steps is None or route is None:
        return steps
    if move.exchanges and type(a.local) is np.ndarray:
        return None
    agree(a.layout.mesh, route.words, a.dtype, route.key)
    return steps


def _result(
    a: DistArray, layout: Layout, out: DistArray | None, move: Move
) -> tuple[DistArray, Any]:
    """Return the array to be returned, and the memory in which this rank's part is made."""
    if out is None:
        room = room_of(move.shape, a.local, group=move.group)
        return DistArray._of(room, layout), room
    try:
        _check_out(a, layout, out)
    except UsageError as error:
        if move.route is None:
            raise
        raise refuse(joint_mesh(a.layout.mesh, layout.mesh), error) from None
    own = out.local
    if own.flags.c_contiguous and not np.may_share_memory(own, a.local):
        return out, own
    return out, room_of(move.shape, a.local, group=move.group)


def _check_out(a: DistArray, layout: Layout, out: Any) -> None:
    if not isinstance(out, DistArray) or out.layout is not layout or out.dtype != a.dtype:
        got = f"{out.dtype} {out.layout!r}" if isinstance(out, DistArray) else repr(type(out))
        raise UsageError(f"out must be a DistArray, {a.dtype} {layout!r}, got {got}")
    own = out.local
    if type(own) is not type(a.local):
        raise UsageError(
            f"out is on {out.device}, but the array on {a.device}; give memory of the same kind"
        )
    if not getattr(own.flags, "writeable", True):
        raise UsageError("out is read-only; give an array that may be written")


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

    def detach(self) -> None:
        """See `Work.detach`."""
        self._exchange.detach()

    def known(self) -> Known:
        """See `Work.known`."""
        return self._exchange.known()
