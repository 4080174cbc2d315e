"""Random programs of collectives with their arrays on GPUs, against NumPy."""

import collective_programs
import pytest
from collective_programs import run_program
from drawn_programs import draw_programs
from gpu_arrays import arrays_of

from hpcdist.testing.on_device import OnDevice

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_gpu(cupy, way, monkeypatch):
    """Let the programs call hpcdist with all arrays on the GPU."""
    library = OnDevice(arrays_of(cupy))
    monkeypatch.setattr(collective_programs, "dist", library)
    for name in ("exchange", "exchange_combined"):
        monkeypatch.setitem(collective_programs._INTERNAL, name, library.exchange)


PARTS = [
    pytest.param(slice(25), id="few"),
    pytest.param(slice(25, 400), id="many", marks=pytest.mark.thorough),
    pytest.param(slice(400, 3400), id="all", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("part", PARTS)
def test_random_programs_on_a_gpu_end_as_numpy_says(on_gpu, part):
    for program in draw_programs(part.stop, max_steps=6)[part]:
        run_program(program)
