"""What is done around device memory, on a device that is made of host memory and completes late."""

import threading

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import hpcdist as dist
from hpcdist.testing import contract
from hpcdist.testing.contract import TransportContract
from hpcdist.testing.on_device import Arrays, OnDevice
from hpcdist.testing.slow_device import DEVICE, SlowArray
from hpcdist.transport.call.call import Barrier
from hpcdist.transport.device.choose import STAGED
from hpcdist.transport.device.cuda_mpi import _Comm
from hpcdist.transport.device.launches import Launches

ARRAYS = Arrays(DEVICE.array, DEVICE.numbers, lambda array: isinstance(array, SlowArray))


@pytest.mark.thorough
class TestStaged(TransportContract):
    """The contract, with all arrays on the device."""

    @pytest.fixture(autouse=True)
    def _on_device(self, monkeypatch):
        contract.call_instead(monkeypatch, OnDevice(ARRAYS))

    def run(self, check):
        return [check()]


def test_arrays_that_the_device_cannot_hold_are_gathered_on_the_host(rank, size):
    arrays = ARRAYS._replace(to_device=lambda array: array)
    gathered = []
    OnDevice(arrays).all_gather(gathered, np.full(2, rank + 1j))
    assert [each.tolist() for each in gathered] == [[each + 1j] * 2 for each in range(size)]


def test_cuda_aware_mpi_is_asked_for_its_properties_and_called_after_the_stream(rank, size):
    comm = _Comm(MPI.COMM_WORLD, DEVICE, DEVICE.new_stream(), 30.0)
    assert (comm.rank, comm.size) == (rank, size)
    assert comm.allgather(rank) == list(range(size))


def test_an_operation_waits_for_what_was_computed_before_and_the_next_waits_for_it(rank, size):
    for _ in range(20):
        x = DEVICE.array(np.full(1000, rank + 1.0))  # arrives late
        dist.all_reduce(x)
        y = x * 2  # on the current stream
        x[...] = 0
        assert (DEVICE.numbers(y) == size * (size + 1)).all()


def test_large_arrays_go_in_overlapping_chunks(world_with, rank, size):
    world_with(device_chunk_mb=0.01)
    count = 20_001
    x = DEVICE.array(np.arange(count) + rank)
    dist.all_reduce(x)
    assert (DEVICE.numbers(x) == size * np.arange(count) + sum(range(size))).all()
    gathered = DEVICE.array(np.zeros(size * count, int))
    dist.all_gather(gathered, DEVICE.array(np.arange(count) * (rank + 1)))
    expected = np.concatenate([np.arange(count) * (each + 1) for each in range(size)])
    assert (DEVICE.numbers(gathered) == expected).all()
    blocks = DEVICE.array(np.arange(size * count) + rank)
    mine = DEVICE.array(np.zeros(count, int))
    dist.reduce_scatter(mine, blocks)
    expected = size * np.arange(rank * count, (rank + 1) * count) + sum(range(size))
    assert (DEVICE.numbers(mine) == expected).all()
    exchanged = DEVICE.array(np.zeros(size * count, int))
    dist.alltoall_single(exchanged, blocks)
    sent = [np.arange(rank * count, (rank + 1) * count) + each for each in range(size)]
    assert (DEVICE.numbers(exchanged) == np.concatenate(sent)).all()


def test_the_result_may_be_a_part_of_what_is_sent(rank, size):
    whole = DEVICE.array(np.arange(4.0 * size))
    dist.reduce_scatter(whole[4 * rank : 4 * rank + 4], whole)
    expected = np.arange(4.0 * size)
    expected[4 * rank : 4 * rank + 4] *= size
    assert (DEVICE.numbers(whole) == expected).all()


def test_works_keep_their_arrays_and_tell_when_they_have_ended(size):
    arrays = [DEVICE.array(np.full(50_000, 1.0)) for _ in range(8)]
    works = [dist.all_reduce(x, sync_op=False) for x in arrays]
    works[-1].synchronize()
    assert all(work.is_completed() for work in works)
    for work, x in zip(works, arrays, strict=True):
        work.wait()
        assert (DEVICE.numbers(x) == size).all()


def test_the_work_of_a_blocking_call_speaks_of_the_device(size):
    x = DEVICE.array(np.full(50_000, 1.0))
    work = dist.all_reduce(x)
    work.synchronize()
    assert work.is_completed()
    assert dist.get_group().transport.on_devices.backend == STAGED


def test_wait_lets_the_current_stream_or_the_host_wait(size):
    for use_calc_stream in (True, False):
        x = DEVICE.array(np.ones(1000))
        dist.all_reduce(x, sync_op=False)
        dist.wait(x, use_calc_stream=use_calc_stream)
        assert (DEVICE.numbers(x) == size).all()


def test_an_operation_on_the_current_stream_is_put_there_by_its_own_thread(monkeypatch, size):
    """A thread may have a default stream of its own, which has the same handle in all threads."""
    group, recorded = dist.new_group(), []
    record = DEVICE.record

    def recording(stream):
        if stream is DEVICE.current:
            recorded.append(threading.current_thread())
        return record(stream)

    for _ in range(10):
        ahead = DEVICE.array(np.ones(50_000))
        x = DEVICE.array(np.ones(4))
        work = dist.all_reduce(ahead, group=group, sync_op=False)
        with monkeypatch.context() as patch:
            patch.setattr(DEVICE, "record", recording)
            dist.stream.all_reduce(x, group=group, use_calc_stream=True)
        work.wait()
        assert (DEVICE.numbers(x) == size).all()
    assert set(recorded) == {threading.current_thread()}
    dist.destroy_process_group(group)


def test_operations_of_several_groups_pass_in_the_order_of_their_issue(rank, size):
    groups = [dist.new_group() for _ in range(3)]
    arrays = [DEVICE.array(np.full(2000, float(each))) for each in range(12)]
    works = [
        dist.all_reduce(x, group=groups[each % 3], sync_op=False) for each, x in enumerate(arrays)
    ]
    for each, (work, x) in enumerate(zip(works, arrays, strict=True)):
        work.wait()
        assert (DEVICE.numbers(x) == size * each).all()
    for group in groups:
        dist.destroy_process_group(group)


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_host_and_device_mixed_between_ranks_is_an_error_on_every_rank(rank, size):
    if size == 1:
        pytest.skip("one rank does not disagree")
    x = np.ones(3)
    with pytest.raises(dist.MismatchError, match="on a GPU"):
        dist.all_reduce(DEVICE.array(x) if rank == 0 else x)


def test_what_another_library_computes_on_its_own_stream_is_waited_for(monkeypatch, rank, size):
    own, theirs = DEVICE.current, DEVICE.new_stream()

    def on_theirs(values):
        monkeypatch.setattr(DEVICE, "current", theirs)
        array = DEVICE.array(values)
        monkeypatch.setattr(DEVICE, "current", own)
        return array

    monkeypatch.setattr(DEVICE, "current_streams", lambda: (own, theirs))
    for use_calc_stream in (False, True) * 5:
        x = on_theirs(np.full(1000, rank + 1.0))
        dist.stream.all_reduce(x, use_calc_stream=use_calc_stream)
        assert (DEVICE.numbers(x) == size * (size + 1) / 2).all()
        gaps = on_theirs(np.full((4, 8), rank + 1.0)[:, ::2])  # packed on our library's stream
        dist.stream.all_reduce(gaps, use_calc_stream=use_calc_stream)
        assert (DEVICE.numbers(gaps) == size * (size + 1) / 2).all()
        gathered = DEVICE.array(np.zeros(2 * size))
        dist.alltoall_single(gathered, DEVICE.array(np.zeros(2 * size)))
        parts = [on_theirs(np.full(2, rank + 1.0)) for _ in range(size)]
        dist.stream.reduce_scatter(gathered[:2], parts, use_calc_stream=use_calc_stream)
        assert (DEVICE.numbers(gathered[:2]) == size * (size + 1) / 2).all()


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("fails_on", ["the result", "what is sent"])
def test_host_and_device_mixed_on_one_rank_is_an_error_on_every_rank(rank, size, fails_on):
    host, device = np.ones(size), DEVICE.array(np.ones(size))
    given, taken = (device, host) if fails_on == "the result" else (host, device)
    own = device if rank else (taken if fails_on == "the result" else given)
    pair = (own, device) if fails_on == "the result" else (device, own)
    with pytest.raises((dist.UsageError, dist.RemoteError), match="memory of"):
        dist.alltoall_single(*pair)


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_host_and_device_mixed_in_one_call_is_refused(rank, size):
    host, device = np.ones(4 * size), DEVICE.array(np.ones(4 * size))
    with pytest.raises(dist.UsageError, match="memory of"):
        dist.all_gather(host, device[:4])
    with pytest.raises((dist.UsageError, dist.RemoteError), match="memory of"):
        dist.scatter(device[:4], [host[:4]] * size if rank == 0 else None, 0)


def test_arrays_of_an_empty_list_are_made_on_the_device(rank, size):
    gathered = []
    dist.all_gather(gathered, DEVICE.array(np.full(rank + 1, float(rank))))
    assert [type(each) for each in gathered] == [SlowArray] * size
    assert [DEVICE.numbers(each).tolist() for each in gathered] == [
        [float(each)] * (each + 1) for each in range(size)
    ]


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_no_memory_to_pack_an_array_is_an_error_on_every_rank(monkeypatch, rank, size):
    x = DEVICE.array(np.ones((4, 4)))[:, ::2]

    def full(self, order="C"):
        raise MemoryError("out of device memory")

    if rank == 0:
        monkeypatch.setattr(SlowArray, "copy", full)
    with pytest.raises((dist.UsageError, dist.RemoteError), match="out of device memory"):
        dist.all_reduce(x)


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("sync_op", [True, False])
def test_a_device_that_fails_on_one_rank_is_an_error_on_every_rank(monkeypatch, rank, sync_op):
    x = DEVICE.array(np.ones(4))

    def fail():
        raise OSError("the device has fallen off the bus")

    if rank == 0:
        monkeypatch.setattr(DEVICE, "current_streams", fail)
    expected = dist.TransportError if rank == 0 else dist.RemoteError
    with pytest.raises(expected, match="fallen off the bus"):
        dist.all_reduce(x, sync_op=sync_op).wait()


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("verb", ["copy_to_host", "is_done"])
@pytest.mark.parametrize("sync_op", [True, False])
def test_a_device_that_fails_on_the_way_is_an_error_on_every_rank(monkeypatch, rank, verb, sync_op):
    x = DEVICE.array(np.ones(4))
    dist.all_reduce(x)
    dist.wait(x, use_calc_stream=False)

    def fail(*_):
        raise OSError("the device has fallen off the bus")

    if rank == 0:
        monkeypatch.setattr(DEVICE, verb, fail)
    expected = dist.TransportError if rank == 0 else dist.RemoteError
    with pytest.raises(expected, match="fallen off the bus"):
        dist.all_reduce(x, sync_op=sync_op).wait()
    monkeypatch.undo()


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_stream_that_is_held_up_is_a_timeout_and_not_old_numbers(world_with, rank):
    group = dist.new_group(timeout=0.5)
    held = threading.Event()
    DEVICE.current.put(held.wait)
    try:
        with pytest.raises((dist.CollectiveTimeout, dist.RemoteError)):
            dist.all_reduce(DEVICE.array(np.ones(4)), group=group)
    finally:
        held.set()


def test_arrays_are_averaged_together_where_they_are(rank, size):
    arrays = [DEVICE.array(np.full(each + 1, rank + 1.0)) for each in range(3)]
    averaged = dist.average_gradients(arrays)
    for array in averaged:
        assert (DEVICE.numbers(array) == (size + 1) / 2).all()


def test_numbers_and_device_arrays_are_reduced_together_into_new_ones(rank, size):
    total = size * (size + 1) // 2
    given = {"x": DEVICE.array(np.full((2, 3), rank + 1.0)), "n": rank + 1, "y": np.ones(2)}
    more = DEVICE.array(np.full(4, rank + 1, ml_dtypes.bfloat16)), DEVICE.array(np.full(5, rank))
    got, (short, ints) = dist.all_reduced((given, more))
    assert (DEVICE.numbers(got["x"]) == total).all()
    assert (DEVICE.numbers(given["x"]) == rank + 1).all()
    assert (got["n"], got["y"].tolist()) == (total, [size, size])
    assert (DEVICE.numbers(short) == total).all()
    assert DEVICE.numbers(short).dtype == ml_dtypes.bfloat16
    assert (DEVICE.numbers(ints) == total - size).all()
    means = dist.all_reduced(more, dist.ReduceOp.AVG)
    assert DEVICE.numbers(means[1]).tolist() == [(size - 1) / 2] * 5
    if size > 1:
        with pytest.raises(dist.MismatchError, match="on a device"):
            dist.all_reduced(given["x"] if rank == 0 else np.ones((2, 3)))


def test_host_memory_is_locked_once_and_unlocked_at_the_end(rank, size):
    group = dist.new_group()
    before = len(DEVICE.pinned)
    x = DEVICE.array(np.ones(100))
    dist.all_reduce(x, group=group)
    after_first = len(DEVICE.pinned)
    for _ in range(5):
        dist.all_reduce(x, group=group)
    assert len(DEVICE.pinned) == after_first > before
    dist.destroy_process_group(group)
    assert len(DEVICE.pinned) == before


def test_arrays_train_on_the_device(rank, size):
    class Model:
        def __init__(self):
            self.w = dist.Parameter(DEVICE.array(np.full(5, float(rank))))

        def named_parameters(self):
            return [("w", self.w)]

        def __call__(self, x):
            return self.w.data * x

    model = dist.DataParallel(Model())
    inner = model._layers.w
    assert (DEVICE.numbers(inner.data) == 0).all()
    model(2.0)
    inner.grad = DEVICE.array(np.full(5, rank + 1.0))
    assert (DEVICE.numbers(inner.grad) == (size + 1) / 2).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int16", "complex64"])
@pytest.mark.parametrize("op", ["SUM", "MAX", "AVG"])
@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter"])
def test_large_arrays_are_added_on_the_device_as_the_host_adds_them(
    rank, size, dtype, op, operation
):
    if (op == "MAX" and dtype == "complex64") or (op == "AVG" and dtype == "int16"):
        pytest.skip(f"{op} is not defined for {dtype}")
    numbers = np.random.default_rng(rank).integers(-50, 50, size * 400_003) / 8
    exact = numbers.astype(getattr(ml_dtypes, dtype, None) or dtype)
    x, y = DEVICE.array(exact), exact.copy()
    arguments = {
        "all_reduce": lambda array: (array,),
        "reduce": lambda array: (array, size - 1),
        "reduce_scatter": lambda array: (array[400_003 * rank : 400_003 * (rank + 1)], array),
    }[operation]
    for array in (x, y):
        getattr(dist, operation)(*arguments(array), dist.ReduceOp[op])
    assert DEVICE.numbers(x).tobytes() == y.tobytes()


def test_what_has_ended_is_forgotten_once():
    class Runtime:
        def is_done(self, event):
            launches._forget_ended()
            return event != "under way"

    launches = Launches(None)
    for event in ("first", "second", "under way"):
        launches.keep(Barrier(device=Runtime()), event)
    forgets = threading.Thread(target=launches._forget_ended, daemon=True)
    forgets.start()
    forgets.join(60)
    assert [event for _, event in launches._running] == ["under way"]
