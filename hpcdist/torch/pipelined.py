"""`pp_config` of `parallelize`: a row of layers, cut into stages along the axis ``"pp"`` of a mesh.

`row_of` finds the row, `bounds_of` where it is cut; both are pure. `pipelined` makes the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpcdist.comm.together import Together
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_options import HybridOptions, Pipeline
from hpcdist.parallel.layer_plans import SplitPoint
from hpcdist.parallel.layers import PipelineOptions
from hpcdist.parallel.topology import CommunicateTopology
from hpcdist.parallel.vocabulary import known
from hpcdist.torch.layers import make_equal
from hpcdist.torch.optimizers import check_own, keep_parameters
from hpcdist.torch.pipeline.layers import PipelineLayer
from hpcdist.torch.pipeline.parallel import PipelineParallel
from hpcdist.torch.pipeline.segments import plan_segments

AXIS = "pp"
_BESIDE = ("dp",)

Row = Mapping[str, torch.nn.Module]


def pipelined(
    model: torch.nn.Module, optimizer: Any, mesh: ProcessMesh, options: PipelineOptions
) -> tuple[PipelineParallel, Any]:
    """Cut a row of layers into stages, of which this rank keeps its own. Collective over the mesh.

    The optimizer steps what this rank keeps.
    """
    found: list[tuple[Row, list[int]]] = []
    Together(mesh.group).share(lambda: found.append(_plan(model, optimizer, mesh, options)))
    ((row, bounds),) = found
    make_equal(model, mesh.group)
    topology = CommunicateTopology(mesh.names, mesh.sizes, ranks=mesh.ranks)
    grid = HybridCommunicateGroup(topology, group=mesh.group)
    layers = PipelineLayer(
        [*row.values()],
        loss_fn=options.loss_fn,
        seg_method=bounds,
        num_virtual_pipeline_stages=(len(bounds) - 1) // grid.degree(AXIS),
        group=grid[AXIS],
    )
    cut = Pipeline(
        micro_batch_size=options.micro_batch_size,
        accumulate_steps=options.accumulate_steps or grid.degree(AXIS),
        schedule=options.schedule,
    )
    made = PipelineParallel(layers, grid, HybridOptions(pipeline=cut))
    if optimizer is not None:
        keep_parameters(optimizer, [*made.parameters()])
    return made, optimizer


def _plan(
    model: torch.nn.Module, optimizer: Any, mesh: ProcessMesh, options: PipelineOptions
) -> tuple[Row, list[int]]:
    """Return the row, and the first layer of each stage and the end, if all can be done."""
    _check_axes(mesh)
    row = row_of(model)
    bounds = bounds_of([*row], options.split_spec, mesh.get_dim_size(AXIS))
    _check_apart(row, bounds)
    if optimizer is not None:
        check_own(optimizer, model)
    return row, bounds


def _check_axes(mesh: ProcessMesh) -> None:
    if AXIS not in mesh.names:
        raise UsageError(f"pp_config needs an axis 'pp', but {mesh!r} has {', '.join(mesh.names)}")
    wrong = [name for name in mesh.names if name not in (AXIS, *_BESIDE)]
    if wrong:
        raise UsageError(
            f"beside 'pp' a mesh has the axis 'dp', which cuts the batch, got {', '.join(wrong)}; "
            "a pipeline with other axes is described with PipelineLayer, and made by "
            "fleet.distributed_model"
        )


def row_of(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the layers that a model calls one after the other, by name. Pure.

    Those of a ``torch.nn.Sequential`` among them are layers of the row themselves.

    Raises:
        UsageError: the model is no ``torch.nn.Sequential``, or has hooks, which no stage would run.

    """
    if type(model) is not torch.nn.Sequential:
        raise UsageError(
            f"a pipeline cuts a row of layers, but {type(model).__name__} has a forward of its "
            "own; make it a torch.nn.Sequential, or describe its layers with "
            "hpcdist.torch.pipeline.PipelineLayer and train that with PipelineParallel"
        )
    row: dict[str, torch.nn.Module] = {}
    _add_to(row, model, "")
    return row


def _add_to(row: dict[str, torch.nn.Module], layers: torch.nn.Sequential, prefix: str) -> None:
    for name, layer in layers._modules.items():
        assert layer is not None
        if type(layer) is torch.nn.Sequential and not _has_hooks(layer):
            _add_to(row, layer, f"{prefix}{name}.")
        else:
            row[prefix + name] = layer


def _has_hooks(layer: torch.nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)


def bounds_of(names: Sequence[str], spec: Any, ranks: int) -> list[int]:
    """Return the first layer of each stage of a row, and the number of layers. Pure.

    Args:
        names: of the layers, with dots where one is in another.
        spec: as `split_spec` of `parallelize`.
        ranks: how many ranks the pipeline has.

    Raises:
        UsageError: it names no layer, or makes another number of stages than the ranks can have.

    Example:
        >>> bounds_of(["embed", "blocks.0", "blocks.1", "head"], "blocks", 2)
        [0, 2, 4]
        >>> bounds_of(["embed", "blocks.0", "head"], {"blocks": SplitPoint.END}, 2)
        [0, 2, 3]

    """
    if isinstance(spec, Mapping):
        return _at_points(names, spec, ranks)
    patterns = [spec] if isinstance(spec, str) else spec
    if not isinstance(patterns, (list, tuple)) or not all(
        isinstance(each, str) for each in patterns
    ):
        raise UsageError(
            "split_spec must be the name of the layers that repeat, a list of such names, or a "
            f"dictionary of a SplitPoint for each layer where the row is cut, got {spec!r}"
        )
    costs = [float(_is_one_of(name, patterns)) for name in names]
    if sum(costs) < ranks:
        raise UsageError(
            f"split_spec {spec!r} names {sum(costs):g} layers for {ranks} ranks, among "
            f"{_listed(names)}; each needs one of them"
        )
    return plan_segments(costs, ranks)


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a layer is named so, or is a member of a row that is."""
    try:
        return any(re.fullmatch(rf"(?:{each})(\.\d+)?", name) for each in patterns)
    except re.error as error:
        raise UsageError(f"split_spec {patterns!r} is no regular expression: {error}") from None


def _at_points(names: Sequence[str], spec: Mapping[Any, Any], ranks: int) -> list[int]:
    cuts = {_cut_at(names, name, point) for name, point in spec.items()} - {0, len(names)}
    stages = len(cuts) + 1
    if stages % ranks:
        raise UsageError(
            f"split_spec makes {stages} stages of {_listed(names)}, but the axis 'pp' has {ranks} "
            f"ranks; cut it at {ranks - 1} places, or at so many that each rank has several stages"
        )
    return [0, *sorted(cuts), len(names)]


def _cut_at(names: Sequence[str], name: Any, point: Any) -> int:
    if not isinstance(point, SplitPoint):
        raise UsageError(
            f"split_spec tells where the row is cut at {name!r} by SplitPoint.BEGINNING or "
            f"SplitPoint.END, got {point!r}"
        )
    members = [
        place for place, each in enumerate(names) if each == name or each.startswith(f"{name}.")
    ]
    if not members:
        known(name, names, "split_spec names no layer of the row:")
    return members[0] if point is SplitPoint.BEGINNING else members[-1] + 1


def _check_apart(row: Row, bounds: Sequence[int]) -> None:
    """Refuse stages that have a weight in common: each would change its own copy of it."""
    owner: dict[int, tuple[int, str]] = {}
    for place, (name, layer) in enumerate(row.items()):
        stage = next(each for each, end in enumerate(bounds[1:]) if place < end)
        for each in layer.parameters():
            first, other = owner.setdefault(id(each), (stage, name))
            if first != stage:
                raise UsageError(
                    f"{other} and {name} share a weight, but are in stages {first} and {stage}; "
                    "describe them with SharedLayerDesc in a PipelineLayer, or cut elsewhere"
                )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
