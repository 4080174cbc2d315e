"""`SharedNode`: the shared memory of one group whose ranks all run on one node.

An operation has three parts: every rank offers its contribution together with the agreement,
takes what it needs from where the others' lie (the verbs of `shm.collectives`), and, if
others read its own array, waits until they are done.

Where a contribution lies decides how far it is copied:

- up to `PAYLOAD` bytes: in the control block itself, written along with the agreement;
- an array made by `hpcdist.empty`: where it is, nothing is copied;
- others of medium size: copied to the staging memory of the control block, if the operation gains;
- ordinary arrays that are moved: where they are, the kernel copies them (`attached`);
- ordinary arrays to be reduced: where they are, too, or through the staging memory part by part
  (`native/pipe.c`).

Everything else is left to MPI. What `tuning` says holds for all ranks alike, because it is asked
about what they have agreed on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.compiled import expect
from hpcdist.errors import (
    CollectiveTimeout,
    HpcdistError,
    RankFailure,
    RemoteError,
    TransportError,
)
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.call.call import Call, Objects, label
from hpcdist.transport.flight.call_site import call_site
from hpcdist.transport.presence.deaths import Deaths
from hpcdist.transport.shm.attached import Attached, attach
from hpcdist.transport.shm.control import (
    OF_A_DEATH,
    PAYLOAD,
    SPINS,
    control_block_bytes,
    payload_places,
)
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.shm.kernel import MOST, address_of, compiled, copy_bytes
from hpcdist.transport.shm.mail import mail_bytes
from hpcdist.transport.shm.segment import Bytes, Segment, is_dead
from hpcdist.transport.tuning import STAGED_UP_TO, Copies
from hpcdist.transport.waiting.activity import Wait
from hpcdist.transport.waiting.polling import poll, to_the_end

PIPELINE_PART = 256 << 10
"""Bytes of an ordinary array that are in the staging memory at a time, twice. Twice as many took up
to 1.5 times as long from 1 MiB on, where the staging memory no longer stays in a core's cache."""

_PATIENCE = 4000
NOTHING = -1
"""Published instead of an address by a rank that contributes nothing."""

IN_STAGE = 1 << 62
"""Published instead of an address by a rank whose contribution is in its staging memory."""

_IN_LIST = IN_STAGE + 1
"""Published instead of an address by a rank whose payload says where each rank's part lies."""

IN_PAYLOAD = IN_STAGE + 2
"""Published instead of an address by a rank whose payload is the contribution."""

_ATTACHED_LIST = IN_STAGE + 3
"""The same where the payload has addresses of ordinary arrays."""

_ATTACHED = -2
"""An address of ordinary memory is published as this less the address."""

expect(
    compiled,
    NOTHING=NOTHING,
    IN_STAGE=IN_STAGE,
    IN_LIST=_IN_LIST,
    ATTACHED_LIST=_ATTACHED_LIST,
    ATTACHED=_ATTACHED,
)


def is_attached(address: int) -> bool:
    """Return whether what a rank has published says where ordinary memory lies."""
    return address < NOTHING or address == _ATTACHED_LIST


def lies_in_place(address: int) -> bool:
    """Return whether a rank has published an array of the caller; others are copies of it."""
    return address not in (NOTHING, IN_STAGE, IN_PAYLOAD)


_OFFSET = np.dtype(np.int64)
_BYTE = np.dtype(np.uint8)
_DEAD_AFTER_S = 0.2
_LEAVE_S = 10.0
"""How long a rank that leaves an operation waits for others that are in the middle of it."""

_PAGE = 4096


class Place(NamedTuple):
    """Where a contribution lies: a mapped segment, its address here, and the offset in it."""

    memory: Bytes
    base: int
    offset: int

    def view(self, nbytes: int, dtype: np.dtype) -> NumpyArray:
        """Return the contribution as a flat array of `dtype`."""
        return self.memory[self.offset : self.offset + nbytes].view(dtype)

    @property
    def address(self) -> int:
        """Where it lies in this process."""
        return self.base + self.offset

    def at(self, offset: int) -> Place:
        """Return the place `offset` bytes further on."""
        return self._replace(offset=self.offset + offset)

    def read(self, out: NumpyArray) -> None:
        """Copy what is here into `out`, a contiguous array, which may be what is here."""
        if compiled is None:
            copy_bytes(out.reshape(-1).view(_BYTE), self.view(out.nbytes, _BYTE))
        elif self.address != address_of(out):
            compiled.fetch(out, self.address)

    def write(self, data: NumpyArray) -> None:
        """Copy `data`, a contiguous array, to here."""
        copy_bytes(self.view(data.nbytes, _BYTE), data.reshape(-1).view(_BYTE))


class Mapped(NamedTuple):
    """A mapped segment: its bytes, and where they begin."""

    memory: Bytes
    base: int


@final
class SharedNode:
    """Made by `mpi.share_node.open_node`. `progress` is called during long waits.

    `deaths` are those of the process.
    """

    def __init__(
        self,
        control_memory: Bytes,
        control_block_type: Any,
        heaps: Sequence[Mapped],
        heap: Heap,
        pids: Sequence[int],
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        progress: Callable[[], Any],
        deaths: Deaths,
        *,
        rights: int = 0,
        copies: Copies = "any",
    ) -> None:
        self.copies = copies
        """How the kernel copies; see `TuningRule`."""
        self.rights = rights
        """Those of this process when the ranks could read each other's memory; 0: they cannot."""
        self.attaches = rights != 0
        self.rank, self.size, self.ranks = rank, len(pids), ranks
        self.heap = heap
        self.timeout_s = timeout_s
        self.failed = False
        self._kept: list[Call] = []
        self.control = control_block_type(control_memory, rank, self.size, PAYLOAD)
        self.can_pipeline = hasattr(self.control, "begin") and self.size <= MOST
        self._progress = progress
        self.pids = pids
        self._deaths = deaths
        self.heaps = heaps
        """The heap of each rank, as this process sees it."""
        self._own = Mapped(control_memory, address_of(control_memory))
        self._stages = _stage_places(self.size)
        self.bases = tuple(each.base for each in heaps)
        """Where this process sees the heap of each rank."""
        self.pipe_stages = tuple(self._own.base + place for place in self._stages)
        self.copy_stages = tuple(
            self._own.base + self._stage_offset(rank, 0) for rank in range(self.size)
        )
        self.payloads = tuple(
            tuple(Place(*self._own, offset) for offset in turn)
            for turn in payload_places(self.size)
        )
        self.payload_addresses = tuple(
            tuple(place.address for place in turn) for turn in self.payloads
        )

    # ---- offering

    def stage(self, data: NumpyArray) -> int:
        """Copy a contribution to this rank's staging memory for the next operation."""
        room = self.staged(self.rank, 1 - self.control.turn, data.nbytes)
        copy_bytes(room, data.reshape(-1).view(np.uint8))
        return IN_STAGE

    def staged(self, rank: int, turn: int, nbytes: int) -> Bytes:
        """Return the staging memory of a rank, for turn 0 or 1; at most `STAGED_UP_TO` bytes."""
        offset = self._stage_offset(rank, turn)
        return self._own.memory[offset : offset + nbytes]

    @property
    def pipe_memory(self) -> Bytes:
        """The staging memory of this rank for reductions in parts."""
        first = self._stages[self.rank]
        return self._own.memory[first : first + pipeline_bytes(self.size)]

    @property
    def memory(self) -> Bytes:
        """The segment of the group: the control block and everyone's staging memory."""
        return self._own.memory

    @property
    def mail_memory(self) -> Bytes:
        """The part of the segment that has the boxes of `mail`; empty where they are not used."""
        nbytes = mail_bytes(self.size) if self.can_pipeline else 0
        return self._own.memory[self._own.memory.nbytes - nbytes :]

    def heap_of(self, rank: int) -> Bytes:
        """Return the heap of a rank, as this process sees it."""
        return self.heaps[rank].memory

    def shared_address(self, data: NumpyArray) -> int:
        """Return what to publish for an array in the heap; 0 for any other."""
        offset = self.heap.offset_of(data)
        return 0 if offset is None else offset + 1

    def shared_list(self, runs: Sequence[NumpyArray]) -> tuple[int, NumpyArray | None]:
        """Return what to publish for one array per rank, and the payload; 0 for none."""
        return _as_list(_IN_LIST, [self.heap.offset_of(run) for run in runs], None)

    def may_attach(self) -> bool:
        """Return whether this process may still do what it might when the ranks have tried.

        See [Note: rights] in `native/attach.c`.
        """
        return self.attaches and self.rights == compiled.rights()

    def attached_address(self, data: NumpyArray) -> int:
        """Return what to publish for an ordinary array; 0 where the kernel cannot read it."""
        address = attach(data)
        return _ATTACHED - address if address else 0

    def attached_list(self, runs: Sequence[NumpyArray]) -> tuple[int, NumpyArray | None]:
        """Return what to publish for one array per rank, and the payload; 0 for none."""
        return _as_list(_ATTACHED_LIST, [attach(run) for run in runs], 0)

    def places(self, addresses: Sequence[int], part: int = 0) -> list[Any]:
        """Return where contributions lie that were published; those to be cut, from `part` on.

        Each a `Place`, where it is ordinary memory an `Attached`, or None: it contributes nothing.
        """
        return [self._place(rank, address, part) for rank, address in enumerate(addresses)]

    def _place(self, rank: int, address: int, part: int) -> Place | Attached | None:
        if address == NOTHING:
            return None
        if address < NOTHING:
            return Attached(self.pids[rank], _ATTACHED - address + part)
        if address == _ATTACHED_LIST:
            return Attached(self.pids[rank], self._listed(rank))
        if address == IN_STAGE:
            return Place(*self._own, self._stage_offset(rank, self.control.turn) + part)
        if address == _IN_LIST:
            return Place(*self.heaps[rank], self._listed(rank))
        if address == IN_PAYLOAD:
            return self.payloads[int(self.control.turn)][rank]
        return Place(*self.heaps[rank], address - 1 + part)

    def _listed(self, rank: int) -> int:
        """Return what a rank's payload says about this rank's part."""
        payload = self.payloads[self.control.turn][rank]
        return int(payload.view(self.size * _OFFSET.itemsize, _OFFSET)[self.rank])

    def _stage_offset(self, rank: int, turn: int) -> int:
        return self._stages[rank] + pipeline_bytes(self.size) + turn * STAGED_UP_TO

    # ---- waiting

    def finish(self, call: Call, *, wait: bool) -> None:
        """Announce that this rank has taken what it needs; `wait` until all others have, too."""
        if wait:
            self.step(call)
        else:
            self.control.arrive(0)
        self.end()

    def step(self, call: Call, noted: list[bool] | None = None) -> None:
        """Wait until all ranks have come here.

        Args:
            call: the operation.
            noted: where that this rank has come is noted, in the same moment; there, it has.

        """
        noted = [] if noted is None else noted
        noted.extend(() if noted else map(self.control.arrive, (SPINS,)))
        if not noted[0]:
            self.await_others(self.control.arrived, call)
        else:
            self._check_whole(call)

    def end(self) -> None:
        """Note that nobody uses what this rank has lent to the operation at hand any more."""
        self.control.ended = self.control.sequence

    def pickle_segment(self, rank: int) -> Segment | None:
        """Return the segment whose descriptor a rank published for this operation, if it did."""
        descriptor = self.control.addresses()[rank] - 1
        return None if descriptor < 0 else Segment(self.pids[rank], descriptor, 0)

    def run_pipe(self, call: Call) -> None:
        """Drive the reduction that `control.begin` prepared to its end."""
        go_on, ended = self.control.go_on, []  # type: Any, list[bool]

        def done() -> bool:  # noted in the same moment: after an interrupt it is asked again
            ended.extend(() if ended else filter(None, map(go_on, (_PATIENCE,))))
            return any(ended)

        if not go_on(_PATIENCE):
            self.await_others(done, call)
        else:
            self._check_whole(call)
        self.end()

    def await_others(self, done: Callable[[], bool], call: Call) -> None:
        """Poll `done` until it holds; a rank that is missing becomes an error.

        All ranks are in this operation, so what a signal handler raises is held until it has ended.
        """
        to_the_end(lambda: self._await_others(done, call), of_operation=True)

    def _await_others(self, done: Callable[[], bool], call: Call) -> None:
        def look() -> bool:
            self._progress()
            return done()

        wait = Wait(lambda: label(call, self.ranks))
        if poll(look, self.timeout_s, lambda _: self.check_alive(call), _DEAD_AFTER_S, wait):
            return self._check_whole(call)
        self.give_up(call)
        missing = tuple(self.ranks[rank] for rank in self.control.behind())
        raise CollectiveTimeout(
            f"{label(call, self.ranks)} stopped on its way: missing ranks "
            f"{', '.join(map(str, missing))} did not proceed within {self.timeout_s:g} s. Called "
            f"at {call_site()}. Arrays of this operation are in an unknown state: end the job",
            missing,
        )

    # ---- leaving

    def enter(self, call: Call) -> None:
        """Begin what follows the agreement, unless a rank has called it off; then all raise."""
        by = self.control.enter()
        if by >= 0:
            self.end()
            raise self.called_off(call, by)

    def leave(self, call: Call, error: BaseException, before: int = -1) -> bool:
        """Take back what this rank has lent to an operation that it leaves by `error`.

        An operation that not all ranks have come to is called off. In one that they are in, it
        waits for those that use its memory at this moment.

        Args:
            call: the operation.
            error: what is being raised.
            before: how many operations there were before it.

        Returns:
            Whether this rank's part is still posted, so that the exchange has to be completed.

        """
        control = self.control
        if control.sequence in (before, control.ended):
            return False
        of_a_death = isinstance(error, RankFailure)
        is_void = isinstance(error, (CollectiveTimeout, RemoteError)) and not of_a_death
        if is_void and control.test() is None:
            return True  # whoever comes later finds it void, or nobody comes
        if control.call_off(of_a_death):
            return True
        control.break_off()
        if not self._is_left(2 if isinstance(call, Objects) else 1):
            self.give_up(call)
        self.end()
        return False

    def _is_left(self, steps: int) -> bool:
        """Wait until all ranks that live have taken so many steps in this operation, or left it."""

        def is_left() -> bool:
            return not any(
                rank != self.rank and not is_dead(self.pids[rank]) for rank in inside(steps)
            )

        inside = self.control.inside
        try:
            return to_the_end(lambda: poll(is_left, _LEAVE_S))
        except BaseException:  # this rank is on its way out already
            return is_left()

    def _check_whole(self, call: Call) -> None:
        """Raise where a rank has left this operation on its way."""
        by = self.control.broken_by()
        if by >= 0 and self.control.sequence > 0:
            raise self.broken(call, by)

    def broken(self, call: Call, by: int) -> HpcdistError:
        """Return the error of an operation that a rank has left on its way."""
        if self._deaths.known():
            return self._deaths.failure(label(call, self.ranks))
        return RemoteError(
            f"rank {self.ranks[by]} has left {label(call, self.ranks)} on its way, by an "
            f"interrupt or an error; called at {call_site()}. The arrays of this operation are in "
            "an unknown state; the group goes on with the next one",
            self.ranks[by],
            in_step=True,
        )

    def called_off(self, call: Call, by: int) -> HpcdistError:
        """Return the error of an operation that a rank has called off."""
        of_a_death, rank = divmod(by, OF_A_DEATH)
        if of_a_death or self._deaths.known():
            return self._deaths.failure(label(call, self.ranks))
        return RemoteError(
            f"{label(call, self.ranks)} was called off on all ranks, because rank "
            f"{self.ranks[rank]} has left it by an interrupt or an error before all had come; "
            f"called at {call_site()}. Nothing was sent; the group goes on with the next operation",
            self.ranks[rank],
            in_step=True,
        )

    def give_up(self, call: Call) -> None:
        """Never use this memory again: others may be in the middle of an operation.

        They may still write to its arrays, which are therefore kept.
        """
        self.failed = True
        self._kept.append(call)
        self.heap.retire()

    def check_alive(self, call: Call, behind: Sequence[int] | None = None) -> None:
        """Raise if the process of a rank that is waited for has died.

        Args:
            call: what is under way.
            behind: who is waited for; None for those that the control block says.

        """
        waited_for = self.control.behind() if behind is None else behind
        dead = [
            self.ranks[rank]
            for rank in waited_for
            if rank != self.rank and is_dead(self.pids[rank])
        ]
        if dead:
            self.give_up(call)
            self._deaths.note(dead)
            raise self._deaths.failure(label(call, self.ranks))

    def check_usable(self) -> None:
        """Raise if an earlier operation stopped on its way."""
        if self.failed and self._deaths.known():
            raise self._deaths.failure("an earlier operation of this group")
        if self.failed:
            raise TransportError(
                "an earlier operation of this group stopped on its way (see the first error); "
                "its ranks are no longer in step: end the job"
            )


def _as_list(word: int, places: list[Any], nowhere: Any) -> tuple[int, NumpyArray | None]:
    fits = nowhere not in places and len(places) * _OFFSET.itemsize <= PAYLOAD
    return (word, np.array(places, _OFFSET)) if fits else (0, None)


def pipeline_bytes(size: int) -> int:
    """Return the staging memory of one rank for reductions in parts; see `native/pipe.c`."""
    return 2 * (size + 1) * slice_bytes(size)


def slice_bytes(size: int) -> int:
    """Return the bytes of one rank's share of a part."""
    return max(_PAGE, PIPELINE_PART // size // _PAGE * _PAGE)


def _stage_places(size: int) -> tuple[int, ...]:
    first = -(-control_block_bytes(size) // _PAGE) * _PAGE
    each = pipeline_bytes(size) + 2 * STAGED_UP_TO
    return tuple(first + rank * each for rank in range(size))


def node_bytes(size: int) -> int:
    """Return the bytes of the segment of a group: control block, staging memory and mailboxes."""
    return _stage_places(size)[-1] + pipeline_bytes(size) + 2 * STAGED_UP_TO + mail_bytes(size)
