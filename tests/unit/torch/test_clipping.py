"""Norms of gradients of 16 bits, which have more digits than their elements."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import hpcdist as dist  # noqa: E402
from hpcdist.torch.on_grid import total_norm  # noqa: E402


def gradients(dtype, largest):
    generator = torch.Generator().manual_seed(3)
    shapes = (7,), (5, 9), (3, 2, 4)
    return [(torch.rand(each, generator=generator) * largest).to(dtype) for each in shapes]


def expected(several, norm_type):
    flat = np.concatenate([each.double().numpy().ravel() for each in several])
    return np.linalg.norm(flat, norm_type)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_norm_has_32_bits_at_least(dtype, norm_type):
    several = gradients(dtype, 1.0)
    assert float(total_norm(several, norm_type)) == pytest.approx(
        expected(several, norm_type), rel=1e-6
    )


def test_gradients_of_several_dtypes_have_one_norm():
    several = [*gradients(torch.bfloat16, 1.0), *gradients(torch.float32, 1.0)]
    assert float(total_norm(several, 2.0)) == pytest.approx(expected(several, 2), rel=1e-6)
    assert float(total_norm([], 2.0)) == 0


def test_clipping_bears_a_norm_that_float16_cannot_tell():
    several = gradients(torch.float16, 6e4)
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in several]
    for parameter, each in zip(parameters, several, strict=True):
        parameter.grad = each.clone()
    norm = float(dist.clip_grad_norm_(parameters, 100.0))
    assert norm == pytest.approx(expected(several, 2), rel=1e-6)
    left = expected([each.grad for each in parameters], 2)
    assert left == pytest.approx(100.0, rel=1e-3)
