"""A time limit for every test: a dead-lock becomes a traceback of every thread of every rank.

Under pytest-xdist, tests that share what takes seconds to set up stay together.
"""

import faulthandler
import os
import sys

import pytest

LIMIT_S = float(os.environ.get("TEST_LIMIT_S", "240"))
SHARED = {"alone", "built", "killed", "prefix", "under_mpi"}
"""The fixtures of a module that take seconds."""


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
