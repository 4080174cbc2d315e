"""An array of a subclass of NumPy's stays what it was, and masked arrays never lose their mask."""

import numpy as np
import pytest

import hpcdist as dist

pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
RANKS = 2


class Metres(np.ndarray):
    """An array with an attribute, as NumPy's guide to subclasses makes them."""

    def __array_finalize__(self, given):
        self.unit = getattr(given, "unit", "none")


def metres():
    array = np.arange(4.0).reshape(2, 2).view(Metres)
    array.unit = "m"
    return array


def matrix():
    return np.matrix([[1.0, 2.0], [3.0, 4.0]])


def records():
    return np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])


def scattered():
    return np.matrix(np.arange(8.0).reshape(2, 4))[:, ::2]


def on_file(folder):
    return np.memmap(folder / "array", np.float64, "w+", shape=(2, 2))


MADE = {"metres": metres, "matrix": matrix, "records": records, "scattered": scattered}


def into_lists(array):
    """Return what is appended to empty lists."""
    gathered, sent, at_root = [], [], []
    dist.all_gather(gathered, array)
    dist.alltoall(sent, [array] * RANKS)
    dist.gather(array, at_root if dist.get_rank() == 0 else None, dst=0)
    return gathered + sent + at_root


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_new_arrays_in_a_list_are_what_the_callers_array_is(make):
    for found in dist.simulate(RANKS, lambda: into_lists(make())):
        for each in found:
            assert type(each) is type(make())
            assert each.shape == make().shape
            assert getattr(each, "unit", None) == getattr(make(), "unit", None)
            assert (each == make()).all()


def test_what_is_not_in_a_file_is_no_memmap(tmp_path):
    (found,) = dist.simulate(1, lambda: all_gathered(on_file(tmp_path)))
    assert [type(each) for each in found] == [np.ndarray]


def all_gathered(array):
    gathered = []
    dist.all_gather(gathered, array)
    return gathered


@pytest.mark.parametrize("make", [metres, matrix, scattered])
def test_results_are_written_in_the_callers_object(make):
    def check():
        array, other = make(), make()
        dist.all_reduce(array)
        dist.broadcast(other, src=0)
        dist.average_gradients([other])
        return array, other

    for array, other in dist.simulate(RANKS, check):
        assert type(array) is type(other) is type(make())
        assert (np.asarray(array) == RANKS * np.asarray(make())).all()
        assert (np.asarray(other) == np.asarray(make())).all()


@pytest.mark.parametrize("make", [metres, matrix])
def test_a_parameter_stays_what_it_was(make):
    parameter = dist.Parameter(make())
    new = 2 * np.asarray(make())
    parameter.data = new
    assert type(parameter.data) is type(make())
    assert getattr(parameter.data, "unit", None) == getattr(make(), "unit", None)
    assert np.shares_memory(parameter.data, new)
    assert (np.asarray(parameter.data) == new).all()


@pytest.mark.parametrize("kind", ["metres", "matrix", "memmap"])
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_sharded_training_changes_a_parameter_of_any_kind(kind, level, tmp_path):
    def train():
        folder = tmp_path / f"{dist.get_rank()}"
        folder.mkdir(exist_ok=True)
        array = on_file(folder) if kind == "memmap" else MADE[kind]()
        array[...] = 1

        class Model:
            def __init__(self):
                self.w = dist.Parameter(array)

            def named_parameters(self):
                return [("w", self.w)]

            def __call__(self):
                return self.w.data

        line = Model()
        optimizer = dist.optim.SGD(line.named_parameters(), learning_rate=0.5)
        model, optimizer, _ = dist.group_sharded_parallel(line, optimizer, level)
        for _ in range(2):
            model()
            line.w.grad = np.ones((2, 2))
            optimizer.step()
        return np.array(model())

    for weights in dist.simulate(RANKS, train):
        assert (weights == 0).all()


def test_a_masked_array_is_refused_or_keeps_its_mask():
    def check():
        array = np.ma.array([1.0, 2.0], mask=[False, True])
        with pytest.raises(dist.UsageError, match="would lose its mask"):
            dist.all_reduce(array)
        with pytest.raises(dist.UsageError, match="would lose its mask"):
            all_gathered(array)
        with pytest.raises(dist.UsageError, match="would lose its mask"):
            dist.Parameter(array)
        objects = [array]
        dist.broadcast_object_list(objects, src=0)
        (batch,) = dist.shard_dataset(np.ma.array([array, array]), shuffle=False).batches(1)
        return objects[0], batch

    for sent, batch in dist.simulate(RANKS, check):
        assert sent.mask.tolist() == [False, True]
        assert batch.mask.tolist() == [[False, True]]
