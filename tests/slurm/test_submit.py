"""`hpcdist submit` on a real Slurm: the script, the log, the exit code."""

import re
import subprocess
import sys

import pytest

TRAIN = """
import atexit, os, sys, time

if os.environ["SLURM_PROCID"] == "1":  # the others have ended before: none is killed for its code
    atexit.register(time.sleep, float(sys.argv[1]) and 2)
import hpcdist as dist

world = dist.init_parallel_env()
nodes = []
dist.all_gather_object(nodes, (os.environ["SLURMD_NODENAME"], os.environ.get("SLURM_GPUS_ON_NODE")))
if world.rank == 0:
    print("nodes", *(node for node, _ in nodes))
    print("GPUs", *(gpus for _, gpus in nodes))
    print("arguments", *sys.argv[2:])
time.sleep(float(os.environ.get("SECONDS_TO_GO", 0)))
dist.barrier()
sys.exit(int(sys.argv[1]) if world.rank == 1 else 0)
"""


@pytest.fixture
def submitted(cluster, tmp_path):
    """Run `hpcdist submit` in a folder of its own, on the login node."""
    (tmp_path / "train.py").write_text(TRAIN)

    def submit(*words, mpi=None, before=(), **environ):
        command = [*before, sys.executable, "-m", "hpcdist", "submit", *words]
        line = subprocess.list2cmdline(["cd", str(tmp_path), "&&", "exec", *command])
        environ = {**(mpi.environ if mpi else {}), **environ}
        words = ("sh", "-c", line.replace('"&&"', "&&"))
        try:
            return cluster.run(*words, environ=environ, timeout=150)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it has not ended: {error.stderr} {error.stdout}") from error

    return submit


def told_by(done):
    """Return all that was said: the log, which holds what MPI says where it does not come up."""
    return done.stderr + done.stdout


def job_of(done):
    return re.search(r"^hpcdist submit: job (\d+)$", done.stderr, re.M)[1]


def test_a_job_is_submitted_and_followed_to_its_end(submitted, mpi, tmp_path, cluster):
    done = submitted(
        "train.py", "-N", "2", "--ntasks-per-node", "2", "--", "0", "--lr", "3", mpi=mpi
    )
    assert done.returncode == 0, told_by(done)
    told = ["nodes n1 n1 n2 n2", "GPUs None None None None", "arguments --lr 3"]
    assert words_of_ranks(done.stdout) == told
    job = job_of(done)
    script, log = tmp_path / f"train-{job}.sbatch", tmp_path / f"train-{job}.out"
    assert f"hpcdist submit: script: {script}\n" in done.stderr
    assert f"hpcdist submit: log: {log}\n" in done.stderr
    assert log.read_text() == done.stdout
    assert f"srun --mpi={mpi.kind} " in script.read_text()
    again = cluster.sbatch(script, environ=mpi.environ)
    log = tmp_path / f"train-{again}.out"
    assert cluster.wait(again) == "COMPLETED", log.read_text()
    assert words_of_ranks(log.read_text()) == told


def words_of_ranks(output):
    """Return the lines of a job's output without those of Slurm, which a busy machine may cause."""
    return [line for line in output.splitlines() if not line.startswith("slurmstepd-")]


IN_FOLDER = ("sh", "-c", 'cd "$0" && exec "$@"')


def test_odd_names_and_arguments_arrive_as_they_are(cluster, tmp_path):
    odd = [":", "", "it's", 'a "$HOME" `id`', "a\\n", "a\nb", "a\r\nb", "\x1b é", "-n"]
    name = 'it\'s a \\ "job" #1'
    (tmp_path / "tell.py").write_text("import sys; print(ascii(sys.argv[1:]))")
    words = ["submit", "tell.py", "-J", name, "-o", "tell.out", "--", *odd]
    done = cluster.run(*IN_FOLDER, tmp_path, sys.executable, "-m", "hpcdist", *words)
    assert done.stdout == f"{odd!a}\n", done.stderr
    told = cluster.run("scontrol", "--oneliner", "show", "job", job_of(done)).stdout
    assert f" JobName={name} " in told


def test_a_newline_in_a_name_runs_nothing(cluster, tmp_path):
    words = ["submit", "tell.py", "-J", "a\ntouch evil"]
    done = cluster.run(*IN_FOLDER, tmp_path, sys.executable, "-m", "hpcdist", *words)
    assert done.returncode == 2
    assert "--job-name is 'a\\ntouch evil', which holds a character" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_is_that_of_the_program(submitted):
    done = submitted("train.py", "-n", "2", "--", "7")
    assert done.returncode == 7, told_by(done)
    assert "has ended with exit code 7" in done.stderr


def test_there_is_one_rank_for_each_gpu(submitted):
    done = submitted("train.py", "-N", "2", "--gpus-per-node", "2", "--time", "2:00", "--", "0")
    assert done.stdout.splitlines()[:2] == ["nodes n1 n1 n2 n2", "GPUs 2 2 2 2"], told_by(done)


def test_without_following_it_says_where_everything_is(submitted, cluster, tmp_path):
    done = submitted("train.py", "--no-follow", "-o", "logs/%x.txt", "-J", "mine", "--", "0")
    assert (done.returncode, done.stdout) == (0, "")
    job = job_of(done)
    assert f"log: {tmp_path}/logs/mine.txt\n" in done.stderr
    assert (tmp_path / "logs" / f"mine-{job}.sbatch").exists()
    log = tmp_path / "logs/mine.txt"
    assert cluster.wait(job) == "COMPLETED", log.read_text()
    assert "nodes n1\n" in log.read_text()


def test_ctrl_c_ends_the_following_and_not_the_job(submitted, cluster):
    interrupted = ("timeout", "--foreground", "-s", "INT", "20")
    done = submitted("train.py", "--", "0", before=interrupted, SECONDS_TO_GO="90")
    job = job_of(done)
    assert f"job {job} goes on. Its log: tail -F " in done.stderr
    assert f"to end it: scancel {job}" in done.stderr
    assert cluster.show(job)["JobState"] in ("PENDING", "RUNNING")
    cluster.run("scancel", job)
    assert cluster.wait(job) == "CANCELLED"


def test_a_cancelled_job_has_the_exit_code_of_its_signal(submitted, cluster, tmp_path):
    (tmp_path / "train.py").write_text(
        "import os\nos.system('scancel ' + os.environ['SLURM_JOB_ID'])\nimport time\ntime.sleep(60)"
    )
    done = submitted("train.py")
    assert done.returncode == 143, done.stderr
    assert cluster.show(job_of(done))["JobState"] == "CANCELLED"


def test_the_tasks_of_an_array_are_followed_together(submitted):
    done = submitted("train.py", "--array", "0-1", "-n", "2", "--", "0")
    assert done.returncode == 0, told_by(done)
    lines = done.stdout.splitlines()
    assert sorted(line for line in lines if "nodes" in line)[0].startswith("[0] nodes n")
    assert sorted(line for line in lines if "nodes" in line)[1].startswith("[1] nodes n")


def test_what_sbatch_refuses_is_said_and_nothing_is_left(submitted, tmp_path):
    done = submitted("train.py", "--partition", "nowhere")
    assert done.returncode == 2
    assert "sbatch says: sbatch: error: invalid partition specified: nowhere" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
