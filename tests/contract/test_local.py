"""The contract, on ranks that are threads of this process."""

from contextlib import nullcontext

import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist.testing.contract import TransportContract
from hpcdist.testing.contract.exchanges import Exchanges
from hpcdist.transport.threads.transport import ThreadTransport


@pytest.mark.filterwarnings("ignore::hpcdist.NotInGroupWarning")
class TestLocal(TransportContract):
    @pytest.fixture(autouse=True, params=[*first_of([3, 2, 4, 7]), 1])
    def _size(self, request):
        self.size = request.param

    def run(self, check):
        return dist.simulate(self.size, check, timeout=20)

    def warned(self):
        return nullcontext()


class TestWhatTakesNoExchanges(Exchanges):
    """What a transport gets that knows nothing of exchanges does the same."""

    @pytest.fixture(autouse=True, params=[*first_of([3, 2, 4]), 1])
    def _size(self, request, monkeypatch):
        self.size = request.param
        monkeypatch.setattr(ThreadTransport, "takes_exchanges", False)

    def run(self, check):
        return dist.simulate(self.size, check, timeout=20)
