"""A time limit for every test: a dead-lock becomes a traceback of every thread of every rank.

Under pytest-xdist, tests that share what takes seconds to set up stay in one process.
"""

import faulthandler
import functools
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")  # a busy machine is no failure

RESULTS, STDERR = pytest.StashKey(), pytest.StashKey()
LIMIT_S = float(os.environ.get("TEST_LIMIT_S", "240"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give each rank temporary folders of its own: pytest tidies up what it takes for old ones.

    What tests start, workers included, counts no results.
    """
    config.stash[RESULTS] = os.environ.pop("TEST_RESULTS", None)
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")  # where no test captures what is written
    if config.getoption("--with-mpi", False) and config.option.basetemp is None:
        config.option.basetemp = folder = tempfile.mkdtemp(prefix="rank-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_terminal_summary(terminalreporter):
    """Tell `run.sh` how many tests passed, and which failed."""
    if path := terminalreporter.config.stash[RESULTS]:
        stats = terminalreporter.stats
        lines = [f"{kind} {len(stats.get(kind, []))}" for kind in ("passed", "skipped")]
        named = {"failed": "failed", "error": "failed", "rerun": "again"}
        lines += [
            f"{word} {each.nodeid}" for kind, word in named.items() for each in stats.get(kind, [])
        ]
        with open(path, "a") as results:
            results.writelines(f"{line}\n" for line in lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if item.get_closest_marker("slow") is None:  # those may take an hour
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=item.config.stash[STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def _unheard():
    """Collect what is told of operations that nobody waits for, and would make a program fail."""
    from hpcdist.transport.waiting import unheard

    said, told, say = [], [], unheard._say

    def hear(rank, words):
        said.append(words)
        say(rank, words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unheard, "_say", hear)
        patch.setattr(unheard, "_fail_at_exit", lambda: told.append(said[-1]))
        yield told


@pytest.fixture(autouse=True)
def _all_errors_are_heard(_unheard):
    """Fail a test that leaves the error of an operation to nobody."""
    yield
    told, _unheard[:] = [*_unheard], []
    assert not told


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Let tests of a file that has fixtures of a module run in one process, the others anywhere.

    The groups of pytest-xdist 3.8 would do that by a mark, but have no effect in pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if _has_fixtures_of_a_module(config.rootpath / file) else nodeid

    return ByFixtures(config, log) if config.getvalue("dist") == "loadgroup" else None


@functools.cache
def _has_fixtures_of_a_module(path):
    text = path.read_text()
    return 'scope="module"' in text or "object_store" in text  # a fixture of tests/unit/conftest.py
