"""Paddle's ``fleet.utils.hybrid_parallel_util``: gradients that are averaged by hand."""

from hpcdist.parallel.averages import fused_allreduce_gradients as fused_allreduce_gradients
