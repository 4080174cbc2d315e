"""Every rank runs every test; after each they compare notes, so that all stop together."""

import pytest

import hpcdist as dist


@pytest.fixture(scope="session", autouse=True)
def _start():
    dist.init_parallel_env(backend="switchboard")
    yield
    dist.barrier()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    setattr(item, f"failed_in_{call.when}", report.failed)
    return report


@pytest.fixture(autouse=True)
def _all_ranks_pass(request, _start):
    yield
    failures = []
    dist.all_gather_object(failures, getattr(request.node, "failed_in_call", False))
    if any(failures):
        ranks = [rank for rank, each in enumerate(failures) if each]
        request.session.shouldfail = f"{request.node.nodeid} failed on ranks {ranks}"
