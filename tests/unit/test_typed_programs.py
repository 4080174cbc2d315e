"""The programs that `make check` gives to type checkers do run."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "typing"
pytest.importorskip("typing_extensions")
pytest.importorskip("jax")


@pytest.mark.parametrize(
    "name",
    [
        "communication",
        "training",
        "hybrid",
        pytest.param("training_torch", marks=pytest.mark.thorough),
    ],
)
def test_a_typed_program_runs(name):
    if "torch" in name:
        pytest.importorskip("torch")
    if name == "hybrid":
        pytest.importorskip("hpcdist.parallel.hybrid_arrays")
    program = [sys.executable, PROGRAMS / f"{name}.py"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
