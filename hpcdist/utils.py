"""The exchange of rows with experts under Paddle's names: ``paddle.distributed.utils``."""

from hpcdist.parallel.experts import global_gather, global_scatter

__all__ = ["global_gather", "global_scatter"]
