"""The contract, on the ranks of this MPI job."""

from hpcdist.testing.contract import TransportContract


class TestMpi(TransportContract):
    def run(self, check):
        return [check()]
