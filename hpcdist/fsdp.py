"""What is importable from ``paddle.distributed.fsdp``, as far as it is here."""

from hpcdist.parallel.layers import fully_shard

__all__ = ["fully_shard"]
