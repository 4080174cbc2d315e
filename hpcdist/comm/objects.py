"""Collectives on Python objects: whatever pickles, of any size.

Large arrays inside objects travel beside the pickle without being copied into it, and arrive
writable. An object that cannot be pickled on one rank raises on every rank, naming the rank,
and the group stays usable. Unpickling runs code: only exchange objects within your own job.
"""

from __future__ import annotations

from typing import Any

from hpcdist.comm import describe_objects
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.hot import in_one_call
from hpcdist.comm.members import Members
from hpcdist.transport.waiting.work import Work


@in_one_call
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
    return dispatch(group, sync_op, describe_objects.all_gather_object, object_list, obj)


@in_one_call
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
    return dispatch(group, sync_op, describe_objects.broadcast_object_list, object_list, src)


@in_one_call
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
    return dispatch(
        group, sync_op, describe_objects.scatter_object_list, out_object_list, in_object_list, src
    )


@in_one_call
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
    return dispatch(group, sync_op, describe_objects.gather_object, obj, object_gather_list, dst)


@in_one_call
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
    return dispatch(
        group, sync_op, describe_objects.all_to_all_object, out_object_list, in_object_list
    )


def tell_all(words: str, obj: Any, group: Members) -> list[Any]:
    """Return the `obj` of every rank, on all ranks. Collective.

    It is `all_gather_object` for what is a part of something else: a rank that calls that itself
    gets a `MismatchError`, and not what is told here.

    Args:
        words: what the ranks do, the same on all of them.
        obj: what this rank tells.
        group: the ranks that take part.

    """
    told: list[Any] = []
    describe = describe_objects.part_of(words, describe_objects.all_gather_object)
    dispatch(group, True, describe, told, obj)
    return told
