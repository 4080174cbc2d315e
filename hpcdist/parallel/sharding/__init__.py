"""Sharding: every rank keeps a part of the training state (ZeRO, stages 1 to 3), for plain arrays.

Read in this order: `group_sharded` (what users call), `partition` (what a rank owns; pure),
`gradients`, `replicated` and `gathered` (where weights are), `engine` (one model), `optimizer`,
`model`, `shard_state` (states for checkpoints), `arrays` (a model of arrays is sharded).
"""

from hpcdist.parallel.sharding.group_sharded import (
    group_sharded_parallel as group_sharded_parallel,
)
from hpcdist.parallel.sharding.model import ShardedModel as ShardedModel
from hpcdist.parallel.sharding.optimizer import ShardedOptimizer as ShardedOptimizer
