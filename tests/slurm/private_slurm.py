"""`Cluster`: a private Slurm of this machine, and the MPI libraries its jobs are run with.

`python tests/slurm/private_slurm.py COMMAND...` runs a command on its login node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from switch import ask

ROOT = Path(__file__).resolve().parents[2]
STARTER = Path(__file__).with_name("cluster")
STARTED_S = 300  # packages may have to be fetched
ENDED = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
# What launchers and schedulers set: a job must not take itself for a part of another one.
FOREIGN = ("SLURM", "PMI", "OMPI_", "PRTE_", "MPI4PY_", "MPI_LOCAL", "LD_LIBRARY_PATH", "HPCDIST_")


# What jobs were seen to die or to hang of while MPI started, about once in seventy launches on a
# busy machine: in Slurm 22.05 with PMI-2, and in Open MPI 5. The causes are not known.
CRASHES = (
    "mpi/pmi2: invalid client request",
    "mpi/pmi2: value not properly terminated in client request",
    "(ompi_mpi_init+",
    "An error occurred in MPI_Init",
)


class Unavailable(Exception):
    """There can be no Slurm here; the text is the reason."""


class Mpi(NamedTuple):
    """An MPI library: the `--mpi=` it needs, its launcher, and the variables that select it."""

    name: str
    kind: str
    mpiexec: str
    environ: dict[str, str]


class Cluster:
    """Runs programs on the login node of a private Slurm; see `start_cluster`."""

    def __init__(self, folder: Path, enter: tuple[str, ...]) -> None:
        self.folder = folder
        self.enter = enter
        (folder / "tmp").mkdir()
        foreign = [name for name in os.environ if name.startswith(FOREIGN)]
        kept = {name: value for name, value in os.environ.items() if name not in foreign}
        self.environ = {
            **kept,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            # Open MPI keeps files by the names of nodes, which another private Slurm has, too.
            "TMPDIR": str(folder / "tmp"),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_osc": "^ucx",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def run(
        self,
        *command: object,
        timeout: float = 120,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node and return how it ended, with its output."""
        return subprocess.run(
            [*self.enter, *map(str, command)],
            env={**self.environ, **(environ or {})},
            cwd=cwd or ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def srun(self, *arguments: object, mpi: Mpi | None = None, **options: object):
        """Run a job of its own on the nodes; with the right `--mpi=` where `mpi` is given."""
        environ = {**(mpi.environ if mpi else {}), **options.pop("environ", {})}
        kind = [f"--mpi={mpi.kind}"] if mpi else []
        flags = ["--quiet", "--kill-on-bad-exit=1", "--time=2", *kind]
        for _ in range(2):
            try:
                ended = self.run("srun", *flags, *arguments, environ=environ, **options)
            except subprocess.TimeoutExpired as error:
                if not crashed(str(error.stderr)):
                    raise
                continue
            if ended.returncode == 0 or not crashed(ended.stderr):
                return ended
        return self.run("srun", *flags, *arguments, environ=environ, **options)

    def cables(self, *hosts: str, clear: bool = False, **values: object):
        """Set cables of the switch, of some hosts or of all; return what went through each.

        Args:
            *hosts: the nodes and "login"; none: all of them.
            clear: count from 0 afterwards.
            **values: `rate` in bytes/s, `delay` in s, `is_up`.

        """
        return ask(self.folder / "switch", hosts=hosts, set=values, clear=clear)

    def sbatch(self, *arguments: object, **options: object) -> str:
        """Submit a batch script and return the number of its job."""
        submitted = self.run("sbatch", "--parsable", *arguments, **options)
        if submitted.returncode:
            raise RuntimeError(submitted.stderr)
        return submitted.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job, by name."""
        told = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(word.split("=", 1) for word in told.split() if "=" in word)

    def hasten(self, job: str) -> None:
        """Let a requeued job start soon, not when the credentials of its last run have expired."""
        deadline = time.monotonic() + 30
        while (state := self.show(job).get("JobState")) == "COMPLETING":
            assert time.monotonic() < deadline, f"job {job} does not end"
            time.sleep(0.2)
        if state == "PENDING":  # those of the last run are refused up to the second of its end
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def wait(self, job: str, timeout: float = 150) -> str:
        """Return the state in which a job ended; cancel it and raise where it takes longer."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            state = self.show(job).get("JobState", "")
            if state in ENDED:
                return state
            time.sleep(0.2)
        self.run("scancel", job)
        raise TimeoutError(f"job {job} is still {state} after {timeout} s")


@contextlib.contextmanager
def start_cluster(nodes: int = 2, network: str = "bridge") -> Iterator[Cluster]:
    """Start a Slurm with this many nodes, and end it with everything it runs.

    Args:
        nodes: how many.
        network: "bridge", as fast as this machine, or "switch", whose cables `Cluster.cables` sets.

    Raises:
        Unavailable: It cannot be installed or started here.

    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets are made below it
    folder.chmod(0o755)
    starter = subprocess.Popen(
        [STARTER, folder, str(nodes), network],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if starter.stdout.readline() != "ready\n":
            said = starter.stderr.read().strip().splitlines()
            raise Unavailable(said[-1] if said else f"{STARTER} ended without a word")
        child = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()[0]
        spaces = ("--net", "--uts", "--mount", "--pid", f"--wd={ROOT}")
        yield Cluster(folder, ("nsenter", "--target", child, *spaces))
    finally:
        starter.stdin.close()
        try:
            starter.wait(10)
        except subprocess.TimeoutExpired:
            starter.kill()
            starter.wait()
        starter.stdout.close()
        starter.stderr.close()
        shutil.rmtree(folder, ignore_errors=True)


def crashed(text: str) -> bool:
    """Tell from its output that a job did not come past the start of MPI, by no fault of ours."""
    return any(crash in text for crash in CRASHES)


def find_mpis() -> list[Mpi]:
    """Return the Open MPI beside this Python, and an MPICH: in .mpich, or the one in use."""
    found = []
    beside = Path(sys.executable).parent / "mpiexec"
    if beside.exists() and "Open MPI" in _version(beside):
        found.append(Mpi("Open MPI", "pmix", str(beside), {}))
    used = os.environ if "mpich" in os.environ.get("MPI4PY_MPIABI", "") else {}
    libraries = [ROOT / ".mpich/lib", *map(Path, used.get("LD_LIBRARY_PATH", "").split(":"))]
    for library in libraries:
        mpiexec = library.parent / "bin/mpiexec"
        if mpiexec.is_absolute() and mpiexec.exists() and "HYDRA" in _version(mpiexec):
            path = f"{mpiexec.parent}:{os.environ['PATH']}"
            environ = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": str(library), "PATH": path}
            return [*found, Mpi("MPICH", "pmi2", str(mpiexec), environ)]
    return found


def _version(mpiexec: Path) -> str:
    return subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    with start_cluster() as cluster:
        ended = subprocess.run([*cluster.enter, *sys.argv[1:]], env=cluster.environ)
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
