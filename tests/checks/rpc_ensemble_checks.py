"""What holds for `examples/ensemble.py` on any number of ranks."""

import importlib.util
import sys
from pathlib import Path

import numpy as np

import hpcdist as dist

EXAMPLE = Path(__file__).parents[2] / "examples/ensemble.py"
WORDS = ["--members", "7", "--variables", "12", "--steps", "60", "--every", "4"]


def _load():
    spec = importlib.util.spec_from_file_location("ensemble_example", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ensemble = _load()  # once: what the ranks hand each other is named by its module


def the_ensemble_spreads():
    found = ensemble.main(WORDS)
    if dist.get_rank() != 0:
        assert found == {}
        return
    x = ensemble.first_states([*range(7)], 12)
    expected = {}
    for step in range(61):
        if step % 4 == 0:
            expected[step] = x.mean(), np.sqrt(x.var(axis=0, ddof=1).mean())
        x = ensemble.after_a_step(x)
    assert found == expected  # to the bit
    assert found[0][1] < 1e-3 < 1 < found[60][1]
