from __future__ import annotations

import copy
import pickle
import typing

import pytest

from hpcdist import named_tuple


class Typed(typing.NamedTuple):
    """A pair."""

    left: int
    right: list[int] | None = None

    def total(self):
        return self.left + sum(self.right or ())


class Ours(named_tuple.NamedTuple):
    """A pair."""

    left: int
    right: list[int] | None = None

    def total(self):
        return self.left + sum(self.right or ())


class Further(Ours):
    kept: typing.ClassVar[int] = 3


USES = {
    "made by place": lambda cls: tuple(cls(1, [2])),
    "made by name": lambda cls: tuple(cls(right=[2], left=1)),
    "a default": lambda cls: cls(1).right,
    "too few": lambda cls: cls(),
    "too many": lambda cls: cls(1, 2, 3),
    "unknown": lambda cls: cls(1, wrong=2),
    "a method": lambda cls: cls(1, [2]).total(),
    "printed": lambda cls: repr(cls(1, [2])).partition("(")[2],
    "unpacked": lambda cls: [*cls(1, [2])],
    "equal to a tuple": lambda cls: cls(1, [2]) == (1, [2]),
    "hashed": lambda cls: hash(cls(1)),
    "sorted": lambda cls: tuple(min(cls(2), cls(1))),
    "fields": lambda cls: (cls._fields, cls._field_defaults, cls.__match_args__),
    "annotations": lambda cls: typing.get_type_hints(cls),
    "documented": lambda cls: cls.__doc__,
    "made of a sequence": lambda cls: tuple(cls._make([1, None])),
    "of too short a sequence": lambda cls: cls._make([1]),
    "as a dictionary": lambda cls: cls(1, [2])._asdict(),
    "replaced": lambda cls: tuple(cls(1, [2])._replace(left=3)),
    "written to": lambda cls: setattr(cls(1), "left", 2),
    "given a name more": lambda cls: setattr(cls(1), "more", 2),
    "copied": lambda cls: copy.deepcopy(cls(1, [2])).right,
    "pickled": lambda cls: [
        type(pickle.loads(pickle.dumps(cls(1, [2]), protocol))) is cls for protocol in range(6)
    ],
}


def outcome(use, cls):
    try:
        return use(cls)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_does_what_typings_does(use):
    assert outcome(use, Ours) == outcome(use, Typed)


def test_a_class_derived_from_one_has_its_fields_and_what_it_adds():
    made = Further(1, right=[2])
    assert (made.left, made.right, made.kept, Further._fields) == (1, [2], 3, Ours._fields)
    assert type(made._replace(left=2)) is Further
    match made:
        case Further(left, [right]):
            assert (left, right) == (1, 2)


class Checked(Ours):
    def __new__(cls, left, right=None):
        return super().__new__(cls, abs(left), right)


def test_a_class_derived_from_one_may_look_at_what_it_is_made_of():
    assert [Checked(number).left for number in (-1, -2, 3)] == [1, 2, 3]


class Odd(named_tuple.NamedTuple):
    cls: int
    new: int
    self: int = 3


class Empty(named_tuple.NamedTuple):
    """No fields."""


def test_fields_may_have_any_name_and_there_may_be_none():
    assert tuple(Odd(cls=1, new=2)) == tuple(Odd(1, 2)) == (1, 2, 3)
    assert tuple(Odd(1, 2)._replace(cls=4, self=5)) == (4, 2, 5)
    assert (Empty(), repr(Empty())) == ((), "Empty()")


def test_a_field_that_there_is_not_cannot_be_replaced():
    with pytest.raises(TypeError, match="Ours has no field wrong"):
        Ours(1)._replace(wrong=2)


def test_wrong_arguments_are_those_of_the_class():
    for _ in range(2):
        with pytest.raises(TypeError, match=r"Ours.__new__\(\) missing"):
            Ours()


def test_where_annotations_are_no_text_it_says_what_to_do():
    with pytest.raises(TypeError, match="from __future__ import annotations"):
        type(Ours)("Bare", (named_tuple.NamedTuple,), {"__annotate_func__": None})
