"""Fourier transforms across ranks: where results lie, how much each rank has, odd lengths."""

import numpy as np
import pytest
from arrays_in_a_row import S0, S1, S2, close, line, values

import hpcdist as dist


def test_the_cut_moves_to_a_dimension_that_is_done_and_back_by_the_inverse():
    def check():
        x = values(6, 9)
        found = np.fft.fft2(line(3, x, S0))
        assert found.placements == [S1]
        assert np.fft.ifft2(found).placements == [S0]
        close(np.fft.ifft2(found), x)
        assert np.fft.fft2(line(3, values(4, 6, 9), S0)).placements == [S0]
        assert np.fft.fftn(line(3, values(4, 6, 9), S0)).placements == [S2]

    dist.simulate(3, check)


def test_along_a_dimension_that_is_not_cut_the_bits_are_those_of_numpy():
    def check():
        x = values(7, 5, 6)
        found = np.fft.rfftn(line(3, x, S0), axes=(1, 2))
        np.testing.assert_array_equal(dist.unshard_dtensor(found), np.fft.rfftn(x, axes=(1, 2)))

    dist.simulate(3, check)


@pytest.mark.parametrize("placements", [[S0, S1], [S1, S0], [S0, S0], [S2, S0]])
def test_pencils_on_a_grid_of_ranks(placements):
    def check():
        mesh = dist.ProcessMesh([[3, 1], [0, 2]])
        x = values(4, 6, 5)
        found = np.fft.fftn(dist.shard_tensor(x, mesh, placements))
        assert found.local.size < x.size
        close(found, np.fft.fftn(x))

    dist.simulate(4, check)


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("function", [np.fft.fft, np.fft.ifft, np.fft.rfft, np.fft.irfft])
def test_an_array_of_one_dimension_may_have_any_length(function, ranks):
    def check():
        for length in (2, 3, 4, 8, 31, 36, 97, 121, 128):
            for norm in ("backward", "ortho", "forward"):
                x = values(length)
                close(function(line(ranks, x, S0), norm=norm), function(x, norm=norm))

    dist.simulate(ranks, check)


@pytest.mark.parametrize("length", [4096, 4093])
def test_no_rank_has_more_than_its_share_of_an_array_of_one_dimension(length):
    def check():
        x = values(length)
        found = np.fft.fft(line(4, x, S0))
        assert found.local.size <= 1024
        close(found, np.fft.fft(x))

    dist.simulate(4, check)


@pytest.mark.parametrize("length", [36, 37])
def test_single_precision_stays(length):
    def check():
        x = values(length).astype("f4")
        found, wanted = np.fft.fft(line(3, x, S0)), np.fft.fft(x)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(dist.unshard_dtensor(found), wanted, rtol=1e-4, atol=1e-4)

    dist.simulate(3, check)


def test_a_rank_outside_the_mesh_has_nothing():
    def check():
        for shape in ((6, 4), (12,), (7,)):
            found = np.fft.fftn(line(2, values(*shape), S0))
            outside = dist.get_rank() == 2
            assert found.shape == shape
            assert (found.local.size == 0) == outside

    dist.simulate(3, check)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: np.fft.fft(a, 0),
        lambda a: np.fft.fft(a, norm="half"),
        lambda a: np.fft.fft2(a, (3, 3), axes=(0,)),
        lambda a: np.fft.fft(a, axis=2),
        lambda a: np.fft.irfft(a[:, :1]),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank(wrong):
    def check():
        a = line(2, np.ones((4, 4)), S0)
        with pytest.raises(ValueError, match=r"[a-z]"):
            wrong(a)
        assert a.sum() == 16

    dist.simulate(2, check)
