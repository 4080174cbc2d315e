"""Arrays across ranks whose parts are on a device: the slow one, or a GPU."""

import itertools

import mesh_checks
import numpy as np
import pytest
from device_at_hand import DEVICE, DeviceArray

import hpcdist as dist
from hpcdist import Partial, ProcessMesh, ReduceType, Replicate, Shard, checkpoint
from hpcdist.mesh.dist_array import DistArray

PLACEMENTS = [Shard(0), Shard(1), Replicate(), Partial(), Partial(ReduceType.kRedMax)]


@pytest.fixture
def mesh(size):
    return ProcessMesh(np.arange(size))


def assert_is(array, x):
    """Make sure that an array on the device is `x`: collective if it is partial."""
    assert type(array.local) is DeviceArray
    assert array.device == DEVICE.name
    mesh_checks.assert_is(DistArray._of(DEVICE.numbers(array.local), array.layout), x)


@pytest.mark.parametrize("src", PLACEMENTS, ids=repr)
def test_every_placement_becomes_every_other_one(src, mesh):
    x = mesh_checks.numbers((5, 7))
    a = dist.shard_tensor(DEVICE.array(x), mesh, [src])
    assert_is(a, x)
    for dst in PLACEMENTS:
        assert_is(dist.reshard(a, mesh, [dst]), x)
        assert_is(dist.reshard(a, mesh, [dst], async_op=True).result(), x)
    np.testing.assert_array_equal(DEVICE.numbers(dist.unshard_dtensor(a)), x)


def test_arrays_go_to_other_meshes_and_into_given_memory(mesh):
    x = mesh_checks.numbers((5, 7))
    turned = ProcessMesh(mesh.process_ids[::-1])
    for src, dst in itertools.product((mesh, turned), repeat=2):
        a = dist.shard_tensor(DEVICE.array(x), src, [Shard(0)])
        out = dist.shard_tensor(DEVICE.array(x * 0), dst, [Shard(1)])
        assert dist.reshard(a, dst, [Shard(1)], out=out) is out
        assert_is(out, x)
        with pytest.raises(dist.UsageError, match=f"on cpu, but the array on {DEVICE.name}"):
            dist.reshard(a, dst, [Shard(1)], out=dist.shard_tensor(x, dst, [Shard(1)]))


def test_values_stay_on_the_device(mesh):
    a = dist.shard_tensor(DEVICE.array(np.full(1, 2.5)), mesh, [Replicate()])
    assert float(a) == 2.5
    with pytest.raises(dist.UsageError, match="move them first"):
        dist.shard_tensor(DEVICE.array(np.ones(3)), mesh, [Shard(0)], place="cpu")


def test_parts_on_the_device_are_saved_and_filled(mesh, folder):
    x = mesh_checks.numbers((5, 7))
    a = dist.shard_tensor(DEVICE.array(x), mesh, [Shard(1)])
    checkpoint.save({"a": a}, folder)
    b = dist.shard_tensor(DEVICE.array(x * 0), mesh, [Shard(0)])
    checkpoint.load({"a": b}, folder)
    assert_is(b, x)
    dist.save_array(f"{folder}.npy", a)
    np.testing.assert_array_equal(np.load(f"{folder}.npy"), x)
