"""What has no rule says so, what it would cost and what to do; it never gathers by itself."""

import numpy as np
import pytest

import hpcdist as dist

WITHOUT_RULE = {
    "numpy.unique": lambda a: np.unique(a, axis=0),
    "numpy.linalg.eig": lambda a: np.linalg.eig(a[:4]),
    "numpy.linalg.eigh": lambda a: np.linalg.eigh(a[:4]),
    "numpy.linalg.svd": np.linalg.svd,
    "numpy.linalg.qr": lambda a: np.linalg.qr(a[:4]),
    "numpy.linalg.lstsq": lambda a: np.linalg.lstsq(a, a[:, 0]),
    "numpy.linalg.solve": lambda a: np.linalg.solve(a[:4], np.ones((2, 4, 4))),
    "numpy.histogram": lambda a: np.histogram(a, bins="auto"),
    "numpy.unwrap": np.unwrap,
    "numpy.kron": lambda a: np.kron(a, a),
    "numpy.apply_along_axis": lambda a: np.apply_along_axis(sum, 0, a),
    "subtract.reduce": np.subtract.reduce,
    "add.reduceat": lambda a: np.add.reduceat(a, [0, 2]),
}


def spread(ranks, *placements):
    x = np.arange(20.0).reshape(5, 4)
    return dist.shard_tensor(x, dist.ProcessMesh([*range(ranks)]), placements)


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_what_has_no_rule_names_the_layouts_the_bytes_and_the_remedy(name):
    def check():
        with pytest.raises(dist.UsageError) as raised:
            WITHOUT_RULE[name](spread(2, dist.Shard(0)))
        told = str(raised.value)
        assert name in told
        assert "Layout(" in told
        assert "Shard(0)" in told
        assert "bytes" in told
        assert "dist.reshard(" in told
        assert "dist.unshard_dtensor(a)" in told

    dist.simulate(2, check)


def test_the_bytes_are_those_of_the_whole_array():
    def check():
        with pytest.raises(dist.UsageError, match="gather 160 bytes"):
            np.unwrap(spread(2, dist.Shard(1)))

    dist.simulate(2, check)


def test_whole_arrays_need_no_rule():
    def check():
        a = spread(2)
        found = np.unique(a % 3, return_counts=True)
        assert all(each.placements == [dist.Replicate()] for each in found)
        np.testing.assert_array_equal(found[0], [0, 1, 2])
        assert np.linalg.cond(a) == np.linalg.cond(np.arange(20.0).reshape(5, 4))

    dist.simulate(2, check)


def test_a_program_may_allow_to_gather_and_gets_whole_arrays():
    def check():
        a = spread(3, dist.Shard(0))
        with dist.array_policy(replicate="allow"):
            found = np.unwrap(a)
            assert found.layout.is_replicated
            np.testing.assert_array_equal(found, np.unwrap(np.arange(20.0).reshape(5, 4)))
        with pytest.raises(dist.UsageError):
            np.unwrap(a)

    dist.simulate(3, check)


def test_a_program_may_ask_to_be_warned():
    # Warnings are of the process, so this is for one rank; its array is cut all the same.
    def check():
        a = spread(1, dist.Shard(0))
        with (
            dist.array_policy(replicate="warn"),
            pytest.warns(UserWarning, match=r"numpy\.unwrap has no rule.*160 bytes"),
        ):
            np.unwrap(a)

    dist.simulate(1, check)


def test_a_policy_is_of_its_block_and_thread():
    def check():
        allow = dist.get_rank() == 0
        with dist.array_policy(replicate="allow" if allow else "error"):
            dist.barrier()
            x = dist.shard_tensor(
                np.arange(4.0), dist.ProcessMesh([dist.get_rank()]), [dist.Shard(0)]
            )
            if allow:
                np.unwrap(x)
            else:
                with pytest.raises(dist.UsageError):
                    np.unwrap(x)

    dist.simulate(2, check)


def test_a_wrong_policy_is_refused():
    with (
        pytest.raises(dist.UsageError, match="replicate must be one of error, warn, allow"),
        dist.array_policy(replicate="gather"),
    ):
        pass


def test_arrays_on_different_meshes_are_refused_with_the_remedy():
    def check():
        a = dist.shard_tensor(np.ones(4), dist.ProcessMesh([0, 1]), [dist.Shard(0)])
        b = dist.shard_tensor(np.ones(4), dist.ProcessMesh([1, 0]), [dist.Shard(0)])
        with pytest.raises(dist.UsageError, match=r"different meshes.*dist\.reshard"):
            a + b
        with pytest.raises(dist.UsageError, match="different meshes"):
            a += b
        with pytest.raises(dist.UsageError, match="different meshes"):
            a @ b
        with pytest.raises(dist.UsageError, match="different meshes"):
            a[:2] = b[:2]

    dist.simulate(2, check)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda a: a[9], IndexError),
        (lambda a: a[0, 0, 0], IndexError),
        (lambda a: a[..., ...], IndexError),
        (lambda a: a[np.ones((4, 5), bool)], IndexError),
        (lambda a: a[np.ones((0, 5), bool)], IndexError),
        (lambda a: a[1, np.ones(5, bool)], IndexError),
        (lambda a: a[[1, 9], 0], IndexError),
        (lambda a: np.take(a, [7], axis=0), IndexError),
        (lambda a: a.reshape(3, 3), ValueError),
        (lambda a: a.sum(axis=2), ValueError),
        (lambda a: a @ a, ValueError),
        (lambda a: a + np.ones(3), ValueError),
        (lambda a: np.concatenate([a, np.ones((2, 2))]), ValueError),
        (lambda a: a.squeeze(0), ValueError),
        (lambda a: np.add(a, a, out=np.ones((5, 4))), dist.UsageError),
        (lambda a: a[:0].max(), ValueError),
        (lambda a: bool(a), dist.UsageError),
    ],
)
def test_wrong_arguments_are_refused_on_every_rank_before_anything_is_sent(wrong, error):
    def check():
        a = spread(2, dist.Shard(0))
        with pytest.raises(error):
            wrong(a)
        assert a.sum() == 190

    dist.simulate(2, check)


def test_a_collective_takes_no_array_across_ranks():
    def check():
        for a in (spread(2), spread(2, dist.Shard(0))):
            with pytest.raises(dist.UsageError, match=r"not an array of one rank.*a\.local"):
                dist.all_reduce(a)
            dist.barrier()

    dist.simulate(2, check)
