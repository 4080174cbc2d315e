"""What is called and returned: large values travel beside the pickle, of whatever kind they are."""

import copyreg
import pickle
import random

import numpy as np
import pytest

from hpcdist.comm.pieces import LARGE_NBYTES as _LARGE, pack_object
from hpcdist.rpc.frames import Parcel
from hpcdist.rpc.pickling import pack, unpack

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


VIEWS = {
    "bytes": lambda: memoryview(b"x" * _LARGE),
    "writable": lambda: memoryview(bytearray(_LARGE)),
    "small": lambda: memoryview(b"xyz"),
    "none": lambda: memoryview(b""),
    "integers": lambda: memoryview(bytearray(_LARGE)).cast("i"),
    "letters": lambda: memoryview(b"xyz").cast("c"),
    "table": lambda: memoryview(np.arange(60_000.0).reshape(200, 300)),
    "every other row": lambda: memoryview(np.arange(60_000.0).reshape(200, 300))[::2],
    "transposed": lambda: memoryview(np.arange(60_000.0).reshape(200, 300).T),
    "empty table": lambda: memoryview(np.zeros((0, 3), np.int16)),
    "scalar": lambda: memoryview(np.float32(3)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_is_a_view_of_the_same_there(kind):
    view = VIEWS[kind]()
    found, parcel = sent({"view": view})
    got = found["view"]
    assert type(got) is memoryview
    assert (got.format, got.shape, got.tolist()) == (view.format, view.shape, view.tolist())
    assert len(parcel.buffers) == (view.nbytes >= _LARGE)


def test_nothing_of_a_large_view_is_copied_by_the_sender():
    value = bytearray(_LARGE)
    (buffer,) = pack([memoryview(value)]).buffers
    assert np.shares_memory(np.frombuffer(buffer, np.uint8), np.frombuffer(value, np.uint8))


def test_a_view_of_structures_is_refused_with_the_way_out():
    view = memoryview(np.zeros(3, [("a", "i4"), ("b", "f8")]))
    with pytest.raises(pickle.PicklingError, match=r"send an array, or view\.tobytes\(\)"):
        pack_object(view)


class Late:
    """Comes to be pickled in its own way after others have been pickled."""

    def __init__(self, way="usual"):
        self.way = way


def test_ways_to_pickle_that_come_later_are_heeded():
    assert sent(Late())[0].way == "usual"
    copyreg.pickle(Late, lambda _: (Late, ("own",)))
    try:
        assert sent(Late())[0].way == "own"
    finally:
        del copyreg.dispatch_table[Late]


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
