"""What holds for models of arrays on a grid, on any number of ranks."""

import numpy as np
import pytest
from checks import Checks, Mlp, assert_close, batches, share, step, values

import hpcdist as dist
from hpcdist import optim
from hpcdist.parallel import hybrid_options as asked
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.hybrid_arrays import (
    distribute_model,
    distribute_optimizer,
    distribute_scaler,
)
from hpcdist.parallel.topology import CommunicateTopology

check = Checks()
AXES = ["dp", "pp", "sharding", "sep", "cp", "mp"]


def grid_of(**degrees):
    sizes = {axis: degrees.get(axis, 1) for axis in AXES}
    return HybridCommunicateGroup(CommunicateTopology(list(sizes), list(sizes.values())))


def grids():
    """Give all grids of dp and sharding of the ranks there are, each with stages of sharding."""
    size = dist.get_world_size()
    for sharding in (each for each in range(1, size + 1) if size % each == 0):
        for stage in (1, 2, 3) if sharding > 1 else (1,):
            options = asked.HybridOptions(sharding=asked.Sharding(stage=stage))
            yield grid_of(dp=size // sharding, sharding=sharding), options


def adam(layers):
    return optim.Adam(layers.named_parameters(), 0.01)


def train(model, layers, optimizer, data):
    for x, y in data:
        step(model, layers, x, y)
        optimizer.step()
        optimizer.clear_grad()


@check
def training_on_a_grid_is_that_of_one_process_in_either_order():
    data = list(batches(4, 4 * dist.get_world_size()))
    alone = Mlp(seed=0)
    train(alone, alone, adam(alone), data)
    for grid, options in grids():
        for optimizer_first in (False, True):
            layers = Mlp(seed=dist.get_rank())
            given = adam(layers)
            if optimizer_first:
                optimizer = distribute_optimizer(given, grid, options)
                model = distribute_model(layers, grid, options)
            else:
                model = distribute_model(layers, grid, options)
                optimizer = distribute_optimizer(given, grid, options)
            train(model, layers, optimizer, share(data))
            found = {name: np.asarray(each) for name, each in model.state_dict().items()}
            assert_close(found, values(alone), rtol=1e-8)


@check
def the_learning_rate_can_be_set_before_the_model_is_there():
    for grid, options in grids():
        layers = Mlp(seed=0)
        optimizer = distribute_optimizer(adam(layers), grid, options)
        model = distribute_model(layers, grid, options)
        optimizer.learning_rate = 0.0
        before = {name: np.array(each) for name, each in model.state_dict().items()}
        train(model, layers, optimizer, share(list(batches(1, 4 * dist.get_world_size()))))
        assert optimizer.get_lr() == 0
        found = {name: np.asarray(each) for name, each in model.state_dict().items()}
        assert_close(found, before, rtol=0)


@check
def all_ranks_skip_a_step_in_which_one_has_nan():
    rank, size = dist.get_rank(), dist.get_world_size()
    for grid, options in grids():
        layers = Mlp(seed=0)
        optimizer = distribute_optimizer(adam(layers), grid, options)
        model = distribute_model(layers, grid, options)
        scaler = distribute_scaler(dist.GradScaler(init_loss_scaling=4.0), grid)
        before = {name: np.array(each) for name, each in model.state_dict().items()}
        (x, y), *_ = share(list(batches(1, 4 * size)))
        step(model, layers, x * (np.nan if rank == size - 1 else 1), y)
        assert scaler.step(optimizer) is False
        scaler.update()
        assert scaler.get_scale() == 2
        found = {name: np.asarray(each) for name, each in model.state_dict().items()}
        assert_close(found, before, rtol=0)


@check
def axes_that_need_torch_are_refused_in_one_sentence():
    size = dist.get_world_size()
    if size == 1:
        return
    for axis in ("mp", "pp", "sep"):
        layers = Mlp(seed=0)
        for function, given in ((distribute_model, layers), (distribute_optimizer, adam(layers))):
            with pytest.raises(dist.UsageError, match=f"dp and sharding alone.* {axis}={size}"):
                function(given, grid_of(**{axis: size}))


@check
def what_a_strategy_asks_for_torch_alone_is_refused():
    grid, layers = grid_of(dp=dist.get_world_size()), Mlp(seed=0)
    for options, words in (
        (asked.HybridOptions(lars=asked.Lars()), "use hpcdist.optim.LARS"),
        (asked.HybridOptions(gradient_merge=asked.GradientMerge(2)), r"model\.no_sync"),
        (asked.HybridOptions(sync_batch_norm=True), "sync_batch_norm"),
    ):
        with pytest.raises(dist.UsageError, match=words):
            distribute_model(layers, grid, options)
    with pytest.raises(dist.UsageError, match=r"must be one of hpcdist\.optim"):
        distribute_optimizer(object(), grid)
    with pytest.raises(dist.UsageError, match=r"must be an hpcdist\.GradScaler"):
        distribute_scaler(None, grid)


@check
def an_optimizer_without_its_model_is_refused():
    size = dist.get_world_size()
    if size == 1:
        return
    optimizer = distribute_optimizer(adam(Mlp(seed=0)), grid_of(sharding=size))
    with pytest.raises(dist.UsageError, match="belong to no model that distributed_model"):
        optimizer.step()
