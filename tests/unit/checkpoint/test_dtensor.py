"""Which part of a DTensor a rank has: as torch itself divides it."""

import math
from itertools import chain, pairwise, product

import pytest
from hypothesis import given, settings, strategies as st

from hpcdist.checkpoint.dtensor import Division, indices_of

torch = pytest.importorskip("torch")
placement_types = pytest.importorskip("torch.distributed.tensor.placement_types")


@settings(max_examples=150, deadline=None)
@given(
    length=st.integers(0, 13),
    axes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    data=st.data(),
)
def test_a_rank_has_the_indices_that_torch_gives_it(length, axes, data):
    """Axes of the mesh divide what those before them have left, in strides or not."""
    expected, divisions = torch.arange(length), []
    for parts, strides in axes:
        part = data.draw(st.integers(0, parts - 1))
        divisions.append(Division(0, parts, part, strides))
        kind = placement_types._StridedShard if strides > 1 else placement_types.Shard
        placement = kind(0, split_factor=strides) if strides > 1 else kind(0)
        chunks, _ = placement._split_tensor(expected, parts, with_padding=False)
        expected = chunks[part]
    (runs,) = indices_of((length,), divisions)
    assert [index for start, stop in runs for index in range(start, stop)] == expected.tolist()
    assert all(one[1] < other[0] for one, other in pairwise(runs))


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    data=st.data(),
)
def test_the_ranks_of_a_mesh_have_all_of_a_tensor_once(shape, sizes, data):
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in sizes]
    strides = data.draw(st.integers(1, 3))
    elements = []
    for place in product(*map(range, sizes)):
        indices = indices_of(
            shape,
            [Division(dims[0], sizes[0], place[0], strides), Division(dims[1], sizes[1], place[1])],
        )
        elements += product(*(chain(*(range(*run) for run in runs)) for runs in indices))
    assert len(elements) == len(set(elements)) == math.prod(shape)
