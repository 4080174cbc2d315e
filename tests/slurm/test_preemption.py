"""A training that Slurm interrupts again and again learns what an undisturbed one learns."""

import re
import sys
import time

import pytest
from private_slurm import ENDED, ROOT, crashed

EXAMPLE = ROOT / "examples/preemptible.py"
TEMPLATE = ROOT / "slurm/requeue.sbatch"
STEPS = 120
PAUSE_S = 0.1
PATIENCE_S = 150


class Training:
    """One training under `slurm/requeue.sbatch`, and what its log tells."""

    def __init__(self, cluster, mpi, folder, *flags, pause_s=PAUSE_S):
        self.cluster, self.mpi, self.folder = cluster, mpi, folder
        self.flags, self.pause_s = flags, pause_s
        self.losses = folder / "losses.txt"
        self.log = folder / "log"
        self.job = self.submit()

    def submit(self):
        options = ["--steps", STEPS, "--pause", self.pause_s, "--losses", self.losses]
        return self.cluster.sbatch(
            "--ntasks-per-node=2", f"--output={self.log}", *self.flags, TEMPLATE,
            self.losses, sys.executable, EXAMPLE, *options, "--state", self.folder / "state.npz",
            environ={**self.mpi.environ, "SLURM_MPI_TYPE": self.mpi.kind},
            cwd=self.folder,
        )  # fmt: skip

    def text(self):
        return self.log.read_text() if self.log.exists() else ""

    def began(self):
        """Return the first step of each run."""
        return [int(step) for step in re.findall(r"ranks begin with step (\d+)", self.text())]

    def saved(self):
        """Return the last step of each run that stopped early."""
        return [int(step) for step in re.findall(r"saved after step (\d+)", self.text())]

    def state(self):
        return self.cluster.show(self.job).get("JobState")

    def wait_until(self, happened, limit_s=PATIENCE_S):
        """Wait for something to happen; submit again where MPI itself did not come up."""
        deadline = time.monotonic() + limit_s
        while not happened():
            assert time.monotonic() < deadline, self.text()
            state, hangs = self.state(), crashed(self.text())
            if hangs:
                self.cluster.run("scancel", self.job)
                self.cluster.wait(self.job)
            if (hangs or state in ENDED) and not happened():
                assert hangs, f"{state}: {self.text()}"
                self.log.write_text("".join(self.kept_lines()))
                self.job = self.submit()
            time.sleep(0.1)

    def kept_lines(self):
        return (line for line in self.text().splitlines(True) if " step " in line)

    def interrupt(self, how):
        """Let a few steps be done, then call `how(job)`; return when the job queues again."""
        runs = len(self.saved())
        self.wait_until(lambda: len(self.began()) > runs)
        time.sleep(PAUSE_S)  # some steps
        how(self.job)
        self.wait_until(lambda: len(self.saved()) > runs)
        self.wait_until(lambda: self.state() != "RUNNING")

    def finish(self):
        """Wait for the end; return the losses."""
        self.wait_until(self.losses.exists)
        assert self.cluster.wait(self.job, PATIENCE_S) == "COMPLETED"
        return self.losses.read_text().splitlines()


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """Return a function of an MPI: the losses of the training that nothing interrupts."""
    found = {}

    def losses(mpi):
        if mpi.name not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            training = Training(cluster, mpi, folder, "--time=10", pause_s=0)
            found[mpi.name] = training.finish()
            check_runs(training, 0)
        return found[mpi.name]

    return losses


def ways_to_interrupt(cluster):
    """Return the ways in which a running job hears that it should leave."""
    urgent = ("--partition=high", "--exclusive", "-N2", "--wrap=true", "--output=/dev/null")
    return [
        # what --signal=B:USR1@120 does: to the batch script, which passes it on
        lambda job: cluster.run("scancel", "--signal=USR1", "--batch", job),
        # a job of higher priority wants the nodes: Slurm itself signals every rank
        lambda job: cluster.sbatch(*urgent),
        # what --signal=USR1@120 does: to every rank
        lambda job: cluster.run("scancel", "--signal=USR1", f"{job}.0"),
        # what scancel does first: to every rank
        lambda job: cluster.run("scancel", "--signal=TERM", f"{job}.0"),
    ]


def check_runs(training, requeues):
    """The runs followed each other, each with the step after the last one that was saved."""
    began, saved = training.began(), training.saved()
    assert len(saved) == requeues
    assert began == [0, *(step + 1 for step in saved)]
    assert began == sorted(set(began))


def drill(cluster, mpi, folder, requeues, undisturbed):
    training = Training(cluster, mpi, folder, "--partition=low", "--time=10")
    ways = ways_to_interrupt(cluster)
    for number in range(requeues):
        training.interrupt(ways[number % len(ways)])
        cluster.hasten(training.job)
    losses = training.finish()
    check_runs(training, requeues)
    assert len(losses) == STEPS
    assert losses == undisturbed(mpi)  # to the last digit


def test_a_training_that_is_requeued_three_times_learns_the_same(
    cluster, any_mpi, tmp_path, undisturbed
):
    drill(cluster, any_mpi, tmp_path, 3, undisturbed)


@pytest.mark.slow
def test_a_training_that_is_requeued_ten_times_learns_the_same(cluster, mpi, tmp_path, undisturbed):
    drill(cluster, mpi, tmp_path, 10, undisturbed)


@pytest.mark.slow
def test_a_training_leaves_before_its_time_limit(cluster, mpi, tmp_path, undisturbed):
    """One minute is the shortest limit, and Slurm signals at any moment of the first 40 s."""
    limit = ("--time=1", "--signal=B:USR1@20")
    training = Training(cluster, mpi, tmp_path, *limit, pause_s=60 / STEPS)
    deadline = time.monotonic() + 230
    while not training.losses.exists():
        assert time.monotonic() < deadline, training.text()
        training.wait_until(lambda: training.state() != "RUNNING", 90)
        cluster.hasten(training.job)
        training.wait_until(lambda: training.state() != "PENDING")
    assert training.finish() == undisturbed(mpi)
    requeues = len(training.saved())
    assert requeues >= 1
    check_runs(training, requeues)


def test_a_run_that_is_signalled_before_it_listens_queues_again(cluster, tmp_path):
    started, finished, log = tmp_path / "started", tmp_path / "finished", tmp_path / "log"
    second = '[ "${SLURM_RESTART_COUNT:-0}" -ge 1 ]'  # or later: a job may be started too soon
    program = f"if {second}; then touch {finished}; else touch {started}; exec sleep 60; fi"
    options = ("-N1", "-n2", "--time=2", f"--output={log}")
    job = cluster.sbatch(*options, TEMPLATE, finished, "bash", "-c", program)
    deadline = time.monotonic() + PATIENCE_S
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    while cluster.show(job)["Restarts"] == "0":
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    cluster.hasten(job)
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert finished.exists()


def test_a_cancelled_training_saves_and_does_not_queue_again(cluster, mpi, tmp_path):
    training = Training(cluster, mpi, tmp_path, "--time=10")
    training.interrupt(lambda job: cluster.run("scancel", job))
    assert cluster.wait(training.job) == "CANCELLED"
    time.sleep(1)
    assert cluster.show(training.job)["JobState"] == "CANCELLED"
    assert (tmp_path / "state.npz").exists()
    assert "queues again" not in training.text()
