"""`FIELDS`: every field of a strategy, its default, and what becomes of it. Pure.

A field is honoured, or has no effect here, or is refused; the last two say why. `HybridOptions` is
what the honoured ones come to. `docs/reference/strategy.md` has the table, made by `tables`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, get_args

import numpy as np

from hpcdist.errors import UsageAssertionError, UsageError, UsageTypeError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.hybrid_options import Schedule
from hpcdist.parallel.topology import AXES
from hpcdist.parallel.vocabulary import known

HONOURED, NO_EFFECT_HERE, REFUSED = "honoured", "no effect here", "refused"


class Verdict(NamedTuple):
    """The effect of a field: a word, and its effect, the reason for none, or a replacement."""

    word: str
    about: str


class Field(NamedTuple):
    """A field: its default, whose type it has, and what becomes of another value.

    Attributes:
        default: of type bool, int, float, str, list or dict.
        verdict: what becomes of it.
        item: the type of a list's entries.
        choices: the values there are; none for any.
        least: the smallest number there is.
        above: a number that it has to exceed.
        enum: whether a file of the strategy has it as a bare word.

    """

    default: Any
    verdict: Verdict
    item: type = str
    choices: tuple[Any, ...] = ()
    least: float | None = None
    above: float | None = None
    enum: bool = False


Section: TypeAlias = "dict[str, Field | Section]"
Path: TypeAlias = tuple[str, ...]


def _yes(about: str) -> Verdict:
    return Verdict(HONOURED, about)


def _idle(about: str) -> Verdict:
    return Verdict(NO_EFFECT_HERE, about)


def _no(about: str) -> Verdict:
    return Verdict(REFUSED, about)


def _all(verdict: Verdict, names: str, default: Any = False) -> Section:
    """Return fields, by their names, that have the same default and the same verdict."""
    return {name: Field(default, verdict) for name in names.split()}


# ---- why a field does nothing here

_SERVERS = _idle("tables have no such setting")
_PROGRAM = _idle("it is for a compiler of programs, and nothing is compiled")
_CUDNN = _idle("it is cuDNN's; set torch.backends.cudnn")
_NCCL = _idle(
    "NCCL is started through CuPy, which passes on no settings of one communicator; NCCL's "
    "variables, such as NCCL_MAX_NCHANNELS, are for all of them"
)
_BUCKETS = _idle("gradients travel in buckets of fuse_grad_size_in_MB")
_TIMERS = _idle("torch.profiler and hpcdist.subscribe show what took how long")
_EQUAL = _idle("what mp does not cut is equal on its ranks, which start from the same values")
_OVERLAP = _idle("whether something travels beside the computing is measured, see HPCDIST_OVERLAP")
_MESSAGES = _idle("messages of a pipeline are batched, and tell their shapes themselves")
_MEMORY = _idle("the engines keep no gradient twice")
_EXPERTS = _no(
    "the grid has no axis for experts; train with hpcdist.DataParallel, without fleet, and give "
    "their parameters a group of their own (hpcdist_group of a torch parameter, Parameter.group)"
)
_PLANNER = _no(
    "nobody looks for a plan; say the degrees in hybrid_configs, or use hpcdist.to_static"
)
_ONE_PLACE = "the degrees are said in one place: set hybrid_configs[{!r}]"

_NCCL_CONFIG: Section = {
    **_all(_NCCL, "commName", ""),
    **_all(_NCCL, "ll_buffsize ll128_buffsize simple_buffsize buffsize_align nchannels", 0),
    **_all(_NCCL, "algoStr protoStr", ""),
}


def _degree(default: int, about: str) -> Field:
    return Field(default, _yes(about), least=-1)


_MP: Section = {
    "sync_param": Field(True, _EQUAL),
    "sync_grad": Field(False, _EQUAL),
    "sync_moment": Field(False, _EQUAL),
    "sync_mode": Field("broadcast", _EQUAL),
    "mp_async_allreduce": Field(False, _OVERLAP),
    "mp_skip_c_identity": Field(False, _PROGRAM),
    "mp_fused_linear_param_grad_add": Field(False, _PROGRAM),
    "need_broadcast_data": Field(
        True, _yes("ranks along mp compare their samples; others than theirs are a MismatchError")
    ),
    "recompute_allgather": Field(False, _PROGRAM),
    "sp_async_reduce_scatter": Field(False, _OVERLAP),
    "nccl_config": _NCCL_CONFIG,
}
_PP: Section = {
    "dp_comm_overlap": Field(False, _OVERLAP),
    "sharding_comm_overlap": Field(False, _OVERLAP),
    "delay_scale_loss": Field(False, _idle("gradients are divided when they are averaged")),
    "enable_timer": Field(False, _TIMERS),
    "profiling": Field(False, _TIMERS),
    "release_gradients": Field(False, _MEMORY),
    "overlap_p2p_comm": Field(False, _OVERLAP),
    "clear_every_step_cache": Field(False, _MEMORY),
    "use_batch_p2p_comm": Field(True, _MESSAGES),
    "best_unbalanced_scheduler": Field(
        False, _no("say how layers are dealt out by PipelineLayer(seg_method=...)")
    ),
    "enable_offload_queue": Field(False, _MEMORY),
    "enable_dynamic_shape": Field(False, _MESSAGES),
    "use_dualpipev": Field(False, _no("set pipeline_configs['schedule_mode'] = 'ZBV'")),
    "forward_backward_overlap_scheduler": Field(
        False, _no("set pipeline_configs['schedule_mode'] = 'ZBV'")
    ),
    "sync_param": Field(False, _EQUAL),
    "sync_moment": Field(False, _EQUAL),
    "sync_mode": Field("broadcast", _EQUAL),
    "coll_nccl_config": _NCCL_CONFIG,
    "p2p_nccl_config": _NCCL_CONFIG,
}
_SHARDING: Section = {
    "tensor_fusion": Field(False, _BUCKETS),
    "accumulate_steps": Field(
        1, _yes("backward passes for a step of the sharded optimizer"), least=1
    ),
    "comm_overlap": Field(False, _OVERLAP),
    "split_param": Field(False, _idle("parameters are cut over the axis in any case")),
    "fuse_optimizer": Field(True, _BUCKETS),
    "use_reduce_avg": Field(True, _idle("gradients are summed and divided once")),
    "comm_buffer_size_MB": Field(256, _BUCKETS, least=1),
    "release_gradients": Field(False, _MEMORY),
    "free_grads_in_comm": Field(False, _MEMORY),
    "enable_fuse_optimizer_states": Field(False, _BUCKETS),
    "offload_opt_buffer_size": Field(
        -1, _idle("sharding_configs['optimize_offload'] is for all"), least=-1
    ),
    "nccl_config": _NCCL_CONFIG,
    "check_nccl_config": _NCCL_CONFIG,
}

_HYBRID: Section = {
    "dp_degree": _degree(-1, "ranks that train the same on other samples; -1: those that are left"),
    "mp_degree": _degree(1, "ranks that share each layer (tensor parallel)"),
    "pp_degree": _degree(1, "stages of the pipeline"),
    "sharding_degree": _degree(1, "ranks that share the optimizer's state, on other samples"),
    "sep_degree": _degree(1, "ranks that share each sequence (Ulysses)"),
    "cp_degree": _degree(1, "ranks along the axis cp, for layers of your own"),
    "ep_degree": Field(1, _EXPERTS, least=1),
    "moe_sharding_degree": Field(1, _EXPERTS, least=1),
    "cp_sharding_degree": Field(1, _no("set cp_degree and sharding_degree"), least=1),
    "order": Field([each.short for each in AXES], _yes("the axes; the last is on neighbours")),
    "enable_optimizer_timer": Field(False, _TIMERS),
    "split_norm_comm": Field(False, _idle("a norm over all axes is one number")),
    "mp_configs": _MP,
    "pp_configs": _PP,
    "sharding_configs": _SHARDING,
    "dp_configs": {"nccl_config": _NCCL_CONFIG, "check_nccl_config": _NCCL_CONFIG},
    "moe_sharding_configs": {"nccl_config": _NCCL_CONFIG, "check_nccl_config": _NCCL_CONFIG},
    **{
        f"{axis}_configs": {"nccl_config": _NCCL_CONFIG}
        for axis in (
            "sep", "dp_sep", "pp_tp", "ep", "cp", "cp_sharding", "dp_cp", "cp_mp", "default"
        )
    },
}  # fmt: skip

_STATIC_DEGREE = {
    f"{axis}_degree": Field(default, _no(_ONE_PLACE.format(f"{axis}_degree")), least=1)
    for axis, default in (("sharding", 8), ("mp", 1), ("dp", 1), ("pp", 1))
}

FIELDS: Section = {
    "mode": Field(
        "COLLECTIVE",
        _no("hpcdist.fleet trains collectively; pp_degree makes a pipeline"),
        choices=("COLLECTIVE", "PS", "PIPELINE", "HETER"),
        enum=True,
    ),
    # what the model and the optimizer do
    "amp": Field(False, _yes("computing in 16 bits, see amp_configs")),
    "amp_configs": {
        "init_loss_scaling": Field(32768.0, _yes("the first factor of the loss"), above=0),
        "incr_every_n_steps": Field(1000, _yes("good steps before the factor grows"), least=1),
        "decr_every_n_nan_or_inf": Field(2, _yes("bad steps before it shrinks"), least=1),
        "incr_ratio": Field(2.0, _yes("by what it grows"), above=1),
        "decr_ratio": Field(0.8, _yes("by what it shrinks"), above=0),
        "use_dynamic_loss_scaling": Field(True, _yes("whether the factor changes")),
        **_all(
            _no("wrap these layers in torch.autocast(..., enabled=False)"),
            "custom_white_list custom_black_list custom_black_varnames",
            [],
        ),
        "use_pure_fp16": Field(False, _yes("the same as amp alone: weights stay float32")),
        "use_pure_bf16": Field(False, _yes("bfloat16 in place of float16; weights stay float32")),
        "use_fp16_guard": Field(True, _PROGRAM),
        "use_optimizer_fp16": Field(
            False, _no("states of optimizers have the dtype of their weights")
        ),
    },
    "recompute": Field(False, _yes("activations are computed again, see recompute_configs")),
    "recompute_configs": {
        "checkpoints": Field([], _yes("the names of the layers whose activations are")),
        "enable_offload": Field(False, _yes("kept tensors are in host memory")),
        "checkpoint_shape": Field([], _PROGRAM, item=int),
        "enable_tuning": Field(False, _PROGRAM),
        "refined_ops_patterns": Field([], _PROGRAM),
    },
    "gradient_merge": Field(False, _yes("a step every few backward passes")),
    "gradient_merge_configs": {
        "k_steps": Field(1, _yes("how many"), least=1),
        "avg": Field(True, _yes("by their mean, not their sum")),
    },
    "localsgd": Field(False, _yes("weights are averaged now and then, in place of gradients")),
    "localsgd_configs": {
        "k_steps": Field(1, _yes("steps between two averages"), least=1),
        "begin_step": Field(1, _yes("up to this step after each one"), least=1),
    },
    "adaptive_localsgd": Field(False, _no("set localsgd, and localsgd_configs['k_steps']")),
    "adaptive_localsgd_configs": {
        "init_k_steps": Field(1, _no("set localsgd_configs['k_steps']"), least=1),
        "begin_step": Field(1, _no("set localsgd_configs['begin_step']"), least=1),
    },
    "dgc": Field(
        False,
        _no("give DataParallel compress=PowerSGD(); gradient_merge sends gradients less often"),
    ),
    "dgc_configs": {
        "rampup_begin_step": Field(0, _no("see dgc"), least=0),
        "rampup_step": Field(1, _no("see dgc"), least=1),
        "sparsity": Field([], _no("see dgc"), item=float),
    },
    "lars": Field(False, _yes("SGD with momentum becomes LARS")),
    "lars_configs": {
        "lars_coeff": Field(0.001, _yes("the trust coefficient"), above=0),
        "lars_weight_decay": Field(0.0005, _yes("the weight decay"), least=0),
        "epsilon": Field(0.0, _yes("added to the norms"), least=0),
        "exclude_from_weight_decay": Field([], _yes("words in names of parameters without it")),
    },
    "lamb": Field(False, _yes("Adam becomes LAMB")),
    "lamb_configs": {
        "lamb_weight_decay": Field(0.01, _yes("the weight decay"), least=0),
        "exclude_from_weight_decay": Field([], _yes("words in names of parameters without it")),
    },
    "sync_batch_norm": Field(False, _yes("statistics of batches are those of all ranks")),
    "find_unused_parameters": Field(False, _yes("parameters without a gradient count as zeros")),
    "fuse_grad_size_in_MB": Field(32, _yes("the size of a bucket of gradients"), above=0),
    "last_comm_group_size_MB": Field(1.0, _yes("the size of the last bucket"), above=0),
    "gradient_scale_configs": {
        "scale_strategy": Field(
            "avg", _yes("gradients are averaged or summed"), choices=("avg", "sum")
        ),
        "scale_gradient": Field(False, _PROGRAM),
    },
    "fp16_allreduce": Field(
        False, _no("give DataParallel compress='float16', or train in bfloat16")
    ),
    "qat": Field(
        False, _no("prepare the model with torch.ao.quantization before distributed_model")
    ),
    "qat_configs": {
        "channel_wise_abs_max": Field(True, _no("see qat")),
        "weight_bits": Field(8, _no("see qat"), least=1),
        "activation_bits": Field(8, _no("see qat"), least=1),
        "not_quant_pattern": Field([], _no("see qat")),
        "algo": Field("", _no("see qat")),
    },
    "asp": Field(False, _no("prune the model with torch.nn.utils.prune before distributed_model")),
    # which ranks do what
    "hybrid_configs": _HYBRID,
    "pipeline": Field(False, _idle("hybrid_configs['pp_degree'] makes a pipeline")),
    "pipeline_configs": {
        "micro_batch_size": Field(1, _yes("samples of a micro-batch"), least=1),
        "accumulate_steps": Field(1, _yes("micro-batches of a step"), least=1),
        "schedule_mode": Field(
            "1F1B",
            _yes("the order of forward and backward passes"),
            choices=(*get_args(Schedule), "VPP"),
        ),
        "p2p_cache_shape": Field(True, _MESSAGES),
        "enable_partial_send_recv": Field(True, _MESSAGES),
    },
    "tensor_parallel": Field(False, _idle("hybrid_configs['mp_degree'] cuts the layers")),
    "tensor_parallel_configs": {
        "tensor_parallel_degree": Field(1, _no(_ONE_PLACE.format("mp_degree")), least=1),
        "tensor_init_seed": Field(
            -1,
            _idle("layers draw whole weights from torch's generator; call torch.manual_seed"),
            least=-1,
        ),
    },
    "sharding": Field(False, _yes("without a degree all ranks share the state")),
    "sharding_configs": {
        "stage": Field(
            1, _yes("what is shared: states (1), gradients (2), parameters (3)"), choices=(1, 2, 3)
        ),
        "optimize_offload": Field(False, _yes("states are kept in host memory")),
        "gradient_merge_acc_step": Field(
            1, _yes("backward passes before the ranks exchange gradients"), least=1
        ),
        **_STATIC_DEGREE,
        "hybrid_dp": Field(False, _no(_ONE_PLACE.format("dp_degree"))),
        "sharding_segment_strategy": Field("segment_broadcast_MB", _PROGRAM),
        "segment_broadcast_MB": Field(32.0, _PROGRAM, above=0),
        "segment_anchors": Field([], _PROGRAM),
        **_all(
            _PROGRAM,
            "optimize_cast pp_allreduce_in_optimize _dp_as_optimizer_sharding enable_tuning "
            "use_calc_stream",
        ),
    },
    **_all(_PLANNER, "auto semi_auto auto_search"),
    "elastic": Field(False, _idle("the launcher and the checkpoint carry on with other ranks")),
    # how it travels
    "nccl_comm_num": Field(1, _idle("a group has one communicator"), least=1),
    "sync_nccl_allreduce": Field(
        True, _idle("waiting is up to the Work that an operation returns")
    ),
    "use_hierarchical_allreduce": Field(
        False,
        _idle("between nodes all_reduce is hierarchical where that is faster, see hpcdist tune"),
    ),
    "hierarchical_allreduce_inter_nranks": Field(
        1, _idle("the ranks of a node are known from where they run"), least=1
    ),
    "fuse_all_reduce_ops": Field(True, _BUCKETS),
    "fuse_grad_size_in_TFLOPS": Field(50.0, _BUCKETS, above=0),
    "fuse_grad_size_in_num": Field(8, _BUCKETS, least=1),
    "fuse_grad_merge": Field(False, _BUCKETS),
    "calc_comm_same_stream": Field(False, _OVERLAP),
    "split_data": Field(True, _idle("a DistributedSampler deals the samples out")),
    "heter_ccl_mode": Field(False, _no("all ranks of a job use one MPI library")),
    # what other systems do
    "cudnn_exhaustive_search": Field(False, _CUDNN),
    "cudnn_batchnorm_spatial_persistent": Field(False, _CUDNN),
    "conv_workspace_size_limit": Field(512, _CUDNN, least=0),
    "without_graph_optimization": Field(True, _PROGRAM),
    "build_strategy": {
        **_all(
            _PROGRAM,
            "fuse_elewise_add_act_ops fuse_bn_act_ops fuse_relu_depthwise_conv fuse_broadcast_ops "
            "fuse_all_optimizer_ops enable_inplace",
        ),
        "enable_backward_optimizer_op_deps": Field(True, _PROGRAM),
        "cache_runtime_context": Field(False, _PROGRAM),
        "fuse_bn_add_act_ops": Field(True, _PROGRAM),
        **_all(_PROGRAM, "enable_auto_fusion enable_addto allow_cuda_graph_capture"),
        "reduce_strategy": Field(0, _PROGRAM),
        "fuse_gemm_epilogue": Field(False, _PROGRAM),
        "debug_graphviz_path": Field("", _PROGRAM),
        **_all(
            _PROGRAM,
            "fused_attention fused_feedforward fuse_dot_product_attention fuse_resunit",
        ),
    },
    # parameter servers
    "a_sync": Field(
        True,
        _yes("set: tables that say nothing are of mode async, or geo; not set, or False: sync"),
    ),
    "a_sync_configs": {
        "k_steps": Field(-1, _yes("above 0: tables are of mode geo, and exchange so often")),
        "max_merge_var_num": Field(
            1, _yes("in mode async, so many pushes at most travel as one"), least=1
        ),
        "send_queue_size": Field(16, _yes("in mode async, so many pushes may wait"), least=1),
        "independent_recv_thread": Field(False, _SERVERS),
        **_all(_SERVERS, "min_send_grad_num_before_recv thread_pool_size send_wait_times", 1),
        "runtime_split_send_recv": Field(False, _SERVERS),
        "launch_barrier": Field(True, _SERVERS),
        "heter_worker_device_guard": Field("cpu", _SERVERS),
        "lr_decay_steps": Field(10, _SERVERS),
        **_all(_SERVERS, "use_ps_gpu use_gpu_graph", 0),
    },
    "trainer_desc_configs": {
        "dump_fields_path": Field("", _SERVERS),
        **_all(_SERVERS, "dump_fields dump_param stat_var_names", []),
        **_all(_SERVERS, "trainer device_worker", ""),
        **_all(_SERVERS, "local_sparse remote_sparse", []),
    },
    "fs_client_param": _all(_SERVERS, "uri user passwd hadoop_bin", ""),
    **_all(_SERVERS, "sparse_table_configs fleet_desc_configs", {}),
    **_all(_SERVERS, "adam_d2sum is_fl_ps_mode with_coordinator"),
}
"""Every field, by its name; a section of fields is a dictionary."""

SWITCHES = {
    f"{name}_configs": name
    for name in ("amp", "recompute", "gradient_merge", "localsgd", "lars", "lamb")
}
"""Sections that count once a field is True."""

ALIASES = {
    "_fuse_grad_size_in_TFLOPS": "fuse_grad_size_in_TFLOPS",
    "_calc_comm_same_stream": "calc_comm_same_stream",
    "is_with_coordinator": "with_coordinator",
}
"""What Paddle calls a field in Python, where that is not its name in files."""


# ---- looking up, checking


def field_at(path: Path) -> Field | Section:
    """Return the field or the section at a path.

    Raises:
        UsageError: there is none; the message has the nearest name.

    """
    found: Field | Section = FIELDS
    for depth, name in enumerate(path):
        assert isinstance(found, dict)
        kind = UsageAssertionError if depth else UsageTypeError  # as Paddle's strategies do
        found = found[known(name, found, lacking(path[:depth]), kind)]
    return found


def lacking(path: Path) -> str:
    """Return how a message begins about a name that the section at `path` does not have."""
    return f"{describe_path(path)} has no key" if path else "a strategy has no field"


def describe_path(path: Path) -> str:
    """Return a path as it is written: ``hybrid_configs['mp_configs']``."""
    return path[0] + "".join(f"[{name!r}]" for name in path[1:])


def each_field(section: Section = FIELDS, path: Path = ()) -> Iterator[tuple[Path, Field]]:
    """Return all fields below a section, with their paths."""
    for name, found in section.items():
        if isinstance(found, Field):
            yield (*path, name), found
        else:
            yield from each_field(found, (*path, name))


def checked(path: Path, field: Field, value: Any) -> Any:
    """Return `value` as it is kept: a plain Python value of the field's type, lists copied.

    Raises:
        UsageError: it has another type, or is none of the values there are, or is refused.

    """
    kept = _typed(path, field, value)
    if field.choices and kept not in field.choices:
        raise _wrong(path, f"one of {', '.join(map(repr, field.choices))}", value)
    if field.least is not None and not kept >= field.least:
        raise _wrong(path, f"at least {field.least}", value)
    if field.above is not None and not kept > field.above:
        raise _wrong(path, f"greater than {field.above}", value)
    if field.verdict.word == REFUSED and kept != field.default:
        raise UsageError(f"{describe_path(path)} = {value!r} is refused: {field.verdict.about}")
    return kept


def _typed(path: Path, field: Field, value: Any) -> Any:
    kind = type(field.default)
    if kind is list:
        if not isinstance(value, (list, tuple)):
            raise _wrong(path, f"a list of {_PLURALS[field.item]}", value)
        entry = Field(field.item(), field.verdict)
        return [_typed((*path, str(at)), entry, each) for at, each in enumerate(value)]
    try:
        return _READERS[kind](value)
    except TypeError:
        raise _wrong(path, _SINGULARS[kind], value) from None


def _wrong(path: Path, wanted: str, value: Any) -> UsageError:
    return UsageError(f"{describe_path(path)} must be {wanted}, got {value!r}")


def _bool(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError
    return bool(value)


def _int(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError
    return operator.index(value)


def _float(value: Any) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        raise TypeError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return dict(value)


_READERS = {bool: _bool, int: _int, float: _float, str: _text, dict: _dict}
_SINGULARS = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a dictionary",
}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}


# ---- documentation


def tables() -> str:
    """Return the tables of the documentation: honoured, refused, and without effect."""
    by_word: dict[str, dict[str, list[str]]] = {HONOURED: {}, REFUSED: {}, NO_EFFECT_HERE: {}}
    for path, field in each_field():
        told = f"`{'.'.join(path)}`"
        if field.verdict.word == HONOURED:
            about = f"`{field.default!r}` | {field.verdict.about}"
            by_word[HONOURED].setdefault(f"{told} | {about}", [])
        elif path[-1] not in _NCCL_CONFIG:
            by_word[field.verdict.word].setdefault(field.verdict.about, []).append(told)
    by_word[NO_EFFECT_HERE][_NCCL.about] = ["every `nccl_config`"]
    honoured = [f"| {row} |" for row in by_word[HONOURED]]
    refused = [f"| {', '.join(names)} | {about} |" for about, names in by_word[REFUSED].items()]
    idle = [f"| {', '.join(names)} | {about} |" for about, names in by_word[NO_EFFECT_HERE].items()]
    return "\n".join(
        [
            "| honoured | default | what it does |\n|---|---|---|",
            *honoured,
            "\n| refused | what to do |\n|---|---|",
            *refused,
            "\n| no effect here | why |\n|---|---|",
            *idle,
        ]
    )
