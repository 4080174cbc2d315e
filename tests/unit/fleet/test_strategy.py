"""Strategies: every field is known, checked, told about, and comes to something or is refused."""

import copy
import pickle
import warnings

import fleet_checks
import numpy as np
import pytest
from fleet_checks import other_value, set_at, value_at

import hpcdist as dist
from hpcdist.fleet import DistributedStrategy
from hpcdist.fleet.fields import (
    ALIASES,
    FIELDS,
    HONOURED,
    NO_EFFECT_HERE,
    REFUSED,
    SWITCHES,
    Field,
    checked,
    describe_path,
    each_field,
)
from hpcdist.parallel.hybrid_options import (
    Amp,
    GradientMerge,
    HybridOptions,
    Lamb,
    Lars,
    LocalSGD,
    Pipeline,
    Recompute,
    Sharding,
)

ALL = [*each_field()]


def of_verdict(word):
    return [(path, field) for path, field in ALL if field.verdict.word == word]


def ids(rows):
    return {"argvalues": rows, "ids": [".".join(path) for path, _ in rows]}


# ---- the table


@pytest.mark.parametrize(("path", "field"), **ids(ALL))
def test_every_field_has_its_default_and_takes_it(path, field):
    strategy = DistributedStrategy()
    assert value_at(strategy, path) == field.default
    assert type(value_at(strategy, path)) is type(field.default)
    set_at(strategy, path, field.default)
    assert value_at(strategy, path) == field.default
    assert field.verdict.about


@pytest.mark.parametrize(("path", "field"), **ids(of_verdict(REFUSED)))
def test_a_refused_field_says_what_to_do(path, field):
    strategy = DistributedStrategy()
    with pytest.raises(dist.UsageError, match="is refused: ") as caught:
        set_at(strategy, path, other_value(field))
    assert field.verdict.about in str(caught.value)
    assert describe_path(path) in str(caught.value)
    assert value_at(strategy, path) == field.default


@pytest.mark.parametrize(("path", "field"), **ids(of_verdict(NO_EFFECT_HERE)))
def test_a_field_without_effect_warns_once_and_names_the_line(path, field):
    strategy = DistributedStrategy()
    with pytest.warns(UserWarning, match="no effect here") as caught:
        set_at(strategy, path, other_value(field))
    assert len(caught) == 1
    assert caught[0].filename == fleet_checks.__file__  # where `set_at` sets it
    assert describe_path(path) in str(caught[0].message)
    assert f"{fleet_checks.__file__}:" in str(caught[0].message)
    set_at(strategy, path, other_value(field))  # a second warning would be an error
    assert value_at(strategy, path) == other_value(field)
    assert f"no effect here: {field.verdict.about}" in strategy.report()


def comes_to(strategy):
    return strategy.freeze(), strategy.degrees(), strategy.order(), strategy.table_mode()


@pytest.mark.parametrize(("path", "field"), **ids(of_verdict(HONOURED)))
def test_an_honoured_field_changes_what_engines_or_the_grid_are_told(path, field):
    strategy = DistributedStrategy()
    if path[0] in SWITCHES:
        setattr(strategy, SWITCHES[path[0]], True)
    if path[0] in ("a_sync", "a_sync_configs"):
        strategy.a_sync = True
    before = comes_to(strategy)
    set_at(strategy, path, other_value(field))
    assert path == ("amp_configs", "use_pure_fp16") or comes_to(strategy) != before
    assert f"{describe_path(path)} = " in strategy.report()


def test_nothing_set_is_nothing_special():
    strategy = DistributedStrategy()
    assert strategy.freeze() == HybridOptions()
    assert set(strategy.degrees().values()) == {None}
    assert strategy.report() == "nothing is set: every field has its default"
    assert repr(strategy) == "DistributedStrategy()"


def test_what_is_set_is_what_engines_are_told():
    strategy = DistributedStrategy()
    for name in ("amp", "recompute", "gradient_merge", "localsgd", "lars", "sharding"):
        setattr(strategy, name, True)
    strategy.amp_configs = {"init_loss_scaling": 8, "use_pure_bf16": True}
    strategy.recompute_configs = {"checkpoints": ("a", "b"), "enable_offload": True}
    strategy.gradient_merge_configs = {"k_steps": 4, "avg": False}
    strategy.localsgd_configs = {"k_steps": np.int64(3)}
    strategy.lars_configs = {"exclude_from_weight_decay": ["bias"]}
    strategy.sharding_configs = {"stage": 2, "optimize_offload": True}
    strategy.pipeline_configs = {"accumulate_steps": 6, "schedule_mode": "VPP"}
    strategy.hybrid_configs = {"sharding_configs": {"accumulate_steps": 2}}
    strategy.gradient_scale_configs = {"scale_strategy": "sum"}
    strategy.fuse_grad_size_in_MB = 16
    strategy.find_unused_parameters = strategy.sync_batch_norm = True
    assert strategy.freeze() == HybridOptions(
        amp=Amp(init_loss_scaling=8.0, dtype="bfloat16"),
        recompute=Recompute(("a", "b"), True),
        gradient_merge=GradientMerge(4, False),
        localsgd=LocalSGD(3, 1),
        lars=Lars(exclude=("bias",)),
        sharding=Sharding(2, True, 2),
        pipeline=Pipeline(1, 6, "Interleaved1F1B"),
        find_unused_parameters=True,
        fuse_grad_size_MB=16.0,
        sync_batch_norm=True,
        gradient_scale="sum",
    )
    strategy.lars, strategy.lamb = False, True
    strategy.lamb_configs["lamb_weight_decay"] = 0.1
    with pytest.warns(UserWarning, match="lars_configs has no effect"):
        assert strategy.freeze().lamb == Lamb(0.1)


def test_degrees_are_those_that_are_told():
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2, "dp_degree": -1}
    assert strategy.degrees() == {
        "dp": -1, "pp": None, "sharding": None, "sep": None, "cp": None, "mp": 2
    }  # fmt: skip
    strategy = DistributedStrategy()
    strategy.sharding = True
    assert strategy.degrees()["sharding"] == -1
    strategy.hybrid_configs["dp_degree"] = 2
    assert strategy.degrees()["sharding"] is None


def test_a_section_that_is_not_switched_on_is_told_about():
    strategy = DistributedStrategy()
    strategy.lars_configs = {"lars_coeff": 0.1}
    strategy.lamb_configs = {"lamb_weight_decay": 0.01}  # the default
    assert "honoured once lars = True: the trust coefficient" in strategy.report()
    assert "honoured: the weight decay" in strategy.report()
    with pytest.warns(
        UserWarning, match="lars_configs has no effect while lars is False"
    ) as caught:
        assert strategy.freeze() == HybridOptions()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    strategy.freeze()  # a second warning would be an error
    strategy.lars = True
    assert strategy.freeze().lars == Lars(0.1)
    assert "once" not in strategy.report()


# ---- sections


def test_a_part_of_a_section_leaves_its_other_keys_alone():
    strategy = DistributedStrategy()
    strategy.amp_configs = {"incr_ratio": 3.0}
    strategy.amp_configs = {"decr_ratio": 0.5}
    strategy.amp_configs["incr_every_n_steps"] = 10
    assert strategy.amp_configs["incr_ratio"] == 3.0
    assert strategy.amp_configs["decr_ratio"] == 0.5
    assert strategy.amp_configs["incr_every_n_steps"] == 10


def test_a_whole_section_can_be_given_to_another_strategy():
    first, second = DistributedStrategy(), DistributedStrategy()
    first.hybrid_configs = {"mp_degree": 2, "pp_degree": 4}
    first.hybrid_configs["order"] = ["mp", "dp", "pp", "sharding"]
    second.hybrid_configs = first.hybrid_configs
    assert second.hybrid_configs == first.hybrid_configs
    assert second.degrees()["pp"] == 4
    assert second.order() == first.order()
    second.hybrid_configs = dict(first.hybrid_configs)
    assert len(first.hybrid_configs) == len(FIELDS["hybrid_configs"])


def test_keys_of_a_section_are_attributes_as_those_of_paddles_messages():
    strategy = DistributedStrategy()
    strategy.hybrid_configs["sharding_configs"].accumulate_steps = 4
    section = strategy.hybrid_configs["sharding_configs"]
    assert section.accumulate_steps == section["accumulate_steps"] == 4
    assert copy.deepcopy(section) == copy.copy(section) == section
    with pytest.raises(dist.UsageError, match="has no key 'steps'"):
        section.steps = 4
    with pytest.raises(dist.UsageError, match="has no key 'steps'"):
        _ = section.steps


def test_what_is_read_is_a_copy():
    strategy = DistributedStrategy()
    strategy.recompute_configs["checkpoints"].append("a")
    assert strategy.recompute_configs["checkpoints"] == []
    given = ["a"]
    strategy.recompute_configs = {"checkpoints": given}
    given.append("b")
    assert strategy.recompute_configs["checkpoints"] == ["a"]


def test_a_statement_sets_all_or_nothing():
    strategy = DistributedStrategy()
    with pytest.raises(dist.UsageError):
        strategy.amp_configs = {"incr_ratio": 3.0, "decr_ratio": "half"}
    assert strategy.amp_configs["incr_ratio"] == 2.0
    assert strategy == DistributedStrategy()


def test_strategies_can_be_copied_pickled_and_compared():
    strategy = DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2}
    strategy.lars = True
    for other in (
        copy.deepcopy(strategy),
        copy.copy(strategy),
        pickle.loads(pickle.dumps(strategy)),
    ):
        assert other == strategy
        other.lars = False
        assert strategy.lars
        assert other != strategy
    assert strategy != "DistributedStrategy"
    assert not hasattr(strategy, "__len__")


def test_paddles_other_names_are_the_same_fields():
    strategy = DistributedStrategy()
    for alias, name in ALIASES.items():
        value = other_value(FIELDS[name])
        with pytest.warns(UserWarning, match=name):
            setattr(strategy, alias, value)
        assert getattr(strategy, alias) == getattr(strategy, name) == value


def test_one_statement_with_several_idle_fields_warns_of_all_of_them():
    strategy = DistributedStrategy()
    with pytest.warns(UserWarning, match="no effect") as caught:
        strategy.a_sync_configs = {"thread_pool_size": 2, "send_wait_times": 2}
    assert len(caught) == 1
    assert "have no effect" in str(caught[0].message)


def test_values_of_idle_fields_that_are_their_defaults_ask_for_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DistributedStrategy().fuse_all_reduce_ops = True
        DistributedStrategy().hybrid_configs = DistributedStrategy().hybrid_configs


# ---- what is wrong


def _set(name, value):
    return lambda strategy: setattr(strategy, name, value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_set("gradient_merg", True), "no field 'gradient_merg'; did you mean 'gradient_merge'"),
        (_set("amp", 1), "amp must be True or False, got 1"),
        (_set("amp", "true"), "amp must be True or False, got 'true'"),
        (_set("amp", None), "amp must be True or False"),
        (_set("fuse_grad_size_in_MB", True), "must be an integer"),
        (_set("fuse_grad_size_in_MB", 3.5), "must be an integer"),
        (_set("fuse_grad_size_in_MB", 0), "must be greater than 0"),
        (_set("last_comm_group_size_MB", 0), "last_comm_group_size_MB must be greater than 0"),
        (_set("last_comm_group_size_MB", "1"), "must be a number"),
        (
            _set("amp_configs", {"incr_rato": 2.0}),
            r"amp_configs has no key 'incr_rato'; .*'incr_ratio'",
        ),
        (_set("amp_configs", {1: 2.0}), "amp_configs has no key 1"),
        (_set("amp_configs", True), r"amp_configs must be a dictionary such as \{'init_loss"),
        (_set("amp_configs", [("incr_ratio", 2)]), "must be a dictionary"),
        (
            _set("hybrid_configs", {"mp_configs": {"sync": 1}}),
            r"hybrid_configs\['mp_configs'\] has no",
        ),
        (
            _set("hybrid_configs", {"mp_configs": 1}),
            r"hybrid_configs\['mp_configs'\] must be a dict",
        ),
        (_set("hybrid_configs", {"mp_degree": 2.0}), r"\['mp_degree'\] must be an integer"),
        (_set("hybrid_configs", {"mp_degree": -2}), "must be at least -1"),
        (_set("recompute_configs", {"checkpoints": "a"}), "must be a list of strings"),
        (_set("recompute_configs", {"checkpoints": [1]}), "must be a string, got 1"),
        (_set("gradient_merge_configs", {"k_steps": 0}), "must be at least 1, got 0"),
        (_set("lars_configs", {"epsilon": float("nan")}), "must be at least 0, got nan"),
        (_set("sharding_configs", {"stage": 4}), "must be one of 1, 2, 3, got 4"),
        (_set("pipeline_configs", {"schedule_mode": "2F2B"}), "must be one of '1F1B'"),
        (lambda strategy: strategy.amp_configs.__getitem__("x"), "amp_configs has no key 'x'"),
        (lambda strategy: strategy.nothing, "no field 'nothing'"),
        (lambda strategy: delattr(strategy, "amp"), "cannot be deleted"),
        (lambda strategy: strategy.amp_configs.pop("incr_ratio"), "cannot be deleted"),
    ],
)
def test_a_wrong_name_or_value_is_refused_at_once(change, told):
    strategy = DistributedStrategy()
    with pytest.raises(dist.UsageError, match=told):
        change(strategy)
    assert strategy == DistributedStrategy()


@pytest.mark.parametrize("value", [None, object(), (1,), b"x"])
def test_no_field_takes_what_is_of_no_type_it_has(value):
    for path, field in ALL:
        if isinstance(field.default, list) and isinstance(value, tuple):
            continue
        with pytest.raises(dist.UsageError):
            checked(path, field, value)


def test_fields_that_contradict_each_other_are_refused_together():
    strategy = DistributedStrategy()
    strategy.lars = strategy.lamb = True
    with pytest.raises(dist.UsageError, match="lars and lamb are both set"):
        strategy.freeze()
    strategy = DistributedStrategy()
    strategy.amp = True
    strategy.amp_configs = {"use_pure_fp16": True, "use_pure_bf16": True}
    with pytest.raises(dist.UsageError, match="use_pure_fp16 and use_pure_bf16"):
        strategy.freeze()


def test_every_entry_of_the_table_is_a_field():
    assert all(isinstance(field, Field) for _, field in ALL)
    assert len({path for path, _ in ALL}) == len(ALL) > 250
