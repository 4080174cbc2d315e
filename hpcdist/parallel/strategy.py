"""`Strategy`: how `to_static` trains a model, in sections, each with its own switch. Pure.

`SECTIONS` is the whole vocabulary: what it does not have is an error that names what it has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, final

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.vocabulary import known

_NONE = type(None)


class Setting(NamedTuple):
    """The default of a key, and what else it may be: types, or a few values."""

    default: Any
    types: tuple[type, ...]
    values: tuple[Any, ...] = ()


def _setting(default: Any) -> Setting:
    """Return the setting of a plain default: values of its type, and integers for real numbers."""
    if isinstance(default, Setting):
        return default
    return Setting(default, (int, float) if isinstance(default, float) else (type(default),))


def _one_of(*values: Any) -> Setting:
    return Setting(values[0], (type(values[0]),), values)


_ROWS: dict[str, dict[str, Any]] = {
    "base": {
        "auto_mode": _one_of("semi", "full", "full_random"),
        "gradient_scale": True,
        "gradient_scale_using_allreduce_avg": False,
        "use_cache": True,
        "return_numpy": True,
        "all_ranks": False,
        "split_data": True,
        "seed": Setting(None, (int, _NONE)),
        "reinit": False,
    },
    "recompute": {
        "enable": False,
        "checkpoints": [],
        "no_recompute_segments": [],
        "sr": 0,
        "refined_ops_patterns": [],
        "enable_tuning": False,
    },
    "amp": {
        "enable": False,
        "dtype": _one_of("float16", "bfloat16"),
        "level": _one_of("o1", "o0", "o2", "o3"),
        "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.8,
        "use_dynamic_loss_scaling": True,
        "custom_white_list": [],
        "custom_black_list": [],
        "custom_black_varnames": [],
        "use_fp16_guard": False,
        "use_bf16_guard": False,
        "use_master_grad": False,
        "use_promote": True,
    },
    "sharding": {
        "enable": False,
        "stage": _one_of(1, 2, 3),
        "degree": 8,
        "enable_overlap": False,
        "param_comm_stream_num": 1,
        "grad_comm_stream_num": 1,
        "param_bucket_size_numel": 1,
        "grad_bucket_size_numel": 1,
        "enable_hierarchical_comm": False,
        "partition_algor": "greedy_even",
        "enable_tuning": False,
        "tuning_range": [],
        "release_gradients": False,
        "comm_buffer_size_MB": 256,
        "enable_tensor_fusion": False,
        "save_unbalanced_param": True,
        "machine_balanced_2d_partition": False,
    },
    "gradient_merge": {"enable": False, "k_steps": 1, "avg": True},
    "pipeline": {
        "enable": False,
        "schedule_mode": "1F1B",
        "pp_degree": 1,
        "vpp_degree": 1,
        "vpp_seg_method": "",
        "micro_batch_size": 1,
        "accumulate_steps": 1,
        "generation_batch_size": 1,
        "enable_send_recv_overlap": False,
        "job_schedule_profiler_start": -1,
        "job_schedule_profiler_stop": -1,
        "program_runtimes": [61, 72, 71, 34, 3],
        "memory_limit_times": -1,
        "split_backward": False,
        "auto_parallel_sync_shared_params": False,
    },
    "qat": {
        "enable": False,
        "channel_wise_abs_max": True,
        "weight_bits": 8,
        "activation_bits": 8,
        "not_quant_pattern": ["skip_quant"],
        "algo": Setting(None, (str, _NONE)),
        "onnx_format": True,
    },
    "tuning": {
        "enable": False,
        "profile_start_step": 1,
        "profile_end_step": 1,
        "run_after_tuning": True,
        "debug": False,
    },
    "dataset": {"enable": False, "num_shards": 1},
    "fused_linear_promotion": {"enable": False},
    "fused_passes": {"enable": False, "fused_passes_list": []},
    "dp_optimization": {
        "enable": False,
        "fuse_all_reduce_ops": True,
        "fuse_grad_size_in_MB": 32,
        "overlap_comm_cacl": True,
        "gradient_sync_after_accumulate": False,
    },
    "mp_optimization": {
        "allreduce_matmul_grad_overlapping": False,
        "replace_with_c_embedding": False,
        "replace_with_parallel_cross_entropy": False,
    },
    "sp_optimization": {"enable": True},
}
SECTIONS = {
    section: {key: _setting(default) for key, default in row.items()}
    for section, row in _ROWS.items()
}
"""Every section and key of a strategy."""

HONOURED = {
    "base": {"seed"},
    "recompute": {"enable", "checkpoints", "no_recompute_segments"},
    "amp": {
        "enable",
        "dtype",
        "level",
        "init_loss_scaling",
        "incr_every_n_steps",
        "incr_ratio",
        "decr_ratio",
        "use_dynamic_loss_scaling",
    },
    "sharding": {"enable", "stage", "degree", "comm_buffer_size_MB"},
    "gradient_merge": {"enable", "k_steps", "avg"},
    "dp_optimization": {"enable", "fuse_grad_size_in_MB"},
}
"""What changes how a `DistModel` trains; the rest has no meaning where nothing is compiled."""


@final
class Section:
    """One section of a `Strategy`: its keys are attributes. Wrong names and types are refused."""

    __slots__ = ("_name", "_values")
    _name: str
    _values: dict[str, Any]

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)
        values = {key: copy.copy(row.default) for key, row in SECTIONS[name].items()}
        object.__setattr__(self, "_values", values)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):  # what copying and pickling ask for
            raise AttributeError(key)
        return self._values[known(key, self._values, f"section {self._name!r} has no key")]

    def __setattr__(self, key: str, value: Any) -> None:
        known(key, self._values, f"section {self._name!r} has no key")
        self._values[key] = _checked(self._name, key, value)

    def __delattr__(self, key: str) -> None:
        raise UsageError(f"{self._name}.{key} cannot be deleted; set it to its default")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Section):
            return NotImplemented
        return (self._name, self._values) == (other._name, other._values)

    __hash__ = None  # type: ignore[assignment] # it can be changed

    def __getstate__(self) -> tuple[str, dict[str, Any]]:
        return self._name, self._values

    def __setstate__(self, state: tuple[str, dict[str, Any]]) -> None:
        for name, value in zip(("_name", "_values"), state, strict=True):
            object.__setattr__(self, name, value)

    def update(self, given: Mapping[str, Any]) -> None:
        """Set several keys; all or nothing."""
        if not isinstance(given, Mapping):
            raise UsageError(
                f"section {self._name!r} must be a dictionary such as "
                f"{{{next(iter(self._values))!r}: ...}}, got {given!r}"
            )
        for key in given:
            known(key, self._values, f"section {self._name!r} has no key")
        self._values.update({key: _checked(self._name, key, given[key]) for key in given})

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values."""
        return copy.deepcopy(self._values)

    def changed(self) -> dict[str, Any]:
        """Return what differs from the defaults."""
        return {
            key: value
            for key, value in self._values.items()
            if value != SECTIONS[self._name][key].default
        }

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in self._values.items())
        return f"{self._name}({values})"


@final
class Strategy:
    """How `to_static` trains: sections with keys, all of which have defaults.

    The sections ``sharding``, ``gradient_merge``, ``recompute`` and ``amp`` change how a
    `DistModel` trains once their ``enable`` is True. Nothing is compiled here, so the other ones,
    which tell a compiler what to do, have no effect, and `to_static` warns if they are used.

    Args:
        config: a dictionary of sections, each a dictionary of keys.

    Raises:
        UsageError: no such section or key, or a value of a wrong type.

    Example:
        >>> import hpcdist as dist
        >>> strategy = dist.Strategy({"gradient_merge": {"enable": True, "k_steps": 4}})
        >>> strategy.sharding.stage = 2
        >>> strategy.gradient_merge
        gradient_merge(enable=True, k_steps=4, avg=True)

    """

    __slots__ = ("_sections",)
    _sections: dict[str, Section]

    def __init__(self, config: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        object.__setattr__(self, "_sections", {name: Section(name) for name in SECTIONS})
        if config is not None and not isinstance(config, Mapping):
            raise UsageError(f"Expected a dictionary. But received: {config!r}")
        for name, given in (config or {}).items():
            self._section(name).update(given)

    def _section(self, name: str) -> Section:
        return self._sections[known(name, self._sections, "a strategy has no section")]

    def __getattr__(self, name: str) -> Section:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._section(name)

    def __setattr__(self, name: str, value: Any) -> None:
        section = self._section(name)
        section.update(value.to_dict() if isinstance(value, Section) else value)

    def __getstate__(self) -> dict[str, Section]:
        return self._sections

    def __setstate__(self, state: dict[str, Section]) -> None:
        object.__setattr__(self, "_sections", state)

    def __iter__(self) -> Iterator[Section]:
        return iter(self._sections.values())

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all sections as dictionaries, which `Strategy` takes again."""
        return {name: section.to_dict() for name, section in self._sections.items()}

    def without_effect(self) -> list[str]:
        """Return the keys that were set and have no effect, as ``section.key``.

        Keys of a section that is switched off change nothing, and are not meant to.
        """
        return [
            f"{name}.{key}"
            for name, section in self._sections.items()
            if section._values.get("enable", True)
            for key in section.changed()
            if key not in HONOURED.get(name, ())
        ]

    def __repr__(self) -> str:
        changed = {name: each.changed() for name, each in self._sections.items() if each.changed()}
        return f"Strategy({changed or ''})"


def _checked(section: str, key: str, value: Any) -> Any:
    """Return `value` as it is kept: lists are copied, tuples become lists."""
    row = SECTIONS[section][key]
    if list in row.types and isinstance(value, (list, tuple)):
        return list(value)
    is_right = isinstance(value, row.types) and (bool in row.types) == isinstance(value, bool)
    if row.values and isinstance(value, str):
        value = value.lower()
    if not is_right or (row.values and value not in row.values):
        wanted = row.values or tuple(
            "None" if each is _NONE else each.__name__ for each in row.types
        )
        raise UsageError(f"{section}.{key} must be {' or '.join(map(str, wanted))}, got {value!r}")
    return value
