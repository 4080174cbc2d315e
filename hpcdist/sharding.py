"""Sharded training under Paddle's names: ``paddle.distributed.sharding``."""

from hpcdist.checkpoint.paddle import save_group_sharded_model
from hpcdist.parallel.sharding.group_sharded import group_sharded_parallel

__all__ = ["group_sharded_parallel", "save_group_sharded_model"]
