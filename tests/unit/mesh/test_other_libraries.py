"""xarray, SciPy and scikit-learn compute with arrays across ranks, on two ranks."""

import os
import subprocess
import sys

import numpy as np
import pytest

import hpcdist as dist

X = np.random.default_rng(0).random((12, 3, 4))

DATASETS = {
    "arithmetic": lambda d: (d * 2 + 1 - d.t.mean("time")).t,
    "mean": lambda d: d.mean("time").t,
    "mean of all": lambda d: d.t.mean(),
    "std": lambda d: d.t.std("time"),
    "argmax": lambda d: d.t.argmax("time"),
    "cumsum": lambda d: d.t.cumsum("time"),
    "sel": lambda d: d.sel(time=2).t,
    "sel of several": lambda d: d.sel(time=[0, 7], lat=20).t,
    "isel": lambda d: d.isel(time=slice(1, None), lat=[0, 2]).t,
    "where": lambda d: d.t.where(d.t > 0.5),
    "concat": lambda d: d.t.shift(time=1).fillna(0).transpose("lon", "time", "lat"),
    "groupby": lambda d: d.t.groupby(d.time % 3).mean(),
    "weighted": lambda d: d.t.weighted(d.time.astype(float)).mean("time"),
    "ufunc": lambda d: np.exp(d.t),
}


@pytest.mark.parametrize("dim", [0, -1])
def test_a_dataset_of_xarray_holds_arrays_across_ranks(dim):
    xarray = pytest.importorskip("xarray")

    def dataset(data):
        coords = {"time": np.arange(12), "lat": [10.0, 20.0, 30.0]}
        return xarray.Dataset({"t": (("time", "lat", "lon"), data)}, coords=coords)

    wanted = {name: function(dataset(X)) for name, function in DATASETS.items()}

    def check():
        spread = dataset(dist.shard_tensor(X, dist.ProcessMesh([0, 1]), [dist.Shard(dim)]))
        assert "DistArray" in repr(spread.t)
        for name, function in DATASETS.items():
            found = function(spread)
            assert isinstance(found.data, dist.DistArray), name
            assert found.dims == wanted[name].dims
            whole = dist.unshard_dtensor(found.data)
            np.testing.assert_allclose(whole, wanted[name].data, rtol=1e-12, err_msg=name)

    dist.simulate(2, check)


PROGRAM = """
import numpy as np
import scipy.integrate
import scipy.optimize.elementwise
import scipy.special
import scipy.stats
import sklearn
from sklearn import decomposition, linear_model, metrics, preprocessing

import hpcdist as dist

CALLS = [
    lambda x, v: scipy.stats.zscore(x, axis=0),
    lambda x, v: scipy.stats.skew(x, axis=0),
    lambda x, v: scipy.stats.ttest_1samp(x, 0.5, axis=0).statistic,
    lambda x, v: scipy.stats.pearsonr(x[:, 0], v).statistic,
    lambda x, v: scipy.special.logsumexp(x, axis=0),
    lambda x, v: scipy.integrate.trapezoid(x, axis=0),
    lambda x, v: scipy.optimize.elementwise.find_root(
        lambda t, c: t * t - c, (0 * v, 9 + 0 * v), args=(v,)
    ).x,
    lambda x, v: preprocessing.StandardScaler().fit_transform(x),
    lambda x, v: preprocessing.MinMaxScaler().fit_transform(x),
    lambda x, v: linear_model.Ridge(solver="svd").fit(x, v).coef_,
    lambda x, v: linear_model.Ridge(solver="svd").fit(x, v).predict(x),
    lambda x, v: decomposition.PCA(2, svd_solver="covariance_eigh").fit(x).explained_variance_,
    lambda x, v: metrics.r2_score(v, v * 1.01),
    lambda x, v: metrics.pairwise.euclidean_distances(x, x[:5] + 0.1),
]
x = np.random.default_rng(0).random((60, 4))
v = x @ np.array([1.0, 2, 3, 4])
wanted = [np.asarray(call(x, v)) for call in CALLS]


def check():
    mesh = dist.ProcessMesh([0, 1])
    a, b = (dist.shard_tensor(each, mesh, [dist.Shard(0)]) for each in (x, v))
    with sklearn.config_context(array_api_dispatch=True):
        for call, number in zip(CALLS, wanted):
            found = call(a, b)
            if isinstance(found, dist.DistArray):
                found = dist.unshard_dtensor(found)
            np.testing.assert_allclose(found, number, rtol=1e-9)


dist.simulate(2, check)
"""


@pytest.mark.thorough
def test_scipy_and_scikit_learn_take_them_by_the_array_api():
    pytest.importorskip("sklearn", "1.6")
    env = {**os.environ, "SCIPY_ARRAY_API": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
