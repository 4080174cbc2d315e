"""Layers of fleet have Paddle's parameters, in its order and with its defaults."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from hpcdist import fleet  # noqa: E402
from hpcdist.torch import model_parallel, recompute  # noqa: E402

_LINEAR = "in_features, out_features, weight_attr=None"
_REST = "fuse_matmul_bias=False, mp_group=None, name=None"
SIGNATURES = {
    "ColumnParallelLinear": f"{_LINEAR}, has_bias=None, gather_output=True, {_REST}",
    "RowParallelLinear": f"{_LINEAR}, has_bias=True, input_is_parallel=False, {_REST}",
    "ColumnSequenceParallelLinear": f"{_LINEAR}, has_bias=None, gather_output=True, {_REST}",
    "RowSequenceParallelLinear": f"{_LINEAR}, has_bias=True, input_is_parallel=False, {_REST}",
    "VocabParallelEmbedding": (
        "num_embeddings, embedding_dim, weight_attr=None, mp_group=None, name=None"
    ),
    "ParallelCrossEntropy": "mp_group=None, name=None, ignore_index=-100",
    "RNGStatesTracker.add": "self, name, seed",
    "RNGStatesTracker.rng_state": "self, name='model_parallel_rng'",
    "RNGStatesTracker.set_states_tracker": "self, states",
    "get_rng_state_tracker": "",
    "model_parallel_random_seed": "seed=None",
    "mark_as_sequence_parallel_parameter": "parameter",
    "register_sequence_parallel_allreduce_hooks": (
        "model, accumulation_steps=1, fuse_sequence_parallel_allreduce=False"
    ),
    "recompute": "function, *args, **kwargs",
    "recompute_sequential": "ctx, functions, *args, **kwargs",
    "recompute_hybrid": "ctx, function, *args, **kwargs",
}


def of_paddle(function):
    """Return the signature without annotations, and without what is hpcdist's own, by keyword."""
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
        if each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    return str(inspect.Signature(parameters)).strip("()").replace("*, ", "")


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_have_the_parameters_of_paddle(name):
    owner = recompute if name.startswith("recompute") else model_parallel
    function = owner
    for each in name.split("."):
        function = getattr(function, each)
    assert of_paddle(function) == SIGNATURES[name]


def test_recompute_takes_the_settings_of_paddle_by_keyword():
    told = inspect.signature(recompute.recompute).parameters
    settings = {name: each.default for name, each in told.items() if each.kind is each.KEYWORD_ONLY}
    assert settings == {"preserve_rng_state": True, "use_reentrant": True, "offload_indices": ()}


@pytest.mark.parametrize("name", [each for each in SIGNATURES if "." not in each])
def test_fleet_has_them_where_paddle_has_them(name):
    owner = recompute if name.startswith("recompute") else model_parallel
    places = [fleet.meta_parallel, fleet.utils, fleet.utils.sequence_parallel_utils]
    found = [getattr(place, name) for place in places if hasattr(place, name)]
    assert found
    assert all(each is getattr(owner, name) for each in found)
