"""`shard_layer`, `parallelize`, `fully_shard`, `to_static`: torch modules on a mesh.

Here arguments are checked; `hpcdist.torch` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hpcdist.arrays.libraries import row_of
from hpcdist.errors import UsageError
from hpcdist.lazy import load
from hpcdist.mesh.process_mesh import ProcessMesh, get_mesh
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.layer_plans import LayerPlan, refusal_of
from hpcdist.parallel.strategy import Strategy
from hpcdist.parallel.vocabulary import known


class DataOptions(NamedTuple):
    """The section ``dp_config`` of `parallelize`, checked."""

    sharding_level: int = 0
    offload: bool = False
    exclude_layer: Sequence[str | int] | None = None


class PipelineOptions(NamedTuple):
    """The section ``pp_config`` of `parallelize`, checked."""

    split_spec: Any
    loss_fn: Callable[..., Any] | None = None
    micro_batch_size: int = 1
    accumulate_steps: int | None = None
    schedule: Any = "1F1B"


def shard_layer(
    layer: Any,
    process_mesh: ProcessMesh,
    shard_fn: Callable[[str, Any, ProcessMesh], None] | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> Any:
    """Make the parameters and buffers of a torch module DTensors on a mesh, in place.

    The module computes what it computes in one process, however its parameters are cut; torch's
    DTensor finds out what has to be communicated. Called with ordinary tensors, which all ranks
    have alike, it returns ordinary ones; called with DTensors, as a `ShardDataloader` gives, it
    returns DTensors. Ordinary tensors that it makes on its way are taken to be alike, too.

    Collective over the mesh: all ranks get the values of its first. Make the optimizer afterwards,
    of ``layer.parameters()``.

    Of a tree of arrays (dicts, lists and tuples of NumPy arrays or `Parameter`s) it returns a tree
    of `DistArray`s, with which NumPy computes; their gradients are up to the program, or to JAX.

    Args:
        layer: a `torch.nn.Module`, or a tree of arrays.
        process_mesh: the ranks.
        shard_fn: called as ``shard_fn(name, sublayer, process_mesh)`` for each of the modules,
            the first of which is the layer itself; it replaces parameters by DTensors. The others
            are replicated. Of a tree as ``shard_fn(path, array, process_mesh)`` for each of the
            arrays, with a path such as ``tree['layers'][0]``; it returns placements or a
            `DistArray`, or None for one that is replicated.
        input_fn: called as ``input_fn(inputs, process_mesh)`` before the layer; returns its inputs.
        output_fn: called as ``output_fn(outputs, process_mesh)`` after it; returns its outputs.

    Returns:
        The layer; or a new tree.

    Raises:
        UsageError: a wrong argument.
        MismatchError: the parameters of two ranks differ in name, order, shape or dtype.

    Example:
        >>> import torch, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh(list(range(world.nranks)), dim_names=["mp"])
        >>> def cut(name, layer, mesh):
        ...     if isinstance(layer, torch.nn.Linear):
        ...         weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(0)])
        ...         layer.weight = torch.nn.Parameter(weight)
        >>> model = dist.shard_layer(torch.nn.Linear(8, 4), mesh, cut)
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 4])

    """
    if process_mesh is None:
        raise UsageError("The argument `process_mesh` cannot be empty.")
    if not isinstance(process_mesh, ProcessMesh):
        raise UsageError(
            f"The argument `process_mesh` is not `dist.ProcessMesh` type, got {process_mesh!r}"
        )
    if isinstance(layer, (dict, list, tuple)):
        if input_fn is not None or output_fn is not None:
            raise UsageError("a tree of arrays is not called; leave out input_fn and output_fn")
        return load("hpcdist.parallel.array_layers:shard_tree")(layer, process_mesh, shard_fn)
    shard = _torchs(layer, "hpcdist.torch.layers:shard_module", "shard_layer")
    return shard(layer, process_mesh, shard_fn, input_fn, output_fn)


def parallelize(
    model: Any,
    optimizer: Any = None,
    mesh: ProcessMesh | None = None,
    config: Mapping[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Make a torch module train on all ranks of a mesh, by the plan in `config`.

    Along the axis ``"mp"`` of the mesh, ``mp_config`` cuts layers, and along the axis ``"sep"``
    ``cp_config`` cuts sequences: ranks there get the same batch. All other axes cut the batch: each
    rank trains on its own part, gradients are averaged, and ``dp_config`` tells what is sharded.
    The module takes this rank's part of the batch and returns its outputs as ordinary tensors.

    Collective over the mesh; use what is returned in place of what was given.

    Args:
        model: a `torch.nn.Module`.
        optimizer: one of torch.optim, of the model's parameters and fresh; or None.
        mesh: the ranks; None for the current mesh (`set_mesh`).
        config: sections, all of which can be left out: ``"mp_config": {"parallelize_plan": {name:
            plan or list of plans}}``, where a name is that of a layer or parameter or a regular
            expression for several; ``"dp_config": {"sharding_level": 0 to 3, "offload": bool,
            "exclude_layer": names}``, where level 0 is data parallelism and the others are stages
            of ZeRO; ``"cp_config": {"parallelize_plan": ...}`` with `PrepareContextParallel` and
            `ContextParallel`, which may also be among those of ``mp_config``; ``"pp_config":
            {"split_spec": ...}``, see below.

    Along the axis ``"pp"``, ``pp_config`` cuts a ``torch.nn.Sequential`` into stages, and returns a
    `hpcdist.torch.pipeline.PipelineParallel`, which trains by ``train_batch((inputs, labels),
    optimizer)``. Its ``split_spec`` is the name of the layers that repeat (``"blocks"``), or a list
    of names, which are dealt out evenly; or a dictionary from the name of a layer to
    `SplitPoint.BEGINNING` or `SplitPoint.END`. Further keys are ``loss_fn``, called with outputs
    and labels; ``micro_batch_size`` (1) and ``accumulate_steps`` (the number of ranks), by which a
    batch is cut; and ``schedule`` ("1F1B").

    Returns:
        Model and optimizer.

    Raises:
        UsageError: a wrong argument; a plan does not match any layer, or matches one that it cannot
            cut.

    Example:
        >>> import torch, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> mesh = dist.ProcessMesh([list(range(world.nranks))], dim_names=["dp", "mp"])
        >>> Linear = torch.nn.Linear
        >>> model = torch.nn.Sequential(Linear(8, 16), torch.nn.ReLU(), Linear(16, 1))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = {"0": dist.ColWiseParallel(), "2": dist.RowWiseParallel()}
        >>> config = {"mp_config": {"parallelize_plan": plan}}
        >>> model, optimizer = dist.parallelize(model, optimizer, mesh, config)
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 1])

    """
    mesh = get_mesh() if mesh is None else mesh
    if not isinstance(mesh, ProcessMesh):
        raise UsageError(f"parallelize needs a ProcessMesh: give mesh=, or set_mesh; got {mesh!r}")
    engine = _torchs(model, "hpcdist.torch.parallelized:parallelize_module", "parallelize")
    sections = _sections(config)
    if sections["pp_config"]:
        options = _pipeline_options(sections)
        cut = load("hpcdist.torch.pipelined:pipelined")
        pipeline: tuple[Any, Any] = cut(model, optimizer, mesh, options)
        return pipeline
    made: tuple[Any, Any] = engine(
        model, optimizer, mesh, _all_plans(sections), _data_options(sections["dp_config"])
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
        reshard_after_forward: whether parameters are gathered anew in the backward pass; None does
            so for all layers but the outermost.
        shard_placement_fn: gets a parameter and returns its `Shard`, or None for ``Shard(0)``.
        mp_policy: a ``torch.distributed.fsdp.MixedPrecisionPolicy``.
        offload_policy: a ``torch.distributed.fsdp.OffloadPolicy``.
        ignored_params: parameters that stay as they are.
        enable_tensor_fusion_and_overlap: accepted for Paddle's sake; torch does both.

    Returns:
        The module.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> model = dist.fully_shard(torch.nn.Linear(8, 1))
        >>> model(torch.ones(4, 8)).sum().backward()

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

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> layer = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> model = dist.to_static(layer, loss=torch.nn.functional.mse_loss, optimizer=optimizer)
        >>> loss = model(torch.ones(4, 8), torch.ones(4, 1))

    """
    make = _torchs(layer, "hpcdist.torch.dist_model:DistModel", "to_static")
    return make(layer, loader, loss, optimizer, strategy, None, input_spec)


# ---- arguments


_CONFIG: dict[str, tuple[str, ...]] = {
    "dp_config": DataOptions._fields,
    "mp_config": ("parallelize_plan",),
    "pp_config": ("global_spec", *PipelineOptions._fields),
    "cp_config": ("parallelize_plan",),
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
        for key in given:
            known(key, _CONFIG[name], f"{name} has no key")
        sections[name] = given
    return sections


def _all_plans(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, list[LayerPlan]]:
    """Return the plans of both sections that have them, those of one layer together."""
    plans = _plans(sections["mp_config"])
    for key, listed in _plans(sections["cp_config"]).items():
        plans[key] = plans.get(key, []) + listed
    return plans


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
            why = refusal_of(plan)
            if why is not None:
                raise UsageError(f"{plan} of {key!r} cannot be kept: {why}")
    return plans


def _data_options(section: Mapping[str, Any]) -> DataOptions:
    options = DataOptions(**section)
    level = options.sharding_level
    if isinstance(level, bool) or level not in (0, 1, 2, 3):
        raise UsageError(f"dp_config.sharding_level must be 0, 1, 2 or 3, got {level!r}")
    if not isinstance(options.offload, bool):
        raise UsageError(f"dp_config.offload must be True or False, got {options.offload!r}")
    return options


def _pipeline_options(sections: Mapping[str, Mapping[str, Any]]) -> PipelineOptions:
    given = {key: value for key, value in sections["pp_config"].items() if value is not None}
    if given.pop("global_spec", None):
        raise UsageError(
            "pp_config.global_spec is not for a sequence of layers, which get nothing from outside "
            "it: let layers pass on what later ones need, in a tuple"
        )
    if "split_spec" not in given:
        raise UsageError(
            "pp_config needs split_spec: the name of the layers that repeat, or a SplitPoint for "
            "each layer where the sequence is cut"
        )
    if _all_plans(sections):
        raise UsageError(
            "pp_config and plans of layers do not go together here: describe the layers with "
            "PipelineLayer and those of fleet.meta_parallel, and use fleet.distributed_model"
        )
    if _data_options(sections["dp_config"]).sharding_level:
        raise UsageError(
            "dp_config.sharding_level does not go with pp_config: use fleet.distributed_model of a "
            "PipelineLayer, with sharding_degree in hybrid_configs"
        )
    return PipelineOptions(**given)


def is_module(model: Any) -> bool:
    """Return whether a model is a `torch.nn.Module`."""
    return row_of(type(model), {("torch", "Module"): True}) is not None


def _torchs(model: Any, row: str, caller: str) -> Any:
    """Return what does the work for a torch module; refuse other models."""
    if not is_module(model):
        raise UsageError(
            f"{caller} got {model!r}, which is not a torch.nn.Module; models of arrays compute "
            "with shard_tensor, and are sharded by group_sharded_parallel or shard_optimizer"
        )
    return load(row)
