"""Reductions of memory that one process sees: the compiled loops against NumPy, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from misaligned import misaligned

from hpcdist.arrays.buffer import carried
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.errors import UsageError
from hpcdist.transport.call.call import Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, local_result, rule_for
from hpcdist.transport.shm import kernel
from hpcdist.transport.shm.kernel import (
    code_of,
    compiled,
    copy_bytes,
    divisor_of,
)

needs_compiled = pytest.mark.skipif(compiled is None, reason="the kernel was not compiled here")

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
LENGTHS = [0, 1, 7, 64, 4095, 4097]


def long_enough(op):
    """Return a length of several blocks: exact sums take a hundred times as long as others."""
    return 40_001 if op is ReduceOp.REPRODUCIBLE_SUM else 100_003


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def call_of(op, name):
    row = dtype_row(dtype_of(name))
    data = np.empty(0, row.numpy)
    return Reduction(Kind.ALL_REDUCE, None, data, row, (0,), 0, op, rule_for(op, row))


def is_defined(op, name):
    try:
        rule_for(op, dtype_row(dtype_of(name)))
    except UsageError:
        return False
    return True


REDUCTIONS = [
    (op, name)
    for op in ReduceOp
    for name in ("bool", *INTEGERS, *FLOATS, *COMPLEX)
    if is_defined(op, name)
]
COMPILED = [
    pair for pair in REDUCTIONS if compiled is not None and code_of(call_of(*pair)) is not None
]


def long(pairs):
    """Return parameters of a test of long arrays: exact sums of complex numbers take seconds."""
    few = {(ReduceOp.REPRODUCIBLE_SUM, name) for name in COMPLEX}
    return [pytest.param(*each, marks=[pytest.mark.thorough] * (each in few)) for each in pairs]


def memory_of(array):
    """Return an array flat, the way a transport keeps it."""
    return carried(array, dtype_row(array.dtype)).reshape(-1)


def random_array(name, length, seed):
    """Return numbers of any bits."""
    random = np.random.default_rng(seed)
    if name == "bool":
        return random.integers(0, 2, length).astype(bool)
    dtype = dtype_of(name)
    bits = np.frombuffer(random.bytes(length * dtype.itemsize), np.uint8)
    return bits.copy().view(dtype)


def by_numpy(op, name, sources):
    """Return what `kernel.combine` makes of flat sources."""
    out = np.empty_like(sources[0])
    kernel.combine(call_of(op, name).rule, sources, [out], len(sources))
    return out


def by_compiled(op, name, sources, outs=None):
    """Return what the compiled loop makes of flat sources, in a new array or in `outs`."""
    call = call_of(op, name)
    code = code_of(call)
    new = np.empty_like(sources[0])
    compiled.combine(
        code.number,
        tuple(source.ctypes.data for source in sources),
        new if outs is None else tuple(out.ctypes.data for out in outs),
        sources[0].size * code.per_item,
        divisor_of(call, len(sources)),
    )
    return new


def assert_same_bits(op, name, got, expected):
    """Compare; in sums and products the bits of a NaN are up to the processor."""
    if dtype_of(name).kind in "biu" or op in (ReduceOp.MAX, ReduceOp.MIN):
        assert got.tobytes() == expected.tobytes()
        return
    part = {"complex64": "f4", "complex128": "f8"}.get(name, dtype_of(name))
    one, other = got.view(part), expected.view(part)
    with np.errstate(invalid="ignore"):
        is_nan = np.isnan(one)
        np.testing.assert_array_equal(is_nan, np.isnan(other))
    assert one[~is_nan].tobytes() == other[~is_nan].tobytes()


# ---- NumPy's way


@pytest.mark.parametrize(("op", "name"), long(REDUCTIONS))
def test_numpy_combines_in_blocks_what_the_recipe_says_of_the_whole(op, name):
    rule = call_of(op, name).rule
    sources = [memory_of(random_array(name, long_enough(op), rank)) for rank in range(3)]
    wires = [each.copy() if rule.encode is None else rule.encode(each) for each in sources]
    whole, expected = local_result(rule, wires), np.empty_like(sources[0])
    if rule.decode is None:
        expected[...] = whole
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            rule.decode(whole, expected, 3)
    assert_same_bits(op, name, by_numpy(op, name, sources), expected)


@pytest.mark.parametrize(("op", "name"), long(REDUCTIONS))
def test_numpy_writes_to_several_outputs_some_of_them_sources(op, name):
    sources = [memory_of(random_array(name, 40_001, rank)) for rank in range(3)]
    expected = by_numpy(op, name, sources)
    outs = [np.empty_like(expected), sources[1], sources[0]]
    kernel.combine(call_of(op, name).rule, sources, outs, 3)
    for out in outs:
        assert_same_bits(op, name, out, expected)


# ---- the compiled way


@needs_compiled
def test_the_common_reductions_are_compiled():
    for name in ["float32", "float64", "bfloat16"]:
        for op in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG):
            assert (op, name) in COMPILED
    for name in INTEGERS:
        for op in (*tuple(ReduceOp)[:4], ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
            assert (op, name) in COMPILED
    assert {pair for pair in REDUCTIONS if pair[1] == "bool"} <= set(COMPILED)


@needs_compiled
@pytest.mark.parametrize(("op", "name"), long(COMPILED))
def test_any_bits_are_combined_as_numpy_does(op, name):
    for ranks in (1, 2, 3, 5):
        for length in (*LENGTHS, long_enough(op)):
            sources = [memory_of(random_array(name, length, 9 * rank)) for rank in range(ranks)]
            got, expected = by_compiled(op, name, sources), by_numpy(op, name, sources)
            assert_same_bits(op, name, got, expected)


def special_values(name):
    """Return all there is to stumble over in a dtype."""
    dtype = dtype_of(name)
    if name == "bool":
        return np.array([False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        wanted = {0, 1, 2, 3, limits.max, limits.max - 1, limits.max // 2 + 1, limits.min}
        return np.array(sorted(wanted | ({-1, -2, limits.min + 1} if limits.min else set())), dtype)
    real = np.dtype({"complex64": "f4", "complex128": "f8"}.get(name, dtype))
    info = ml_dtypes.finfo(real)
    tiny = float(info.smallest_subnormal)
    finite = [0.0, 1.0, 1 / 3, 65504.0, float(info.max), float(info.eps), float(info.tiny)]
    with np.errstate(over="ignore"):
        values = np.array([*finite, tiny, 3 * tiny, np.inf, np.nan], np.float64).astype(real)
    values = np.concatenate([values, -values])
    return values if dtype.kind != "c" else np.add.outer(values, 1j * values).ravel().astype(dtype)


@needs_compiled
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "name"), COMPILED)
def test_special_values_are_combined_as_numpy_does(op, name):
    values = special_values(name)
    for ranks in (1, 2, 3):
        grid = np.meshgrid(*[values[: 40 if ranks < 3 else 14]] * ranks)
        sources = [memory_of(np.ascontiguousarray(each).reshape(-1)) for each in grid]
        got, expected = by_compiled(op, name, sources), by_numpy(op, name, sources)
        assert_same_bits(op, name, got, expected)


@needs_compiled
@given(data=st.data(), pair=st.sampled_from(COMPILED or [None]))
@settings(max_examples=150, deadline=None)
def test_random_bits_are_combined_as_numpy_does(pair, data):
    op, name = pair
    length = data.draw(st.integers(1, 40))
    nbytes = length * dtype_of(name).itemsize
    count = data.draw(st.integers(1, 4))
    drawn = [data.draw(st.binary(min_size=nbytes, max_size=nbytes)) for _ in range(count)]
    arrays = [np.frombuffer(each, np.uint8).copy() for each in drawn]
    if name == "bool":
        arrays = [array & 1 for array in arrays]
    sources = [memory_of(array.view(dtype_of(name))) for array in arrays]
    got, expected = by_compiled(op, name, sources), by_numpy(op, name, sources)
    assert_same_bits(op, name, got, expected)


@needs_compiled
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("op", [ReduceOp.MAX, ReduceOp.MIN])
def test_all_nan_become_the_same_bits_in_extrema(op, name):
    if (op, name) not in COMPILED:
        pytest.skip(f"{op.name} of {name} is not compiled")
    values = np.array([np.nan, -np.nan, 1.0, -1.0, np.inf, -np.inf], dtype_of(name))
    sources = [memory_of(values), memory_of(values[::-1].copy())]
    assert by_compiled(op, name, sources).tobytes() == by_numpy(op, name, sources).tobytes()
    again = by_compiled(op, name, sources[::-1])
    assert again.tobytes() == by_compiled(op, name, sources).tobytes()


@needs_compiled
@pytest.mark.parametrize("name", FLOATS)
def test_one_nan_keeps_its_sign_as_with_numpy(name):
    call = call_of(ReduceOp.SUM, name)
    if code_of(call) is None:
        pytest.skip(f"sums of {name} are not compiled")
    x = memory_of(np.array([np.nan, -np.nan, 1, 1, np.inf, -np.inf], dtype_of(name)))
    y = memory_of(np.array([1, 1, np.nan, -np.nan, -np.inf, np.inf], dtype_of(name)))
    got = by_compiled(ReduceOp.SUM, name, [x, y])
    assert got.tobytes() == by_numpy(ReduceOp.SUM, name, [x, y]).tobytes()


@needs_compiled
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_short_float_passes_unchanged_through_a_sum_of_one(name):
    if code_of(call_of(ReduceOp.SUM, name)) is None:
        pytest.skip(f"sums of {name} are not compiled")
    bits = np.arange(1 << 16).astype(np.uint16).view(dtype_of(name))
    bits = bits[~np.isnan(bits.astype("f4"))]
    assert by_compiled(ReduceOp.SUM, name, [memory_of(bits)]).tobytes() == bits.tobytes()


@needs_compiled
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_short_floats_round_to_the_nearest_and_halves_to_even(name):
    if code_of(call_of(ReduceOp.SUM, name)) is None:
        pytest.skip(f"sums of {name} are not compiled")
    eps = float(ml_dtypes.finfo(dtype_of(name)).eps)
    x = np.array([1, 1 + eps, 1, 1 + eps], dtype_of(name))
    y = np.array([eps / 2, eps / 2, eps * 0.51, -eps * 0.51], dtype_of(name))
    got = by_compiled(ReduceOp.SUM, name, [memory_of(x), memory_of(y)]).view(dtype_of(name))
    assert got.astype("f8").tolist() == [1, 1 + 2 * eps, 1 + eps, 1]


@needs_compiled
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_averages_are_divided_as_numpy_divides(name, ranks):
    if code_of(call_of(ReduceOp.AVG, name)) is None:
        pytest.skip(f"averages of {name} are not compiled")
    random = np.random.default_rng(ranks)
    arrays = [random.normal(size=5003).astype(dtype_of(name)) for _ in range(ranks)]
    sources = [memory_of(array) for array in arrays]
    got = by_compiled(ReduceOp.AVG, name, sources)
    assert got.tobytes() == by_numpy(ReduceOp.AVG, name, sources).tobytes()
    mean = np.mean([array.astype("f8") for array in arrays], 0)
    np.testing.assert_allclose(got.view(dtype_of(name)).astype("f8"), mean, rtol=0.02, atol=0.01)


@needs_compiled
@pytest.mark.parametrize(("op", "name"), COMPILED)
def test_results_go_to_several_outputs_some_of_them_sources(op, name):
    sources = [memory_of(random_array(name, 9001, rank)) for rank in range(3)]
    expected = by_compiled(op, name, sources)
    outs = [sources[2], np.empty_like(expected), sources[0]]
    by_compiled(op, name, sources, outs)
    for out in outs:
        assert out.tobytes() == expected.tobytes()


@needs_compiled
@pytest.mark.parametrize(("op", "name"), COMPILED)
def test_memory_may_begin_at_any_byte(op, name):
    sources = [memory_of(random_array(name, 4999, rank)) for rank in range(2)]
    expected = by_compiled(op, name, sources)
    moved = [misaligned(source, 1 + rank) for rank, source in enumerate(sources)]
    out = misaligned(np.zeros_like(expected), 3)
    by_compiled(op, name, moved, [out])
    assert out.tobytes() == expected.tobytes()


# ---- wrong arguments

X = np.ones(8, np.float32)
OUT = np.zeros(8, np.float32)
AT = X.ctypes.data


def read_only():
    array = np.zeros(8, np.float32)
    array.flags.writeable = False
    return array


@needs_compiled
@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((0, (AT,), OUT, 8), TypeError),
        ((0, (AT,), OUT, 8, 1.0, None), TypeError),
        ((-1, (AT,), OUT, 8, 1.0), ValueError),
        ((10_000, (AT,), OUT, 8, 1.0), ValueError),
        ((1 << 80, (AT,), OUT, 8, 1.0), OverflowError),
        (("0", (AT,), OUT, 8, 1.0), TypeError),
        ((0, (), OUT, 8, 1.0), ValueError),
        ((0, (AT,) * 257, OUT, 8, 1.0), ValueError),
        ((0, [AT], OUT, 8, 1.0), ValueError),
        ((0, ("x",), OUT, 8, 1.0), TypeError),
        ((0, (-1,), OUT, 8, 1.0), OverflowError),
        ((0, (AT,), (), 8, 1.0), ValueError),
        ((0, (AT,), (AT,) * 257, 8, 1.0), ValueError),
        ((0, (AT,), (None,), 8, 1.0), TypeError),
        ((0, (AT,), None, 8, 1.0), TypeError),
        ((0, (AT,), OUT[::2], 4, 1.0), (BufferError, ValueError)),
        ((0, (AT,), OUT, 9, 1.0), ValueError),
        ((0, (AT,), OUT, -1, 1.0), (OverflowError, ValueError)),
        ((0, (AT,), OUT, "8", 1.0), TypeError),
        ((0, (AT,), OUT, 8, "1"), TypeError),
    ],
)
def test_wrong_arguments_are_errors(args, error):
    OUT[...] = 7
    with pytest.raises(error):
        compiled.combine(*args)
    assert OUT.tolist() == [7] * 8


@needs_compiled
def test_read_only_outputs_are_refused():
    with pytest.raises((BufferError, ValueError)):
        compiled.combine(0, (AT,), read_only(), 8, 1.0)
    with pytest.raises((BufferError, ValueError)):
        compiled.copy(read_only(), X)


@needs_compiled
def test_copies_of_wrong_things_are_refused():
    for args in [(OUT,), (OUT, X, True), (None, X), (OUT, None)]:
        with pytest.raises(TypeError):
            compiled.copy(*args)
    with pytest.raises((BufferError, ValueError)):
        compiled.copy(OUT[::2], X)


@needs_compiled
def test_a_copy_ends_with_the_shorter_of_the_two():
    to = np.zeros(5, np.uint8)
    compiled.copy(to[:3], np.arange(1, 9, dtype=np.uint8))
    assert to.tolist() == [1, 2, 3, 0, 0]
    compiled.copy(to, np.full(1, 9, np.uint8))
    assert to.tolist() == [9, 2, 3, 0, 0]


# ---- copies, compiled or not


@pytest.fixture(params=["compiled", "NumPy"])
def _way_of_copying(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(kernel, "compiled", None)
    elif compiled is None:
        pytest.skip("the kernel was not compiled here")


@pytest.mark.usefixtures("_way_of_copying")
@pytest.mark.parametrize("length", [0, 1, 15, 16, 63, 64, 65, 127, 129, 4097, 100_003])
def test_copies_are_exact_for_any_length_and_place(length):
    data = np.random.default_rng(length).integers(0, 256, length + 64, np.uint8)
    for start, end in [(0, 0), (1, 0), (0, 1), (3, 16), (16, 5), (8, 8)]:
        room = np.zeros(length + 64, np.uint8)
        copy_bytes(room[end : end + length], data[start : start + length])
        assert room[end : end + length].tobytes() == data[start : start + length].tobytes()
        assert not room[:end].any()
        assert not room[end + length :].any()


@pytest.mark.usefixtures("_way_of_copying")
def test_wrong_lengths_never_write_beyond_the_shorter():
    room = np.zeros(8, np.uint8)
    copy_bytes(room[:4], np.ones(4, np.uint8))
    assert room.tolist() == [1] * 4 + [0] * 4


@needs_compiled
def test_boxes_of_wrong_things_are_refused():
    for args in [
        (AT,),
        (AT, AT, 4, (1,), (4,)),
        (AT, AT, 4, (1,), (4,), (4,), 1),
        (OUT, AT, *"1234"),
    ]:
        with pytest.raises(TypeError):
            compiled.copy_box(*args)
    for args in [
        (AT, AT, 4, 1, (4,), (4,)),
        (AT, AT, 4, (1,), (4, 4), (4,)),
        (AT, AT, 4, (1,), (4,), 4),
        (AT, AT, 4, (1,) * 65, (4,) * 65, (4,) * 65),
    ]:
        with pytest.raises(ValueError, match="not a tuple of"):
            compiled.copy_box(*args)


# ---- which loop


def test_without_the_compiled_part_numpy_does_everything(monkeypatch):
    monkeypatch.setattr(kernel, "compiled", None)
    monkeypatch.setattr(kernel, "CODES", {})
    assert [code_of(call_of(op, name)) for op, name in REDUCTIONS] == [None] * len(REDUCTIONS)


@needs_compiled
def test_complex_numbers_are_two_numbers_each_and_only_summed():
    assert code_of(call_of(ReduceOp.SUM, "complex64")).per_item == 2
    assert code_of(call_of(ReduceOp.SUM, "float32")).per_item == 1
    assert code_of(call_of(ReduceOp.PROD, "complex64")) is None
    assert code_of(call_of(ReduceOp.AVG, "complex128")) is None


def test_only_averages_are_divided():
    for op, name in REDUCTIONS:
        assert divisor_of(call_of(op, name), 3) == (3.0 if op is ReduceOp.AVG else 1.0)
