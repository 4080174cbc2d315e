"""Training with arrays on a device, which is the slow one or a GPU: where state is.

Gradients are sums of small powers of two: whatever their order, the device and the host add up the
same numbers, so the models must be equal bit by bit.
"""

from types import MappingProxyType

import numpy as np
import pytest
from device_at_hand import DEVICE, DeviceArray

import hpcdist as dist
from hpcdist import checkpoint, optim
from hpcdist.checkpoint import LocalSlice

LEVELS = "os", "os_g", "p_g_os"
CHANGES = ("os", "p_g_os"), ("p_g_os", "os_g"), ("os_g", "os_g")
OPTIMIZERS = {
    "SGD": lambda named: optim.SGD(named, 0.5, weight_decay=0.25),
    "AdamW": lambda named: optim.AdamW(named, 0.01, weight_decay=0.1),
    "LAMB": lambda named: optim.LAMB(named, 0.01),
}
SHAPES = {"in.weight": (6, 5), "in.bias": (5,), "out.weight": (5, 3), "out.scale": ()}


def on_host(array):
    return np.array(array)


class Network:
    """Parameters that are read in forward and backward; `put` says which are on the device."""

    def __init__(self, put=DEVICE.array, dtype="f4", **others):
        random = np.random.default_rng(7)
        self.named = {}
        for name, shape in SHAPES.items():
            numbers = (random.integers(-64, 64, shape) / 32).astype(dtype)
            self.named[name] = dist.Parameter(others.get(name.replace(".", "_"), put)(numbers))

    def named_parameters(self):
        return list(self.named.items())

    def __call__(self):
        return [self.named[name].data * 2 for name in SHAPES]

    def backward(self, number, factor=1.0, wrong=MappingProxyType({})):
        """Assign gradients of pass `number`, last layer first; those in `wrong` instead."""
        random = np.random.default_rng([number, dist.get_rank()])
        for name, parameter in reversed(self.named.items()):
            assert parameter.data.shape == parameter.shape
            slope = random.integers(-32, 32, parameter.shape) / 16 * factor
            slope = np.asarray(slope, parameter.dtype)
            given = DEVICE.array(slope) if is_late(parameter) else slope
            parameter.grad = wrong.get(name, given)


def is_late(parameter):
    return isinstance(parameter.data, DeviceArray)


def sharded(network, level, make="AdamW", **options):
    """Shard a network in small units: some parameters share one, some do not."""
    options = {"buffer_max_size": 70, "segment_size": 70, **options}
    optimizer = OPTIMIZERS[make](network.named_parameters())
    model, optimizer, _ = dist.group_sharded_parallel(network, optimizer, level, **options)
    return model, optimizer


def train(network, model, optimizer, passes=3, between=lambda: None):
    for number in range(passes):
        model()
        network.backward(number)
        between()
        optimizer.step()


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, numbers in expected.items():
        np.testing.assert_array_equal(state[name], numbers, err_msg=name)


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("make", "dtype"), [("SGD", "f4"), ("AdamW", "f2"), ("LAMB", "c8")])
def test_every_level_trains_on_the_device_as_on_the_host(level, make, dtype):
    trained = []
    for put in (DEVICE.array, on_host):
        network = Network(put, dtype)
        model, optimizer = sharded(network, level, make)
        train(network, model, optimizer)
        trained.append((model.state_dict(), optimizer.state_dict()))
    for late, expected in zip(*trained, strict=True):
        assert_equal(late, expected)
    start = Network(on_host, dtype).named["in.weight"].data
    assert not np.array_equal(trained[0][0]["in.weight"], start)


@pytest.mark.parametrize("level", LEVELS)
def test_sharded_training_is_that_of_data_parallel(level):
    network = Network(dtype="f8")
    alone = dist.DataParallel(network)
    optimizer = OPTIMIZERS["AdamW"](network.named_parameters())
    train(network, alone, optimizer)
    expected = {name: DEVICE.numbers(each.data) for name, each in network.named.items()}
    parted = Network(dtype="f8")
    model, _ = pair = sharded(parted, level)
    train(parted, *pair)
    assert_equal(model.state_dict(), expected)
    assert_equal(pair[1].state_dict(), optimizer.state_dict())


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
def test_what_a_rank_owns_is_on_the_device(level):
    network = Network()
    model, optimizer = sharded(network, level)
    train(network, model, optimizer)
    assert all(isinstance(each, DeviceArray) for each in network())
    for state in (model.sharded_state_dict(), optimizer.sharded_state_dict()):
        parts = [each.data for each in state.values() if isinstance(each, LocalSlice)]
        assert all(isinstance(part, DeviceArray) for part in parts)
    assert all(type(each) is np.ndarray for each in model.state_dict().values())


@pytest.mark.parametrize("level", LEVELS)
def test_passes_add_up_and_no_sync_keeps_them(level):
    states = []
    for put in (DEVICE.array, on_host):
        network = Network(put)
        model, optimizer = sharded(network, level, "SGD")
        with model.no_sync():
            model()
            network.backward(0)
        for number in (1, 2):
            model()
            network.backward(number)
        optimizer.step()
        states.append(model.state_dict())
    assert_equal(*states)


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("norm_type", "dtype"), [(2.0, "f4"), (np.inf, "f4"), (3.0, "f2"), (1.0, "c8")]
)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(level, norm_type, dtype):
    found = []
    for put in (DEVICE.array, on_host):
        network = Network(put, dtype)
        model, optimizer = sharded(network, level, "SGD")
        norms = []
        clip = lambda: norms.append(dist.clip_grad_norm_(model, 0.5, norm_type))  # noqa: E731, B023
        train(network, model, optimizer, between=clip)
        found.append((norms, model.state_dict()))
    assert all(norm > 1 for norm in found[0][0])
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    for name, numbers in found[1][1].items():
        np.testing.assert_allclose(found[0][1][name], numbers, rtol=1e-3 if dtype == "f2" else 1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_all_ranks_skip_a_step_in_which_one_has_an_infinite_gradient(level, rank, size):
    network = Network(dtype="f2")
    model, optimizer = sharded(network, level, "SGD")
    scaler = dist.GradScaler(init_loss_scaling=8.0)
    before = model.state_dict()
    for number, factor in enumerate((np.inf if rank == size - 1 else 8.0, 4.0)):
        model()
        with np.errstate(invalid="ignore"):
            network.backward(number, factor)
            assert scaler.step(optimizer) is (number == 1)
        scaler.update()
        if number == 0:
            assert_equal(model.state_dict(), before)
    plain = Network(on_host, "f2")
    other, stepped = sharded(plain, level, "SGD")
    other()
    plain.backward(1)
    stepped.step()
    assert_equal(model.state_dict(), other.state_dict())


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_states_go_from_the_device_to_the_host_and_back(first, then):
    network = Network()
    model, optimizer = sharded(network, first)
    train(network, model, optimizer)
    weights, state = model.state_dict(), optimizer.state_dict()
    train(network, model, optimizer)
    for put in (DEVICE.array, on_host):
        other = Network(put)
        again, stepped = sharded(other, then)
        again.load_state_dict({name: put(numbers) for name, numbers in weights.items()})
        stepped.load_state_dict(state)
        assert_equal(stepped.state_dict(), state)
        train(other, again, stepped)
        assert_equal(again.state_dict(), model.state_dict())
    device = {name: DEVICE.array(numbers) for name, numbers in weights.items()}
    again.load_state_dict(device)  # into arrays on the host
    assert_equal(again.state_dict(), weights)


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_a_checkpoint_of_any_level_loads_at_any_other(first, then, folder):
    network = Network(dtype="f2")
    model, optimizer = sharded(network, first)
    train(network, model, optimizer)
    dist.save_group_sharded_model(model, folder, optimizer)
    for put in (DEVICE.array, on_host):
        other = Network(put, "f2")
        again, stepped = sharded(other, then)
        state = {"model": again.sharded_state_dict(), "optimizer": stepped.sharded_state_dict()}
        checkpoint.load(state, folder)
        again.load_sharded_state_dict(state["model"])
        stepped.load_sharded_state_dict(state["optimizer"])
        assert_equal(again.state_dict(), model.state_dict())
        assert_equal(stepped.state_dict(), optimizer.state_dict())
        train(other, again, stepped)
    train(network, model, optimizer)
    assert_equal(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_may_have_parameters_on_the_host_and_on_the_device(level):
    states = []
    for mixed in ({"in_bias": on_host, "out_weight": on_host}, {}):
        network = Network(DEVICE.array if mixed else on_host, **mixed)
        model, optimizer = sharded(network, level, buffer_max_size=1 << 20, segment_size=1 << 20)
        assert [is_late(each) for each in network.named.values()].count(True) == 2 * bool(mixed)
        train(network, model, optimizer)
        states.append(model.state_dict())
    assert_equal(*states)


@pytest.mark.usefixtures("and_the_world_goes_on")
@pytest.mark.parametrize("level", ["os", "os_g"])
def test_a_gradient_on_the_host_for_a_parameter_on_the_device_is_an_error_on_every_rank(
    level, rank
):
    network = Network()
    model, optimizer = sharded(network, level)
    model()
    wrong = {"out.scale": np.zeros((), "f4")} if rank == 0 else {}
    with pytest.raises((dist.UsageError, dist.RemoteError), match="in that of the host"):
        network.backward(0, wrong=wrong)
    train(network, model, optimizer)


@pytest.mark.usefixtures("and_the_world_goes_on")
def test_a_model_on_the_host_of_one_rank_and_the_device_of_another_is_refused(rank, size):
    if size == 1:
        pytest.skip("one rank does not disagree")
    with pytest.raises(dist.MismatchError, match="on a GPU"):
        sharded(Network(on_host if rank == 0 else DEVICE.array), "os")


def test_offload_is_refused_on_the_device():
    with pytest.raises(dist.UsageError, match="offload=True"):
        sharded(Network(), "os_g", offload=True)


def test_buffers_on_the_device_follow_the_first_rank(rank):
    network = Network()
    network.seen = DEVICE.array(np.full(3, float(rank)))
    network.named_buffers = lambda: [("seen", network.seen)]
    model, optimizer = sharded(network, "os_g", sync_buffers=True)
    network.seen[...] = rank + 5.0
    train(network, model, optimizer, passes=1)
    assert DEVICE.numbers(network.seen).tolist() == [5.0] * 3
    assert model.state_dict()["seen"].tolist() == [5.0] * 3


# ---- not sharded


@pytest.mark.two_ranks
@pytest.mark.thorough
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers_work_on_the_device_without_a_model(make):
    states = []
    for put in (DEVICE.array, on_host):
        network = Network(put, "f2")
        optimizer = OPTIMIZERS[make](network.named_parameters())
        scaler = dist.GradScaler(init_loss_scaling=2.0)
        for number in range(3):
            network.backward(number, 2.0)
            assert scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
        states.append(optimizer.state_dict())
    assert_equal(*states)
    late = Network(dtype="f2")
    optimizer = OPTIMIZERS[make](late.named_parameters())
    optimizer.load_state_dict(states[0])
    assert_equal(optimizer.state_dict(), states[0])


def test_data_parallel_loads_host_arrays_into_the_device():
    network = Network()
    model = dist.DataParallel(network)
    weights = {name: np.full(shape, 3.0, "f4") for name, shape in SHAPES.items()}
    model.load_state_dict(weights)
    assert all(isinstance(each.data, DeviceArray) for each in network.named.values())
    assert_equal({name: DEVICE.numbers(p.data) for name, p in network.named.items()}, weights)


def test_a_parameter_is_shown_and_assigned_on_the_device():
    parameter = dist.Parameter(DEVICE.array(np.ones(2)))
    assert repr(parameter) == "Parameter([1., 1.])"
    parameter.data = np.full(2, 5.0)
    assert isinstance(parameter.data, DeviceArray)
    assert DEVICE.numbers(parameter.data).tolist() == [5.0, 5.0]
