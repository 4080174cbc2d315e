"""Kernels of CuPy on emulated GPUs, and what is not emulated."""

import numpy as np
import pytest
from emulated_gpu import build

REDUCE = "import cupy; assert cupy.arange(100_000).sum() == 4_999_950_000"

SWAP = r"""
extern "C" __global__ void swap(float *x, int n) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = held[n - 1 - threadIdx.x];
}
"""

FOLLOW = r"""
extern "C" __global__ void follow(double **rows, double *sums, int n) {
    for (int i = 0; i < n; i++) sums[threadIdx.x] += rows[threadIdx.x][i];
}
"""

SHIFT = r"""
extern "C" __global__ void shift(int *x) {
    x[threadIdx.x] = __shfl_down_sync(0xffffffff, x[threadIdx.x], 1);
}
"""

DEADLOCK = r"""
import cupy
cupy.RawKernel('''extern "C" __global__ void lock() {
    if (threadIdx.x) __syncthreads(); else __syncwarp(3);
}''', "lock")((1,), (32,), ())
cupy.cuda.Device().synchronize()
"""


@pytest.mark.parametrize("dtype", ["?", "b", "H", "i", "q", "e", "f", "d", "F", "D"])
def test_numbers_of_every_kind_are_computed_as_by_numpy(cupy, dtype):
    x = (np.arange(5000) % 100).astype(dtype)
    y = cupy.asarray(x)
    np.testing.assert_array_equal(cupy.asnumpy(y * y + y), x * x + x)
    np.testing.assert_array_equal(cupy.asnumpy(y.reshape(-1, 1)[::-2]), x.reshape(-1, 1)[::-2])
    wide = "D" if dtype in "FD" else "d"
    np.testing.assert_allclose(complex(y.sum(dtype=wide)), complex(x.sum(dtype=wide)), rtol=1e-12)


def test_threads_of_a_block_meet_at_barriers(cupy):
    x = cupy.arange(64, dtype="f4")
    cupy.RawKernel(SWAP, "swap")((1,), (64,), (x, np.int32(64)))
    assert cupy.asnumpy(x).tolist() == list(range(63, -1, -1))


def test_threads_of_a_warp_exchange_values(cupy):
    x = cupy.arange(64, dtype="i4")
    cupy.RawKernel(SHIFT, "shift")((1,), (64,), (x,))
    assert cupy.asnumpy(x).tolist() == [*range(1, 32), 31, *range(33, 64), 63]


def test_pointers_that_a_kernel_reads_from_memory_can_be_used(cupy):
    rows = [cupy.full(10, n, "d") for n in range(4)]
    pointers, sums = cupy.asarray([row.data.ptr for row in rows]), cupy.zeros(4)
    cupy.RawKernel(FOLLOW, "follow")((1,), (4,), (pointers, sums, np.int32(10)))
    assert cupy.asnumpy(sums).tolist() == [0, 10, 20, 30]


def test_barriers_that_never_fill_end_the_program(program):
    code, said = program(DEADLOCK)
    assert code < 0
    assert "wait at barriers that never fill" in said


def test_fibers_of_other_machines_compute_the_same(program, tmp_path, monkeypatch):
    build.compile_library("driver", tmp_path, "-DPORTABLE_FIBERS")
    libraries = f"{tmp_path}:{build.LIBRARIES}"
    assert program(REDUCE, LD_LIBRARY_PATH=libraries) == (0, "")


def test_a_kernel_with_what_is_not_emulated_does_not_compile(cupy):
    source = 'extern "C" __global__ void f(int *x) { x[0] = __ballot_sync(1, x[0]); }'
    with pytest.raises(cupy.cuda.compiler.CompileException, match="__ballot_sync"):
        cupy.RawKernel(source, "f").compile()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mallocManaged", (100,)),
        ("mallocAsync", (100, 0)),
        ("ipcGetMemHandle", (0,)),
        ("deviceGetDefaultMemPool", (0,)),
    ],
)
def test_a_function_that_is_not_emulated_is_an_error_that_names_it(cupy, capfd, name, arguments):
    runtime = cupy.cuda.runtime
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorNotSupported"):
        getattr(runtime, name)(*arguments)
    assert f"cuda{name[0].upper()}{name[1:]} is not emulated" in capfd.readouterr().err


def test_matrices_of_real_numbers_are_multiplied_and_others_refused(cupy, capfd):
    a, b = np.arange(12.0).reshape(3, 4), np.arange(20.0).reshape(4, 5)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(a) @ cupy.asarray(b)), a @ b)
    with pytest.raises(cupy.cuda.cublas.CUBLASError, match="NOT_SUPPORTED"):
        cupy.asarray(a, "F") @ cupy.asarray(b, "F")
    assert "is not emulated" in capfd.readouterr().err
