"""Memory of emulated GPUs: it is not the host's, and who takes it for that is told so."""

import pytest

TOUCH = "import ctypes, cupy; x = cupy.arange(10); ctypes.string_at(x.data.ptr + 8, 1)"

TOUCH_FREED = """
import ctypes, cupy
pointer = cupy.cuda.runtime.malloc(100)
cupy.cuda.runtime.free(pointer)
ctypes.string_at(pointer, 1)
"""

TOUCH_AFTER_KERNEL = """
import ctypes, cupy
x, y = cupy.arange(10), cupy.arange(10)
assert cupy.concatenate([x, y]).sum() == 90
ctypes.string_at(x.data.ptr, 1)
"""


def test_who_touches_device_memory_on_the_host_is_told_so(program):
    code, said = program(TOUCH)
    assert code < 0
    assert "the host touched device memory: byte 8 of" in said


def test_who_touches_freed_memory_is_told_so(program):
    code, said = program(TOUCH_FREED)
    assert code < 0
    assert "nothing is allocated" in said


def test_memory_that_a_kernel_found_by_itself_is_closed_behind_it(program):
    code, said = program(TOUCH_AFTER_KERNEL)
    assert code < 0
    assert "the host touched device memory" in said


def test_new_memory_holds_no_zeros(cupy):
    pointer = cupy.cuda.runtime.malloc(1 << 12)
    memory = cupy.cuda.UnownedMemory(pointer, 1 << 12, None)
    x = cupy.ndarray(1 << 12, "u1", cupy.cuda.MemoryPointer(memory, 0))
    assert (cupy.asnumpy(x) == 0xA5).all()
    cupy.cuda.runtime.free(pointer)


def test_a_device_has_so_much_memory_and_no_more(cupy):
    runtime = cupy.cuda.runtime
    free, total = runtime.memGetInfo()
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorMemoryAllocation"):
        runtime.malloc(free + 1)
    pointer = runtime.malloc(1 << 20)
    assert runtime.memGetInfo() == (free - (1 << 20), total)
    runtime.free(pointer)


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_copies_that_leave_what_is_allocated_are_refused(cupy, kind, capfd):
    runtime = cupy.cuda.runtime
    given, taken = runtime.malloc(100), runtime.malloc(200)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.memcpy(taken, given, 101, kind)
    assert "a copy of 101 bytes" in capfd.readouterr().err
    runtime.free(given)
    runtime.free(taken)


def test_pointers_know_where_they_are(cupy):
    describe = cupy.cuda.runtime.pointerGetAttributes
    device, pinned = cupy.zeros(3), cupy.cuda.alloc_pinned_memory(10)
    assert (describe(device.data.ptr).type, describe(device.data.ptr).device) == (2, 0)
    assert describe(pinned.ptr).type == 1
    assert describe(id(pinned)).type == 0


def test_each_device_has_memory_of_its_own(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    with cupy.cuda.Device(1):
        x = cupy.arange(5)
    assert cupy.cuda.runtime.pointerGetAttributes(x.data.ptr).device == 1
    assert cupy.asnumpy(x).tolist() == [0, 1, 2, 3, 4]
