"""What autograd has computed, given to operations that autograd does not see."""

import warnings

import numpy as np
import pytest

import hpcdist as dist

torch = pytest.importorskip("torch")

GIVEN = {
    "all_reduce": dist.all_reduce,
    "broadcast": lambda y: dist.broadcast(y, 0),
    "all_gather": lambda y: dist.all_gather([], y),
    "alltoall_single": lambda y: dist.alltoall_single(torch.empty(4), y),
    "isend": lambda y: (dist.isend(y, 0), dist.recv(np.empty(4, np.float32), 0)),
    "stream.all_reduce": lambda y: dist.stream.all_reduce(y),
}


@pytest.fixture(autouse=True)
def world():
    yield dist.init_parallel_env()
    dist.destroy_process_group()


def computed():
    return torch.ones(4, requires_grad=True) * 2


@pytest.mark.parametrize("verb", GIVEN)
def test_a_tensor_in_a_graph_is_a_warning_with_the_remedy_and_the_line(verb):
    with pytest.warns(RuntimeWarning, match=r"wrong gradients.*tensor\.detach.*functions") as told:
        GIVEN[verb](computed())
    assert {each.filename for each in told} == {__file__}


@pytest.mark.parametrize("verb", GIVEN)
@pytest.mark.parametrize(
    "harmless",
    [
        lambda: torch.ones(4),
        lambda: torch.ones(4, requires_grad=True),
        lambda: computed().detach(),
        lambda: torch.nn.Parameter(torch.ones(4)).data,
    ],
)
def test_a_tensor_in_no_graph_is_none(verb, harmless):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GIVEN[verb](harmless())
        with torch.no_grad():
            GIVEN[verb](computed())


def test_the_differentiable_functions_that_it_names_give_right_gradients(world):
    from hpcdist.torch.model_parallel.functions import reduce_from

    x = torch.ones(4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reduce_from(x * 3, world).sum().backward()
    assert (x.grad == 3).all()
