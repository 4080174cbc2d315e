"""Jobs that tests start by `mpiexec`."""

import subprocess
from pathlib import Path

import pytest

NOT_STARTED = "PMIx server's listener thread failed to start"
"""What Open MPI was seen to say, a few times in some thousand launches, before a job starts."""


def pytest_collection_modifyitems(items):
    """Run a test again whose job Open MPI has not started; the end of the run names it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.flaky(reruns=2, only_rerun=[NOT_STARTED]))


@pytest.fixture(autouse=True)
def _jobs_start(monkeypatch):
    """Fail with these words, whatever the test asks of what the job has said."""
    communicate = subprocess.Popen.communicate

    def heard(job, *args, **options):
        said = communicate(job, *args, **options)
        for each in said:
            text = each.decode(errors="replace") if isinstance(each, bytes) else each or ""
            if NOT_STARTED in text:
                raise RuntimeError(f"Open MPI has not started a job: {text}")
        return said

    monkeypatch.setattr(subprocess.Popen, "communicate", heard)
