"""What holds for data-parallel training of plain arrays, on any number of ranks."""

import gc
import re
import time

import numpy as np
import pytest
from checks import (
    Checks,
    Mlp,
    Vectors,
    adam,
    adamw,
    assert_close,
    assert_raised,
    assert_trains,
    batches,
    everyone,
    mean_of,
    momentum,
    outcome,
    sgd,
    share,
    step,
    train,
    values,
)

import hpcdist as dist
from hpcdist.parallel.arrays import ArrayDataParallel

check = Checks()


# ---- training equals that of one process


@check
def training_equals_that_of_one_process_on_the_whole_batch():
    size = dist.get_world_size()
    for optimizer in (sgd, momentum, adam, adamw):
        data = list(batches(6, 4 * size))
        alone, layers = Mlp(seed=0), Mlp(seed=dist.get_rank())
        model = dist.DataParallel(layers)
        expected = train(alone, alone, optimizer, data)
        losses = [mean_of(loss) for loss in train(model, layers, optimizer, share(data))]
        np.testing.assert_allclose(losses, expected, rtol=1e-10)
        assert_close(values(layers), values(alone))


@check
def all_ranks_have_the_same_bits_after_training():
    layers = Mlp(seed=dist.get_rank(), dtype="f4")
    model = dist.DataParallel(layers, comm_buffer_size=0)
    data = [(x.astype("f4"), y.astype("f4")) for x, y in batches(5, 6, seed=dist.get_rank())]
    train(model, layers, adam, data)
    bits = everyone({name: value.tobytes() for name, value in values(layers).items()})
    assert all(each == bits[0] for each in bits)


@check
def accumulated_gradients_are_averaged_with_the_next_synced_backward():
    size = dist.get_world_size()
    data = list(batches(4, 2 * size))
    alone, layers = Mlp(seed=0), Mlp(seed=0)
    model = dist.DataParallel(layers)
    for _ in range(2):
        for x, y in data:
            step(alone, alone, x, y)
        with model.no_sync():
            for x, y in share(data)[:-1]:
                step(model, layers, x, y)
        step(model, layers, *share(data)[-1])
        for (_, p), (_, q) in zip(layers.named_parameters(), alone.named_parameters(), strict=True):
            np.testing.assert_allclose(p.grad, q.grad, rtol=1e-10, atol=1e-13)
            p.data -= 0.1 * p.grad
            q.data -= 0.1 * q.grad
            p.grad = q.grad = None


@check
def a_group_trains_without_the_others():
    members = list(range(0, dist.get_world_size(), 2))
    group = dist.new_group(members)
    layers = Vectors("a", "b", value=dist.get_rank() + 5.0)
    if not group.is_member():
        with pytest.raises(dist.UsageError, match="is not in group"):
            dist.DataParallel(layers, group=group)
        return
    model = dist.DataParallel(layers, group=group)
    assert layers.all["a"].data[0] == 5
    model()
    layers.give(dist.get_rank())
    assert layers.grads() == [np.mean(members)] * 2
    dist.destroy_process_group(group)


# ---- the model


@check
def every_rank_begins_with_the_parameters_and_buffers_of_the_first():
    rank = dist.get_rank()
    layers = Vectors("a", "b", value=rank + 1.0, buffer=np.full(2, rank + 4.0))
    layers.all["frozen"] = dist.Parameter(np.array([rank + 9]), requires_grad=False)
    dist.DataParallel(layers)
    assert [p.data[0] for p in layers.all.values()] == [1, 1, 9]
    assert layers.buffer[0] == 4


@check
def buffers_follow_the_first_rank_after_each_synced_backward():
    layers = Vectors("a", buffer=np.zeros(2))
    model = dist.DataParallel(layers)
    for turn in range(3):
        model()
        layers.buffer = np.full(2, 10.0 * turn + dist.get_rank())  # a new array each time
        layers.give(1)
        assert layers.buffer[0] == 10 * turn
    with model.no_sync():
        model()
        layers.buffer = np.full(2, 50.0 + dist.get_rank())
        layers.give(1)
    assert layers.buffer[0] == 50 + dist.get_rank()


@check
def everything_else_falls_through_to_the_layers():
    layers = Vectors("a", "b")
    layers.depth = 12
    model = dist.DataParallel(layers, find_unused_parameters=True)
    assert isinstance(model, dist.DataParallel)
    assert isinstance(model, ArrayDataParallel)
    assert model.depth == 12
    assert model._layers is layers
    assert not hasattr(model, "height")
    assert model(3) == model.forward(3) == 3
    assert model.scale_loss(7) == 7
    assert model.comm_buffer_size == 25 << 20
    assert model.find_unused_parameters
    assert model.grad_need_sync
    assert model.group is dist.get_group(0)
    assert model.group_indices == [[0, 1]]
    assert [name for name, _ in model.named_parameters()] == ["a", "b"]
    assert model.parameters() == list(layers.all.values())
    assert "Vectors" in repr(model)


@check
def states_are_saved_and_loaded_without_a_prefix():
    layers = Vectors("a", "b", value=3.0, buffer=np.ones(2))
    model = dist.DataParallel(layers)
    kept = {name: array.copy() for name, array in model.state_dict().items()}
    assert list(kept) == ["a", "b", "running_mean"]
    array = layers.all["a"].data
    for load in (model.set_state_dict, model.set_dict, model.load_dict, model.load_state_dict):
        array[:], layers.buffer[:] = 8, 9
        load(kept)
        assert layers.all["a"].data is array
        assert (array == 3).all()
        assert (layers.buffer == 1).all()
    for wrong, words in (
        ({**kept, "a": np.ones(4)}, "'a' has shape (4,), but the model's has (3,)"),
        ({"a": kept["a"]}, "b, running_mean occur in one of them only"),
        ({**kept, "c": 1}, "c occur"),
    ):
        with pytest.raises(dist.UsageError, match=re.escape(words)):
            model.set_state_dict(wrong)
        assert (layers.all["b"].data == 3).all()


@check
def a_parameter_with_two_names_has_one_gradient():
    layers = Vectors("a", "b")
    layers.all["tied"] = layers.all["a"]
    model = dist.DataParallel(layers)
    assert model.group_indices == [[0, 1]]
    model()
    layers.give(dist.get_rank(), "b", "a")
    assert layers.grads() == [(dist.get_world_size() - 1) / 2] * 3


# ---- gradients and their memory


@check
def gradients_stay_where_they_are_in_one_array_per_bucket():
    layers = Mlp(seed=0)
    model = dist.DataParallel(layers)
    places = []
    for x, y in batches(3, 4):
        step(model, layers, x, y)
        places.append([p.grad.__array_interface__["data"][0] for p in model.parameters()])
        base = layers.w1.grad.base
        assert all(p.grad.base is base for p in model.parameters())
        assert base.nbytes == sum(p.grad.nbytes for p in model.parameters())
        model.zero_grad()
    assert places[0] == places[1] == places[2]


@check
def gradients_may_become_ready_in_any_order_that_differs_between_ranks():
    rank, n = dist.get_rank(), dist.get_world_size()
    names = list("abcdefgh")
    layers = Vectors(*names)
    model = dist.DataParallel(layers, comm_buffer_size=40 / 2**20, last_comm_buffer_size=1)
    assert len(model.group_indices) > 3
    random = np.random.default_rng(rank)
    for turn in range(10):
        model()
        layers.give(rank + turn, *random.permutation(names))
        assert layers.grads() == [(n - 1) / 2 + turn] * 8
        model.zero_grad()


@check
def a_gradient_can_be_read_while_others_are_still_to_come():
    rank, n = dist.get_rank(), dist.get_world_size()
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, comm_buffer_size=0)
    model()
    layers.give(rank, "b")
    assert layers.all["b"].grad[0] == (n - 1) / 2
    layers.give(rank + 1, "a")
    assert layers.grads() == [(n + 1) / 2, (n - 1) / 2]


@check
def two_synced_backwards_add_up():
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers)
    mean = (dist.get_world_size() - 1) / 2
    for turn in range(1, 4):
        model()
        layers.give(dist.get_rank())
        assert layers.grads() == [turn * mean] * 2
    for p in layers.all.values():
        p.grad += np.full(3, float(dist.get_rank()))
    assert layers.grads() == [4 * mean] * 2


@check
def a_backward_without_a_forward_through_the_model_is_averaged_too():
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers)
    mean = (dist.get_world_size() - 1) / 2
    layers.give(dist.get_rank())
    assert layers.grads() == [mean] * 2
    model.zero_grad()
    with model.no_sync():
        layers.give(dist.get_rank())
        layers.give(dist.get_rank())
    assert layers.grads() == [2 * dist.get_rank()] * 2
    layers.give(0, "b", "a")
    assert layers.grads() == [2 * mean] * 2


@check
def assigned_gradients_add_to_those_that_wait_and_to_no_others():
    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers)

    def assign(value):
        for _, each in reversed(layers.named_parameters()):
            each.grad = np.full_like(each.grad if each.has_grad else each.data, value)

    for _ in range(2):
        with model.no_sync():
            assign(rank)
            assert layers.grads() == [rank] * 2
            assign(1)
            for _, each in layers.named_parameters():
                each.grad *= 2
        assign(10)
        assert layers.grads() == [2 * mean + 12] * 2
    assign(rank)
    assert layers.grads() == [mean] * 2


@check
def the_forward_decides_whether_the_backward_is_averaged():
    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers)
    with model.no_sync():
        assert not model.grad_need_sync
        model()
    layers.give(rank)
    assert layers.grads() == [rank, rank]
    model.zero_grad()
    model()
    with model.no_sync():
        layers.give(rank)
    assert layers.grads() == [mean, mean]
    try:
        with model.no_sync():
            raise KeyError
    except KeyError:
        assert model.grad_need_sync


@check
def every_floating_dtype_is_averaged():
    import ml_dtypes

    rank, n = dist.get_rank(), dist.get_world_size()
    layers = Vectors()
    dtypes = ["f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16"]
    for number, dtype in enumerate(dtypes * 2):
        shape = [(), (0,), (2, 3)][number % 3]
        layers.all[f"p{number}"] = dist.Parameter(np.zeros(shape, dtype))
    model = dist.DataParallel(layers)
    assert len(model.group_indices) == len(dtypes)
    for p in layers.all.values():
        p.grad = np.full(p.shape, rank + 1, p.dtype)
    for p in layers.all.values():
        assert p.grad.dtype == p.dtype
        assert (p.grad == (n + 1) / 2).all()


@check
def statistics_tell_what_was_sent():
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, comm_buffer_size=0)
    for _ in range(3):
        assert_trains(model, layers)
    stats = model.comm_stats()
    assert (stats.backwards, stats.buckets, stats.nbytes) == (3, 6, 3 * 2 * 24)
    assert stats.comm_s > 0
    assert 0 <= stats.hidden <= 1


# ---- unused parameters


@check
def parameters_that_no_rank_uses_keep_no_gradient():
    layers = Vectors("a", "b", "c")
    model = dist.DataParallel(layers, find_unused_parameters=True, comm_buffer_size=0)
    for _ in range(3):
        model()
        layers.give(dist.get_rank(), "c", "a")
        model.synchronize()
        assert layers.grads() == [(dist.get_world_size() - 1) / 2, None] * 1 + [
            (dist.get_world_size() - 1) / 2
        ]
        model.zero_grad()


@check
def parameters_that_some_ranks_use_get_the_mean_with_zeros():
    rank, n = dist.get_rank(), dist.get_world_size()
    names = ["a", "b", "c", "d"]
    layers = Vectors(*names)
    model = dist.DataParallel(layers, find_unused_parameters=True, comm_buffer_size=0)
    for turn in range(2 * n):  # another rank uses another parameter at every step
        used = {each: names[(each + turn) % 4] for each in range(n)}
        model()
        layers.give(rank + 1, used[rank])
        model.synchronize()
        expected = [sum(r + 1 for r in range(n) if used[r] == name) / n for name in names]
        assert layers.grads() == [value or None for value in expected]
        model.zero_grad()


@check
def a_rank_may_use_no_parameter_at_all():
    n = dist.get_world_size()
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, find_unused_parameters=True)
    for turn in range(n):
        model()
        if dist.get_rank() == turn:
            layers.give(n)
        model.synchronize()
        assert layers.grads() == [1, 1]
        model.zero_grad()


@check
def gathered_gradients_of_unused_parameters_are_averaged():
    rank, mean = dist.get_rank(), (dist.get_world_size() - 1) / 2
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, find_unused_parameters=True)
    with model.no_sync():
        model()
        layers.give(rank)
    model()
    layers.give(0, "b")
    model.synchronize()
    assert layers.grads() == [mean, mean]


@check
def a_gradient_that_is_missing_on_one_rank_is_an_error_on_all():
    layers = Vectors("a", "b", "c")
    model = dist.DataParallel(layers, comm_buffer_size=0)
    for culprit in range(dist.get_world_size()):
        model()

        def backward(culprit=culprit):
            layers.give(1, *("c" if dist.get_rank() == culprit else "cba"))
            model.synchronize()

        words = ["without a gradient for parameters 'a', 'b'", "find_unused_parameters=True"]
        assert_raised(outcome(backward), "UsageError", words, [culprit])
        assert layers.grads() == [None] * 3
        assert_trains(model, layers)


@check
def gradients_that_are_missing_on_all_ranks_are_an_error_on_all():
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers)

    def read():
        layers.give(1, "a")
        layers.grads()

    def call_again():
        layers.give(1, "b")
        model()

    def give_nothing():
        model()
        model.synchronize()

    for backward, words in ((read, "'b'"), (call_again, "'a'"), (give_nothing, "'a', 'b'")):
        assert_raised(outcome(backward), "UsageError", ["without a gradient for", words])
        assert_trains(model, layers)


@check
def a_gradient_read_too_early_is_an_error_on_all():
    n = dist.get_world_size()
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, find_unused_parameters=True)
    model()

    def backward():
        layers.give(1, *("b" if dist.get_rank() == n - 1 else "ba"))
        layers.grads()

    words = ["'a' was read before the backward pass had ended; call synchronize()"]
    assert_raised(outcome(backward), "UsageError", words, [n - 1])
    assert_trains(model, layers)


# ---- other mistakes


@check
def a_second_gradient_in_one_backward_is_an_error_on_all():
    n = dist.get_world_size()
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, comm_buffer_size=0)

    def backward():
        layers.give(1, *("bb" if dist.get_rank() == n - 1 else "ba"))

    words = ["parameter 'b' got a second gradient in one backward pass, while parameter 'a' had"]
    assert_raised(outcome(backward), "UsageError", words, [n - 1])
    assert_trains(model, layers)


@check
def a_gradient_of_another_shape_or_dtype_is_an_error_on_all():
    n = dist.get_world_size()
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, comm_buffer_size=0)
    for wrong in (np.ones(4), np.ones(3, "f4"), 1.0):
        model()

        def backward(wrong=wrong):
            layers.give(1, "b")
            layers.all["a"].grad = wrong if dist.get_rank() == n - 1 else np.ones(3)

        assert_raised(outcome(backward), "UsageError", "parameter 'a'", [n - 1])
        assert_trains(model, layers)


@check
def nan_is_found_and_named_on_all_ranks():
    n = dist.get_world_size()
    layers = Vectors("a", "b", "c")
    model = dist.DataParallel(layers, check_nan=True)

    def backward():
        layers.give(1, "c")
        layers.give(np.nan if dist.get_rank() == n - 1 else 1, "b")
        layers.give(1, "a")

    words = ["gradient of parameter 'b' contains NaN", f"rank {n - 1}"]
    assert_raised(outcome(backward), "UsageError", words, [n - 1])
    assert_trains(model, layers)
    quiet = dist.DataParallel(Vectors("a"), check_nan=False)
    quiet._layers.give(np.nan)
    assert np.isnan(quiet._layers.grads()[0])


@check
def a_rank_that_does_not_come_is_named():
    n = dist.get_world_size()
    if n == 1:
        return
    group = dist.new_group(timeout=1.0)
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, group=group)

    def backward():
        if dist.get_rank() == n - 1:
            time.sleep(2.5)
        layers.give(1)

    told = outcome(backward)
    assert_raised(told, "CollectiveTimeout", "all_reduce(shape (6,), float64, AVG)")
    assert f"missing ranks: {n - 1}" in told[0][1]
    assert_trains(model, layers)
    dist.destroy_process_group(group)


@check
def models_that_differ_are_named_on_all_ranks():
    n = dist.get_world_size()
    last = dist.get_rank() == n - 1
    if n == 1:
        return

    def other_name():
        return Vectors("a", "c") if last else Vectors("a", "b")

    def other_order():
        return Vectors("b", "a") if last else Vectors("a", "b")

    def other_shape():
        layers = Vectors("a")
        layers.all["b"] = dist.Parameter(np.zeros((2, 2 + last)))
        return layers

    def other_dtype():
        layers = Vectors("a")
        layers.all["b"] = dist.Parameter(np.zeros(3, "f4" if last else "f8"))
        return layers

    def fewer():
        return Vectors("a") if last else Vectors("a", "b")

    def other_buffer():
        return Vectors("a", buffer=np.zeros(2 + last))

    def frozen():
        layers = Vectors("a")
        layers.all["b"] = dist.Parameter(np.zeros(3), requires_grad=not last)
        return layers

    for build, words in (
        (other_name, "parameter 1, counted from 0: rank 0 has 'b' of shape (3,), float64, but"),
        (other_order, "parameter 0, counted from 0: rank 0 has 'a'"),
        (other_shape, "has 'b' of shape (2, 2), float64"),
        (other_dtype, f"rank {n - 1} has 'b' of shape (3,), float32. Build the same model"),
        (fewer, f"rank {n - 1} has no more"),
        (other_buffer, f"rank {n - 1} has 'running_mean' of shape (3,)"),
        (frozen, "float64, not trained"),
    ):
        told = outcome(lambda build=build: dist.DataParallel(build()))
        assert_raised(told, "MismatchError", words)
    dist.DataParallel(Vectors("a"))


@check
def models_that_cannot_be_trained_are_refused_on_all_ranks():
    n = dist.get_world_size()
    last = dist.get_rank() == n - 1
    frozen, twice, taken, plain = Vectors("a"), Vectors("a"), Vectors("a"), Vectors("a")
    fixed = Vectors("a", buffer=np.zeros(2))
    if last:
        frozen.all["a"] = dist.Parameter(np.zeros(3), requires_grad=False)
        twice.named_parameters = lambda: [("a", twice.all["a"]), ("a", dist.Parameter(np.ones(1)))]
        plain.all["a"] = np.zeros(3)
        fixed.buffer.flags.writeable = False
    alone = dist.new_group([n - 1])
    owner = dist.DataParallel(taken, group=alone) if last else None
    for layers, words in (
        (frozen, "does not have any parameters to train, and does not need to use DataParallel"),
        (twice, "2 parameters or buffers of the model are called 'a'"),
        (fixed, "buffer 'running_mean' of the model is an ndarray that cannot be written"),
        (plain, "named_parameters() gave 'a', an ndarray; make it an hpcdist.Parameter"),
        (taken, "parameter 'a' belongs to another DataParallel already"),
    ):
        told = outcome(lambda layers=layers: dist.DataParallel(layers))
        kind = "UsageAssertionError" if layers is frozen else "UsageError"
        assert_raised(told, kind, words, [n - 1])
    sizes = {"comm_buffer_size": -1, "last_comm_buffer_size": "1"}
    for name, size in sizes.items():
        options = {name: size} if last else {}
        told = outcome(lambda options=options: dist.DataParallel(Vectors("a"), **options))
        assert_raised(told, "UsageTypeError", f"{name} must be a number of MiB", [n - 1])
    with pytest.raises(dist.UsageError, match=r"neither a torch\.nn\.Module nor"):
        dist.DataParallel(np.zeros(3))
    del owner
    gc.collect()
    dist.DataParallel(taken)
    if last:
        dist.destroy_process_group(alone)


# ---- uneven numbers of batches


@check
def ranks_may_have_different_numbers_of_batches():
    rank, n = dist.get_rank(), dist.get_world_size()
    for by_all in (True, False):
        layers = Vectors("a", "b", buffer=np.zeros(1))
        model = dist.DataParallel(layers)
        seen = []
        with model.join(divide_by_initial_world_size=by_all):
            for turn in range(2 + rank):
                model()
                layers.buffer[:] = 100 * turn + rank
                layers.give(rank + 1)
                seen.append(layers.grads()[0])
                for p in layers.all.values():
                    p.data -= p.grad
                model.zero_grad()
        expected = []
        for turn in range(1 + n):
            active = [r + 1 for r in range(n) if turn < 2 + r]
            expected.append(sum(active) / (n if by_all else len(active)))
        np.testing.assert_allclose(seen, expected[: 2 + rank])
        np.testing.assert_allclose(layers.all["a"].data, -sum(expected))
        assert layers.buffer[0] == 100 * n + n - 1
        assert_trains(model, layers)


@check
def a_join_of_equal_numbers_changes_nothing():
    layers = Vectors("a")
    model = dist.DataParallel(layers, find_unused_parameters=True)
    for enable in (True, False):
        with model.join(enable=enable):
            for _ in range(3):
                assert_trains(model, layers)


@check
def a_join_may_leave_parameters_unused():
    rank, n = dist.get_rank(), dist.get_world_size()
    layers = Vectors("a", "b")
    model = dist.DataParallel(layers, find_unused_parameters=True)
    with model.join():
        for turn in range(1 + rank):
            model()
            layers.give(n, "a")
            model.synchronize()
            assert layers.grads() == [n - turn, None]
            model.zero_grad()


@check
def who_leaves_a_join_with_an_error_is_named_in_the_next_batch_of_the_others():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    kind, words = dist.RemoteError, f"rank {last}: left the join of its model with KeyError: 5"
    if rank == last:
        kind, words = KeyError, "5"

    def trained(model, layers, done):
        with model.join():
            for turn in range(1 + 2 * (rank == last)):
                model()
                layers.give(1.0, *(done if turn == 2 else ()))
                if turn == 2:
                    raise KeyError(5)
                model.zero_grad()

    for done in (), ("a",):  # what has a gradient by then: all, or a part in the midst of a pass
        layers = Vectors("a", "b")
        model = dist.DataParallel(layers, comm_buffer_size=0)
        with pytest.raises(kind, match=words):
            trained(model, layers, done)
        model.zero_grad()
        assert_trains(model, layers)


@check
def a_join_without_any_batch_ends():
    layers = Vectors("a", value=2.0)
    model = dist.DataParallel(layers)
    with model.join():
        pass
    assert layers.all["a"].data[0] == 2
