"""`parallelize` for torch modules: sequences are cut along the axis ``"sep"`` of a mesh.

Ranks along that axis get the same batch. `PrepareContextParallel` gives the layers of a module a
part of each sequence, `ContextParallel` gives a layer that attends all of it, with some heads each:
what the layer computes in between is its own. Gradients are averaged with those of other batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.parallel.layer_plans import ContextParallel, LayerPlan, PrepareContextParallel
from hpcdist.torch.model_parallel.functions import all_to_all, check_parts
from hpcdist.torch.model_parallel.ulysses import HEADS, SEQUENCE, by_heads, check_heads
from hpcdist.torch.tensor_parallel import Chosen, choose

AXIS = "sep"
PLANS = (PrepareContextParallel, ContextParallel)

Plans = Mapping[str, Sequence[LayerPlan]]


def apart(plans: Plans) -> tuple[Plans, Plans]:
    """Return the plans that cut sequences, and the others."""
    kinds: tuple[dict[str, list[LayerPlan]], ...] = {}, {}
    for key, listed in plans.items():
        for plan in listed:
            kinds[not isinstance(plan, PLANS)].setdefault(key, []).append(plan)
    return kinds[0], kinds[1]


def context_parallel(model: torch.nn.Module, mesh: ProcessMesh, plans: Plans) -> None:
    """Split sequences at layers as the plans for their names say. Collective over the axis.

    Raises:
        UsageError: the mesh has no axis ``"sep"``, or a plan is for no layer.

    """
    if AXIS not in mesh.names:
        raise UsageError(
            f"sequences are cut along an axis {AXIS!r}, but {mesh!r} has {', '.join(mesh.names)}"
        )
    chosen = choose(model, plans)
    group = mesh.get_group(AXIS)
    for each in chosen:
        for plan in each.plans:
            _APPLY[type(plan)](each, group)


def _prepare(chosen: Chosen, group: Group) -> None:
    def cut(x: Any) -> Any:
        return _own_part(x, group) if isinstance(x, torch.Tensor) and x.ndim > 1 else x

    def before(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(map(cut, args)), {name: cut(each) for name, each in kwargs.items()}

    chosen.layer.register_forward_pre_hook(before, with_kwargs=True)


def _own_part(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's part of ``[batch, sequence, ...]``.

    Its gradient is zero elsewhere: the average over the ranks has those of all parts.
    """
    check_parts(x, 1, group)
    length = x.shape[1] // group.nranks
    return x.narrow(1, group.rank * length, length)


def _attend(chosen: Chosen, group: Group) -> None:
    def before(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        given = args[:3]
        if len(given) < 3 or not all(isinstance(each, torch.Tensor) for each in given):
            got = ", ".join(type(each).__name__ for each in args) or "nothing"
            raise UsageError(
                f"{chosen.name} is an attention layer: it must take query, key and value first, "
                f"not by keyword; got {got}"
            )
        check_heads(given, group)
        return (*by_heads(given, group), *args[3:])

    def after(_: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        own = _back(first, args[0].ndim, chosen.name, group)
        return (own, *rest) if isinstance(output, tuple) else own

    chosen.layer.register_forward_pre_hook(before)
    chosen.layer.register_forward_hook(after)


def _back(output: Any, ndim: int, name: str, group: Group) -> Any:
    """Return this rank's part of a sequence with all heads, which may be one dimension by now."""
    missing = ndim - getattr(output, "ndim", -1)
    if missing not in (0, 1):
        shape = getattr(output, "shape", None)
        got = f"shape {tuple(shape)}" if shape is not None else type(output).__name__
        raise UsageError(
            f"{name} is an attention layer: it must return a tensor of the shape of its query, or "
            f"with all heads in the last dimension, got {got}"
        )
    return all_to_all(output, group, cut=SEQUENCE, join=-1 if missing else HEADS)


_APPLY = {PrepareContextParallel: _prepare, ContextParallel: _attend}
