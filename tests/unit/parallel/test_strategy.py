"""Strategies of `to_static`: one table of sections and keys, and what it refuses."""

import copy
import pickle

import pytest

import hpcdist as dist
from hpcdist.parallel.strategy import HONOURED, SECTIONS

KEYS = [(section, key) for section, row in SECTIONS.items() for key in row]


def test_every_key_has_its_default_and_can_be_set_to_it():
    strategy = dist.Strategy()
    for section, key in KEYS:
        default = SECTIONS[section][key].default
        assert getattr(getattr(strategy, section), key) == default
        setattr(getattr(strategy, section), key, default)
    assert strategy.to_dict() == dist.Strategy(strategy.to_dict()).to_dict()
    assert strategy.without_effect() == []


def test_lists_of_two_strategies_are_not_the_same_list():
    dist.Strategy().recompute.checkpoints.append("layer")
    assert dist.Strategy().recompute.checkpoints == []


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_a_value_of_a_wrong_type_is_refused(section, key):
    with pytest.raises(dist.UsageError, match=f"{section}.{key} must be"):
        setattr(getattr(dist.Strategy(), section), key, object())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([], "Expected a dictionary. But received"),
        ({"shardng": {}}, "did you mean 'sharding'"),
        ({"amp": {"lvel": "o1"}}, "did you mean 'level'"),
        ({"amp": 1}, "must be a dictionary"),
        ({"amp": {"enable": 1}}, "amp.enable must be bool, got 1"),
        ({"amp": {"incr_every_n_steps": True}}, "must be int, got True"),
        ({"amp": {"dtype": "float8"}}, "float16 or bfloat16"),
        ({"sharding": {"stage": 4}}, "1 or 2 or 3, got 4"),
        ({"xyz": {}}, "there are base, recompute"),
    ],
)
def test_what_a_strategy_does_not_have_is_an_error_that_names_what_it_has(config, words):
    with pytest.raises(dist.UsageError, match=words):
        dist.Strategy(config)


def test_a_wrong_key_beside_right_ones_changes_nothing():
    strategy = dist.Strategy()
    with pytest.raises(dist.UsageError):
        strategy.sharding = {"enable": True, "stage": 9}
    with pytest.raises(dist.UsageError, match="cannot be deleted"):
        del strategy.sharding.stage
    assert strategy.to_dict() == dist.Strategy().to_dict()


def test_sections_are_set_as_attributes_and_as_wholes():
    strategy = dist.Strategy({"amp": {"level": "O1", "incr_ratio": 3}})
    assert strategy.amp.level == "o1"
    other = dist.Strategy()
    other.amp = strategy.amp
    assert other.amp == strategy.amp
    assert other.amp is not strategy.amp
    other.recompute.checkpoints = ("a", "b")
    assert other.recompute.checkpoints == ["a", "b"]
    assert (
        repr(other)
        == "Strategy({'recompute': {'checkpoints': ['a', 'b']}, 'amp': {'incr_ratio': 3}})"
    )


def test_a_strategy_is_copied_and_pickled():
    strategy = dist.Strategy({"gradient_merge": {"enable": True, "k_steps": 4}})
    for other in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert other.to_dict() == strategy.to_dict()
        other.gradient_merge.k_steps = 2
    assert strategy.gradient_merge.k_steps == 4


def test_what_is_changed_and_has_no_effect_is_named_where_it_is_switched_on():
    strategy = dist.Strategy(
        {
            "fused_passes": {"enable": True},
            "tuning": {"debug": True},
            "sharding": {"enable": True, "stage": 2, "enable_overlap": True},
            "mp_optimization": {"replace_with_c_embedding": True},
        }
    )
    assert strategy.without_effect() == [
        "sharding.enable_overlap",
        "fused_passes.enable",
        "mp_optimization.replace_with_c_embedding",
    ]


def test_what_is_honoured_exists():
    assert all(keys <= SECTIONS[section].keys() for section, keys in HONOURED.items())
