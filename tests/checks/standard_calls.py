"""Calls of functions of the array API standard, drawn by hypothesis.

A call names a function and its arguments; the same call is made of NumPy, which is an array API
namespace from 2.1 on, and of `hpcdist.array`. Numbers are small whole ones, so that sums and
products are exact in any order, but for functions of single elements, which get any.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

DTYPES = "? i1 i2 i4 i8 u1 u2 u4 u8 f4 f8 c8 c16"
KINDS = {char: tuple(name for name in DTYPES.split() if name[0] == char) for char in "?iufc"}
REAL, NUMBERS, ALL = "iuf", "iufc", "?iufc"


class Call(NamedTuple):
    """A function of the standard, and its arguments; the arrays among them are NumPy's."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None = None

    def of(self, xp: Any, put: Any) -> Any:
        """Return what a namespace makes of it, with each array put into that namespace."""
        function = xp
        for part in self.name.split("."):
            function = getattr(function, part)
        return function(*mapped(self.args, put), **mapped(self.kwargs or {}, put))


def mapped(tree: Any, put: Any) -> Any:
    if isinstance(tree, np.ndarray):
        return put(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([mapped(each, put) for each in tree])
    if isinstance(tree, dict):
        return {key: mapped(each, put) for key, each in tree.items()}
    return tree


# ---- numbers and shapes

draws = st.composite


@draws
def dtypes(draw, kinds):
    return np.dtype(draw(st.sampled_from([name for kind in kinds for name in KINDS[kind]])))


@draws
def promoted(draw, kinds):
    """Return two dtypes that the standard promotes to one."""
    one = draw(dtypes(kinds))
    mixed = [
        np.dtype(name)
        for kind in kinds
        for name in KINDS[kind]
        if (kind in "iu") == (one.kind in "iu") and (kind == "?") == (one.kind == "b")
        if np.result_type(name, one).kind in "biu" or one.kind in "fc"
    ]
    return one, draw(st.sampled_from(mixed))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, np.inf, -np.inf, np.nan]


def elements(dtype, special=False):
    if dtype.kind == "b":
        return st.booleans()
    if dtype.kind in "iu":
        low = 0 if dtype.kind == "u" else -4
        limits = np.iinfo(dtype)
        return st.integers(limits.min, limits.max) if special else st.integers(low, 4)
    if dtype.kind == "f":
        return st.sampled_from(SPECIAL) if special else st.integers(-4, 4).map(float)
    return st.builds(complex, *[elements(np.dtype("f8"), special)] * 2)


def shapes(min_dims=0, max_dims=3, min_side=0, max_side=5):
    return hnp.array_shapes(
        min_dims=min_dims, max_dims=max_dims, min_side=min_side, max_side=max_side
    )


@draws
def arrays(draw, kinds=ALL, shape=None, special=False, **sides):
    dtype = kinds if isinstance(kinds, np.dtype) else draw(dtypes(kinds))
    shape = draw(shapes(**sides)) if shape is None else shape
    size = int(np.prod(shape))
    given = draw(st.lists(elements(dtype, special), min_size=size, max_size=size))
    return np.array(given, dtype).reshape(shape)


def axes_of(x, several=True):
    one = st.none() | st.integers(-x.ndim, x.ndim - 1) if x.ndim else st.none()
    return one | hnp.valid_tuple_axes(x.ndim) if several else one


def axis_of(x):
    return st.integers(-x.ndim, x.ndim - 1)


@draws
def options(draw, **given):
    """Return some of these keyword arguments, with values drawn."""
    return {name: draw(value) for name, value in given.items() if draw(st.booleans())}


# ---- of single elements

UNARY = {
    "abs positive square sign": NUMBERS,
    "negative": "ifc",
    "acos acosh asin asinh atan atanh cos cosh exp expm1 log log1p log2 log10": "fc",
    "sin sinh sqrt tan tanh reciprocal real imag": "fc",
    "ceil floor trunc": REAL,
    "round conj isfinite isinf isnan": NUMBERS,
    "signbit": "f",
    "logical_not": "?",
    "bitwise_invert": "?iu",
}
BINARY = {
    "add subtract multiply": NUMBERS,
    "divide": "fc",
    "pow": "f",
    "maximum minimum floor_divide remainder": REAL,
    "atan2 copysign hypot logaddexp nextafter": "f",
    "bitwise_and bitwise_or bitwise_xor": "?iu",
    "logical_and logical_or logical_xor": "?",
    "equal not_equal": ALL,
    "less less_equal greater greater_equal": REAL,
}


def names_of(table):
    return [(name, kinds) for names, kinds in table.items() for name in names.split()]


@draws
def unary(draw):
    name, kinds = draw(st.sampled_from(names_of(UNARY)))
    return Call(name, (draw(arrays(kinds, special=True)),))


@draws
def binary(draw):
    name, kinds = draw(st.sampled_from(names_of(BINARY)))
    one, two = draw(promoted(kinds))
    a, b = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3)).input_shapes
    x, y = draw(arrays(one, a, special=True)), draw(arrays(two, b, special=True))
    if draw(st.integers(0, 3)) == 0:
        y = draw(elements(one)) if draw(st.booleans()) else y
    return Call(name, (x, y))


@draws
def shift(draw):
    one, two = draw(promoted("iu"))
    x = draw(arrays(one, special=True))
    y = np.abs(draw(arrays(two, x.shape)))
    return Call(draw(st.sampled_from(["bitwise_left_shift", "bitwise_right_shift"])), (x, y))


@draws
def clip(draw):
    x = draw(arrays(REAL))
    limits = [draw(arrays(x.dtype, shape)) for shape in ((), x.shape)]
    given = [draw(st.none() | st.just(each)) for each in limits]
    return Call("clip", (x, *given))


# ---- reductions


@draws
def summed(draw):
    x = draw(arrays(NUMBERS))
    kwargs = draw(options(axis=axes_of(x), keepdims=st.booleans()))
    if draw(st.booleans()):
        kwargs["dtype"] = draw(dtypes("c" if x.dtype.kind == "c" else "fc"))
    return Call(draw(st.sampled_from(["sum", "prod"])), (x,), kwargs)


@draws
def reduced(draw):
    name, kinds, least = draw(
        st.sampled_from(
            [
                ("max", REAL, 1),
                ("min", REAL, 1),
                ("mean", "fc", 1),
                ("any", ALL, 0),
                ("all", ALL, 0),
                ("count_nonzero", ALL, 0),
            ]
        )
    )
    x = draw(arrays(kinds, min_side=least))
    return Call(name, (x,), draw(options(axis=axes_of(x), keepdims=st.booleans())))


@draws
def spread(draw):
    x = draw(arrays("f", min_side=1))
    kwargs = draw(
        options(axis=axes_of(x), keepdims=st.booleans(), correction=st.sampled_from([0, 0.0, 0.5]))
    )
    return Call(draw(st.sampled_from(["std", "var"])), (x,), kwargs)


@draws
def located(draw):
    x = draw(arrays(REAL, min_dims=1, min_side=1, special=draw(st.booleans())))
    kwargs = draw(options(axis=axes_of(x, several=False), keepdims=st.booleans()))
    return Call(draw(st.sampled_from(["argmax", "argmin"])), (x,), kwargs)


@draws
def cumulative(draw):
    x = draw(arrays(NUMBERS, min_dims=1, min_side=1))
    kwargs = draw(options(include_initial=st.booleans()))
    if x.ndim > 1 or draw(st.booleans()):
        kwargs["axis"] = draw(axis_of(x))
    return Call(draw(st.sampled_from(["cumulative_sum", "cumulative_prod"])), (x,), kwargs)


@draws
def differences(draw):
    x = draw(arrays("if", min_dims=1))
    kwargs = draw(options(axis=axis_of(x), n=st.integers(0, 2)))
    for name in ("prepend", "append"):
        if draw(st.booleans()):
            shape = [*x.shape]
            shape[kwargs.get("axis", -1)] = draw(st.integers(0, 2))
            kwargs[name] = draw(arrays(x.dtype, tuple(shape)))
    return Call("diff", (x,), kwargs)


# ---- places


@draws
def moved(draw):
    x = draw(arrays(min_dims=1))
    name = draw(st.sampled_from(["flip", "roll", "permute_dims", "moveaxis", "squeeze", "tile"]))
    if name == "flip":
        return Call(name, (x,), draw(options(axis=axes_of(x))))
    if name == "roll":
        dims = draw(st.none() | axis_of(x) | hnp.valid_tuple_axes(x.ndim, min_size=1))
        steps = st.integers(-7, 7)
        count = len(dims) if isinstance(dims, tuple) else None
        by = draw(steps if count is None else st.tuples(*[steps] * count))
        return Call(name, (x, by), {"axis": dims} if dims is not None else {})
    if name == "permute_dims":
        return Call(name, (x, tuple(draw(st.permutations(range(x.ndim))))))
    if name == "moveaxis":
        return Call(name, (x, draw(axis_of(x)), draw(axis_of(x))))
    if name == "tile":
        return Call(name, (x, tuple(draw(st.lists(st.integers(0, 3), max_size=4)))))
    dims = tuple(dim for dim, length in enumerate(x.shape) if length == 1)
    return Call(name, (x, dims))


@draws
def reshaped(draw):
    x = draw(arrays())
    name = draw(st.sampled_from(["reshape", "expand_dims", "broadcast_to", "repeat", "unstack"]))
    if name == "reshape":
        shape = [*x.shape]
        if x.size and draw(st.booleans()):
            shape = draw(st.permutations(_factors(x.size)))
        if x.size and shape and draw(st.booleans()):
            shape[draw(st.integers(0, len(shape) - 1))] = -1
        return Call(name, (x, tuple(shape)), draw(options(copy=st.sampled_from([None, True]))))
    if name == "expand_dims":
        return Call(name, (x,), {"axis": draw(st.integers(-x.ndim - 1, x.ndim))})
    if name == "broadcast_to":
        wide = [draw(st.integers(0, 4)) if length == 1 else length for length in x.shape]
        return Call(name, (x, (*draw(shapes(max_dims=1)), *wide)))
    if name == "unstack" and x.ndim:
        return Call(name, (x,), draw(options(axis=axis_of(x))))
    if not x.ndim:
        x = x.reshape(1)
    axis = draw(axis_of(x))
    times = st.integers(0, 3)
    length = x.shape[axis]
    each = st.lists(times, min_size=length, max_size=length).map(lambda n: np.array(n, "i8"))
    return Call("repeat", (x, draw(times | each)), {"axis": axis})


def _factors(number):
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


@draws
def joined(draw):
    name = draw(st.sampled_from(["concat", "stack", "broadcast_arrays", "meshgrid"]))
    if name == "meshgrid":
        given = draw(st.lists(arrays("f", min_dims=1, max_dims=1), min_size=1, max_size=3))
        return Call(name, tuple(given), draw(options(indexing=st.sampled_from(["ij", "xy"]))))
    if name == "broadcast_arrays":
        found = draw(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3)).input_shapes
        return Call(name, tuple(draw(arrays(shape=shape)) for shape in found))
    x = draw(arrays(NUMBERS, min_dims=1))
    if name == "stack":
        others = [draw(arrays(x.dtype, x.shape)) for _ in range(draw(st.integers(0, 2)))]
        return Call(name, ([x, *others],), draw(options(axis=st.integers(-x.ndim - 1, x.ndim))))
    axis = draw(st.none() | axis_of(x))
    others = []
    for _ in range(draw(st.integers(0, 2))):
        shape = [*x.shape]
        shape[axis or 0] = draw(st.integers(0, 4))
        others.append(draw(arrays(x.dtype, tuple(shape))))
    return Call(name, ((x, *others),), {"axis": axis})


# ---- searching, sorting and sets


@draws
def searched(draw):
    name = draw(st.sampled_from(["nonzero", "where", "searchsorted", "isin"]))
    if name == "nonzero":
        return Call(name, (draw(arrays(min_dims=1)),))
    if name == "where":
        found = draw(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3)).input_shapes
        one, two = draw(promoted(draw(st.sampled_from(["?", "iu", "f", "c"]))))
        given = [draw(arrays(kind, shape)) for kind, shape in zip((one, two), found, strict=False)]
        return Call(name, (draw(arrays("?", found[2])), *given))
    table = draw(arrays("if", min_dims=1, max_dims=1, min_side=1, max_side=9))
    x = draw(arrays(table.dtype))
    if name == "isin":
        return Call(name, (x, table), draw(options(invert=st.booleans())))
    side = draw(options(side=st.sampled_from(["left", "right"])))
    if draw(st.booleans()):
        return Call(name, (table, x), {**side, "sorter": np.argsort(table)})
    return Call(name, (np.sort(table), x), side)


@draws
def taken(draw):
    x = draw(arrays(min_dims=1, min_side=1))
    axis = draw(axis_of(x))
    length = x.shape[axis]
    if draw(st.booleans()):
        shape = [*x.shape]
        shape[axis] = draw(st.integers(0, 4))
        index = draw(_indices(length, tuple(shape)))
        return Call("take_along_axis", (x, index), {"axis": axis})
    index = draw(_indices(length, draw(shapes(min_dims=1, max_dims=2))))
    return Call("take", (x, index), {"axis": axis})


def _indices(length, shape):
    size = int(np.prod(shape))
    each = st.integers(-length, length - 1)
    return st.lists(each, min_size=size, max_size=size).map(
        lambda n: np.array(n, "i8").reshape(shape)
    )


@draws
def sets(draw):
    name = draw(st.sampled_from(["values", "counts", "inverse", "all"]))
    kinds, special = draw(st.sampled_from([(ALL, False), (REAL, True)]))
    return Call(f"unique_{name}", (draw(arrays(kinds, special=special)),))


# ---- linear algebra


@draws
def products(draw):
    one, two = draw(promoted(NUMBERS))
    name = draw(st.sampled_from(["matmul", "vecdot", "tensordot", "linalg.outer", "linalg.matmul"]))
    k, m, n = (draw(st.integers(0, 4)) for _ in range(3))
    if name == "linalg.outer":
        return Call(name, (draw(arrays(one, (m,))), draw(arrays(two, (n,)))))
    if name == "tensordot":
        count = draw(st.integers(0, 2))
        shared = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        x, y = draw(arrays(one, (m, *shared))), draw(arrays(two, (*shared, n)))
        return Call(name, (x, y), {"axes": count})
    batch = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=2, max_side=3))
    a, b = batch.input_shapes
    if name == "vecdot":
        return Call(name, (draw(arrays(one, (*a, k))), draw(arrays(two, (*b, k)))))
    left, right = (*a, m, k), (*b, k, n)
    if draw(st.booleans()):
        left = (k,)
    elif draw(st.booleans()):
        right = (k,)
    return Call(name, (draw(arrays(one, left)), draw(arrays(two, right))))


@draws
def matrices(draw):
    name = draw(
        st.sampled_from(
            [
                "matrix_transpose",
                "linalg.diagonal",
                "linalg.trace",
                "linalg.matrix_norm",
                "linalg.vector_norm",
                "linalg.matrix_power",
                "linalg.cross",
                "tril",
                "triu",
            ]
        )
    )
    if name == "linalg.vector_norm":
        x = draw(arrays("fc", min_side=1))
        order = st.sampled_from([0, 1, 2, np.inf, -np.inf, 3.0, 0.5])
        return Call(name, (x,), draw(options(axis=axes_of(x), keepdims=st.booleans(), ord=order)))
    if name == "linalg.cross":
        shape = draw(shapes(max_dims=2))
        axis = draw(st.integers(-len(shape) - 1, -1))
        place = len(shape) + 1 + axis
        shape = (*shape[:place], 3, *shape[place:])
        return Call(name, (draw(arrays("i", shape)), draw(arrays("i", shape))), {"axis": axis})
    if name == "linalg.matrix_power":
        n = draw(st.integers(1, 4))
        x = draw(arrays("f", (*draw(shapes(max_dims=1)), n, n)))
        return Call(name, (x, draw(st.integers(0, 3))))
    if name == "linalg.matrix_norm":
        x = draw(arrays("f", min_dims=2, min_side=1))
        order = st.sampled_from(["fro", 1, -1, np.inf, -np.inf])
        return Call(name, (x,), draw(options(keepdims=st.booleans(), ord=order)))
    x = draw(arrays(NUMBERS if name == "linalg.trace" else ALL, min_dims=2))
    if name in ("tril", "triu"):
        return Call(name, (x,), draw(options(k=st.integers(-6, 6))))
    offset = {} if name == "matrix_transpose" else draw(options(offset=st.integers(-6, 6)))
    return Call(name, (x,), offset)


@draws
def regular(draw, kinds="fc", symmetric=False):
    """Return matrices that are far from singular."""
    n = draw(st.integers(1, 4))
    x = draw(arrays(kinds, (*draw(shapes(max_dims=1)), n, n)))
    if symmetric:
        x = x + np.conj(np.swapaxes(x, -1, -2))
    return (x + 20 * np.eye(n, dtype=x.dtype)).astype(x.dtype)


@draws
def factored(draw):
    """Return calls whose results are no matter of taste."""
    name = draw(
        st.sampled_from(
            [
                "linalg.inv",
                "linalg.det",
                "linalg.slogdet",
                "linalg.solve",
                "linalg.cholesky",
                "linalg.eigvalsh",
                "linalg.svdvals",
                "linalg.pinv",
                "linalg.matrix_rank",
                "linalg.matrix_norm",
            ]
        )
    )
    if name == "linalg.matrix_norm":
        x = draw(arrays("fc", min_dims=2, min_side=1))
        return Call(name, (x,), {"ord": draw(st.sampled_from([2, "nuc"]))})
    if name in ("linalg.cholesky", "linalg.eigvalsh"):
        x = draw(regular(symmetric=True))
        return Call(name, (x,), draw(options(upper=st.booleans())) if name[-1] == "y" else {})
    x = draw(regular())
    if name in ("linalg.pinv", "linalg.matrix_rank"):
        rtol = st.sampled_from([0.5, 1e-3]) | arrays(x.real.dtype, x.shape[:-2])
        return Call(name, (x,), draw(options(rtol=rtol)))
    if name == "linalg.solve":
        return Call(name, (x, draw(arrays(x.dtype, (*x.shape[:-1], draw(st.integers(1, 3)))))))
    return Call(name, (x,))


@draws
def transforms(draw):
    name = draw(
        st.sampled_from(
            [
                *("fft", "ifft", "fftn", "ifftn", "rfft", "irfft", "rfftn", "irfftn"),
                *("hfft", "ihfft", "fftshift", "ifftshift"),
            ]
        )
    )
    kinds = "f" if name in ("rfft", "rfftn", "ihfft") else "fc" if "shift" in name else "c"
    x = draw(arrays(kinds, min_dims=1, min_side=2))
    if "shift" in name:
        return Call(f"fft.{name}", (x,), draw(options(axes=axes_of(x))))
    norm = st.sampled_from(["backward", "ortho", "forward"])
    if name.endswith("n"):
        dims = draw(hnp.valid_tuple_axes(x.ndim, min_size=1))
        kwargs = {"axes": dims, **draw(options(norm=norm))}
        if draw(st.booleans()):
            kwargs["s"] = tuple(draw(st.integers(2, 6)) for _ in dims)
        return Call(f"fft.{name}", (x,), kwargs)
    return Call(f"fft.{name}", (x,), draw(options(n=st.integers(2, 9), axis=axis_of(x), norm=norm)))


# ---- what NumPy has beyond the standard


@draws
def extremes(draw):
    """Extremes of complex numbers, in the order of NumPy."""
    x = draw(arrays("c", min_side=draw(st.integers(0, 1)), special=draw(st.booleans())))
    name = draw(st.sampled_from(["max", "min", "argmax", "argmin"]))
    return Call(name, (x,), draw(options(axis=axes_of(x, name[0] == "m"), keepdims=st.booleans())))


@draws
def accumulated(draw):
    names = {"maximum minimum": NUMBERS, "bitwise_or bitwise_and bitwise_xor": "?iu"}
    name, kinds = draw(st.sampled_from([*names_of(names), ("logical_or", ALL)]))
    x = draw(arrays(kinds, min_dims=1, special=draw(st.booleans())))
    method = draw(st.sampled_from(["accumulate", "reduce"])) if kinds == "?iu" else "accumulate"
    return Call(f"{name}.{method}", (x,), draw(options(axis=axis_of(x))))


@draws
def pieces(draw):
    x = draw(arrays(min_dims=1))
    axis = draw(st.none() | axis_of(x))
    length = x.size if axis is None else x.shape[axis]
    name = draw(st.sampled_from(["insert", "delete", "append", "rot90", "dstack", "column_stack"]))
    if name == "rot90" and x.ndim > 1:
        dims = draw(hnp.valid_tuple_axes(x.ndim, min_size=2, max_size=2))
        return Call(name, (x,), {"k": draw(st.integers(-5, 5)), "axes": dims})
    if name in ("dstack", "column_stack"):
        return Call(name, ([x, draw(arrays(x.dtype, x.shape))],))
    if name == "append":
        shape = [*x.shape]
        shape[axis or 0] = draw(st.integers(0, 3))
        return Call(name, (x, draw(arrays(x.dtype, tuple(shape)))), {"axis": axis})
    last = length if name == "insert" or not length else length - 1
    places = st.integers(-length, last)
    where = draw(places | st.lists(places, max_size=4))
    if name != "delete":
        return Call("insert", (x, where, draw(elements(x.dtype))), {"axis": axis})
    return Call("delete", (x, where), {"axis": axis})


@draws
def together(draw):
    """Set operations, keys to sort by, choices."""
    one, two = draw(promoted("iuf"))
    side = draw(st.integers(0, 7))
    x, y = (draw(arrays(kind, (side,))) for kind in (one, two))
    names = ["union1d", "intersect1d", "setdiff1d", "setxor1d", "lexsort", "select"]
    name = draw(st.sampled_from(names))
    if name == "lexsort":
        return Call(name, ((x, y),))
    if name == "select":
        conditions = [draw(arrays("?", (side,))) for _ in range(2)]
        return Call(name, (conditions, [x, y], draw(elements(one))))
    if name == "intersect1d":
        return Call(name, (x, y), draw(options(return_indices=st.booleans())))
    return Call(name, (x, y[: draw(st.integers(0, side))]))


@draws
def estimated(draw):
    """Covariances, medians without NaN, areas."""
    name = draw(st.sampled_from(["cov", "nanmedian", "nanprod", "nanquantile", "trapezoid"]))
    special = st.sampled_from([0.0, 1.0, -2.0, 3.0, np.nan])
    shape = draw(shapes(min_dims=1, max_dims=2, min_side=2))
    x = draw(arrays("f", shape))
    if name == "cov":
        return Call(name, (x,), draw(options(rowvar=st.booleans(), bias=st.booleans())))
    if name == "trapezoid":
        return Call(name, (x,), draw(options(axis=axis_of(x), dx=st.sampled_from([0.5, 3]))))
    given = draw(st.lists(special, min_size=x.size, max_size=x.size))
    x = np.array(given, x.dtype).reshape(shape)
    kwargs = draw(options(axis=axes_of(x, several=False), keepdims=st.booleans()))
    return Call(name, (x, 0.25) if name == "nanquantile" else (x,), kwargs)


@draws
def spelled(draw):
    words = st.text("ab xÄ", max_size=4)
    given = draw(st.lists(words, min_size=1, max_size=7))
    x = np.array(given, "U4")
    name, *args = draw(
        st.sampled_from(
            [
                *(("upper",), ("strip",), ("strip", "a"), ("find", "b"), ("index", "a")),
                *(("replace", "a", "xyz"), ("center", 7), ("multiply", 2)),
                *(("encode", "ascii"), ("encode", "utf8"), ("str_len",), ("endswith", "x")),
            ]
        )
    )
    return Call(f"strings.{name}", (x, *args))


# ---- new arrays


@draws
def filled(draw):
    shape = draw(shapes() | st.integers(0, 6))
    dtype = draw(dtypes(ALL))
    name = draw(st.sampled_from(["zeros", "ones", "full", "zeros_like", "ones_like", "full_like"]))
    kwargs = draw(options(dtype=st.just(dtype) if name != "zeros" else st.just(dtype) | st.none()))
    value = (draw(elements(dtype)),) if name.startswith("full") else ()
    if name.endswith("_like"):
        return Call(name, (draw(arrays(dtype)), *value), kwargs)
    return Call(name, (shape, *value), kwargs)


@draws
def counted(draw):
    name = draw(st.sampled_from(["arange", "linspace", "eye", "fft.fftfreq", "fft.rfftfreq"]))
    if name == "eye":
        args = (draw(st.integers(0, 6)), draw(st.none() | st.integers(0, 6)))
        return Call(name, args, draw(options(k=st.integers(-7, 7), dtype=dtypes(ALL))))
    if "freq" in name:
        return Call(name, (draw(st.integers(1, 9)),), draw(options(d=st.sampled_from([0.5, 3]))))
    numbers = st.integers(-20, 20) | st.integers(-80, 80).map(lambda n: n / 4)
    start, stop = draw(numbers), draw(numbers)
    if name == "linspace":
        kwargs = draw(options(endpoint=st.booleans(), dtype=dtypes("fc")))
        return Call(name, (start, stop, draw(st.integers(0, 9))), kwargs)
    step = draw(numbers.filter(bool))
    whole = all(isinstance(each, int) for each in (start, stop, step))
    kwargs = draw(options(dtype=dtypes("i" if whole else "f")))
    return Call(name, draw(st.sampled_from([(stop,), (start, stop), (start, stop, step)])), kwargs)


@draws
def converted(draw):
    x = draw(arrays())
    name = draw(st.sampled_from(["astype", "asarray"]))
    kinds = ALL[ALL.index("?" if x.dtype.kind == "b" else x.dtype.kind) :]
    to = draw(dtypes(kinds))
    copies = st.sampled_from([True, False] if name == "astype" else [True, None])
    if name == "astype":
        return Call(name, (x, to), draw(options(copy=copies)))
    return Call(name, (x,), {"dtype": to, **draw(options(copy=copies))})


FAMILIES = {
    "unary": unary(),
    "binary": binary(),
    "shift": shift(),
    "clip": clip(),
    "summed": summed(),
    "reduced": reduced(),
    "spread": spread(),
    "located": located(),
    "cumulative": cumulative(),
    "differences": differences(),
    "moved": moved(),
    "reshaped": reshaped(),
    "joined": joined(),
    "searched": searched(),
    "taken": taken(),
    "sets": sets(),
    "products": products(),
    "matrices": matrices(),
    "transforms": transforms(),
    "filled": filled(),
    "counted": counted(),
    "converted": converted(),
    "extremes": extremes(),
    "accumulated": accumulated(),
    "pieces": pieces(),
    "together": together(),
    "estimated": estimated(),
    "spelled": spelled(),
}
"""Families of calls of which each array may be cut in any way."""
