"""Linear algebra across ranks: what is promised beyond the values of NumPy."""

import numpy as np
import pytest
from arrays_in_a_row import S0, S1, close, line, values

import hpcdist as dist
from hpcdist.mesh.rules.elimination import factored

LinAlgError = np.linalg.LinAlgError


def test_all_ranks_have_the_same_bits_of_what_is_small():
    def check():
        a, b = line(3, values(50, 4), S0), line(3, values(50, 2), S0)
        q, r = np.linalg.qr(a)
        u, s, vh = np.linalg.svd(a, full_matrices=False)
        x, residuals, rank, values_of = np.linalg.lstsq(a, b, rcond=None)
        assert q.placements == u.placements == [S0]
        assert rank == 4
        shared = (r, s, vh, x, residuals, values_of, np.linalg.svd(a, compute_uv=False))
        assert all(each.layout.is_replicated for each in shared)
        return b"".join(each.local.tobytes() for each in shared)

    assert len({*dist.simulate(3, check)}) == 1


@pytest.mark.parametrize("kind", ["full", "deficient", "zero"])
def test_q_is_orthonormal_whatever_the_matrix_and_its_parts(kind):
    def check():
        x = values(14, 3)
        if kind == "deficient":
            x[:, 2] = x[:, 0]
        if kind == "zero":
            x[:] = 0
        for a in (line(3, x, S0), line(3, x, S0)[4:], line(3, x, S0)[3:13]):
            whole = dist.unshard_dtensor(a)
            q, r = np.linalg.qr(a)
            assert q.layout is a.layout
            close(q.T @ q, np.eye(3))
            close(q @ r, whole)
            assert (np.tril(r.local, -1) == 0).all()

    dist.simulate(3, check)


def test_a_wide_matrix_is_factored_as_the_transpose_of_a_tall_one():
    def check():
        x = values(3, 20)
        u, s, vh = np.linalg.svd(line(3, x, S1), full_matrices=False)
        assert vh.placements == [S1]
        close((u * s) @ vh, x)

    dist.simulate(3, check)


@pytest.mark.parametrize(("placement", "dtype"), [(S0, "f8"), (S1, "c16")])
def test_matrices_of_many_blocks_are_factored_and_solved_where_they_lie(placement, dtype):
    def check():
        x = values(270, 270).astype(dtype)
        if dtype == "c16":
            x = x + 1j * values(270, 270, seed=1)
        matrix, right = x @ x.conj().T + 270 * np.eye(270), values(270, 5)
        a, b = line(2, matrix, placement), line(2, right, S0)
        lower = np.linalg.cholesky(a)
        assert lower.placements == [S0]
        close(lower, np.linalg.cholesky(matrix))
        found = np.linalg.solve(a, b)
        assert found.placements == [S0]
        close(found, np.linalg.solve(matrix, right))
        close(np.linalg.solve(lower, b), np.linalg.solve(np.linalg.cholesky(matrix), right))

    dist.simulate(2, check)


@pytest.mark.parametrize(("placement", "dtype"), [(S0, "f8"), (S1, "c16")])
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_square_matrix_is_solved_and_inverted_where_its_rows_lie(ranks, placement, dtype):
    def check():
        x = values(270, 270).astype(dtype)
        if dtype == "c16":
            x = x + 1j * values(270, 270, seed=1)
        a, right = line(ranks, x, placement), values(270, 5, seed=2)
        found = np.linalg.solve(a, line(ranks, right, S0))
        assert found.placements == [S0]
        close(found, np.linalg.solve(x, right))
        close(np.linalg.solve(a, right[:, 0]), np.linalg.solve(x, right[:, 0]))
        inverse = np.linalg.inv(a)
        assert inverse.placements == [S0]
        close(inverse, np.linalg.inv(x))
        np.testing.assert_array_equal(dist.unshard_dtensor(a), x)
        sign, log = np.linalg.slogdet(a)
        np.testing.assert_allclose(sign.local, np.linalg.slogdet(x)[0])
        np.testing.assert_allclose(log.local, np.linalg.slogdet(x)[1])

    dist.simulate(ranks, check)


def test_the_backward_error_of_a_solution_is_that_of_numpy_for_bad_matrices_too():
    def check():
        size = 200
        hilbert = 1 / (1.0 + np.add.outer(np.arange(size), np.arange(size)))
        scaled = values(size, size) * 10.0 ** np.arange(-100, 100)[:, None]
        for x in (hilbert + 1e-9 * values(size, size), scaled, values(size, size) ** 9):
            right = x @ np.ones(size)
            found = dist.unshard_dtensor(np.linalg.solve(line(3, x, S0), right))
            sizes = (np.abs(each).max() for each in (x, found, x @ found - right))
            largest, of_found, apart = sizes
            assert apart <= 1e-12 * size * largest * of_found

    dist.simulate(3, check)


@pytest.mark.parametrize("shift", [0, 1, 4, 149])
def test_pivots_come_from_any_rank(shift):
    def check():
        x = np.roll(np.eye(150), shift, axis=0) * 3
        a = line(4, x, S0)
        close(np.linalg.inv(a), x.T / 9)
        sign, log = np.linalg.slogdet(a)
        assert sign.local == (-1) ** shift
        np.testing.assert_allclose(log.local, 150 * np.log(3))

    dist.simulate(4, check)


def test_a_large_determinant_and_a_small_one_are_those_of_numpy():
    def check():
        for scale in (1e30, 1e-30):
            x = values(40, 40) * scale
            with np.errstate(over="ignore"):
                wanted = np.linalg.det(x)
            np.testing.assert_allclose(np.linalg.det(line(2, x, S0)).local, wanted)
        assert np.linalg.det(line(2, np.ones((4, 4)), S0)).local == 0

    dist.simulate(2, check)


def test_single_precision_stays_in_elimination():
    def check():
        x = values(9, 9).astype("f4")
        a = line(2, x, S0)
        for found in (np.linalg.inv(a), np.linalg.solve(a, x[:, 0]), *np.linalg.slogdet(a)):
            assert found.dtype == np.float32

    dist.simulate(2, check)


@pytest.mark.parametrize("shape", [(9, 9), (40, 7), (3, 12), (0, 4), (5, 0)])
def test_the_factors_are_those_of_the_rows_in_their_order(shape):
    x = values(*shape)
    if x.size:
        x[1] = x[0]
    packed = x.copy(order="F")
    order = factored(packed)
    few = min(shape)
    lower = np.tril(packed[:, :few], -1) + np.eye(shape[0], few)
    np.testing.assert_allclose(lower @ np.triu(packed[:few]), x[order], atol=1e-12)
    assert (np.abs(lower) <= 1).all()


def test_an_upper_triangle_is_the_adjoint_of_the_lower_one():
    def check():
        import hpcdist.array as xp

        x = values(6, 6)
        matrix = x @ x.T + np.eye(6)
        close(xp.linalg.cholesky(line(3, matrix, S0), upper=True), np.linalg.cholesky(matrix).T)
        stacked = np.stack([matrix, matrix + 1])
        found = xp.linalg.cholesky(line(3, stacked, S0), upper=True)
        close(found, np.linalg.cholesky(stacked).swapaxes(1, 2))

    dist.simulate(3, check)


def singular_stack():
    stack = np.stack([np.eye(3)] * 3)
    stack[2] = 0
    return stack


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: np.linalg.cholesky(line(3, -np.eye(5), S0)),
        lambda: np.linalg.cholesky(line(3, np.diag([1.0, 1, 1, 1, -1]), S0)),
        lambda: np.linalg.cholesky(line(3, np.ones((4, 5)), S0)),
        lambda: np.linalg.inv(line(3, singular_stack(), S0)),
        lambda: np.linalg.cholesky(line(3, -singular_stack(), S0)),
        lambda: np.linalg.solve(line(3, singular_stack(), S0), line(3, np.ones(3), S0)),
        lambda: np.linalg.solve(line(3, np.diag([1.0, 2, 0]), S0), np.ones(3)),
        lambda: np.linalg.solve(line(3, np.ones((4, 5)), S0), np.ones(4)),
        lambda: np.linalg.qr(line(3, np.ones(3), S0)),
        lambda: np.linalg.inv(line(3, np.ones((5, 5)), S0)),
        lambda: np.linalg.inv(line(3, np.ones((5, 4)), S0)),
        lambda: np.linalg.det(line(3, np.ones((4, 5)), S1)),
        lambda: np.linalg.solve(line(3, np.arange(9.0).reshape(3, 3) * [1, 2, 0], S0), np.ones(3)),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(wrong):
    def check():
        with pytest.raises(LinAlgError):
            wrong()
        assert line(3, np.ones(4), S0).sum() == 4

    dist.simulate(3, check)


def test_a_tolerance_may_be_another_one_for_each_matrix_of_a_stack():
    def check():
        stack, shares = np.stack([np.diag([1.0, 0.1])] * 3), np.array([0.01, 0.5, 2.0])
        a = line(3, stack, S0)
        for given in (shares, line(3, shares, S0)):
            close(np.linalg.pinv(a, given), np.linalg.pinv(stack, shares))
            close(np.linalg.matrix_rank(a, given), np.linalg.matrix_rank(stack, shares))

    dist.simulate(3, check)


def test_eigenvalues_that_are_complex_on_one_rank_are_on_all():
    def check():
        stack = np.stack([np.eye(2), np.eye(2), [[0.0, -1], [1, 0]]])
        a = line(3, stack, S0)
        assert np.linalg.eigvals(a).dtype == np.complex128
        found = np.linalg.eig(a)
        assert all(each.dtype == np.complex128 for each in found)
        assert np.linalg.eigvals(a[:2]).dtype == np.linalg.eigvals(stack[:2]).dtype

    dist.simulate(3, check)


def test_a_rank_outside_the_mesh_has_nothing():
    def check():
        a = line(2, values(8, 2), S0)
        matrix = line(2, 9 * np.eye(4) + 1, S0)
        q, r = np.linalg.qr(a)
        found = [q, r, *np.linalg.svd(a, full_matrices=False), np.linalg.pinv(a)]
        found += [np.linalg.cholesky(matrix), np.diagonal(matrix), np.linalg.norm(a, axis=0)]
        found += [
            np.linalg.solve(matrix, np.ones((4, 2))),
            np.linalg.solve(matrix + line(2, np.eye(4)[::-1] * 99, S0), np.ones(4)),
            np.linalg.inv(line(2, values(3, 2, 2), S0)),
            np.linalg.inv(line(2, values(4, 4), S0)),
            np.linalg.lstsq(a, line(2, values(8), S0), rcond=None)[0],
        ]
        np.linalg.slogdet(matrix)
        outside = dist.get_rank() == 2
        assert all((each.local.size == 0) == outside for each in found)

    dist.simulate(3, check)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: np.linalg.norm(a, 5, axis=(0, 1)),
        lambda a: np.linalg.norm(a, 1, axis=(0, 0)),
        lambda a: np.linalg.norm(a, "fro", axis=0),
        lambda a: np.diagonal(a, 0, 1, 1),
        lambda a: np.cross(a, a),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank(wrong):
    def check():
        a = line(2, np.ones((4, 4)), S0)
        with pytest.raises(ValueError, match=r"[a-z]"):
            wrong(a)
        assert a.sum() == 16

    dist.simulate(2, check)
