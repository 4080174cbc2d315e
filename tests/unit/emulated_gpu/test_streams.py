"""Streams, events and graphs of emulated GPUs end late, and in the order that CUDA promises."""

import threading
import time

import pytest

LATE_S, ENOUGH_S = 0.05, 60.0


@pytest.fixture
def stream(cupy):
    return cupy.cuda.Stream(non_blocking=True)


@pytest.fixture
def x(cupy):
    """An array of zeros, which are there."""
    made = cupy.zeros(10)
    cupy.cuda.Device().synchronize()
    return made


def hold_up(stream):
    stream.launch_host_func(time.sleep, LATE_S)


@pytest.fixture
def held_up(stream):
    """Hold up the stream until the event is set."""
    event = threading.Event()
    stream.launch_host_func(event.wait, ENOUGH_S)
    yield event
    event.set()
    stream.synchronize()


def fill_late(cupy, x, value, stream):
    with stream:
        hold_up(stream)
        x[...] = value


def test_a_stream_is_not_waited_for_by_the_host(cupy, stream, x, held_up):
    room = cupy.cuda.alloc_pinned_memory(x.nbytes)
    with stream:
        x[...] = 7
    cupy.cuda.runtime.memcpyAsync(room.ptr, x.data.ptr, x.nbytes, 2, stream.ptr)
    assert not stream.done
    held_up.set()
    stream.synchronize()
    assert stream.done
    assert cupy.asnumpy(x)[0] == 7


def test_who_waits_for_no_event_reads_old_numbers(cupy, stream, x, held_up):
    other = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x[...] = 7
    with other:
        assert cupy.asnumpy(x)[0] == 0


def test_who_waits_for_an_event_reads_new_ones(cupy, stream, x):
    other = cupy.cuda.Stream(non_blocking=True)
    fill_late(cupy, x, 7, stream)
    other.wait_event(stream.record())
    with other:
        assert cupy.asnumpy(x)[0] == 7


def test_the_default_stream_waits_for_those_that_block_and_they_for_it(cupy, x):
    blocking = cupy.cuda.Stream()
    fill_late(cupy, x, 7, blocking)
    assert cupy.asnumpy(x)[0] == 7
    fill_late(cupy, x, 8, cupy.cuda.Stream.null)
    with blocking:
        assert cupy.asnumpy(x)[0] == 8


def test_an_event_knows_whether_it_was_reached_and_when(cupy, stream):
    start = stream.record(cupy.cuda.Event())
    held_up = threading.Event()
    stream.launch_host_func(held_up.wait, ENOUGH_S)
    hold_up(stream)
    end = stream.record(cupy.cuda.Event())
    assert not end.done
    held_up.set()
    end.synchronize()
    assert end.done
    assert cupy.cuda.get_elapsed_time(start, end) >= 1e3 * LATE_S


def test_memory_is_freed_after_what_uses_it(cupy, stream):
    runtime = cupy.cuda.runtime
    pointer = runtime.malloc(100)
    hold_up(stream)
    runtime.memsetAsync(pointer, 1, 100, stream.ptr)
    runtime.free(pointer)
    assert stream.done


def test_a_host_function_may_not_call_cuda(cupy, stream):
    def call(_):
        try:
            stream.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            errors.append(str(error))

    errors = []
    stream.launch_host_func(call, None)
    stream.synchronize()
    assert "cudaErrorNotPermitted" in errors[0]


def test_a_graph_repeats_what_was_captured_and_nothing_runs_meanwhile(stream, x):
    with stream:
        x += 1
        stream.synchronize()
        stream.begin_capture()
        x += 1
        graph = stream.end_capture()
        stream.synchronize()
        assert x[0] == 1
        graph.launch(stream)
        graph.launch(stream)
        assert x[0] == 3


def test_a_capture_ends_in_an_error_if_it_was_waited_for(cupy, stream):
    error = cupy.cuda.runtime.CUDARuntimeError
    with stream:
        stream.begin_capture()
        with pytest.raises(error, match="cudaErrorStreamCaptureUnsupported"):
            stream.synchronize()
        with pytest.raises(error, match="cudaErrorStreamCaptureInvalidated"):
            stream.end_capture()
