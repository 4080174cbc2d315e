"""`Job`: what hpcdist finds on the ranks it runs on. `look` asks; the rest is plain data."""

from __future__ import annotations

import importlib
import platform
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, cast

from hpcdist.comm.group import Group
from hpcdist.comm.groups import destroy_process_group, new_group
from hpcdist.config import Config
from hpcdist.runtime.cores import my_cores
from hpcdist.runtime.environ import snapshot
from hpcdist.runtime.mpi import load_mpi
from hpcdist.runtime.place import expected_size, read_place
from hpcdist.transport.kernel import compiled
from hpcdist.transport.select import DEFAULT, Rule, Selection, read_rules

_SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_PTRACE = Path("/proc/sys/kernel/yama/ptrace_scope")
_YES = ("1", "true", "yes", "on")


class Setting(NamedTuple):
    """A setting, its value, and where that comes from."""

    variable: str
    value: str
    source: str


class Load(NamedTuple):
    """How many ranks a node has, and the cores they may use together."""

    host: str
    ranks: int
    cores: int


class Rank(NamedTuple):
    """What one rank tells of itself; `alike` is what should be the same on all."""

    host: str
    cores: tuple[int, ...]
    alike: Mapping[str, Any]
    why_not_shared: str


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
    rules: tuple[Rule, ...] = ()
    fitting: int = 0


class Job(NamedTuple):
    """All that rank 0 knows of the job.

    Attributes:
        launcher: who started the ranks.
        ranks, nodes: of the world.
        one_node: whether hpcdist takes them for ranks of one node.
        meant: how many ranks the launcher meant to start and the variable that says so.
        thread_level: what MPI provides.
        yields: whether a waiting rank leaves its core to others; None for other MPI libraries.
        loads: of every node.
        memory: what is shared.
        tuning: which file is in force.
        differs: names of what is not the same on all ranks, and should be.
        system: settings of the operating system that matter here.

    """

    launcher: str
    ranks: int
    nodes: int
    one_node: bool
    meant: tuple[int, str] | None
    thread_level: str
    yields: bool | None
    loads: Sequence[Load]
    memory: Memory
    tuning: Tuning = Tuning()
    differs: Sequence[str] = ()
    system: Mapping[str, str] = {}


# ---- of this process alone


def own_version() -> str:
    """Return the version of hpcdist."""
    return str(importlib.import_module("hpcdist").__version__)


def versions() -> dict[str, str]:
    """Return the versions of what hpcdist stands on; nothing is started."""
    return {
        "hpcdist": own_version(),
        "Python": platform.python_version(),
        "NumPy": _version_of("numpy"),
        "mpi4py": _version_of("mpi4py"),
    }


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def mpi_library() -> str:
    """Return the MPI library in words; MPI has been started."""
    mpi = load_mpi()
    vendor, numbers = mpi.get_vendor()
    standard = ".".join(map(str, mpi.Get_version()))
    return f"{vendor} {'.'.join(map(str, numbers))}, MPI {standard}"


def compiled_dtypes() -> list[str]:
    """Return the dtypes that the compiled kernel reduces; none where there is no kernel."""
    codes = [] if compiled is None else compiled.CODES
    return list(dict.fromkeys(name.rpartition("_")[2] for name in codes))


def settings_of(config: Config, environ: Mapping[str, str]) -> list[Setting]:
    """Return every setting, its value and its source."""
    found = []
    for field in fields(Config):
        variable = f"HPCDIST_{field.name.upper()}"
        source = "environment" if environ.get(variable) else "default"
        found.append(Setting(variable, str(getattr(config, field.name)), source))
    return found


# ---- of the job


def look(world: Group, config: Config) -> Job | None:
    """Return what there is to know about the job; None except on rank 0. Collective."""
    environ, host = snapshot(), cast(Any, world.transport)
    shares, pipe, why = _try_sharing(world)
    name, cores = my_cores()
    settings = tuple(settings_of(config, environ))
    own = Rank(name, cores, _alike(config, settings), why)
    ranks = world.mpi_comm.gather(own)
    if ranks is None:
        return None
    return Job(
        launcher=read_place(environ).launcher,
        ranks=world.nranks,
        nodes=len({rank.host for rank in ranks}),
        one_node=host.one_node,
        meant=expected_size(environ),
        thread_level=_thread_level(),
        yields=_yields(environ),
        loads=loads_of(ranks),
        memory=Memory(
            shares if world.nranks > 1 else None,
            next((rank.why_not_shared for rank in ranks if rank.why_not_shared), ""),
            pipe,
            host.heap.capacity,
            host.heap.used,
        ),
        tuning=_tuning(config, world.nranks, one_node=host.one_node),
        differs=differing([rank.alike for rank in ranks]),
        system=dict(_system()) if world.nranks > 1 else {},
    )


def _alike(config: Config, settings: tuple[Setting, ...]) -> dict[str, Any]:
    return {
        **versions(),
        "MPI library": mpi_library(),
        "compiled kernel": compiled is not None,
        "settings": settings,
        "rules of the tuning file": zlib.crc32(repr(read_rules(config.tuning)).encode()),
    }


def differing(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of what is not the same on all ranks."""
    return [name for name in ranks[0] if any(rank[name] != ranks[0][name] for rank in ranks)]


def loads_of(ranks: Sequence[Rank]) -> list[Load]:
    """Return for each node its ranks and the cores that they may use together."""
    count = Counter(rank.host for rank in ranks)
    cores: dict[str, set[int]] = {}
    for rank in ranks:
        cores.setdefault(rank.host, set()).update(rank.cores)
    return [Load(host, number, len(cores[host])) for host, number in count.items()]


def _try_sharing(world: Group) -> tuple[bool, bool, str]:
    """Say whether ranks share memory, whether they reduce in it, and if not, why. Collective."""
    with recorded() as caught:
        group = new_group()
        host = cast(Any, group.transport)
        found = host.node if host.one_node else host.lanes
        destroy_process_group(group)
    texts = [text for text in map(str, (each.message for each in caught)) if "share memory" in text]
    why = texts[0].partition("(")[2].rpartition(");")[0] if texts else ""
    return found is not None, bool(getattr(found, "has_pipe", False)), why


@contextmanager
def recorded() -> Iterator[list[warnings.WarningMessage]]:
    """Keep warnings to oneself."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def _tuning(config: Config, ranks: int, *, one_node: bool) -> Tuning:
    rules = read_rules(config.tuning)
    own = rules[: len(rules) - len(DEFAULT)]
    fitting = Selection(own, ranks, several_nodes=not one_node).rules
    return Tuning(config.tuning, own, len(fitting))


def _thread_level() -> str:
    mpi = load_mpi()
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return {getattr(mpi, f"THREAD_{name}"): name for name in names}[mpi.Query_thread()]


def _yields(environ: Mapping[str, str]) -> bool | None:
    if load_mpi().get_vendor()[0] != "Open MPI":
        return None
    return environ.get("OMPI_MCA_mpi_yield_when_idle", "").lower() in _YES


def _system() -> Iterator[tuple[str, str]]:
    """Give what bears on ranks that share a node."""
    pages = _read(_SHARED_PAGES).partition("[")[2].partition("]")[0]
    if pages:
        yield "large pages for shared memory", f"{pages} ({_SHARED_PAGES})"
    scope = _read(_PTRACE)
    if scope not in ("", "0"):
        yield "reading other processes", f"{_PTRACE} is {scope}: MPI may copy twice in a node"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
