"""What NCCL is told, and by whom; without a GPU, so nothing here says what NCCL then does."""

import sys
from importlib import metadata
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.config import Config
from hpcdist.errors import MismatchError, TransportError
from hpcdist.transport.call.call import UNEVEN, Distribution, Gathering, Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.device.nccl import backend as transport, binding as nccl_binding
from hpcdist.transport.device.nccl.backend import Nccl
from hpcdist.transport.device.nccl.binding import Communicator, failure, version, why_not
from hpcdist.transport.device.nccl.matching import Transfer
from hpcdist.transport.mpi.collectives import Agreed
from hpcdist.transport.presence.deaths import Deaths

F8 = dtype_row(np.dtype(float))

# ---- the two providers

SIGNATURES = {
    "all_reduce": ("allReduce", "sendbuff recvbuff count datatype op comm stream"),
    "reduce": ("reduce", "sendbuff recvbuff count datatype op root comm stream"),
    "broadcast": ("broadcast", "sendbuff recvbuff count datatype root comm stream"),
    "reduce_scatter": ("reduceScatter", "sendbuff recvbuff recvcount datatype op comm stream"),
    "all_gather": ("allGather", "sendbuff recvbuff sendcount datatype comm stream"),
    "send": ("send", "sendbuff count datatype peer comm stream"),
    "recv": ("recv", "recvbuff count datatype peer comm stream"),
}
"""Our name: CuPy's name, and the parameters as in nccl.h."""

PROVIDERS = ["cupy", "nccl4py"]


class Recorder:
    """Stands for NCCL's functions; it keeps what they are told, and no more."""

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *args: self.told.append((name, *args))


@pytest.fixture(autouse=True)
def _forget_bindings():
    nccl_binding.binding.cache_clear()
    yield
    nccl_binding.binding.cache_clear()


@pytest.mark.parametrize("name", SIGNATURES)
def test_nccl4py_is_told_the_communicator_last_but_one(name):
    recorder = Recorder()
    communicator = nccl_binding._nccl4py_communicator(recorder, "the communicator")
    given = list(range(len(SIGNATURES[name][1].split()) - 1))
    getattr(communicator, name)(*given)
    assert recorder.told == [(name, *given[:-1], "the communicator", given[-1])]


@pytest.mark.parametrize("name", SIGNATURES)
def test_cupy_is_told_the_same_without_the_communicator(name):
    recorder = Recorder()
    getattr(nccl_binding._cupy_communicator(recorder), name)(1, 2, 3)
    assert recorder.told == [(SIGNATURES[name][0], 1, 2, 3)]


def test_the_ends_of_a_communicator_are_those_of_nccl():
    recorder = Recorder()
    nccl_binding._nccl4py_communicator(recorder, "it").abort()
    nccl_binding._nccl4py_communicator(recorder, "it").destroy()
    nccl_binding._cupy_communicator(recorder).abort()
    nccl_binding._cupy_communicator(recorder).destroy()
    assert recorder.told == [
        ("comm_abort", "it"),
        ("comm_destroy", "it"),
        ("abort",),
        ("destroy",),
    ]


def parameters(documented):
    """Return the names in the signature that Cython writes into the first line of a docstring."""
    inside = documented.splitlines()[0].partition("(")[2].rpartition(")")[0]
    return [each.split()[-1] for each in inside.split(",") if each.strip() not in ("", "self")]


@pytest.mark.parametrize("name", SIGNATURES)
def test_nccl4py_has_these_functions(name):
    nccl = pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    assert parameters(getattr(nccl, name).__doc__) == SIGNATURES[name][1].split()


@pytest.mark.parametrize("name", SIGNATURES)
def test_cupy_has_these_functions(name):
    pytest.importorskip("cupy")
    from cupy.cuda import nccl

    alike = {"sendbuf": "sendbuff", "recvbuf": "recvbuff"}
    theirs, names = SIGNATURES[name]
    found = [
        alike.get(each, each) for each in parameters(getattr(nccl.NcclCommunicator, theirs).__doc__)
    ]
    assert [each.replace("sendcount", "count") for each in names.split() if each != "comm"] == found


def test_nccl4py_has_the_others_too():
    nccl = pytest.importorskip("nccl.bindings.nccl", reason="nccl4py is not installed")
    assert parameters(nccl.comm_init_rank.__doc__) == ["nranks", "comm_id", "rank"]
    for name in ("comm_abort", "comm_destroy", "comm_get_async_error"):
        assert parameters(getattr(nccl, name).__doc__) == ["comm"]
    for name in ("get_version", "get_unique_id", "group_start", "group_end"):
        assert parameters(getattr(nccl, name).__doc__) == []
    nccl.check_status(7)  # ncclInProgress
    with pytest.raises(nccl.NCCLError, match="InvalidUsage"):
        nccl.check_status(5)


# ---- whether they are there


def found(provider):
    """Return a provider's functions, or skip because they are not here."""
    reason = why_not(provider)
    if reason:
        pytest.skip(reason)
    return nccl_binding.binding(provider)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nccl_is_found_without_a_driver(provider):
    nccl = found(provider)
    assert nccl.version() == version(provider) >= 21000
    assert bytes(nccl.unique_id()) != bytes(nccl.unique_id())
    nccl.group_start()
    nccl.group_end()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_communicator_without_a_driver_is_one_of_the_known_failures(provider):
    nccl = found(provider)
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(nccl.failures, match="unhandled cuda error") as caught:
        nccl.communicator(1, nccl.unique_id(), 0)
    told = str(failure("creating a communicator", caught.value))
    assert "NCCL failed in creating a communicator" in told
    assert "unhandled cuda error" in told


def test_both_call_one_library():
    ours, theirs = (found(provider).version() for provider in PROVIDERS)
    assert ours == theirs
    with open("/proc/self/maps") as maps:
        assert len({line.split()[-1] for line in maps if "libnccl.so" in line}) == 1


def test_without_cupy_the_reason_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert why_not().startswith("CuPy has no NCCL (")
    assert why_not().endswith("pip install 'hpcdist[cuda13]' (or cuda12)")
    assert version() == 0


def with_cupy(monkeypatch, **names):
    """Put a module where CuPy's would be."""
    nccl = SimpleNamespace(**names)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(nccl=nccl))


def test_without_libnccl_the_reason_names_it(monkeypatch):
    with_cupy(monkeypatch, available=False)
    assert "libnccl.so.2 was not found" in why_not()


def test_an_old_nccl_is_named_by_its_number(monkeypatch):
    rest = dict.fromkeys(("get_unique_id", "groupStart", "groupEnd"))
    with_cupy(monkeypatch, available=True, get_version=lambda: 20900, **rest)
    assert why_not() == "NCCL 20900 is older than 21000"
    assert version() == 0


def test_without_nccl4py_the_reason_says_what_to_install(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert why_not("nccl4py").startswith("nccl4py has no NCCL (No package metadata was found")
    assert why_not("nccl4py").endswith("pip install 'hpcdist[cuda13,nccl4py]' (or cuda12)")


def test_another_nccl4py_is_not_taken(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.0")
    assert "it is version 0.5.0; hpcdist supports 0.6.x" in why_not("nccl4py")


def test_nccl4py_without_libnccl_says_so(monkeypatch):
    def missing():
        raise RuntimeError('Failure finding "libnccl.so.2"')  # cuda.pathfinder's error is one

    names = dict.fromkeys(("group_start", "group_end"))
    nccl = SimpleNamespace(get_version=missing, NCCLError=Exception, **names)
    monkeypatch.setattr(metadata, "version", lambda _: "0.6.0")
    monkeypatch.setitem(sys.modules, "nccl", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nccl.bindings", SimpleNamespace(nccl=nccl))
    assert 'Failure finding "libnccl.so.2"' in why_not("nccl4py")


# ---- failures


def reporting(error):
    def report():
        raise error

    return SimpleNamespace(
        check_async_error=report,
        **dict.fromkeys(theirs for theirs, _ in SIGNATURES.values()),
        abort=report,
        destroy=report,
    )


def test_what_is_in_progress_is_no_failure():
    nccl_binding._cupy_communicator(reporting(KeyError(7))).check()
    with pytest.raises(KeyError):
        nccl_binding._cupy_communicator(reporting(KeyError(8))).check()


def test_the_end_of_a_communicator_raises_nothing():
    communicator = nccl_binding._cupy_communicator(reporting(RuntimeError("no")))
    communicator.abort()
    communicator.destroy()


def test_a_status_that_cupy_has_no_name_for_is_named():
    assert "NCCL failed in send: ncclTimeout; run with" in str(failure("send", KeyError(8)))
    assert "NCCL failed in send: status 9; run with" in str(failure("send", KeyError(9)))
    assert "NCCL failed in send: MemoryError; run with" in str(failure("send", MemoryError()))


# ---- what a group's operations tell it


class OnStream:
    """An engine whose arrays are in host memory."""

    def on(self, stream):
        return self

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass

    def address(self, array):
        return array.ctypes.data


STREAM = SimpleNamespace(ptr=5)


class Told:
    """An `Nccl` of one of three ranks whose functions keep what they are told."""

    def __init__(self, monkeypatch, rank=0, **settings):
        self.recorder = Recorder()
        given = [getattr(self.recorder, name) for name in Communicator._fields]
        functions = SimpleNamespace(
            group_start=self.recorder.group_start,
            group_end=self.recorder.group_end,
            failures=(RuntimeError, KeyError),
        )
        monkeypatch.setattr(transport, "binding", lambda _: functions)
        monkeypatch.setattr(transport, "connect", lambda *_: (STREAM, Communicator(*given)))
        monkeypatch.setattr(transport.gpu, "order_launches", lambda: None)
        site = SimpleNamespace(config=Config(**settings), deaths=Deaths())
        host = SimpleNamespace(rank=rank, size=3, ranks=(4, 5, 6), site=site, timeout_s=1.0)
        self.nccl = Nccl(host, OnStream())

    def perform(self, call, detail=(0, 0)):
        assert self.nccl.can(call)
        result = self.nccl.perform(call, detail, STREAM)
        told, self.recorder.told = self.recorder.told, []
        return told, result


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)


def reduced(kind, send, recv, op=ReduceOp.SUM, root=0, dtype=None):
    row = dtype_row(np.dtype(dtype or recv.dtype))
    return Reduction(kind, send, recv, row, recv.shape, root, op, rule_for(op, row))


def test_an_all_reduce_is_in_place_and_counts_elements(told):
    x = np.ones((2, 3), "f4")
    calls, _ = told.perform(reduced(Kind.ALL_REDUCE, None, x))
    at = x.ctypes.data
    assert calls == [("all_reduce", at, at, 6, 7, 0, 5)]


def test_complex_numbers_are_two_real_ones(told):
    x = np.ones(4, "c8")
    calls, _ = told.perform(reduced(Kind.ALL_REDUCE, None, x, ReduceOp.AVG))
    at = x.ctypes.data
    assert calls == [("all_reduce", at, at, 8, 7, 4, 5)]


def test_what_nccl_does_not_know_travels_in_other_memory_and_comes_back(told):
    x = np.arange(5, dtype="i2")
    calls, _ = told.perform(reduced(Kind.ALL_REDUCE, None, x))
    [(name, sent, received, *rest)] = calls
    assert (name, rest) == ("all_reduce", [5, 2, 0, 5])
    assert sent == received != x.ctypes.data
    assert x.tolist() == list(range(5))


@pytest.mark.parametrize(("sums", "code", "size"), [("float32", 7, 4), ("native", 9, 2)])
def test_short_floats_are_added_wide_unless_nccl_is_to_do_it(monkeypatch, sums, code, size):
    told = Told(monkeypatch, nccl_sums=sums)
    x = np.ones(8, ml_dtypes.bfloat16)
    call = reduced(Kind.ALL_REDUCE, None, x.view("u2"), dtype=x.dtype)
    [(_, at, _, count, dtype, *_)], _ = told.perform(call)
    assert (count, dtype) == (8, code)
    assert (at == x.ctypes.data) is (size == 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_root_of_a_reduce_receives(monkeypatch, rank):
    told, x = Told(monkeypatch, rank), np.ones(3)
    at_root = rank == 1
    call = reduced(Kind.REDUCE, None, x, root=1)
    calls, _ = told.perform(call)
    at = x.ctypes.data
    assert calls == [("reduce", at, at if at_root else 0, 3, 8, 0, 1, 5)]


def test_a_reduce_scatter_counts_what_is_received(told):
    given, out = np.ones(6), np.zeros(2)
    calls, _ = told.perform(reduced(Kind.REDUCE_SCATTER, given, out))
    assert calls == [("reduce_scatter", given.ctypes.data, out.ctypes.data, 2, 8, 0, 5)]


def test_blocks_that_differ_are_reduced_each_to_its_rank(told):
    given, out = np.ones(7), np.zeros(4)
    call = reduced(Kind.REDUCE_SCATTER, given, out)._replace(counts=([4, 0, 3], None))
    [begin, first, last, end], _ = told.perform(call)
    at = given.ctypes.data
    assert (begin, end) == (("group_start",), ("group_end",))
    assert first[:2] == ("reduce", at)
    assert first[2] != 0
    assert first[3:] == (4, 8, 0, 0, 5)
    assert last == ("reduce", at + 32, 0, 3, 8, 0, 2, 5)
    assert not told.nccl.can_capture(call)


def test_a_result_inside_of_what_is_sent_is_sent_from_a_copy(told):
    whole = np.arange(6.0)
    calls, _ = told.perform(reduced(Kind.REDUCE_SCATTER, whole, whole[2:4]))
    [(_, sent, received, *_)] = calls
    assert received == whole[2:4].ctypes.data
    assert not whole.ctypes.data <= sent < whole.ctypes.data + whole.nbytes


def test_a_broadcast_moves_bytes_in_place(told):
    x = np.ones(3)
    calls, _ = told.perform(Distribution(Kind.BROADCAST, None, x, F8, x.shape, 2))
    at = x.ctypes.data
    assert calls == [("broadcast", at, at, 24, 1, 2, 5)]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_all_gather_is_in_place_only_from_the_own_part(monkeypatch, rank):
    told, whole = Told(monkeypatch, rank), np.ones(6)
    own, first = whole[2 * rank : 2 * rank + 2], whole[:2]
    calls, _ = told.perform(Gathering(Kind.ALL_GATHER, own, whole, F8, own.shape))
    assert calls == [("all_gather", own.ctypes.data, whole.ctypes.data, 16, 1, 5)]
    [(_, sent, *_)], _ = told.perform(Gathering(Kind.ALL_GATHER, first, whole, F8, first.shape))
    assert (sent == first.ctypes.data) is (rank == 0)


def test_messages_of_an_alltoall_go_together_and_none_is_empty(told):
    given, out = np.ones(3), np.zeros(4)
    counts = [0, 1, 2], [0, 4, 0]

    def agree(host, call):
        return Agreed(call.counts[1], [(count,) for count in call.counts[1]], False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "agree_on_counts", agree)
        call = Gathering(Kind.ALLTOALL, given, out, F8, given.shape, detail=UNEVEN, counts=counts)
        calls, _ = told.perform(call, (UNEVEN, UNEVEN))
    at, to = given.ctypes.data, out.ctypes.data
    assert calls == [
        ("group_start",),
        ("send", at, 8, 1, 1, 5),
        ("send", at + 8, 16, 1, 2, 5),
        ("recv", to, 32, 1, 1, 5),
        ("group_end",),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scatter_of_blocks_that_differ_sends_each_as_it_is(monkeypatch, rank):
    told, given, out = Told(monkeypatch, rank), np.ones(6), np.zeros(2 + rank)
    monkeypatch.setattr(transport, "exchange_shapes", lambda host, call: [(2,), (3,), (1,)])
    call = Distribution(Kind.SCATTER, given if rank == 1 else None, out, F8, out.shape, 1)
    call = call._replace(counts=([2, 3, 1], None)) if rank == 1 else call
    calls, _ = told.perform(call, (UNEVEN, 8))
    at = given.ctypes.data
    sent = [
        ("send", at, 16, 1, 0, 5),
        ("send", at + 16, 24, 1, 1, 5),
        ("send", at + 40, 8, 1, 2, 5),
    ]
    received = ("recv", out.ctypes.data, out.nbytes, 1, 1, 5)
    expected = [*(sent if rank == 1 else []), received]
    assert calls == [("group_start",), *expected, ("group_end",)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scatter_sends_to_all_from_the_root(monkeypatch, rank):
    told, given, out = Told(monkeypatch, rank), np.ones(6), np.zeros(2)
    call = Distribution(Kind.SCATTER, given if rank == 1 else None, out, F8, out.shape, 1)
    calls, _ = told.perform(call)
    at = given.ctypes.data
    sent = [("send", at + 16 * each, 16, 1, each, 5) for each in range(3)] if rank == 1 else []
    received = ("recv", out.ctypes.data, 16, 1, 1, 5)
    assert calls == [("group_start",), *sent, received, ("group_end",)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gather_receives_from_all_at_the_root(monkeypatch, rank):
    told, own, out = Told(monkeypatch, rank), np.ones(2), np.zeros(6)
    call = Gathering(Kind.GATHER, own, out if rank == 1 else None, F8, own.shape, 1)
    calls, _ = told.perform(call)
    at = out.ctypes.data
    received = [("recv", at + 16 * each, 16, 1, each, 5) for each in range(3)]
    sent = ("send", own.ctypes.data, 16, 1, 1, 5)
    assert calls == [("group_start",), sent, *(received if rank == 1 else []), ("group_end",)]


def failing_with(told, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(told.nccl, "_comm", told.nccl._comm._replace(all_reduce=fail, send=fail))


def test_a_failure_ends_the_communicator_and_says_what_failed(told, monkeypatch):
    failing_with(told, monkeypatch, KeyError(8))
    with pytest.raises(TransportError, match=r"failed in all_reduce\(.*ncclTimeout"):
        told.perform(reduced(Kind.ALL_REDUCE, None, np.ones(3)))
    assert told.recorder.told == [("abort",)]
    with pytest.raises(TransportError, match="make a new group"):
        told.nccl.check()
    told.nccl.close()
    assert told.recorder.told == [("abort",)]


def test_a_failure_inside_a_group_of_messages_ends_the_group(told, monkeypatch):
    failing_with(told, monkeypatch, RuntimeError("unhandled system error"))
    given, out = np.ones(3), np.zeros(3)
    with pytest.raises(TransportError, match="unhandled system error"):
        told.perform(Gathering(Kind.ALLTOALL, given, out, F8, given.shape), (7, 7))
    assert told.recorder.told == [("group_start",), ("group_end",), ("abort",)]


def test_ranks_that_mean_different_things_keep_the_communicator(told, monkeypatch):
    failing_with(told, monkeypatch, MismatchError("counts"))
    with pytest.raises(MismatchError):
        told.perform(reduced(Kind.ALL_REDUCE, None, np.ones(3)))
    assert told.recorder.told == []


def test_a_reduction_is_planned_once(told, monkeypatch):
    planned = []

    def plan(*args, **options):
        planned.append(args[0])
        return transport_plan(*args, **options)

    transport_plan = transport.plan_reduction
    monkeypatch.setattr(transport, "plan_reduction", plan)
    for op in (ReduceOp.SUM, ReduceOp.MAX) * 3:
        told.perform(reduced(Kind.ALL_REDUCE, None, np.ones(3, "i4"), op))
    assert planned == [ReduceOp.SUM, ReduceOp.MAX]


def test_a_batch_is_one_group_of_sends_and_receives_in_their_order(told):
    x, y = np.ones((2, 3), "f4"), np.ones(5, "i8")
    transfers = [Transfer(True, x, 2), Transfer(True, y, 0), Transfer(False, x, 2)]
    told.nccl.exchange(transfers, STREAM)
    at_x, at_y = x.ctypes.data, y.ctypes.data
    assert told.recorder.told == [
        ("group_start",),
        ("send", at_x, 24, 1, 2, 5),
        ("send", at_y, 40, 1, 0, 5),
        ("recv", at_x, 24, 1, 2, 5),
        ("group_end",),
    ]
