"""Install what lies in `dist` into clean environments of the Pythons that are here, and try it.

    python packaging/clean_installs.py                  every Python that pyproject.toml names
    python packaging/clean_installs.py 3.11 3.13        these

Each trial of the table is an environment of its own. It is tried without an MPI, on one rank, and
with an MPI from PyPI, on two. Dependencies come from the index, the oldest as `uv` finds them:
those that pyproject.toml allows and that have a wheel for that Python.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SMOKE = ROOT / "packaging/smoke.py"
ASK = "import sys; print('3.%d' % sys.version_info[1])"
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_osc": "^ucx",
}


class Trial(NamedTuple):
    """A file of a release, in words and as a pattern, and what it is installed with."""

    what: str
    pattern: str
    kernel: bool
    oldest: bool
    mpi: str


TRIALS = (
    Trial("wheel", "*-{tag}-*linux*.whl", kernel=True, oldest=False, mpi="openmpi"),
    Trial("wheel without a kernel", "*-none-any.whl", kernel=False, oldest=True, mpi="openmpi"),
    Trial("archive", "*.tar.gz", kernel=True, oldest=False, mpi="mpich"),
)


def tag_of(version):
    """Return the tag of the wheel with a kernel for a Python; one serves from 3.11 on."""
    return "cp310-cp310" if version == "3.10" else "cp311-abi3"


def file_for(trial, version):
    """Return the file of `dist` that a trial is about; None if it has not been built."""
    found = list(DIST.glob(trial.pattern.format(tag=tag_of(version))))
    if len(found) > 1:
        raise SystemExit(f"several files of one kind are in {DIST}: {found}")
    return found[0] if found else None


def supported():
    """Return the Pythons that pyproject.toml names."""
    return re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def pythons():
    """Return an interpreter for each version that is here, by its version."""
    candidates = [shutil.which(f"python{version}") for version in supported()]
    candidates += [str(path) for path in Path.home().glob(".pyenv/versions/*/bin/python3")]
    candidates += [str(path) for path in Path.home().glob(".local/share/uv/python/*/bin/python3")]
    found = {}
    for each in [sys.executable, *filter(None, candidates)]:
        told = subprocess.run([each, "-c", ASK], capture_output=True, text=True, check=False)
        if told.returncode == 0 and told.stdout.strip() in supported():
            found.setdefault(told.stdout.strip(), each)
    return found


def run(*command, cwd):
    """Run a command outside the sources; show what it said if it fails."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**environ, **OPEN_MPI}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def oldest(version, mpi, folder):
    """Return the file of constraints that asks for the oldest dependencies."""
    constraints = folder / "oldest.txt"
    asked = ["--resolution", "lowest-direct", "--only-binary", ":all:", "--extra", mpi]
    run(
        *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", *asked),
        *("--python-version", version, "--output-file", constraints, ROOT / "pyproject.toml"),
        cwd=folder,
    )
    return ["--constraint", constraints]


def install_and_try(trial, file, version, python, folder):
    """Return what the smoke test says without an MPI and with one."""
    run(python, "-m", "venv", folder / "venv", cwd=folder)
    bin_ = folder / "venv/bin"
    pip = [bin_ / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += oldest(version, trial.mpi, folder) if trial.oldest else []
    run(*pip, file, cwd=folder)
    told = run(bin_ / "hpcdist", "--version", cwd=folder)
    assert told.splitlines()[0].endswith(
        run(sys.executable, ROOT / "packaging/versions.py", cwd=folder)
    ), told
    alone = run(bin_ / "python", SMOKE, cwd=folder)
    run(*pip, f"{file}[{trial.mpi}]", cwd=folder)
    run(bin_ / "python", "-m", "pip", "check", cwd=folder)
    two = run(bin_ / "hpcdist", "run", "-n", "2", "--no-label", SMOKE, cwd=folder)
    expected = f"{'with' if trial.kernel else 'without'} the compiled kernel"
    for said in (alone, two):
        assert f", {expected}," in said, f"{file.name}: {said}; expected it {expected}"
    return [alone, two]


def main():
    here = pythons()
    wanted = sys.argv[1:] or supported()
    if not set(wanted) & set(here):
        raise SystemExit("none of these Pythons is here")
    for version in wanted:
        if version not in here:
            print(f"Python {version}: not here", flush=True)
            continue
        for trial in TRIALS:
            file = file_for(trial, version)
            if file is None:
                print(f"Python {version}: no {trial.what} for it in dist", flush=True)
                continue
            with tempfile.TemporaryDirectory() as folder:
                for line in install_and_try(trial, file, version, here[version], Path(folder)):
                    print(f"Python {version}, {trial.what}: {line}", flush=True)


if __name__ == "__main__":
    main()
