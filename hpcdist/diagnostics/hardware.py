"""`hardware_problems`: what is the matter with nodes, binding, GPUs and network. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from hpcdist.diagnostics.machine import Machine, across_numa, crowded, named
from hpcdist.diagnostics.network import middle, slow_links, slow_nodes
from hpcdist.diagnostics.probe import Job, by_host
from hpcdist.diagnostics.problem import Check, Problem
from hpcdist.text import bandwidth, in_short, volume

_SKEW_S = 0.1
_SHM_SIZE, _SHM_FREE, _MEMLOCK = 1 << 29, 1 << 26, 1 << 30


def hardware_problems(job: Job) -> Iterator[Problem]:
    """Give what is to be put right on the nodes and between them."""
    for look_at in (_binding, _numa, _shm, _memlock, _kernels, _gpus, _clocks, _links):
        yield from look_at(job)


def _binding(job: Job) -> Iterator[Problem]:
    roomy = {load.host for load in job.loads if load.ranks <= load.cores}
    found = {
        host: full
        for host, machines in by_host(job.machines).items()
        if host in roomy and (full := crowded([machine.cores for machine in machines]))
    }
    if found:
        first = next(iter(found.values()))
        yield Problem(
            Check.BINDING,
            False,
            f"on {named(list(found))} more ranks are bound to core(s) {in_short(first)} than can "
            "run there, while others are idle",
            "bind each rank to cores of its own: srun --cpu-bind=cores, or Open MPI's mpiexec "
            "--bind-to core; two jobs on a node need --exclusive or cgroups",
        )


def _numa(job: Job) -> Iterator[Problem]:
    spread = [number for number, each in enumerate(job.machines) if across_numa(each)]
    if spread and job.ranks > 1:
        yield Problem(
            Check.NUMA,
            False,
            f"the cores of rank(s) {in_short(spread)} belong to several NUMA nodes: memory may be "
            "far away",
            "bind each rank to the cores of one: srun --cpu-bind=cores or =ldoms, or mpiexec "
            "--bind-to numa (Open MPI), -bind-to numa (MPICH)",
        )


def _shm(job: Job) -> Iterator[Problem]:
    small = [each for each in job.machines if each.shm is None or _is_small(*each.shm)]
    if not small:
        return
    size, free = small[0].shm or (0, 0)
    hosts = list(dict.fromkeys(each.host for each in small))
    yield Problem(
        Check.SHM,
        False,
        f"/dev/shm on {named(hosts)} has {volume(free)} free of {volume(size)}: MPI libraries, "
        "NCCL and data loaders may fail there",
        "remove what earlier jobs have left in it; of a container give the host's (apptainer) or "
        "a larger one (docker --shm-size=8g)",
    )


def _is_small(size: int, free: int) -> bool:
    return size < _SHM_SIZE or free < _SHM_FREE


def _memlock(job: Job) -> Iterator[Problem]:
    limited = [
        each
        for each in job.machines
        if each.rdma and each.memlock is not None and each.memlock < _MEMLOCK
    ]
    if limited:
        yield Problem(
            Check.MEMLOCK,
            False,
            f"a rank of {limited[0].host} may lock {volume(limited[0].memlock or 0)} of memory, "
            f"too little for RDMA ({', '.join(limited[0].rdma)})",
            "set LimitMEMLOCK=infinity in slurmd's systemd unit and "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf; without Slurm `ulimit -l`",
        )


def _kernels(job: Job) -> Iterator[Problem]:
    mute = {each.host: each.gpus.no_kernel for each in job.machines if each.gpus.no_kernel}
    if mute:
        host, why = next(iter(mute.items()))
        yield Problem(
            Check.GPUS,
            False,
            f"CuPy cannot run a kernel on {host}: {why}",
            "it compiles them, with NVRTC and the headers of CUDA: load the CUDA toolkit of your "
            "centre, or pip install 'cupy-cuda12x[ctk]' (13: 'cupy-cuda13x[ctk]')",
        )


def _gpus(job: Job) -> Iterator[Problem]:
    blind = {each.host: each for each in job.machines if each.visible and not each.gpus.usable}
    if blind:
        one = next(iter(blind.values()))
        yield Problem(
            Check.GPUS,
            False,
            f"CUDA_VISIBLE_DEVICES={one.visible} on {named(list(blind))}, but no GPU can be used: "
            f"{one.gpus.why_none}",
            "let the centre look at the node: the scheduler hands out GPUs that the driver does "
            "not show",
        )
    shared = {
        host: twice
        for host, machines in by_host(job.machines).items()
        if (twice := doubly_used(machines))
    }
    if shared:
        uuid, ranks = next(iter(shared.values()))
        yield Problem(
            Check.GPUS,
            False,
            f"on {named(list(shared))} one GPU serves several ranks: {uuid} those with the local "
            f"ranks {in_short(ranks)}",
            "one rank per GPU: --gpus-per-node=N with --ntasks-per-node=N (or "
            "--gpus-per-task=1); NCCL refuses two ranks on one GPU",
        )


def doubly_used(machines: Sequence[Machine]) -> tuple[str, list[int]] | None:
    """Return a GPU that several ranks of a node would use, and their ranks on the node.

    A rank takes the GPU whose place is its rank on the node, counted around, unless it was told.
    """
    taken = sorted(
        (gpus[(local if machine.wanted is None else machine.wanted) % len(gpus)].uuid, local)
        for local, machine in enumerate(machines)
        if (gpus := machine.gpus.usable)
    )
    for uuid, users in groupby(taken, lambda each: each[0]):
        ranks = [local for _, local in users]
        if len(ranks) > 1:
            return uuid, ranks
    return None


def _clocks(job: Job) -> Iterator[Problem]:
    names, skews, _ = job.network
    if skews and max(skews) - min(skews) > _SKEW_S:
        ahead, behind = skews.index(max(skews)), skews.index(min(skews))
        yield Problem(
            Check.CLOCKS,
            False,
            f"the clock of {names[ahead]} is {1e3 * (max(skews) - min(skews)):.0f} ms ahead of "
            f"that of {names[behind]}: times in logs and of files cannot be compared",
            "let chrony or ntpd run on all nodes (`chronyc tracking` shows the offset)",
        )


def _links(job: Job) -> Iterator[Problem]:
    names, _, links = job.network
    slow = slow_links(links)
    if not slow:
        return
    whole = [names[node] for node in slow_nodes(links)]
    pairs = [f"{names[a]}-{names[b]} {bandwidth(rate)}" for (a, b), rate in sorted(slow)[:4]]
    more = f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    yield Problem(
        Check.LINKS,
        False,
        (f"node {', '.join(whole)} is slow to all others: " if whole else "slow: ")
        + f"{', '.join(pairs)}{more}; the median is {bandwidth(middle(links))}",
        "leave the node out (srun --exclude=NAME) and have its network adapter, cable and switch "
        "port looked at; other jobs on a shared network do the same for a while",
    )
