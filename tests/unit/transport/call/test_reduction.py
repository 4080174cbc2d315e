"""How reductions are computed, against NumPy, without ranks."""

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

import hpcdist as dist
from hpcdist.arrays.buffer import as_buffer, as_output, typed
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.reduction import ReduceOp, check_op, local_result, rule_for

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f2", "f4", "f8"]
COMPLEX = ["c8", "c16"]
UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


def reduced(op, *inputs):
    """Reduce the inputs of some ranks as a transport does."""
    inputs = [np.ascontiguousarray(each).reshape(np.shape(each)) for each in inputs]
    rule = rule_for(op, dtype_row(inputs[0].dtype))
    wires = []
    for each in inputs:
        flat = as_buffer(each).data.reshape(-1)
        wires.append(flat.copy() if rule.encode is None else rule.encode(flat))
    total = local_result(rule, wires)
    assert total.dtype == rule.wire
    out = as_output(np.empty_like(inputs[0]))
    if rule.decode is None:
        out.data.reshape(-1)[...] = total
    else:
        rule.decode(total, out.data.reshape(-1), len(inputs))
    return typed(out.data, out.dtype).reshape(inputs[0].shape)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", UFUNCS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_integers_are_reduced_as_numpy_does_and_wrap(op, dtype, data):
    inputs = [data.draw(arrays(dtype, 4)) for _ in range(data.draw(st.integers(1, 4)))]
    expected = UFUNCS[op].reduce(np.stack(inputs), 0, dtype=dtype)
    np.testing.assert_array_equal(reduced(op, *inputs), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_extrema_of_floats_are_exact_and_do_not_depend_on_the_order(op, dtype, data):
    bits = arrays(f"u{np.dtype(dtype).itemsize}", 4)
    inputs = [data.draw(bits).view(dtype) for _ in range(data.draw(st.integers(1, 4)))]
    got = reduced(op, *inputs)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, UFUNCS[op].reduce(np.stack(inputs), 0))
    assert got.tobytes() == reduced(op, *inputs[::-1]).tobytes()


@pytest.mark.parametrize("dtype", [*FLOATS, ml_dtypes.bfloat16])
def test_extrema_order_all_special_values(dtype):
    ordered = [-np.inf, -1.0, -0.0, 0.0, 1.0, np.inf]
    for low, high in itertools.pairwise(ordered):
        x, y = np.array([low], dtype), np.array([high], dtype)
        for pair in ((x, y), (y, x)):
            assert reduced(ReduceOp.MAX, *pair).tobytes() == y.tobytes()
            assert reduced(ReduceOp.MIN, *pair).tobytes() == x.tobytes()
    for value in ordered:
        for nan in (np.nan, -np.nan):
            pair = np.array([value], dtype), np.array([nan], dtype)
            assert np.isnan(reduced(ReduceOp.MAX, *pair))
            assert np.isnan(reduced(ReduceOp.MIN, *pair[::-1]))


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD])
def test_sums_and_products_of_numbers(op, dtype):
    random = np.random.default_rng(0)
    inputs = [random.uniform(0.5, 2, 50).astype(dtype) for _ in range(3)]
    expected = UFUNCS[op].reduce(np.stack(inputs).astype("c16"), 0)
    tolerance = {2: 1e-3, 4: 1e-6, 8: 1e-6, 16: 1e-14}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(reduced(op, *inputs).astype("c16"), expected, rtol=tolerance)


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX, ml_dtypes.bfloat16])
def test_an_average_is_the_mean(dtype):
    inputs = [np.array([1, 2, 3], dtype), np.array([3, 4, 8], dtype)]
    assert reduced(ReduceOp.AVG, *inputs).astype("c16").tolist() == [2, 3, 5.5]
    assert inputs[0].astype("c16").tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_accumulated_wide_and_rounded_once(dtype):
    tiny = dtype(float(ml_dtypes.finfo(dtype).eps) / 2)
    inputs = [np.array([1], dtype), *[np.array([tiny], dtype)] * 7]
    expected = np.float32(1) + 7 * np.float32(tiny)
    assert reduced(ReduceOp.SUM, *inputs)[0] == dtype(expected)
    assert reduced(ReduceOp.SUM, *inputs)[0] > 1  # one after the other they would all be lost


def test_short_floats_overflow_to_infinity_and_only_at_the_end():
    big = np.array([6e4], "f2")
    assert reduced(ReduceOp.SUM, big, big)[0] == np.inf
    assert reduced(ReduceOp.SUM, big, big, -big)[0] == big[0]
    assert reduced(ReduceOp.PROD, big, big)[0] == np.inf
    assert reduced(ReduceOp.AVG, big, big)[0] == big[0]
    huge = np.array([3e38], ml_dtypes.bfloat16)
    assert reduced(ReduceOp.PROD, huge, huge)[0] == np.inf


@pytest.mark.parametrize("dtype", [*FLOATS, ml_dtypes.bfloat16])
def test_sums_treat_nan_and_infinity_as_ieee_says(dtype):
    x = np.array([np.nan, np.inf, np.inf, -np.inf, -0.0], dtype)
    y = np.array([1, 1, -np.inf, 1, -0.0], dtype)
    got = reduced(ReduceOp.SUM, x, y).astype("f8")
    np.testing.assert_array_equal(got, [np.nan, np.inf, np.nan, -np.inf, 0])
    assert np.signbit(got[4])


def test_overflow_of_large_floats_is_silent():
    x = np.array([3e38, -3e38], "f4")
    np.testing.assert_array_equal(reduced(ReduceOp.SUM, x, x), [np.inf, -np.inf])
    np.testing.assert_array_equal(reduced(ReduceOp.PROD, x, x), [np.inf, np.inf])


def test_sums_of_bool_are_or_and_products_are_and():
    x, y = np.array([True, True, False, False]), np.array([True, False, True, False])
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        assert reduced(op, x, y).tolist() == [True, True, True, False]
    for op in (ReduceOp.PROD, ReduceOp.MIN):
        assert reduced(op, x, y).tolist() == [True, False, False, False]


LOC = [("value", "f8"), ("index", "i8")]
LOCATING = (ReduceOp.MAXLOC, ReduceOp.MINLOC)
LOGICAL = (ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR)
OTHERS = tuple(op for op in ReduceOp if op not in LOCATING)


@pytest.mark.parametrize(
    ("op", "dtype", "remedy"),
    [
        *[(ReduceOp.AVG, dtype, "float64") for dtype in INTEGERS],
        (ReduceOp.AVG, "?", "int64"),
        *[(op, dtype, "abs") for op in (ReduceOp.MAX, ReduceOp.MIN) for dtype in [*COMPLEX, "G"]],
        *[(op, dtype, "all_gather") for op in OTHERS for dtype in ("S3", "U3")],
        *[(op, [("a", "S3")], "one field") for op in ReduceOp],
        *[(op, ml_dtypes.float8_e4m3fn, "astype") for op in ReduceOp],
        *[(ReduceOp.SUM, dtype, "view.*int64") for dtype in ("M8[s]", "m8[ns]")],
        *[(ReduceOp.BAND, dtype, "view of integers") for dtype in ("f4", "g")],
        *[(ReduceOp.LOR, dtype, "!= 0") for dtype in ("f4", "g")],
        *[(op, LOC, "one field") for op in OTHERS],
        *[(op, dtype, "pairs") for op in LOCATING for dtype in ("?", "i4", "f8", "c8", "M8[s]")],
    ],
)
def test_what_has_no_meaning_is_refused_with_what_has_one(op, dtype, remedy):
    with pytest.raises(dist.UsageError, match=rf"{op.name} is not defined for.*{remedy}"):
        rule_for(op, dtype_row(np.dtype(dtype)))


@pytest.mark.parametrize("dtype", ["g", "G", "M8[ns]", "m8[s]", LOC])
def test_no_remedy_gives_precision_away(dtype):
    complaints = []
    for op in ReduceOp:
        try:
            rule_for(op, dtype_row(np.dtype(dtype)))
        except dist.UsageError as error:
            complaints.append(str(error))
    assert complaints
    assert not any("float32" in each or "float64" in each for each in complaints)


def test_operators_have_paddles_numbers_and_may_be_given_as_such():
    assert [op.value for op in ReduceOp] == list(range(len(ReduceOp)))
    assert [op.name for op in ReduceOp][:5] == ["SUM", "MAX", "MIN", "PROD", "AVG"]
    assert check_op(3) is ReduceOp.PROD
    for wrong in (5, len(ReduceOp), -1, "SUM", None, 1.0, True):
        with pytest.raises(dist.UsageError, match="Unknown reduce_op type"):
            check_op(wrong)


def test_an_operator_that_is_not_there_is_told_by_those_that_are():
    with pytest.raises(AttributeError, match=r"no 'MEAN', but SUM, MAX, .*\(AVG is the mean\)"):
        _ = ReduceOp.MEAN
    assert ReduceOp["AVG"] is ReduceOp.AVG
    assert not hasattr(ReduceOp, "__cuda_array_interface__")
    assert not hasattr(ReduceOp.AVG, "MEAN")


# ---- long double


def test_long_doubles_keep_all_their_digits():
    tiny = np.finfo("g").eps
    x, y = np.array([1, 1j], "G"), np.array([tiny, tiny * 1j], "G")
    np.testing.assert_array_equal(reduced(ReduceOp.SUM, x, y), x + y)
    np.testing.assert_array_equal(reduced(ReduceOp.AVG, x, y), (x + y) / 2)
    np.testing.assert_array_equal(reduced(ReduceOp.PROD, x + y, x), (x + y) * x)
    x, y = x.real[:1], y.real[:1]
    assert reduced(ReduceOp.SUM, x, y)[0] == np.longdouble(1) + tiny
    assert reduced(ReduceOp.SUM, x, y)[0] > 1
    assert reduced(ReduceOp.MAX, x, x + y)[0] > 1
    assert reduced(ReduceOp.MIN, x, x - y)[0] < 1


def test_extrema_of_long_doubles_follow_the_rule_of_the_other_floats():
    values = [-np.inf, -1, -0.0, 0.0, 1, np.inf, np.nan]
    x, y = (each.ravel() for each in np.meshgrid(values, values))
    for op in (ReduceOp.MAX, ReduceOp.MIN):
        got, expected = reduced(op, x.astype("g"), y.astype("g")), reduced(op, x, y)
        np.testing.assert_array_equal(got.astype("f8"), expected)
        np.testing.assert_array_equal(
            np.signbit(got[expected == 0]), np.signbit(expected[expected == 0])
        )


# ---- times


@pytest.mark.parametrize("dtype", ["M8[ns]", "m8[s]"])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_extrema_of_times_are_those_of_numpy(dtype, data):
    limits = np.iinfo("i8")
    numbers = st.sampled_from([limits.min, limits.min + 1, -1, 0, 1, limits.max])
    inputs = [
        data.draw(arrays("i8", 4, elements=numbers | st.integers(-5, 5))).view(dtype)
        for _ in range(data.draw(st.integers(1, 4)))
    ]
    for op in (ReduceOp.MAX, ReduceOp.MIN):
        np.testing.assert_array_equal(
            reduced(op, *inputs), UFUNCS[op].reduce(np.stack(inputs), 0)
        )  # where NaT, the smallest integer, wins


# ---- pairs


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, "g"])
@pytest.mark.parametrize("op", LOCATING)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_pairs_tell_the_best_value_and_the_first_place_it_is_at(op, dtype, data):
    special = [np.nan, np.inf, -np.inf, -0.0, 1.0, 1.0]
    values = np.array(special if np.dtype(dtype).kind == "f" else [0, 1, 2, 2, 3, 3], dtype)
    order = data.draw(st.permutations(range(len(values))))
    column = np.array([values[each] for each in order])[: data.draw(st.integers(1, 6))]
    for pair in ([("value", dtype), ("index", "i4")], np.dtype(f"{dtype},u2", align=True)):
        value, index = np.dtype(pair).names
        inputs = []
        for place in data.draw(st.permutations(range(len(column)))):  # on whatever rank it is
            x = np.zeros(1, pair)
            x[value], x[index] = column[place], 10 + place
            inputs.append(x)
        got = reduced(op, *inputs)
        best = np.argmax(column) if op is ReduceOp.MAXLOC else np.argmin(column)
        assert got[index][0] == 10 + best
        np.testing.assert_array_equal(got[value][0], column[best])


# ---- bits and truth


BITWISE = {
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


@pytest.mark.parametrize("dtype", ["?", *INTEGERS])
@pytest.mark.parametrize("op", BITWISE)
def test_bits_are_combined_as_numpy_combines_them(op, dtype):
    x, y = np.array([0, 1, 0, 1], dtype), np.array([0, 0, 1, 1], dtype)
    np.testing.assert_array_equal(reduced(op, x, y), BITWISE[op](x, y))


@pytest.mark.parametrize("dtype", ["?", *INTEGERS])
@pytest.mark.parametrize("op", LOGICAL)
def test_logical_operators_ask_whether_numbers_are_0(op, dtype):
    x, y = np.array([0, 4, 0, 4], dtype), np.array([0, 0, 2, 2], dtype)
    ufunc = getattr(np, f"logical_{op.name[1:].lower()}")
    np.testing.assert_array_equal(reduced(op, x, y), ufunc(x, y).astype(dtype))


# ---- exact sums


def nearest(numbers, dtype):
    """Return the number of a dtype that is nearest to a sum of numbers, as IEEE 754 has it."""
    numbers = [float(each) for each in numbers]
    odd = {str(each) for each in numbers if not math.isfinite(each)}
    if odd:
        return dtype(odd.pop() if len(odd) == 1 else "nan")
    exact = sum(map(Fraction, numbers))
    if exact == 0:
        return dtype(-0.0 if {math.copysign(1, each) for each in numbers} == {-1} else 0.0)
    info = ml_dtypes.finfo(dtype)
    ulp = Fraction(2) ** max(_exponent(exact) - info.nmant, info.minexp - info.nmant)
    rounded = round(exact / ulp) * ulp
    largest = Fraction(float(info.max))
    if abs(rounded) > largest:
        return dtype("inf" if rounded > 0 else "-inf")
    return dtype(float(rounded))


def _exponent(number):
    """Return the power of two that is the largest up to a number."""
    size = abs(number)
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess - (size < Fraction(2) ** guess)


ANY = st.floats(width=32) | st.sampled_from([1.0, -1.0, 2.0**-24, 2.0**-149, 3e38, -3e38, -0.0])
WIDE = st.floats() | st.sampled_from([1e308, -1e308, 5e-324, 2.0**-60, 1.0, -1.0, -0.0])


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [(np.float64, WIDE), (np.float32, ANY), (np.float16, ANY), (ml_dtypes.bfloat16, ANY)],
)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_reproducible_sum_is_the_number_nearest_to_the_exact_one(dtype, numbers, data):
    given_numbers = data.draw(st.lists(numbers, min_size=1, max_size=9))
    with np.errstate(over="ignore"):
        given_numbers = [np.array([each]).astype(dtype) for each in given_numbers]
    found = reduced(ReduceOp.REPRODUCIBLE_SUM, *given_numbers)[0]
    expected = nearest([each[0] for each in given_numbers], dtype)
    assert np.isnan(found) == np.isnan(expected)
    assert np.isnan(found) or found.tobytes() == expected.tobytes()


def test_reproducible_sums_of_complex_numbers_and_integers_are_there_and_of_long_doubles_are_not():
    large = np.array([2.0**60 + 1j, 1.0], np.complex128)
    total = reduced(ReduceOp.REPRODUCIBLE_SUM, large, 1 - large.real + 0j, large.conj())
    assert total.tolist() == [2.0**60, 2.0]
    assert reduced(ReduceOp.REPRODUCIBLE_SUM, np.array([2]), np.array([3])).tolist() == [5]
    assert reduced(ReduceOp.REPRODUCIBLE_SUM, np.array([True]), np.array([False])).tolist() == [1]
    with pytest.raises(dist.UsageError, match=r"REPRODUCIBLE_SUM is not defined.*ordered"):
        rule_for(ReduceOp.REPRODUCIBLE_SUM, dtype_row(np.dtype("g")))
