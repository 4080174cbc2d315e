"""Every example in the pages and the docstrings runs, and every call they name exists."""

import ast
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys

import click
import pytest
from docs_pages import PAGES, ROOT, blocks, examples, run_page, spans

import hpcdist as dist
from hpcdist.launch.cli import run
from hpcdist.launch.environment import inherited
from hpcdist.launch.launchers import find_site

WITH_EXAMPLES = [page for page in PAGES if examples(page)]
SCRIPTS = [each for page in PAGES for each in examples(page) if each.is_script]
HAS_TORCH, HAS_JAX = (importlib.util.find_spec(each) is not None for each in ("torch", "jax"))
OF_TORCH = re.compile(r"^(?:from|import) torch|^ +(?:>>>|\.\.\.) .*\btorch\b|^ +torch\.Size", re.M)
DOCUMENTED = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "hpcdist").rglob("*.py"))
    if re.search(r"^ +>>> ", path.read_text(), re.M)
    if HAS_TORCH or not (OF_TORCH.search(path.read_text()) or "torch" in path.parts)
    if HAS_JAX or "jax" not in path.parts
]
LIMIT_S = 300


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Run all pages and docstrings on one rank; say what failed, by name."""
    results = tmp_path_factory.mktemp("alone") / "results"
    return run_pages([], "alone", results, *DOCUMENTED)


@pytest.fixture(scope="module")
def under_mpi(tmp_path_factory):
    """Run all pages on two ranks; say what failed, by name."""
    if find_site(os.environ).mpiexec is None:
        pytest.skip("there is no mpiexec that fits the MPI library")
    results = tmp_path_factory.mktemp("mpi") / "results"
    launcher = ["-m", "hpcdist", "run", "-n", "2", "--launcher", "mpiexec"]
    return run_pages(launcher, "mpi", results)


def run_pages(launcher, way, results, *modules):
    script = str(ROOT / "tests/docs/run_pages.py")
    done = python(*launcher, script, way, str(results), *modules)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    return {"the job": done.stdout + done.stderr, **dict(found)}


def python(*arguments):
    left_out = inherited(os.environ, here=True)
    environ = {name: value for name, value in os.environ.items() if name not in left_out}
    path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environ, "PYTHONPATH": path, "HPCDIST_TIMEOUT_S": "20"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def failure(found, name):
    return found.get(name, f"it was not reached:\n{found['the job']}")


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_the_examples_of_a_page_run_on_one_rank(alone, page):
    assert failure(alone, page) == ""


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_the_examples_of_a_page_run_on_three_simulated_ranks(page):
    dist.simulate(3, run_page, page, "simulated", timeout=20)


@pytest.mark.thorough
@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_the_examples_of_a_page_run_on_two_ranks_of_mpi(under_mpi, page):
    assert failure(under_mpi, page) == ""


@pytest.mark.parametrize("module", DOCUMENTED)
def test_the_examples_in_docstrings_say_the_truth(alone, module):
    assert failure(alone, module) == ""


@pytest.mark.parametrize("example", SCRIPTS, ids=str)
def test_an_example_that_is_a_program_runs(example, tmp_path):
    if find_site(os.environ).mpiexec is None:
        pytest.skip("there is no mpiexec that fits the MPI library")
    if example.needs:
        pytest.importorskip(example.needs)
    script = tmp_path / "example.py"
    script.write_text(example.code)
    done = python(str(script))
    assert done.returncode == 0, done.stderr


# ---- commands


def commands():
    return [
        line.removeprefix("$ ")
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


@pytest.mark.parametrize("command", [each for each in commands() if "hpcdist run" in each])
def test_hpcdist_run_understands_the_options(command):
    try:
        context = run.make_context("hpcdist run", shlex.split(command)[2:])
    except click.UsageError as error:
        pytest.fail(f"{command}: {error}")
    assert context.params["program"]


def test_the_options_in_the_table_are_those_of_hpcdist_run():
    told = set(re.findall(r"--?\w[\w-]*", " ".join(spans("docs/launching.md"))))
    options = [option for option in run.params if isinstance(option, click.Option)]
    shown = [option for option in options if not option.hidden]
    assert [option.opts for option in shown if not told & {*option.opts}] == []


def test_every_make_target_exists():
    rules = (ROOT / "Makefile").read_text()
    named = {span for page in PAGES for span in spans(page)} | set(commands())
    targets = {each.split()[1] for each in named if re.fullmatch(r"make \w+", each)}
    assert targets
    assert [target for target in targets if f"\n{target}:" not in rules] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_file_named_exists(page):
    named = [span for span in spans(page) if re.fullmatch(r"[\w*.]+(/[\w*.]+)+(\.py|\.sh)?", span)]
    named += [word for command in commands() for word in command.split()]
    ours = {path.name for base in (ROOT, ROOT / "hpcdist") for path in base.iterdir()}
    paths = [path for path in named if "/" in path and path.split("/")[0] in ours]
    lost = [
        path
        for path in paths
        if not list(ROOT.glob(path)) and not list((ROOT / "hpcdist").glob(path))
    ]
    assert lost == []


# ---- calls named in the text


def calls_in_text():
    """Give the calls of hpcdist in backticks: all of `dist.`, and bare ones outside tables of
    what other libraries write.
    """
    for page in PAGES:
        for span in spans(page):
            try:
                tree = ast.parse(span, mode="eval")
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                bare = not page.startswith("docs/coming-from") and hasattr(dist, name)
                plain = all(map(str.isidentifier, name.split(".")))
                if (name.startswith("dist.") or bare) and plain:
                    yield pytest.param(node, name.removeprefix("dist."), id=f"{page} {span}")


@pytest.mark.parametrize(("call", "name"), list(calls_in_text()))
def test_a_call_in_the_text_fits_the_function(call, name):
    function = dist
    for part in name.split("."):
        function = getattr(function, part)
    if any(isinstance(each, ast.Constant) and each.value is ... for each in call.args):
        return  # "f(...)" says nothing about the arguments
    inspect.signature(function).bind(*call.args, **{each.arg: each for each in call.keywords})


def test_every_attribute_of_dist_in_the_text_exists():
    named = {
        name
        for page in PAGES
        for span in spans(page)
        for name in re.findall(r"\bdist\.([A-Za-z_]\w*)", span)
    }
    assert [name for name in sorted(named) if not hasattr(dist, name)] == []
