"""`verb_of`: what does an operation over MPI."""

from __future__ import annotations

from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.mpi.collectives import VERBS, Verb


def verb_of(kind: Kind) -> Verb:
    """Return what does an operation; what does objects and exchanges is imported when asked for."""
    if kind in VERBS:
        return VERBS[kind]
    from hpcdist.transport.mpi.objects import OBJECT_VERBS

    return OBJECT_VERBS[kind]
