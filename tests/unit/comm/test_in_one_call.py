"""Public functions that are tried in one compiled call look and act like the functions they are."""

import copy
import inspect
import pickle
import weakref

import pytest

import hpcdist as dist
from hpcdist.comm.hot import MESSAGES, OBJECT_VERBS, VERBS

NAMES = [*VERBS, *OBJECT_VERBS, *MESSAGES]


@pytest.fixture(params=NAMES)
def verb(request):
    return getattr(dist, request.param)


def plain(verb):
    return inspect.unwrap(verb)


def test_it_has_the_signature_and_the_words_of_the_function(verb):
    assert inspect.signature(verb) == inspect.signature(plain(verb))
    assert verb.__doc__ == plain(verb).__doc__
    assert verb.__annotations__ == plain(verb).__annotations__
    assert verb.__name__ in repr(verb)
    assert inspect.isroutine(verb)


def test_it_is_pickled_and_copied_by_its_name(verb):
    assert pickle.loads(pickle.dumps(verb)) is verb
    assert copy.deepcopy(verb) is verb
    assert weakref.ref(verb)() is verb


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"no_such": 1}),
        ((1,) * 12, {}),
        ((1,), {"tensor": 1, "obj": 1, "object_list": 1, "group": 1, "tensor_list": 1, "of": 2}),
    ],
)
def test_wrong_arguments_are_refused_in_the_functions_words(verb, args, kwargs):
    with pytest.raises(TypeError) as expected:
        plain(verb)(*args, **kwargs)
    with pytest.raises(TypeError, match=verb.__name__) as raised:
        verb(*args, **kwargs)
    assert str(raised.value) == str(expected.value)


def test_in_a_class_it_is_a_method():
    class Model:
        reduce = dist.all_reduce

    assert Model.reduce is dist.all_reduce
    assert Model().reduce.__self__.__class__ is Model
