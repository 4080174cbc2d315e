"""What holds for calls of functions on any number of ranks, of MPI and simulated ones."""

import datetime
import functools
import os
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from checks import Checks, needs_torch, with_rpc

import hpcdist as dist
from hpcdist.comm.session import require_session, simulated_rank, standing_for
from hpcdist.rpc.agent import AGENT

check = Checks()
thorough = pytest.mark.thorough
PATIENCE_S = 60
GATES = defaultdict(threading.Event)
"""What holds up calls until a check opens it, by rank."""


def me():
    return dist.get_rank()


def everyone():
    return range(dist.get_world_size())


def next_rank():
    return (me() + 1) % dist.get_world_size()


def call(fn, *args, to=None, **options):
    return dist.rpc.rpc_sync(next_rank() if to is None else to, fn, args, **options)


def add(a, b=0):
    return a + b


def same(x):
    return x


def fail(error):
    raise error


def counters():
    return require_session()[AGENT].counters


def rest():
    time.sleep(0.3)


# ---- whom and what


@check
@with_rpc
def a_rank_is_called_by_its_name_its_rank_and_its_info():
    for info in dist.rpc.get_all_worker_infos():
        for to in (info.name, info.rank, np.int64(info.rank), info):
            assert dist.rpc.rpc_sync(to, dist.get_rank) == info.rank
    assert [info.rank for info in dist.rpc.get_all_worker_infos()] == list(everyone())
    assert dist.rpc.get_current_worker_info() == dist.rpc.get_worker_info(me())
    assert dist.rpc.get_worker_info().name == f"worker{me()}"


@check
@with_rpc
def who_is_not_there_is_an_error_that_tells_who_is():
    with pytest.raises(dist.UsageError, match="do you mean 'worker0'"):
        call(add, 1, to="worker_0")
    for to in (-1, dist.get_world_size(), 1.0, None, True, [0], ("worker0", 0)):
        with pytest.raises(dist.UsageError, match="there are ranks 0 to"):
            dist.rpc.rpc_sync(to, add, (1,))
    with pytest.raises(dist.UsageError, match="no rank calls itself 'boss'"):
        dist.rpc.get_worker_info("boss")


@check
@with_rpc
def arguments_are_positional_and_by_name_of_any_kind():
    assert call(add, 2, 3) == 5
    assert dist.rpc.rpc_sync(next_rank(), add, [2], {"b": 4}) == 6
    assert dist.rpc.rpc_sync(next_rank(), dict, kwargs={"a": 1}) == {"a": 1}
    assert dist.rpc.rpc_async(next_rank(), max, ((1, 5, 3),)).wait() == 5
    assert call(same, None) is None


@check
@with_rpc
def wrong_arguments_are_refused_before_anything_is_sent():
    to = next_rank()
    for fn, args, kwargs in (
        (3, (), {}),
        (add, 5, {}),
        (add, "ab", {}),
        (add, (1,), {1: 2}),
        (add, (1,), [("b", 2)]),
        (same, (threading.Lock(),), {}),
    ):
        with pytest.raises(dist.UsageError):
            dist.rpc.rpc_async(to, fn, args, kwargs)
    for timeout in (float("nan"), "1", "soon", True, object()):
        with pytest.raises(dist.UsageError, match="timeout must be"):
            dist.rpc.rpc_async(to, add, (1,), timeout=timeout)
    assert sum(counter.calls for counter in counters().values()) == 0
    assert call(add, 1) == 1


def of_all_kinds():
    random = np.random.default_rng(me())
    yield np.array(3.5)
    yield np.empty((0, 4))
    for n in (7, 5_000, 40_000, 150_000):
        yield random.normal(size=n)
    large = random.integers(0, 9, (300, 250, 2))
    yield from (large, large[::2, 1:], np.asfortranarray(large[..., 0]), large.astype("c16"))
    yield np.zeros(100_000, [("id", "i4"), ("x", "f8")])


def doubled_in_place(array):
    array *= 2
    return array


def arrays_arrive_writable_and_equal():
    for array in of_all_kinds():
        before = array.copy()
        back = call(same, array)
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(back, array)
        if array.dtype.names is None:
            np.testing.assert_array_equal(call(doubled_in_place, array), 2 * before)
            np.testing.assert_array_equal(array, before)  # the callee has its own
            back += 1
    text = "x" * 300_000
    assert call(same, text) == text


check(with_rpc(arrays_arrive_writable_and_equal))


def extremes(arrays):
    return [(int(each.min()), int(each.max())) for each in arrays]


@check
@with_rpc
def large_bytes_and_text_arrive_as_arrays_do():
    for size in (100_000, 3_000_000):
        values = [b"x" * size, bytearray(size), "né" * size, np.full(size, 7, np.uint8)]
        *found, array = call(same, values)
        assert found == values[:-1]
        assert [*map(type, found)] == [bytes, bytearray, str]
        np.testing.assert_array_equal(array, values[-1])


@check.needing(pytest.mark.two_ranks)
@with_rpc
def more_large_arrays_than_are_passed_at_a_time_arrive():
    several = [np.full(2 << 20, i, np.uint8) for i in range(66)]
    assert call(extremes, several) == [(i, i) for i in range(66)]


@check
@with_rpc(link="tcp")
def the_same_holds_for_tcp():
    arrays_arrive_writable_and_equal()
    assert dist.rpc.get_worker_info().port > 0
    with pytest.raises(ValueError, match="no"):
        call(fail, ValueError("no"))
    assert call(back_and_forth, 20) == 20


@check
@with_rpc
def arguments_may_change_as_soon_as_the_call_is_made():
    array = np.zeros(300_000)
    futures = []
    for step in range(8):
        array[...] = step
        futures.append(dist.rpc.rpc_async(next_rank(), np.sum, (array,)))
    assert [future.wait() for future in futures] == [step * array.size for step in range(8)]


@check.needing(needs_torch)
@with_rpc
def tensors_of_torch_arrive_as_they_are():
    import torch

    large = torch.arange(300_000.0).reshape(300, 1000)
    weights = torch.nn.Parameter(torch.ones(3))
    tensors = (
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.ones(5, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        large,
        large[::2, 5:].t(),
        large.to(torch.complex64).conj(),
        torch.ones(2, requires_grad=True),
        weights,
    )
    for tensor, back in zip(tensors, call(same, tensors), strict=True):
        assert type(back) is type(tensor)
        assert (back.dtype, back.requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert torch.equal(back, tensor)
    back = call(same, large)
    back += 1
    assert torch.equal(large + 1, back)


class Account:
    def __init__(self, money):
        self.money = money

    def plus(self, more):
        return self.money + more


@check
@with_rpc
def functions_are_sent_however_they_are_made():
    factor = me() + 10
    assert call(lambda x: factor * x, 3) == 3 * factor

    def inner(x):
        return [factor, x]

    assert call(inner, 2) == [factor, 2]
    assert call(Account(5).plus, 2) == 7
    assert call(functools.partial(add, 5), 4) == 9
    assert call(np.add, 1, 2) == 3
    assert call("a-b".split, "-") == ["a", "b"]
    assert call(lambda: add)(1, 1) == 2


# ---- errors


class Complicated(Exception):
    def __init__(self, code, *, where):
        super().__init__(f"{code} at {where}")
        self.code, self.where = code, where

    def __reduce__(self):
        return functools.partial(Complicated, where=self.where), (self.code,)


class Unsendable(ValueError):
    def __init__(self, what):
        super().__init__(what)
        self.lock = threading.Lock()


def unsendable():
    raise Unsendable("with a lock")


def chained():
    try:
        {}["first"]
    except KeyError as error:
        raise LookupError("second") from error


def with_generator():
    return (x for x in range(3))


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@check
@with_rpc
def what_cannot_be_unpickled_where_it_comes_names_the_function_and_the_rank():
    to = next_rank()
    with pytest.raises(dist.RemoteError, match=rf"Unreadable on rank {to} .*ValueError.*no number"):
        call(Unreadable)
    assert call(add, 2, 3) == 5


@check
@with_rpc
def what_a_function_raises_is_raised_with_its_type_and_its_traceback():
    to = next_rank()
    errors = ValueError("bad"), KeyError("k"), Complicated(3, where="here"), OSError(2, "gone", "f")
    for error in errors:
        with pytest.raises(type(error)) as caught:
            call(fail, error)
        raised = caught.value
        assert isinstance(raised, dist.RemoteError)
        assert raised.rank == to
        assert raised.args == error.args
        assert str(raised) == str(error)
        assert "raise error" in raised.traceback
        if hasattr(raised, "add_note"):
            assert f"rank {to} (worker{to})" in raised.__notes__[0]
    with pytest.raises(Complicated) as caught:
        call(fail, Complicated(3, where="here"))
    assert (caught.value.code, caught.value.where) == (3, "here")
    with pytest.raises(LookupError) as caught:
        call(chained)
    assert "KeyError: 'first'" in caught.value.traceback


@check
@with_rpc
def what_cannot_be_rebuilt_is_a_remote_error_with_the_text():
    with pytest.raises(dist.RemoteError, match="raised Unsendable: with a lock") as caught:
        call(unsendable)
    assert "in unsendable" in caught.value.traceback
    for error in (SystemExit(3), KeyboardInterrupt("no"), GeneratorExit()):
        with pytest.raises(dist.RemoteError, match=type(error).__name__) as caught:
            call(fail, error)
        assert type(caught.value) is dist.RemoteError
    for fn, kind in ((with_generator, "generator"), (threading.Lock, "lock")):
        with pytest.raises(TypeError, match=f"returned, a {kind}, cannot be sent back"):
            call(fn)
    assert call(add, 1) == 1


def failing_at(depth):
    if depth == 0:
        raise ValueError("at the end")
    return call(failing_at, depth - 1)


@check
@with_rpc
def an_error_comes_back_through_several_ranks():
    with pytest.raises(ValueError, match="at the end") as caught:
        call(failing_at, 3)
    assert isinstance(caught.value, dist.RemoteError)
    assert caught.value.traceback.count("failing_at") >= 2


# ---- time


@check
@with_rpc
def no_limit_is_none_zero_or_negative():
    for timeout in (None, 0, -1, -0.5, datetime.timedelta(0), float("inf"), PATIENCE_S):
        assert call(add, 1, timeout=timeout) == 1


def gate(rank):
    return GATES[rank, id(require_session()[AGENT]) if simulated_rank() else 0]


def open_gate():
    gate(me()).set()


def pass_gate():
    return gate(me()).wait(PATIENCE_S)


def close_gate():
    gate(me()).clear()


@check
@with_rpc
def a_call_that_takes_too_long_is_given_up_and_its_answer_dropped():
    close_gate()
    dist.barrier()
    to = next_rank()
    for timeout in (0.05, datetime.timedelta(milliseconds=50)):
        with pytest.raises(dist.CollectiveTimeout, match=rf"pass_gate on rank {to} \(worker{to}\)"):
            call(pass_gate, timeout=timeout)
    future = dist.rpc.rpc_async(to, pass_gate, timeout=0.05)
    told = threading.Event()
    future.add_done_callback(lambda ended: told.set())
    assert told.wait(PATIENCE_S)  # though nobody waits for it
    error = future.exception()
    assert isinstance(error, TimeoutError)
    assert error.missing == (to,)
    cancelled = dist.rpc.rpc_async(to, pass_gate)
    assert cancelled.cancel()
    assert not cancelled.cancel()
    call(open_gate)
    name = f"{pass_gate.__module__}.pass_gate"
    until = time.monotonic() + PATIENCE_S
    while counters()[name].late < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert counters()[name].late == 4
    assert call(add, 1) == 1


def rank_times(x):
    return x * dist.get_rank()


def fail_from(first):
    if dist.get_rank() >= first:
        raise LookupError(f"rank {dist.get_rank()} has it not")
    COUNTED[me(), id(require_session()[AGENT]) if simulated_rank() else 0] += 1


COUNTED = defaultdict(int)


@check
@with_rpc
def a_broadcast_is_a_call_on_each_rank_and_fails_as_on_the_first_that_fails():
    size = dist.get_world_size()
    assert dist.rpc.broadcast(rank_times, (3,)) == [3 * rank for rank in everyone()]
    own = COUNTED[me(), id(require_session()[AGENT]) if simulated_rank() else 0]
    dist.barrier()
    for first in range(size):
        with pytest.raises(LookupError, match=f"rank {first} has it not") as caught:
            dist.rpc.broadcast(fail_from, (first,))
        assert isinstance(caught.value, dist.RemoteError)
        assert caught.value.rank == first
        notes = "".join(getattr(caught.value, "__notes__", ()))
        told = [f"rank {rank}: LookupError" in notes for rank in range(first + 1, size)]
        assert all(told) or not hasattr(caught.value, "add_note")
    dist.barrier()  # all have ended where the first failure was told
    mine = COUNTED[me(), id(require_session()[AGENT]) if simulated_rank() else 0]
    assert mine - own == size * (size - 1 - me())
    for wrong in ((3, ()), (add, 5), (add, (threading.Lock(),))):
        with pytest.raises(dist.UsageError):
            dist.rpc.broadcast(*wrong)
    close_gate()
    dist.barrier()
    with pytest.raises(dist.CollectiveTimeout, match="pass_gate on rank 0"):
        dist.rpc.broadcast(pass_gate, timeout=0.05)
    dist.barrier()  # nobody opens what another one still waits for
    call(open_gate)


@check
@with_rpc
def a_wait_may_end_before_the_call():
    close_gate()
    dist.barrier()
    future = dist.rpc.rpc_async(next_rank(), pass_gate)
    assert not future.done()
    with pytest.raises(dist.CollectiveTimeout, match="it goes on"):
        future.wait(0.05)
    call(open_gate)
    assert future.result(PATIENCE_S)
    assert future.done()
    assert future.wait()


# ---- many


def back_and_forth(depth):
    return 0 if depth == 0 else 1 + call(back_and_forth, depth - 1)


@check
@with_rpc(threads=2, max_threads=4)
def calls_that_call_back_200_deep_find_a_thread():
    assert call(back_and_forth, 200) == 200


@check
@with_rpc(threads=2, max_threads=3)
def all_ranks_call_all_at_once():
    futures = {
        (rank, i): dist.rpc.rpc_async(rank, add, (i, rank))
        for i in range(100)
        for rank in everyone()
    }
    assert {key: future.wait() for key, future in futures.items()} == {
        (rank, i): i + rank for rank, i in futures
    }


@check
@with_rpc
def thousands_of_calls_may_be_under_way():
    close_gate()
    dist.barrier()
    held = dist.rpc.rpc_async(next_rank(), pass_gate)
    futures = [dist.rpc.rpc_async(next_rank(), same, (i,)) for i in range(2000)]
    call(open_gate)
    assert [future.wait() for future in futures] == list(range(2000))
    assert held.wait()


def random_calls(seed, calls, problems):
    random = np.random.default_rng(seed)
    expected = []
    for _ in range(calls):
        to = int(random.integers(dist.get_world_size()))
        size = int(random.choice([0, 1, 100, 3000, 300_000], p=[0.2, 0.3, 0.3, 0.19, 0.01]))
        value = np.full(size, random.integers(1000))
        kind = random.integers(4)
        if kind == 0:
            future, right = dist.rpc.rpc_async(to, fail, (ValueError(seed),)), None
        else:
            future, right = dist.rpc.rpc_async(to, add, (value, to)), value + to
        expected.append((future, right))
        if len(expected) > 200:
            verify(*expected.pop(int(random.integers(200))), problems)
        if random.random() < 0.2:
            verify(*expected.pop(), problems)
    for future, right in expected:
        verify(future, right, problems)


def verify(future, right, problems):
    try:
        result = future.wait(PATIENCE_S)
        if right is None or not np.array_equal(result, right):
            problems.append(f"{future}: {result} instead of {right}")
    except ValueError as error:
        if right is not None:
            problems.append(repr(error))


def stress(calls):
    problems, rank = [], simulated_rank()

    def work(seed):
        with standing_for(rank):
            try:
                random_calls(seed, calls, problems)
            except BaseException as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=work, args=(100 * me() + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier()
    assert not problems
    dist.all_gather_object(told := [], sum(each.calls for each in counters().values()))
    dist.all_gather_object(ran := [], sum(each.served for each in counters().values()))
    assert sum(told) == sum(ran) == 8 * calls * dist.get_world_size()


@check
@with_rpc
def random_calls_from_eight_threads_are_each_answered_once():
    stress(100)


@check.needing(thorough, pytest.mark.two_ranks)
@with_rpc
def many_random_calls_from_eight_threads_are_each_answered_once():
    stress(1000)


@check.needing(pytest.mark.slow, pytest.mark.two_ranks)
@with_rpc
def a_million_random_calls_are_each_answered_once():
    stress(1_000_000 // (8 * dist.get_world_size()))


@check
@with_rpc
def a_rank_answers_while_it_is_in_a_collective():
    if me() == 0:
        for rank in everyone():
            if rank:
                assert call(add, rank, 1, to=rank) == rank + 1
    dist.barrier()


# ---- futures


@check
@with_rpc
def what_follows_a_future_may_call_in_its_turn():
    to = next_rank()
    future = dist.rpc.rpc_async(to, add, (1, 2))
    following = future.then(lambda ended: call(add, ended.wait(), 10, to=to))
    assert following.wait(PATIENCE_S) == 13
    assert future.then(same).wait() is future
    with pytest.raises(ZeroDivisionError):
        future.then(lambda ended: 1 // 0).wait()
    assert isinstance(dist.rpc.rpc_async(to, fail, (KeyError(1),)).exception(), KeyError)


def waits():
    return call(add, 1, 1)


waits.__hpcdist_inline__ = True


def immediate(x):
    return x, threading.get_ident()


immediate.__hpcdist_inline__ = True


@check
@with_rpc
def an_inline_function_must_not_wait_and_says_so():
    assert call(immediate, 3)[0] == 3
    with pytest.raises(dist.UsageError, match="an inline function waits for"):
        call(waits)
    large = np.arange(100_000)
    futures = [dist.rpc.rpc_async(next_rank(), immediate, (large,)) for _ in range(8)]
    for future in futures:
        np.testing.assert_array_equal(future.wait()[0], large)


# ---- beginning and ending


@check
def two_ranks_of_one_name_are_refused_on_all_ranks():
    dist.init_parallel_env()
    last = dist.get_world_size() - 1
    name = "boss" if me() in (0, last) else None
    if last == 0:
        dist.rpc.init_rpc(name)
    else:
        with pytest.raises(
            dist.UsageError, match=rf"ranks 0 and {last} both call themselves 'boss'"
        ):
            dist.rpc.init_rpc(name)
        with pytest.raises(dist.UsageError, match="takes part in no RPC"):
            dist.rpc.rpc_sync(0, add)
        dist.rpc.init_rpc(f"{me()}")
    assert dist.rpc.rpc_sync(0, add, (1,)) == 1
    dist.rpc.shutdown()


@check
def what_one_rank_gets_wrong_is_refused_on_all():
    dist.init_parallel_env()
    wrong = (
        {"name": 5},
        {"name": ""},
        {"rank": -2},
        {"world_size": 100},
        {"threads": 0},
        {"max_threads": 1.5},
        {"link": "pigeons"},
        {"link": "mpi" if simulated_rank() else None},
        {"link": "tcp", "interface": "none0"},
    )
    for options in wrong:
        with pytest.raises((dist.UsageError, dist.RemoteError)):
            dist.rpc.init_rpc(**(options if me() == dist.get_world_size() - 1 else {}))
    dist.rpc.init_rpc("w" * (me() + 1), me(), dist.get_world_size(), "host:1")
    assert dist.rpc.rpc_sync("w", add, (1,)) == 1
    dist.rpc.shutdown()


@check
@with_rpc
def a_second_init_is_refused_and_the_first_goes_on():
    with pytest.raises(dist.UsageError, match="init_rpc has been called before"):
        dist.rpc.init_rpc()
    assert call(add, 1) == 1


@check
def after_shutdown_calls_are_refused_until_the_next_init():
    dist.init_parallel_env()
    for name in ("first", "second"):
        dist.rpc.init_rpc(f"{name}{me()}")
        assert dist.rpc.rpc_sync(f"{name}{next_rank()}", dist.get_rank) == next_rank()
        dist.rpc.shutdown()
        for function in (dist.rpc.get_all_worker_infos, dist.rpc.shutdown):
            with pytest.raises(dist.UsageError, match=r"call hpcdist\.rpc\.init_rpc"):
                function()


@check
def calls_that_wait_at_the_end_of_rpc_fail_by_name():
    dist.init_parallel_env()
    dist.rpc.init_rpc()
    close_gate()
    dist.barrier()
    future = dist.rpc.rpc_async(next_rank(), pass_gate)
    opened = gate(me())
    dist.barrier()
    dist.rpc.shutdown(graceful=False)
    with pytest.raises(dist.RemoteError, match=r"pass_gate on rank .* has called shutdown"):
        future.wait(PATIENCE_S)
    opened.set()
    dist.barrier()


@check
def only_the_ranks_of_a_group_take_part():
    world = dist.init_parallel_env()
    last = world.nranks - 1
    group = dist.new_group([last])
    if me() == last:
        dist.rpc.init_rpc(group=group, rank=None, world_size=1)
        assert [info.rank for info in dist.rpc.get_all_worker_infos()] == [last]
        assert call(add, 1, to=last) == 1
        dist.rpc.shutdown()
    else:
        with pytest.raises(dist.UsageError, match="is not in group"):
            dist.rpc.init_rpc(group=group)
    dist.barrier()


@check
def rpc_ends_with_the_session():
    dist.init_parallel_env()
    dist.rpc.init_rpc()
    assert call(add, 1) == 1
    agent = require_session()[AGENT]
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(dist.UsageError, match="has called destroy_process_group"):
        agent.call(0, add, (1,))
    dist.init_parallel_env()
    with pytest.raises(dist.UsageError, match="takes part in no RPC"):
        call(add, 1, to=0)
    dist.rpc.init_rpc()
    assert call(add, 1) == 1
    dist.rpc.shutdown()


def who_does_not_come_to_shutdown_is_named():
    dist.init_parallel_env()
    dist.rpc.init_rpc()
    last = dist.get_world_size() - 1
    if last and me() == 0:
        with pytest.raises(dist.CollectiveTimeout) as caught:
            dist.rpc.shutdown(timeout=0.3)
        assert last in caught.value.missing
        with pytest.raises(dist.UsageError, match="takes part in no RPC"):
            call(add, 1)
        for rank in range(1, last + 1):
            dist.send(np.zeros(1), rank)
    else:
        if last:
            dist.recv(np.zeros(1), 0)
        dist.rpc.shutdown(graceful=False)


one_at_a_time = threading.Lock()
"""Simulated ranks are threads, and what else is loaded may not bear that two of them fork."""


@check
@with_rpc
def a_forked_child_is_no_rank_and_its_parent_goes_on():
    assert call(add, 1) == 1
    with one_at_a_time:
        child = os.fork()
    if child == 0:
        code = 1
        try:
            call(add, 1)
        except dist.UsageError as error:
            code = 0 if "was forked from rank" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert call(add, 2) == 2


# ---- who listens


@check
@with_rpc
def listeners_hear_of_calls_on_both_sides():
    heard = []
    rank = me()

    def listen(event):
        if me() == rank:
            heard.append(event)

    dist.barrier()
    stop = dist.subscribe(listen)
    dist.barrier()
    try:
        assert call(add, 1) == 1
        with pytest.raises(ValueError, match="no"):
            call(fail, ValueError("no"))
    finally:
        dist.barrier()
        stop()
    made = [event for event in heard if event.name.startswith("rpc:")]
    ran = [event for event in heard if event.name.startswith("rpc_serve:")]
    names = [f"{add.__module__}.{fn}" for fn in ("add", "add", "fail", "fail")]
    assert [event.name for event in made] == [f"rpc:{name}" for name in names]
    assert [event.phase for event in made] == ["begin", "end"] * 2
    assert {event.peer for event in made} == {next_rank()}
    assert len({event.id for event in made}) == 2
    assert isinstance(made[-1].error, ValueError)
    assert made[-2].error is None
    assert sorted(event.name for event in ran) == sorted(f"rpc_serve:{name}" for name in names)
    assert all("rpc_checks.py" in event.call_site for event in made)


@check
@with_rpc
def a_listener_may_call_off_a_call():
    dist.barrier()
    rank = me()

    def refuse(event):
        if me() == rank and event.name.startswith("rpc:"):
            raise ZeroDivisionError

    stop = dist.subscribe(refuse)
    with pytest.raises(ZeroDivisionError):
        call(add, 1)
    stop()
    assert call(add, 1) == 1
