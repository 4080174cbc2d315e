"""Functions of arrays across ranks, each against NumPy: a table, for any ranks of any transport.

A row is a function of NumPy arrays; it is given the arrays whole, and spread in many ways, and
must come to the same. Whatever of a result is cut is made whole before it is compared.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

import hpcdist as dist
from hpcdist.mesh.dist_array import DistArray

R, S0, S1 = dist.Replicate(), dist.Shard(0), dist.Shard(1)


class Row(NamedTuple):
    """A function of arrays, and the shapes that it is tried with."""

    name: str
    function: object
    shapes: tuple = ((5, 4),)
    dtype: str = "f8"
    exact: bool = True


def meshes():
    """Return meshes of all ranks: a line, and if there are enough a grid of permuted ranks."""
    ranks = [*range(dist.get_world_size())]
    yield dist.ProcessMesh(ranks)
    if len(ranks) >= 4 and len(ranks) % 2 == 0:
        grid = np.array(ranks[::-1]).reshape(2, -1)
        yield dist.ProcessMesh(grid, ["x", "y"])


def placements_of(mesh, ndim):
    """Return ways to spread an array: whole, cut along the first and the last dimension, both."""
    kinds = [R, *(dist.Shard(dim) for dim in sorted({0, ndim - 1} if ndim else ()))]
    return [*itertools.product(kinds, repeat=mesh.ndim)]


def numbers(shape, dtype, seed=0):
    """Return an array whose sums and products are exact."""
    values = np.random.default_rng(seed).integers(-4, 5, shape)
    if dtype == "?":
        return values > 0
    if dtype == "c16":
        return (values + 1j * np.roll(values.reshape(-1), 1).reshape(shape)).astype(dtype)
    return np.abs(values).astype(dtype) if dtype[0] == "u" else values.astype(dtype)


def spread(x, mesh, placements):
    """Return a copy of an array, spread."""
    return dist.shard_tensor(x.copy(), mesh, placements)


def whole(value):
    """Return a result with its arrays whole."""
    if isinstance(value, DistArray):
        check_parts(value)
        return dist.unshard_dtensor(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(whole, value))
    return value


def check_parts(array):
    """Make sure that this rank has what the layout says."""
    wanted = array.layout.local_shape(array.layout.mesh.coordinate)
    assert array.local.shape == wanted, (array.local.shape, array.layout)
    assert isinstance(array.local, np.ndarray), type(array.local)


def same(found, wanted, exact, told):
    """Make sure that two results are equal, in shape, dtype and elements."""
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted), told
        for one, other in zip(found, wanted, strict=True):
            same(one, other, exact, told)
        return
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape, (told, found.shape, wanted.shape)
    assert found.dtype == wanted.dtype, (told, found.dtype, wanted.dtype)
    if exact:
        np.testing.assert_array_equal(found, wanted, err_msg=told)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12, err_msg=told)


def check_row(row, mix=False):
    """Try a row with all arrays spread in the same way, or the others in other ways."""
    given = [numbers(shape, row.dtype, seed) for seed, shape in enumerate(row.shapes)]
    wanted = row.function(*[x.copy() for x in given])
    for mesh in meshes():
        ways = [placements_of(mesh, x.ndim) for x in given]
        chosen = [*itertools.product(*ways)] if mix else [*zip(*_as_long(ways), strict=True)]
        for placements in chosen:
            arrays = [spread(x, mesh, way) for x, way in zip(given, placements, strict=True)]
            told = f"{row.name} of {[array.layout for array in arrays]}"
            try:
                found = whole(row.function(*arrays))
            except Exception as error:
                raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
            same(found, wanted, row.exact, told)


def _as_long(lists):
    longest = max(map(len, lists))
    return [[*itertools.islice(itertools.cycle(each), longest)] for each in lists]


SINCE = {
    "np.linalg.solve(a + 9 * np.eye(4), a[0])": "2.0.0",
    "np.linalg.solve(a + 9 * np.eye(4), np.arange(4.0))": "2.0.0",
    "_assigned(a, [1, 2], a[:2])": "2.0.0",  # earlier ones read what they have written
    "_assigned(a, np.array(True), a[::-1])": "2.0.0",
    'np.pad(a, ((8, 1), (0, 5)), "wrap")': "1.25.0",
    "np.pad(a, {0: (0, 1)})": "2.3.0",
}
"""From which NumPy on a row is what it is."""


def _rows(text, shapes=((5, 4),), dtype="f8", exact=True):
    """Return rows of expressions, one a line, of arrays `a`, `b` and `c`, that this NumPy has."""
    rows = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if np.lib.NumpyVersion(np.__version__) < SINCE.get(line, "1.24.0"):
            continue
        names = ", ".join("abc"[: len(shapes)])
        rows.append(Row(line, eval(f"lambda {names}: {line}", globals()), shapes, dtype, exact))
    return rows


def _assigned(a, key, value):
    a[key] = value
    return a


def _reassembled(factors):
    """Return the values and the matrix; vectors are of either sign."""
    u, s, vh = factors
    return s, (u * s) @ vh


def _updated(a, change):
    change(a)
    return a


POINTWISE = [
    *_rows("""
        -a
        abs(a)
        a + 1
        2 - a
        2.0 ** a
        a ** 2
        a // 3
        a % 3
        divmod(a, 3)
        a > 0
        a == 2.0
        np.exp(a)
        np.modf(a / 2)
        np.where(a > 0, a, 0.0)
        np.clip(a, -1, 2)
        a.clip(max=2)
        np.round(a / 3, 1)
        a.round(1)
        a.astype("f4")
        np.isclose(a, 1.0)
        np.real(a)
        np.nan_to_num(a / 2)
        a.copy()
        np.add(a, a.T.T)
        np.zeros_like(a)
        np.full_like(a, 7)
        np.ones_like(a, dtype="i4")
        np.maximum(a, np.arange(4.0))
        a * np.arange(5.0)[:, None]
        a + np.float64(2)
        a + 1j
    """),
    *_rows("""
        a + b
        a * b - b / 4
        a < b
        np.maximum(a, b)
        np.where(a > b, a, b)
        np.hypot(a, b)
        np.logaddexp(a, b)
        _updated(a, lambda x: x.__iadd__(b))
        np.add(a, b, where=a > 0, out=np.zeros_like(a))
        np.array_equal(a, b)
        np.allclose(a, b, atol=20)
    """, ((5, 4), (5, 4))),
    *_rows("a + b\na * b\nb - a\nnp.where(a > 1, a, b)", ((5, 4), (4,))),
    *_rows("a + b\nb / (a + 9)", ((5, 4), (5, 1))),
    *_rows("a + b\nb - a", ((5, 1), (1, 4))),
    *_rows("a + b\nb * a", ((2, 5, 4), (5, 1))),
    *_rows("a + b\nnp.where(a > 1, a, b)", ((5, 4), ())),
    *_rows("a + b\nnp.exp(a)\na.astype('i4')\na == b", ((0, 4), (0, 4))),
    *_rows("a + 1\nnp.exp(a)\na * a\n-a\na > 0\na + b", ((), ())),
    *_rows("a & b\na | b\na ^ b\na << 1\na >> 1\n~a\na // 2\na / 2", ((5, 4), (5, 4)), "i4"),
    *_rows("a & b\n~a\nnp.logical_or(a, b)\na != b", ((5, 4), (5, 4)), "?"),
    *_rows("a * b\nnp.conj(a)\na.real\na.imag\nabs(a)\na == b", ((5,), (5,)), "c16"),
]  # fmt: skip

REDUCTIONS = [
    *_rows("""
        np.sum(a)
        a.sum(0)
        np.sum(a, axis=1)
        a.sum(axis=(0, 1), keepdims=True)
        a.sum(-1, keepdims=True)
        a.sum(0, dtype="f4")
        a.sum(initial=5.0)
        np.sum(a, axis=0, where=a > 0)
        np.prod(a, 0)
        np.max(a)
        a.max(0)
        a.min(1)
        np.amin(a)
        np.any(a > 3, 0)
        np.all(a > -4, 1)
        a.any()
        np.count_nonzero(a)
        np.count_nonzero(a, axis=0)
        np.argmax(a)
        np.argmax(a, 0)
        np.argmin(a, 1)
        a.argmin(axis=1, keepdims=True)
        a.argmax()
        np.ptp(a, 0)
        np.mean(a[:4], 0)
        np.add.reduce(a)
        np.maximum.reduce(a, axis=1)
        np.max(np.where(a > 3, np.nan, a), 0)
        np.argmax(np.where(a > 3, np.nan, a))
        np.min(np.where(a > 3, np.nan, a))
    """),
    *_rows("""
        np.mean(a)
        a.mean(1)
        a.mean(0, keepdims=True)
        a.var()
        a.std(0)
        np.std(a, axis=1, ddof=1)
        a.var(keepdims=True)
        np.mean(a, where=a > -4)
        np.var(a, axis=0, where=a > -9)
    """, exact=False),
    *_rows("a.sum(0)\na.sum()\na.max(0)\na.any(0)\na.all(1)\na.argmax(0)\na.std(1)", ((4, 3, 5),)),
    *_rows("a.sum()\na.sum(0)\na.sum(1)\na.prod()\na.max(1)\na.any()\na.all(0)", ((0, 4),)),
    *_rows("a.sum()\na.max()\na.mean()\na.argmax()\na.std()\na.any()", ((),)),
    *_rows("a.sum()\na.max()\na.mean()\na.argmin()\na.min(0, keepdims=True)", ((1,),)),
    *_rows("a.sum()\na.sum(0)\na.prod(1)\na.max(0)\na.mean(0)\na.min()", dtype="i2"),
    *_rows("a.sum()\na.sum(0)\na.max()", dtype="u1"),
    *_rows("a.sum()\na.max(0)\na.any(0)\na.all()\na.argmax(0)\na.mean()", dtype="?"),
    *_rows("a.sum(0)\na.mean()\na.var()\na.prod(0)", dtype="c16", exact=False),
    *_rows("""
        a.max()
        a.min(0)
        np.max(a, axis=1, keepdims=True)
        a.max(initial=2 + 1j, where=a != 3)
        a.argmax()
        a.argmin(0)
        a[:, :0].max(1, initial=0)
        np.argmax(a, axis=1, keepdims=True)
        np.ptp(a, axis=0)
        np.max(np.where(a == a.max(), np.nan, a), axis=0)
        np.argmin(np.where(a.real > 2, complex(1, np.nan), a), axis=0)
        np.argmax(np.where(a.real > 2, complex(1, np.nan), a))
        np.nanmax(np.where(a.real > 2, np.nan, a))
        np.nanmin(np.where(a.real > 2, np.nan, a), axis=0)
        np.nanargmax(np.where(a.real > 2, np.nan, a))
        np.maximum.reduce(a)
        np.fmax.reduce(np.where(a.real > 2, np.nan, a), axis=1)
        np.fmin.reduce(a)
    """, dtype="c16"),
    *_rows("a.max()\na.argmin(0)\na.min(1)", ((4, 3, 5),), "c8"),
    *_rows("np.argmax(a.astype('U2'))\nnp.argmin(a.astype('S2'), axis=0)\nnp.argmax(a.astype('S1'), axis=1)", ((5, 4),), "u1"),
]  # fmt: skip

SHAPES = [
    *_rows("""
        a.T
        np.transpose(a)
        np.swapaxes(a, 0, 1)
        np.moveaxis(a, 0, -1)
        np.expand_dims(a, 1)
        np.expand_dims(a, (0, -1))
        a[None].squeeze()
        np.flip(a)
        np.flip(a, 0)
        np.fliplr(a)
        np.roll(a, 2, axis=0)
        np.roll(a, -3)
        np.roll(a, 0)
        np.roll(a, 5, axis=0)
        np.tile(a, 1)
        np.tile(a, (0, 2))
        np.meshgrid(a[0], a[:, 0])
        np.meshgrid(a[0])
        np.meshgrid(a[0], a[1], sparse=True)
        np.roll(a, (1, 2), (0, 1))
        a.reshape(20)
        a.reshape(-1, 2)
        a.reshape(5, 2, 2)
        a.reshape(4, 5)
        a.reshape(2, 2, 5)
        a.ravel()
        a.flatten()
        np.broadcast_to(a, (3, 5, 4))
        np.broadcast_to(a[:1], (6, 4))
        np.concatenate([a, a])
        np.concatenate([a, a + 1], axis=1)
        np.concatenate([a, a], axis=None)
        np.stack([a, -a])
        np.stack([a, -a], axis=-1)
        np.vstack([a, a[:2]])
        np.hstack([a, a[:, :1]])
        np.split(a, 2, axis=1)
        np.array_split(a, 3)
        np.repeat(a, 2, axis=0)
        np.repeat(a, 3)
        np.tile(a, (2, 3))
        np.atleast_2d(a[0])
        np.rollaxis(a, 1)
    """),
    *_rows("np.concatenate([a, b])\nnp.concatenate([b, a, b])", ((5, 4), (3, 4))),
    *_rows("np.concatenate([a, np.ones((2, 4)), b[:0]])", ((5, 4), (5, 4))),
    *_rows("np.broadcast_arrays(a, b)\nnp.stack([a, b])", ((4,), (4,))),
    *_rows("a.transpose(2, 0, 1)\na.mT if hasattr(a, 'mT') else a.swapaxes(-1, -2)\na.reshape(6, 4)\na.reshape(2, 12)\na.reshape(-1)", ((2, 3, 4),)),
    *_rows("a.reshape(1, 1)\na.reshape(())\na.squeeze()\nnp.flip(a)\na.ravel()", ((1,),)),
    *_rows("a.reshape(1)\na[None]\nnp.broadcast_to(a, (3,))\na.T\na.ravel()", ((),)),
    *_rows("a.reshape(4, 0)\na.reshape(-1)\na.T\nnp.flip(a, 0)\nnp.concatenate([a, a])", ((0, 4),)),
]  # fmt: skip

INDEX = [
    *_rows("""
        a[1]
        a[-1]
        a[:, 2]
        a[3, 1]
        a[1:4]
        a[1:4, 1:]
        a[::2]
        a[1::3, ::2]
        a[::-1]
        a[4:0:-2, 1]
        a[...]
        a[..., 0]
        a[None]
        a[:, None, 1:3]
        a[2:2]
        a[7:]
        a[None, 2, ..., None]
        a[: np.sum(a[0] >= 0)]
        a[np.argmax(a[:, 0])]
        a[a > 0]
        a[a[:, 0] > 0]
        a[np.array([True, False, True, True, False])]
        np.nonzero(a)
        np.argwhere(a > 0)
        np.flatnonzero(a)
        np.compress(np.array([True, False, True]), a, axis=0)
        np.take(a, [0, 3, 3, -1], axis=0)
        np.take(a, [2, 0], axis=1)
        np.take(a, [[2, 7], [11, 0]])
        a[[0, 4, 2]]
        a[:, [3, 1]]
        a[np.array([[0], [4]])]
        [row for row in a]
        3.0 in a
        _assigned(a, 1, 7.0)
        _assigned(a, (slice(None), 2), 7)
        _assigned(a, slice(1, 4), np.arange(4.0))
        _assigned(a, (slice(None, None, -1), 1), np.arange(5.0))
        _assigned(a, slice(1, None), a[:-1] * 2)
        _assigned(a, (Ellipsis, None), np.arange(20.0).reshape(5, 4, 1))
        _assigned(a, (2, 3), -1.0)
        _assigned(a, slice(0, 0), 3.0)
        _assigned(a, a > 0, 0.0)
        _assigned(a, a > 0, a[a > 0] * 2)
        _assigned(a, a[:, 1] > 0, np.arange(4.0))
        _assigned(a, 0, a[1])
        _updated(a[1:3], lambda part: part.fill(9))
    """),
    *_rows("_assigned(a, slice(0, 3), b)\n_assigned(a, (slice(None), slice(1, 2)), b[:1, :1])", ((5, 4), (3, 4))),
    *_rows("a[a > 0]\na[1, :, 2]\na[:, 1:, ::2]\na[..., -1, None]\na[a[:, :, 0] > 0]\nnp.nonzero(a)", ((4, 3, 5),)),
    *_rows("a[()]\na[None]\na[...]\n_assigned(a, (), 3.0)\n_assigned(a, Ellipsis, 4.0)", ((),)),
    *_rows("a[:3]\na[a > 0]\na[::-1]\na[:, 1]", ((0, 4),)),
    *_rows(
        """
        np.take(a, (b % 5).astype(int), axis=0)
        np.take(a, (b % 4).astype(int), axis=-1)
        np.take(a, (b % 20).astype(int))
        a[(b % 5).astype(int)]
        a[(b % 5).astype(int), (b % 4).astype(int)]
        a[(b % 5).astype(int), 1]
        a[[0, 1], [1, 2]]
        a[None, [0, 1], ..., 2]
        a[[0, 1], None, [1, 2]]
        a[[[0], [1]], [1, 2]]
        a[a[:, 0] > 0, 1]
        a[1:, [0, 2]][..., [1]]
        np.repeat(a, np.abs(b[:5]).astype(int), axis=0)
        np.repeat(a, [1, 0, 2, 3], axis=1)
        np.repeat(a, [2], axis=1)
        np.isin(a, b)
        np.isin(b, a, invert=True)
        _assigned(a, (b % 5).astype(int), 7.0)
        _assigned(a, ((b % 5).astype(int), slice(None, None, 2)), 7.0)
        _assigned(a, [3, 0, 3], b[:3, None])
        _assigned(a, (slice(None, None, -1), [0, 2]), np.arange(10.0).reshape(5, 2))
        _assigned(a, (slice(4, 0, -2), [[0, 2], [1, 3]]), b[:4].reshape(2, 2))
        _assigned(a, ([0, 3], [[1], [2]]), b[:2])
        _assigned(a, ([0, 3, 0], 1), b[:3])
        _assigned(a, (a[:, 1] > 0, 2), 5.0)
        _assigned(a, [1, 2], a[:2])
        _assigned(a, np.array([], int), 5.0)
        a[np.zeros((0,), bool)]
        a[np.zeros((5, 0), bool)]
        a[np.zeros((0, 4), bool)]
        a[1, np.zeros(0, bool)]
        a[..., np.zeros(0, bool)]
        _assigned(a, np.zeros((0, 0), bool), 3.0)
        _assigned(a, np.zeros(0, bool), b[:4])
        _assigned(a, np.zeros(0, bool), np.zeros((0, 4)))
        _assigned(a, True, b[:4])
        _assigned(a, False, b[:4])
        _assigned(a, np.array(True), a[::-1])
        np.searchsorted(b, a, sorter=np.argsort(b))
        """,
        ((5, 4), (6,)),
    ),
    *_rows(
        """
        np.take_along_axis(a, (b % 5).astype(int), 0)
        np.take_along_axis(a, (b % 4).astype(int), -1)
        np.take_along_axis(a, (b % 20).astype(int).reshape(-1), None)
        np.take_along_axis(a, (b[:1] % 4).astype(int), 1)
        np.take_along_axis(a[:, 0], (b % 5).astype(int).reshape(-1), 0)
        np.take_along_axis(a, np.argsort(a, 0), 0)
        """,
        ((5, 4), (5, 4)),
    ),
]  # fmt: skip

PRODUCTS = [
    *_rows("a @ b\nnp.dot(a, b)\nnp.matmul(b.T, a.T)\nnp.einsum('ij,jk', a, b)\nnp.einsum('ij,jk->k', a, b)\nnp.tensordot(a, b, 1)\nnp.inner(a, b.T)", ((5, 4), (4, 3))),
    *_rows("a @ b\nb @ a.T\nnp.dot(a, b)\nnp.einsum('ij,j->i', a, b)", ((5, 4), (4,))),
    *_rows("a @ b\nnp.dot(a, b)\nnp.outer(a, b)\nnp.vdot(a, b)\nnp.einsum('i,i', a, b)\nnp.inner(a, b)\nnp.add.outer(a, b)", ((5,), (5,))),
    *_rows("a @ b\nnp.einsum('bij,bjk->bik', a, b)\nnp.tensordot(a, b, ([2], [1]))\nnp.dot(a, b)", ((3, 2, 4), (3, 4, 2))),
    *_rows("a @ b\nnp.einsum('...ij,...jk', a, b)", ((3, 1, 2, 4), (5, 4, 2))),
    *_rows("np.tensordot(a, b, 0)\nnp.tensordot(a, b, 2)\nnp.einsum('ij,ij->i', a, b)\nnp.einsum('ij,ij', a, b)\nnp.einsum('ij,kj->jik', a, b)", ((5, 4), (5, 4))),
    *_rows("np.einsum('ii', a)\nnp.einsum('ii->i', a)\nnp.einsum('ij->ji', a)\nnp.trace(a)\na.trace(1)\nnp.tril(a)\nnp.triu(a, 1)\na @ a", ((4, 4),)),
    *_rows("np.einsum('ij,jk,kl->il', a, b, c)", ((5, 4), (4, 3), (3, 2))),
    *_rows("a @ b\nnp.vdot(a[:, 0], b[:4].T[0][:4].repeat(1)) if False else a", ((3, 0), (0, 4))),
    *_rows("a @ b\nnp.outer(a, b)", ((5, 4), (4, 3)), "i8"),
    *_rows("a @ b", ((5, 4), (4, 3)), "?"),
    *_rows("np.vdot(a, b)\na @ b\nnp.dot(a, b)", ((5,), (5,)), "c16"),
]  # fmt: skip

CUMULATIVE = [
    *_rows("""
        np.maximum.accumulate(a)
        np.minimum.accumulate(a, axis=1)
        np.maximum.accumulate(np.where(a > 2, np.nan, a))
        np.fmax.accumulate(np.where(a > 2, np.nan, a))
        np.maximum.accumulate(a[:2, 0])
        np.maximum.accumulate(a[:0])
        np.logical_or.accumulate(a > 2)
        np.logical_xor.accumulate(a, axis=1)
        np.maximum.accumulate(a, dtype="f4")
    """),
    *_rows(
        "np.bitwise_xor.accumulate(a)\nnp.gcd.accumulate(a)\nnp.minimum.accumulate(a)",
        ((7,),),
        "i4",
    ),
    *_rows("np.maximum.accumulate(a)\nnp.minimum.accumulate(a, axis=1)", dtype="c16"),
    *_rows("""
        np.cumsum(a)
        np.cumsum(a, axis=0)
        a.cumsum(1)
        np.cumprod(a, 0)
        a.cumprod(1)
        np.add.accumulate(a)
        np.diff(a)
        np.diff(a, axis=0)
        np.diff(a, 2, axis=0)
        np.diff(a, axis=0, prepend=0.0)
        np.diff(a, axis=0, append=a[:1])
    """),
    *_rows("np.cumsum(a)\nnp.cumsum(a, 0)", dtype="i2"),
    *_rows("np.cumsum(a, 1)\nnp.diff(a, axis=0)", dtype="?"),
    *_rows("np.cumsum(a, 0)\nnp.cumsum(a)\nnp.diff(a, axis=0)", ((0, 4),)),
]

SEAMS = [
    *_rows("""
        np.roll(a, 2, axis=0)
        np.roll(a, (1, -2), (0, 1))
        np.roll(a, (1, 3), 0)
        np.roll(a, 5, 0)
        np.gradient(a)
        np.gradient(a, axis=0)
        np.gradient(a, 0.5, axis=(1, 0), edge_order=2)
        np.gradient(a, [0, 1, 3, 4, 8], 2.0)
        np.pad(a, 1)
        np.pad(a, ((1, 2), (0, 3)), constant_values=((1, 2), (3, 4)))
        np.pad(a, ((2, 0), (0, 0)), "edge")
        np.pad(a, ((3, 1), (2, 2)), "reflect")
        np.pad(a, ((0, 6), (7, 0)), "symmetric")
        np.pad(a, ((8, 1), (0, 5)), "wrap")
        np.pad(a, {0: (0, 1)})
    """),
    *_rows("""
        np.roll(a, -2)
        np.gradient(a)
        np.gradient(a, edge_order=2)
        np.pad(a, (9, 11), "reflect")
        np.pad(a, (2, 3), "edge")
    """, ((3,),)),
    *_rows("np.pad(a, 2, 'reflect')\nnp.pad(a, 2, 'wrap')\nnp.roll(a, 3)", ((1,),)),
    *_rows("np.roll(a, 1, 0)\nnp.pad(a, 1)\nnp.gradient(a, axis=1)", ((0, 4),)),
    *_rows("""
        np.convolve(a, b)
        np.convolve(b, a, "same")
        np.convolve(a, b, "valid")
        np.convolve(a, [1.0, -2.0])
        np.convolve(a, [1.0, 2.0, 3.0, 4.0], "same")
        np.convolve(a, 2.0)
    """, ((7,), (3,))),
    *_rows("np.convolve(a, b)\nnp.convolve(a, b, 'same')\nnp.convolve(a, b, 'valid')", ((3,), (3,))),
    *_rows("np.roll(a, 1, 0)\nnp.gradient(a, axis=0)\nnp.pad(a, 1, 'edge')\nnp.pad(a, 1, constant_values=7)", ((5, 4),), "i4"),
    *_rows("np.convolve(a, b)\nnp.gradient(a)", ((5,), (2,)), "c16"),
]  # fmt: skip

ALONG = [
    *_rows("""
        np.sort(a)
        np.sort(a, axis=0)
        np.argsort(a, axis=0, kind="stable")
        np.argsort(a, kind="stable")
        np.median(a, axis=0)
        np.median(a, axis=1, keepdims=True)
        np.quantile(a, [0.25, 0.5], axis=0)
        np.percentile(a, 30, axis=1)
    """),
    *_rows("np.sort(a, axis=1)\nnp.median(a, axis=(0, 1))\nnp.quantile(a, [0.1, 0.7], axis=(0, 1))", ((4, 3, 5),), exact=False),
    *_rows("np.sort(a, axis=1)", ((0, 4),)),
]  # fmt: skip

FOURIER = [
    *_rows("""
        np.fft.fft(a)
        np.fft.fft(a, axis=0)
        np.fft.ifft(a, 7, axis=0)
        np.fft.ifft(a, 3, axis=0, norm="ortho")
        np.fft.rfft(a, axis=0)
        np.fft.irfft(a, axis=1)
        np.fft.hfft(a, axis=0, norm="forward")
        np.fft.ihfft(a, axis=0)
        np.fft.fft2(a)
        np.fft.ifft2(a, norm="forward")
        np.fft.rfft2(a)
        np.fft.irfft2(a, (4, 5))
        np.fft.fftn(a, axes=(1, 0))
        np.fft.fftn(a, (6,), axes=(0,))
        np.fft.fftshift(a)
        np.fft.ifftshift(a, axes=0)
    """, exact=False),
    *_rows("""
        np.fft.fft(a)
        np.fft.ifft(a, 13)
        np.fft.rfft(a, norm="ortho")
        np.fft.rfft(a, 10)
        np.fft.irfft(a)
        np.fft.irfft(a, 11, norm="forward")
        np.fft.hfft(a)
        np.fft.ihfft(a, 5)
    """, ((12,),), exact=False),
    *_rows("np.fft.fft(a)\nnp.fft.ifft(a, norm='ortho')\nnp.fft.irfft(a)\nnp.fft.rfft(a)", ((7,),), exact=False),
    *_rows("np.fft.fft(a)\nnp.fft.ifft(a)\nnp.fft.irfft(a)\nnp.fft.fft2(a[:, None])", ((16,),), "c16", exact=False),
    *_rows("np.fft.fft(a, axis=0)\nnp.fft.rfft(a, axis=0)\nnp.fft.fftn(a)", ((11, 1, 2),), exact=False),
    *_rows("np.fft.fftn(a)\nnp.fft.rfftn(a)\nnp.fft.irfftn(a)\nnp.fft.fft2(a, axes=(0, 2))\nnp.fft.ifftn(a, (3, 5), axes=(2, 0))", ((4, 3, 5),), exact=False),
    *_rows("np.fft.fft(a)\nnp.fft.rfft(a)", ((0, 4),), exact=False),
]  # fmt: skip

LINEAR = [
    *_rows("""
        np.linalg.norm(a)
        np.linalg.norm(a, axis=0)
        np.linalg.norm(a, 1, axis=1, keepdims=True)
        np.linalg.norm(a, np.inf, axis=0)
        np.linalg.norm(a, 0, axis=0)
        np.linalg.norm(a, 3, axis=1)
        np.linalg.norm(a, "fro")
        np.linalg.norm(a, 1)
        np.linalg.norm(a, -np.inf, keepdims=True)
        np.linalg.norm(a, 2)
        np.linalg.norm(a, "nuc", keepdims=True)
        np.linalg.svd(a, compute_uv=False)
        np.linalg.cond(a)
        np.linalg.matrix_rank(a)
        np.linalg.pinv(a)
        np.linalg.pinv(a.T)
        np.linalg.qr(a)[0] @ np.linalg.qr(a)[1]
        abs(np.linalg.qr(a, mode="r"))
        np.linalg.qr(a)[0].T @ np.linalg.qr(a)[0]
        _reassembled(np.linalg.svd(a, full_matrices=False))
        _reassembled(np.linalg.svd(a.T, full_matrices=False))
        np.linalg.lstsq(a, a[:, 0] + np.arange(12.0), rcond=None)[:2]
        np.linalg.lstsq(a, np.arange(24.0).reshape(12, 2), rcond=None)[0]
        np.linalg.lstsq(a, a[:, 0], rcond=None)[3]
    """, ((12, 3),), exact=False),
    *_rows("np.linalg.qr(a)[0] @ np.linalg.qr(a)[1]\n_reassembled(np.linalg.svd(a, full_matrices=False))\nnp.linalg.norm(a, axis=0)", ((12, 3),), "c16", exact=False),
    *_rows("np.linalg.matrix_rank(a[:, :1] * np.ones(3))\nnp.linalg.pinv(a[:, :1] * np.ones(3))\nnp.linalg.lstsq(a[:, :1] * np.ones(3), a[:, 1], rcond=None)[:2]", ((12, 3),), exact=False),
    *_rows("""
        np.linalg.cholesky(a @ a.T + 9 * np.eye(5))
        np.linalg.solve(a @ a.T + 9 * np.eye(5), np.arange(5.0))
        np.linalg.solve(a @ a.T + 9 * np.eye(5), a)
        np.linalg.solve(np.tril(a) + 9 * np.eye(5), np.arange(5.0))
        np.linalg.solve(np.triu(a) + 9 * np.eye(5), a)
        np.linalg.solve(np.eye(5) * 2, a)
        np.linalg.matrix_power(a, 5)
        np.linalg.matrix_power(a, 0)
        np.linalg.matrix_power(np.triu(a) + 9 * np.eye(5), -2)
        np.linalg.inv(np.triu(a) - a.T + 7 * np.eye(5))
        np.linalg.solve(np.triu(a) - a.T + 7 * np.eye(5), a[0])
        np.linalg.solve(np.triu(a) - a.T + 7 * np.eye(5), np.arange(10.0).reshape(5, 2))
        np.linalg.solve((np.triu(a) - a.T + 7 * np.eye(5))[::-1], a)
        np.linalg.det(a)
        np.linalg.slogdet((a + 7 * np.eye(5))[::-1])
        np.linalg.det(a * 0)
        np.linalg.slogdet(a * 0)
        np.trace(a, 1)
    """, ((5, 5),), exact=False),
    *_rows("np.linalg.inv(a[::-1] + 9 * np.eye(6)[::-1])\nnp.linalg.det(a)\nnp.linalg.slogdet(a)\nnp.linalg.solve(a + 9j * np.eye(6), a)", ((6, 6),), "c16", exact=False),
    *_rows("np.linalg.inv(a)\nnp.linalg.det(a)\nnp.linalg.slogdet(a)", ((1, 1), (0, 0)), exact=False),
    *_rows("np.linalg.cholesky(a @ a.conj().T + 9 * np.eye(5))\nnp.linalg.solve(a @ a.conj().T + 9 * np.eye(5), a)", ((5, 5),), "c16", exact=False),
    *_rows("""
        np.linalg.inv(a + 9 * np.eye(4))
        np.linalg.det(a)
        np.linalg.slogdet(a)
        np.linalg.qr(a)
        np.linalg.svd(a, full_matrices=False)
        np.linalg.eigvalsh(a + a.swapaxes(1, 2))
        np.linalg.eigvals(a)
        np.linalg.eig(a)
        np.linalg.pinv(a)
        np.linalg.cond(a)
        np.linalg.matrix_rank(a)
        np.linalg.matrix_power(a, 2)
        np.linalg.matrix_power(a + 9 * np.eye(4), -1)
        np.linalg.cholesky(a @ a.swapaxes(1, 2) + 9 * np.eye(4))
        np.linalg.solve(a + 9 * np.eye(4), a)
        np.linalg.solve(a + 9 * np.eye(4), a[0])
        np.linalg.solve(a + 9 * np.eye(4), np.arange(4.0))
        np.linalg.norm(a, 2, axis=(1, 2))
        np.linalg.norm(a, axis=(2, 0))
        np.linalg.norm(a, -1, axis=(0, 2), keepdims=True)
    """, ((3, 4, 4),), exact=False),
    *_rows("np.diagonal(a)\nnp.diagonal(a, 1)\na.diagonal(-2)\nnp.diagonal(a, 7)\nnp.outer(a, a)", ((5, 4),)),
    *_rows("np.diagonal(a)\nnp.diagonal(a, 1, 2, 0)\nnp.cross(a, a + 1, axis=1)", ((4, 3, 5),)),
    *_rows("np.cross(a, b)\nnp.cross(a, b[0])\nnp.cross(a, b, axisc=0)", ((5, 3), (5, 3))),
]  # fmt: skip

STATISTICS = [
    *_rows("""
        np.cov(a)
        np.cov(a, rowvar=False)
        np.cov(a, b, bias=True)
        np.cov(a, b, rowvar=False, ddof=2)
        np.cov(a[0], b[0])
        np.cov(a[0])
        np.cov(a, fweights=np.array([1, 2, 3, 1]), aweights=abs(b[0]) + 1)
        np.cov(a[:0])
        np.cov(a + 1j * b)
        np.corrcoef(a)
        np.corrcoef(a, b, rowvar=False)
        np.corrcoef(a[0])
        np.corrcoef(a + 1j * b)
        getattr(np, "trapezoid", getattr(np, "trapz", None))(a)
        getattr(np, "trapezoid", getattr(np, "trapz", None))(a, np.arange(5.0) ** 2, axis=0)
        getattr(np, "trapezoid", getattr(np, "trapz", None))(a, b, axis=0)
        getattr(np, "trapezoid", getattr(np, "trapz", None))(a[0], dx=0.5)
        np.polyval([1, 2, 3], a)
        np.polyval(b[0], a)
        np.nanprod(np.where(a > 2, np.nan, a), axis=0)
        np.nanmedian(np.where(a > 2, np.nan, a))
        np.nanmedian(np.where(a > 2, np.nan, a), axis=1, keepdims=True)
        np.nanmedian(np.where(a[0] > 2, np.nan, a[0]))
        np.nanquantile(np.where(a > 2, np.nan, a).reshape(-1), [0.3, 0.5])
        np.nanpercentile(np.where(a > 2, np.nan, a), 30, axis=0)
    """, ((5, 4), (5, 4)), exact=False),
    *_rows("""
        np.union1d(a, b)
        np.intersect1d(a, b)
        np.intersect1d(a, b, return_indices=True)
        np.intersect1d(a, b / 2)
        np.intersect1d(np.where(a > 2, np.nan, a), np.where(b > 2, np.nan, b))
        np.setdiff1d(a, b)
        np.setdiff1d(a, [1, 2])
        np.setxor1d(a, b)
        np.lexsort((a, b))
    """, ((7,), (6 + 1,))),
    *_rows("np.lexsort((a, b), axis=0)\nnp.lexsort((a, b))\nnp.union1d(a, b)\nnp.setdiff1d(a, b[:1])", ((5, 4), (5, 4)), "i4"),
    *_rows("""
        np.histogram(a)
        np.histogram(a, bins=4, range=(-2, 3))
        np.histogram(a, bins=[-4, 0, 1, 9])
        np.histogram(a, 5, density=True)
        np.searchsorted(np.array([-2.0, 0.0, 2.0]), a)
        np.digitize(a, np.array([-2.0, 0.0, 2.0]))
        np.interp(a, np.array([-4.0, 4.0]), np.array([0.0, 1.0]))
        np.isin(a, [1, 2])
        np.average(a)
        np.average(a, axis=0)
        np.nansum(np.where(a > 2, np.nan, a), axis=0)
        np.nanmax(np.where(a > 2, np.nan, a), axis=0)
        np.nanmin(np.where(a > 2, np.nan, a))
        np.nanmean(np.where(a > 2, np.nan, a), axis=0)
        np.nanstd(np.where(a > 2, np.nan, a))
        np.nanargmax(np.where(a > 2, np.nan, a))
        np.nanargmin(np.where(a > 2, np.nan, a), axis=1)
        np.nancumsum(np.where(a > 2, np.nan, a), axis=0)
        np.nancumprod(np.where(a > 2, np.nan, a))
        np.nanvar(np.where(a > 2, np.nan, a), axis=1)
    """, exact=False),
    *_rows("np.average(a, axis=0, weights=np.arange(1.0, 6.0))\nnp.average(a, weights=abs(b) + 1)\nnp.average(a, 1, abs(b) + 1, returned=True)", ((5, 4), (5, 4)), exact=False),
    *_rows("np.bincount(a)\nnp.bincount(a, minlength=9)", ((7,),), "u1"),
]  # fmt: skip

PIECES = [
    *_rows("""
        np.append(a, a)
        np.append(a, a[:2] + 1, axis=0)
        np.insert(a, 1, 9, axis=0)
        np.insert(a, -1, a[0], axis=0)
        np.insert(a, 1, [1, 2, 3, 4, 5], axis=1)
        np.insert(a, [0, 5, 2, 2], 7, axis=0)
        np.insert(a, [1, 3], a[:, :2], axis=1)
        np.insert(a, slice(1, 4), 9.7)
        np.insert(a, [], 7, axis=0)
        np.delete(a, 1, axis=0)
        np.delete(a, [1, -1, 1], axis=1)
        np.delete(a, slice(None, None, 2), axis=0)
        np.delete(a, a.shape[0])
        np.delete(a, [True, False, True, False, False], axis=0)
        np.column_stack([a, a[:, 0]])
        np.column_stack([a[0], a[1]])
        np.dstack([a, a * 2])
        np.atleast_3d(a)
        np.atleast_3d(a[0], 4)
        np.block([[a, a + 1], [np.zeros((2, 8))]])
        np.block([a[0], 1.0, 2])
        np.block([[[a]], [[-a]]])
        np.rot90(a)
        np.rot90(a, 2)
        np.rot90(a, -1)
        np.rot90(a, 1, (1, 0))
        np.vsplit(a[:4], 2)
        np.hsplit(a, [1, 3])
        np.hsplit(a[0], 2)
        np.dsplit(a[:, :, None] * np.arange(4.0), 2)
    """),
    *_rows("np.insert(a, 0, [1, 2])\nnp.append(a, 1)\nnp.delete(a, [])\nnp.column_stack([a, a])", ((0,),)),
    *_rows("np.insert(a, 2, 9.9)\nnp.insert(a, [1, 1, -1], [7, 8, 9])\nnp.append(a, [0.5])", ((7,),), "i4"),
    *_rows("np.insert(a, 1, b, axis=0)\nnp.append(a, b, axis=1)\nnp.dstack([a, b])\nnp.block([[a], [b]])", ((5, 4), (5, 4))),
]  # fmt: skip

MASKED = [
    *_rows("""
        np.select([a > 2, a < 0], [a, b], 7)
        np.select([a > 2, np.array([True, False, True, True])], [a.astype("f4"), 2])
        _updated(a, lambda x: np.copyto(x, 5))
        _updated(a, lambda x: np.copyto(x, b[0], where=x > 0))
        _updated(a, lambda x: np.copyto(x, b[:, :1], where=b[:1] > 0))
        _updated(a, lambda x: np.putmask(x, x > 0, b))
        _updated(a, lambda x: np.putmask(x, x > 0, [1, 2, 3]))
        _updated(a, lambda x: np.putmask(x, b > 0, b[:2]))
        _updated(a, lambda x: np.place(x, x > 0, [1, 2, 3]))
        _updated(a, lambda x: np.place(x, x > 9, []))
        np.extract(a > 0, b)
    """, ((5, 4), (5, 4))),
    *_rows("_updated(a, lambda x: np.copyto(x, a / 2, casting='unsafe'))\n_updated(a, lambda x: np.putmask(x, x > 0, [9.9, 8.8]))", ((7,),), "i8"),
]  # fmt: skip

FAMILIES = {
    "pieces": PIECES,
    "masked": MASKED,
    "along": ALONG,
    "fourier": FOURIER,
    "linear": LINEAR,
    "statistics": STATISTICS,
    "pointwise": POINTWISE,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "index": INDEX,
    "products": PRODUCTS,
    "cumulative": CUMULATIVE,
    "seams": SEAMS,
}


# ---- new arrays: the same function of NumPy and of `hpcdist.array`

CREATION = """
    zeros((5, 4))
    zeros(3, dtype="i4")
    ones((2, 3, 4))
    full((5, 4), 7)
    full(5, 2.5)
    zeros(())
    zeros((0, 3))
    arange(7)
    arange(2, 9, 3)
    arange(9, 2, -2)
    arange(0.1, 2, 0.3)
    arange(5, dtype="f4")
    arange(0)
    arange(3.0, 1.0)
    arange(2**64 - 5, 2**64 - 1, dtype="u8")
    arange(2**63 - 9, 2**63 - 1, 3)
    arange(2**62, 2**62 - 9, -4, dtype="u8")
    arange(200, 255, 50, dtype="u1")
    arange(-128, 127, 60, dtype="i1")
    linspace(0, 1, 7)
    linspace(-2, 5, 6, endpoint=False)
    linspace(0, 1, 1)
    linspace(3, 3, 4)
    linspace(0, 10, 5, dtype="i8")
    linspace(0, 1, 0)
    eye(5)
    eye(4, 6, k=1)
    eye(6, 3, k=-2, dtype="i4")
    asarray([[1, 2], [3, 4], [5, 6]])
    asarray(3.5)
    fft.fftfreq(7)
    fft.fftfreq(8, d=0.5)
    fft.rfftfreq(7)
    fft.rfftfreq(8, d=0.1)
"""


def check_creation(line):
    """Try a function that makes arrays, with all placements."""
    wanted = eval(f"np.{line}")
    names = {**vars(dist.array), "np": np}
    for mesh in meshes():
        for placements in placements_of(mesh, wanted.ndim):
            names.update(mesh=mesh, placements=placements)
            made = eval(f"{line[:-1]}, mesh=mesh, placements=placements)", names)
            wanted_layout = dist.shard_tensor(wanted, mesh, placements).layout
            assert made.layout is wanted_layout, (line, made.layout)
            same(whole(made), wanted, True, f"{line} {placements}")


def check_default_mesh():
    """New arrays are whole on the current mesh, or on all ranks."""
    everyone = dist.ProcessMesh([*range(dist.get_world_size())], ["all"])
    assert dist.array.zeros(3).process_mesh.process_ids == everyone.process_ids
    with everyone:
        made = dist.array.arange(3)
        assert made.process_mesh == everyone
        assert made.layout.is_replicated


def check_grids():
    """`meshgrid` cuts each dimension as the array along it is cut, `tril` keeps the layout."""
    for mesh in meshes():
        for one, two in itertools.product(placements_of(mesh, 1), repeat=2):
            x, y = np.arange(5.0), np.arange(4.0)
            a, b = dist.shard_tensor(x, mesh, one), dist.shard_tensor(y, mesh, two)
            for options in ({}, {"indexing": "ij"}, {"sparse": True}):
                found = whole(tuple(np.meshgrid(a, b, **options)))
                same(found, tuple(np.meshgrid(x, y, **options)), True, f"{one} {two} {options}")


# ---- random programs

STEPS = [
    lambda a, n: a + 1,
    lambda a, n: a * 2 - a[:1],
    lambda a, n: a - a.sum(-1, keepdims=True) % 7,
    lambda a, n: np.maximum(a, n % 5),
    lambda a, n: a.T,
    lambda a, n: np.flip(a, n % a.ndim),
    lambda a, n: np.concatenate([a, a[: n % 3]]),
    lambda a, n: a[n % 2 :],
    lambda a, n: a[:, :: 1 + n % 2] if a.ndim > 1 else a[::-1],
    lambda a, n: a[a[:, 0] >= a[:, 0].min()] if a.ndim > 1 and a.size else a,
    lambda a, n: a.reshape(-1, a.shape[0]).T if a.size else a,
    lambda a, n: np.cumsum(a, n % a.ndim) % 11,
    lambda a, n: np.roll(a, n, n % a.ndim),
    lambda a, n: np.where(a > n % 4, a, -a),
    lambda a, n: np.tensordot(a, a, ([1], [1])) % 13 if a.ndim == 2 and a.shape[0] < 9 else a,
    lambda a, n: np.expand_dims(a, n % 2).squeeze(n % 2),

    lambda a, n: np.diff(a, axis=0, prepend=0) if a.shape[0] else a,
    lambda a, n: _assigned(a.copy(), slice(1, None, 2), n % 7),
    lambda a, n: _assigned(a.copy(), a > 3, 0),
    lambda a, n: np.stack([a, a + n % 3]).max(0),
    lambda a, n: np.take(a, [0, -1], axis=n % a.ndim) if 0 not in a.shape else a,
    lambda a, n: np.repeat(a, 1 + n % 2, axis=0) if a.shape[0] < 9 else a[:5],
]  # fmt: skip


def check_program(seed, length=20):
    """Run a random program on a spread array and on NumPy's, and compare after each step."""
    draw = np.random.default_rng(seed)
    x = draw.integers(-4, 5, draw.integers(1, 8, 2)).astype("f8")
    mesh = draw.choice([*meshes()])
    ways = placements_of(mesh, 2)
    a = spread(x, mesh, ways[draw.integers(len(ways))])
    told = [f"seed {seed}: {a.layout}"]
    for _ in range(length):
        step, n = int(draw.integers(len(STEPS))), int(draw.integers(100))
        x, a = STEPS[step](x, n), STEPS[step](a, n)
        told.append(f"step {step}({n}) {a.layout}")
        same(whole(a), x, True, "\n".join(told))
        if x.size > 400:
            x, a = x[:7, :5], a[:7, :5]


# ---- random indices


def random_key(draw, shape):
    """Return an index of integers, slices, newaxis and an ellipsis."""
    key = []
    for length in shape[: draw.integers(len(shape) + 1)]:
        kind = draw.integers(4)
        if kind == 0 and length:
            key.append(int(draw.integers(-length, length)))
        elif kind == 1:
            key.append(slice(None))
        else:
            low, high = (int(each) for each in draw.integers(-length - 2, length + 3, 2))
            step = int(draw.choice([-3, -2, -1, 1, 1, 2, 3]))
            ends = [None if draw.integers(4) == 0 else each for each in (low, high)]
            key.append(slice(*ends, step))
    for _ in range(draw.integers(2)):
        key.insert(int(draw.integers(len(key) + 1)), None)
    if draw.integers(3) == 0:
        key.append(Ellipsis)
    return tuple(key)


def check_index(seed):
    """Choose by a random index, assign to what it chooses, and choose again from the result."""
    draw = np.random.default_rng(seed)
    shape = tuple(int(each) for each in draw.integers(0, 8, draw.integers(1, 4)))
    x = np.arange(np.prod(shape), dtype="f8").reshape(shape)
    mesh = draw.choice([*meshes()])
    ways = placements_of(mesh, x.ndim)
    a = spread(x, mesh, ways[draw.integers(len(ways))])
    key = random_key(draw, shape)
    told = f"seed {seed}: {a.layout} [{key}]"
    chosen, wanted = a[key], x[key]
    same(whole(chosen), wanted, True, told)
    again = random_key(draw, wanted.shape)
    same(whole(chosen[again]), wanted[again], True, f"{told} [{again}]")
    value = np.asarray(wanted) * 2 - 5
    if draw.integers(2):
        ways = placements_of(mesh, value.ndim)
        a[key] = spread(value, mesh, ways[draw.integers(len(ways))])
    else:
        a[key] = value
    x[key] = value
    same(whole(a), x, True, f"{told} = {value.shape}")


# ---- whose memory a result has


def arrays_in(value):
    """Return the arrays of a result."""
    if isinstance(value, (tuple, list)):
        return [each for one in value for each in arrays_in(one)]
    if isinstance(value, np.generic):
        return [np.array(value)]
    return [value] if isinstance(value, (np.ndarray, DistArray)) else []


def check_memory(row):
    """A result has memory of its own wherever NumPy's has."""
    given = [numbers(shape, row.dtype, seed) for seed, shape in enumerate(row.shapes)]
    wanted = arrays_in(row.function(*given))
    if not wanted:  # but a number of Python's, which has no memory to share
        return
    mesh = dist.ProcessMesh([*range(dist.get_world_size())])
    for placements in ([R], [S0]):
        if S0 in placements and not all(row.shapes):
            continue
        arrays = [spread(x, mesh, placements) for x in given]
        for found, theirs in zip(arrays_in(row.function(*arrays)), wanted, strict=True):
            for a, x in zip(arrays, given, strict=True):
                shared = np.shares_memory(found.local, a.local)
                assert not shared or np.shares_memory(theirs, x), (row.name, placements)
