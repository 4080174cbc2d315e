"""What the arguments of messages mean: a function from those of each public one to a `Call`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcdist.arrays.buffer import Buffer, as_buffer, as_output
from hpcdist.arrays.pickled import Pickled
from hpcdist.comm.alarms import is_alarm
from hpcdist.comm.describe_objects import Packed, check_objects
from hpcdist.comm.members import Members
from hpcdist.comm.pieces import pack_object, unpack_object
from hpcdist.errors import MismatchError, UsageError
from hpcdist.text import counted
from hpcdist.transport.call.call import ANY_SOURCE, Message, ObjectMessage
from hpcdist.transport.call.kinds import Kind


def describe_send(group: Members, tensor: Any, dst: Any, tag: Any) -> Message:
    """Describe `send`."""
    root = group.root_of(dst, "dst")
    _, data, dtype, shape, _ = _packed(as_buffer, tensor)
    tag = _check_tag(tag)
    return Message(Kind.SEND, data, dtype, shape, root, tag)


def describe_recv(group: Members, tensor: Any, src: Any, tag: Any) -> Message:
    """Describe `recv`."""
    root = ANY_SOURCE if src is None else group.root_of(src, "src")
    buffer = _packed(as_output, tensor)
    _, data, dtype, shape, _ = buffer
    return Message(Kind.RECV, data, dtype, shape, root, _check_tag(tag), buffer.finish)


def _packed(view: Callable[[Any], Buffer], tensor: Any) -> Buffer:
    try:
        return view(tensor)
    except MemoryError as error:  # of no concern to ranks that are no party to the message
        raise UsageError(
            f"there is no memory to pack an array that is not contiguous: {error}"
        ) from error


def describe_send_objects(
    group: Members, object_list: Any, dst: Any, tag: Any, packed: Packed = None
) -> ObjectMessage:
    """Describe `send_object_list`; the hot path has pickled the list before."""
    check_objects(object_list)
    root = group.root_of(0 if dst is None else dst, "dst")
    try:
        pickles = packed or (pack_object(list(object_list)),)
    except Exception as error:
        if is_alarm(error):
            raise
        raise UsageError(f"object_list cannot be pickled: {error}") from error
    return ObjectMessage(Kind.SEND_OBJECT_LIST, root, _check_tag(tag), pickles)


def describe_recv_objects(group: Members, object_list: Any, src: Any, tag: Any) -> ObjectMessage:
    """Describe `recv_object_list`."""
    check_objects(object_list)
    root = ANY_SOURCE if src is None else group.root_of(src, "src")

    def finish(pickles: list[Pickled]) -> None:
        replace_objects(group, object_list, unpack_object(pickles[0]))

    return ObjectMessage(Kind.RECV_OBJECT_LIST, root, _check_tag(tag), finish=finish)


def replace_objects(group: Members, object_list: list[Any], received: list[Any]) -> None:
    """Replace the entries of a list by those of one that was sent."""
    if len(received) != len(object_list):
        raise MismatchError(
            f"{len(received)} objects were sent to rank {group.world_rank}, whose object_list has "
            f"{counted(len(object_list), 'entry', 'entries')}; send and receive lists of the same "
            "length"
        )
    object_list[:] = received


def _check_tag(tag: Any) -> int:
    if not isinstance(tag, int) or isinstance(tag, bool) or tag < 0:
        raise UsageError(f"tag must be an integer of at least 0, got {tag!r}")
    return tag
