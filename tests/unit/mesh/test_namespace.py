"""`hpcdist.array` is a namespace of the array API standard."""

import numpy as np
import pytest

import hpcdist as dist
import hpcdist.array as xp

STANDARD = """
abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_invert
bitwise_or bitwise_right_shift bitwise_xor ceil clip conj copysign cos cosh divide equal exp expm1
floor floor_divide greater greater_equal hypot imag isfinite isinf isnan less less_equal log log1p
log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum multiply
negative nextafter not_equal positive pow real reciprocal remainder round sign signbit sin sinh
square sqrt subtract tan tanh trunc arange asarray empty empty_like eye from_dlpack full full_like
linspace meshgrid ones ones_like tril triu zeros zeros_like astype broadcast_arrays broadcast_to
can_cast finfo iinfo isdtype result_type bool int8 int16 int32 int64 uint8 uint16 uint32 uint64
float32 float64 complex64 complex128 take matmul matrix_transpose tensordot vecdot concat
expand_dims flip moveaxis permute_dims repeat reshape roll squeeze stack tile unstack argmax
argmin count_nonzero nonzero searchsorted where argsort sort cumulative_prod cumulative_sum max
mean min prod std sum var all any diff __array_namespace_info__ __array_api_version__ e pi inf nan
newaxis isin linalg fft
"""

CALLS = {  # NumPy's own way to say it, where it has another one on some version
    "xp.std(a, correction=1)": "np.std(a, ddof=1)",
    "xp.var(a, axis=0, correction=2.0)": "np.var(a, axis=0, ddof=2.0)",
    "xp.cumulative_sum(a, axis=0, include_initial=True)": "np.vstack([a[:1] * 0, a.cumsum(0)])",
    "xp.cumulative_prod(a, axis=1)": "np.cumprod(a, 1)",
    "xp.sort(a, axis=1, descending=True)": "-np.sort(-a, axis=1)",
    "xp.argsort(a, axis=1, descending=True, stable=True)": "np.argsort(-a, axis=1, kind='stable')",
    "xp.permute_dims(a, (1, 0))": "a.T",
    "xp.matrix_transpose(a)": "a.T",
    "xp.concat([a, a], axis=1)": "np.concatenate([a, a], axis=1)",
    "xp.unstack(a, axis=1)[2]": "a[:, 2]",
    "xp.vecdot(a, a, axis=0)": "(a * a).sum(0)",
    "xp.pow(a, 2)": "a**2",
    "xp.acos(a / 9)": "np.arccos(a / 9)",
    "xp.bitwise_invert(xp.astype(a, xp.int64))": "~a.astype(int)",
    "xp.astype(a, xp.float32)": "a.astype('f4')",
    "xp.count_nonzero(a, axis=1)": "np.count_nonzero(a, axis=1)",
    "xp.linalg.vector_norm(a, axis=1)": "np.linalg.norm(a, axis=1)",
    "xp.linalg.matrix_norm(a)": "np.linalg.norm(a)",
    "xp.linalg.trace(a[:4])": "np.trace(a[:4])",
    "xp.linalg.matmul(a, a.mT)": "a @ a.T",
    "xp.fft.fft(a, axis=0)": "np.fft.fft(a, axis=0)",
    "xp.sum(a, axis=0, dtype=xp.float32)": "a.sum(0, dtype='f4')",
}


def test_it_has_the_names_of_the_standard():
    assert [name for name in STANDARD.split() if not hasattr(xp, name)] == []
    assert not {"Any", "np", "DistArray"}.intersection(xp.__all__)


@pytest.mark.parametrize("call", CALLS)
def test_its_functions_take_the_arguments_of_the_standard(call):
    def check():
        x = np.random.default_rng(0).integers(-9, 9, (5, 4)).astype("f8")
        wanted = eval(CALLS[call], {"np": np, "a": x})
        for placements in ([dist.Replicate()], [dist.Shard(0)], [dist.Shard(1)]):
            a = dist.shard_tensor(x, dist.ProcessMesh([0, 1]), placements)
            found = eval(call, {"xp": xp, "np": np, "a": a})
            assert found.dtype == wanted.dtype
            np.testing.assert_allclose(dist.unshard_dtensor(found), wanted, rtol=1e-12)

    dist.simulate(2, check)


def test_an_array_knows_its_namespace():
    def check():
        a = xp.ones(3)
        namespace = a.__array_namespace__(api_version="2024.12")
        assert namespace.sum is xp.sum
        assert (namespace.zeros_like(a) == 0).all()
        with pytest.raises(ValueError, match="api_version"):
            a.__array_namespace__(api_version="1999.01")
        info = namespace.__array_namespace_info__()
        assert info.default_dtypes()["integral"] == np.int64
        assert sorted(info.dtypes(kind="complex floating")) == ["complex128", "complex64"]
        assert info.default_device() in info.devices() == ["cpu"]

    dist.simulate(1, check)


def test_code_of_the_standard_runs_on_parts():
    def standardised(x):
        xp = x.__array_namespace__()
        return (x - xp.mean(x, axis=0)) / xp.std(x, axis=0, keepdims=True)

    def check():
        x = np.random.default_rng(1).random((7, 3))
        a = dist.shard_tensor(x, dist.ProcessMesh([0, 1, 2]), [dist.Shard(0)])
        found = standardised(a)
        assert found.layout is a.layout
        np.testing.assert_allclose(
            dist.unshard_dtensor(found), (x - x.mean(0)) / x.std(0), rtol=1e-12
        )

    dist.simulate(3, check)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: xp.zeros(3, device="gpu"), dist.UsageError),
        (lambda: xp.zeros(-1), ValueError),
        (lambda: xp.zeros(3, placements=[dist.Partial()]), dist.UsageError),
        (lambda: xp.zeros(3, placements=[dist.Shard(1)]), dist.UsageError),
        (lambda: xp.linspace(0, 1, -1), ValueError),
        (lambda: xp.asarray(range(3), copy=False), ValueError),
    ],
)
def test_new_arrays_of_wrong_arguments_are_refused(wrong, error):
    def check():
        with pytest.raises(error):
            wrong()

    dist.simulate(1, check)
