"""`DistributedStrategy`: what a user asks of hybrid training, field by field.

`FIELDS` (in `fields`) is the vocabulary. What is set is checked at once; `freeze` makes of it what
the engines read, `degrees` and `order` what the grid is made of.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path as FilePath
from typing import Any, cast, final

from hpcdist.errors import UsageError
from hpcdist.fleet import prototxt
from hpcdist.fleet.fields import (
    ALIASES,
    FIELDS,
    HONOURED,
    NO_EFFECT_HERE,
    SWITCHES,
    Field,
    Path,
    Section,
    checked,
    describe_path,
    field_at,
    lacking,
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
    Schedule,
    Sharding,
    TensorParallelOptions,
)
from hpcdist.parallel.topology import AXES
from hpcdist.parallel.vocabulary import known
from hpcdist.ps.modes import Mode, mode_told
from hpcdist.transport.flight.call_site import call_site, outer_frame

_SCHEDULES: dict[str, Schedule] = {"VPP": "Interleaved1F1B"}
"""Paddle's names of schedules that have another one here."""


@final
class Configs(MutableMapping[str, Any]):
    """A section of a strategy: a dictionary with keys of its own, whose values are checked.

    Keys are attributes, too: Paddle's sections inside of sections are messages. Made by
    `DistributedStrategy`, whose attributes sections are.
    """

    __slots__ = ("_path", "_strategy")

    def __init__(self, strategy: DistributedStrategy, path: Path) -> None:
        self._strategy, self._path = strategy, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copying and inspecting ask for
            raise AttributeError(name)
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self[name] = value

    def __getitem__(self, key: str) -> Any:
        section = cast(Section, field_at(self._path))
        return self._strategy.value_at((*self._path, known(key, section, lacking(self._path))))

    def __setitem__(self, key: str, value: Any) -> None:
        self._strategy.assign({(*self._path, key): value})

    def __delitem__(self, key: str) -> None:
        raise UsageError(
            f"{describe_path((*self._path, key))} cannot be deleted; set it to its default"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(cast(Section, field_at(self._path)))

    def __len__(self) -> int:
        return len(cast(Section, field_at(self._path)))

    def to_dict(self) -> dict[str, Any]:
        """Return keys and values as plain dictionaries."""
        return {
            key: value.to_dict() if isinstance(value, Configs) else value
            for key, value in self.items()
        }

    def __repr__(self) -> str:
        return repr(self.to_dict())


@final
class DistributedStrategy:
    """How a job trains: fields with Paddle's names and defaults.

    A field is set as an attribute, a section (``..._configs``) as a dictionary with some of its
    keys or all, or key by key. What is set is checked at once. A field is honoured, has no effect
    here (a warning says why), or is refused; `report` tells which.

    Raises:
        UsageError: no such field or key, a value of a wrong type or out of range, or a field that
            is refused.

    Example:
        >>> from hpcdist import fleet
        >>> strategy = fleet.DistributedStrategy()
        >>> strategy.gradient_merge = True
        >>> strategy.gradient_merge_configs = {"k_steps": 4}
        >>> print(strategy.report())
        gradient_merge = True: honoured: a step every few backward passes
        gradient_merge_configs['k_steps'] = 4: honoured: how many

    """

    __slots__ = ("_told", "_values")
    _values: dict[Path, Any]
    _told: set[Path]

    def __init__(self) -> None:
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_told", set())

    # ---- reading and setting

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in ALIASES:  # what copying and inspecting ask for
            raise AttributeError(name)
        name = ALIASES.get(name, name)
        return self.value_at((known(name, FIELDS, lacking(())),))

    def __setattr__(self, name: str, value: Any) -> None:
        self.assign({(ALIASES.get(name, name),): value})

    def __delattr__(self, name: str) -> None:
        raise UsageError(f"{name} cannot be deleted; set it to its default")

    def value_at(self, path: Path) -> Any:
        """Return the value of the field at a path; of a section, the section.

        Args:
            path: names, from the outside inwards.

        """
        found = field_at(path)
        if not isinstance(found, Field):
            return Configs(self, path)
        return copy.deepcopy(self._values.get(path, found.default))

    def assign(self, given: Mapping[Path, Any]) -> None:
        """Set fields and sections by their paths; all or nothing.

        Args:
            given: values by paths, each of which is a tuple of names.

        """
        values = dict(_flat(given))
        self._values.update(values)
        self._tell(values)

    def is_set(self, path: Path) -> bool:
        """Return whether somebody has set a field.

        Args:
            path: names, from the outside inwards.

        """
        return path in self._values

    def _tell(self, values: Mapping[Path, Any]) -> None:
        """Warn once for each field that was set and has no effect."""
        why: dict[str, list[str]] = {}
        for path, value in values.items():
            field = cast(Field, field_at(path))
            idle = field.verdict.word == NO_EFFECT_HERE and value != field.default
            if idle and path not in self._told:
                self._told.add(path)
                why.setdefault(field.verdict.about, []).append(describe_path(path))
        for about, names in why.items():
            warnings.warn(
                f"{', '.join(names)} (set at {call_site()}) {_have(names)} no effect here: {about}",
                stacklevel=outer_frame()[1],
            )

    def _waiting(self) -> list[Path]:
        """Return what is honoured, but waits for the switch of its section."""
        return [
            path
            for path in self._differing()
            if path[0] in SWITCHES
            and not self.value_at((SWITCHES[path[0]],))
            and cast(Field, field_at(path)).verdict.word == HONOURED
        ]

    # ---- what it says

    def report(self) -> str:
        """Return a line for each field that was set: its value and its effect."""
        lines = []
        for path, value in self._values.items():
            word, about = cast(Field, field_at(path)).verdict
            if path in self._waiting():
                word = f"{word} once {SWITCHES[path[0]]} = True"
            lines.append(f"{describe_path(path)} = {value!r}: {word}: {about}")
        return "\n".join(lines) or "nothing is set: every field has its default"

    def degrees(self) -> dict[str, int | None]:
        """Return the degree of each axis by its short name; None where it was not set."""
        told: dict[str, int | None] = {
            each.short: self._values.get(("hybrid_configs", f"{each.short}_degree"))
            for each in AXES
        }
        if self.sharding and told["sharding"] is None and told["dp"] is None:
            told["sharding"] = -1
        return told

    def order(self) -> list[str] | None:
        """Return the order of the axes; None for the usual one."""
        return cast("list[str] | None", self._values.get(("hybrid_configs", "order")))

    def freeze(self) -> HybridOptions:
        """Return the options of the engines; warn of sections that are not switched on.

        Raises:
            UsageError: two fields contradict each other.

        """
        for section in dict.fromkeys(path[0] for path in self._waiting()):
            if (section,) not in self._told:
                self._told.add((section,))
                warnings.warn(
                    f"{section} has no effect while {SWITCHES[section]} is False; set it, too",
                    stacklevel=outer_frame()[1],
                )
        merge, local = self.gradient_merge_configs, self.localsgd_configs
        lars, lamb = self.lars_configs, self.lamb_configs
        pipeline, recompute = self.pipeline_configs, self.recompute_configs
        schedule = pipeline["schedule_mode"]
        if self.lars and self.lamb:
            raise UsageError("lars and lamb are both set; an optimizer becomes one of them")
        return HybridOptions(
            amp=self._amp() if self.amp else None,
            recompute=Recompute(tuple(recompute["checkpoints"]), recompute["enable_offload"])
            if self.recompute
            else None,
            gradient_merge=GradientMerge(merge["k_steps"], merge["avg"])
            if self.gradient_merge
            else None,
            localsgd=LocalSGD(local["k_steps"], local["begin_step"]) if self.localsgd else None,
            lars=Lars(
                lars["lars_coeff"],
                lars["lars_weight_decay"],
                lars["epsilon"],
                tuple(lars["exclude_from_weight_decay"]),
            )
            if self.lars
            else None,
            lamb=Lamb(lamb["lamb_weight_decay"], tuple(lamb["exclude_from_weight_decay"]))
            if self.lamb
            else None,
            sharding=self._sharding(),
            pipeline=Pipeline(
                pipeline["micro_batch_size"],
                pipeline["accumulate_steps"],
                _SCHEDULES.get(schedule, schedule),
            ),
            tensor_parallel=TensorParallelOptions(
                self.tensor_parallel_configs["tensor_init_seed"],
                self.hybrid_configs["mp_configs"]["need_broadcast_data"],
            ),
            find_unused_parameters=self.find_unused_parameters,
            fuse_grad_size_MB=float(self.fuse_grad_size_in_MB),
            last_comm_group_size_MB=self.last_comm_group_size_MB,
            sync_batch_norm=self.sync_batch_norm,
            gradient_scale=self.gradient_scale_configs["scale_strategy"],
        )

    def table_mode(self) -> Mode:
        """Return the default mode of tables: "sync" unless the strategy sets another one."""
        told = self.is_set(("a_sync",)) or self.is_set(("a_sync_configs", "k_steps"))
        return mode_told(told and self.a_sync, self.a_sync_configs)

    def _amp(self) -> Amp:
        configs = self.amp_configs
        if configs["use_pure_fp16"] and configs["use_pure_bf16"]:
            raise UsageError(
                "amp_configs has both use_pure_fp16 and use_pure_bf16; computing is in one of them"
            )
        return Amp(
            configs["init_loss_scaling"],
            configs["incr_every_n_steps"],
            configs["decr_every_n_nan_or_inf"],
            configs["incr_ratio"],
            configs["decr_ratio"],
            configs["use_dynamic_loss_scaling"],
            "bfloat16" if configs["use_pure_bf16"] else "float16",
        )

    def _sharding(self) -> Sharding:
        configs = self.sharding_configs
        passes = self.hybrid_configs["sharding_configs"]["accumulate_steps"]
        passes = configs["gradient_merge_acc_step"] if passes == 1 else passes
        return Sharding(configs["stage"], configs["optimize_offload"], passes)

    # ---- files

    def save_to_prototxt(self, output: Any) -> None:
        """Write what was set to a file, in the text format of protocol buffers. Local.

        Args:
            output: the path of the file.

        """
        FilePath(output).write_text(prototxt.to_text(self._values))

    def load_from_prototxt(self, pb_file: Any) -> None:
        """Set fields from a file written by `save_to_prototxt`, ours or Paddle's. Local.

        Args:
            pb_file: the path of the file.

        Raises:
            UsageError: the file has another format, or fields that are not there, which are named,
                or a value is refused. Nothing is set then.

        """
        try:
            values = prototxt.from_text(FilePath(pb_file).read_text())
            self.assign({(name,): value for name, value in values.items()})
        except UsageError as error:
            raise UsageError(f"{pb_file}: {error}") from None

    # ---- a value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DistributedStrategy):
            return NotImplemented
        return self._differing() == other._differing()

    __hash__ = None  # type: ignore[assignment] # it can be changed

    def _differing(self) -> dict[Path, Any]:
        """Return what is set to another value than its default."""
        return {
            path: value
            for path, value in self._values.items()
            if value != cast(Field, field_at(path)).default
        }

    def __getstate__(self) -> tuple[dict[Path, Any], set[Path]]:
        return self._values, self._told

    def __setstate__(self, state: tuple[dict[Path, Any], set[Path]]) -> None:
        for name, value in zip(("_values", "_told"), state, strict=True):
            object.__setattr__(self, name, copy.copy(value))

    def __repr__(self) -> str:
        told = ", ".join(f"{describe_path(path)}={value!r}" for path, value in self._values.items())
        return f"DistributedStrategy({told})"


def _flat(given: Mapping[Path, Any]) -> Iterator[tuple[Path, Any]]:
    """Return the checked value of each field that is given alone or in a section."""
    for path, value in given.items():
        found = field_at(path)
        if isinstance(found, Field):
            yield path, checked(path, found, value)
        elif isinstance(value, Mapping):
            yield from _flat({(*path, key): each for key, each in value.items()})
        else:
            raise UsageError(
                f"{describe_path(path)} must be a dictionary such as {{{next(iter(found))!r}: ...}}"
                f", got {value!r}"
            )


def _have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"
