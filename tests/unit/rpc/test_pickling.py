"""What is called and returned: large values travel beside the pickle, of whatever kind they are."""

import random

import numpy as np
import pytest

from hpcdist.rpc.frames import Parcel
from hpcdist.rpc.pickling import _LARGE, pack, unpack

SIZES = [0, 1, (1 << 16) - 1, 1 << 16, _LARGE - 1, _LARGE, _LARGE + 1, 3 * _LARGE]


def sent(obj):
    """Return what the other side makes of an object, and the parcel."""
    parcel = pack(obj)
    received = [np.frombuffer(bytes(each), np.uint8).copy() for each in parcel.buffers]
    return unpack(Parcel(memoryview(bytes(parcel.pickle)), received)), parcel


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["bytes", "bytearray", "str", "text"])
def test_a_value_of_any_size_is_the_same_there(kind, size):
    value = {
        "bytes": lambda: random.Random(size).randbytes(size),
        "bytearray": lambda: bytearray(random.Random(size).randbytes(size)),
        "str": lambda: "a" * size,
        "text": lambda: "né\ud800" * (size // 3),
    }[kind]()
    found, parcel = sent(value)
    assert type(found) is type(value)
    assert found == value
    assert len(parcel.pickle) < _LARGE + 100
    raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    assert len(parcel.buffers) == (len(raw) >= _LARGE)


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_nothing_large_is_copied_by_the_sender(kind):
    value = kind(b"x" * _LARGE)
    (buffer,) = pack([value]).buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), np.frombuffer(value, np.uint8))


def test_a_value_that_comes_twice_is_one_value_there():
    value = b"x" * _LARGE
    found, parcel = sent([value, {"again": value}])
    assert len(parcel.buffers) == 1
    assert found[0] is found[1]["again"]


def anything(chance, depth=0):
    """Return an object of large and small values in any order."""
    size = chance.choice([0, 3, 1 << 16, _LARGE, _LARGE + chance.randrange(999)])
    makers = [
        lambda: chance.randbytes(size),
        lambda: bytearray(chance.randbytes(size)),
        lambda: chance.choice("aé") * size,
        lambda: np.frombuffer(chance.randbytes(size), np.uint8),
        lambda: list(range(chance.choice([2, 40_000]))),
        lambda: [anything(chance, depth + 1) for _ in range(chance.randrange(5))],
        lambda: {str(i): anything(chance, depth + 1) for i in range(chance.randrange(5))},
    ]
    return chance.choice(makers[: None if depth < 3 else 5])()


def equal(one, other):
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return [*one] == [*other] and all(map(equal, one.values(), other.values()))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("seed", range(40))
def test_large_and_small_values_come_in_their_order(seed):
    value = anything(random.Random(seed))
    found, _ = sent(value)
    assert equal(found, value)


def test_what_only_cloudpickle_takes_may_hold_large_values():
    pytest.importorskip("cloudpickle")
    value = b"x" * _LARGE
    found, parcel = sent((lambda: value, np.zeros(_LARGE)))
    assert found[0]() == value
    assert len(parcel.buffers) == 2
