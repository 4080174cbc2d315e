"""Modules of others that are changed when they are imported."""

import importlib
import importlib.util
import subprocess
import sys

import pytest

from hpcdist.runtime.late_imports import when_imported

NAME = "changed_later"


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)


def doubled(module):
    module.value *= 2


def increased(module):
    module.value += 1


def test_a_module_that_was_looked_for_is_changed_when_it_is_imported(source):
    when_imported(NAME, increased)
    finders = len(sys.meta_path)
    assert importlib.util.find_spec(NAME) is None
    source.write_text("1 / 0")
    importlib.invalidate_caches()
    assert importlib.util.find_spec(NAME).origin == str(source)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(NAME)
    source.write_text("value = 1")
    assert importlib.import_module(NAME).value == 2
    assert len(sys.meta_path) == finders - 1


def test_a_module_is_changed_by_all_that_want_to_in_their_order(source):
    source.write_text("value = 1")
    importlib.invalidate_caches()
    when_imported(NAME, increased)
    when_imported(NAME, doubled)
    module = importlib.import_module(NAME)
    assert module.value == 4
    when_imported(NAME, increased)
    assert module.value == 5


COMPILED = """
import sys
import {first}
import torch
import hpcdist as dist

def program(x):
    y = x * 2
    dist.all_reduce(y)
    out = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(out, y)
    work = dist.broadcast(y, 0, sync_op=False)
    z = x.sin()
    work.wait()
    with dist.together():
        dist.all_reduce(x)
        dist.all_reduce(z)
    return sum(out) + x + y + z

dist.init_parallel_env(backend="local")
torch.testing.assert_close(
    torch.compile(program, backend="eager")(torch.arange(3.0)), program(torch.arange(3.0))
)
assert "hpcdist.torch" not in sys.modules
"""


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["hpcdist", "torch._dynamo"])
def test_compiled_programs_call_hpcdist_without_its_backend_of_torch(first):
    pytest.importorskip("torch")
    program = COMPILED.format(first=first)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
