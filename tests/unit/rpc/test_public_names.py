"""`hpcdist.rpc` has Paddle's names with Paddle's arguments, and all its names are documented."""

import inspect
from pathlib import Path

import pytest

from hpcdist import rpc

PADDLE = {
    "init_rpc": ("name", "rank", "world_size", "master_endpoint"),
    "rpc_sync": ("to", "fn", "args", "kwargs", "timeout"),
    "rpc_async": ("to", "fn", "args", "kwargs", "timeout"),
    "shutdown": (),
    "get_worker_info": ("name",),
    "get_all_worker_infos": (),
    "get_current_worker_info": (),
}
BEYOND = {
    "Executor",
    "Future",
    "Remote",
    "RemoteMethod",
    "Stats",
    "WorkerInfo",
    "broadcast",
    "inline",
    "remote",
    "serve",
    "stats",
}
REFERENCE = Path(__file__).parents[3] / "docs/reference/rpc.md"


def public():
    return {
        name
        for name, value in vars(rpc).items()
        if name[0] != "_"
        and getattr(value, "__module__", "").startswith("hpcdist.rpc")
        and name != "require_agent"
    }


def test_the_names_are_these():
    assert public() == {*PADDLE, *BEYOND}


@pytest.mark.parametrize("name", PADDLE)
def test_names_of_paddle_have_its_arguments_in_its_order(name):
    parameters = inspect.signature(getattr(rpc, name)).parameters.values()
    positional = [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]
    assert tuple(positional[: len(PADDLE[name])]) == PADDLE[name]
    required = [each.name for each in parameters if each.default is each.empty]
    assert {*required} <= {"to", "fn"}


@pytest.mark.parametrize("name", sorted({*PADDLE, *BEYOND}))
def test_each_name_has_a_docstring_and_its_place_in_the_reference(name):
    assert getattr(rpc, name).__doc__
    told = {f"hpcdist.rpc.{name}", f"{getattr(rpc, name).__module__}.{name}"}
    assert sum(word in told for word in REFERENCE.read_text().split()) == 1


def test_an_info_has_the_fields_of_paddle():
    assert rpc.WorkerInfo._fields == ("name", "rank", "ip", "port")
