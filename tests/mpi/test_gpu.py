"""Arrays on GPUs: the contract on every way they can take, streams, and torch's tensors.

On a machine with one GPU all ranks share it, which takes NCCL 2.30 or newer; with one rank, or a
GPU for each, any NCCL.
"""

import time

import numpy as np
import pytest
from gpu_arrays import arrays_of, why_not_nccl
from requirements import missing

import hpcdist as dist
from hpcdist.runtime import gpu
from hpcdist.testing import contract
from hpcdist.testing.contract import TransportContract
from hpcdist.testing.on_device import OnDevice

pytestmark = pytest.mark.gpu
LARGE = 1 << 24


class TestContract(TransportContract):
    """The contract, with all arrays on the GPU."""

    @pytest.fixture(autouse=True)
    def _on_gpu(self, cupy, way, monkeypatch):
        contract.call_instead(monkeypatch, OnDevice(arrays_of(cupy)))

    def run(self, check):
        return [check()]


# ---- streams


def slow(cupy, x, value):
    """Write `value` to `x` after a few milliseconds of work on the current stream."""
    cupy.cuda.get_current_stream().launch_host_func(time.sleep, 0.005)
    x[...] = value


@pytest.mark.parametrize("mode", ["sync", "async", "calc"])
def test_operations_wait_for_the_current_stream_and_it_for_them(cupy, way, mode, rank, size):
    for repeat in range(50):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(1 << 16, "f4")
            slow(cupy, x, rank + repeat)
            if mode == "async":
                dist.stream.all_reduce(x, sync_op=False).wait()
            else:
                dist.stream.all_reduce(x, use_calc_stream=mode == "calc")
            y = x * 2
            x[...] = -1
            assert (cupy.asnumpy(y) == 2 * (size * repeat + sum(range(size)))).all()


def test_without_the_wait_old_numbers_are_read(cupy, way, size):
    """Whether the test above can fail: the same, and nobody waits."""
    if way != "nccl" or size == 1:
        pytest.skip("only NCCL returns before the numbers have been read")
    wrong = 0
    for _ in range(50):
        with cupy.cuda.Stream(non_blocking=True):
            x = cupy.zeros(1 << 22, "f4")
            slow(cupy, x, 1)
            work = dist.all_reduce(x, sync_op=False)
            while not work._queued.is_completed():
                time.sleep(0)
            wrong += not bool((cupy.asnumpy(x) == size).all())
            work.wait()
    assert wrong


def test_arrays_may_be_dropped_while_they_travel(cupy, way, size):
    works = []
    for _ in range(10):
        x = cupy.ones(LARGE // 4, "f4")
        works.append((dist.all_reduce(x, sync_op=False), x[:1]))
        del x
        cupy.full(LARGE // 4, 7, "f4")  # would take the memory, were it free
    for work, first in works:
        work.wait()
        assert first.item() == size


def test_a_captured_operation_is_replayed(cupy, way, size):
    if way != "nccl":
        pytest.skip(f"{way} cannot be captured")
    x = cupy.ones(1000, "f4")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        dist.stream.all_reduce(x, use_calc_stream=True)
        stream.synchronize()
        x[...] = 1
        stream.begin_capture()
        dist.stream.all_reduce(x, use_calc_stream=True)
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert (cupy.asnumpy(x) == size**3).all()


def test_what_cannot_be_captured_is_refused(cupy, way):
    x = cupy.ones(1000, "f4")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(dist.UsageError, match="CUDA graph"):
            dist.all_reduce(x)
        stream.end_capture()


# ---- arrays


@pytest.mark.parametrize("count", [0, 1, 3, (1 << 20) + 1, LARGE])
def test_sizes_of_all_kinds_are_reduced_and_gathered(cupy, way, count, rank, size):
    x = cupy.arange(count, dtype="f8") + rank
    dist.all_reduce(x)
    expected = size * np.arange(count, dtype="f8") + sum(range(size))
    np.testing.assert_array_equal(cupy.asnumpy(x), expected)
    gathered = []
    dist.all_gather(gathered, cupy.full(count, rank))
    assert all((cupy.asnumpy(each) == other).all() for other, each in enumerate(gathered))


def test_bfloat16_tensors_are_summed_wide(cupy, way, rank, size):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        missing("gpu", "this torch has no CUDA")
    value = 1.0 if rank == 0 else 1 / 512
    x = torch.full((5,), value, dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(x)
    exact = torch.tensor(1 + (size - 1) / 512, dtype=torch.float32)
    assert (x.cpu() == exact.to(torch.bfloat16)).all()


def test_torch_and_cupy_meet_in_one_operation(cupy, way, rank, size):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        missing("gpu", "this torch has no CUDA")
    x = torch.ones(100, device="cuda") if rank % 2 else cupy.ones(100, "f4")
    dist.all_reduce(x)
    assert float(x.sum()) == 100 * size


def test_host_and_gpu_mixed_between_ranks_is_an_error_on_every_rank(cupy, way, rank, size):
    if size == 1:
        pytest.skip("one rank does not disagree")
    with pytest.raises(dist.MismatchError, match="on a GPU"):
        dist.all_reduce(cupy.ones(3) if rank else np.ones(3))


def test_ranks_that_share_a_gpu_without_leave_are_refused(cupy, world_with, size):
    if gpu.count() >= size:
        pytest.skip("every rank has a GPU of its own")
    world_with(device="gpu")
    with pytest.raises(dist.UsageError, match="use the same GPU"):
        dist.all_reduce(cupy.ones(3))


def test_a_message_on_its_way_to_gaps_has_memory_of_its_own(cupy, way, rank, size):
    """What it is unpacked from belongs to nobody's array, and must not serve the next one."""
    for _ in range(100):
        inbox = cupy.zeros(2000)[::2]
        work = dist.irecv(inbox, (rank - 1) % size)
        dist.send(cupy.full(1000, rank + 1.0), (rank + 1) % size)
        others = [cupy.zeros(1000) for _ in range(20)]
        work.wait()
        assert (cupy.asnumpy(inbox) == (rank - 1) % size + 1).all()
        del others


# ---- batches of messages


@pytest.fixture
def batches(cupy, world_with, size):
    """Start the world anew, with batches of messages that travel over NCCL."""
    reason = why_not_nccl(gpu.count(), size)
    if reason:
        missing("nccl", reason)
    world_with(device_backend="nccl", device="gpu", share_gpu=1, device_batches="nccl")


def exchange(*messages):
    for work in dist.batch_isend_irecv(list(messages)):
        work.wait()


def test_a_ring_brings_each_rank_the_numbers_of_its_left(cupy, batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (1, 1000, 1 << 20):
        with cupy.cuda.Stream(non_blocking=True):
            outbox, inbox = cupy.zeros(count, "f4"), cupy.zeros(count, "f4")
            slow(cupy, outbox, rank + 1)
            exchange(dist.P2POp(dist.isend, outbox, right), dist.P2POp(dist.irecv, inbox, left))
            doubled = inbox * 2
            inbox[...] = -1
            assert (cupy.asnumpy(doubled) == 2 * (left + 1)).all()


def test_messages_of_several_tags_meet_whatever_the_order_of_the_lists(cupy, batches, rank, size):
    inboxes = {(peer, tag): cupy.zeros(tag + 1, "i8") for peer in range(size) for tag in (4, 0, 9)}
    receives = [dist.P2POp(dist.irecv, x, peer, None, tag) for (peer, tag), x in inboxes.items()]
    sends = [
        dist.P2POp(dist.isend, cupy.full(tag + 1, 100 * rank + tag), peer, None, tag)
        for peer in range(size)
        for tag in (0, 9, 4)
    ]
    exchange(*(receives + sends if rank % 2 else sends[::-1] + receives))
    for (peer, tag), inbox in inboxes.items():
        assert (cupy.asnumpy(inbox) == 100 * peer + tag).all()


def test_halos_are_exchanged_and_smoothed_step_by_step(cupy, batches, rank, size):
    rows, width, steps = 6, 5, 4
    whole = np.random.default_rng(3).random((rows * size, width))
    expected = whole.copy()
    for _ in range(steps):
        expected = (np.roll(expected, 1, 0) + expected + np.roll(expected, -1, 0)) / 3
    mine = cupy.zeros((rows + 2, width))
    mine[1:-1] = cupy.asarray(whole[rank * rows : (rank + 1) * rows])
    up, down = (rank - 1) % size, (rank + 1) % size
    for _ in range(steps):
        exchange(
            dist.P2POp(dist.isend, mine[1], up, None, 1),
            dist.P2POp(dist.isend, mine[-2], down, None, 2),
            dist.P2POp(dist.irecv, mine[0], up, None, 2),
            dist.P2POp(dist.irecv, mine[-1], down, None, 1),
        )
        mine[1:-1] = (mine[:-2] + mine[1:-1] + mine[2:]) / 3
    own = expected[rank * rows : (rank + 1) * rows]
    np.testing.assert_allclose(cupy.asnumpy(mine[1:-1]), own, rtol=1e-12)


def test_columns_with_gaps_travel_in_a_batch(cupy, batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    field = cupy.zeros((50, 40))
    field[:, 0] = cupy.arange(50) + rank
    exchange(dist.P2POp(dist.isend, field[:, 0], right), dist.P2POp(dist.irecv, field[:, -1], left))
    assert (cupy.asnumpy(field[:, -1]) == np.arange(50) + left).all()
    assert not cupy.asnumpy(field[:, 1:-1]).any()


def test_batches_and_collectives_may_be_under_way_together(cupy, batches, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    works, results = [], []
    for step in range(20):
        x, inbox = cupy.full(1 << 16, rank + step, "f4"), cupy.zeros(1 << 16, "f4")
        works += dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, inbox, left), dist.P2POp(dist.isend, x, right)]
        )
        total = cupy.ones(1 << 16, "f4")
        works.append(dist.all_reduce(total, sync_op=False))
        results.append((step, inbox, total))
    works[-1].synchronize()
    assert all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    for step, inbox, total in results:
        assert (cupy.asnumpy(inbox) == left + step).all()
        assert (cupy.asnumpy(total) == size).all()


def test_a_pair_that_disagrees_in_a_batch_is_an_error_on_both(cupy, batches, rank, size):
    outbox, inbox = cupy.zeros(3 + (rank == 0)), cupy.zeros(3)
    peers = (rank + 1) % size, (rank - 1) % size
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outbox, peers[0]), dist.P2POp(dist.irecv, inbox, peers[1])]
    )
    spoilt = {0, 1 % size}
    for work, peer in zip(works, peers, strict=True):
        if {rank, peer} == spoilt:
            with pytest.raises(dist.MismatchError, match="do not match"):
                work.wait()
        else:
            work.wait()
    dist.all_reduce(inbox)


# ---- training


def test_arrays_train_on_the_gpu(cupy, way, rank, size):
    class Model:
        def __init__(self):
            self.w = dist.Parameter(cupy.full(5, float(rank)))

        def named_parameters(self):
            return [("w", self.w)]

        def __call__(self, x):
            return self.w.data * x

    net = Model()
    model = dist.DataParallel(net)
    assert (cupy.asnumpy(net.w.data) == 0).all()
    model(2.0)
    net.w.grad = cupy.full(5, rank + 1.0)
    assert (cupy.asnumpy(net.w.grad) == (size + 1) / 2).all()


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_sharded_arrays_train_on_the_gpu_as_on_the_host(cupy, way, level, folder, rank):
    class Layers:
        def __init__(self, put):
            numbers = np.random.default_rng(3).integers(-8, 8, (3, 40, 7)).astype("f4")
            self.put, self.weights = put, [dist.Parameter(put(each)) for each in numbers]

        def named_parameters(self):
            return [(f"{n}.weight", each) for n, each in enumerate(self.weights)]

        def __call__(self, x):
            return [weight.data * x for weight in self.weights]

    def train(layers, model, optimizer):
        random, norms = np.random.default_rng(rank), []
        for _ in range(3):
            assert all(type(each) is type(layers.put([1.0])) for each in model(2.0))
            for weight in reversed(layers.weights):
                weight.grad = layers.put(random.integers(-8, 8, (40, 7)).astype("f4"))
            norms.append(dist.clip_grad_norm_(model, 1.0))
            optimizer.step()
        return norms

    def made(put):
        layers = Layers(put)
        optimizer = dist.optim.LAMB(layers.named_parameters())
        return layers, *dist.group_sharded_parallel(layers, optimizer, level, segment_size=0)[:2]

    device, host = made(cupy.asarray), made(np.asarray)
    np.testing.assert_allclose(train(*device), train(*host), rtol=1e-5)
    for mine, expected in zip(device[1:], host[1:], strict=True):
        for name, numbers in expected.state_dict().items():
            np.testing.assert_allclose(mine.state_dict()[name], numbers, rtol=1e-4, atol=1e-6)
    dist.save_group_sharded_model(device[1], folder, device[2])
    other = made(cupy.asarray)
    state = {"model": other[1].sharded_state_dict(), "optimizer": other[2].sharded_state_dict()}
    dist.checkpoint.load(state, folder)
    other[1].load_sharded_state_dict(state["model"])
    other[2].load_sharded_state_dict(state["optimizer"])
    for mine, expected in zip(other[1:], device[1:], strict=True):
        for name, numbers in expected.state_dict().items():
            np.testing.assert_array_equal(mine.state_dict()[name], numbers)


def test_modules_train_on_the_gpu(cupy, way, rank, size):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        missing("gpu", "this torch has no CUDA")
    model = dist.DataParallel(torch.nn.Linear(1, 1, bias=False).cuda())
    for step in range(3):
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0 + step, device="cuda")).sum().backward()
        assert model.module.weight.grad.item() == (size + 1) / 2 + step


SUMS = {
    "sum": lambda a: a.sum(),
    "sums of columns": lambda a: a.sum(0),
    "sums of rows in float32": lambda a: a.astype(np.float32).sum(1),
    "sum of complex": lambda a: (a * (1 + 2j)).sum(0),
    "spread": lambda a: a.std(0),
    "dot": lambda a: np.vdot(a, a),
    "product": lambda a: a.T @ a,
}


def test_reproducible_sums_have_the_bits_of_the_host(cupy, way, size):
    random, mesh = np.random.default_rng(3), dist.ProcessMesh(range(size))
    a = np.ldexp(random.standard_normal((31, 6)), random.integers(-30, 30, (31, 6)))
    for name, function in SUMS.items():
        with dist.array_policy(sums="reproducible"):
            there, here = (
                dist.unshard_dtensor(function(dist.shard_tensor(x, mesh, [dist.Shard(0)])))
                for x in (cupy.asarray(a), a)
            )
        assert there.get().tobytes() == here.tobytes(), name
