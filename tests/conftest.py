"""A time limit for every test: a dead-lock becomes a traceback of every thread of every rank.

Under pytest-xdist, tests that share what takes seconds to set up stay together.
"""

import faulthandler
import os
import shutil
import sys
import tempfile

import pytest

LIMIT_S = float(os.environ.get("TEST_LIMIT_S", "240"))
SHARED = {"alone", "built", "killed", "prefix", "under_mpi"}
"""The fixtures of a module that take seconds."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give each rank temporary folders of its own: pytest tidies up what it takes for old ones."""
    if config.getoption("--with-mpi", False) and config.option.basetemp is None:
        config.option.basetemp = folder = tempfile.mkdtemp(prefix="rank-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items):
    for item in items:
        for name in SHARED.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))
