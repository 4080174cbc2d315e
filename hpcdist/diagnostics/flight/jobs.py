"""The jobs whose flight recorders are on this node, and which of them is meant."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import in_short, read_short
from hpcdist.transport.flight import layout, rings
from hpcdist.transport.flight.analysis import Explanation, Subject, explain
from hpcdist.transport.flight.recording import Recording, read_recording

_NEAR = 2
"""So many processes up, ranks that MPICH's launcher has started have it in common."""


class Snapshot(NamedTuple):
    """A rank as it was read: its ring, its clock, and the state of its process.

    `offset_ns` turns the monotonic clock of its node into the wall clock there.
    """

    raw: bytes
    offset_ns: int
    condition: str


class Job(NamedTuple):
    """The ranks of one job that were read."""

    subjects: Sequence[Subject]
    silent: tuple[str, ...] = ()
    """Nodes of it that do not answer."""

    @property
    def name(self) -> str:
        """Its name: the node and process of rank 0."""
        named = [each.recording.about.get("job", "") for each in self.subjects]
        return next(filter(None, named), "about to start")

    @property
    def slurm(self) -> str:
        """The job and step of Slurm, empty if it is none."""
        return str(self.subjects[0].recording.about.get("slurm", ""))

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return max(each.recording.size for each in self.subjects)

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks that run, or have run, on nodes that were read."""
        told = {rank for each in self.subjects for rank in _on_its_node(each.recording)}
        return tuple(sorted(told | {each.rank for each in self.subjects}))

    @property
    def is_alive(self) -> bool:
        """Whether a process of it lives."""
        return any(each.condition != "dead" for each in self.subjects)

    @property
    def is_whole(self) -> bool:
        """Whether all its nodes were read."""
        return len(self.here) >= self.size

    def in_words(self) -> str:
        """Describe it in a line."""
        program = self.subjects[0].recording.about.get("program", "")
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        slurm = f", Slurm job {self.slurm}" if self.slurm else ""
        state = "" if self.is_alive else ", dead"
        return f"{self.name}: {program}, {ranks}{slurm}{state}"


def _on_its_node(recording: Recording) -> tuple[int, ...]:
    return read_short(recording.about.get("here", ""))


def snapshots() -> list[Snapshot]:
    """Read all rings of this node, of processes that live or were killed."""
    offset_ns, host = time.time_ns() - time.monotonic_ns(), socket.gethostname()
    found = []
    for path in rings.find_rings():
        raw = rings.read_ring(path)
        if raw is not None and rings.about_of(raw).get("host") == host:  # or another node's
            header = layout.HEADER.unpack_from(raw)
            found.append(Snapshot(raw, offset_ns, rings.condition(header[1], header[2])))
    return found


def jobs_of(found: Iterable[Snapshot]) -> list[Job]:
    """Return the jobs that were read; those that live come first."""
    subjects = [Subject(read_recording(raw, offset), how) for raw, offset, how in found]
    jobs: list[list[Subject]] = []
    for subject in sorted(subjects, key=lambda each: "job" not in each.recording.about):
        mates = next((job for job in jobs if _belongs(subject.recording, job[0].recording)), None)
        if mates is None:
            jobs.append([subject])
        else:
            mates.append(subject)
    made = [Job(sorted(job, key=lambda each: each.rank)) for job in jobs]
    return sorted(made, key=lambda job: not job.is_alive)


def _belongs(one: Recording, other: Recording) -> bool:
    """Return whether two processes are ranks of one job."""
    if "job" in one.about and "job" in other.about:
        return bool(one.about["job"] == other.about["job"])
    for key in ("launch", "slurm"):
        if one.about.get(key) or other.about.get(key):
            return bool(one.about.get(key) == other.about.get(key))
    up = [set(each.about.get("ancestors", [])[:_NEAR]) for each in (one, other)]
    return one.size == other.size > 1 and bool(up[0] & up[1])


def choose(jobs: Sequence[Job], wanted: str | None) -> Job | None:
    """Return the job that is meant; None if there is none.

    Args:
        jobs: those there are.
        wanted: a job or step of Slurm, a name, or the number of a rank's process or of one that
            has started it; None for the only one that lives, or for the only one.

    Raises:
        UsageError: it could be several.

    """
    meant = [job for job in jobs if wanted is None or _is_meant(job, wanted)]
    alive = [job for job in meant if job.is_alive]
    found = alive or meant
    if len(found) > 1:
        names = "\n".join(f"  {job.in_words()}" for job in found)
        raise UsageError(f"there are several jobs; name one of them, or a process of it:\n{names}")
    return found[0] if found else None


def _is_meant(job: Job, wanted: str) -> bool:
    if wanted in (job.name, job.slurm) or (job.slurm and wanted == job.slurm.split(".")[0]):
        return True
    recordings = [each.recording for each in job.subjects]
    return wanted.isdigit() and any(
        int(wanted) in (each.pid, *each.about.get("ancestors", ())) for each in recordings
    )


def explained(job: Job) -> Explanation:
    """Return what the ranks of a job do, and who waits for whom, now."""
    return explain(job.subjects, job.size, time.time_ns(), job.here)


def report(job: Job) -> str:
    """Return what `hpcdist ps` prints."""
    return f"job {job.in_words()}\n{of_ranks(job)}"


def of_ranks(job: Job) -> str:
    """Return a line for each rank, which are not known and why, and who waits for whom."""
    found = explained(job)
    missing = sorted(set(range(job.size)) - set(job.here))
    away = [f"(ranks {in_short(missing)} are on other nodes)"] if missing else []
    if job.silent:
        many = len(job.silent) > 1
        nodes = f"node{'s' * many} {', '.join(job.silent)} {'do' if many else 'does'} not answer"
        whose = f"rank{'s' * (len(missing) > 1)} {in_short(missing)}" if missing else "no rank"
        away = [f"=> {nodes}, where {whose} ran: look at the nodes and the network between them"]
    verdict = [f"=> {line}" for line in found.verdict]
    return "\n".join([*found.lines, *away, *verdict])
