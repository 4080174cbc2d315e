"""Wheels and archives are complete; Spack, EasyBuild and Apptainer agree with pyproject.toml."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from datetime import date
from email import message_from_bytes
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpcdist as dist
from hpcdist.compiled import PARTS
from hpcdist.transport.shm.kernel import compiled

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "packaging"
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


def versions_in(tree):
    """Return the script that knows the places of the version, for a copy of them."""
    spec = spec_from_file_location("versions", ROOT / "packaging/versions.py")
    versions = module_from_spec(spec)
    spec.loader.exec_module(versions)
    versions.ROOT = tree
    return versions


def test_the_recipes_have_the_version_of_the_project():
    assert set(versions_in(ROOT).found().values()) == {dist.__version__}
    assert list(calls("version")) == [(dist.__version__,)]
    assert easyconfig()["version"] == dist.__version__


def test_a_new_version_is_written_everywhere(tmp_path):
    versions = versions_in(ROOT)
    for place in versions.PLACES:
        path = versions.file_of(place).relative_to(ROOT)
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    copied = versions_in(tmp_path)
    copied.write("7.8.9rc1")
    assert set(copied.found().values()) == {"7.8.9rc1"}
    assert "7.8.9rc1" in copied.file_of("packaging/easybuild/hpcdist-*.eb").name
    with pytest.raises(SystemExit, match="a version is like"):
        copied.write("new")


def test_a_release_gives_the_unreleased_changes_its_version_and_day(tmp_path):
    versions = versions_in(tmp_path)
    path = tmp_path / "CHANGELOG.md"
    path.write_text("# Changelog\n\n## [Unreleased]\n\n- New.\n\n## [0.1.0] - 2026-12-01\n")
    for _ in range(2):  # again, and nothing changes
        versions.date_changes("0.2.0", date(2027, 1, 2))
        headings = [line for line in path.read_text().splitlines() if line.startswith("## ")]
        assert headings == ["## [Unreleased]", "## [0.2.0] - 2027-01-02", "## [0.1.0] - 2026-12-01"]
    assert "2027-01-02\n\n- New." in path.read_text()
    assert versions_in(ROOT).UNRELEASED in (ROOT / "CHANGELOG.md").read_text()


def test_conda_forge_has_the_dependencies_of_the_project():
    recipe = (RECIPES / "conda-forge/recipe.yaml").read_text()
    run = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    told = dict(re.findall(r"- (\S+) >=(\S+)$", run, re.M))
    assert told.pop("python") == field("requires-python").removeprefix(">=")
    names = {"xxhash": "python-xxhash"}
    assert told == {names.get(name, name): low for name, low in dependencies().items()}
    assert re.search(r"- setuptools >=([\d.]+)", recipe)[1] in PROJECT


@pytest.mark.parametrize(
    "path",
    [
        path.relative_to(ROOT)
        for pattern in (".github/**/*.yml", ".gitlab-ci.yml", "CITATION.cff", "packaging/*/*.yaml")
        for path in ROOT.glob(pattern)
    ],
    ids=str,
)
def test_what_forges_read_is_yaml(path):
    yaml = pytest.importorskip("yaml")
    assert isinstance(yaml.safe_load((ROOT / path).read_text()), dict)


def test_forges_run_what_runs_here():
    for path in (".github/workflows/ci.yml", ".gitlab-ci.yml"):
        if (ROOT / path).exists():  # not in the archive of the sources
            assert ".ci/run" in (ROOT / path).read_text()


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
    needed = {"hpcdist", "pyproject.toml", "README.md", "LICENSE", "setup.py", "setup.cfg"}
    assert {source for source, _ in copied} == needed
    assert '"/opt/src[{{ extras }}]"' in sections["post"]
    extras = sections["arguments"].split("=")[1].strip()
    assert re.search(rf"^{extras} = ", PROJECT, re.M)
    assert "hpcdist doctor" in sections["test"]


def test_the_command_is_where_the_recipes_look_for_it():
    assert re.search(r'^hpcdist = "hpcdist.launch.cli:main"$', PROJECT, re.M)
    assert "bin/hpcdist" in easyconfig()["sanity_check_paths"]["files"]


# ---- wheels and the archive of the sources


def build(what, tree, into, compiler=None):
    """Let setuptools build a "wheel" or an "sdist" of a tree; return the file."""
    script = f"from setuptools import build_meta as m; print('\\n' + m.build_{what}({str(into)!r}))"
    environ = {**os.environ, **({"CC": compiler} if compiler else {})}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tree, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a tree of the sources, its archive, what is in that, and wheels of both."""
    folder = tmp_path_factory.mktemp("built")
    ignored = shutil.ignore_patterns(
        ".*", "build", "dist", "site", "results", "__pycache__", "*.egg-info", "*.so"
    )
    tree = shutil.copytree(ROOT, folder / "tree", ignore=ignored)
    sdist = build("sdist", tree, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    (folder / "unpacked").mkdir()
    compiled = build("wheel", tree, folder)
    for source in (tree / "hpcdist").rglob("*.c"):
        source.touch()  # what has been compiled is old now
    return SimpleNamespace(
        tree=tree,
        unpacked=unpacked,
        compiled=compiled,
        pure=build("wheel", tree, folder, "/bin/false"),
        of_sdist=build("wheel", unpacked, folder / "unpacked", "/bin/false"),
    )


def members(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def metadata(wheel, name):
    """Return the fields of METADATA or WHEEL."""
    return message_from_bytes(members(wheel)[f"hpcdist-{dist.__version__}.dist-info/{name}"])


@pytest.mark.thorough
def test_a_wheel_without_the_kernel_is_for_every_python_and_system(built):
    assert built.pure.name == f"hpcdist-{dist.__version__}-py3-none-any.whl"
    assert metadata(built.pure, "WHEEL")["Root-Is-Purelib"] == "true"
    assert not [name for name in members(built.pure) if name.endswith((".so", ".c", ".h"))]


@pytest.mark.thorough
@pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")
def test_a_wheel_with_the_kernel_is_for_this_system_and_the_pythons_that_can_load_it(built):
    tag = metadata(built.compiled, "WHEEL")["Tag"]
    names = [name for name in members(built.compiled) if name.endswith((".so", ".c"))]
    stable = sys.version_info >= (3, 11) and not sysconfig.get_config_var("Py_GIL_DISABLED")
    assert ("-abi3-" in tag) is stable
    assert ("-any" in tag) is False
    assert {name.partition(".")[0].replace("/", ".") for name in names} == set(PARTS)
    assert all((".abi3.so" in name) is stable for name in names)
    assert set(members(built.compiled)) - set(names) == set(members(built.pure))


@pytest.mark.thorough
def test_a_wheel_of_the_archive_equals_one_of_the_tree(built):
    assert members(built.of_sdist) == members(built.pure)


@pytest.mark.thorough
def test_the_archive_has_all_sources(built):
    def files(tree):
        left = ("build", f"{field('name')}.egg-info")
        return {
            str(path.relative_to(tree))
            for path in tree.rglob("*")
            if path.is_file() and path.relative_to(tree).parts[0] not in left
        }

    assert files(built.unpacked) - files(built.tree) == {"PKG-INFO"}
    assert files(built.tree) <= files(built.unpacked)


@pytest.mark.thorough
def test_a_wheel_says_where_the_project_is(built):
    urls = dict(
        each.split(", ") for each in metadata(built.pure, "METADATA").get_all("Project-URL")
    )
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(urls)
    assert all(url.startswith("https://") and "example" not in url for url in urls.values())


def test_the_classifiers_have_the_pythons_that_are_tested():
    told = re.findall(r"Python :: 3\.(\d+)", PROJECT)
    (tested,) = re.findall(r"^envlist = py{([\d,]+)}", (ROOT / "setup.cfg").read_text(), re.M)
    assert [f"3{minor}" for minor in told] == tested.split(",")
    assert f"3.{told[0]}" == field("requires-python").removeprefix(">=")


def test_a_python_without_the_gil_is_refused_with_the_remedy():
    script = "import sys; sys._is_gil_enabled = lambda: False; import hpcdist"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: hpcdist relies on the global interpreter lock" in done.stderr
    assert "PYTHON_GIL=1" in done.stderr
