"""Names that are Paddle's have its arguments, in its order and with its defaults."""

import inspect

import pytest

import hpcdist as dist

# The arguments of release 3.3.1. What is here besides is given by keyword.
SIGNATURES = """
    ProcessMesh(mesh=None, dim_names=None, shape=None, process_ids=None)
    ProcessMesh.get_dim_size(dim)
    ProcessMesh.get_rank_by_dim_and_process_id(dim, process_id)
    ProcessMesh.get_mesh_with_dim(dim_name, index=None)
    ProcessMesh.get_submesh_with_dim(dim_name)
    ProcessMesh.get_group(dim_name=None)
    set_mesh(mesh)
    get_mesh()
    create_mesh(mesh_dims)
    auto_parallel.create_mesh(mesh_dims)
    Replicate()
    Shard(dim)
    Partial(reduce_type=0)
    DistAttr(mesh, sharding_specs)
    shard_tensor(data, mesh, placements, dtype=None, place=None, stop_gradient=None)
    dtensor_from_fn(fn, mesh, placements, *args, **kwargs)
    dtensor_from_local(local_tensor, mesh, placements)
    unshard_dtensor(dist_tensor)
    reshard(dist_tensor, mesh, placements)
    shard_layer(layer, process_mesh, shard_fn=None, input_fn=None, output_fn=None)
    shard_optimizer(optimizer, shard_fn=None, gradient_accumulation_steps=1)
    shard_scaler(scaler)
    ShardingStage1(sharding_mesh_dim, mesh=None)
    ShardingStage2(sharding_mesh_dim, mesh=None)
    ShardingStage3(sharding_mesh_dim, mesh=None)
    shard_dataloader(dataloader, meshes, input_keys=None, shard_dims=None, is_dataset_splitted=False, dense_tensor_idx=None)
    to_static(layer, loader=None, loss=None, optimizer=None, strategy=None, input_spec=None)
    Strategy(config=None)
    split(x, size, operation, axis=0, num_partitions=1, gather_out=True, weight_attr=None, bias_attr=None, name=None)
    parallelize(model, optimizer=None, mesh=None, config=None)
    to_distributed(model, optimizer, dataloader, device_num, node_num=1, config=None)
    ColWiseParallel(gather_output=False)
    RowWiseParallel(is_input_parallel=True)
    PrepareLayerInput(fn=None)
    PrepareLayerOutput(fn=None)
    SequenceParallelBegin(need_transpose=True)
    SequenceParallelEnd(need_transpose=True)
    SequenceParallelEnable()
    SequenceParallelDisable(need_transpose=True)
    ConvParallel()
    ContextParallel(backend='p2p')
    PrepareContextParallel(backend='p2p')
    local_map(func, out_placements, in_placements=None, process_mesh=None, reshard_inputs=False)
    sharding.group_sharded_parallel(model, optimizer, level, scaler=None, group=None, offload=False, sync_buffers=False, buffer_max_size=8388608, segment_size=1048576, sync_comm=False, dp_group=None, exclude_layer=None)
    sharding.save_group_sharded_model(model, output, optimizer=None)
    save_state_dict(state_dict, path, process_group=None, coordinator_rank=0, unique_id=None, async_save=False, safetensors=False, save_replicas=False)
    load_state_dict(state_dict, path, process_group=None, coordinator_rank=0, unique_id=None, offload=False, mw_name_compatibility=True, aoa_config=None, safetensors=False, worker_groups=None, comm_method='broadcast')
    load_merged_state_dict(path, prefix=None, unique_id=None, offload=False, aoa_config=None, safetensors=False)
    ShardedWeight(key, local_tensor, local_shape, global_shape, global_offset, is_flattened=False, flattened_range=None)
    shard_weight(key, weight, axis, group)
    build_sharded_state_dict(state_dict, shard_rules=None, prefix='')
    io.save_persistables(executor, dirname, main_program=None, filename=None)
    io.load_persistables(executor, dirname, main_program=None, filename=None)
    io.is_persistable(var)
    io.load_inference_model_distributed(dirname, executor, model_filename=None, params_filename=None, pserver_endpoints=None)
    utils.global_scatter(x, local_count, global_count, group=None, use_calc_stream=True)
    utils.global_gather(x, local_count, global_count, group=None, use_calc_stream=True)
"""  # noqa: E501 - a line is a signature
FULLY_SHARD = "(module, *, mesh=None, reshard_after_forward=None, shard_placement_fn=None, mp_policy=None, offload_policy=None, ignored_params=None, enable_tensor_fusion_and_overlap=True)"  # noqa: E501


def value_of(name):
    found = dist
    for part in name.split("."):
        found = getattr(found, part)
    return found


def told(signature):
    """Return a signature without annotations, and without what is given by keyword only."""
    kept = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.KEYWORD_ONLY and each.name != "self"
    ]
    return str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("line", [line.strip() for line in SIGNATURES.splitlines() if line.strip()])
def test_arguments_and_defaults_are_those_of_paddle(line):
    name, arguments = line.split("(", 1)
    found = told(inspect.signature(value_of(name)))
    assert found.replace("<ReduceType.kRedSum: 0>", "0") == f"({arguments}"


def test_the_keywords_of_fully_shard_are_those_of_paddle():
    pytest.importorskip("torch")
    signature = inspect.signature(dist.fully_shard)
    plain = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    assert str(inspect.Signature(plain)) == FULLY_SHARD


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("ProcessMesh", "mesh dim_names shape process_ids unique_id"),
        ("Placement", "is_shard is_replicated is_partial"),
        ("Shard", "get_dim get_co_shard_order get_split_factor"),
        ("Strategy", "to_dict"),
        ("ReduceType", "kRedSum kRedMax kRedMin kRedProd kRedAvg kRedAny kRedAll"),
        ("SplitPoint", "BEGINNING END"),
        ("auto_parallel", "Engine RingFlashAttention ShardDataloader Strategy ProcessMesh"),
        ("auto_parallel", "create_mesh get_mesh set_mesh"),
        ("fsdp", "fully_shard"),
    ],
)
def test_attributes_of_paddle_are_there(name, methods):
    value = value_of(name)
    assert all(hasattr(value, each) for each in methods.split())


def test_a_dist_model_has_the_methods_of_paddle():
    pytest.importorskip("torch")
    methods = "train eval predict __call__ dist_main_program serial_main_program state_dict"
    for name in f"{methods} set_state_dict".split():
        assert callable(getattr(dist.DistModel, name))
    assert told(inspect.signature(dist.DistModel)) == (
        "(layer, loader=None, loss=None, optimizer=None, strategy=None, metrics=None, "
        "input_spec=None)"
    )
    assert [*inspect.signature(dist.LocalLayer).parameters] == ["out_dist_attrs", "grad_dist_attrs"]


def test_reduce_types_have_the_numbers_of_paddle():
    assert [each.value for each in dist.ReduceType] == [*range(7)]


def test_a_mesh_tells_lists_which_are_the_callers():
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    for name, told_of in (
        ("shape", [2, 2]),
        ("process_ids", [0, 1, 2, 3]),
        ("dim_names", ["x", "y"]),
    ):
        found = getattr(mesh, name)
        assert found == told_of
        found.append(None)
        assert getattr(mesh, name) == told_of


def test_a_dist_attr_maps_dimensions_to_axes():
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    attribute = dist.DistAttr(mesh, ["y", None])
    assert (attribute.sharding_specs, attribute.dims_mapping) == (["y", None], [1, -1])


@pytest.mark.parametrize("name", ["Engine", "RingFlashAttention"])
def test_what_is_not_there_says_what_to_use(name):
    with pytest.raises(dist.UsageError, match=r"is not there.*(to_static|sep_attention)"):
        getattr(dist.auto_parallel, name)()
