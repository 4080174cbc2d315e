"""What is written through views of views reaches the array, or is refused on all ranks."""

import numpy as np
import pytest

import hpcdist as dist


def element(draw, length):
    return int(draw.integers(length))


VIEWS = [
    lambda a, draw: a.T,
    lambda a, draw: a.reshape(-1),
    lambda a, draw: a.reshape(a.shape[::-1]),
    lambda a, draw: np.ravel(a),
    lambda a, draw: np.flip(a, element(draw, a.ndim)) if a.ndim else a,
    lambda a, draw: np.rot90(a, int(draw.integers(-3, 4))) if a.ndim > 1 else a,
    lambda a, draw: a[element(draw, len(a))] if a.ndim and len(a) else a,
    lambda a, draw: a[..., element(draw, a.shape[-1])] if a.ndim and a.shape[-1] else a,
    lambda a, draw: a[::2] if a.ndim else a,
    lambda a, draw: a[::-1] if a.ndim else a,
    lambda a, draw: np.split(a, [1])[1] if a.ndim else a,
    lambda a, draw: a[..., None],
    lambda a, draw: np.expand_dims(a, 0),
    lambda a, draw: np.squeeze(a),
    lambda a, draw: a[...],
    lambda a, draw: a.real,
]


def first(view):
    return (0,) if view.ndim and len(view) else (Ellipsis,)


def assign(view, value):
    view[...] = value


def add(view, value):
    view += value


def add_to_first(view, value):
    view[first(view)] += value


def assign_first(view, value):
    view[first(view)] = value


def assign_some(view, value):
    view[view > 3] = value


def copy_some(view, value):
    np.copyto(view, value, where=view < 2)


def add_into(view, value):
    np.add(view, value, out=view)


def assign_last(view, value):
    if view.size:
        view.flat[-1] = value


WRITES = [assign, add, add_to_first, assign_first, assign_some, copy_some, add_into, assign_last]


def viewed(a, seed):
    """Return a random view of views of an array."""
    draw = np.random.default_rng(seed)
    for number in draw.integers(len(VIEWS), size=draw.integers(1, 4)):
        a = VIEWS[number](a, draw)
    return a


def is_view(view, x):
    """Return whether NumPy's result is a view: not the copy that it makes if it has to."""
    return isinstance(view, np.ndarray) and (not view.size or np.shares_memory(view, x))


def check(seed):
    draw = np.random.default_rng(seed)
    x = draw.integers(-4, 5, draw.integers(0, 5, draw.integers(1, 4))).astype(float)
    ranks = [*range(dist.get_world_size())]
    mesh = dist.ProcessMesh(np.reshape(ranks[::-1], (2, 2)) if ranks[3:] and seed % 2 else ranks)
    ways = [dist.Replicate(), *map(dist.Shard, range(x.ndim))]
    a = dist.shard_tensor(
        x.copy(), mesh, [ways[element(draw, len(ways))] for _ in range(mesh.ndim)]
    )
    for _ in range(6):
        again, value = int(draw.integers(1 << 30)), float(draw.integers(9))
        write, before = WRITES[element(draw, len(WRITES))], x.copy()
        view = viewed(x, again)
        if not is_view(view, x):
            continue
        write(view, value)
        try:
            write(viewed(a, again), value)
        except dist.UsageError as error:
            assert "read-only" in str(error), (seed, again)  # noqa: PT017
            x = before
        np.testing.assert_array_equal(
            dist.unshard_dtensor(a), x, err_msg=f"{seed} {again} {write.__name__} {a.layout}"
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(100, 500), marks=pytest.mark.thorough)], ids=str
)
def test_what_is_written_to_views_is_never_lost(ranks, seeds):
    dist.simulate(ranks, lambda: [check(seed) for seed in seeds])
