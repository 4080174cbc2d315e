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
from hpcdist.named_tuple import NamedTuple


class Peer(NamedTuple):
    """The file of a library, and whether its arrays are in GPU memory, or in host memory."""

    module: str
    on_device: bool = False


PEERS = {
    "mpi4py": Peer("hpcdist.bench.libraries.mpi4py"),
    "torch": Peer("hpcdist.bench.libraries.torch"),
    "paddle": Peer("hpcdist.bench.libraries.paddle"),
    "nccl": Peer("hpcdist.bench.libraries.nccl", on_device=True),
}
_ELSEWHERE = {
    False: "it is measured on arrays in host memory only",
    True: "its arrays are in GPU memory: add --device cuda",
}


def start_peer(name: str, comm: Any, whole: bool, *, on_device: bool = False) -> Library:
    """Start the library `name` on the ranks of `comm`, an mpi4py communicator. Collective.

    Args:
        name: a key of `PEERS`.
        comm: the ranks.
        whole: whether these are all ranks of the job.
        on_device: whether the arrays will be in the memory of a device.

    Raises:
        Unavailable: it cannot take part, on any of the ranks; the message says why.

    """
    peer = PEERS[name]
    if peer.on_device != on_device:
        raise Unavailable(_ELSEWHERE[peer.on_device])
    library: Library = importlib.import_module(peer.module).start(comm, whole)
    return library


def start_peers(
    names: Sequence[str], comm: Any, whole: bool, *, on_device: bool = False
) -> tuple[list[Library], dict[str, str]]:
    """Start the libraries that can take part; say why of the others. Collective."""
    started: list[Library] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            started.append(start_peer(name, comm, whole, on_device=on_device))
        except Unavailable as reason:
            missing[name] = str(reason)
    return started, missing
