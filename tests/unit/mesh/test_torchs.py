"""What the package says of torch where torch is not installed."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
import hpcdist as dist

dist.init_parallel_env()
a = dist.shard_tensor(np.ones(2), dist.ProcessMesh([0]), [])
"""


def said(program):
    """Return the last line that a program without torch prints."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("program", ["dist.LocalLayer", "dist.DistModel", "dist.to_dtensor(a)"])
def test_what_needs_torch_says_how_to_install_it(program):
    caught = (
        f"try:\n    {program}\nexcept (ImportError, dist.UsageError) as error:\n    print(error)"
    )
    assert "pip install 'hpcdist[torch]'" in said(caught)


def test_all_else_is_there_without_torch():
    program = """
from hpcdist import *
names = Strategy(), ShardingStage1("d0"), ColWiseParallel(), SplitPoint.END, shard_layer
loader = shard_dataloader([np.ones((3, 2))], ProcessMesh([0]), shard_dims=0)
assert [batch.shape for batch in loader] == [(3, 2)]
print("done")
"""
    assert said(program) == "done"
