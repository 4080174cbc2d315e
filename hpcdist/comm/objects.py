"""Collectives on Python objects: whatever pickles, of any size.

Large arrays inside objects travel beside the pickle without being copied into it, and arrive
writable. An object that cannot be pickled on one rank raises on every rank, naming the rank,
and the group stays usable. Unpickling runs code: only exchange objects within your own job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdist.arrays.pickled import Pickled, pack_object, pickled_detail, unpack_object
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.members import Members
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import UsageError
from hpcdist.transport.base import Work
from hpcdist.transport.call import Objects, Refusal
from hpcdist.transport.kinds import Kind


def all_gather_object(
    object_list: list[Any], obj: Any, group: Members | None = None, *, sync_op: bool = True
) -> Work:
    """Collect the `obj` of every rank in `object_list` on all ranks.

    Args:
        object_list: empty (it is filled) or with n entries (they are replaced).
        obj: this rank's contribution.
        group: the ranks that take part; None for all.
        sync_op: return when the objects are there.

    Example:
        >>> import hpcdist as dist
        >>> def collected():
        ...     everybody = []
        ...     dist.all_gather_object(everybody, {"rank": dist.get_rank()})
        ...     return everybody
        >>> dist.simulate(2, collected)[1]
        [{'rank': 0}, {'rank': 1}]

    """
    return dispatch(group, sync_op, describe_all_gather, object_list, obj)


def broadcast_object_list(
    object_list: list[Any], src: int, group: Members | None = None, *, sync_op: bool = True
) -> Work:
    """Replace the entries of `object_list`, equally long everywhere, by those of rank `src`.

    Args:
        object_list: its entries are sent by `src`, and replaced on the other ranks.
        src: the world rank whose objects all get.
        group: the ranks that take part; None for all.
        sync_op: return when the objects are there.

    Example:
        >>> import hpcdist as dist
        >>> def told():
        ...     settings = [{"lr": 0.1} if dist.get_rank() == 0 else None]
        ...     dist.broadcast_object_list(settings, src=0)
        ...     return settings[0]
        >>> dist.simulate(2, told)
        [{'lr': 0.1}, {'lr': 0.1}]

    """
    return dispatch(group, sync_op, _describe_broadcast, object_list, src)


def scatter_object_list(
    out_object_list: list[Any],
    in_object_list: list[Any] | None = None,
    src: int = 0,
    group: Members | None = None,
    *,
    sync_op: bool = True,
) -> Work:
    """Hand entry j of rank `src`'s list to rank j; the out list becomes exactly that one entry.

    Args:
        out_object_list: a list; its entries are replaced by the one object that comes.
        in_object_list: on `src`: one object per rank of the group. Ignored on the other ranks.
        src: the world rank that hands out.
        group: the ranks that take part; None for all.
        sync_op: return when the object is there.

    Example:
        >>> import hpcdist as dist
        >>> def handed_out():
        ...     mine = []
        ...     dist.scatter_object_list(mine, ["a", "b"] if dist.get_rank() == 0 else None, src=0)
        ...     return mine
        >>> dist.simulate(2, handed_out)
        [['a'], ['b']]

    """
    return dispatch(group, sync_op, _describe_scatter, out_object_list, in_object_list, src)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int = 0,
    group: Members | None = None,
    *,
    sync_op: bool = True,
) -> Work:
    """Collect the `obj` of every rank in rank `dst`'s list, empty (filled) or with n entries.

    Args:
        obj: this rank's contribution.
        object_gather_list: on `dst`: empty (it is filled) or with n entries (they are replaced).
            Ignored on the other ranks.
        dst: the world rank that collects.
        group: the ranks that take part; None for all.
        sync_op: return when the objects are there.

    Example:
        >>> import hpcdist as dist
        >>> def collected():
        ...     everybody = []
        ...     dist.gather_object(f"rank {dist.get_rank()}", everybody, dst=0)
        ...     return everybody
        >>> dist.simulate(2, collected)
        [['rank 0', 'rank 1'], []]

    """
    return dispatch(group, sync_op, _describe_gather, obj, object_gather_list, dst)


def all_to_all_object(
    out_object_list: list[Any],
    in_object_list: list[Any],
    group: Members | None = None,
    *,
    sync_op: bool = True,
) -> Work:
    """Send entry j of `in_object_list` to rank j; entry i of the out list comes from rank i.

    Args:
        out_object_list: empty (it is filled) or with n entries (they are replaced).
        in_object_list: one object per rank of the group.
        group: the ranks that take part; None for all.
        sync_op: return when the objects are there.

    Example:
        >>> import hpcdist as dist
        >>> def exchanged():
        ...     rank, received = dist.get_rank(), []
        ...     dist.all_to_all_object(received, [f"{rank} to {other}" for other in range(2)])
        ...     return received
        >>> dist.simulate(2, exchanged)
        [['0 to 0', '1 to 0'], ['0 to 1', '1 to 1']]

    """
    return dispatch(group, sync_op, _describe_all_to_all, out_object_list, in_object_list)


# ---- descriptions


def describe_all_gather(group: Members, object_list: Any, obj: Any) -> Objects | Refusal:
    """Describe `all_gather_object`."""
    kind = Kind.ALL_GATHER_OBJECT
    try:
        _check_room(group, object_list, "object_list")
        pickles = (_pack(obj, "obj"),)
    except UsageError as error:
        return cannot(kind, group, error)
    return Objects(kind, pickles, detail=pickled_detail(pickles), finish=_replace(object_list))


def _describe_broadcast(group: Members, object_list: Any, src: Any) -> Objects | Refusal:
    kind, root = Kind.BROADCAST_OBJECT_LIST, group.root_of(src, "src")
    try:
        if not isinstance(object_list, list) or not object_list:
            raise UsageError(f"object_list cannot be None or empty, got {object_list!r}")
        pickles = (_pack(list(object_list), "object_list"),) if root == group.rank else ()
    except UsageError as error:
        return cannot(kind, group, error, root)

    def finish(received: list[Pickled]) -> None:
        if root != group.rank:
            object_list[:] = unpack_object(received[0])

    shape, detail = (len(object_list),), pickled_detail(pickles)
    return Objects(kind, pickles, shape, root, detail, finish)


def _describe_scatter(group: Members, out_list: Any, in_list: Any, src: Any) -> Objects | Refusal:
    kind, root = Kind.SCATTER_OBJECT_LIST, group.root_of(src, "src")
    pickles: Sequence[Pickled] = ()
    try:
        if not isinstance(out_list, list):
            raise UsageError(f"out_object_list must be a list, got {out_list!r}")
        if root == group.rank:
            pickles = _pack_each(group, in_list, "in_object_list")
    except UsageError as error:
        return cannot(kind, group, error, root)
    return Objects(kind, pickles, (), root, pickled_detail(pickles), _replace(out_list))


def _describe_gather(group: Members, obj: Any, gather_list: Any, dst: Any) -> Objects | Refusal:
    kind, root = Kind.GATHER_OBJECT, group.root_of(dst, "dst")
    at_root = root == group.rank
    try:
        if at_root:
            _check_room(group, gather_list, "object_gather_list")
        pickles = (_pack(obj, "obj"),)
    except UsageError as error:
        return cannot(kind, group, error, root)
    finish = _replace(gather_list) if at_root else None
    return Objects(kind, pickles, (), root, pickled_detail(pickles), finish)


def _describe_all_to_all(group: Members, out_list: Any, in_list: Any) -> Objects | Refusal:
    kind = Kind.ALL_TO_ALL_OBJECT
    try:
        _check_room(group, out_list, "out_object_list")
        pickles = _pack_each(group, in_list, "in_object_list")
    except UsageError as error:
        return cannot(kind, group, error)
    return Objects(kind, pickles, detail=pickled_detail(pickles), finish=_replace(out_list))


def _replace(target: list[Any]) -> Any:
    def finish(pickles: list[Pickled]) -> None:
        target[:] = [unpack_object(pickled) for pickled in pickles]

    return finish


def _pack(obj: Any, what: str) -> Pickled:
    try:
        return pack_object(obj)
    except Exception as error:
        raise UsageError(
            f"{what} cannot be pickled ({type(error).__name__}: {error}); send plain data, or "
            "objects whose classes and functions are defined at the top of a module"
        ) from error


def _pack_each(group: Members, objects: Any, what: str) -> list[Pickled]:
    if not isinstance(objects, (list, tuple)) or len(objects) != group.nranks:
        got = len(objects) if isinstance(objects, (list, tuple)) else repr(objects)
        raise UsageError(
            f"{what} must be a list with one object per rank of group {group.name}: "
            f"{group.nranks}, got {got}"
        )
    return [_pack(obj, f"{what}[{rank}]") for rank, obj in enumerate(objects)]


def _check_room(group: Members, target: Any, what: str) -> None:
    if not isinstance(target, list) or len(target) not in (0, group.nranks):
        got = f"{len(target)} entries" if isinstance(target, list) else repr(target)
        raise UsageError(
            f"{what} must be an empty list or a list of {group.nranks} entries, got {got}"
        )
