"""`shard_layer`, `parallelize`, `fully_shard`, `to_static`: torch modules on a mesh.

Here arguments are checked; `hpcdist.torch` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcdist.arrays.libraries import row_of
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh
from hpcdist.parallel.engines import load
from hpcdist.parallel.layer_plans import REFUSED, LayerPlan
from hpcdist.parallel.strategy import Strategy
from hpcdist.parallel.vocabulary import known


class DataOptions(NamedTuple):
    """The section ``dp_config`` of `parallelize`, checked."""

    sharding_level: int = 0
    offload: bool = False
    exclude_layer: Sequence[str | int] | None = None


def shard_layer(
    layer: Any,
    process_mesh: ProcessMesh,
    shard_fn: Callable[[str, Any, ProcessMesh], None] | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> Any:
    """Make the parameters and buffers of a torch module DTensors on a mesh, in place.

    The module computes what it computes in one process, wherever its parameters are cut; torch's
    DTensor finds out what has to be communicated. Called with ordinary tensors, which all ranks
    have alike, it returns ordinary ones; called with DTensors, as a `ShardDataloader` gives, it
    returns DTensors. Ordinary tensors that it makes on its way are taken to be alike, too.

    Collective over the mesh: all ranks get the values of its first. Make the optimizer afterwards,
    of ``layer.parameters()``.

    Args:
        layer: a `torch.nn.Module`.
        process_mesh: the ranks.
        shard_fn: called as ``shard_fn(name, sublayer, process_mesh)`` for each of the modules,
            the first of which is the layer itself; it replaces parameters by DTensors. The others
            are replicated.
        input_fn: called as ``input_fn(inputs, process_mesh)`` before the layer; returns its inputs.
        output_fn: called as ``output_fn(outputs, process_mesh)`` after it; returns its outputs.

    Returns:
        The layer.

    Raises:
        UsageError: a wrong argument.
        MismatchError: the parameters of two ranks differ in name, order, shape or dtype.

    """
    if process_mesh is None:
        raise UsageError("The argument `process_mesh` cannot be empty.")
    if not isinstance(process_mesh, ProcessMesh):
        raise UsageError(
            f"The argument `process_mesh` is not `dist.ProcessMesh` type, got {process_mesh!r}"
        )
    shard = _torchs(layer, "hpcdist.torch.layers:shard_module", "shard_layer")
    return shard(layer, process_mesh, shard_fn, input_fn, output_fn)


def parallelize(
    model: Any,
    optimizer: Any = None,
    mesh: ProcessMesh | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Make a torch module train on all ranks of a mesh, as `config` says.

    Along the axis ``"mp"`` of the mesh, ``mp_config`` cuts layers: ranks there get the same batch.
    All other axes cut the batch: each rank trains on its own part, gradients are averaged, and
    ``dp_config`` tells what is sharded. The module takes this rank's part of the batch and returns
    its outputs as ordinary tensors.

    Collective over the mesh; use what is returned in place of what was given.

    Args:
        model: a `torch.nn.Module`.
        optimizer: one of torch.optim, of the model's parameters and fresh; or None.
        mesh: the ranks; None for the current mesh (`set_mesh`).
        config: sections, all of which can be left out: ``"mp_config": {"parallelize_plan": {name:
            plan or list of plans}}``, where a name is that of a layer or parameter or a regular
            expression for several; ``"dp_config": {"sharding_level": 0 to 3, "offload": bool,
            "exclude_layer": names}``, where level 0 is data parallelism and the others are stages
            of ZeRO. ``pp_config`` and ``cp_config`` are refused, and say what to use.

    Returns:
        Model and optimizer.

    Raises:
        UsageError: a wrong argument; a plan is for no layer, or for one that it cannot cut.

    """
    mesh = get_mesh() if mesh is None else mesh
    if not isinstance(mesh, ProcessMesh):
        raise UsageError(f"parallelize needs a ProcessMesh: give mesh=, or set_mesh; got {mesh!r}")
    engine = _torchs(model, "hpcdist.torch.parallelized:parallelize_module", "parallelize")
    sections = _sections(config)
    made: tuple[Any, Any] = engine(
        model, optimizer, mesh, _plans(sections["mp_config"]), _data_options(sections["dp_config"])
    )
    return made


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Any], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[Any] | None = None,
    enable_tensor_fusion_and_overlap: bool = True,
) -> Any:
    """Shard the parameters of a torch module over a mesh, in place (FSDP2).

    This is torch's ``fully_shard`` on hpcdist's backend: call it for layers first, then for the
    whole module, and make the optimizer afterwards. Collective over the mesh.

    Args:
        module: a `torch.nn.Module`.
        mesh: a `ProcessMesh` of one axis, which shards, or of two, of which the first replicates;
            None for the current mesh, or all ranks if there is none.
        reshard_after_forward: whether parameters are gathered anew in the backward pass; None
            lets all layers but the outermost.
        shard_placement_fn: gets a parameter and returns its `Shard`, or None for ``Shard(0)``.
        mp_policy: a ``torch.distributed.fsdp.MixedPrecisionPolicy``.
        offload_policy: a ``torch.distributed.fsdp.OffloadPolicy``.
        ignored_params: parameters that stay as they are.
        enable_tensor_fusion_and_overlap: accepted for Paddle's sake; torch does both.

    Returns:
        The module.

    """
    shard = _torchs(module, "hpcdist.torch.parallelized:fully_shard_module", "fully_shard")
    return shard(
        module,
        mesh,
        reshard_after_forward,
        shard_placement_fn,
        mp_policy,
        offload_policy,
        ignored_params,
    )


def to_static(
    layer: Any,
    loader: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Any = None,
    strategy: Strategy | None = None,
    input_spec: Sequence[Sequence[Any]] | None = None,
) -> Any:
    """Make a `DistModel` of a torch module: calling it trains, evaluates or predicts one batch.

    Nothing is compiled: what it does is what the loop body of a training program does, as
    `strategy` says. Collective over all ranks that train together.

    Args:
        layer: an ordinary `torch.nn.Module`, which then trains data-parallel, or one from
            `shard_layer`, `parallelize` or `fully_shard`.
        loader: what the batches come from: a `ShardDataloader`, whose mesh and axis tell who trains
            together; with any other it is the current mesh, or all ranks.
        loss: called with outputs and labels; without one the model can only predict.
        optimizer: one of torch.optim, of the layer's parameters; without one the model can
            evaluate.
        strategy: what else is done; None for the defaults.
        input_spec: two lists, of a description of each input and of each label; only their lengths
            matter. None: the last argument is the labels.

    Raises:
        UsageError: a wrong argument, or a section of the strategy for which torch has something
            else.

    """
    make = _torchs(layer, "hpcdist.torch.dist_model:DistModel", "to_static")
    return make(layer, loader, loss, optimizer, strategy, None, input_spec)


# ---- arguments


_CONFIG: dict[str, tuple[str, ...]] = {
    "dp_config": DataOptions._fields,
    "mp_config": ("parallelize_plan",),
    "pp_config": ("split_spec", "global_spec"),
    "cp_config": ("context_parallel_degree",),
}
_NOT_HERE = {
    "pp_config": "pipelines are torch's own: cut the model with "
    "torch.distributed.pipelining.pipeline and SplitPoint, and run a schedule on backend 'hpcdist'",
    "cp_config": "attention is cut by torch's own: use "
    "torch.distributed.tensor.experimental.context_parallel on backend 'hpcdist'",
}


def _sections(config: Any) -> dict[str, Mapping[str, Any]]:
    """Return the sections of a configuration, all of them, with keys that are known."""
    if config is not None and not isinstance(config, Mapping):
        raise UsageError(f"config must be a dictionary of sections, got {config!r}")
    sections: dict[str, Mapping[str, Any]] = {name: {} for name in _CONFIG}
    for name, given in (config or {}).items():
        known(name, _CONFIG, "parallelize has no section")
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise UsageError(f"{name} must be a dictionary, got {given!r}")
        if given and name in _NOT_HERE:
            raise UsageError(f"{name} is not for torch modules: {_NOT_HERE[name]}")
        for key in given:
            known(key, _CONFIG[name], f"{name} has no key")
        sections[name] = given
    return sections


def _plans(section: Mapping[str, Any]) -> dict[str, list[LayerPlan]]:
    given = section.get("parallelize_plan") or {}
    if not isinstance(given, Mapping):
        raise UsageError(f"parallelize_plan must be a dictionary of plans by layer, got {given!r}")
    plans = {
        key: list(each) if isinstance(each, (list, tuple)) else [each]
        for key, each in given.items()
    }
    for key, listed in plans.items():
        if not isinstance(key, str):
            raise UsageError(f"The key of the parallelize plan should be a string, got {key!r}")
        for plan in listed:
            if not isinstance(plan, LayerPlan):
                raise UsageError(
                    f"the plan of {key!r} must be one such as ColWiseParallel() or a list of them, "
                    f"got {plan!r}"
                )
            if type(plan) in REFUSED:
                raise UsageError(
                    f"{type(plan).__name__} of {key!r} is not for torch modules: "
                    f"{REFUSED[type(plan)]}"
                )
    return plans


def _data_options(section: Mapping[str, Any]) -> DataOptions:
    options = DataOptions(**section)
    level = options.sharding_level
    if isinstance(level, bool) or level not in (0, 1, 2, 3):
        raise UsageError(f"dp_config.sharding_level must be 0, 1, 2 or 3, got {level!r}")
    if not isinstance(options.offload, bool):
        raise UsageError(f"dp_config.offload must be True or False, got {options.offload!r}")
    return options


def _torchs(model: Any, row: str, caller: str) -> Any:
    """Return what does the work for a torch module; refuse other models."""
    if row_of(type(model), {("torch", "Module"): row}) is None:
        raise UsageError(
            f"{caller} got {model!r}, which is no torch.nn.Module; models of arrays compute with "
            "shard_tensor, and are sharded by group_sharded_parallel or shard_optimizer"
        )
    return load(row)
