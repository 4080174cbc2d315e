"""Names of `fleet`: each has the parameters and defaults that programs of Paddle rely on."""

import importlib
import inspect
import subprocess
import sys

import pytest

import hpcdist as dist
from hpcdist import fleet
from hpcdist.fleet.absent import ABSENT

SIGNATURES = """
init(role_maker=None, is_collective=False, strategy=None, log_level=INFO; *group=None, \
*server_num=None, *dp=None, *mp=None, *pp=None, *sharding=None, *sep=None, *cp=None)
UserDefinedRoleMaker(is_collective=False, init_gloo=False, kwargs)
PaddleCloudRoleMaker(is_collective=False, kwargs)
DistributedStrategy()
UtilBase()
init_worker(scopes=None)
stop_worker()
barrier_worker()
init_server(args, kwargs)
run_server()
save_inference_model(executor, dirname, feeded_var_names, target_vars, main_program=None, \
export_for_deployment=True, mode=0)
save_persistables(executor, dirname, main_program=None, mode=0)
distributed_optimizer(optimizer, strategy=None)
distributed_model(model)
distributed_scaler(scaler)
minimize(loss, startup_program=None, parameter_list=None, no_grad_set=None)
collective_perf(comm_type, round=50, size_and_time={})
allreduce_perf(round=50, size_and_time={})
reduce_perf(round=50, size_and_time={})
broadcast_perf(round=50, size_and_time={})
allgather_perf(round=50, size_and_time={})
reduce_scatter_perf(round=50, size_and_time={})
all_reduce(input, mode=sum)
is_first_worker()
worker_index()
worker_num()
node_num()
local_rank()
local_device_ids()
world_device_ids()
is_worker()
is_server()
is_coordinator()
worker_endpoints(to_string=False)
server_endpoints(to_string=False)
server_num()
server_index()
save(dirname, feed=(), fetch=(), configs)
save_cache_model(dirname, configs)
save_cache_table(table_id, pass_id, mem_cache_key_threshold=4000000000)
save_one_table(table_id, path, mode)
save_dense_params(executor, dirname, scope, program, var_names=None)
load_model(path, mode)
load_inference_model(path, mode)
load_one_table(table_id, path, mode)
shrink(threshold=None)
set_date(table_id, day_id)
print_table_stat(table_id, pass_id, threshold)
get_loss_scaling()
amp_init(place, scope=None, test_program=None, use_fp16_test=False)
qat_init(place, scope=None, test_program=None)
get_hybrid_communicate_group()
get_hybrid_parallel_topology()
set_log_level(level)
check_memory_usage(msg=)
CommunicateTopology(hybrid_group_names=('data', 'pipe', 'sharding', 'sep', 'context', 'model'), \
dims=(1, 1, 1, 1, 1, 1); *ranks=None)
HybridCommunicateGroup(topology, hybrid_configs=None; *group=None)
"""

METHODS = """
UtilBase.all_reduce(input, mode=sum, comm_world=worker)
UtilBase.all_gather(input, comm_world=worker)
UtilBase.barrier(comm_world=worker)
UtilBase.get_file_shard(files)
UtilBase.get_heter_file_shard(files)
UtilBase.print_on_rank(message, rank_id)
DistributedStrategy.save_to_prototxt(output)
DistributedStrategy.load_from_prototxt(pb_file)
CommunicateTopology.get_hybrid_group_names()
CommunicateTopology.get_dim(axis_name)
CommunicateTopology.get_dim_size(axis_name)
CommunicateTopology.world_size()
CommunicateTopology.get_rank(args)
CommunicateTopology.get_coord(rank)
CommunicateTopology.get_axis_list(axis_name, index)
CommunicateTopology.get_fused_ranks(fused_axis)
CommunicateTopology.get_comm_list(axis_name)
CommunicateTopology.get_rank_from_stage(global_rank, kwargs)
HybridCommunicateGroup.get_parallel_mode()
HybridCommunicateGroup.topology()
HybridCommunicateGroup.get_global_rank()
HybridCommunicateGroup.get_stage_id()
HybridCommunicateGroup.get_pipe_parallel_world_size()
HybridCommunicateGroup.get_pipe_parallel_group()
HybridCommunicateGroup.get_p2p_groups()
HybridCommunicateGroup.get_rank_from_stage(stage_id, kwargs)
HybridCommunicateGroup.get_check_parallel_group(sharding=False)
HybridCommunicateGroup.get_dp_sep_parallel_group()
HybridCommunicateGroup.get_pp_mp_parallel_group()
HybridCommunicateGroup.create_fuse_group(fused_strategy_list, nccl_config=None)
"""


def lines_of(table):
    return table.strip().splitlines()


def words_of(where):
    """Return the parameters of a function, or of a class without itself, in words."""
    told, has_star = [], False
    for each in inspect.signature(where).parameters.values():
        if each.name == "self":
            continue
        star = "*" if each.kind is each.KEYWORD_ONLY else ""
        if star and not has_star:
            told[-1] += ";" if told else ""
            has_star = True
        default = each.default
        words = getattr(default, "items", lambda d=default: d)()
        words = "{}" if words == {}.items() or words == [] else str(default)
        told.append(f"{star}{each.name}" + ("" if default is each.empty else f"={words}"))
    return ", ".join(told).replace(";,", ";")


@pytest.mark.parametrize("line", lines_of(SIGNATURES))
def test_names_have_the_promised_parameters(line):
    name = line.partition("(")[0]
    assert f"{name}({words_of(getattr(fleet, name))})" == line


@pytest.mark.parametrize("line", lines_of(METHODS))
def test_methods_have_the_promised_parameters(line):
    owner, name = line.partition("(")[0].split(".")
    found = words_of(getattr(getattr(fleet, owner), name))
    assert f"{owner}.{name}({found})" == line


@pytest.mark.parametrize("axis", ["data", "model", "sharding", "sep", "context"])
def test_a_grid_has_the_four_getters_of_each_axis(axis):
    for what in ("rank", "world_size", "group", "group_src_rank"):
        getter = getattr(fleet.HybridCommunicateGroup, f"get_{axis}_parallel_{what}")
        assert words_of(getter) == ""


def test_every_name_has_a_docstring():
    for line in lines_of(SIGNATURES):
        assert getattr(fleet, line.partition("(")[0]).__doc__


def test_a_function_of_fleet_has_the_signature_of_its_method():
    assert fleet.worker_endpoints.__name__ == "worker_endpoints"
    assert fleet.worker_endpoints.__doc__ == fleet.Fleet.worker_endpoints.__doc__
    with pytest.raises(TypeError):
        inspect.signature(fleet.worker_endpoints).bind(1, 2)


def test_fleet_is_found_by_its_usual_paths():
    assert dist.fleet is fleet
    for path, names in {
        "hpcdist.fleet.base.topology": ["CommunicateTopology", "HybridCommunicateGroup"],
        "hpcdist.fleet.base.role_maker": ["PaddleCloudRoleMaker", "Role", "UserDefinedRoleMaker"],
        "hpcdist.fleet.base.distributed_strategy": ["DistributedStrategy"],
        "hpcdist.fleet.data_generator": ["MultiSlotDataGenerator", "MultiSlotStringDataGenerator"],
        "hpcdist.fleet.utils.hybrid_parallel_util": ["fused_allreduce_gradients"],
        "hpcdist.fleet.utils.fs": ["ExecuteError", "FSFileExistsError", "FSTimeOut"],
    }.items():
        module = importlib.import_module(path)
        for name in names:
            found = [getattr(owner, name, None) for owner in (fleet, dist, dist.errors)]
            assert any(getattr(module, name) is each for each in found)
    assert fleet.base.topology is importlib.import_module("hpcdist.fleet.base.topology")
    assert isinstance(fleet.util, fleet.UtilBase)


@pytest.mark.parametrize("path", ["hpcdist.fleet", "hpcdist.fleet.utils"])
def test_names_that_are_imported_when_used(path):
    module = importlib.import_module(path)
    assert set(module.ROWS) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
    for name, where in module.ROWS.items():
        if importlib.util.find_spec(where.rpartition(".")[0]) and importlib.util.find_spec(where):
            pytest.importorskip("torch")
            assert getattr(module, name) is not None


PATHS = {
    "hpcdist.fleet.layers.mpu": [
        "ColumnParallelLinear",
        "ParallelCrossEntropy",
        "RNGStatesTracker",
        "get_rng_state_tracker",
    ],
    "hpcdist.fleet.meta_parallel": [
        "ColumnSequenceParallelLinear",
        "HybridParallelOptimizer",
        "LocalSharedLayerDesc",
        "PipelineParallel",
        "SegmentParallel",
        "ShardingParallel",
        "TensorParallel",
        "model_parallel_random_seed",
    ],
    "hpcdist.fleet.utils.sequence_parallel_utils": [
        "AllGatherOp",
        "ColumnSequenceParallelLinear",
        "GatherOp",
        "ReduceScatterOp",
        "RowSequenceParallelLinear",
        "ScatterOp",
        "mark_as_sequence_parallel_parameter",
        "register_sequence_parallel_allreduce_hooks",
    ],
    "hpcdist.fleet.recompute": ["recompute", "recompute_hybrid", "recompute_sequential"],
    "hpcdist.fleet.meta_parallel.parallel_layers": ["PipelineLayer", "get_rng_state_tracker"],
    "hpcdist.fleet.meta_parallel.parallel_layers.mp_layers": [
        "ColumnParallelLinear",
        "ParallelCrossEntropy",
        "RowParallelLinear",
        "VocabParallelEmbedding",
    ],
    "hpcdist.fleet.meta_parallel.parallel_layers.pp_layers": [
        "LayerDesc",
        "LocalSharedLayerDesc",
        "PipelineLayer",
        "SharedLayerDesc",
    ],
    "hpcdist.fleet.meta_parallel.parallel_layers.random": ["RNGStatesTracker"],
    "hpcdist.fleet.meta_parallel.pipeline_parallel": [
        "PipelineParallel",
        "PipelineParallelWithInterleave",
    ],
}


@pytest.mark.parametrize("path", PATHS)
def test_names_of_torch_are_found_by_paddles_paths(path):
    pytest.importorskip("torch")
    module = importlib.import_module(path)
    owners = [
        importlib.import_module(f"hpcdist.torch.{each}")
        for each in ("hybrid", "model_parallel", "pipeline", "recompute")
    ]
    for name in PATHS[path]:
        known = FORMER.get(name, name)
        assert any(getattr(module, name) is getattr(each, known, None) for each in owners), name


FORMER = {
    "LocalSharedLayerDesc": "SharedLayerDesc",
    "PipelineParallelWithInterleave": "PipelineParallel",
}
"""Names of Paddle's for classes that have another one here."""


def test_what_needs_torch_says_so():
    script = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Without())
for path in sys.argv[1:]:
    module, _, name = path.rpartition(".")
    try:
        exec(f"from {module} import {name}")
    except ImportError as error:
        assert "pip install 'hpcdist[torch]'" in str(error), path
        assert error.name == "torch"
    else:
        print(path)
"""
    paths = [f"{path}.{names[-1]}" for path, names in PATHS.items()]
    paths += ["hpcdist.fleet.recompute_hybrid", "hpcdist.fleet.utils.recompute", "hpcdist.torch"]
    done = subprocess.run(
        [sys.executable, "-c", script, *paths, "hpcdist.fleet.utils.fs"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["hpcdist.fleet.utils.fs"]


def test_recompute_is_a_package_and_its_function():
    torch = pytest.importorskip("torch")
    package = importlib.import_module("hpcdist.fleet.recompute")
    x = torch.ones(2, requires_grad=True)
    fleet.recompute(torch.exp, x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())
    assert fleet.recompute.recompute is package.recompute


@pytest.mark.parametrize("path", ABSENT)
def test_names_that_are_paddles_alone_say_what_to_use(path):
    if "meta_parallel" in path:
        pytest.importorskip("torch")
    module = importlib.import_module(path)
    for name, remedy in ABSENT[path].items():
        with pytest.raises(ImportError, match="Paddle's alone") as told:
            getattr(module, name)
        assert remedy in str(told.value)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018


def test_the_logger_of_fleet_has_a_level():
    from hpcdist.fleet.utils import log_util

    before = log_util.logger.level
    try:
        log_util.set_log_level("DEBUG")
        assert (log_util.get_log_level_code(), log_util.get_log_level_name()) == (10, "DEBUG")
        with pytest.raises(dist.UsageError, match="a log level is one of"):
            log_util.set_log_level("LOUD")
    finally:
        log_util.logger.setLevel(before)


@pytest.mark.parametrize("axis", ["dp", "mp", "sharding", "sep"])
def test_weights_are_made_equal_along_an_axis(axis):
    from hpcdist.fleet.utils import hybrid_parallel_util

    torch = pytest.importorskip("torch")
    share = getattr(hybrid_parallel_util, f"broadcast_{axis}_parameters")

    class Model:
        def __init__(self, rank):
            self.whole, self.part = (torch.tensor([rank + 1.0]) for _ in range(2))
            self.part.is_distributed = True

        def named_parameters(self):
            return [("whole", self.whole), ("part", self.part)]

    def shared():
        grid = fleet.init(dp=-1, **({} if axis == "dp" else {axis: 2})).grid
        model = Model(dist.get_rank())
        share(model, grid)
        first = grid.ranks(axis)[0] + 1.0
        part = dist.get_rank() + 1.0 if axis == "mp" else first
        return (model.whole.item(), model.part.item()) == (first, part)

    assert dist.simulate(4, shared) == [True] * 4


def test_importing_fleet_imports_neither_torch_nor_bench():
    script = (
        "import sys; from hpcdist import fleet; fleet.util;"
        "print([name for name in ('torch', 'cupy', 'jax', 'hpcdist.bench') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_settings_of_nccl_are_taken_and_told_about():
    assert dist.create_nccl_config() is None
    with pytest.warns(UserWarning, match="NCCL_ALGO=Ring NCCL_MAX_NCHANNELS=4"):
        config = dist.create_nccl_config({"algoStr": "Ring", "nchannels": 4, "commName": "tp"})
    assert config == {"algoStr": "Ring", "nchannels": 4, "commName": "tp"}
    for wrong, told in [
        ({"nchanels": 4}, "no key 'nchanels'"),
        ({"nchannels": "4"}, "must be an integer, got '4'"),
        ({"nchannels": True}, "must be an integer"),
        ({"algoStr": 3}, "must be a string"),
        ([4], "must be a dictionary"),
    ]:
        with pytest.raises(dist.UsageError, match=told):
            dist.create_nccl_config(wrong)


def test_groups_take_settings_of_nccl_and_tell_about_them():
    def one_rank():
        with pytest.warns(UserWarning, match="NCCL_ALGO=Ring"):
            group = dist.new_group([0], None, None, 0, {"algoStr": "Ring"})
        grid = fleet.HybridCommunicateGroup(fleet.CommunicateTopology(["data"], [1]))
        with pytest.warns(UserWarning, match="NCCL_ALGO=Ring"):
            assert grid.create_fuse_group(["data"], {"algoStr": "Ring"})[0] == [0]
        for call in (
            lambda: dist.new_group([0], nccl_config={"algo": "Ring"}),
            lambda: grid.create_fuse_group(["data"], {"algo": "Ring"}),
        ):
            with pytest.raises(dist.UsageError, match="no key 'algo'"):
                call()
        return group.ranks

    assert dist.simulate(1, one_rank) == [[0]]
