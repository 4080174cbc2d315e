"""Training on many ranks: gradients in buckets, averaged while the backward pass computes.

Read in this order: `model` (what users call), `buckets` and `reducer` (which gradients travel
together, and when; pure), `exchange` (how they travel), `pace` (inline or overlapped), `states`
(equal states everywhere), `fused` (many arrays as few operations), `parameter`, `holders` (what a
model keeps), `gradients` and `arrays` (the engine for plain arrays), `averages` (without a model).
"""

from hpcdist.parallel.buckets import plan_buckets as plan_buckets
from hpcdist.parallel.reducer import Reducer as Reducer
