"""Tests of the emulated GPUs themselves, with CuPy: `make test-gpu` runs them."""

import os
import subprocess
import sys

import pytest
from requirements import missing


@pytest.fixture
def cupy():
    if "EMULATED_GPU_COUNT" not in os.environ:
        missing("gpu", "there are no emulated GPUs here; `make test-gpu` has them")
    import cupy

    yield cupy
    cupy.cuda.Device().synchronize()


@pytest.fixture
def program(cupy):
    """Run a program in a process of its own; return its exit code and what it says on stderr."""

    def run(source, **environ):
        done = subprocess.run(
            [sys.executable, "-c", source],
            capture_output=True,
            text=True,
            env=os.environ | environ,
            check=False,
        )
        return done.returncode, done.stderr

    return run
