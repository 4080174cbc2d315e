"""Paddle's ``fleet.utils``: recomputing and file systems, each imported when used."""

from hpcdist.lazy import lazily

_RECOMPUTE = "hpcdist.torch.recompute"

ROWS = {
    "recompute": _RECOMPUTE,
    "recompute_sequential": _RECOMPUTE,
    "recompute_hybrid": _RECOMPUTE,
    "LocalFS": "hpcdist.fs",
    "HDFSClient": "hpcdist.fs",
    "sequence_parallel_utils": "hpcdist.fleet.utils.sequence_parallel_utils",
    "hybrid_parallel_util": "hpcdist.fleet.utils.hybrid_parallel_util",
    "fs": "hpcdist.fleet.utils.fs",
    "log_util": "hpcdist.fleet.utils.log_util",
    "mix_precision_utils": "hpcdist.fleet.utils.mix_precision_utils",
    "tensor_fusion_helper": "hpcdist.fleet.utils.tensor_fusion_helper",
    "timer_helper": "hpcdist.fleet.utils.timer_helper",
}
"""For each name the module that has it, or is it."""

__getattr__, __dir__ = lazily(globals(), ROWS)
