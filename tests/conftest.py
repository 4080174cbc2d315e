"""A time limit for every test: a dead-lock becomes a traceback of every thread of every rank."""

import faulthandler
import os
import sys

import pytest

LIMIT_S = float(os.environ.get("TEST_LIMIT_S", "240"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
