"""What holds for parameters with a group of their own, on any number of ranks.

The model is a mixture of experts: a matrix that all ranks have, and experts of which each rank has
one, and shares it with the ranks that have the same.
"""

import copy
import math

import numpy as np
import pytest
from checks import Checks, Vectors, assert_raised, assert_trains, everyone, outcome

import hpcdist as dist

check = Checks()

EXPERTS = 2


class Mixture:
    """``tanh(x @ first) @ expert``; every rank sends its rows to its expert."""

    def __init__(self, number, group=None, seed=0):
        random = np.random.default_rng(seed)
        first, *experts = (random.normal(0, 0.4, (4, 4)) for _ in range(1 + EXPERTS))
        self.first = dist.Parameter(first)
        self.expert = dist.Parameter(experts[number], group=group)

    def named_parameters(self):
        return [("first", self.first), ("expert", self.expert)]

    def __call__(self, x):
        self.x, self.h = x, np.tanh(x @ self.first.data)
        return self.h @ self.expert.data

    def backward(self, slope):
        self.expert.accumulate(self.h.T @ slope)
        self.first.accumulate(self.x.T @ ((slope @ self.expert.data.T) * (1 - self.h**2)))


def ranks_of(number):
    return [rank for rank in range(dist.get_world_size()) if rank % EXPERTS == number]


def own_group():
    """Return the number of this rank's expert, and the ranks that have it."""
    number = dist.get_rank() % EXPERTS
    return number, dist.get_group(0).split(number)


def rows(turn, rank):
    random = np.random.default_rng((turn, rank))
    return random.normal(size=(3, 4)), random.normal(size=(3, 4))


def in_one_process(turns, rate=0.1, limit=math.inf):
    """Train all experts with NumPy; return the first matrix, the experts, and the norms."""
    size = dist.get_world_size()
    numbers = range(min(EXPERTS, size))
    models = [Mixture(number) for number in numbers]
    first = models[0].first.data
    norms = []
    for turn in range(turns):
        slope = np.zeros_like(first)
        for number, model in zip(numbers, models, strict=True):
            model.first.data = first
            for rank in ranks_of(number):
                x, y = rows(turn, rank)
                model.first.grad = None
                model.backward(model(x) - y)
                slope += model.first.grad / size
        experts = [
            model.expert.grad / len(ranks_of(number))
            for number, model in zip(numbers, models, strict=True)
        ]
        norms.append(math.sqrt(sum((each**2).sum() for each in (slope, *experts))))
        factor = min(1.0, limit / (norms[-1] + 1e-6))
        first = first - rate * factor * slope
        for model, each in zip(models, experts, strict=True):
            model.expert.data = model.expert.data - rate * factor * each
            model.expert.grad = None
    return first, [model.expert.data for model in models], norms


@check
def experts_train_as_in_one_process():
    for size in (25, 0):  # one bucket for each group, and one for each parameter
        number, group = own_group()
        layers = Mixture(number, group)
        model = dist.DataParallel(layers, comm_buffer_size=size)
        optimizer = dist.optim.SGD(layers.named_parameters(), 0.1)
        for turn in range(4):
            x, y = rows(turn, dist.get_rank())
            layers.backward(model(x) - y)
            optimizer.step()
            optimizer.clear_grad()
        first, experts, _ = in_one_process(4)
        np.testing.assert_allclose(layers.first.data, first, rtol=1e-10)
        np.testing.assert_allclose(layers.expert.data, experts[number], rtol=1e-10)
        dist.destroy_process_group(group)


@check
def members_of_a_group_begin_with_the_same_parameter():
    number, group = own_group()
    layers = Mixture(number, group, seed=dist.get_rank())
    dist.DataParallel(layers)
    expected = Mixture(number, seed=number)
    np.testing.assert_array_equal(layers.expert.data, expected.expert.data)
    np.testing.assert_array_equal(layers.first.data, Mixture(0, seed=0).first.data)
    dist.destroy_process_group(group)


@check
def the_norm_counts_every_parameter_once():
    number, group = own_group()
    layers = Mixture(number, group)
    model = dist.DataParallel(layers)
    optimizer = dist.optim.SGD(layers.named_parameters(), 0.1)
    first, experts, norms = in_one_process(3, limit=0.2)
    for turn, expected in enumerate(norms):
        x, y = rows(turn, dist.get_rank())
        layers.backward(model(x) - y)
        target = (model, layers, model.parameters())[turn]
        np.testing.assert_allclose(dist.clip_grad_norm_(target, 0.2), expected, rtol=1e-10)
        optimizer.step()
        optimizer.clear_grad()
    np.testing.assert_allclose(layers.first.data, first, rtol=1e-9)
    np.testing.assert_allclose(layers.expert.data, experts[number], rtol=1e-9)
    if dist.get_world_size() > 1:  # else the group is that of the model
        with pytest.raises(dist.UsageError, match="got some of the parameters"):
            dist.clip_grad_norm_([layers.first], 1.0)
    layers.first.grad, layers.expert.grad = np.ones((4, 4)), np.full((4, 4), 2.0 + number)
    largest = dist.clip_grad_norm_(model, math.inf, math.inf)
    assert largest == 2.0 + min(EXPERTS, dist.get_world_size()) - 1
    dist.destroy_process_group(group)


@check
def all_ranks_skip_a_step_in_which_one_expert_has_an_infinite_gradient():
    number, group = own_group()
    layers = Mixture(number, group)
    model = dist.DataParallel(layers)
    optimizer, scaler = dist.optim.SGD(model.named_parameters()), dist.GradScaler()
    layers.expert.grad = np.full((4, 4), np.inf if number == 0 else 1.0)
    layers.first.grad = np.ones((4, 4))
    assert everyone(scaler.step(optimizer)) == [False] * dist.get_world_size()
    dist.destroy_process_group(group)


@check
def groups_may_overlap_in_any_way():
    rank, n = dist.get_rank(), dist.get_world_size()
    pairs = [sorted({first, (first + 1) % n}) for first in range(n)]
    groups = [dist.new_group(ranks) for ranks in pairs]
    # left to themselves all would send to the right first, and wait for each other around the ring
    mine = [(rank - 1) % n, rank] if n > 2 else range(n)
    layers = Vectors("all")
    for number in mine:
        layers.all[f"pair{number}"] = dist.Parameter(np.zeros(3), group=groups[number])
    model = dist.DataParallel(layers, comm_buffer_size=0)
    random = np.random.default_rng(rank)
    for turn in range(5):
        model()
        layers.give(rank + turn, *random.permutation(list(layers.all)))
        assert layers.all["all"].grad[0] == (n - 1) / 2 + turn
        for number in mine:
            assert layers.all[f"pair{number}"].grad[0] == np.mean(pairs[number]) + turn
        model.zero_grad()
    for group in groups:
        dist.destroy_process_group(group)


@check
def a_parameter_in_a_group_of_one_rank_is_not_communicated():
    rank, n = dist.get_rank(), dist.get_world_size()
    group = dist.get_group(0).split(rank)
    layers = Vectors("all")
    own = layers.all["own"] = dist.Parameter(np.full(3, float(rank)), group=group)
    model = dist.DataParallel(layers)
    assert own.data[0] == rank
    model()
    layers.give(rank)
    assert own.grad[0] == rank
    assert layers.all["all"].grad[0] == (n - 1) / 2
    if n > 1:
        assert model.comm_stats().nbytes == 24 + 8  # the other one's, and a word at the end
    dist.destroy_process_group(group)


@check
def parameters_of_different_groups_share_no_bucket():
    _, group = own_group()
    layers = Vectors("a", "b", "c", "d")
    for name in "bd":
        layers.all[name].group = group
    model = dist.DataParallel(layers)
    alone = group.nranks == dist.get_world_size()
    assert model.group_indices == ([[0, 1, 2, 3]] if alone else [[1, 3], [0, 2]])
    dist.destroy_process_group(group)


@check
def unused_experts_are_averaged_with_zeros():
    rank, n = dist.get_rank(), dist.get_world_size()
    number, group = own_group()
    layers = Vectors("a", "b")
    layers.all["b"].group = group
    model = dist.DataParallel(layers, find_unused_parameters=True)
    model()
    layers.give(1, *(["a"] if rank else ["b", "a"]))  # only rank 0 uses its expert
    model.synchronize()
    members = ranks_of(number)
    assert layers.grads() == [1, 1 / len(members) if number == 0 or n == 1 else None]
    dist.destroy_process_group(group)


@check
def an_error_reaches_ranks_that_have_another_expert():
    n = dist.get_world_size()
    _, group = own_group()
    layers = Vectors("a", "b")
    layers.all["a"].group = group  # is sent last
    model = dist.DataParallel(layers, check_nan=True)

    def backward():
        layers.give(1, "b")
        layers.give(np.nan if dist.get_rank() == n - 1 else 1, "a")

    told = outcome(backward)
    assert_raised(told, "UsageError", "gradient of parameter 'a' contains NaN", [n - 1])
    assert layers.grads() == [None, None]
    model()
    layers.give(2)
    assert layers.grads() == [2, 2]
    dist.destroy_process_group(group)


@check
def experts_may_have_different_numbers_of_batches():
    rank = dist.get_rank()
    number, group = own_group()
    members = ranks_of(number)
    for by_all in (True, False):
        layers = Vectors("a", "b")
        layers.all["b"].group = group
        model = dist.DataParallel(layers)
        with model.join(divide_by_initial_world_size=by_all):
            for turn in range(2 + rank):
                model()
                layers.give(1)
                active = [each for each in members if turn < 2 + each]
                expected = 1 if not by_all else len(active) / len(members)
                assert layers.all["b"].grad[0] == expected
                for p in layers.all.values():
                    p.data -= p.grad
                model.zero_grad()
        turns = range(2 + max(members))
        share = [len([each for each in members if turn < 2 + each]) for turn in turns]
        done = sum(count / len(members) if by_all else 1 for count in share)
        np.testing.assert_allclose(layers.all["b"].data, -done)
    dist.destroy_process_group(group)


@check
def members_with_other_parameters_are_named_on_all_ranks():
    n = dist.get_world_size()
    if n == 1:
        return
    last = dist.get_rank() == n - 1
    group = dist.new_group([0, n - 1])

    def build(shape=3, missing=False, name="b"):
        layers = Vectors("a")
        if group.is_member() and not missing:
            layers.all[name] = dist.Parameter(np.zeros(shape), group=group)
        return dist.DataParallel(layers)

    if n > 2:  # else it is the group of all ranks
        where = f"in the group of ranks [0, {n - 1}], the ranks have different parameters"
        for options, words in (
            ({"shape": 3 + last}, f"rank {n - 1} has 'b' of shape (4,)"),
            ({"missing": last}, f"rank {n - 1} has no more"),
            ({"name": "c" if last else "b"}, f"rank {n - 1} has 'c'"),
        ):
            told = outcome(lambda options=options: build(**options))
            assert_raised(told, "MismatchError", [where, words])
    build()
    dist.destroy_process_group(group)


@check
def a_group_that_does_not_fit_is_refused_on_all_ranks():
    rank, n = dist.get_rank(), dist.get_world_size()
    if n == 1:
        return
    last = rank == n - 1
    everyone_else, both = dist.new_group(range(n - 1)), dist.new_group([0, n - 1])
    gone = dist.new_group([0, n - 1])
    dist.destroy_process_group(gone)
    for own, words in (
        (everyone_else, "that this rank is a member of"),
        ("experts", "is 'experts'"),
        (gone, "; closed, but must be"),
    ):
        if n == 2 and own is gone:
            continue  # the ranks of the model itself
        layers = Vectors("a", "b")
        if last:
            layers.all["b"].group = own
        told = outcome(lambda layers=layers: dist.DataParallel(layers))
        assert_raised(told, "UsageError", ["the group of parameter 'b'", words], [n - 1])
    if last:
        alone = dist.new_group([n - 1])
        layers = Vectors("a", "b")
        layers.all["b"].group = both
        with pytest.raises(dist.UsageError, match=r"has ranks \[0\], which are not in the"):
            dist.DataParallel(layers, group=alone)
        dist.destroy_process_group(alone)
    layers = Vectors("a")
    assert_trains(dist.DataParallel(layers), layers)
    for group in (everyone_else, both):
        dist.destroy_process_group(group)


@check
def a_sharded_model_takes_no_groups():
    _, group = own_group()
    layers = Vectors("a", "b")
    layers.all["b"].group = group
    optimizer = dist.optim.SGD(layers.named_parameters())
    told = outcome(lambda: dist.group_sharded_parallel(layers, optimizer, "os"))
    assert_raised(told, "UsageError", "has a group of its own; use DataParallel")
    dist.destroy_process_group(group)


@check
def a_copy_has_the_group_and_synchronized_parameters_leave_it_out():
    rank = dist.get_rank()
    _, group = own_group()
    layers = Vectors("a", "b", value=rank + 1.0)
    layers.all["b"].group = group
    for copied in (copy.copy(layers.all["b"]), copy.deepcopy(layers).all["b"]):
        assert copied.group is group
        assert (copied.data == rank + 1).all()
    dist.sync_params_buffers(layers)
    assert [p.data[0] for p in layers.all.values()] == [1, rank + 1]
    dist.destroy_process_group(group)
