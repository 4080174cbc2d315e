"""torch's ZeroRedundancyOptimizer, of which parameters stay equal that are frozen between steps.

It is imported without the warnings of what lies beside it: its package compiles optimizers with
``torch.jit`` while it is imported, which torch itself calls deprecated.
"""

from __future__ import annotations

import warnings
from itertools import zip_longest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as _ZeroRedundancyOptimizer


class ZeroRedundancyOptimizer(_ZeroRedundancyOptimizer):  # type: ignore[misc] # torch is untyped
    """Sends what has ever been trained.

    Whoever owns a parameter steps it as long as it has a gradient, be it frozen; torch's own sends
    what is trained now, and the others would keep what they had.
    """

    def _get_is_trainable_mask(self) -> list[bool]:
        before = getattr(self, "_is_trainable_mask", ())
        now = [each.requires_grad or each.grad is not None for each in self._all_params]
        return [any(each) for each in zip_longest(now, before, fillvalue=False)]

    def _build_param_buckets(self) -> None:
        once = zip(self._all_params, self._get_is_trainable_mask(), strict=True)
        frozen = [each for each, was in once if was and not each.requires_grad]
        for each in frozen:
            each.requires_grad_(True)
        try:
            super()._build_param_buckets()
        finally:
            for each in frozen:
                each.requires_grad_(False)
