"""A path given first and a state second is refused, with the order in words."""

from pathlib import Path

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint


@pytest.mark.parametrize("verb", ["save", "load"])
@pytest.mark.parametrize("kind", [str, Path])
def test_swapped_arguments_are_refused_with_the_order(tmp_path, verb, kind):
    folder = tmp_path / "checkpoint"
    with pytest.raises(dist.UsageError) as told:
        getattr(checkpoint, verb)(kind(folder), {"x": np.ones(3)})
    assert "the state first and the folder second" in str(told.value)
    assert f"write checkpoint.{verb}(state, {str(folder)!r})" in str(told.value)
    assert not folder.exists()
