"""`problems_of`: what is wrong or slow in a job, and what to do about it. Pure.

Each function looks at one matter; those of nodes and network are in `hardware`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hpcdist.config import Config
from hpcdist.diagnostics.hardware import hardware_problems
from hpcdist.diagnostics.numerics import numeric_problems
from hpcdist.diagnostics.probe import Job
from hpcdist.diagnostics.problem import Check, Problem
from hpcdist.diagnostics.sockets import socket_problems

_HARMLESS = ("Python", "NumPy", "mpi4py", "compiled parts")
"""What may differ between ranks: it is slower or unusual, but not wrong."""

_ONE_PLACE = (
    "let the ranks of a node run as the same user in one container, with /proc not hidden (hidepid)"
)
_COMPILE = (
    "install or load a C compiler and the headers of Python (gcc and python3-dev on Debian), then "
    "install again: pip install --force-reinstall --no-deps hpcdist, or the folder of its sources"
)


def problems_of(
    job: Job, config: Config, dtypes: list[str], missing: Iterable[str] = ()
) -> list[Problem]:
    """Return what is to be put right, the worst first.

    Args:
        job: what was found.
        config: the settings.
        dtypes: those that the compiled kernel reduces; none without one.
        missing: sentences on the compiled parts that are not there.

    """
    found = [
        *_size(job),
        *_different(job),
        *numeric_problems(job.other_bits),
        *_memory(job),
        *_cores(job),
        *_threads(job),
        *hardware_problems(job),
        *socket_problems(job.sockets),
        *_kernel(config, dtypes, missing),
        *_tuning(job),
        *_pretended(config),
    ]
    return sorted(found, key=lambda problem: not problem.stops)


def _size(job: Job) -> Iterator[Problem]:
    meant = job.launch.meant
    if job.ranks == 1 and meant is not None and meant[0] > 1:
        number, variable = meant
        yield Problem(
            Check.LAUNCH,
            True,
            f"{variable}={number} says that there are {number} ranks, but MPI sees one",
            "use the launcher of this MPI library (see `hpcdist run --dry-run`); where one rank "
            "is meant, unset the variable",
        )


def _different(job: Job) -> Iterator[Problem]:
    for name, values in job.differs:
        held = "; ".join(f"{text} on {ranks}" for text, ranks in values.items())
        yield Problem(
            Check.ALIKE,
            name not in _HARMLESS,
            f"the ranks have different values of {name}: {held}",
            "start all ranks from one environment, with one installation and one tuning file",
        )


def _memory(job: Job) -> Iterator[Problem]:
    if job.memory.shared is False:
        why = f": {job.memory.why_not}" if job.memory.why_not else ""
        what = f"the ranks of a node do not share memory{why}"
        yield Problem(Check.MEMORY, False, what, _ONE_PLACE)


def _cores(job: Job) -> Iterator[Problem]:
    full = max(job.loads, key=lambda load: load.ranks / load.cores)
    if full.ranks <= full.cores:
        return
    remedy = "give each rank a core of its own, by fewer ranks or by the launcher's binding"
    if job.library.yields is False:
        remedy += "; until then set OMPI_MCA_mpi_yield_when_idle=1, so that waiting ranks give way"
    what = f"{full.ranks} ranks share {full.cores} core(s) on {full.host}"
    yield Problem(Check.CORES, False, what, remedy)


def _threads(job: Job) -> Iterator[Problem]:
    if job.library.thread_level != "MULTIPLE":
        yield Problem(
            Check.THREADS,
            False,
            f"MPI allows threads at level {job.library.thread_level} only: what is started ends "
            "at once instead of going on beside the computing",
            "take an MPI library built for THREAD_MULTIPLE, or start MPI at that level",
        )


def _kernel(config: Config, dtypes: list[str], missing: Iterable[str]) -> Iterator[Problem]:
    if config.kernel == "never":
        what = "HPCDIST_KERNEL=never: NumPy reduces in shared memory"
        yield Problem(Check.KERNEL, False, what, "unset it")
    elif not dtypes:
        yield Problem(
            Check.KERNEL,
            False,
            "hpcdist was installed without a C compiler: NumPy reduces in shared memory, slower",
            _COMPILE,
        )
    if dtypes:
        for sentence in missing:
            what = f"hpcdist is {sentence}; NumPy and Python do the same, slower"
            yield Problem(Check.KERNEL, False, what, _COMPILE)


def _tuning(job: Job) -> Iterator[Problem]:
    tuning = job.tuning
    if tuning.path is not None and job.ranks > 1 and not tuning.fitting:
        yield Problem(
            Check.TUNING,
            False,
            f"{tuning.path} has no rule for {job.ranks} ranks on "
            f"{'one node' if job.one_node else 'several nodes'}; the default rules hold",
            f"measure them: start {job.ranks} ranks of `hpcdist tune -o FILE`",
        )


def _pretended(config: Config) -> Iterator[Problem]:
    if config.ranks_per_node is not None:
        yield Problem(
            Check.NODES,
            False,
            f"HPCDIST_RANKS_PER_NODE={config.ranks_per_node}: every {config.ranks_per_node} ranks "
            "are taken for a node, whatever they run on",
            "unset it, except to try things out",
        )
