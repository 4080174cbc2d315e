"""The recipes for Spack, EasyBuild and Apptainer agree with pyproject.toml."""

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hpcdist as dist

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "slurm"
SPACK = RECIPES / "spack" / "package.py"
(EASYCONFIG,) = (RECIPES / "easybuild").glob("*.eb")
CONTAINER = RECIPES / "apptainer" / "hpcdist.def"
PROJECT = (ROOT / "pyproject.toml").read_text()
# What EasyBuild calls them, where that is not the name on PyPI.
BUNDLES = {
    "numpy": "SciPy-bundle",
    "click": "Python-bundle-PyPI",
    "rich": "Python-bundle-PyPI",
    "xxhash": "python-xxhash",
}


def field(name):
    return re.search(rf'^{name} = "(.*)"$', PROJECT, re.M)[1]


def dependencies():
    """Return the lowest version of each package that pyproject.toml names."""
    (text,) = re.findall(r"^dependencies = (\[.*?\])$", PROJECT, re.M | re.S)
    return dict(each.split(">=") for each in ast.literal_eval(text))


def calls(name):
    """Return the first arguments, and `when=`, of a Spack recipe's calls of a function."""
    for node in ast.walk(ast.parse(SPACK.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            when = [each.value.value for each in node.keywords if each.arg == "when"]
            yield node.args[0].value, *when


def easyconfig():
    """Return what an easyconfig sets; it is Python."""
    values = {}
    exec(compile(EASYCONFIG.read_text(), EASYCONFIG, "exec"), values)
    return values


def test_the_recipes_have_the_version_of_the_project():
    version = field("version")
    assert dist.__version__ == version
    assert list(calls("version")) == [(version,)]
    assert easyconfig()["version"] == version
    assert f"image.version {version}\n" in CONTAINER.read_text()


def test_spack_has_the_dependencies_of_the_project():
    found = dict(each.rstrip(":").split("@") for each, *when in calls("depends_on")
                 if each.startswith("py-") and not when)  # fmt: skip
    assert found.pop("py-setuptools") == re.search(r"setuptools>=([\d.]+)", PROJECT)[1]
    needed = {f"py-{name.replace('_', '-')}": low for name, low in dependencies().items()}
    assert found == needed
    assert ("python@" + field("requires-python").removeprefix(">=") + ":",) in calls("depends_on")


def test_easybuild_has_the_dependencies_of_the_project():
    told = dict(easyconfig()["dependencies"])
    needed = {BUNDLES.get(name, name): low for name, low in dependencies().items()}
    assert set(told) == {"Python", *needed}
    for name in ("mpi4py", "ml_dtypes", "python-xxhash"):
        assert in_numbers(told[name]) >= in_numbers(needed[name])
    low = field("requires-python").removeprefix(">=")
    assert in_numbers(told["Python"]) >= in_numbers(low)


def in_numbers(version):
    return [int(part) for part in version.split(".")]


def test_an_easyconfig_is_called_after_what_it_builds():
    said = easyconfig()
    toolchain = said["toolchain"]
    name = f"{said['name']}-{said['version']}-{toolchain['name']}-{toolchain['version']}.eb"
    assert EASYCONFIG.name == name


@pytest.mark.skipif(
    find_spec("easybuild") is None or find_spec("easybuild.easyblocks") is None,
    reason="EasyBuild is not installed",
)
def test_easybuild_knows_all_that_the_easyconfig_sets():
    read = f"""
import sys
sys.modules["mpi4py"] = None  # its logger would start MPI
from easybuild.framework.easyconfig.default import DEFAULT_CONFIG
from easybuild.framework.easyconfig.parser import EasyConfigParser
from easybuild.tools.options import set_up_configuration
set_up_configuration(["--allow-use-as-root-and-accept-consequences"], silent=True)
from easybuild.easyblocks.generic.pythonpackage import PythonPackage
found = EasyConfigParser({str(EASYCONFIG)!r}).get_config_dict()
unknown = set(found) - set(DEFAULT_CONFIG) - set(PythonPackage.extra_options())
print(found["name"], found["version"], *unknown)
"""
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["hpcdist", dist.__version__], done.stderr


def test_the_container_copies_what_the_build_needs():
    sections = dict(re.findall(r"^%(\w+)\n((?:    .*\n)+)", CONTAINER.read_text(), re.M))
    copied = [line.split() for line in sections["files"].splitlines()]
    for source, target in copied:
        assert (ROOT / source).exists(), source
        assert target == f"/opt/src/{source}"
    needed = {"hpcdist", "pyproject.toml", field("readme"), "LICENSE", "setup.cfg"}
    assert {source for source, _ in copied} == needed
    assert '"/opt/src[{{ extras }}]"' in sections["post"]
    extras = sections["arguments"].split("=")[1].strip()
    assert re.search(rf"^{extras} = ", PROJECT, re.M)
    assert "hpcdist doctor" in sections["test"]


def test_the_command_is_where_the_recipes_look_for_it():
    assert re.search(r'^hpcdist = "hpcdist.launch.cli:main"$', PROJECT, re.M)
    assert "bin/hpcdist" in easyconfig()["sanity_check_paths"]["files"]
