"""From a user's objects to a `Call`: one function per object collective.

What this rank sends is pickled here. The hot path has done that before, and gives what it got as
`packed`. Wrong arguments become the call's `error`, as in `describe`. An alarm while this rank
pickles is raised at once, when the other ranks have been told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcdist.arrays.pickled import Pickled, pickled_detail
from hpcdist.comm.alarms import raise_alarm
from hpcdist.comm.members import Members
from hpcdist.comm.pieces import pack_object, unpack_object
from hpcdist.comm.tensor_lists import cannot
from hpcdist.errors import UsageError
from hpcdist.text import counted
from hpcdist.transport.call.call import Objects, Refusal
from hpcdist.transport.call.kinds import Kind

Packed = Sequence[Pickled] | None
"""One pickle for each object that this rank sends."""

Describe = Callable[..., Objects | Refusal]


def all_gather_object(
    group: Members, object_list: Any, obj: Any, packed: Packed = None
) -> Objects | Refusal:
    kind = Kind.ALL_GATHER_OBJECT
    try:
        _check_room(group, object_list, "object_list")
        pickles = packed or (_pack(obj, "obj"),)
    except UsageError as error:
        return _refuse(kind, group, error)
    return Objects(kind, pickles, detail=pickled_detail(pickles), finish=_replace(object_list))


def check_objects(object_list: Any) -> None:
    """Raise UsageError where this is no list of objects, or has none."""
    if object_list is not None and not isinstance(object_list, list):
        raise UsageError(
            f"object_list must be a list, got {type(object_list).__name__} {object_list!r}; put "
            "the object into one, as [obj]"
        )
    if not object_list:
        raise UsageError(
            f"object_list cannot be None or empty, got {object_list!r}; give a list of objects, "
            "and where they are received one as long as that of src, such as [None]"
        )


def broadcast_object_list(
    group: Members, object_list: Any, src: Any, packed: Packed = None
) -> Objects | Refusal:
    kind, root = Kind.BROADCAST_OBJECT_LIST, group.root_of(src, "src")
    try:
        check_objects(object_list)
        pickles = packed or ()
        if root == group.rank and not pickles:
            pickles = (_pack(list(object_list), "object_list"),)
    except UsageError as error:
        return _refuse(kind, group, error, root)

    def finish(received: list[Pickled]) -> None:
        if root != group.rank:
            object_list[:] = unpack_object(received[0])

    shape, detail = (len(object_list),), pickled_detail(pickles)
    return Objects(kind, pickles, shape, root, detail, finish)


def scatter_object_list(
    group: Members, out_list: Any, in_list: Any, src: Any, packed: Packed = None
) -> Objects | Refusal:
    kind, root = Kind.SCATTER_OBJECT_LIST, group.root_of(src, "src")
    pickles: Sequence[Pickled] = ()
    try:
        if not isinstance(out_list, list):
            raise UsageError(f"out_object_list must be a list, got {out_list!r}")
        if root == group.rank:
            pickles = packed or _pack_each(group, in_list, "in_object_list")
    except UsageError as error:
        return _refuse(kind, group, error, root)
    return Objects(kind, pickles, (), root, pickled_detail(pickles), _replace(out_list))


def gather_object(
    group: Members, obj: Any, gather_list: Any, dst: Any, packed: Packed = None
) -> Objects | Refusal:
    kind, root = Kind.GATHER_OBJECT, group.root_of(dst, "dst")
    at_root = root == group.rank
    try:
        if at_root:
            _check_room(group, gather_list, "object_gather_list")
        pickles = packed or (_pack(obj, "obj"),)
    except UsageError as error:
        return _refuse(kind, group, error, root)
    finish = _replace(gather_list) if at_root else None
    return Objects(kind, pickles, (), root, pickled_detail(pickles), finish)


def all_to_all_object(
    group: Members, out_list: Any, in_list: Any, packed: Packed = None
) -> Objects | Refusal:
    kind = Kind.ALL_TO_ALL_OBJECT
    try:
        _check_room(group, out_list, "out_object_list")
        pickles = packed or _pack_each(group, in_list, "in_object_list")
    except UsageError as error:
        return _refuse(kind, group, error)
    return Objects(kind, pickles, detail=pickled_detail(pickles), finish=_replace(out_list))


def part_of(words: str, describe: Describe) -> Describe:
    """Return the description of a part of `words`, which agrees with no other operation."""

    def describe_part(*args: Any) -> Objects | Refusal:
        call = describe(*args)
        return call if isinstance(call, Refusal) else call._replace(words=words)

    return describe_part


def _refuse(kind: Kind, group: Members, error: UsageError, root: int = 0) -> Refusal:
    raise_alarm(group, kind, error)
    return cannot(kind, group, error, root)


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
            f"{what} must be a list of {group.nranks} objects, one per rank of the group, got {got}"
        )
    return [_pack(obj, f"{what}[{rank}]") for rank, obj in enumerate(objects)]


def _check_room(group: Members, target: Any, what: str) -> None:
    if not isinstance(target, list) or len(target) not in (0, group.nranks):
        got = counted(len(target), "entry", "entries") if isinstance(target, list) else repr(target)
        raise UsageError(
            f"{what} must be an empty list or a list of {group.nranks} entries, got {got}"
        )
