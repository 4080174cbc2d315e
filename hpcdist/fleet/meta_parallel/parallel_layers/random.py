"""Paddle's ``fleet.meta_parallel.parallel_layers.random``: random states along mp."""

from hpcdist.torch.model_parallel.random import (
    RNGStatesTracker as RNGStatesTracker,
    get_rng_state_tracker as get_rng_state_tracker,
    model_parallel_random_seed as model_parallel_random_seed,
)
