"""Parameters on their own: data, gradients, and what is refused."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import hpcdist as dist
from hpcdist.parallel.parameter import Parameter


@pytest.fixture(params=["numpy", "torch", "jax.numpy"])
def data(request):
    """Give [1, 2, 3] as an array of each library that is installed."""
    library = pytest.importorskip(request.param)
    return library.linspace(1, 3, 3, dtype=library.float32)


def test_a_parameter_keeps_the_array_itself(data):
    p = dist.Parameter(data)
    assert p.data is data
    assert p.shape == (3,)
    assert p.dtype == data.dtype
    assert p.grad is None
    np.testing.assert_array_equal(np.asarray(p), [1, 2, 3])


def test_gradients_are_of_the_library_of_the_data(data):
    p = dist.Parameter(data)
    p.grad = data * 2
    assert type(p.grad) is type(data)
    np.testing.assert_array_equal(np.asarray(p.grad), [2, 4, 6])


def test_gradients_may_come_from_another_library(data):
    p = dist.Parameter(data)
    p.grad = np.array([4, 5, 6], "f4")
    p.accumulate(np.ones(3, "f4"))
    np.testing.assert_array_equal(np.asarray(p.grad), [5, 6, 7])


def test_gradients_can_be_added_in_place(data):
    p = dist.Parameter(data)
    p.grad = data * 2
    p.grad += data
    p.accumulate(p.grad)
    np.testing.assert_array_equal(np.asarray(p.grad), [6, 12, 18])


def test_a_step_of_an_optimizer_reads_naturally(data):
    p = dist.Parameter(data)
    p.grad = data * 2
    p.data -= 0.5 * p.grad
    assert type(p.data) is type(data)
    np.testing.assert_array_equal(np.asarray(p.data), [0, 0, 0])


def test_assigning_copies_into_memory_that_stays():
    p = dist.Parameter(np.zeros(3))
    given = np.ones(3)
    p.grad = given
    shown = p.grad
    given[:] = 7
    assert list(shown) == [1, 1, 1]
    p.grad = None
    assert p.grad is None
    p.accumulate(given)
    assert p.grad is shown
    assert list(shown) == [7, 7, 7]
    p.grad[...] *= 2
    assert list(shown) == [14, 14, 14]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 2)])
@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "f8", "c8", "c16"])
def test_parameters_of_any_shape_and_floating_dtype_take_gradients(shape, dtype):
    p = dist.Parameter(np.zeros(shape, dtype))
    p.grad = np.ones(shape, dtype)
    p.accumulate(np.ones((*shape, 2), dtype)[..., 0])
    assert p.grad.shape == shape
    assert p.grad.dtype == dtype
    assert (p.grad == 2).all()


def test_data_is_replaced_by_an_array_like_it(data):
    p = dist.Parameter(data)
    p.data = data + 1
    p.data = np.array([5, 6, 7], "f4")
    assert type(p.data) is type(data)
    np.testing.assert_array_equal(np.asarray(p.data), [5, 6, 7])


def test_a_parameter_prints_what_it_is():
    p = dist.Parameter(np.array([1.0, 2.5]), requires_grad=False)
    p.name = "w"
    assert repr(p) == "Parameter([1. , 2.5], name='w', requires_grad=False)"


def test_copies_and_pickles_are_free_of_the_model_and_have_no_gradient():
    def one_rank():
        p = dist.Parameter(np.ones(3))

        class Model:
            def named_parameters(self):
                return [("w", p)]

        model = dist.DataParallel(Model())
        p.grad = np.ones(3)
        assert model.group.nranks == 1
        for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
            assert other.is_free()
            assert not p.is_free()
            assert (other.name, other.grad) == ("w", None)
            other.data[:] = 5
            other.grad = np.zeros(3)
        assert list(p.data) == list(p.grad) == [1, 1, 1]

    dist.simulate(1, one_rank)


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (np.ones(4), r"'w' is float64 of shape \(3,\), but its gradient has dtype float64 and "),
        (np.ones(3, "f4"), "'w' is float64 .* has dtype float32"),
        (np.ones((1, 3)), r"has dtype float64 and shape \(1, 3\)"),
        (1.5, "the gradient of parameter 'w': a float is not an array"),
        ([1.0, 2.0, 3.0], "the gradient of parameter 'w': a list is not an array"),
    ],
)
def test_a_gradient_unlike_the_data_is_refused(gradient, words):
    p = dist.Parameter(np.zeros(3))
    p.name = "w"
    with pytest.raises(dist.UsageError, match=words):
        p.grad = gradient
    with pytest.raises(dist.UsageError, match=words):
        p.accumulate(gradient)
    assert p.grad is None


def test_data_unlike_the_data_is_refused():
    p = dist.Parameter(np.zeros(3))
    for wrong in (np.zeros(4), np.zeros(3, "f4")):
        with pytest.raises(dist.UsageError, match=r"a parameter is float64 of shape \(3,\), but"):
            p.data = wrong
    with pytest.raises(dist.UsageError, match="a float is not an array"):
        p.data = 1.0


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(dist.UsageError, match=r"dtype int64 cannot be trained.*requires_grad=Fal"):
        Parameter(np.arange(3))
    with pytest.raises(dist.UsageError, match="a list is not an array"):
        Parameter([1.0])
    frozen = Parameter(np.arange(3), requires_grad=False)
    with pytest.raises(dist.UsageError, match="takes no gradient; make it with requires_grad=Tr"):
        frozen.grad = np.arange(3)
