"""The libraries hpcdist is measured beside, each in its own file: `start_peer` begins one.

Each file has `start(comm, world) -> Library`, collective, which raises `Unavailable` with the
reason where the library cannot take part.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from hpcdist.bench.task import Library
from hpcdist.bench.unavailable import Unavailable

PEERS = {
    "mpi4py": "hpcdist.bench.peers.mpi4py",
    "torch": "hpcdist.bench.peers.torch",
    "paddle": "hpcdist.bench.peers.paddle",
}


def start_peer(name: str, comm: Any, whole: bool) -> Library:
    """Start the library `name` on the ranks of `comm`, an mpi4py communicator. Collective.

    Args:
        name: a key of `PEERS`.
        comm: the ranks.
        whole: whether these are all ranks of the job.

    Raises:
        Unavailable: it cannot take part, on any of the ranks; the message says why.

    """
    library: Library = importlib.import_module(PEERS[name]).start(comm, whole)
    return library


def start_peers(
    names: Sequence[str], comm: Any, whole: bool
) -> tuple[list[Library], dict[str, str]]:
    """Start the libraries that can take part; say why of the others. Collective."""
    started: list[Library] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            started.append(start_peer(name, comm, whole))
        except Unavailable as reason:
            missing[name] = str(reason)
    return started, missing
