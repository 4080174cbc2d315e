"""Device memory: which backend it takes, how it is cut, in what NCCL reduces; without a device."""

import threading
import time
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays

from hpcdist.arrays.bfloat16 import narrowed, widened
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.comm import environment
from hpcdist.config import Config
from hpcdist.errors import UsageError
from hpcdist.runtime import gpu
from hpcdist.transport.call.call import UNEVEN, Gathering, Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.device.choose import (
    STAGED,
    Ability,
    Candidate,
    Choice,
    Standing,
    choose_backend,
)
from hpcdist.transport.device.launch_order import LaunchOrder
from hpcdist.transport.device.nccl.dtypes import plan_reduction
from hpcdist.transport.device.staged.pinned import Pinned
from hpcdist.transport.device.staged.plan import Shape, is_whole, plan_steps
from hpcdist.transport.device.table import BACKENDS
from hpcdist.transport.shm.heap import Heap

# ---- the backend of a group

CANDIDATES = [row.candidate for row in BACKENDS.values()]


def able(rank, uuid=None, nccl="", mpi="not CUDA-aware", node=0, version=22809):
    standings = {"nccl": Standing(nccl, version), "mpi": Standing(mpi)}
    return Ability(rank, node, uuid or f"gpu-{rank}", standings)


def chosen(*abilities, wanted="auto", may_share=False):
    return choose_backend(abilities, CANDIDATES, wanted=wanted, may_share=may_share).backend


def test_nccl_is_taken_where_all_ranks_have_it():
    assert chosen(able(0), able(1)) == "nccl"
    assert chosen(able(0), able(1), wanted="nccl") == "nccl"


def test_without_nccl_a_cuda_aware_mpi_is_taken_and_else_everything_is_staged():
    bare = [able(rank, nccl="CuPy has no NCCL") for rank in range(2)]
    aware = [able(rank, nccl="CuPy has no NCCL", mpi="") for rank in range(2)]
    assert chosen(*aware) == "mpi"
    assert chosen(*bare) == STAGED
    assert chosen(aware[0], bare[1]) == STAGED


def test_a_process_with_nccl_never_hands_device_pointers_to_mpi():
    one_has_it = able(0, mpi=""), able(1, nccl="too old", mpi="")
    assert chosen(*one_has_it) == STAGED
    sharing = able(0, "same", mpi=""), able(1, "same", mpi="")
    assert chosen(*sharing, may_share=True) == STAGED


def test_ranks_on_one_gpu_are_refused_unless_that_is_allowed():
    same = able(0, "same"), able(1, "same"), able(2)
    with pytest.raises(UsageError, match=r"ranks 0, 1 use the same GPU.*--gpu-bind=none"):
        chosen(*same)
    assert chosen(*same, may_share=True) == STAGED
    with pytest.raises(UsageError, match="ranks 0, 1 share a GPU"):
        chosen(*same, wanted="nccl", may_share=True)


def test_nccl_serves_ranks_on_one_gpu_where_it_can_and_is_asked_to():
    old, new = (
        (able(0, "same", version=23000), able(1, "same", version=version))
        for version in (22999, 23000)
    )
    assert chosen(*new, wanted="nccl", may_share=True) == "nccl"
    assert chosen(*new, may_share=True) == STAGED
    with pytest.raises(
        UsageError, match=r"23000 \(2\.30\) or newer is needed, and rank 1 has 22999"
    ):
        chosen(*old, wanted="nccl", may_share=True)
    with pytest.raises(UsageError, match="use the same GPU"):
        chosen(*new, wanted="nccl")
    apart = able(0, version=22809), able(1, version=22809)
    assert chosen(*apart, wanted="nccl", may_share=True) == "nccl"


WANTED = ["auto", "nccl", "mpi", "staged"]


@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("may_share", [False, True])
def test_all_choices_are_those_of_the_table(wanted, may_share):
    """Two ranks, each with or without NCCL, old or new, and MPI, on one GPU or two."""
    versions = (0, 22809, 23203)
    for first, second, aware, shares in product(versions, versions, (False, True), (False, True)):
        mpi = "" if aware else "no"
        ranks = [
            able(rank, "same" if shares else None, "" if has else "none", mpi, version=has)
            for rank, has in enumerate((first, second))
        ]
        usable = first and second and (not shares or min(first, second) >= 23000)
        may_be = {
            "auto": "nccl"
            if first and second and not shares
            else "mpi"
            if aware and not first and not second
            else STAGED,
            "nccl": "nccl" if usable else None,
            "mpi": "mpi" if aware else None,
            "staged": STAGED,
        }
        expected = may_be[wanted] if may_share or not shares else None
        if expected is None:
            with pytest.raises(UsageError):
                chosen(*ranks, wanted=wanted, may_share=may_share)
        else:
            assert chosen(*ranks, wanted=wanted, may_share=may_share) == expected


def test_equal_numbers_on_two_nodes_are_two_gpus():
    assert chosen(able(0, "x", node=0), able(1, "x", node=1)) == "nccl"


@pytest.mark.parametrize(("wanted", "why"), [("nccl", "too old"), ("mpi", "not CUDA-aware")])
def test_a_backend_that_is_asked_for_but_closed_is_an_error_that_says_why(wanted, why):
    with pytest.raises(UsageError, match=f"HPCDIST_DEVICE_BACKEND={wanted}, but on rank 1 {why}"):
        chosen(able(0, mpi=""), able(1, nccl="too old"), wanted=wanted)


def test_the_reason_for_a_backend_says_what_speaks_against_the_best():
    def choice(*abilities, wanted="auto"):
        return choose_backend(abilities, CANDIDATES, wanted=wanted, may_share=True)

    none = able(0, nccl="too old", mpi=""), able(1, nccl="too old", mpi="")
    assert choice(able(0), able(1)) == Choice("nccl", "NCCL is there on all ranks")
    assert choice(*none) == Choice("mpi", "this MPI is CUDA-aware, and on rank 0 too old")
    assert choice(able(0), none[1]) == Choice(STAGED, "on rank 1 too old")
    assert choice(*none, wanted="mpi") == Choice("mpi", "HPCDIST_DEVICE_BACKEND=mpi")
    assert choice(*none, wanted=STAGED) == Choice(STAGED, "HPCDIST_DEVICE_BACKEND=staged")
    shared = able(0, "same"), able(1, "same")
    assert choice(*shared) == Choice(STAGED, "ranks 0, 1 share a GPU")


def test_the_first_backend_of_the_table_that_all_ranks_can_use_is_taken():
    toy, quiet = Candidate("toy", "it is a toy"), Candidate("quiet", "it is alone", alone=True)

    def choice(candidates, *closed):
        abilities = [
            Ability(rank, 0, f"gpu-{rank}", {"toy": Standing(each), "quiet": Standing()})
            for rank, each in enumerate(closed)
        ]
        return choose_backend(abilities, candidates, wanted="auto", may_share=False)

    assert choice([toy, quiet], "", "") == Choice("toy", "it is a toy")
    assert choice([quiet, toy], "", "") == Choice("quiet", "it is alone")
    assert choice([toy], "", "lost") == Choice(STAGED, "on rank 1 lost")
    assert choice([toy, quiet], "", "lost") == Choice(STAGED, "on rank 1 lost")
    assert choice([toy, quiet], "lost", "lost").backend == "quiet"


# ---- which GPU


def test_a_gpu_is_chosen_by_the_rank_on_the_node():
    assert [gpu.choose(4, local_rank, None) for local_rank in range(5)] == [0, 1, 2, 3, 0]
    assert gpu.choose(1, 3, None) == 0
    assert gpu.choose(4, 1, 2) == 2


def test_parts_of_one_gpu_and_gpus_of_like_uuids_are_told_apart(monkeypatch):
    known = {
        0: gpu.Gpu(0, "H200", "ab", "0000:01:00.0", 1),
        1: gpu.Gpu(1, "H200", "ab", "0000:02:00.0", 1),  # CuPy shows it up to a zero byte
        2: gpu.Gpu(2, "H200 MIG", "cd", "0000:02:00.0", 1),
    }
    monkeypatch.setattr(gpu, "describe", known.__getitem__)
    assert len({gpu.uuid_of(f"cuda:{number}") for number in known}) == len(known)
    assert gpu.uuid_of("slow:0") == ""


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="sees none"):
        gpu.choose(0, 0, None)
    with pytest.raises(UsageError, match="devices 0 to 1"):
        gpu.choose(2, 0, 2)


def test_a_gpu_of_the_environment_that_is_not_there_is_refused_by_its_variable():
    wanted = environment._wanted_device("cpu", Config(device="99"))
    for visible in (0, 2):
        with pytest.raises(UsageError, match="HPCDIST_DEVICE"):
            gpu.choose(visible, 0, *wanted)
    with pytest.raises(UsageError, match="HPCDIST_DEVICE='a' is unknown"):
        environment._wanted_device("cpu", Config(device="a"))


def test_devices_have_names():
    assert [gpu.read_device(text) for text in ("gpu", "cuda", "gpu:1", "cuda:3", "2")] == [
        None,
        None,
        1,
        3,
        2,
    ]
    with pytest.raises(UsageError, match="'tpu' is unknown"):
        gpu.read_device("tpu")


# ---- steps through host memory

CUT = [
    *(Kind.ALL_REDUCE, Kind.SCAN, Kind.BROADCAST, Kind.REDUCE, Kind.REDUCE_SCATTER),
    *(Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER, Kind.ALLTOALL),
]


def shapes(kind, block, size, root):
    """Return what each rank brings: elements of send and recv."""
    whole = block * size
    sends = {
        Kind.REDUCE_SCATTER: [whole] * size,
        Kind.ALL_GATHER: [block] * size,
        Kind.GATHER: [block] * size,
        Kind.SCATTER: [whole if rank == root else 0 for rank in range(size)],
        Kind.ALLTOALL: [whole] * size,
    }.get(kind, [0] * size)
    receives = {
        Kind.ALL_GATHER: [whole] * size,
        Kind.GATHER: [whole if rank == root else 0 for rank in range(size)],
        Kind.ALLTOALL: [whole] * size,
    }.get(kind, [block] * size)
    return [
        Shape(send, recv, size, rank, rank == root)
        for rank, (send, recv) in enumerate(zip(sends, receives, strict=True))
    ]


def run_on_host(kind, sends, recvs, root):
    """Do an operation on NumPy arrays, one pair per rank, in place."""
    size = len(recvs)
    if kind in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.SCAN):
        sums = np.cumsum(recvs, axis=0)
        for rank, recv in enumerate(recvs):
            if kind is not Kind.REDUCE or rank == root:
                recv[:] = sums[rank] if kind is Kind.SCAN else sums[-1]
        return
    if kind is Kind.BROADCAST:
        for recv in recvs:
            recv[:] = recvs[root]
        return
    gathers = kind in (Kind.ALL_GATHER, Kind.GATHER)
    blocks = [None if gathers or send is None else np.split(send, size) for send in sends]
    for rank, recv in enumerate(recvs):
        if recv is None:
            continue
        if kind is Kind.REDUCE_SCATTER:
            recv[:] = np.sum([each[rank] for each in blocks], axis=0)
        elif gathers:
            recv[:] = np.concatenate(sends)
        elif kind is Kind.SCATTER:
            recv[:] = blocks[root][rank]
        else:
            recv[:] = np.concatenate([each[rank] for each in blocks])


@given(
    kind=st.sampled_from(CUT),
    block=st.integers(0, 40),
    size=st.integers(1, 5),
    chunk=st.integers(1, 50),
    data=st.data(),
)
def test_an_operation_in_steps_is_the_operation(kind, block, size, chunk, data):
    root = data.draw(st.integers(0, size - 1))
    where = shapes(kind, block, size, root)
    draw = np.random.default_rng(7).integers
    sends = [draw(0, 100, each.send) if each.send or _sends(kind, each) else None for each in where]
    recvs = [draw(0, 100, each.recv) if _receives(kind, each) else None for each in where]
    wanted = [None if each is None else each.copy() for each in recvs]
    run_on_host(kind, sends, wanted, root)
    plans = [list(plan_steps(kind, each, chunk)) for each in where]
    assert len({len(plan) for plan in plans}) == 1, "all ranks have the same number of steps"
    for steps in zip(*plans, strict=True):
        assert len({step.items for step in steps}) == 1
        host = [[_room(step.send), _room(step.recv)] for step in steps]
        for rank, step in enumerate(steps):
            given_, into = (recvs[rank] if sends[rank] is None else sends[rank]), host[rank]
            for device, at, items in step.out:
                into[0 if step.send is not None else 1][at : at + items] = given_[
                    device : device + items
                ]
        run_on_host(kind, [each[0] for each in host], [each[1] for each in host], root)
        for rank, step in enumerate(steps):
            for device, at, items in step.into:
                recvs[rank][device : device + items] = host[rank][1][at : at + items]
    for got, want in zip(recvs, wanted, strict=True):
        assert got is None or got.tolist() == want.tolist()


def _room(items):
    return None if items is None else np.zeros(items, int)


def _sends(kind, shape):
    if kind is Kind.SCATTER:
        return shape.at_root
    return kind in (Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.GATHER, Kind.ALLTOALL)


def _receives(kind, shape):
    return shape.at_root if kind is Kind.GATHER else True


@given(st.integers(1, 10_000), st.integers(1, 8), st.integers(1, 500))
def test_no_step_needs_more_host_memory_than_a_chunk(block, size, chunk):
    for step in plan_steps(Kind.ALLTOALL, Shape(block * size, block * size, size, 0, True), chunk):
        assert step.send <= max(chunk, size)


def test_blocks_that_differ_between_ranks_are_not_cut():
    x, row, op = np.ones(3), dtype_row(np.dtype(float)), ReduceOp.SUM
    call = Reduction(Kind.ALL_REDUCE, None, x, row, x.shape, 0, op, rule_for(op, row))
    assert is_whole(Gathering(Kind.ALL_GATHER, x, None, row, x.shape), (3, 4))
    assert not is_whole(Gathering(Kind.ALL_GATHER, x, None, row, x.shape), (3, 3))
    assert is_whole(Gathering(Kind.ALLTOALL, x, None, row, x.shape), (UNEVEN, UNEVEN))
    assert not is_whole(call, (3, 4))


# ---- what NCCL reduces

NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
NCCL = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8"}
"""nccl.h's numbers (ncclDataType_t), in NumPy's names."""


def dtype_of(name):
    return dtype_row(np.dtype(getattr(ml_dtypes, name, None) or name))


EXACT = {ReduceOp.REPRODUCIBLE_SUM}


def reductions():
    for name in NAMES:
        for op in ReduceOp:
            try:
                yield name, op, rule_for(op, dtype_of(name))
            except UsageError:
                continue


@pytest.mark.parametrize(("name", "op", "rule"), list(reductions()))
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_nccl_computes_on_what_travels_is_the_reduction(name, op, rule, ranks):
    dtype = dtype_of(name)
    plan = plan_reduction(op, dtype, rule, ranks, native=False)
    if plan is None:
        by_bits = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR, ReduceOp.LXOR}
        left = {"complex": {ReduceOp.PROD, *EXACT}, "float": EXACT}
        assert op in by_bits | left.get(dtype.family, set())
        return
    given = [(np.arange(6) % 3 + rank).astype(dtype.numpy) for rank in range(ranks)]
    wire = [_on_the_wire(plan, rule, dtype, each) for each in given]
    numbers = ml_dtypes.bfloat16 if plan.code == 9 else np.dtype(NCCL[plan.code])
    seen = [each.view(numbers) for each in wire]
    assert seen[0].size == given[0].size * plan.per_element
    total = _as_nccl_would(plan.op, seen)
    got = _off_the_wire(plan, rule, dtype, total.view(wire[0].dtype), ranks)
    np.testing.assert_allclose(
        got.astype("c16"), _reference(op, dtype, given).astype("c16"), rtol=1e-3
    )


@pytest.mark.parametrize("name", ["longdouble", "clongdouble"])
def test_nccl_leaves_numbers_it_does_not_know_to_the_host(name):
    for op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG):
        rule = rule_for(op, dtype_of(name))
        assert plan_reduction(op, dtype_of(name), rule, 2, native=False) is None


def _carried(array, dtype):
    return array if dtype.carrier is None else array.view(dtype.carrier)


def _on_the_wire(plan, rule, dtype, array):
    data = _carried(array, dtype).copy()
    if plan.encoded:
        data = rule.encode(data)
    return data.astype(plan.wire) if data.dtype.itemsize != plan.wire.itemsize else data


def _off_the_wire(plan, rule, dtype, wire, ranks):
    if plan.encoded and plan.wire.itemsize != rule.wire.itemsize:
        wire = wire.astype(rule.wire)
    out = np.zeros(wire.size, dtype.carrier or dtype.numpy)
    if plan.decoded:
        rule.decode(wire, out, ranks)
    elif wire.dtype.itemsize == out.dtype.itemsize:
        out[...] = wire.view(out.dtype)
    else:
        out[...] = wire
    return out.view(dtype.numpy)


def _as_nccl_would(op, numbers):
    stacked = np.stack(numbers)
    if op == 4:
        return (stacked.astype("f8").sum(0) / len(numbers)).astype(stacked.dtype)
    combine = [np.add, np.multiply, np.maximum, np.minimum][op]
    return combine.reduce(stacked, axis=0, dtype=stacked.dtype)


def _reference(op, dtype, given):
    if dtype.family == "bool" or op in (ReduceOp.LAND, ReduceOp.LOR):
        any_of = op in (*EXACT, ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR, ReduceOp.LOR)
        return np.any(given, axis=0) if any_of else np.all(given, axis=0)
    exact = np.stack([each.astype("c16" if dtype.family == "complex" else "f8") for each in given])
    value = {
        ReduceOp.SUM: np.sum,
        ReduceOp.REPRODUCIBLE_SUM: np.sum,
        ReduceOp.PROD: np.prod,
        ReduceOp.MAX: np.max,
        ReduceOp.MIN: np.min,
        ReduceOp.AVG: np.mean,
    }[op](exact, axis=0)
    return value.astype(dtype.numpy)


def test_sums_of_short_floats_are_native_only_where_that_changes_nothing_or_is_asked_for():
    half = dtype_of("bfloat16")
    rule = rule_for(ReduceOp.SUM, half)

    def wire(ranks, native):
        return plan_reduction(ReduceOp.SUM, half, rule, ranks, native=native).wire.name

    assert wire(2, native=False) == "bfloat16"
    assert wire(3, native=False) == "float32"
    assert wire(3, native=True) == "bfloat16"


# ---- bfloat16 by its bits


@given(arrays.arrays(np.float32, 20, elements=st.floats(width=32)))
def test_numbers_are_rounded_as_ml_dtypes_rounds_them(wide):
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = wide.astype(ml_dtypes.bfloat16)
    got = narrowed(wide).view(ml_dtypes.bfloat16)
    same = got.view(np.uint16) == wanted.view(np.uint16)
    assert (same | (np.isnan(got) & np.isnan(wanted))).all()


def test_every_bfloat16_survives_being_widened():
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = widened(bits)
    np.testing.assert_array_equal(wide, bits.view(ml_dtypes.bfloat16).astype(np.float32))
    back = narrowed(wide)
    assert (back[~np.isnan(wide)] == bits[~np.isnan(wide)]).all()


# ---- turns


def test_turns_pass_in_the_order_in_which_they_were_taken():
    turns, passed = LaunchOrder(), []
    numbers = []
    for _ in range(20):
        numbers.append(turns.take())
        turns.hand_over()

    def go(number):
        time.sleep(0.001 * (number * 7 % 5))
        if number % 4 == 3:
            turns.release(number)
            return
        with turns.turn(number):
            passed.append(number)

    threads = [threading.Thread(target=go, args=(number,)) for number in reversed(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passed == [number for number in numbers if number % 4 != 3]


def test_a_turn_that_ends_with_an_error_is_over():
    turns = LaunchOrder()
    first = turns.take()
    with pytest.raises(ZeroDivisionError), turns.turn(first):
        raise ZeroDivisionError
    turns.release(first)
    with turns.turn(turns.take()):
        pass


def test_a_turn_that_an_interrupt_has_lost_holds_up_no_later_one():
    turns = LaunchOrder()
    turns.take()  # and the interrupt comes
    with turns.turn(turns.take()):
        pass


# ---- what runs in the middle: a signal handler, a destructor


def test_blocks_may_be_given_back_and_taken_while_one_is_made():
    taken = []

    class DeviceRuntime:
        def pin(self, memory):
            if len(taken) == 1:
                pinned.give_back(taken[0])
                taken.append(pinned.take(1))
            return False

    pinned = Pinned(DeviceRuntime(), Heap(0))
    taken.append(pinned.take(1))
    takes = threading.Thread(target=lambda: taken.append(pinned.take(1)), daemon=True)
    takes.start()
    takes.join(60)
    first, again, another = taken
    assert again is first
    assert another is not first
