"""Arrays on GPUs: the contract on every way they can take, streams, and torch's tensors.

On a machine with one GPU all ranks share it, which NCCL is not used for; with one rank, or a GPU
for each, every way is tried.
"""

import time

import numpy as np
import pytest
from requirements import missing

import hpcdist as dist
from hpcdist.runtime import gpu
from hpcdist.testing import contract
from hpcdist.testing.contract import TransportContract
from hpcdist.testing.on_device import Arrays, OnDevice

pytestmark = pytest.mark.gpu
LARGE = 1 << 24


@pytest.fixture
def cupy():
    try:
        import cupy
    except ImportError as error:
        missing("gpu", f"CuPy cannot be imported: {error}")
    if not cupy.cuda.is_available():
        missing("gpu", "cupy.cuda.is_available() is False")
    return cupy


@pytest.fixture(params=["nccl", "mpi", "staged"])
def way(request, cupy, world_with, rank, size):
    """Start the world anew with all arrays going one way."""
    from hpcdist.transport import mpi_cuda, nccl

    found = gpu.count()
    if request.param == "nccl" and (nccl.why_not() or found < size):
        missing("nccl", nccl.why_not() or f"{size} ranks, but CUDA sees {found} GPUs")
    if request.param == "mpi" and mpi_cuda.why_not(False):
        missing("cuda_aware", mpi_cuda.why_not(False))
    world_with(device_way=request.param, device="gpu", share_gpu=1)
    return request.param


def arrays_of(cupy):
    known = "?bhilqBHILQefdFD"

    def to_device(array):
        if array.dtype.char not in known:
            return array  # CuPy has no such dtype: it stays on the host
        given = np.array(array, array.dtype.newbyteorder("="))
        if array.flags.c_contiguous:
            return cupy.asarray(given)
        room = cupy.zeros((*given.shape[:-1], given.shape[-1] * 2), given.dtype)[..., ::2]
        room[...] = cupy.asarray(given)
        return room

    return Arrays(to_device, cupy.asnumpy, lambda array: isinstance(array, cupy.ndarray))


class TestContract(TransportContract):
    """The contract, with all arrays on the GPU."""

    @pytest.fixture(autouse=True)
    def _on_gpu(self, cupy, way, monkeypatch):
        monkeypatch.setattr(contract, "dist", OnDevice(arrays_of(cupy)))

    def run(self, check):
        return [check()]


# ---- streams


def slow(cupy, x, value):
    """Write `value` to `x` after a few milliseconds of work on the current stream."""
    a = cupy.ones((2048, 2048), "f4")
    for _ in range(20):
        a = a @ a * 1e-4
    x[...] = value + 0 * a[0, 0]


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


def test_modules_train_on_the_gpu(cupy, way, rank, size):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        missing("gpu", "this torch has no CUDA")
    model = dist.DataParallel(torch.nn.Linear(1, 1, bias=False).cuda())
    for step in range(3):
        model.zero_grad()
        model(torch.full((1, 1), rank + 1.0 + step, device="cuda")).sum().backward()
        assert model.module.weight.grad.item() == (size + 1) / 2 + step
