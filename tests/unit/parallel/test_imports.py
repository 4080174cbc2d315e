"""Modules of one package import each other one way: also lazily, for types, and by name."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hpcdist

PACKAGE = Path(hpcdist.__file__).parent


def module_of(path):
    parts = ("hpcdist", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def imports_of(path, *, by_name):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{each.name}" for each in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif by_name and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^hpcdist\.[\w.]+", node.value)


@pytest.mark.parametrize(
    ("folder", "by_name"), [("arrays", True), ("optim", True), ("parallel", False)]
)
def test_no_two_modules_need_each_other(folder, by_name):
    paths = {module_of(path): path for path in (PACKAGE / folder).rglob("*.py")}
    graph = {
        module: {
            each
            for each in imports_of(path, by_name=by_name)
            if each in paths and each != module and not module.startswith(f"{each}.")
        }
        for module, path in paths.items()
        if path.name != "__init__.py"
    }
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError, which names them
