"""Paddle's ``fleet.base.distributed_strategy``."""

from hpcdist.fleet.strategy import DistributedStrategy as DistributedStrategy
