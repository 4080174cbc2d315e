"""Signals that announce the end of a job: heard once, told at one step, and given back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
from tiers import first_of

import hpcdist as dist
from hpcdist.errors import UsageError


@pytest.fixture(autouse=True)
def _alone():
    """A world of one rank, in which nobody has been signalled."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    dist.init_parallel_env()
    forget = dist.on_preempt()
    yield
    forget()
    dist.destroy_process_group()
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    assert after == before


def run(*lines):
    """Run a program of its own that has begun to listen."""
    text = "\n".join(
        [
            "import os, signal, time, hpcdist as dist",
            "dist.init_parallel_env()",
            "dist.on_preempt()",
            *lines,
        ]
    )
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False
    )


def test_without_a_signal_nobody_stops():
    assert [dist.should_stop() for _ in range(3)] == [False] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_after_a_signal_every_call_says_stop(number):
    os.kill(os.getpid(), number)
    assert [dist.should_stop() for _ in range(3)] == [True] * 3


def test_a_handler_is_called_once_with_the_signal_when_all_have_agreed():
    called = []
    forget = dist.on_preempt(called.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert called == []
    assert dist.should_stop()
    assert dist.should_stop()
    assert called == [signal.SIGUSR1]
    forget()


def test_a_forgotten_handler_is_not_called():
    called = []
    dist.on_preempt(called.append)()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert dist.should_stop()
    assert called == []


def test_handlers_that_were_there_before_are_called_as_well():
    ended = run(
        "dist.on_preempt()",
        "from hpcdist.comm.preemption import _notice",
        "_notice._stop_listening()",
        "signal.signal(signal.SIGTERM, lambda number, frame: print('mine', number))",
        "dist.on_preempt()",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "print(dist.should_stop())",
    )
    assert ended.stdout.split() == ["mine", "15", "True"], ended.stderr


def test_two_sigterms_at_the_time_limit_are_one_request():
    ended = run(
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "print(dist.should_stop())",
    )
    assert ended.stdout == "True\n", ended.stderr
    assert ended.returncode == 0


def test_a_second_sigterm_later_ends_the_process_at_once():
    ended = run(
        "os.kill(os.getpid(), signal.SIGTERM)",
        "time.sleep(2.2)",
        "print('still here', flush=True)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "print('too late')",
    )
    assert ended.stdout == "still here\n"
    assert ended.returncode == -signal.SIGTERM


@pytest.mark.parametrize("late", first_of(["SIGTERM", "SIGUSR1"]))
def test_a_signal_that_comes_late_does_not_kill_a_process_that_is_leaving(late):
    ended = run(
        "import atexit",
        "from hpcdist.comm.preemption import _notice",
        "atexit.unregister(_notice._end)",
        f"atexit.register(lambda: os.kill(os.getpid(), signal.{late}))",
        "atexit.register(_notice._end)  # the first to be called",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "print(dist.should_stop())",
    )
    assert ended.stdout == "True\n", ended.stderr
    assert ended.returncode == 0


def test_a_forked_child_can_be_terminated():
    ended = run(
        "ready, begun = os.pipe()",
        "child = os.fork()",
        "if child == 0: os.write(begun, b'x'); time.sleep(60)",
        "os.read(ready, 1)",
        "os.kill(child, signal.SIGTERM)",
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), dist.should_stop())",
    )
    assert ended.stdout == "-15 False\n", ended.stderr


def test_listening_begins_in_the_main_thread_only():
    caught = []

    def listen():
        with pytest.raises(UsageError, match="main thread") as error:
            dist.on_preempt()
        caught.append(str(error.value))

    thread = threading.Thread(target=listen, name="worker")
    thread.start()
    thread.join()
    assert "this is thread 'worker'" in caught[0]


def test_a_handler_must_be_callable():
    with pytest.raises(UsageError, match="got 'save'"):
        dist.on_preempt("save")


def test_simulated_ranks_agree():
    os.kill(os.getpid(), signal.SIGUSR1)
    assert dist.simulate(3, dist.should_stop) == [True] * 3
