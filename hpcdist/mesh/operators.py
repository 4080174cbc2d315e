"""Operators and methods of `DistArray`, put into the class by `install`.

Where both operands have the same layout an operator is one call of NumPy and one new DistArray.

[Note: temporaries] NumPy computes ``(a * 2 + b) * a`` in the memory of its temporaries, because it
sees that nobody else has them. Inside a DistArray it cannot see that, so operators look for
themselves: an operand that only the expression knows has fewer references than one with a name.
How many that are is measured when this module is imported; where there is no difference, as
from Python 3.14 on, every result is new memory. So it is if the operand is not what the expression
has just computed: C code that calls an operator need not count the references it has.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from hpcdist.mesh import flat, stencil
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import Layout
from hpcdist.mesh.policy import whole_of
from hpcdist.mesh.protocols import array_function, array_ufunc
from hpcdist.mesh.rules import index, pointwise, products, reductions, shapes
from hpcdist.mesh.rules.floating import checked, raises_errors
from hpcdist.mesh.rules.table import METHODS, NAMES

_ndarray = np.ndarray
_new = object.__new__
_frame = sys._getframe
_references = sys.getrefcount

LARGE = 1 << 18
"""Bytes from which on the memory of a temporary is used again, as NumPy does."""


# ---- who knows an operand


class _Probe:
    """Tells how many references its operators see."""

    __slots__ = ("part",)

    def __init__(self) -> None:
        self.part = object()

    def __add__(self, other: Any) -> Any:
        part = self.part
        return _references(self), _references(other), _references(part)


def _measured() -> tuple[int, int, int]:
    """Return how many references an operand without a name has: left, right, and its part.

    Zeros, which nothing has, where operands with a name have no more.
    """
    left, right = _Probe(), _Probe()
    held = [_Probe()]
    without: tuple[int, int, int] = _Probe() + _Probe()
    named = left + right, held[0] + held[0]
    kept = left.part
    part = (_Probe() + _Probe())[2]
    if all(each[side] > without[side] for each in named for side in (0, 1)) and (
        (left + right)[2] > part
    ):
        del kept
        return without
    return 0, 0, 0


LEFT, RIGHT, PART = _measured()
_OPERATORS = frozenset(
    name
    for name in dis.opmap
    if name.startswith("BINARY_") and name not in ("BINARY_SUBSCR", "BINARY_SLICE")
)
_FILLERS = ("CACHE", "EXTENDED_ARG", "NOP")


def _made_here(frame: Any, left: bool) -> bool:
    """Return whether a frame is at an operator, and has just computed this operand of it."""
    return _computes(frame.f_code, frame.f_lasti, left)


@lru_cache(maxsize=4096)
def _computes(code: CodeType, at: int, left: bool) -> bool:
    """Return whether the instruction at an offset is an operator of what others have computed.

    What they have loaded from somewhere else is of that place, even if nobody counts it: the items
    of an array of objects, to which NumPy applies operators one by one.
    """
    before = [
        each
        for each in dis.get_instructions(code)
        if each.offset <= at and each.opname not in _FILLERS
    ]
    last = len(before) - 1
    if before[last].opname not in _OPERATORS:
        return False
    place, missing = last - 1, 1 if left else 0
    while missing > 0:  # go back over what computes the right operand
        each = before[place]
        if each.is_jump_target or each.opcode in _JUMPS:
            return False
        missing -= dis.stack_effect(each.opcode, each.arg)
        place -= 1
    each = before[place]
    return each.opname in _OPERATORS or each.opname.startswith(("CALL", "UNARY_"))


_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


def _fits(part: Any, other: Any) -> bool:
    """Return whether the result of an operation on `part` and `other` is like `part`."""
    return (
        part.__class__ is _ndarray
        and part.dtype.kind in "fc"
        and part.base is None
        and part.flags.writeable
        and (other.__class__ is float or part.dtype == getattr(other, "dtype", None))
    )


# ---- operators of two operands


def _arithmetic(op: Callable[..., Any], ufunc: Any) -> tuple[Any, Any]:
    """Return an operator and its reflection; they use the memory of temporaries again."""
    on_all = checked(pointwise.pointwise, ufunc.__name__)

    def forward(a: Any, b: Any) -> Any:
        if raises_errors():
            return on_all(ufunc, a, b) if _is_known(b) else NotImplemented
        layout = a.layout
        x = a.local
        if b.__class__ is DistArray:
            if b.layout is not layout or layout.is_partial:
                return pointwise.pointwise(ufunc, a, b)
            y = b.local
            if x.nbytes >= LARGE:
                if (
                    _references(a) == LEFT
                    and _references(x) == PART
                    and _fits(x, y)
                    and _made_here(_frame(1), True)
                ):
                    return _wrapped(ufunc(x, y, out=x), layout)
                if (
                    _references(b) == RIGHT
                    and _references(y) == PART
                    and _fits(y, x)
                    and _made_here(_frame(1), False)
                ):
                    return _wrapped(ufunc(x, y, out=y), layout)
            part = op(x, y)
        elif (b.__class__ is float or b.__class__ is int) and not layout.is_partial:
            if (
                x.nbytes >= LARGE
                and _references(a) == LEFT
                and _references(x) == PART
                and _fits(x, 0.0)
                and _made_here(_frame(1), True)
            ):
                return _wrapped(ufunc(x, b, out=x), layout)
            part = op(x, b)
        else:
            return pointwise.pointwise(ufunc, a, b) if _is_known(b) else NotImplemented
        if part.__class__ is not _ndarray:
            if not isinstance(part, np.generic):
                return pointwise.pointwise(ufunc, a, b)
            part = np.asarray(part)
        made = _new(DistArray)
        made.local = part
        made.layout = layout
        return made

    def reflected(a: Any, b: Any) -> Any:
        if raises_errors():
            return on_all(ufunc, b, a) if _is_known(b) else NotImplemented
        layout = a.layout
        x = a.local
        if (b.__class__ is float or b.__class__ is int) and not layout.is_partial:
            if (
                x.nbytes >= LARGE
                and _references(a) == LEFT
                and _references(x) == PART
                and _fits(x, 0.0)
                and _made_here(_frame(1), False)
            ):
                return _wrapped(ufunc(b, x, out=x), layout)
            part = op(b, x)
            if part.__class__ is _ndarray:
                return _wrapped(part, layout)
        return pointwise.pointwise(ufunc, b, a) if _is_known(b) else NotImplemented

    return forward, reflected


def _other(
    op: Callable[..., Any], ufunc: Any, takes: Callable[[Any], bool] | None = None
) -> tuple[Any, Any]:
    """Return an operator whose result is not like its operands, and its reflection.

    `takes` tells which other operands there are; `_is_known` by default.
    """
    takes = takes or _is_known
    on_all = checked(pointwise.pointwise, ufunc.__name__)

    def forward(a: Any, b: Any) -> Any:
        layout = a.layout
        if not raises_errors() and not layout.is_partial:
            part: Any = None
            if b.__class__ is DistArray:
                if b.layout is layout:
                    part = op(a.local, b.local)
            elif b.__class__ is float or b.__class__ is int:
                part = op(a.local, b)
            if isinstance(part, (_ndarray, np.generic)):
                return _wrapped(np.asarray(part), layout)
        return on_all(ufunc, a, b) if takes(b) else NotImplemented

    def reflected(a: Any, b: Any) -> Any:
        return on_all(ufunc, b, a) if takes(b) else NotImplemented

    return forward, reflected


def _in_place(ufunc: Any) -> Any:
    on_all = checked(pointwise.into, ufunc.__name__)

    def assign(a: Any, b: Any) -> Any:
        layout = a.layout
        if b.__class__ is DistArray and b.layout is layout and not layout.is_partial:
            part = a.local
            if not raises_errors() and (part.__class__ is not _ndarray or part.flags.writeable):
                ufunc(part, b.local, out=part)
                return a
        if not _is_known(b):
            return NotImplemented
        return on_all(ufunc, (a, b), _own(a, _frame(1)), {})

    return assign


def _own(a: DistArray, frame: Any) -> DistArray:
    """Return where an operator in place writes: a copy, if it is stored where `a` was taken of.

    In ``a[0] += 1`` Python takes ``a[0]``, adds to it, and assigns it to ``a[0]``.
    """
    part = a.local
    if part.__class__ is not _ndarray or part.flags.writeable:
        return a
    return _wrapped(part.copy(), a.layout) if _stores(frame.f_code, frame.f_lasti) else a


@lru_cache(maxsize=4096)
def _stores(code: CodeType, at: int) -> bool:
    """Return whether the result of the instruction at an offset is assigned to an index."""
    after = (each.opname for each in dis.get_instructions(code) if each.offset > at)
    passed = ("SWAP", "ROT_", *_FILLERS)
    return next((name for name in after if not name.startswith(passed)), "").startswith("STORE_S")


def _power() -> tuple[Any, Any, Any]:
    """Return the operators of powers: of integers only some elements may be refused."""
    (forward, reflected), in_place = _other(operator.pow, np.power), _in_place(np.power)
    on_all, into = checked(pointwise.pointwise, "power"), checked(pointwise.into, "power")

    def power(a: Any, b: Any) -> Any:
        if a.local.dtype.kind in "fc" or b.__class__ is float or (b.__class__ is int and b >= 0):
            return forward(a, b)
        return on_all(np.power, a, b) if _is_known(b) else NotImplemented

    def assign(a: Any, b: Any) -> Any:
        a = _own(a, _frame(1))
        if a.local.dtype.kind in "fc":
            return in_place(a, b)
        return into(np.power, (a, b), a, {}) if _is_known(b) else NotImplemented

    return power, reflected, assign


def _wrapped(part: Any, layout: Layout) -> DistArray:
    made = _new(DistArray)
    made.local = part
    made.layout = layout
    return made


_KNOWN = (DistArray, np.ndarray, np.generic, int, float, complex, list, tuple)


def _is_known(value: Any) -> bool:
    """Return whether NumPy makes an array of this operand whose elements are no Python objects."""
    if isinstance(value, _KNOWN):
        return True
    return _may_compare(value) and (
        hasattr(value, "__array__") or np.asarray(value).dtype.kind != "O"
    )


def _may_compare(value: Any) -> bool:
    """Return whether this operand leaves operators to arrays, as NumPy asks it.

    Where `==` returned `NotImplemented`, Python would compare identities, and say False.
    """
    return getattr(value, "__array_ufunc__", 0) is not None


ARITHMETIC: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
}
OTHERS: dict[str, Any] = {
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
UNARY: dict[str, Any] = {
    "neg": np.negative,
    "pos": np.positive,
    "invert": np.invert,
    "abs": np.absolute,
}


def _matmul(a: Any, b: Any) -> Any:
    return products.matmul(a, b) if _is_known(b) else NotImplemented


def _rmatmul(a: Any, b: Any) -> Any:
    return products.matmul(b, a) if _is_known(b) else NotImplemented


def _imatmul(a: Any, b: Any) -> Any:
    return products.matmul(a, b, out=_own(a, _frame(1))) if _is_known(b) else NotImplemented


def _divmod(a: Any, b: Any) -> Any:
    return array_ufunc(a, np.divmod, "__call__", a, b) if _is_known(b) else NotImplemented


def _rdivmod(a: Any, b: Any) -> Any:
    return array_ufunc(a, np.divmod, "__call__", b, a) if _is_known(b) else NotImplemented


def _unary(ufunc: Any) -> Any:
    return lambda a: array_ufunc(a, ufunc, "__call__", a)


# ---- methods that are not functions of the table as they are


def _reshape(a: DistArray, *shape: Any, order: str = "C", copy: bool | None = None) -> Any:
    """Return the elements, in C order, in another shape.

    Args:
        a: the array.
        shape: the lengths, one by one or in a tuple; one of them may be -1.
        order: "C".
        copy: False: raise `ValueError` where elements would have to be copied or moved.

    """
    wanted = shape[0] if len(shape) == 1 else shape
    return NAMES["reshape"](a, wanted, order, copy=copy)


def _transpose(a: DistArray, *axes: Any) -> Any:
    """Return the array with its dimensions in another order.

    Args:
        a: the array.
        axes: the dimensions in their new order, one by one or in a tuple; none for the reverse.

    """
    given = axes[0] if len(axes) == 1 and not hasattr(axes[0], "__index__") else axes
    return shapes.permute_dims(a, given or None)


def _flatten(a: DistArray, order: str = "C") -> Any:
    """Return a copy of the elements, one after the other.

    Args:
        a: the array.
        order: "C".

    """
    return shapes.reshape(a, (-1,), order, copy=True)


def _ravel(a: DistArray, order: str = "C") -> Any:
    """Return the elements one after the other.

    Args:
        a: the array.
        order: "C".

    """
    return NAMES["ravel"](a, order)


def _conjugate(a: DistArray) -> Any:
    """Return the elements, complex ones conjugated."""
    return a if a.dtype.kind in "biuf" else array_ufunc(a, np.conjugate, "__call__", a)


def _fill(a: DistArray, value: Any) -> None:
    """Write one value to all elements.

    Args:
        a: the array.
        value: a number, converted to the array's dtype.

    """
    a[...] = value


def _tolist(a: DistArray) -> Any:
    """Return a replicated array as nested lists."""
    return np.asarray(a).tolist()


def _to_device(a: DistArray, device: Any, /, *, stream: Any = None) -> DistArray:
    """Return the array itself; a device other than its own is refused.

    Args:
        a: the array.
        device: the array's own; there is no way to another one.
        stream: None.

    """
    if device != a.device or stream is not None:
        raise ValueError(f"the array is on {a.device!r}; there is no way to {device!r}")
    return a


def _iterate(a: DistArray) -> Iterator[Any]:
    if not a.layout.shape:
        raise TypeError("iteration over a 0-d array")
    return (index.getitem(a, place) for place in range(a.layout.shape[0]))


def _contains(a: DistArray, value: Any) -> bool:
    return bool(reductions.any(pointwise.pointwise(operator.eq, a, value)))


def _namespace(a: DistArray, /, *, api_version: str | None = None) -> Any:
    """Return `hpcdist.array`."""
    from hpcdist.mesh import namespace

    if api_version not in (None, *namespace.API_VERSIONS):
        raise ValueError(
            f"api_version must be one of {namespace.API_VERSIONS}, got {api_version!r}"
        )
    return namespace


OWN: dict[str, Any] = {
    "__getitem__": index.getitem,
    "__setitem__": checked(index.setitem, "assignment"),
    "__iter__": _iterate,
    "__contains__": _contains,
    "__matmul__": _matmul,
    "__rmatmul__": _rmatmul,
    "__imatmul__": _imatmul,
    "__divmod__": _divmod,
    "__rdivmod__": _rdivmod,
    "__array_ufunc__": array_ufunc,
    "__array_function__": array_function,
    "__array_namespace__": _namespace,
    "_whole": whole_of,
    "reshape": _reshape,
    "transpose": _transpose,
    "flatten": _flatten,
    "ravel": _ravel,
    "conj": _conjugate,
    "conjugate": _conjugate,
    "fill": _fill,
    "item": flat.item,
    "flat": property(flat.flat_of, flat.write_flat),
    "tolist": _tolist,
    "to_device": _to_device,
    "halo": stencil.halo,
    "neighbour": stencil.neighbour,
    "T": property(lambda a: shapes.permute_dims(a)),
    "mT": property(shapes.matrix_transpose),
    "real": property(pointwise.real),
    "imag": property(pointwise.imag),
}


def install() -> None:
    """Put operators, protocols and methods into `DistArray`."""
    members = {**METHODS, **OWN}
    for name, ufunc in ARITHMETIC.items():
        op = getattr(operator, f"__{name}__")
        members[f"__{name}__"], members[f"__r{name}__"] = _arithmetic(op, ufunc)
        members[f"__i{name}__"] = _in_place(ufunc)
    for name, ufunc in OTHERS.items():
        op = getattr(operator, f"__{name}__")
        members[f"__{name}__"], members[f"__r{name}__"] = _other(op, ufunc)
        members[f"__i{name}__"] = _in_place(ufunc)
    members["__pow__"], members["__rpow__"], members["__ipow__"] = _power()
    for name in COMPARISONS:
        op = getattr(operator, f"__{name}__")  # which is not the ufunc for what cannot be compared
        members[f"__{name}__"] = _other(op, op, _may_compare)[0]
    for name, ufunc in UNARY.items():
        members[f"__{name}__"] = _unary(ufunc)
    for name, member in members.items():
        setattr(DistArray, name, member)


install()
