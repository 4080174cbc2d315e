"""What a test needs of the machine: where it is missing, the test skips and says why, or fails.

``HPCDIST_REQUIRE=gpu,slurm`` names what must be there.
"""

import os

import pytest


def missing(requirement, reason):
    """Skip the test because of `reason`, or fail it if `requirement` must be there."""
    if requirement in os.environ.get("HPCDIST_REQUIRE", "").split(","):
        pytest.fail(f"{requirement} is required, but {reason}")
    pytest.skip(reason)
