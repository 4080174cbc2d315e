"""`hpcdist.array` under the array API standard: with default placements, beside NumPy.

What is called is drawn on one rank; all ranks make the same calls. See `standard_calls`.
"""

import operator
import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.extra.array_api import make_strategies_namespace
from standard_calls import (
    FAMILIES,
    NUMBERS,
    Call,
    arrays,
    axis_of,
    dtypes,
    elements,
    factored,
    options,
    promoted,
    regular,
)

import hpcdist as dist
import hpcdist.array as xp

pytestmark = pytest.mark.skipif(not hasattr(np, "unstack"), reason="the oracle is NumPy 2.1")

PLACEMENTS = {"R": dist.Replicate(), "S0": dist.Shard(0), "S-1": dist.Shard(-1)}
MORE = [pytest.mark.thorough, pytest.mark.two_ranks]
MANY = [8, pytest.param(60, marks=MORE)]


@pytest.fixture(params=PLACEMENTS)
def placement(request):
    with dist.array_policy(placements=[PLACEMENTS[request.param]]):
        yield PLACEMENTS[request.param]


@pytest.fixture
def _gathers():
    with dist.array_policy("allow"):
        yield


def quiet(count):
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )


def drawn(strategy, count):
    """Return what one rank draws, on all ranks."""
    found = []

    @quiet(count)
    @given(strategy)
    def draw(example):
        found.append(example)

    if dist.get_rank() == 0:
        draw()
    told = [found]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def check(call, signs=False):
    """Compare a call of `hpcdist.array` with that of NumPy, errors too."""
    numpys = call
    if call.name == "unique_values":  # in order
        numpys = Call("unique", call.args, {"equal_nan": False})
    wanted = outcome(lambda: numpys.of(np, np.copy))
    got = outcome(lambda: call.of(xp, xp.asarray))
    told = f"{call}: {got!r}"
    if isinstance(wanted, Exception) or isinstance(got, Exception):
        assert isinstance(wanted, Exception), told
        assert isinstance(got, Exception), told
        assert "has no rule" not in str(got), told
        return
    compare(got, wanted, told, signs)


def outcome(function):
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            return function()
    except Exception as error:
        return error


def compare(got, wanted, told, signs=False):
    if isinstance(wanted, (tuple, list)):
        assert len(got) == len(wanted), told
        assert getattr(got, "_fields", None) == getattr(wanted, "_fields", None), told
        for one, two in zip(got, wanted, strict=True):
            compare(one, two, told, signs)
        return
    wanted = np.asarray(wanted)
    assert isinstance(got, dist.DistArray), told
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), told
    whole = dist.unshard_dtensor(got)
    if wanted.dtype.kind in "SU":
        np.testing.assert_array_equal(whole, wanted, err_msg=told)
        return
    rtol = 1e-4 if wanted.dtype.char in "fF" else 1e-10
    np.testing.assert_allclose(whole, wanted, rtol=rtol, atol=rtol, err_msg=told)
    if signs and wanted.dtype.kind == "f":
        numbers = ~np.isnan(wanted)
        signs = np.signbit(whole) == np.signbit(wanted)
        assert signs[numbers].all(), told


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("count", MANY)
@pytest.mark.parametrize("family", FAMILIES)
def test_functions_do_what_numpys_do(family, count):
    for call in drawn(FAMILIES[family], count):
        check(call, signs=family in ("unary", "binary", "converted"))


@pytest.mark.usefixtures("placement", "_gathers")
@pytest.mark.parametrize("count", MANY)
def test_linear_algebra_does_what_numpys_does_where_matrices_may_be_gathered(count):
    for call in drawn(factored(), count):
        check(call)


@pytest.mark.usefixtures("placement", "_gathers")
@pytest.mark.parametrize("count", [4, pytest.param(40, marks=MORE)])
def test_factors_are_named_and_their_product_is_the_matrix(count):
    for x in drawn(regular(symmetric=True) | arrays("fc", min_dims=2, min_side=1), count):
        a = xp.asarray(x)
        tolerance = {"rtol": 1e-3, "atol": 1e-3} if x.dtype.char in "fF" else {"atol": 1e-9}
        factors = xp.linalg.qr(a)
        assert factors._fields == ("Q", "R")
        near(factors.Q @ factors.R, x, tolerance)
        u, s, vh = found = xp.linalg.svd(a, full_matrices=False)
        assert found._fields == ("U", "S", "Vh")
        assert s.dtype == x.real.dtype
        near((u * s[..., None, :]) @ vh, x, tolerance)
        u, s, vh = xp.linalg.svd(a)
        assert u.shape == (*x.shape[:-1], x.shape[-2])
        assert vh.shape == (*x.shape[:-2], x.shape[-1], x.shape[-1])
        if x.shape[-1] == x.shape[-2]:
            values, vectors = found = xp.linalg.eigh(a + xp.conj(a.mT))
            assert found._fields == ("eigenvalues", "eigenvectors")
            assert (values.dtype, vectors.dtype) == (x.real.dtype, x.dtype)
            back = (vectors * values[..., None, :]) @ xp.conj(vectors.mT)
            near(back, x + np.conj(np.swapaxes(x, -1, -2)), tolerance)


def near(got, wanted, tolerance):
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(dist.unshard_dtensor(got), wanted, **tolerance)


# ---- operators


OPERATORS = {
    "add sub mul": NUMBERS,
    "truediv": "fc",
    "pow": "f",
    "floordiv mod": "iuf",
    "and_ or_ xor": "?iu",
    "eq ne": "?iufc",
    "lt le gt ge": "iuf",
}


@st.composite
def operations(draw, in_place=False):
    names, kinds = draw(st.sampled_from([*OPERATORS.items()][: 5 if in_place else None]))
    name = draw(st.sampled_from(names.split()))
    one, two = draw(promoted(kinds))
    a, b = draw(hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=3)).input_shapes
    if in_place:
        one, a = np.result_type(one, two), np.broadcast_shapes(a, b)
    x, y = draw(arrays(one, a, special=True)), draw(arrays(two, b, special=True))
    scalar = draw(elements(one))
    return name, x, draw(st.sampled_from([y, scalar]))


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("count", MANY)
def test_operators_are_those_of_numpy(count):
    for name, x, y in drawn(operations(), count):
        function = getattr(operator, name)
        for one, two in ((x, y), (y, x)) if name not in ("floordiv", "mod") else ((x, y),):
            wanted = outcome(partial(function, one, two))
            got = outcome(partial(function, put(one), put(two)))
            assert not isinstance(got, Exception), (name, x, y, got)
            compare(got, wanted, f"{name} {x!r} {y!r}", signs=True)


def put(value):
    return xp.asarray(value) if isinstance(value, np.ndarray) else value


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("count", MANY)
def test_operators_in_place_keep_the_array_and_its_dtype(count):
    for name, x, y in drawn(operations(in_place=True), count):
        function = getattr(operator, f"i{name.rstrip('_')}")
        a = xp.asarray(x)
        outcome(partial(function, x, y))
        got = outcome(partial(function, a, put(y)))
        assert got is a, (name, x, y, got)
        compare(a, x, f"{name} {y!r}", signs=True)


# ---- indexing


@st.composite
def indexed(draw):
    x = draw(arrays(NUMBERS))
    kind = draw(st.sampled_from(["basic", "mask", "depth", "places"]))
    if kind == "mask":
        return x, draw(arrays("?", x.shape))
    if kind == "depth":
        return x, draw(arrays("?", x.shape[: draw(st.integers(0, x.ndim))]))
    if kind == "places" and x.ndim and x.size:
        return x, draw(places(x.shape))
    newaxis = draw(st.booleans())
    return x, draw(hnp.basic_indices(x.shape, allow_newaxis=newaxis))


@st.composite
def places(draw, shape):
    """Return arrays of indices, integers and slices, at least one an array."""
    count = draw(st.integers(1, len(shape)))
    found = draw(hnp.mutually_broadcastable_shapes(num_shapes=count, max_dims=2, min_side=1))
    key = []
    for length, own in zip(shape, found.input_shapes, strict=False):
        number = st.integers(-length, length - 1)
        size = int(np.prod(own))
        array = st.lists(number, min_size=size, max_size=size).map(
            lambda given, own=own: np.array(given, "i8").reshape(own)
        )
        key.append(draw(array | number | st.just(slice(None, None, 2))))
    if not any(isinstance(each, np.ndarray) for each in key):
        key[0] = np.array([0, -1])
    return tuple(key)


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("count", MANY)
def test_what_is_indexed_is_what_numpy_finds(count):
    for x, key in drawn(indexed(), count):
        spread = key if not isinstance(key, np.ndarray) else xp.asarray(key)
        spread = tuple(map(put, key)) if isinstance(key, tuple) else spread
        got = outcome(lambda x=x, spread=spread: xp.asarray(x)[spread])
        assert not isinstance(got, Exception), (x, key, got)
        compare(got, x[key], f"{x!r}[{key!r}]")
        got = outcome(lambda x=x, key=key: xp.asarray(x)[key])  # every rank has the index
        compare(got, x[key], f"{x!r}[{key!r}]")


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("count", MANY)
def test_what_is_assigned_is_what_numpy_writes(count):
    def written(draw):
        x, key = draw(indexed())
        shape = draw(st.sampled_from([(), x[key].shape]))
        return x, key, draw(elements(x.dtype) | arrays(x.dtype, shape))

    for x, key, value in drawn(st.composite(written)(), count):
        a = xp.asarray(x, copy=True)
        b = xp.asarray(a, copy=True)
        b[tuple(map(put, key)) if isinstance(key, tuple) else put(key)] = put(value)
        compare(a, x, "the copy is another array")
        x[key] = value
        compare(b, x, f"[{key!r}] = {value!r}")


def test_an_index_that_is_wrong_on_one_rank_is_an_error_on_all(placement):
    a = xp.arange(10)
    index = xp.asarray([0] * 9 + [10])  # the last rank has it, where indices are cut
    for wrong in (lambda: a[index], lambda: xp.take(a, index), lambda: a[index, ...]):
        with pytest.raises(IndexError):
            wrong()
    assert int(xp.sum(a[xp.asarray([9, 0])])) == 9


# ---- sorting: NumPy has no descending order


@st.composite
def ordered(draw):
    x = draw(arrays("iuf", min_dims=1))
    return x, draw(options(axis=axis_of(x), descending=st.booleans(), stable=st.booleans()))


@pytest.mark.usefixtures("placement")
@pytest.mark.parametrize("count", MANY)
def test_what_is_sorted_is_what_the_strict_namespace_sorts(count):
    strict = pytest.importorskip("array_api_strict")
    for x, kwargs in drawn(ordered(), count):
        for name in ("sort", "argsort"):
            asked = {**kwargs, "stable": True} if name == "argsort" else kwargs
            wanted = np.asarray(getattr(strict, name)(strict.asarray(x), **asked))
            compare(getattr(xp, name)(xp.asarray(x), **asked), wanted, f"{name} {x!r} {kwargs}")


# ---- numbers, other libraries, other ways to make arrays


def test_arrays_of_no_dimension_are_numbers(placement):
    assert bool(xp.asarray(True)) is True
    for number, dtype in ((3, xp.uint8), (-4, xp.int64), (2.5, xp.float32), (1 + 2j, xp.complex64)):
        a = xp.asarray(number, dtype=dtype)
        assert complex(a) == number
        assert a.device == "cpu"
        assert a.to_device("cpu") is a
        if isinstance(number, int):
            assert operator.index(a) == int(a) == number
            assert [*range(10)][a] == [*range(10)][number]
        if not isinstance(number, complex):
            assert float(a) == number
    assert [float(each) for each in xp.asarray([1.0, 2.0])] == [1, 2]


@pytest.mark.usefixtures("_gathers")
@pytest.mark.parametrize("dtype", ["?", "i2", "u8", "f4", "c16"])
def test_arrays_go_to_other_libraries_and_back(placement, dtype):
    x = (np.arange(12) % 3).reshape(4, 3).astype(dtype)
    a = xp.asarray(x)
    assert a.__dlpack_device__() == (1, 0)
    np.testing.assert_array_equal(np.from_dlpack(a), x)
    back = xp.from_dlpack(x)
    assert back.placements == a.placements
    compare(back, x, "from NumPy")
    assert xp.from_dlpack(a) is a
    assert xp.from_dlpack(a, copy=True) is not a
    np.testing.assert_array_equal(np.asarray(a), x)
    if not a.layout.is_replicated:
        with pytest.raises(ValueError, match="copy"):
            np.asarray(a, copy=False)
        with pytest.raises(BufferError, match="copy"):
            a.__dlpack__(copy=False)


def test_what_would_gather_is_refused_without_leave():
    with dist.array_policy("error", placements=[dist.Shard(0)]):
        a = xp.asarray([1.0])
    for wrong in (float, bool, np.asarray, np.from_dlpack):
        with pytest.raises(dist.UsageError, match="unshard_dtensor"):
            wrong(a)
    with dist.array_policy("allow"):
        assert float(a) == 1


@pytest.mark.parametrize("dim", [0, -1])
def test_new_arrays_are_cut_as_the_policy_says(dim):
    with dist.array_policy(placements=[dist.Shard(dim)]):
        made = [
            xp.zeros((4, 3)),
            xp.asarray([[1], [2]]),
            xp.ones((2, 2), dtype=xp.int8),
            xp.empty((3, 1)),
            xp.full((5, 2), 7),
            xp.eye(4),
            xp.from_dlpack(np.ones((2, 3))),
            dist.random.Generator(0).random((4, 4)),
        ]
        assert [each.placements for each in made] == [[dist.Shard(dim % 2)]] * len(made)
        lines = [xp.arange(5), xp.linspace(0, 1, 4), xp.fft.fftfreq(6)]
        assert [each.placements for each in lines] == [[dist.Shard(0)]] * len(lines)
        assert xp.asarray(1.0).placements == [dist.Replicate()]
        assert xp.zeros((4, 3), placements=[]).placements == [dist.Replicate()]
        with dist.array_policy("allow"):
            assert xp.zeros(3).placements == [dist.Shard(0)]
        compare(xp.concat([*lines]), np.concat([*map(dist.unshard_dtensor, lines)]), "concat")
    assert xp.zeros((4, 3)).placements == [dist.Replicate()]


@pytest.mark.parametrize("count", [10, pytest.param(60, marks=MORE)])
def test_hypothesis_draws_arrays(placement, count):
    xps = make_strategies_namespace(xp)
    alone = dist.ProcessMesh([dist.get_rank()])  # hypothesis need not draw alike on all ranks
    shape = xps.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4)

    @quiet(count)
    @given(st.data())
    def draw(data):
        x = data.draw(xps.arrays(xps.scalar_dtypes(), shape))
        assert isinstance(x, dist.DistArray)
        assert bool(xp.all((x == x) | (x != x)))
        key = data.draw(xps.indices(x.shape, allow_newaxis=True))
        compare(x[key], dist.unshard_dtensor(x)[key], f"{x!r}[{key!r}]")

    with alone:
        draw()


@pytest.mark.usefixtures("placement")
def test_dtypes_are_told_as_the_standard_says():
    info = xp.__array_namespace_info__()
    for one in drawn(dtypes("iufc"), 20):
        other = xp.zeros(2, dtype=one)
        assert xp.result_type(other, one) == one
        assert xp.can_cast(other, one)
        assert xp.isdtype(other.dtype, "numeric")
        limits = xp.iinfo(other.dtype) if one.kind in "iu" else xp.finfo(other.dtype)
        assert limits.bits == one.itemsize * 8 // (2 if one.kind == "c" else 1)
        kinds = ("integral", "real floating", "complex floating")
        assert one in info.dtypes(kind=kinds).values()
    assert info.dtypes(device="cpu") == info.dtypes()
    with pytest.raises(dist.UsageError, match="device"):
        info.dtypes(device="moon")
    assert xp.result_type(xp.ones(1, dtype=xp.float32), 1.0) == xp.float32


def test_lists_of_arrays_become_one_array(placement):
    x = np.arange(12.0).reshape(4, 3)
    a = xp.asarray(x)
    compare(xp.asarray(xp.unstack(a)), x, "rows")
    compare(xp.asarray([[a, a + 1], [a, 2 * a]]), np.asarray([[x, x + 1], [x, 2 * x]]), "nested")
    mixed = np.asarray([x[0], [1, 2, 3]], "f4")
    compare(xp.asarray([a[0], [1, 2, 3]], dtype=xp.float32), mixed, "mixed")
    compare(xp.asarray((a[0, 1], 2, a[1, 0])), np.asarray([1.0, 2.0, 3.0]), "numbers")
    with pytest.raises(ValueError, match="copy"):
        xp.asarray([a], copy=False)
