"""The batch scripts of `slurm/` do what they say, submitted as they are to a real Slurm."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest
from private_slurm import ROOT

import hpcdist as dist

TEMPLATES = sorted((ROOT / "slurm").glob("*.sbatch"))
RANKS = """
import os, sys
import numpy as np
import hpcdist as dist

world = dist.init_parallel_env()
sizes = []
dist.all_gather_object(sizes, os.environ["SLURMD_NODENAME"])
gpus = []
dist.all_gather_object(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
if world.rank == 0:
    print(*sizes)
    print(*sys.argv[1:])
    print(*gpus)
"""


@pytest.fixture
def ranks(tmp_path):
    """Return a program whose rank 0 prints the nodes of all ranks, its arguments, their GPUs."""
    program = tmp_path / "ranks.py"
    program.write_text(RANKS)
    return program


@pytest.fixture
def submitted(cluster, tmp_path):
    """Submit a template, wait for its end, and return its state and its log."""

    def submit(template, *arguments, options=(), mpi=None, timeout=80):
        environ = {**mpi.environ, "SLURM_MPI_TYPE": mpi.kind} if mpi else {}
        environ["PATH"] = f"{Path(sys.executable).parent}:{cluster.environ['PATH']}"
        script = ROOT / "slurm" / f"{template}.sbatch"
        where = (f"--chdir={tmp_path}", f"--output={tmp_path}/%x-%j.out", "--cpus-per-task=1")
        job = cluster.sbatch(*where, *options, script, *arguments, environ=environ)
        state = cluster.wait(job, timeout)
        return (
            state,
            job,
            "".join(path.read_text() for path in sorted(tmp_path.glob(f"*-{job}.out"))),
        )

    return submit


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_is_a_script_that_says_how_to_submit_it(template):
    text = template.read_text()
    assert subprocess.run(["bash", "-n", template]).returncode == 0
    assert f"sbatch slurm/{template.name} " in text or f" slurm/{template.name} " in text
    assert "#SBATCH --time=" in text
    assert f"`{template.name}`" in (ROOT / "slurm/README.md").read_text()


def test_cpu(submitted, ranks, mpi):
    state, _, log = submitted("cpu", "python", ranks, "--epochs", "3", mpi=mpi)
    assert state == "COMPLETED", log
    assert log.splitlines()[-3:-1] == ["n1 n1 n1 n1", "--epochs 3"]


def test_a_template_hands_on_the_exit_code(submitted):
    state, _, _ = submitted("cpu", "false", options=["--ntasks=1"])
    assert state == "FAILED"


def test_multi_node(submitted, ranks, mpi, tmp_path):
    options = ["--ntasks-per-node=2"]
    state, job, log = submitted("multi-node", "python", ranks, options=options, mpi=mpi)
    assert state == "COMPLETED", log
    assert "n1 n1 n2 n2" in log.splitlines()
    report = (tmp_path / f"multi-node-{job}.doctor").read_text()
    assert "4 on 2 nodes" in report
    assert "bandwidth between nodes" in report


def test_multi_node_starts_nothing_where_something_is_wrong(submitted, ranks, monkeypatch, cluster):
    monkeypatch.setitem(cluster.environ, "HPCDIST_KERNEL", "sometimes")
    state, _, log = submitted("multi-node", "python", ranks, options=["--ntasks-per-node=1"])
    assert state == "FAILED"
    assert "HPCDIST_KERNEL='sometimes' is none of" in " ".join(log.split())
    assert "n1 n2" not in log.splitlines()


def test_gpu_per_task(submitted, ranks, mpi):
    state, _, log = submitted("gpu-per-task", "python", ranks, options=["--nodes=2"], mpi=mpi)
    assert state == "COMPLETED", log
    nodes, _, gpus = log.splitlines()[-3:]
    assert nodes == "n1 n1 n1 n1 n2 n2 n2 n2"
    assert gpus == "0 1 2 3 0 1 2 3"


def test_array(submitted, ranks, tmp_path, cluster):
    (tmp_path / "runs.txt").write_text("--lr 0.1\n--lr 0.2 --epochs 3\n")
    options = ["--array=1-2", f"--output={tmp_path}/%x-%A_%a.out"]
    _, job, _ = submitted("array", "runs.txt", "python", ranks, options=options)
    cluster.wait(f"{job}_2")
    logs = [(tmp_path / f"array-{job}_{task}.out").read_text().splitlines() for task in (1, 2)]
    assert {log[-3] for log in logs} <= {"n1 n1", "n2 n2"}
    assert [log[-2] for log in logs] == ["--lr 0.1", "--lr 0.2 --epochs 3"]


def test_array_says_which_line_is_missing(submitted, tmp_path):
    (tmp_path / "runs.txt").write_text("--lr 0.1\n")
    options = ["--array=5", f"--output={tmp_path}/five-%A.out"]
    state, job, _ = submitted("array", "runs.txt", "true", options=options)
    assert state == "FAILED"
    assert "runs.txt has no line 5" in (tmp_path / f"five-{job}.out").read_text()


def test_bench(submitted, tmp_path):
    arguments = ["all_reduce", "--quick", "--sizes", "1K"]
    state, job, log = submitted("bench", *arguments, options=["--ntasks-per-node=1"])
    assert state == "COMPLETED", log
    assert "all_reduce" in log
    saved = json.loads((tmp_path / f"bench-{job}.json").read_text())
    assert {row["case"] for row in saved["rows"]} == {"all_reduce"}


WHERE = """
import sys
import mpi4py, numpy
import hpcdist as dist

world = dist.init_parallel_env()
found = []
files = [module.__file__ for module in (mpi4py, numpy, dist)]
dist.all_gather_object(found, (sys.prefix, files))
if world.rank == 0:
    for prefix, files in found:
        print(prefix, *files)
"""


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """Return a virtual environment with what hpcdist needs, as one file."""
    folder = tmp_path_factory.mktemp("stage") / "env"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    shutil.copytree(
        Path(dist.__file__).parent, packages / "hpcdist", ignore=shutil.ignore_patterns("*.pyc")
    )
    here = Path(sysconfig.get_path("purelib"))
    for name in ("mpi4py", "numpy", "numpy.libs", "ml_dtypes", "click", "rich", "xxhash"):
        for found in [here / name, *here.glob(f"{name.replace('.', '_')}-*.dist-info")]:
            if found.exists():
                shutil.copytree(found, packages / found.name)
    with tarfile.open(folder.parent / "env.tar", "w") as file:
        file.add(folder, ".")
    return folder.parent / "env.tar"


def test_stage_lets_all_ranks_import_from_their_node(submitted, archive, tmp_path, mpi, cluster):
    (tmp_path / "where.py").write_text(WHERE)
    library = Path(mpi.mpiexec).parents[1] / "lib"
    cluster_wide = {**mpi.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": ""}
    staged = mpi._replace(environ=cluster_wide)
    options = ["--ntasks-per-node=2"]
    state, job, log = submitted("stage", archive, "where.py", options=options, mpi=staged)
    assert state == "COMPLETED", log
    lines = log.splitlines()[-4:]
    assert len(lines) == 4
    for line in lines:
        assert all(part.startswith(f"/dev/shm/hpcdist-{job}") for part in line.split()), line
    left = cluster.run("srun", "-N2", "sh", "-c", "ls /dev/shm")
    assert f"hpcdist-{job}" not in left.stdout


@pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed")
def test_apptainer(submitted, ranks, tmp_path):
    image = tmp_path / "hpcdist.sif"
    definition = ROOT / "packaging/apptainer/hpcdist.def"
    built = subprocess.run(["apptainer", "build", image, definition], cwd=ROOT)
    assert built.returncode == 0
    state, _, log = submitted(
        "apptainer", image, "python", ranks, options=["--ntasks-per-node=2"], timeout=120
    )
    assert state == "COMPLETED", log
    assert log.splitlines()[-3] == "n1 n1 n2 n2"
