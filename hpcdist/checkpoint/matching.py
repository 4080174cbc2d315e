"""How a state takes what was saved: compared first, all of it, and filled when all is well.

`Matching.match` goes through a state and the description of a checkpoint at once. It returns a
function that fills the state later, and notes on the way which arrays are wanted and what does not
fit. How much may differ is a `Rule`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np

from hpcdist.checkpoint.boxes import Box, whole
from hpcdist.checkpoint.dist_arrays import is_dist_array
from hpcdist.checkpoint.dtensor import is_dtensor
from hpcdist.checkpoint.holdings import is_held, views_of
from hpcdist.checkpoint.local_slice import LocalSlice
from hpcdist.checkpoint.nodes import (
    ARRAYS,
    CONTAINERS,
    Node,
    Path,
    build,
    leaves,
    name_of,
    noun,
    wrap,
)
from hpcdist.checkpoint.objects import is_model, is_object, is_optimizer_state, template_of
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.sharded_weight import is_sharded_weight
from hpcdist.checkpoint.state import Opened, open_container
from hpcdist.comm.alarms import is_alarm
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import an

Get = Callable[[str], Any]
"""Returns an array that has been read, by name."""

Fill = Callable[[Get], Any]
"""Returns the filled part of a state."""


class Rule(NamedTuple):
    """How a part of a state may differ from what was saved.

    `more`: it takes what only the checkpoint has. `less`: it gives up what only the state has.
    `same`: arrays are of the same shape and dtype, lists of the same length, a value is no array;
    otherwise it becomes what was saved. `below` is the rule for each key. `grows`: lists become as
    long as they were, whatever else is the same.
    """

    more: bool
    less: bool
    same: bool
    below: Callable[[Any], Rule]
    grows: bool = False


def _exact(_: Any) -> Rule:
    return EXACT


def _free(_: Any) -> Rule:
    return FREE


def _growing(_: Any) -> Rule:
    return GROWING


EXACT = Rule(more=False, less=False, same=True, below=_exact)
"""What the user has spelled out."""

GROWING = EXACT._replace(below=_growing, grows=True)
"""What goes on where it is: its lists may have grown since."""

FREE = Rule(more=True, less=True, same=False, below=_free)
"""What becomes as it was saved."""

_OBJECT = EXACT._replace(below=_free)
"""The state of an object: its entries are fixed, what is in them is its own."""

_EXTRA = "_extra_state"

_MODEL = EXACT._replace(below=lambda key: FREE if str(key).endswith(_EXTRA) else EXACT)
"""The state of a model: `EXACT`, but for what modules of torch add by ``get_extra_state``."""

_GROUP = Rule(True, less=False, same=True, below=lambda key: EXACT if key == "params" else FREE)
_GROUPS = EXACT._replace(below=lambda _: _GROUP)
_PARTS = {"state": FREE, "param_groups": _GROUPS}
_OPTIMIZER = EXACT._replace(below=lambda key: _PARTS.get(key, FREE))
"""The state of one of torch's optimizers, which is empty before the first step."""


def _rule_of(thing: Any, template: Any) -> Rule:
    """Return the rule for the state of an object, which has that of `template` now."""
    if is_optimizer_state(template):
        return _OPTIMIZER
    if is_model(thing):
        return _MODEL
    return _OBJECT if template and isinstance(template, dict) else FREE


class Wanted(NamedTuple):
    """A box of an array of the checkpoint that is wanted.

    `into` is the user's array, or the data of a slice; None for a new one.
    """

    box: Box
    into: Any


class ObjectState(NamedTuple):
    """An object in the state, its present state, and the state to load."""

    name: str
    thing: Any
    before: Any
    fill: Fill
    has_arrays: bool


@final
class Matching:
    """What comes out of comparing a state with a checkpoint that has `arrays`."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays
        self.wanted: dict[str, list[Wanted]] = {}
        self.objects: list[ObjectState] = []
        self.problems: list[str] = []
        self.missing: list[str] = []
        """Names of what only the state has."""
        self._loaded: set[Path] = set()

    def left(self, structure: Node) -> set[Path]:
        """Return the paths that only the checkpoint has."""
        return {path for path, _ in leaves(structure)} - self._loaded

    def match(self, value: Any, node: Node, rule: Rule = EXACT) -> Fill:
        """Compare a state with what was saved. Collective if some objects' states are."""
        return self._match(value, node, (), rule, keep=True)

    def _match(self, value: Any, node: Node, path: Path, rule: Rule, keep: bool) -> Fill:
        """Compare a part of it; `keep` says to change dicts and lists where they are."""
        (kind,) = node
        if value is None:
            return self._new(node, path)
        if is_held(value):
            return self._array(value, node, path, rule)
        opened = open_container(value)
        if opened is not None:
            return self._container(value, opened, node, path, rule, keep)
        if is_object(value):
            return self._object(value, node, path)
        if kind in (*ARRAYS, *CONTAINERS):
            return self._differs(value, node, path, rule)
        return self._new(node, path)

    def _new(self, node: Node, path: Path) -> Fill:
        """Take what was saved, anew."""
        for deeper, leaf in leaves(node, path):
            self._loaded.add(deeper)
            ((kind, content),) = leaf.items()
            if kind in ARRAYS:
                self.wanted[content] = [Wanted(whole(self._arrays[content].shape), None)]
        return lambda get: build(node, lambda kind, name: wrap(kind, get(name)))

    def _differs(self, value: Any, node: Node, path: Path, rule: Rule, here: str = "") -> Fill:
        if not rule.same:
            return self._new(node, path)
        here = here or f"{an(type(value).__name__)} here"
        problem = f"{name_of(path)!r} is {noun(node)} in the checkpoint, {here}"
        return self._refuse(value, node, path, problem)

    def _refuse(self, value: Any, node: Node, path: Path, problem: str) -> Fill:
        self.problems.append(problem)
        self._loaded.update(deeper for deeper, _ in leaves(node, path))  # named once is enough
        return _always(value)

    # ---- arrays

    def _array(self, value: Any, node: Node, path: Path, rule: Rule) -> Fill:
        ((kind, name),) = node.items()
        if kind not in ARRAYS:
            return self._differs(value, node, path, rule, "not an array")
        try:
            self.wanted[name] = self._want(value, name)
        except UsageError as error:
            if not rule.same:
                return self._new(node, path)
            return self._refuse(value, node, path, str(error))
        self._loaded.add(path)
        return lambda get: _filled(value, get(name))

    def _want(self, given: Any, name: str) -> list[Wanted]:
        """Return what fills an array or its slices; `UsageError` if it does not fit."""
        saved, wanted = self._arrays[name], []
        for (_, dtype, shape, box), data in views_of(given, name):
            if (dtype, shape) != saved:
                raise UsageError(
                    f"{name!r} is {saved.dtype} of shape {saved.shape} in the checkpoint, but "
                    f"{dtype} of shape {shape} here"
                )
            wanted.append(Wanted(box, data))
        return wanted

    # ---- containers

    def _container(
        self, value: Any, opened: Opened, node: Node, path: Path, rule: Rule, keep: bool
    ) -> Fill:
        ((kind, content),) = node.items()
        alike = {kind, opened.kind} == {"list", "tuple"} and rule.same
        if kind != opened.kind and not alike:
            return self._differs(value, node, path, rule, f"a {opened.kind} here")
        is_given = rule in (EXACT, GROWING)
        if is_given and not opened.items:
            rule = FREE  # who has nothing yet takes what there is
        if kind == "dict":
            if is_given and is_optimizer_state(value):
                rule = _OPTIMIZER
            return self._dict(value, opened, dict(content), path, rule, keep)
        if len(content) == len(opened.items):
            return self._row(value, opened, content, path, rule, keep)
        if not rule.same or (rule.grows and kind == "list"):
            fill = self._new(node, path)
            return lambda get: _relisted(value, fill(get), keep)
        lengths = f"{len(content)} entries in the checkpoint, {len(opened.items)} here"
        return self._refuse(value, node, path, f"{name_of(path)!r} has {lengths}")

    def _row(
        self,
        value: Any,
        opened: Opened,
        saved: list[Node],
        path: Path,
        rule: Rule,
        keep: bool,
    ) -> Fill:
        """Compare a list or a tuple."""
        fills = [
            self._match(child, node, (*path, key), rule.below(key), keep)
            for (key, child), node in zip(opened.items, saved, strict=True)
        ]
        if not saved:
            self._loaded.add(path)
        if keep or opened.kind == "tuple":
            return lambda get: opened.rebuild([fill(get) for fill in fills])
        return lambda get: [fill(get) for fill in fills]

    def _dict(
        self,
        value: Any,
        opened: Opened,
        saved: dict[Any, Node],
        path: Path,
        rule: Rule,
        keep: bool,
    ) -> Fill:
        fills: dict[Any, Fill] = {}
        for key, child in opened.items:
            deeper = (*path, key)
            if key in saved:
                fills[key] = self._match(child, saved[key], deeper, rule.below(key), keep)
            elif not rule.less:
                self.missing.append(name_of(deeper))
                fills[key] = _always(child)
        if rule.more:
            for key in saved.keys() - fills.keys():
                fills[key] = self._new(saved[key], (*path, key))
        if not saved:
            self._loaded.add(path)
        if not isinstance(value, dict) and len(fills) == len(opened.items):
            return lambda get: opened.rebuild([fill(get) for fill in fills.values()])
        return lambda get: _refilled(value, {key: fill(get) for key, fill in fills.items()}, keep)

    # ---- objects

    def _object(self, thing: Any, node: Node, path: Path) -> Fill:
        try:
            template = template_of(thing, node, self._arrays)
        except Exception as error:
            if is_alarm(error):
                raise
            kind, cause = type(thing).__name__, f"{type(error).__name__}: {error}"
            problem = f"{name_of(path)!r} is a {kind} whose state cannot be taken: {cause}"
            return self._refuse(thing, node, path, problem)
        known = len(self.wanted)
        fill = self._match(template, node, path, _rule_of(thing, template), keep=False)
        has_arrays = len(self.wanted) > known
        self.objects.append(ObjectState(name_of(path), thing, template, fill, has_arrays))
        return _always(thing)


def _always(value: Any) -> Fill:
    return lambda _: value


def _filled(value: Any, array: Any) -> Any:
    """Return what stands in the place of `value` when its memory, or `array`, has been filled."""
    if isinstance(value, LocalSlice):
        return value._replace(data=array)
    if is_dist_array(value):
        value.local = array  # a new one, if it was read-only
        return value
    if is_dtensor(value) or is_sharded_weight(value):
        return value
    return array[()] if isinstance(value, np.generic) else array


def _relisted(value: Any, contents: Any, keep: bool) -> Any:
    if not (isinstance(value, list) and keep):
        return contents
    value[:] = contents
    return value


def _refilled(value: Any, contents: dict[Any, Any], keep: bool) -> Any:
    if not isinstance(value, dict):
        return contents
    known = value if keep else copy.copy(value)
    if known.keys() != contents.keys():
        known.clear()
    for key, each in contents.items():  # update() of a Counter would add
        known[key] = each
    return known
