"""Which transports there are, by name: the built-in ones, and those that other packages bring.

A package offers a transport by an entry point of the group ``hpcdist.transports``. Its name is what
users give as `backend`, and what the transport calls itself; its object is a function (or a class
method, ``module:Class.start_world``) from a `WorldRequest` to a `StartedWorld`. The built-in ones
are rows of the same kind. Nothing is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hpcdist.errors import TransportError, UsageError
from hpcdist.lazy import load
from hpcdist.transport.base import StartedWorld, WorldRequest

StartWorld = Callable[[WorldRequest], StartedWorld]

GROUP = "hpcdist.transports"

_BUILT_IN = {
    "mpi": "hpcdist.transport.mpi.world:start_world",
    "local": "hpcdist.transport.threads.transport:ThreadTransport.start_world",
}

_ANY = {None: "mpi", "auto": "mpi", "gloo": "mpi"}
"""What asks for no transport in particular, and what it gets in a new world."""

_ON_DEVICES = "; arrays on GPUs need no backend of their own: 'mpi' sends them by NCCL where it can"
_HINTS = dict.fromkeys(("nccl", "rccl", "ccl", "xccl", "bkcl", "flagcx"), _ON_DEVICES)


def installed_transports() -> dict[str, str]:
    """Return the transports of other packages, which cannot replace the built-in ones."""
    from importlib.metadata import entry_points  # 20 ms, for those who ask for another one

    found = {each.name.lower(): each.value for each in entry_points(group=GROUP)}
    return {name: found[name] for name in sorted(found) if name not in _BUILT_IN}


def transport_name(backend: Any) -> str:
    """Return the name of the transport that `backend` means for a new world.

    Raises:
        UsageError: there is none of this name; the message tells which there are.

    """
    name = backend.lower() if isinstance(backend, str) else backend
    if name is None or isinstance(name, str):
        name = _ANY.get(name, name)
        if name in _BUILT_IN or name in installed_transports():
            return str(name)
    others = "".join(f", {each!r}" for each in installed_transports())
    hint = _HINTS.get(name, "") if isinstance(name, str) else ""
    raise UsageError(
        f"backend={backend!r} is not available in this installation; use 'auto' or 'mpi' ('gloo' "
        f"is accepted and means the same), 'local' for one process alone{others}{hint}. Other "
        f"packages bring transports as entry points of the group {GROUP!r}"
    )


def check_backend_of_group(backend: Any, world: str) -> None:
    """Raise `UsageError` unless `backend` means the transport named `world`, that of all groups.

    Names that ask for no transport in particular fit every world, and "mpi" fits a world of
    threads, so that what is written for MPI runs there too.
    """
    wanted, world = transport_name(backend), world.lower()
    particular = backend is not None and backend.lower() not in _ANY
    if particular and wanted != world and (wanted, world) != ("mpi", "local"):
        raise UsageError(
            f"backend={backend!r} differs from the transport of the world, {world!r}, which all "
            f"groups have; leave it out, or give it to init_parallel_env"
        )


def load_start(name: str) -> StartWorld:
    """Import what starts a world with the transport of this name.

    Raises:
        TransportError: it cannot be imported, or is no function.

    """
    where = _BUILT_IN.get(name) or installed_transports()[name]
    remedy = "; mend or uninstall the package that brings it"
    try:
        start = load(where)
    except Exception as error:
        raise TransportError(
            f"the transport {name!r} ({where}) cannot be imported: "
            f"{type(error).__name__}: {error}{remedy}"
        ) from error
    if not callable(start):
        raise TransportError(
            f"the transport {name!r} ({where}) must be a function from a WorldRequest to a "
            f"StartedWorld, got {start!r}{remedy}"
        )
    return cast(StartWorld, start)
