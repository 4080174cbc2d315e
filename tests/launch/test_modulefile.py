"""Modulefiles: what `hpcdist module` prints, loaded by the real Lmod and Environment Modules.

Both come from Debian's packages, unpacked to a folder that a namespace of its own lays over /usr:
nothing is installed on this machine.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

import hpcdist as dist
from hpcdist.errors import UsageError
from hpcdist.launch.cli import main
from hpcdist.launch.modulefile import find_installation

ROOT = Path(__file__).parents[2]
TCL = ("tcl8.6", "libtcl8.6")
LUA = ("lua5.3", "lua-filesystem", "lua-json", "lua-lpeg", "lua-posix", "lua-term", "lua-bit32")
PACKAGES = {"Lmod": ("lmod", "tcl", *TCL, *LUA), "Modules": ("environment-modules", *TCL)}
STARTS = {"Lmod": "/usr/share/lmod/lmod/init/bash", "Modules": "/usr/share/modules/init/bash"}
OVER_USR = 'mount -t overlay overlay -o "lowerdir=$0/usr:/usr" /usr && exec "$@"'


def run(*command, **options):
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, **options
    )


def unpacked(packages, folder):
    """Return a folder with what Debian's packages contain; skip where they cannot be had."""
    folder.chmod(0o777)
    try:
        got = run("apt-get", "download", *packages, cwd=folder)
        if got.returncode and os.getuid() == 0:
            run("apt-get", "update")
            got = run("apt-get", "download", *packages, cwd=folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no packages of Debian: {error}")
    if got.returncode:
        pytest.skip(f"no packages of Debian: {got.stderr.strip().splitlines()[-1]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True)
    return folder / "root"


class Tool:
    """Runs shell lines in which `module` is that of a tool."""

    def __init__(self, name, root):
        self.name, self._root = name, root
        tried = self.shell("true")
        if tried.returncode:
            pytest.skip(f"nothing can be laid over /usr here: {tried.stderr.strip()}")

    def shell(self, lines):
        foreign = ("PYTHONPATH", "HPCDIST_TUNING", "SLURM_MPI_TYPE", "VIRTUAL_ENV", "MODULEPATH")
        environ = {name: value for name, value in os.environ.items() if name not in foreign}
        private = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
        script = f". {STARTS[self.name]}\n{lines}"
        return run(
            *private, "sh", "-c", OVER_USR, str(self._root), "bash", "-c", script, env=environ
        )


@pytest.fixture(scope="module", params=PACKAGES)
def tool(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return Tool(request.param, unpacked(PACKAGES[request.param], folder))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """Return a virtual environment in which hpcdist is installed, as far as a module can see."""
    folder = tmp_path_factory.mktemp("apps") / "hpcdist" / "1.2.3"
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "hpcdist-1.2.3.dist-info").mkdir()
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "hpcdist.pth").write_text("\n".join([str(ROOT), *others]))
    return folder


def modulefile(*options):
    done = CliRunner().invoke(main, ["module", *map(str, options)])
    assert done.exit_code == 0, done.output
    return done.output


def put(tmp_path, name, text):
    """Write a modulefile for everybody: for root, Lmod finds no other."""
    folder = tmp_path / "modulefiles"
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o755)
    return folder


ASK = """python - <<'END'
import json, os, sys, hpcdist
names = ("VIRTUAL_ENV", "SLURM_MPI_TYPE", "HPCDIST_TUNING", "PATH")
print(json.dumps([sys.prefix, hpcdist.__version__, {n: os.environ.get(n) for n in names}]))
END
"""


def test_a_module_brings_the_installation_and_takes_it_away(tool, prefix, tmp_path):
    tuning = tmp_path / "site.json"
    tuning.write_text("{}")
    kind = [] if tool.name == "Lmod" else ["--tcl"]
    text = modulefile("--prefix", prefix, "--mpi", "pmix", "--tuning", tuning, *kind)
    folder = put(tmp_path, "hpcdist/1.2.3" + (".lua" if tool.name == "Lmod" else ""), text)
    gone = 'echo "$VIRTUAL_ENV|$SLURM_MPI_TYPE|$HPCDIST_TUNING|$(command -v hpcdist)"'
    done = tool.shell(
        f"module use {folder}; module load hpcdist\n{ASK}module unload hpcdist; {gone}"
    )
    assert done.returncode == 0, done.stderr
    found, after = done.stdout.splitlines()
    where, version, variables = json.loads(found)
    assert (where, version) == (str(prefix), dist.__version__)
    assert variables["PATH"].startswith(f"{prefix}/bin:")
    del variables["PATH"]
    assert variables == {
        "VIRTUAL_ENV": str(prefix), "SLURM_MPI_TYPE": "pmix", "HPCDIST_TUNING": str(tuning)
    }  # fmt: skip
    assert after.startswith("|||")
    assert str(prefix) not in after


def test_a_module_loads_what_it_needs(tool, prefix, tmp_path):
    put(tmp_path, "openmpi/5.0", "#%Module1.0\nsetenv SITE_MPI there\n")
    text = modulefile("--prefix", prefix, "--tcl", "--needs", "openmpi/5.0")
    folder = put(tmp_path, "hpcdist/1.2.3", text)
    if tool.name == "Lmod":
        put(tmp_path, "hpcdist/2.lua", modulefile("--prefix", prefix, "--needs", "openmpi/5.0"))
    for version in ["1.2.3", "2"][: 1 + (tool.name == "Lmod")]:
        done = tool.shell(f"module use {folder}; module load hpcdist/{version}; echo $SITE_MPI")
        assert done.stdout == "there\n", done.stderr


def test_a_module_whose_installation_is_gone_says_so(tool, prefix, tmp_path):
    kind, name = ([], "hpcdist/1.lua") if tool.name == "Lmod" else (["--tcl"], "hpcdist/1")
    text = modulefile("--prefix", prefix, *kind).replace(str(prefix), "/gone/hpcdist")
    folder = put(tmp_path, name, text)
    done = tool.shell(f"module use {folder}; module load hpcdist; echo $VIRTUAL_ENV")
    assert "/gone/hpcdist is not there" in done.stderr
    assert done.stdout.strip() == ""


def test_help_and_whatis_tell_what_it_is(tool, prefix, tmp_path):
    folder = put(tmp_path, "site-hpcdist/7", modulefile(
        "--prefix", prefix, "--tcl", "--name", "site-hpcdist", "--version", "7"))  # fmt: skip
    done = tool.shell(f"module use {folder}; module whatis site-hpcdist; module help site-hpcdist")
    told = done.stdout + done.stderr
    assert "site-hpcdist 7: MPI collectives" in told
    assert "`hpcdist doctor` checks that all is well." in told


# ---- what it finds and what it refuses


def test_without_a_virtual_environment_python_is_told_where_the_packages_are(tmp_path):
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "hpcdist-0.9.dist-info").mkdir(parents=True)
    place = find_installation(tmp_path)
    assert (place.version, place.is_venv) == ("0.9", False)
    assert f'prepend_path("PYTHONPATH", "{packages}")' in modulefile("--prefix", tmp_path)
    assert "VIRTUAL_ENV" not in modulefile("--prefix", tmp_path, "--tcl")


def test_an_empty_folder_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match=r"there is no hpcdist in .*: install it there, by"):
        find_installation(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--name", "a b"], "'a b' cannot stand in a modulefile"),
        (["--version", "1;exit"], "cannot stand in a modulefile"),
        (["--version", "1\nos.execute('id')"], "cannot stand in a modulefile"),
        (["--name", "a\u2028b"], "cannot stand in a modulefile"),
        (["--mpi", "pmix\n"], "cannot stand in a modulefile"),
        (["--needs", "-f"], "'-f' cannot stand in a modulefile"),
        (["--needs", "$HOME"], "cannot stand in a modulefile"),
        (["--tuning", "/nowhere.json"], "there is no tuning file /nowhere.json"),
    ],
)
def test_what_would_break_a_modulefile_is_refused(prefix, options, said):
    done = CliRunner().invoke(main, ["module", "--prefix", str(prefix), *options])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_version_that_would_break_a_modulefile_is_refused_where_it_was_found(tmp_path):
    packages = tmp_path / "lib" / "python3.12" / "site-packages"
    (packages / "hpcdist-0.9]]) os.exit(1)\n.dist-info").mkdir(parents=True)
    words = ["module", "--prefix", str(tmp_path), "--version", "1"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2
    assert "cannot stand in a modulefile" in " ".join(done.output.split())
