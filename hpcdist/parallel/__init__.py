"""Training on many ranks: gradients in buckets, averaged while the backward pass computes.

Read in this order: `model` (what users call), `engines` (which engine a model gets), `options`,
`buckets` and `reducer` (which gradients travel together, and when; pure), `averager` (how they
travel), `overlap` (inline or overlapped), `fused` (many arrays as few operations), `parameter`,
`module_state` (what a model keeps), `backward` (a pass from its first gradient to its end),
`gradient_groups` (over which ranks, in which order), `attendance` (who has batches), `gradients`
and `arrays` (the engine for plain arrays), `averages` (without a model), `compressed` (fewer
bytes), `clipping` and `scaler` (gradients in bounds), `virtual` (virtual ranks), `sharding` (no
rank keeps everything). Models on a mesh: `layers` and `layer_plans`, `array_layers`, `automatic`,
`stages`, `split`, `experts`, `strategy` and `vocabulary`.
"""

from hpcdist.parallel.averages import (
    average_gradients as average_gradients,
    fused_allreduce_gradients as fused_allreduce_gradients,
)
from hpcdist.parallel.buckets import plan_buckets as plan_buckets
from hpcdist.parallel.fused import build_groups as build_groups
from hpcdist.parallel.model import DataParallel as DataParallel
from hpcdist.parallel.module_state import sync_params_buffers as sync_params_buffers
from hpcdist.parallel.parameter import Parameter as Parameter
from hpcdist.parallel.reducer import Reducer as Reducer
