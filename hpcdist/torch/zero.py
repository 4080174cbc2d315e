"""torch's ZeroRedundancyOptimizer, imported without the warnings of what lies beside it.

Its package compiles optimizers with ``torch.jit`` while it is imported, which torch itself calls
deprecated.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer

__all__ = ["ZeroRedundancyOptimizer"]
