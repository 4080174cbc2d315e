"""The shape of the package: imports point one way, and names are where they were promised."""

import ast
import functools
import inspect
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hpcdist as dist

PACKAGE = Path(dist.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module imports from its own package and from those before it.
LAYERS = [
    "errors named_tuple",
    "compiled config events integers boxes lazy text",
    "arrays",
    "fs",
    "runtime",
    "transport",
    "comm",
    "rpc",
    "mesh",
    "array",
    "checkpoint",
    "data",
    "optim",
    "ps",
    "parallel",
    "auto_parallel fsdp io sharding utils",
    "torch jax",
    "fleet",
    "launch",
    "diagnostics",
    "bench",
    "testing",
]
TOP = ("__init__.py", "__main__.py")

# What may be imported, or used, only here.
FENCES = {
    "mpi4py": (
        "runtime/mpi.py",
        "transport/mpi/*.py",
        "transport/mpi/hierarchical/*.py",
        "transport/device/cuda_mpi.py",
        "bench/libraries/mpi4py.py",
    ),
    "torch": ("arrays/torch.py", "torch/*.py", "torch/*/*.py", "bench/libraries/torch.py"),
    "jax": ("arrays/jax.py", "jax/*.py"),
    "cupy": (
        "arrays/cupy.py",
        "runtime/gpu.py",
        "transport/device/nccl/binding.py",
        "bench/libraries/nccl.py",
    ),
    "nccl": ("transport/device/nccl/binding.py",),
    "os.environ": (
        "config.py",
        "runtime/*.py",
        "launch/job/shim.py",
        "bench/libraries/paddle.py",
    ),
    "os.getenv": (),
    "typing.NamedTuple": ("named_tuple.py",),
}


def name_of(path):
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def nodes_of(path):
    """Return all nodes of a module's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path):
    """Return the dotted names that a module imports, lazily or not, and line numbers."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((each.name, node.lineno) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            folders = name_of(path).split("/")[: -node.level] if node.level else []
            parts = [*(["hpcdist", *folders] if node.level else []), node.module or ""]
            module = ".".join(part for part in parts if part)
            yield from ((f"{module}.{each.name}", node.lineno) for each in node.names)


def layer_of(name):
    first = name.split("/")[0].removesuffix(".py")
    return next((level for level, names in enumerate(LAYERS) if first in names.split()), None)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_the_list_of_packages(path):
    if name_of(path) in TOP:
        return
    own = layer_of(name_of(path))
    assert own is not None, f"{name_of(path)} belongs to no layer"
    for imported, line in imports_of(path):
        parts = imported.split(".")
        if parts[0] != "hpcdist":
            continue
        other = layer_of(parts[1]) if len(parts) > 1 else None
        if own == len(LAYERS) - 1 and other is None:
            continue  # the tests that ship with the package use its public names
        assert other is not None, f"line {line} imports the package itself"
        allowed = other < own or parts[1] == name_of(path).split("/")[0].removesuffix(".py")
        assert allowed, f"line {line} imports {imported}"


# Who names whom that stands above: by strings, so that only who uses it imports it.
NAMED_ABOVE = {
    "mesh": "torch",
    "data": "torch",
    "parallel": "torch",
    "fleet": "bench",
    "launch": "diagnostics bench",
}
NAME = re.compile(r"hpcdist\.([\w.]+)(?::([\w.]+))?")


def named_in(path):
    """Return the modules of hpcdist that strings name, what they name there, and the line."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = NAME.fullmatch(node.value)
            place = PACKAGE.joinpath(*match[1].split(".")) if match else path
            files = [each for each in (place.with_suffix(".py"), place / TOP[0]) if each.exists()]
            if match and (files or match[2]):
                yield (files or [None])[0], match[2], node.lineno


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_what_strings_name_is_there_and_stands_below_or_is_known(path):
    own = name_of(path).split("/")[0].removesuffix(".py")
    for found, name, line in [] if name_of(path) in TOP else named_in(path):
        assert found is not None, f"line {line} names a module that is not there"
        assert not name or name.split(".")[0] in defined_in(found), f"line {line} names {name}"
        other = name_of(found).split("/")[0].removesuffix(".py")
        is_below = layer_of(other) < layer_of(own) or other == own
        assert is_below or other in NAMED_ABOVE.get(own, "").split(), f"line {line} names {other}"


def defined_in(path):
    """Return what a module defines, or imports."""
    assigned = {node.id for node in nodes_of(path) if isinstance(node, ast.Name)}
    defined = {getattr(node, "name", None) for node in nodes_of(path)}
    return assigned | defined | {name.rpartition(".")[2] for name, _ in imports_of(path)}


def dotted(path):
    return ".".join(("hpcdist", *path.relative_to(PACKAGE).with_suffix("").parts))


def imported_modules(path, names):
    """Return the modules, of `names`, that a module imports: lazily and for types, too."""
    found = {imported for imported, _ in imports_of(path)}
    modules = {name if name in names else name.rpartition(".")[0] for name in found}
    return {name for name in modules & names if name != dotted(path)}


def test_no_modules_import_each_other_in_a_circle():
    modules = [path for path in MODULES if path.name not in TOP]
    names = set(map(dotted, modules))
    graph = {dotted(path): imported_modules(path, names) for path in modules}
    TopologicalSorter(graph).prepare()  # a CycleError names the modules of a circle


@pytest.mark.parametrize("fenced", FENCES)
def test_fenced_names_stay_where_they_belong(fenced):
    outside = [path for path in MODULES if not any(map(Path(name_of(path)).match, FENCES[fenced]))]
    for path in outside:
        for imported, line in imports_of(path):
            assert imported.split(".")[0] != fenced, f"{name_of(path)}:{line}"
            assert imported != fenced, f"{name_of(path)}:{line}"
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert f"{node.value.id}.{node.attr}" != fenced, f"{name_of(path)}:{node.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(nodes_of(path)[0]) is not None


# ---- names: Paddle's, with the parameters in its order and with its defaults. What follows ";" is
# hpcdist's own: further parameters, which all have defaults.

COLLECTIVES = """
reduce(tensor, dst, op=SUM, group=None, sync_op=True)
all_reduce(tensor, op=SUM, group=None, sync_op=True)
all_gather(tensor_list, tensor, group=None, sync_op=True)
all_gather_object(object_list, obj, group=None; *sync_op=True)
alltoall(out_tensor_list, in_tensor_list, group=None, sync_op=True)
alltoall_single(out_tensor, in_tensor, group=None, sync_op=True; *in_split_sizes=None, \
*out_split_sizes=None)
broadcast(tensor, src, group=None, sync_op=True)
broadcast_object_list(object_list, src, group=None; *sync_op=True)
scatter(tensor, tensor_list=None, src=0, group=None, sync_op=True)
scatter_object_list(out_object_list, in_object_list=None, src=0, group=None; *sync_op=True)
gather(tensor, gather_list=None, dst=0, group=None, sync_op=True)
reduce_scatter(tensor, tensor_list, op=SUM, group=None, sync_op=True)
isend(tensor, dst, group=None; tag=0)
irecv(tensor, src=None, group=None; tag=0)
send(tensor, dst=0, group=None, sync_op=True; tag=0)
recv(tensor, src=0, group=None, sync_op=True; tag=0)
send_object_list(object_list, dst=None, group=None, dst_in_group=None; *sync_op=True, *tag=0)
recv_object_list(object_list, src=None, group=None, src_in_group=None; *sync_op=True, *tag=0)
P2POp(op, tensor, peer, group=None; tag=0)
batch_isend_irecv(p2p_op_list)
barrier(group=None; sync_op=True)
wait(tensor, group=None, use_calc_stream=True)
gloo_barrier()
"""

OWN_COLLECTIVES = """
scan(tensor, op=SUM, group=None, sync_op=True)
exscan(tensor, op=SUM, group=None, sync_op=True)
gather_object(obj, object_gather_list=None, dst=0, group=None; *sync_op=True)
all_to_all_object(out_object_list, in_object_list, group=None; *sync_op=True)
plan_all_reduce(tensor, op=SUM, group=None)
plan_reduce(tensor, dst, op=SUM, group=None)
plan_reduce_scatter(tensor, tensor_list, op=SUM, group=None)
plan_scan(tensor, op=SUM, group=None)
plan_exscan(tensor, op=SUM, group=None)
plan_broadcast(tensor, src, group=None)
plan_all_gather(tensor_list, tensor, group=None)
plan_gather(tensor, gather_list=None, dst=0, group=None)
plan_scatter(tensor, tensor_list=None, src=0, group=None)
plan_alltoall(out_tensor_list, in_tensor_list, group=None)
plan_alltoall_single(out_tensor, in_tensor, group=None; *in_split_sizes=None, *out_split_sizes=None)
plan_barrier(group=None)
empty(shape, dtype=float64, group=None)
zeros(shape, dtype=float64, group=None)
empty_like(array, group=None)
subscribe(listener)
"""

STREAM = """
reduce(tensor, dst=0, op=SUM, group=None, sync_op=True, use_calc_stream=False)
all_reduce(tensor, op=SUM, group=None, sync_op=True, use_calc_stream=False)
all_gather(tensor_or_tensor_list, tensor, group=None, sync_op=True, use_calc_stream=False)
alltoall(out_tensor_or_tensor_list, in_tensor_or_tensor_list, group=None, sync_op=True, \
use_calc_stream=False)
alltoall_single(out_tensor, in_tensor, group=None, sync_op=True, use_calc_stream=False; \
*in_split_sizes=None, *out_split_sizes=None)
broadcast(tensor, src, group=None, sync_op=True, use_calc_stream=False)
scatter(tensor, tensor_or_tensor_list=None, src=0, group=None, sync_op=True, use_calc_stream=False)
reduce_scatter(tensor, tensor_or_tensor_list, op=SUM, group=None, sync_op=True, \
use_calc_stream=False)
send(tensor, dst=0, group=None, sync_op=True, use_calc_stream=False; tag=0)
recv(tensor, src=0, group=None, sync_op=True, use_calc_stream=False; tag=0)
gather(tensor, gather_list=None, dst=0, group=None, sync_op=True, use_calc_stream=False)
"""

ENVIRONMENT = """
init_parallel_env(nccl_config=None; *backend=auto, *device=auto, *timeout=None, *comm=None)
is_initialized()
is_available()
get_rank(group=None)
get_world_size(group=None)
new_group(ranks=None, backend=None, timeout=None, nccl_comm_init_option=0, nccl_config=None; \
*name=None)
get_group(id=0)
destroy_process_group(group=None)
shutdown_process_group(group=None)
restart_process_group(group=None)
get_backend(group=None)
gloo_init_parallel_env(rank_id, rank_num, server_endpoint)
gloo_release()
ParallelEnv()
spawn(func, args=(), nprocs=-1, join=True, daemon=False, options)
"""

TRAINING = """
DataParallel(layers, strategy=None, comm_buffer_size=25, last_comm_buffer_size=1, \
find_unused_parameters=False, group=None; *check_nan=None, *virtual_ranks=None, *seed=0, \
*compress=None)
build_groups(vars, group_size)
sync_params_buffers(model, comm_group=None, src_rank=0, is_model_parallel=False, \
fuse_params=True, is_moe_sharding_parallel=False)
group_sharded_parallel(model, optimizer, level, scaler=None, group=None, offload=False, \
sync_buffers=False, buffer_max_size=8388608, segment_size=1048576, sync_comm=False, \
dp_group=None, exclude_layer=None)
"""

CHECKPOINTS = """
save_group_sharded_model(model, output, optimizer=None; *group=None)
save_state_dict(state_dict, path, process_group=None, coordinator_rank=0, unique_id=None, \
async_save=False, safetensors=False, save_replicas=False)
load_state_dict(state_dict, path, process_group=None, coordinator_rank=0, unique_id=None, \
offload=False, mw_name_compatibility=True, aoa_config=None, safetensors=False, \
worker_groups=None, comm_method=broadcast)
load_merged_state_dict(path, prefix=None, unique_id=None, offload=False, aoa_config=None, \
safetensors=False)
"""

SAME = {
    "all_to_all": "alltoall",
    "all_to_all_single": "alltoall_single",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}


def lines_of(*tables):
    return [line for table in tables for line in table.strip().splitlines()]


def promised(line):
    """Return a name and its parameters as (name, keyword only, default in words)."""
    name, _, rest = line.partition("(")
    for word in rest.removesuffix(")").replace(";", ",").split(","):
        parameter, _, default = word.strip().partition("=")
        if parameter:
            yield name, parameter.lstrip("*"), parameter.startswith("*"), default


def in_words(default):
    if default is inspect.Parameter.empty:
        return ""
    return getattr(default, "name", getattr(default, "__name__", None)) or str(default)


def check_signature(line, where):
    name = line.partition("(")[0]
    given = inspect.signature(getattr(where, name)).parameters.values()
    found = [
        (name, each.name, each.kind is each.KEYWORD_ONLY, in_words(each.default)) for each in given
    ]
    assert found == list(promised(line))


@pytest.mark.parametrize(
    "line", lines_of(COLLECTIVES, OWN_COLLECTIVES, ENVIRONMENT, TRAINING, CHECKPOINTS)
)
def test_names_have_the_promised_parameters(line):
    if line.startswith("gloo_init_parallel_env"):
        line = line.replace("server_endpoint", "server_endpoint=")  # MPI does not need it
    check_signature(line, dist)


@pytest.mark.parametrize("line", lines_of(STREAM))
def test_stream_names_have_the_promised_parameters(line):
    check_signature(line, dist.stream)


@pytest.mark.parametrize("name", SAME)
def test_torchs_names_are_the_same_functions(name):
    assert getattr(dist, name) is getattr(dist, SAME[name])


def test_the_stream_module_offers_what_it_promises():
    assert set(dist.stream.__all__) == {line.partition("(")[0] for line in lines_of(STREAM)}
    assert dist.stream.all_to_all is dist.stream.alltoall


def test_a_star_import_gets_every_public_name_and_no_modules_that_are_only_used():
    names = {}
    exec("from hpcdist import *", names)
    lines = lines_of(COLLECTIVES, OWN_COLLECTIVES, ENVIRONMENT, CHECKPOINTS)
    promised = {line.partition("(")[0] for line in lines}
    assert promised | {"DataParallel", "ReduceOp", "optim", "stream"} <= set(names)
    assert not {"Any", "importlib", "transport"} & set(names)


def test_classes_have_the_promised_members():
    members = {
        "ParallelEnv": "rank world_size nranks local_rank local_size node_rank nnodes device_id "
        "dev_id device_type current_endpoint trainer_endpoints nrings pg_timeout",
        "Group": "world_size process_group backend is_member get_group_rank get_global_rank "
        "mpi_comm",
        "Work": "wait is_completed synchronize result source",
        "Plan": "start free",
        "ReduceOp": "SUM MAX MIN PROD AVG",
        "Event": "phase name group_id nbytes time_ns error",
    }
    for name, words in members.items():
        for word in words.split():
            assert hasattr(getattr(dist, name), word), f"{name}.{word}"
    for name in ["HpcdistError", "UsageError", "MismatchError", "CollectiveTimeout", "RemoteError"]:
        assert issubclass(getattr(dist, name), RuntimeError)


@pytest.mark.parametrize(
    "line", lines_of(COLLECTIVES, OWN_COLLECTIVES, STREAM, ENVIRONMENT, CHECKPOINTS)
)
def test_every_public_name_has_a_docstring(line):
    where = dist.stream if line in lines_of(STREAM) else dist
    assert inspect.getdoc(getattr(where, line.partition("(")[0]))
