"""Strategies as files, in the text format of protocol buffers."""

import pytest
from fleet_checks import other_value, set_at, value_at

import hpcdist as dist
from hpcdist.fleet import DistributedStrategy
from hpcdist.fleet.fields import NO_EFFECT_HERE, REFUSED, each_field
from hpcdist.fleet.prototxt import from_text, to_text

# as Paddle's text_format writes a strategy
PADDLES = """\
mode: COLLECTIVE
amp: true
find_unused_parameters: false
fuse_grad_size_in_MB: 16
amp_configs {
  init_loss_scaling: 1024.0
  incr_ratio: 3.0
  custom_white_list: []
}
recompute_configs {
  checkpoints: "encoder.0"
  checkpoints: "encoder.1"
}
hybrid_configs {
  dp_degree: -1
  mp_degree: 2
  pp_configs {
    use_batch_p2p_comm: true
  }
}
"""


def written(strategy, folder):
    strategy.save_to_prototxt(folder / "strategy.prototxt")
    return (folder / "strategy.prototxt").read_text()


def read(text, folder):
    (folder / "strategy.prototxt").write_text(text)
    strategy = DistributedStrategy()
    strategy.load_from_prototxt(str(folder / "strategy.prototxt"))
    return strategy


def test_a_strategy_comes_back_from_its_file(tmp_path):
    strategy = DistributedStrategy()
    strategy.amp = strategy.recompute = True
    strategy.amp_configs = {"init_loss_scaling": 0.1, "use_pure_bf16": True}
    strategy.hybrid_configs = {
        "mp_degree": 2,
        "order": ["dp", "pp", "sharding", "mp"],
        "sharding_configs": {"accumulate_steps": 3},
    }
    strategy.recompute_configs = {"checkpoints": ['a "quoted" one', "b\\n\nä\t", ""]}
    found = read(written(strategy, tmp_path), tmp_path)
    assert found == strategy
    assert found.report() == strategy.report()
    assert found.freeze() == strategy.freeze()


@pytest.mark.filterwarnings("ignore:.*no effect here")
def test_every_field_comes_back(tmp_path):
    for path, field in each_field():
        if isinstance(field.default, dict) or field.verdict.word == REFUSED:
            continue
        strategy = DistributedStrategy()
        set_at(strategy, path, other_value(field))
        assert value_at(read(written(strategy, tmp_path), tmp_path), path) == other_value(field)


def test_paddles_files_are_read(tmp_path):
    strategy = read(PADDLES, tmp_path)
    assert strategy.amp
    assert strategy.fuse_grad_size_in_MB == 16
    assert strategy.amp_configs["init_loss_scaling"] == 1024.0
    assert strategy.recompute_configs["checkpoints"] == ["encoder.0", "encoder.1"]
    assert strategy.degrees()["mp"] == 2
    assert strategy.degrees()["dp"] == -1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("# only words\n\n", {}),
        ("amp: True", {"amp": True}),
        ("amp: t lars: 0", {"amp": True, "lars": False}),
        ("amp: true; lars: false,", {"amp": True, "lars": False}),
        ("fuse_grad_size_in_MB: 0x10", {"fuse_grad_size_in_MB": 16}),
        ("fuse_grad_size_in_MB: 010", {"fuse_grad_size_in_MB": 8}),
        ("last_comm_group_size_MB: 1e-2", {"last_comm_group_size_MB": 0.01}),
        ("last_comm_group_size_MB: .5f", {"last_comm_group_size_MB": 0.5}),
        ("last_comm_group_size_MB: 2", {"last_comm_group_size_MB": 2.0}),
        ("mode: COLLECTIVE # here", {"mode": "COLLECTIVE"}),
        ("amp_configs: { incr_ratio: 3 }", {"amp_configs": {"incr_ratio": 3.0}}),
        ("amp_configs < incr_ratio: 3 >", {"amp_configs": {"incr_ratio": 3.0}}),
        ("amp_configs {} amp_configs { incr_ratio: 3 }", {"amp_configs": {"incr_ratio": 3.0}}),
        (
            "recompute_configs { checkpoints: ['a', \"b\" 'c'] checkpoints: 'd' }",
            {"recompute_configs": {"checkpoints": ["a", "bc", "d"]}},
        ),
        (
            r"recompute_configs { checkpoints: '\x61\303\244\'\n' }",
            {"recompute_configs": {"checkpoints": ["aä'\n"]}},
        ),
        ("hybrid_configs { dp_degree: -1 }", {"hybrid_configs": {"dp_degree": -1}}),
    ],
)
def test_what_the_format_allows(text, wanted):
    assert from_text(text) == wanted


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("amp: maybe", "line 1 has 'maybe', which is not true or false"),
        ("\n\namp: 'true'", "line 3 has 'true', which is no"),
        ("fuse_grad_size_in_MB: 1.5", "'1.5', which is not an integer"),
        ("recompute_configs { checkpoints: a }", "'a', which is not a string"),
        ("last_comm_group_size_MB: nan", "'nan', which is not a number"),
        ("amp true", "line 1 has 'true' where ':' or '{' behind amp is expected"),
        ("amp:", "has its end where a value is expected"),
        ("amp", "has its end where"),
        ("amp_configs {", "has its end where '}' is expected"),
        ("amp_configs { incr_ratio: 3 >", "has '>' where '}' is expected"),
        ("recompute_configs { checkpoints: ['a' }", "where a value is expected"),
        ("}", "line 1 has '}' where a field is expected"),
        ("amp: true\n$", r"line 2 has '\$', which is not the text format"),
        ("amp_configs: 3", "line 1 has a value of amp_configs, which is a section"),
        ("amp { x: 1 }", "line 1 has a section amp, which is a field"),
        (
            "amp: true\nfirst: 1\namp_configs { second: 'x' }\nthird { fourth: 2 }",
            r"no first \(line 2\), amp_configs\['second'\] \(line 3\), third \(line 4\); take them",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, told):
    with pytest.raises(dist.UsageError, match=told):
        from_text(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("dgc: true", "strategy.prototxt: dgc = True is refused"),
        ("amp: true gradient_merge_configs { k_steps: 0 }", "k_steps.* must be at least 1"),
        ("amp: true unknown: 1", "strategy.prototxt: a strategy has no unknown"),
    ],
)
def test_a_file_that_is_refused_sets_nothing(text, told, tmp_path):
    (tmp_path / "strategy.prototxt").write_text(text)
    strategy = DistributedStrategy()
    with pytest.raises(dist.UsageError, match=told):
        strategy.load_from_prototxt(tmp_path / "strategy.prototxt")
    assert strategy == DistributedStrategy()


def test_a_field_of_a_file_without_effect_is_a_warning_too(tmp_path):
    assert any(field.verdict.word == NO_EFFECT_HERE for _, field in each_field())
    with pytest.warns(UserWarning, match="nccl_comm_num .* no effect here") as caught:
        read("nccl_comm_num: 2", tmp_path)
    assert caught[0].filename == __file__


def test_a_table_of_a_server_has_no_form_in_a_file():
    with pytest.raises(dist.UsageError, match="sparse_table_configs has no form in a file"):
        to_text({("sparse_table_configs",): {"a": 1}})
