"""What holds for `rpc.remote` on any number of ranks."""

import copy
import gc
import pickle
import threading
import time
import uuid
import weakref

import numpy as np
import pytest
from checks import Checks, everyone, with_rpc

import hpcdist as dist

check = Checks()
PATIENCE_S = 60


def after():
    """Return the rank after this one, which on one rank is itself."""
    return (dist.get_rank() + 1) % dist.get_world_size()


GATES = {}


class Counter:
    """An object that others use."""

    def __init__(self, start=0, *, step=1):
        self.value, self.step = start, step

    def add(self, n=1):
        before = self.value
        for _ in range(20):
            threading.Event().wait(0)  # another thread may run
        self.value = before + n * self.step
        return self.value

    def rank(self):
        return dist.get_rank()

    def fail(self, word):
        raise KeyError(word)

    def own_thread(self):
        return threading.get_ident()

    def exit(self):
        raise SystemExit(3)

    def twice(self, handle):
        """Use the object by its handle, from inside one of its own calls."""
        handle.add(1)
        return handle.add(1)

    def lock(self):
        return threading.Lock()

    @dist.rpc.inline
    def peek(self):
        return self.value

    def hold(self, name):
        assert GATES.setdefault(name, threading.Event()).wait(PATIENCE_S)

    @dist.rpc.inline
    def release(self, name):
        GATES.setdefault(name, threading.Event()).set()


class Unfit:
    def __init__(self):
        raise OSError(2, "no such model")


ENDED = {}
"""Names of the objects that have been freed, in this process."""


class Mortal:
    def __init__(self, name):
        self.name = name

    def touch(self):
        return self.name

    def __del__(self):
        ENDED[self.name] = True


@dist.rpc.inline
def has_ended(name):
    return ENDED.get(name, False)


def touch(handle):
    return handle.touch()


def keep(name, handle):
    KEPT[name] = handle


def let_go(name):
    del KEPT[name]


KEPT = {}


def eventually(question):
    """Return whether something comes true while there is patience."""
    end = time.monotonic() + PATIENCE_S
    while not question() and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return question()


def new_name():
    return uuid.uuid4().hex


# ---- calls


@check
@with_rpc
def an_object_lives_on_its_rank_and_keeps_its_state():
    counter = dist.rpc.remote(after(), Counter, 5, step=2)
    assert counter.rank() == after()
    assert counter.add() == 7
    assert counter.add.rpc_sync(2) == 11
    future = counter.add.rpc_async(n=3)
    assert future.wait() == 17
    assert counter.owner == dist.rpc.get_all_worker_infos()[after()]
    assert repr(counter) == f"<Remote: Counter on rank {after()}>"


@check
@with_rpc
def each_call_of_remote_makes_an_object_of_its_own():
    first, second = (dist.rpc.remote(after(), Counter, n) for n in (10, 20))
    assert first != second
    assert (first.add(), second.add()) == (11, 21)


@check
@with_rpc
def what_a_function_returns_can_be_the_object():
    table = dist.rpc.remote(after(), dict, [("a", 1)])
    table.update(b=np.arange(50_000))
    assert sorted(table.copy()) == ["a", "b"]
    np.testing.assert_array_equal(table.get("b"), np.arange(50_000))


@check
@with_rpc
def calls_of_one_rank_run_in_the_order_in_which_they_were_made():
    lines = dist.rpc.remote(after(), list)
    for n in range(200):
        lines.append.rpc_async(n)
    assert lines.copy() == list(range(200))


@check
@with_rpc
def an_object_has_one_call_at_a_time():
    counter = dist.rpc.remote(after(), Counter)
    futures = [counter.add.rpc_async() for _ in range(50)]
    threads = [threading.Thread(target=counter.add) for _ in range(4)]
    for each in threads:
        each.start()
    for each in [*threads]:
        each.join()
    for each in futures:
        each.wait()
    assert counter.add(0) == 54


@check
@with_rpc
def all_ranks_use_one_object():
    size = dist.get_world_size()
    handles = [dist.rpc.remote(size - 1, Counter) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(handles, 0)
    for future in [handles[0].add.rpc_async() for _ in range(20)]:
        future.wait()
    dist.barrier()
    assert handles[0].peek() == 20 * size


@check
@with_rpc
def calls_of_an_object_run_on_a_thread_of_its_own():
    counter = dist.rpc.remote(after(), Counter)
    assert len({counter.own_thread() for _ in range(10)}) == 1
    other = dist.rpc.remote(after(), Counter)
    assert other.own_thread() != counter.own_thread()


@check
@with_rpc
def a_concurrent_object_has_several_calls_at_once():
    counter, name = dist.rpc.remote(after(), Counter, concurrent=True), new_name()
    held = [counter.hold.rpc_async(name) for _ in range(3)]
    assert counter.add() == 1  # beside those that wait
    assert not any(future.done() for future in held)
    counter.release(name)
    for future in held:
        future.wait(PATIENCE_S)


@check
@with_rpc
def an_inline_method_goes_ahead():
    counter, name = dist.rpc.remote(after(), Counter, 4), new_name()
    held = counter.hold.rpc_async(name)
    assert counter.peek() == 4
    assert not held.done()
    counter.release(name)
    held.wait(PATIENCE_S)


@check
@with_rpc
def a_call_has_a_time_limit():
    counter, name = dist.rpc.remote(after(), Counter), new_name()
    with pytest.raises(dist.CollectiveTimeout):
        counter.hold.within(0.05)(name)
    counter.release(name)
    assert counter.add.within(PATIENCE_S).rpc_sync() == 1


@check
@with_rpc
def an_object_may_use_itself_by_its_handle():
    counter = dist.rpc.remote(after(), Counter)
    assert counter.twice(counter) == 2


# ---- errors


@check
@with_rpc
def what_a_method_raises_the_caller_raises():
    counter = dist.rpc.remote(after(), Counter)
    with pytest.raises(KeyError) as caught:
        counter.fail("wrong")
    assert isinstance(caught.value, dist.RemoteError)
    assert caught.value.rank == after()
    assert "in fail" in caught.value.traceback
    assert isinstance(counter.fail.rpc_async("wrong").exception(), KeyError)
    with pytest.raises(AttributeError, match="no_such_method"):
        counter.no_such_method()
    with pytest.raises(TypeError, match="argument"):
        counter.add(1, 2, 3)
    with pytest.raises(TypeError, match="lock"):
        counter.lock()
    with pytest.raises(dist.RemoteError, match="SystemExit"):
        counter.exit()
    assert counter.add() == 1  # it goes on


@check
@with_rpc
def what_a_class_raises_remote_raises():
    with pytest.raises(OSError, match="no such model") as caught:
        dist.rpc.remote(after(), Unfit)
    assert caught.value.errno == 2
    with pytest.raises(dist.UsageError, match="takes a class"):
        dist.rpc.remote(after(), 3)
    with pytest.raises(dist.UsageError, match="nobody"):
        dist.rpc.remote("nobody", Counter)


@check
@with_rpc
def private_methods_are_not_called():
    counter = dist.rpc.remote(after(), Counter)
    with pytest.raises(AttributeError, match="private"):
        counter._value  # noqa: B018
    assert not hasattr(counter, "__len__")


# ---- handles


@check
@with_rpc
def local_is_the_object_where_it_is():
    own = dist.rpc.remote(dist.get_rank(), Counter, 3)
    assert own.local().value == 3
    own.add()
    assert own.local().value == 4
    if after() != dist.get_rank():
        other = dist.rpc.remote(after(), Counter)
        with pytest.raises(dist.UsageError, match=rf"this is rank {dist.get_rank()}"):
            other.local()
        assert dist.rpc.rpc_sync(after(), value_of, (other,)) == 0


def value_of(handle):
    return handle.local().value


@check
@with_rpc
def handles_are_equal_if_their_object_is_the_same():
    counter = dist.rpc.remote(after(), Counter)
    twin, third = copy.copy(counter), pickle.loads(pickle.dumps(counter))
    assert counter == twin == third
    assert len({counter, twin, third}) == 1
    assert counter != dist.rpc.remote(after(), Counter)
    assert counter != 3
    twin.add()
    assert third.add() == 2


@check
@with_rpc
def a_handle_can_be_passed_on_to_a_third_rank():
    size, name = dist.get_world_size(), new_name()
    third = (dist.get_rank() + 2) % size
    mortal = dist.rpc.remote(after(), Mortal, name)
    assert dist.rpc.rpc_sync(third, touch, (mortal,)) == name
    dist.rpc.rpc_sync(third, keep, (name, mortal))
    del mortal
    for _ in range(5):  # what the first rank has told is known by now
        assert not dist.rpc.rpc_sync(after(), has_ended, (name,))
    dist.rpc.rpc_sync(third, let_go, (name,))
    assert eventually(lambda: dist.rpc.rpc_sync(after(), has_ended, (name,)))


@check
@with_rpc
def a_handle_can_be_a_result():
    name = new_name()
    mortal = dist.rpc.rpc_sync(after(), dist.rpc.remote, (after(), Mortal, name))
    assert mortal.touch() == name
    assert not dist.rpc.rpc_sync(after(), has_ended, (name,))
    del mortal
    assert eventually(lambda: dist.rpc.rpc_sync(after(), has_ended, (name,)))


@check
@with_rpc
def an_object_goes_with_its_last_handle():
    name = new_name()
    mortal = dist.rpc.remote(after(), Mortal, name)
    twin = copy.deepcopy(mortal)
    del mortal
    assert twin.touch() == name
    assert not dist.rpc.rpc_sync(after(), has_ended, (name,))
    last = twin.touch.rpc_async()
    del twin
    assert last.wait() == name  # calls under way are done
    del last
    assert eventually(lambda: dist.rpc.rpc_sync(after(), has_ended, (name,)))


@check
@with_rpc
def a_handle_in_a_cycle_goes_too():
    name = new_name()
    cycle = [dist.rpc.remote(after(), Mortal, name)]
    cycle.append(cycle)
    del cycle
    assert eventually(lambda: dist.rpc.rpc_sync(after(), has_ended, (name,)))


@check
@with_rpc
def the_handles_that_all_ranks_have_keep_an_object():
    names = [new_name() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, 0)
    owner = dist.get_world_size() - 1
    handles = [dist.rpc.remote(owner, Mortal, names[0]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(handles, 0)
    dist.barrier()
    if dist.get_rank() == 0:
        handles.clear()
    dist.barrier()
    for handle in handles:
        assert handle.touch() == names[0]
    dist.barrier()
    handles.clear()
    handle = None
    if dist.get_world_size() > 1:
        assert eventually(lambda: dist.rpc.rpc_sync(owner, has_ended, (names[0],)))
    dist.barrier()


@check
def objects_go_with_rpc():
    dist.init_parallel_env()
    dist.rpc.init_rpc()
    name = new_name()
    mortal = dist.rpc.remote(after(), Mortal, name)
    names = everyone(name)
    dist.barrier()
    dist.rpc.shutdown()
    before = names[dist.get_rank() - 1]
    assert eventually(lambda: has_ended(before))
    with pytest.raises(dist.HpcdistError):
        mortal.touch()
    reference = weakref.ref(mortal)
    del mortal
    assert eventually(lambda: reference() is None)
    dist.barrier()


@check
@with_rpc
def a_call_of_an_object_that_is_gone_is_told():
    counter = dist.rpc.remote(after(), Counter)
    actors = counter._actors
    actors.tell(counter._address, {counter._token: -1})
    with pytest.raises(dist.UsageError, match="no handle of it was left"):
        counter.add()
