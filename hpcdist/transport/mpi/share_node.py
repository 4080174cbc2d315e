"""How the ranks of a node come to share memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.mpi import told_by_all
from hpcdist.runtime.survival import can_recover
from hpcdist.transport.mpi.site import Site
from hpcdist.transport.shm.attached import UNTRIED, Sample, copies_of, copying_takes, make_sample
from hpcdist.transport.shm.control import control_block_class
from hpcdist.transport.shm.heap import Heap
from hpcdist.transport.shm.kernel import address_of, compiled
from hpcdist.transport.shm.node import Mapped, SharedNode, node_bytes
from hpcdist.transport.shm.segment import Bytes, Segment, create_segment, is_dead, open_segment


class _Offer(NamedTuple):
    """What a rank has to share: its heap, the first's control block, and which kind it can use."""

    heap: Segment | None
    control: Segment | None
    kind: str
    why_not: str = ""
    sample: Sample | None = None


def open_node(
    comm: MPI.Intracomm,
    ranks: Sequence[int],
    site: Site,
    timeout_s: float,
    progress: Callable[[], Any],
    parent: SharedNode | None = None,
) -> SharedNode | None:
    """Map the memory of a group on one node; None, on all its ranks, if one cannot. Collective.

    Args:
        comm: the ranks of the group.
        ranks: world ranks, for messages.
        site: has this rank's arrays in shared memory, and says which control block is used.
        timeout_s: how long an operation waits for a rank that stopped in the middle of it.
        progress: called during long waits.
        parent: a group on the node that has all these ranks, if they share memory there already.

    """
    control_block_type = control_block_class(use_compiled=site.config.kernel == "auto")
    offer, memory = _offer(comm, site.heap, control_block_type)
    try:
        if parent is None:
            met = _meet(comm, site, offer, memory)
        else:
            met = _meet_again(comm, offer, memory, parent, ranks)
        takes = copying_takes(comm.size) if met.rights else UNTRIED
        can = np.array([not met.why_not, met.rights != 0, *takes])
        comm.Allreduce(MPI.IN_PLACE, can)
    finally:  # all have mapped it, or nobody will: a rank has died
        if offer.control is not None:
            os.close(offer.control.descriptor)
    everywhere, attaches = map(bool, can[:2] == comm.size)
    if not everywhere or met.memory is None:
        _warn(comm, met.why_not)
        return None
    site.heap.serve()
    _watch(site, dict(zip(ranks, met.pids, strict=True)))
    return SharedNode(
        met.memory,
        control_block_type,
        met.heaps,
        site.heap,
        met.pids,
        comm.rank,
        ranks,
        timeout_s,
        progress,
        site.deaths,
        rights=met.rights if attaches else 0,
        copies=copies_of(can[2:] / comm.size),
    )


class _Met(NamedTuple):
    """What a rank has of the others: the control block, their heaps and processes, as it sees them.

    Attributes:
        rights: of this process when it could read the memory of all others; 0: it cannot.
        why_not: why it cannot use what they offer, if so.
        kept: what others try to read, until all have.

    """

    memory: Bytes | None
    heaps: Sequence[Mapped]
    pids: Sequence[int]
    rights: int
    why_not: str
    kept: Any = None


def _meet(comm: MPI.Intracomm, site: Site, offer: _Offer, memory: Bytes | None) -> _Met:
    """Map what ranks offer that have not met yet. Collective."""
    compiles = compiled is not None and site.config.kernel == "auto"
    rights = compiled.rights() if compiles else 0
    sample, kept = make_sample() if compiles else (None, None)
    offers = told_by_all(comm, offer._replace(sample=sample))
    memory, heaps, why_not = _map_all(site.heap, offers, memory)
    reads = all(each.sample is not None and each.sample.is_read() for each in offers)
    pids = [each.heap.pid for each in offers if each.heap is not None]
    return _Met(memory, heaps, pids, rights if reads else 0, why_not, kept)


def _meet_again(
    comm: MPI.Intracomm,
    offer: _Offer,
    memory: Bytes | None,
    parent: SharedNode,
    ranks: Sequence[int],
) -> _Met:
    """Map the control block; of the heaps each rank knows where they are. Collective."""
    told = np.array(offer.control or Segment(0, 0, 0), np.int64)
    comm.Bcast(told)
    control, why_not = Segment(*map(int, told)), offer.why_not
    try:
        if memory is None and control.pid:
            memory = open_segment(control)
    except OSError as error:
        why_not = str(error)
    if memory is None:
        why_not = why_not or "the first rank has no memory for the group"
    places = [parent.ranks.index(rank) for rank in ranks]
    heaps = [parent.heaps[place] for place in places]
    return _Met(memory, heaps, [parent.pids[place] for place in places], parent.rights, why_not)


def _offer(comm: MPI.Intracomm, heap: Heap, control_block_type: Any) -> tuple[_Offer, Bytes | None]:
    if control_block_type is None:
        why = "without the compiled kernel it needs an x86 processor"
        return _Offer(None, None, "", why), None
    kind, memory, control = control_block_type.__name__, None, None
    try:
        own = heap.open()
        if comm.rank == 0:
            control, memory = create_segment(node_bytes(comm.size), "control")
    except (OSError, AttributeError) as error:
        return _Offer(None, None, kind, str(error)), None
    return _Offer(own, control, kind), memory


def _watch(site: Site, processes: dict[int, int]) -> None:
    """Find out from the system, too, who has died, where a job goes on. Local."""
    if can_recover() and not processes.items() <= site.communicators.neighbours.items():
        site.communicators.neighbours.update(processes)
        site.deaths.ask_too(lambda: [rank for rank, pid in processes.items() if is_dead(pid)])


def _map_all(
    heap: Heap, offers: Sequence[_Offer], memory: Bytes | None
) -> tuple[Bytes | None, list[Mapped], str]:
    """Return the control block, the heaps, and why they cannot be used ("" where they can)."""
    failure = next((each.why_not for each in offers if each.why_not), "")
    if len({each.kind for each in offers}) > 1:
        failure = "the ranks have different installations of hpcdist"
    control = offers[0].control
    if failure or control is None:
        return memory, [], failure
    try:
        memory = open_segment(control) if memory is None else memory
        return memory, [_map(heap, each.heap) for each in offers if each.heap is not None], ""
    except OSError as error:
        return memory, [], str(error)


def _map(heap: Heap, segment: Segment) -> Mapped:
    memory = heap.peer(segment)
    return Mapped(memory, address_of(memory))


def _warn(comm: MPI.Intracomm, why: str) -> None:
    """Warn once per place in the program that a node's memory is not used, and why."""
    reasons = [each for each in told_by_all(comm, why) if each]
    if comm.rank == 0:
        warnings.warn(
            f"the ranks of this node cannot share memory ({reasons[0] if reasons else why}); "
            "collectives go through MPI, correct but slower",
            RuntimeWarning,
            stacklevel=2,
        )
