"""`check_rows`: what was looked at, with the result, the verdict and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hpcdist.diagnostics.machine import Machine, named
from hpcdist.diagnostics.network import middle
from hpcdist.diagnostics.probe import Job, by_host
from hpcdist.diagnostics.problem import Check, Problem
from hpcdist.diagnostics.sockets import describe_sockets
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import bandwidth, in_short, volume

OK, WARNING, WRONG = "ok", "warning", "wrong"


class Row(NamedTuple):
    """One line of the report: `remedy` is empty where nothing is the matter."""

    check: str
    result: str
    verdict: str
    remedy: str


def check_rows(
    job: Job | None, dtypes: Sequence[str], problems: Iterable[Problem], starter: str = ""
) -> list[Row]:
    """Return what was looked at; a line for each problem, after what was found.

    Args:
        job: what was found, None where MPI does not start.
        dtypes: those that the compiled kernel reduces.
        problems: what is to be put right.
        starter: what would start ranks from here, where the doctor runs alone.

    """
    found = dict(_found(job, dtypes, starter))
    rows, about = [], list(problems)
    for check in dict.fromkeys([*found, *(problem.check.value for problem in about)]):
        own = [problem for problem in about if problem.check.value == check]
        rows += [Row(check, found[check], OK, "")] if check in found and not own else []
        rows += [
            Row(check, each.what, WRONG if each.stops else WARNING, each.remedy) for each in own
        ]
    return rows


def _found(job: Job | None, dtypes: Sequence[str], starter: str) -> Iterator[tuple[str, str]]:
    kernel = f"reduces {len(dtypes)} dtypes" if dtypes else "none: NumPy reduces"
    if job is None:
        yield Check.KERNEL.value, kernel
        return
    yield Check.LAUNCH.value, _launch(job, starter)
    yield "ranks", f"{job.ranks} on {_counted(job.nodes, 'node')}"
    yield Check.ALIKE.value, "versions, settings, tuning file" if job.ranks > 1 else "one rank"
    if job.ranks > 1 and job.numerics:
        yield Check.NUMERICS.value, f"one kind: {', '.join(job.numerics.values())} thread(s)"
    yield Check.THREADS.value, job.library.thread_level
    yield Check.NODES.value, _transport(job)
    yield Check.MEMORY.value, _memory(job)
    yield "shared arrays", f"{volume(job.memory.used)} of {volume(job.memory.limit)} on rank 0"
    yield Check.KERNEL.value, kernel
    yield Check.TUNING.value, _tuning(job)
    yield Check.CORES.value, _cores(job)
    yield Check.BINDING.value, _binding(job)
    yield Check.NUMA.value, _numa(job)
    yield Check.SHM.value, _shm(job)
    yield Check.MEMLOCK.value, _memlock(job)
    yield Check.GPUS.value, _gpus(job)
    yield "CUDA-aware MPI", _cuda(job)
    yield "NCCL", job.nccl
    if job.ranks > 1:
        yield Check.CALLS.value, describe_sockets(job.sockets, one_node=job.one_node)
    if len(job.network.names) > 1:
        yield Check.CLOCKS.value, _clocks(job)
        yield Check.LINKS.value, _links(job)
    yield from job.system.items()


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _launch(job: Job, starter: str) -> str:
    by = job.launch.launcher
    if by == "none":
        return f"{job.library.text}; several ranks by {starter}" if starter else job.library.text
    asked = f", srun --mpi={job.launch.mpi}" if job.launch.mpi else ""
    return f"{job.library.text}; started by {by}{asked}"


def _transport(job: Job) -> str:
    if job.ranks == 1:
        return "none: one rank"
    if job.one_node:
        return "shared memory and MPI" if job.memory.shared else "MPI"
    inside = "shared memory and MPI in each" if job.memory.shared else "MPI in each"
    return f"MPI between the nodes, {inside}"


def _memory(job: Job) -> str:
    memory = job.memory
    if memory.shared is None:
        return "one rank: nothing to share"
    return "shared" if memory.shared else f"not shared: {memory.why_not or 'unknown reason'}"


def _tuning(job: Job) -> str:
    path, rules, fitting = job.tuning
    if path is None:
        return "none: the default rules hold (see `hpcdist tune`)"
    return f"{path}: {len(rules)} rules, {fitting} of them for this job"


def _cores(job: Job) -> str:
    full = max(job.loads, key=lambda load: load.ranks / load.cores)
    return f"{full.cores} for the {_counted(full.ranks, 'rank')} on {full.host}"


def _binding(job: Job) -> str:
    manners = {_manner(machines) for machines in by_host(job.machines).values()}
    return "; ".join(sorted(manners))


def _manner(machines: Sequence[Machine]) -> str:
    cores = [set(machine.cores) for machine in machines]
    if len(cores) == 1:
        return f"one rank on core(s) {in_short(cores[0])}"
    if sum(map(len, cores)) == len(set().union(*cores)):
        return "each rank has cores of its own"
    if all(each == cores[0] for each in cores):
        return f"not bound: all ranks of a node share core(s) {in_short(cores[0])}"
    return "some ranks share cores"


def _numa(job: Job) -> str:
    most = max((len(machine.numa) for machine in job.machines), default=0)
    return f"{_counted(most, 'NUMA node')} in a node" if most else "the kernel does not tell"


def _shm(job: Job) -> str:
    sizes = [machine.shm for machine in job.machines if machine.shm is not None]
    if not sizes:
        return "there is none"
    size, free = min(sizes, key=lambda each: each[1])
    return f"{free / (1 << 30):.1f} GiB free of {size / (1 << 30):.1f} GiB"


def _memlock(job: Job) -> str:
    limits = [machine.memlock for machine in job.machines if machine.memlock is not None]
    devices = sorted({name for machine in job.machines for name in machine.rdma})
    limit = f"{volume(min(limits))} at most" if limits else "no limit"
    return f"{limit}; {', '.join(devices) if devices else 'no RDMA devices'}"


def _gpus(job: Job) -> str:
    told: dict[str, list[str]] = {}
    for host, machines in by_host(job.machines).items():
        gpus = {gpu for machine in machines for gpu in machine.gpus.usable}
        kinds = ", ".join(sorted({gpu.name for gpu in gpus}))
        text = f"{len(gpus)} x {kinds}" if gpus else f"none: {machines[0].gpus.why_none}"
        told.setdefault(text, []).append(host)
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{text} on {named(hosts)}" for text, hosts in told.items())


def _cuda(job: Job) -> str:
    answers = {True: "yes", False: "no", None: "unknown"}
    return f"{answers[job.cuda.aware]} ({job.cuda.source})"


def _clocks(job: Job) -> str:
    skews = job.network.skews
    return f"at most {1e3 * (max(skews) - min(skews)):.2g} ms apart"


def _links(job: Job) -> str:
    links = job.network.links
    rates = [link.bytes_per_s / 1e9 for link in links]
    count = len(job.network.names)
    pairs = count * (count - 1) // 2
    told = bandwidth(middle(links))
    if len(links) > 1:
        told += f" (median; {min(rates):.2f} to {max(rates):.2f})"
    measured = "" if len(links) == pairs else f" measured in time, of {pairs}"
    return f"{told} in {_counted(len(links), 'pair')}{measured}"
