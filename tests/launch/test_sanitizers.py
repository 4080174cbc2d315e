"""The compiled parts under the sanitizers of addresses and of undefined behaviour."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.compiled import PARTS
from hpcdist.launch.launchers import find_site
from hpcdist.transport.shm.kernel import compiled

ROOT = Path(__file__).parents[2]
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g"
SUITES = [
    pytest.param("hot", marks=pytest.mark.thorough),
    pytest.param("plan_slots", marks=pytest.mark.thorough),
    pytest.param("mail", marks=pytest.mark.thorough),
    pytest.param("ps", marks=pytest.mark.slow),
    pytest.param("interrupted", marks=pytest.mark.slow),
    pytest.param("attached", marks=pytest.mark.slow),
    pytest.param("shared_arrays", marks=pytest.mark.slow),
]
IN_ONE_PROCESS = [
    pytest.param("transport/shm/test_mail.py", marks=pytest.mark.thorough),
    pytest.param("ps/test_slots.py", marks=pytest.mark.thorough),
    pytest.param("ps/test_rows.py", marks=pytest.mark.thorough),
    pytest.param("ps/test_programs.py", marks=pytest.mark.thorough),
    pytest.param("data/test_multislot.py", marks=pytest.mark.thorough),
    pytest.param("data/test_columns.py", marks=pytest.mark.thorough),
    pytest.param("data/test_order.py", marks=pytest.mark.slow),
    pytest.param("transport/shm", marks=pytest.mark.slow),
    pytest.param("ps", marks=pytest.mark.slow),
]

if compiled is None or find_site(os.environ).family != "openmpi":
    pytest.skip("needs the compiled kernel, and mpiexec of Open MPI", allow_module_level=True)


def library(name):
    """Return a library of the C compiler, which has to be loaded before Python."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"gcc has no {name}")
    return found


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Return the environment in which hpcdist is a copy built with the sanitizers."""
    folder = tmp_path_factory.mktemp("sanitized")
    preloaded = f"{library('libasan.so')} {library('libubsan.so')}"
    shutil.copytree(ROOT / "hpcdist", folder / "hpcdist", ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environ = {**os.environ, "CFLAGS": SANITIZERS, "LDFLAGS": SANITIZERS}
    done = subprocess.run(
        build, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    built = [*(folder / "hpcdist").rglob("*.so")]
    assert len(built) == len(PARTS), done.stdout + done.stderr
    assert all(b"__asan_report" in each.read_bytes() for each in built)
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def said(command, environ):
    """Run tests on the copy, from its folder; return what they said if they failed."""
    where = "import hpcdist; print(hpcdist.__file__)"
    used = subprocess.run(
        [sys.executable, "-P", "-c", where], env=environ, capture_output=True, text=True, check=True
    )
    assert used.stdout.startswith(environ["PYTHONPATH"])
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=400, check=False
    )
    text = done.stdout + done.stderr
    return "" if done.returncode == 0 and "runtime error" not in text else text


@pytest.mark.parametrize("suite", SUITES)
def test_what_ranks_do_through_shared_memory_is_clean(suite, sanitized):
    pytest_of_ranks = [sys.executable, "-P", "-m", "pytest", "-q", "--with-mpi"]
    options = ["-p", "no:cacheprovider", "-m", "not slow and not thorough"]
    found = said(
        ["mpiexec", "-n", "2", *pytest_of_ranks, *options, f"tests/mpi/test_{suite}.py"], sanitized
    )
    assert found == ""


@pytest.mark.parametrize("where", IN_ONE_PROCESS)
def test_what_one_process_does_with_memory_is_clean(where, sanitized):
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    found = said([*command, "-m", "not slow and not thorough", f"tests/unit/{where}"], sanitized)
    assert found == ""
