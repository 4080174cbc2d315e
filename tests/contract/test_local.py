"""The contract, on ranks that are threads of this process."""

from contextlib import nullcontext

import pytest

import hpcdist as dist
from hpcdist.testing.contract import TransportContract


@pytest.mark.filterwarnings("ignore::hpcdist.NotInGroupWarning")
class TestLocal(TransportContract):
    @pytest.fixture(autouse=True, params=[1, 2, 3, 4, pytest.param(7, marks=pytest.mark.thorough)])
    def _size(self, request):
        self.size = request.param

    def run(self, check):
        return dist.simulate(self.size, check, timeout=20)

    def warned(self):
        return nullcontext()
