"""`hpcdist bench` with arrays on a device: what it computes, and what it tells; without a GPU."""

import time
from importlib.util import find_spec

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.bench.cases import CASES, choose_cases
from hpcdist.bench.command import bench
from hpcdist.bench.interleaved import interleave
from hpcdist.bench.libraries import start_peer, start_peers
from hpcdist.bench.libraries.nccl import Wire, library_of
from hpcdist.bench.memcpy_bound import limits
from hpcdist.bench.memory_kinds import MEMORIES, Device, Memory, check_devices, devices
from hpcdist.bench.output import predictable
from hpcdist.bench.plan import Plan, points_of
from hpcdist.bench.plots import draw_rows
from hpcdist.bench.request import read_request
from hpcdist.bench.rows import Point
from hpcdist.bench.tables import plain_console, print_rows
from hpcdist.bench.task import make_task
from hpcdist.bench.unavailable import Unavailable
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.testing.slow_device import DEVICE, SlowArray

SLOW = Device(lambda: DEVICE, lambda device: device.arrive(), lambda: "", lambda _: "a slow one")


def slow_zeros(count, dtype, _):
    return DEVICE.array(np.zeros(count, dtype))


@pytest.fixture
def slow(monkeypatch):
    """Let there be a device that is made of host memory."""
    memory = Memory(slow_zeros, SLOW)
    monkeypatch.setitem(MEMORIES, "slow", memory)
    return memory


class Ranks:
    """A communicator on which other ranks say what they are told to say."""

    rank = 0

    def __init__(self, *others):
        self._others, self.size = others, 1 + len(others)

    def allgather(self, own):
        return [own, *(own if other is None else other for other in self._others)]

    def Barrier(self):  # noqa: N802
        pass

    def Allgather(self, own, everyone):  # noqa: N802
        everyone[:] = own


# ---- the race


def test_what_is_put_on_a_device_counts_until_it_has_ended(slow):
    def put():
        DEVICE.current.put(lambda: time.sleep(2e-3))

    found = interleave(Ranks(), {"put": put}, rounds=3, sample_s=1e-3, single=3, wait=slow.waiter())
    assert found.samples["put"].shape == (6,)
    assert (found.samples["put"] >= 2e-3).all()


def test_the_calls_of_a_sample_are_waited_for_once():
    told = []

    def call():
        told.append("call")
        time.sleep(1e-5)

    interleave(Ranks(), {"call": call}, rounds=1, sample_s=0.1, wait=lambda: told.append("wait"))
    words = "".join("c" if each == "call" else "w" for each in told)
    last = words[:-1].rpartition("w")[2]
    assert words.endswith("w")
    assert last == "c" * len(last)
    assert len(last) > 1


def test_calls_that_are_timed_one_by_one_are_waited_for_one_by_one():
    told = []
    interleave(
        Ranks(),
        {"call": lambda: told.append("call")},
        rounds=1,
        sample_s=0,
        single=4,
        wait=lambda: told.append("wait"),
    )
    assert told[-8:] == ["call", "wait"] * 4


# ---- arrays


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.bool_])
def test_the_arrays_of_a_task_are_where_they_are_asked_for(slow, dtype):
    group = Group(range(4), 0, 0, None)
    for case in ("all_gather_list", "alltoall", "reduce_scatter", "all_reduce"):
        task = make_task(case, group, 64, np.dtype(dtype), "slow", "SUM")
        for array in (task.x, task.out, *task.parts):
            assert type(array) is SlowArray
            assert array.dtype == dtype
            assert not DEVICE.numbers(array).any()


def test_host_memory_leaves_nothing_to_wait_for(slow):
    assert MEMORIES["ordinary"].waiter() is None
    assert MEMORIES["shared"].waiter() is None
    assert slow.waiter() is not None


# ---- limits


def test_the_limits_of_a_device_are_copies_on_it_and_through_locked_host_memory(slow):
    locked = list(DEVICE.pinned)
    with limits(slow, 1 << 16, Group([0], 0, 0, None)) as copies:
        assert list(copies) == ["copy", "pinned copy"]
        assert len(DEVICE.pinned) == len(locked) + 2
        for copy in copies.values():
            copy()
        slow.waiter()()
    assert locked == DEVICE.pinned


def test_host_memory_has_one_limit():
    with limits(MEMORIES["ordinary"], 64, Group([0], 0, 0, None)) as copies:
        assert list(copies) == ["copy"]


def test_the_copy_through_the_host_goes_both_ways_and_is_waited_for(slow):
    from hpcdist.bench.memcpy_bound import _through_host

    source, target = (DEVICE.array(np.full(5000, value, np.uint8)) for value in (7, 0))
    out, back = np.zeros(5000, np.uint8), np.full(5000, 9, np.uint8)
    copy = _through_host(DEVICE, source, out, back, target)
    for _ in range(3):
        copy()
    slow.waiter()()
    assert (out == 7).all()
    assert (DEVICE.numbers(target) == 9).all()


# ---- what is chosen


def test_on_a_device_the_usual_cases_are_those_with_arrays():
    usual = choose_cases([], on_device=True)
    assert {"latency", "all_reduce", "overlap_matmul", "data_parallel"} <= set(usual)
    assert not {"barrier", "startup_init", "all_gather_object", "overlap_numpy"} & set(usual)
    assert "overlap_matmul" not in choose_cases([])
    assert choose_cases(["barrier"], on_device=True) == ("barrier",)


def test_spots_name_the_device_of_everything_that_is_there(slow):
    plan = Plan((), sizes=(8,), memories=("slow",))
    assert plan.on_device
    assert points_of(plan, "all_reduce", 2) == [Point("all_reduce", "float32", "slow", 8)]
    assert points_of(plan, "data_parallel", 2) == [Point("data_parallel", memory="slow")]
    assert points_of(plan, "barrier", 2) == [Point("barrier")]
    assert points_of(Plan(()), "data_parallel", 2) == [Point("data_parallel")]


GIVEN = {
    "cases": (), "sizes": None, "ranks": None, "dtype": "float32", "memory": None,
    "device": "cuda", "op": "sum", "against": (), "rounds": None, "quick": False,
    "json_file": None, "plot": None, "baseline": None, "tolerance": 1.25, "predict": None,
    "source": None,
}  # fmt: skip


def test_the_device_is_the_memory_of_the_plan():
    plan = read_request(GIVEN | {"against": ("nccl",)}).plan
    assert plan.memories == ("cuda",)
    assert plan.on_device
    assert plan.against == ("nccl",)
    assert not read_request(GIVEN | {"device": "cpu"}).plan.on_device


def test_kinds_of_host_memory_are_refused_on_a_device():
    with pytest.raises(UsageError, match="leave it out with --device cuda"):
        read_request(GIVEN | {"memory": "shared"})


def test_an_unknown_device_is_named_with_those_there_are():
    with pytest.raises(UsageError, match="tpu is unknown; there is cpu, cuda"):
        read_request(GIVEN | {"device": "tpu"})
    assert devices() == ["cpu", "cuda"]


# ---- what is missing


def test_ranks_without_the_device_are_named(slow):
    assert check_devices(Ranks("", ""), ["slow"]) == "a slow one"
    assert check_devices(Ranks(), ["ordinary", "shared"]) is None
    with pytest.raises(UsageError, match=r"slow cannot be used on ranks 1, 3: no driver$"):
        check_devices(Ranks("no driver", "", "no GPU"), ["slow"])


def test_where_no_rank_has_the_device_none_is_named(monkeypatch):
    lacking = Memory(slow_zeros, SLOW._replace(missing=lambda: "no driver"))
    monkeypatch.setitem(MEMORIES, "slow", lacking)
    with pytest.raises(UsageError, match=r"slow cannot be used: no driver$"):
        check_devices(Ranks(None), ["slow"])


@pytest.mark.skipif(find_spec("cupy") is not None, reason="CuPy is here")
def test_without_cupy_the_reason_says_what_to_install():
    cuda = MEMORIES["cuda"].device
    assert cuda.missing() == "CuPy is not installed: pip install cupy-cuda12x (or cupy-cuda13x)"
    with pytest.raises(Unavailable, match="CuPy is not installed"):
        start_peer("nccl", Ranks(), True, on_device=True)


def test_without_a_gpu_the_reason_says_so():
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU")
    assert MEMORIES["cuda"].device.missing().startswith("there is no usable GPU: cudaError")


def test_libraries_are_left_out_where_their_arrays_are_not():
    _, missing = start_peers(["mpi4py", "torch"], Ranks(), True, on_device=True)
    assert set(missing.values()) == {"it is measured on arrays in host memory only"}
    _, missing = start_peers(["nccl"], Ranks(), True)
    assert missing == {"nccl": "its arrays are in GPU memory: add --device cuda"}


# ---- NCCL: the arguments of its functions, as a recorder sees them


class Recorder:
    """Stands for NCCL's functions and a communicator; it keeps what they are told, and no more."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_BFLOAT16, NCCL_SUM, NCCL_AVG = 1, 7, 9, 0, 4

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        if name.startswith("NCCL_"):
            raise AttributeError(name)
        return lambda *args: self.told.append((name, *args))


class OnStream:
    """An engine whose current stream has the handle 5, and a new one 6."""

    def current_streams(self):
        return (self.stream(5),)

    def new_stream(self):
        return self.stream(6)

    def stream(self, handle):
        return type("Stream", (), {"ptr": handle, "__repr__": lambda _: f"stream {handle}"})()

    def address(self, array):
        return array.ctypes.data


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def nccl(recorder):
    return library_of(Wire(recorder, recorder, OnStream()))


def task_of(case, dtype="f4", op="SUM"):
    return make_task(case, Group(range(2), 0, 0, None), 64, np.dtype(dtype), "ordinary", op)


@pytest.mark.parametrize(
    ("case", "name", "arguments"),
    [
        ("all_reduce", "allReduce", ("x", "x", 16, 7, 0, 5)),
        ("reduce", "reduce", ("x", "x", 16, 7, 0, 0, 5)),
        ("reduce_scatter", "reduceScatter", ("x", "out", 8, 7, 0, 5)),
        ("broadcast", "broadcast", ("x", "x", 64, 1, 0, 5)),
        ("all_gather", "allGather", ("x", "out", 64, 1, 5)),
    ],
)
def test_nccl_is_told_addresses_counts_and_numbers(nccl, recorder, case, name, arguments):
    task = task_of(case)
    places = {"x": task.x.ctypes.data, "out": task.out.ctypes.data}
    nccl.calls[case](task)()
    assert recorder.told == [(name, *(places.get(each, each) for each in arguments))]


@pytest.mark.parametrize("case", ["alltoall", "alltoall_single"])
def test_an_alltoall_of_nccl_is_a_group_of_messages(nccl, recorder, case):
    task = task_of(case)
    x, out = task.x.ctypes.data, task.out.ctypes.data
    nccl.calls[case](task)()
    assert recorder.told == [
        ("groupStart",),
        ("send", x, 32, 1, 0, 5),
        ("recv", out, 32, 1, 0, 5),
        ("send", x + 32, 32, 1, 1, 5),
        ("recv", out + 32, 32, 1, 1, 5),
        ("groupEnd",),
    ]


def test_messages_that_are_begun_go_together(nccl, recorder):
    x = np.zeros(4, "f4")
    at, verbs = x.ctypes.data, nccl.messages
    verbs.send(x, 1)
    verbs.wait([verbs.begin_recv(x, 1), verbs.begin_send(x, 1)])
    assert recorder.told == [
        ("send", at, 16, 1, 1, 5),
        ("groupStart",),
        ("recv", at, 16, 1, 1, 5),
        ("send", at, 16, 1, 1, 5),
        ("groupEnd",),
    ]


def test_what_nccl_cannot_compute_has_no_row(nccl, recorder):
    for dtype, op in (("i2", "SUM"), ("c8", "AVG"), ("f4", "BAND")):
        for case in ("all_reduce", "reduce", "reduce_scatter"):
            with pytest.raises(Unavailable, match=f"NCCL does not compute {op} of"):
                nccl.calls[case](task_of(case, dtype, op))()
    assert recorder.told == []


def test_an_operation_of_nccl_is_begun_beside_the_current_stream(recorder):
    events = []

    class DeviceRuntime(OnStream):
        def record(self, stream):
            events.append(("record", stream.ptr))
            return f"event {stream.ptr}"

        def wait_event(self, stream, event):
            events.append(("wait", stream.ptr, event))

    library = library_of(Wire(recorder, recorder, DeviceRuntime()))
    task = task_of("all_reduce", op="AVG")
    work = library.begin(task)()
    at = task.x.ctypes.data
    assert recorder.told == [("allReduce", at, at, 16, 7, 4, 6)]
    assert events == [("record", 5), ("wait", 6, "event 5"), ("record", 6)]
    work.wait()
    assert events[3:] == [("wait", 5, "event 6")]


def test_cupy_names_ncclls_numbers_as_we_do():
    pytest.importorskip("cupy")
    from cupy.cuda import nccl

    from hpcdist.transport.call.reduction import ReduceOp, rule_for
    from hpcdist.transport.device.nccl.dtypes import plan_reduction

    for name in ("float32", "float64", "int64", "uint32", "bfloat16", "float16"):
        dtype = dtype_row(np.dtype(getattr(ml_dtypes, name, name)))
        rule = rule_for(ReduceOp.SUM, dtype)
        plan = plan_reduction(ReduceOp.SUM, dtype, rule, 2, native=True)
        assert getattr(nccl, f"NCCL_{name.upper()}") == plan.code
    assert plan.op == nccl.NCCL_SUM
    for verb in ("allReduce", "reduce", "broadcast", "reduceScatter", "allGather", "send", "recv"):
        assert callable(getattr(nccl.NcclCommunicator, verb))


# ---- tables and pictures


def row(library="hpcdist", nbytes=8, **more):
    return {
        "case": "all_reduce", "library": library, "dtype": "float32", "memory": "cuda",
        "nbytes": nbytes, "ranks": 4, "nodes": 1, "median_s": 2e-6, "min_s": 1e-6, "p99_s": 4e-6,
        "straggler": 1.0, "samples": 200, "ratio": 1.0, "bandwidth": 4e6, "bus_bandwidth": 6e6,
        **more,
    }  # fmt: skip


def test_a_table_says_where_the_arrays_are_and_has_the_columns_of_nccl_tests(capsys):
    print_rows(plain_console(), [row(), row("nccl")])
    told = capsys.readouterr().out
    assert "all_reduce, float32, cuda memory, 4 ranks on 1 node" in told
    for words in ("algbw", "busbw", "4.00 MB/s", "6.00 MB/s", "nccl"):
        assert words in told


def test_a_picture_shows_both_limits(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "run.svg"
    libraries = ("hpcdist", "nccl", "copy", "pinned copy")
    rows = [row(library, nbytes) for library in libraries for nbytes in (8, 1 << 20)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        draw_rows(rows, str(path))
    text = path.read_text()
    for words in ("nccl", "copying the bytes once", "to locked host memory and back", "cuda"):
        assert words in text


def test_nothing_is_predicted_of_limits():
    rows = [
        row(library, size) for library in ("hpcdist", "copy", "pinned copy") for size in (8, 16)
    ]
    assert {each["library"] for each in predictable(rows)} == {"hpcdist"}


def test_the_list_says_where_a_case_is_usual():
    told = CliRunner().invoke(bench, ["--list"]).output
    line = next(line for line in told.splitlines() if "overlap_matmul" in line)
    assert "device" in line
    assert CASES["overlap_matmul"].usual == ("device",)
