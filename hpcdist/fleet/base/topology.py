"""Paddle's ``fleet.base.topology``."""

from hpcdist.parallel.hybrid import HybridCommunicateGroup as HybridCommunicateGroup
from hpcdist.parallel.topology import (
    CommunicateTopology as CommunicateTopology,
    ParallelMode as ParallelMode,
)
