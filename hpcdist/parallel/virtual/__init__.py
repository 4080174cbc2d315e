"""Virtual ranks: a training of V ranks, on any number of real ones, with the same bits.

Read in this order: `tree` (the order of the sums, which ranks do not change; pure), `parts` (whose
samples), `streams` (whose random numbers), `exchange` (sums that are here become the sum of all),
`memory` (where gradients lie then), `heap` (what is freed), `settings`, and `engine`, with a step;
`owners` and `sharding` for sharded optimizers.
"""

from __future__ import annotations
