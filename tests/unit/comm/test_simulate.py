"""Worlds of threads: groups, results, failures; and no MPI."""

import re
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.transport.threads.messages import ThreadReceive


def test_neither_importing_nor_simulating_imports_mpi4py_or_torch():
    script = """
import sys
import numpy as np
import hpcdist as dist

def check():
    x = np.ones(3)
    dist.all_reduce(x, sync_op=False).wait()
    group = dist.new_group([0])
    gathered = []
    dist.all_gather_object(gathered, 1)
    assert dist.ParallelEnv().nranks == 2
    return len(gathered)

assert dist.simulate(2, check) == [2, 2]
print(sorted({"mpi4py", "torch", "jax", "cupy"} & set(sys.modules)))
"""
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "[]"


def test_results_come_in_rank_order_with_arguments_handed_over():
    def check(base, *, factor):
        return base + factor * dist.get_rank()

    assert dist.simulate(4, check, 100, factor=2) == [100, 102, 104, 106]


def test_the_first_failure_of_a_rank_is_raised_and_ends_the_others():
    def check():
        if dist.get_rank() == 1:
            raise KeyError("the drill")
        dist.all_reduce(np.ones(1))

    began = time.monotonic()
    with pytest.raises(KeyError, match="the drill"):
        dist.simulate(3, check)
    assert time.monotonic() - began < 20


def fail_on_rank_1():
    dist.barrier()
    if dist.get_rank() == 1:
        raise KeyError("the drill")
    try:
        dist.all_reduce(np.ones(1))
    except dist.RemoteError:
        raise ValueError("what follows from it")  # noqa: B904 (as users do)


def test_a_failure_is_shown_with_its_rank_and_its_own_traceback_alone():
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import hpcdist as dist
from test_simulate import fail_on_rank_1
dist.simulate(3, fail_on_rank_1)
"""
    environ = {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.stdout == ""
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if "in one_rank" in line] == []
    assert [line for line in lines if "what follows" in line] == []
    assert "in fail_on_rank_1" in done.stderr
    last = lines.index("KeyError: 'the drill'")
    named = ["raised on rank 1 of the 3 that simulate runs"]
    assert lines[last + 1 :] == named or sys.version_info < (3, 11)  # which shows no notes


def test_a_rank_that_ends_early_is_a_remote_error_for_the_others():
    def check():
        if dist.get_rank() == 0:
            return "left"
        with pytest.raises(dist.RemoteError, match="rank 0 has ended and did not join barrier"):
            dist.barrier()
        return "noticed"

    assert dist.simulate(3, check) == ["left", "noticed", "noticed"]


def test_the_world_is_that_of_the_thread_and_gone_afterwards():
    def check():
        assert dist.is_initialized()
        assert dist.init_parallel_env() is dist.get_group(0)
        assert dist.get_backend() == "LOCAL"
        env = dist.ParallelEnv()
        return env.rank, env.local_rank, env.local_size, env.nnodes, env.device_type

    initialized = dist.is_initialized()
    assert dist.simulate(2, check) == [(0, 0, 2, 1, "cpu"), (1, 1, 2, 1, "cpu")]
    assert dist.is_initialized() is initialized


def test_simulations_do_not_see_each_other():
    def inner():
        return dist.get_world_size()

    def outer():
        return dist.simulate(dist.get_rank() + 1, inner), dist.get_world_size()

    assert dist.simulate(2, outer) == [([1], 2), ([2, 2], 2)]


def test_groups_know_their_ranks():
    def check():
        group = dist.new_group([3, 1, 2], name="odd ones")
        if dist.get_rank() == 0:
            return group.rank, group.world_size, group.is_member()
        assert group.ranks == [1, 2, 3]
        assert group.name == "odd ones"
        assert group.get_group_rank(3) == 2
        assert group.get_global_rank(0) == 1
        assert dist.get_group(group.id) is group
        assert repr(group) == (
            f"rank: {group.rank}, nranks: 3, id: {group.id}, ranks: 1, 2, 3; name: odd ones"
        )
        for wrong in (0, 4, -1, "1", 1.0):
            with pytest.raises(ValueError, match=r"odd ones.*\[1, 2, 3\]"):
                group.get_group_rank(wrong)
        return group.rank, group.world_size, group.is_member()

    members = [(0, 3, True), (1, 3, True), (2, 3, True)]
    assert dist.simulate(4, check) == [(-1, -1, False), *members]


def test_group_ids_are_agreed_on_by_the_members_alone():
    def check():
        rank = dist.get_rank()
        for _ in range(rank):
            dist.new_group([rank])
        return dist.new_group([0, 2]).id if rank != 1 else dist.new_group([1]).id

    first, _, third = dist.simulate(3, check)
    assert first == third


def test_a_rank_that_is_late_is_named():
    heard = [threading.Event() for _ in range(2)]

    def check():
        rank = dist.get_rank()
        for each in heard if rank == 2 else ():
            each.wait(60)
        with pytest.raises(dist.CollectiveTimeout) as caught:
            dist.all_reduce(np.ones(1))
        if rank != 2:
            heard[rank].set()
        return caught.value.missing

    assert dist.simulate(3, check, timeout=2)[0] == (2,)


def test_floating_point_overflow_is_silent_as_it_is_in_mpi():
    def check():
        x = np.array([3e38, np.inf * (1 - 2 * dist.get_rank())], "f4")
        dist.all_reduce(x)
        return x

    for x in dist.simulate(2, check):
        np.testing.assert_array_equal(x, [np.inf, np.nan])


@pytest.mark.parametrize("n", [0, -1, "2", 2.0, None])
def test_a_number_of_ranks_must_be_positive(n):
    with pytest.raises(dist.UsageError, match="at least one rank"):
        dist.simulate(n, len)


def test_arguments_in_the_wrong_order_and_a_function_that_was_called_are_told():
    with pytest.raises(dist.UsageError, match=r"comes first: simulate\(n, fn\)"):
        dist.simulate(len, 3)
    with pytest.raises(dist.UsageError, match=r"got 0; pass f, not f\(\)"):
        dist.simulate(3, len([]))


def test_memory_for_collectives_is_ordinary():
    def check():
        x, y = dist.zeros((2, 3), "f4"), dist.empty(4)
        assert (x.shape, x.dtype, x.sum()) == ((2, 3), np.float32, 0)
        assert (y.shape, y.dtype) == ((4,), np.float64)
        z = dist.empty_like(np.zeros((3, 2), ">i4").T)
        assert z.shape == (2, 3)
        x += 1
        dist.all_reduce(x)
        return x[0, 0]

    assert dist.simulate(2, check) == [2, 2]


def test_a_simulated_world_starts_again_after_it_was_destroyed():
    def again():
        dist.destroy_process_group()
        assert not dist.is_initialized()
        group = dist.init_parallel_env()
        dist.barrier()
        return group.rank, group.nranks, group.backend

    assert dist.simulate(3, again) == [(rank, 3, "LOCAL") for rank in range(3)]


def test_groups_of_a_simulated_world_that_started_again_are_new_ones():
    def again():
        for _ in range(20):  # a rank may still be leaving what another makes anew
            dist.barrier(dist.new_group([0, 1]))
            dist.destroy_process_group()
            dist.init_parallel_env()
        return True

    assert dist.simulate(2, again) == [True, True]


def test_arrays_of_a_device_are_refused_on_all_simulated_ranks():
    from hpcdist.testing.slow_device import DEVICE

    def check():
        with pytest.raises((dist.UsageError, dist.RemoteError), match="slow:0"):
            dist.all_reduce(DEVICE.array(np.ones(3)))
        with pytest.raises(dist.UsageError, match="host memory only"):
            dist.send(DEVICE.array(np.ones(3)), 0)

    dist.simulate(2, check)


class _Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function):
        self.function = function

    def __reduce__(self):
        return self.function, ()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_an_object_that_communicates_while_it_is_unpickled_is_refused(n):
    def program():
        with pytest.raises(dist.UsageError, match="in the middle of another one"):
            dist.all_gather_object([], _Calls(dist.barrier))
        dist.barrier()

    dist.simulate(n, program)


@pytest.mark.parametrize("phase", ["begin", "end"])
@pytest.mark.parametrize("sync_op", [True, False])
def test_a_listener_of_all_ranks_may_communicate(phase, sync_op):
    def listener(event):
        if event.phase == phase and event.name == "all_reduce":
            dist.barrier()

    def program():
        for _ in range(3):
            x = np.array([dist.get_rank() + 1.0])
            dist.all_reduce(x, sync_op=sync_op).wait()
            assert x[0] == 6

    stop = dist.subscribe(listener)
    try:
        dist.simulate(3, program)
    finally:
        stop()


_works = []


def _look():
    return [work.is_completed() for work in _works]


def _wait():
    return dist.wait_any(_works[1:], 5)


def test_what_runs_while_messages_are_matched_matches_no_others():
    def program():
        x, objects = np.zeros((4, 1)), [None]
        _works[:] = [dist.recv_object_list(objects, 0, sync_op=False)]
        _works.extend(dist.irecv(each, 0, tag=1) for each in x[:2])
        for number in range(1, 5):
            dist.send(np.array([float(number)]), 0, tag=1)
        dist.send_object_list([_Calls(_look)], 0)
        dist.wait_all(_works)
        for each in x[2:]:
            dist.recv(each, 0, tag=1)
        assert objects == [[False, False, False]]
        assert x.ravel().tolist() == [1, 2, 3, 4]

    dist.simulate(1, program)
    _works.clear()


def test_what_runs_while_messages_are_matched_cannot_wait_for_others():
    def program():
        _works[:] = [dist.recv_object_list([None], 0, sync_op=False), dist.irecv(np.ones(1), 0)]
        dist.send_object_list([_Calls(_wait)], 0)
        with pytest.raises(dist.UsageError, match="in the middle of another one"):
            _works[0].wait()
        dist.send(np.ones(1), 0)
        assert _works[1].wait()

    dist.simulate(1, program)
    _works.clear()


def test_many_receives_look_at_a_message_each(monkeypatch):
    n, looks, fits = 300, [], ThreadReceive._fits
    monkeypatch.setattr(ThreadReceive, "_fits", lambda *args: looks.append(None) or fits(*args))

    def program():
        x = np.zeros((n, 1))
        works = [dist.irecv(each, 0, tag=tag) for tag, each in enumerate(x)]
        for tag in reversed(range(n)):
            dist.send(np.array([float(tag)]), 0, tag=tag)
        dist.wait_all(works)
        assert x.ravel().tolist() == list(range(n))

    dist.simulate(1, program)
    assert len(looks) <= 2 * n


@pytest.mark.parametrize("verb", ["all_gather", "alltoall"])
def test_ranks_whose_shapes_do_not_fit_hear_the_lines_of_all(verb):
    def program():
        x, wrong = np.ones(3), [np.ones(3), np.ones(3)]
        wrong[1 - dist.get_rank()] = np.ones(4)
        given = x if verb == "all_gather" else [x, x]
        with pytest.raises(dist.MismatchError) as told:
            getattr(dist, verb)(wrong, given)
        return dict(told.value.call_sites)

    line = program.__code__.co_firstlineno + 5
    for sites in dist.simulate(2, program):
        assert sites == dict.fromkeys(range(2), f"{__file__}:{line}")


def test_the_traceback_of_an_error_of_all_ranks_is_each_ranks_own():
    def program(rank):
        with pytest.raises(dist.MismatchError) as told:
            dist.all_reduce(np.zeros(2 + (rank == 1)))
        return told.value, len(traceback.extract_tb(told.tb))

    errors, depths = zip(*dist.simulate(8, lambda: program(dist.get_rank())), strict=True)
    assert len(set(map(id, errors))) == 8
    assert len(set(depths)) == 1
    assert all(set(error.call_sites) == set(range(8)) for error in errors)


@pytest.mark.parametrize(
    ("size", "src", "advice"),
    [
        (3, 5, "let src be one of these world ranks"),
        (3, "1", "give src as an integer, and other arguments by keyword"),
        (1, 1, "this program runs alone: `hpcdist run -n 2` starts it on two ranks"),
    ],
)
def test_a_receive_from_nobody_says_who_there_is(size, src, advice):
    with pytest.raises(
        dist.UsageError, match=re.escape(f"[{', '.join(map(str, range(size)))}]; {advice}")
    ):
        dist.simulate(size, lambda: dist.recv(np.empty(1), src))


def test_a_rank_of_a_group_given_for_a_world_rank_is_told_which_one_that_is():
    def receive():
        group = dist.new_group([1, 2])
        if group.is_member():
            dist.recv(np.empty(1), 0, group)

    with pytest.raises(dist.UsageError, match="rank 0 of this group is world rank 1"):
        dist.simulate(3, receive)
