"""A program starts fast: what it does not use is not imported."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdist as dist

COLLECTIVES = {
    "arrays",
    "boxes",
    "comm",
    "compiled",
    "config",
    "errors",
    "events",
    "integers",
    "lazy",
    "named_tuple",
    "runtime",
    "text",
    "transport",
}
"""The parts of the package that collectives of arrays are made of."""

FOR_FEW = {
    "hpcdist.comm.reduced",
    "hpcdist.transport.device",
    "hpcdist.transport.flight.analysis",
    "hpcdist.transport.mpi",
    "hpcdist.transport.threads",
}


def imported_by(program):
    """Return the modules that a program imports, in a process of its own, beyond NumPy's."""
    script = (
        f"import sys, numpy; known = {{*sys.modules}}\n{program}\nprint(*{{*sys.modules}} - known)"
    )
    argv = [sys.executable, "-W", "ignore", "-c", script]
    return set(subprocess.check_output(argv, text=True).split())


def of_hpcdist(modules):
    return {name for name in modules if name.startswith("hpcdist.")}


def test_importing_hpcdist_imports_what_collectives_of_arrays_need():
    modules = imported_by("import hpcdist")
    assert {name.split(".")[1] for name in of_hpcdist(modules)} == COLLECTIVES
    assert not modules & FOR_FEW
    assert not modules & {"mpi4py", "subprocess", "socket", "hashlib", "traceback"}


def test_the_first_operations_of_a_program_import_nothing():
    program = """
import hpcdist as dist
dist.init_parallel_env(backend="local")
known |= {*sys.modules}
dist.all_reduce(numpy.ones(3))
dist.broadcast(numpy.ones(3), 0)
dist.barrier()
"""
    assert not of_hpcdist(imported_by(program))


def test_the_transport_of_one_node_leaves_out_what_crosses_nodes():
    pytest.importorskip("mpi4py")
    program = """
import mpi4py
mpi4py.rc.initialize = False
import hpcdist.transport.mpi.transport
"""
    modules = imported_by(program)
    assert not any("hierarchical." in name or "flight.analysis" in name for name in modules)


def test_a_package_is_there_when_it_is_asked_for():
    packages = "checkpoint", "data", "fleet", "optim", "parallel"
    asked = "\n".join(f"hpcdist.{name}" for name in packages)
    assert {f"hpcdist.{name}" for name in packages} <= imported_by(f"import hpcdist\n{asked}")


def test_names_of_other_libraries_are_told_by_names_that_are_here():
    with pytest.raises(AttributeError, match=r"no attribute 'bcast'; use broadcast\(x, src\)"):
        _ = dist.bcast
    for name, hint in dist._ELSEWHERE.items():
        first = re.match(r"\w+", hint)[0]
        assert not hasattr(dist, name)
        assert hasattr(dist, first) or first in ("hpcdist", "group", "torch")


def test_what_type_checkers_see_is_what_is_imported_when_it_is_used():
    tree = ast.parse(Path(dist.__file__).read_text())
    blocks = [each for each in tree.body if isinstance(each, ast.If)]
    seen = {
        alias.name: {statement.module, f"{statement.module}.{alias.name}"}
        for block in blocks
        if ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for alias in statement.names
        if alias.asname
    }
    assert {*dist._LAZY} - {*seen} == {"data", "parallel"}
    assert [name for name, modules in seen.items() if dist._LAZY[name] not in modules] == []
