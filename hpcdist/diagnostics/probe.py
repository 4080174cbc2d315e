"""`Job`: what hpcdist finds on the ranks it runs on. `look` asks; the rest is plain data."""

from __future__ import annotations

import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from hpcdist.comm.group import Group
from hpcdist.comm.groups import destroy_process_group, new_group
from hpcdist.config import Config
from hpcdist.diagnostics.installation import (
    NOT_INSTALLED,
    Library,
    mpi_library,
    nccl_version,
    settings_of,
    versions,
)
from hpcdist.diagnostics.machine import Machine, look_around, system
from hpcdist.diagnostics.network import Network, measure
from hpcdist.diagnostics.numerics import numerics
from hpcdist.diagnostics.sockets import Sockets, try_sockets
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.cuda_awareness import Awareness, cuda_awareness
from hpcdist.runtime.place import expected_size, read_place
from hpcdist.runtime.process import snapshot
from hpcdist.text import in_short
from hpcdist.transport.tuning import DEFAULT, TuningRule, TuningTable, read_rules

_OWN_TO_EACH = ("HPCDIST_DEVICE",)
"""Settings that may differ between ranks."""


class Load(NamedTuple):
    """How many ranks a node has, and the cores they may use together."""

    host: str
    ranks: int
    cores: int


class Rank(NamedTuple):
    """The report of one rank; `alike` should be the same on all, and `numerics` for equal bits."""

    machine: Machine
    alike: Mapping[str, str]
    numerics: Mapping[str, str]
    why_not_shared: str = ""
    sockets: Sockets = Sockets()


class Difference(NamedTuple):
    """Something that should be the same on all ranks: which ranks have which value."""

    name: str
    values: Mapping[str, str]


class Memory(NamedTuple):
    """Memory shared inside a node.

    Attributes:
        shared: whether the ranks of each node share it; None for one rank.
        why_not: the reason, where they do not.
        pipe: whether ordinary arrays are reduced in it part by part.
        limit: bytes that the shared arrays of a rank may take.
        used: bytes they take now, on this rank.

    """

    shared: bool | None
    why_not: str = ""
    pipe: bool = False
    limit: int = 0
    used: int = 0


class Tuning(NamedTuple):
    """The tuning file in force: its path, its rules, and how many of them are for this job."""

    path: str | None = None
    rules: tuple[TuningRule, ...] = ()
    fitting: int = 0


class Launch(NamedTuple):
    """Who started the ranks, how many it meant to start, and by which variable it says so.

    `mpi` is the ``--mpi=`` of srun, if there was one.
    """

    launcher: str
    meant: tuple[int, str] | None = None
    mpi: str | None = None


class Job(NamedTuple):
    """All that rank 0 knows of the job.

    Attributes:
        launch: who started the ranks.
        ranks, nodes: of the world.
        one_node: whether hpcdist takes them for ranks of one node.
        library: the MPI library.
        loads: of every node.
        machines: what each rank found on its node.
        memory: what is shared.
        tuning: which file is in force.
        differs: what is not the same on all ranks, and should be.
        numerics: what rank 0's bits depend on, and `other_bits` what of it differs.
        network: what lies between the nodes.
        cuda: whether MPI takes GPU memory.
        nccl: the version of NCCL.
        sockets: what calls between ranks would go by, of each rank.
        system: settings of the operating system that matter here.

    """

    launch: Launch
    ranks: int
    nodes: int
    one_node: bool
    library: Library
    loads: Sequence[Load]
    machines: Sequence[Machine]
    memory: Memory
    tuning: Tuning = Tuning()
    differs: Sequence[Difference] = ()
    numerics: Mapping[str, str] = {}
    other_bits: Sequence[Difference] = ()
    network: Network = Network()
    cuda: Awareness = Awareness(None, "not asked")
    nccl: str = NOT_INSTALLED
    sockets: Sequence[Sockets] = ()
    system: Mapping[str, str] = {}


def look(world: Group, config: Config) -> Job | None:
    """Return what there is to know about the job; None except on rank 0. Collective."""
    environ, host = snapshot(), cast(Any, world.transport)
    shares, pipe, why = _try_sharing(world)
    library, cuda = mpi_library(environ), cuda_awareness()
    machine = look_around(environ, config.device)
    sockets = try_sockets(machine.host, config.rpc_interface)
    alike = _alike(config, environ, library, cuda)
    ranks = world.mpi_comm.gather(Rank(machine, alike, numerics(environ), why, sockets))
    names = None if ranks is None else [rank.machine.host for rank in ranks]
    network = measure(world.mpi_comm, host.context.site.nodes, names)
    if ranks is None or network is None:
        return None
    machines = [rank.machine for rank in ranks]
    return Job(
        launch=_launch(environ),
        ranks=world.nranks,
        nodes=len({machine.host for machine in machines}),
        one_node=host.one_node,
        library=library,
        loads=loads_of(machines),
        machines=machines,
        memory=Memory(
            shares if world.nranks > 1 else None,
            next((rank.why_not_shared for rank in ranks if rank.why_not_shared), ""),
            pipe,
            host.context.heap.capacity,
            host.context.heap.used,
        ),
        tuning=_tuning(config, world.nranks, one_node=host.one_node),
        differs=differing([rank.alike for rank in ranks]),
        numerics=ranks[0].numerics,
        other_bits=differing([rank.numerics for rank in ranks]),
        network=network,
        cuda=cuda,
        nccl=nccl_version(),
        sockets=[rank.sockets for rank in ranks],
        system=dict(system()) if world.nranks > 1 else {},
    )


def _launch(environ: Mapping[str, str]) -> Launch:
    place = read_place(environ)
    asked = environ.get("SLURM_MPI_TYPE") if "SLURM_STEP_ID" in environ else None
    return Launch(place.launcher, expected_size(environ), asked)


def _alike(
    config: Config, environ: Mapping[str, str], library: Library, cuda: Awareness
) -> dict[str, str]:
    return {
        **versions(),
        "MPI library": library.text,
        "MPI thread level": library.thread_level,
        "CUDA-aware MPI": str(cuda.aware),
        **{
            setting.variable: setting.value
            for setting in settings_of(config, environ)
            if setting.variable not in _OWN_TO_EACH
        },
        "rules of the tuning file": f"{zlib.crc32(repr(read_rules(config.tuning)).encode()):08x}",
    }


def differing(ranks: Sequence[Mapping[str, str]]) -> list[Difference]:
    """Return the values that differ between ranks, and which ranks have which."""
    found = []
    for name in ranks[0]:
        holders: dict[str, list[int]] = {}
        for number, rank in enumerate(ranks):
            holders.setdefault(rank[name], []).append(number)
        if len(holders) > 1:
            found.append(Difference(name, {text: in_short(own) for text, own in holders.items()}))
    return found


def loads_of(machines: Sequence[Machine]) -> list[Load]:
    """Return for each node its ranks and the cores that they may use together."""
    count = Counter(machine.host for machine in machines)
    cores: dict[str, set[int]] = {}
    for machine in machines:
        cores.setdefault(machine.host, set()).update(machine.cores)
    return [Load(host, number, len(cores[host])) for host, number in count.items()]


def by_host(machines: Sequence[Machine]) -> dict[str, list[Machine]]:
    """Return for each node what its ranks found, in their order."""
    found: dict[str, list[Machine]] = {}
    for machine in machines:
        found.setdefault(machine.host, []).append(machine)
    return found


def _try_sharing(world: Group) -> tuple[bool, bool, str]:
    """Return whether ranks share memory, whether they reduce in it, and if not, why. Collective."""
    with recorded() as caught:
        group = new_group()
        host = cast(Any, group.transport)
        found = host.context.node if host.one_node else host.hierarchical
        destroy_process_group(group)
    texts = [text for text in map(str, (each.message for each in caught)) if "share memory" in text]
    why = texts[0].partition("(")[2].rpartition(");")[0] if texts else ""
    return found is not None, bool(getattr(found, "can_pipeline", False)), why


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Keep warnings to oneself."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _tuning(config: Config, ranks: int, *, one_node: bool) -> Tuning:
    rules = read_rules(config.tuning)
    own = rules[: len(rules) - len(DEFAULT)]
    fitting = TuningTable(own, ranks, several_nodes=not one_node).rules
    return Tuning(config.tuning, own, len(fitting))
