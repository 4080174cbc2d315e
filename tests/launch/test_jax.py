"""Programs of JAX that need processes of their own: several processes as one, several devices."""

import pytest
import training_examples

from hpcdist.launch.launchers import find_site
from hpcdist.runtime.process import snapshot

pytest.importorskip("jax")

pytestmark = pytest.mark.skipif(find_site(snapshot()).mpiexec is None, reason="no mpiexec")

ONE_JAX = """
import hpcdist.jax as hj
hj.initialize()

import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

assert jax.process_count() == 2
everywhere = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
own = np.full(2, jax.process_index() + 1.0, "f4")
x = jax.make_array_from_process_local_data(everywhere, own)
print("sum", jax.jit(lambda x: x.sum())(x), jax.jit(hj.all_reduce)(1.0))
"""

DEVICES = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import hpcdist as dist, hpcdist.jax as hj

dist.init_parallel_env()
rank, n = dist.get_rank(), dist.get_world_size()
devices = Mesh(np.array(jax.devices()), "d")

def verbs(x):
    hj.barrier()
    other = hj.sendrecv(x, (rank + 1) % n, (rank - 1) % n)
    return hj.all_reduce(x), hj.all_gather(x).sum(0), other

cut = PartitionSpec("d")
on_devices = jax.shard_map(verbs, mesh=devices, in_specs=cut, out_specs=cut)
loss = lambda function: lambda x: sum((y**2).sum() for y in function(x))
x = jnp.arange(4.0) + rank
for one, other in [(verbs, on_devices), (jax.grad(loss(verbs)), jax.grad(loss(on_devices)))]:
    for _ in range(3):
        np.testing.assert_allclose(jax.jit(one)(x), jax.jit(other)(x))
print("sum", verbs(x)[0].sum())
"""


@pytest.mark.thorough
def test_water_has_the_same_bits_on_any_number_of_ranks():
    said = {
        training_examples.run("shallow_water.py", ranks, "--steps", 50, tells=r"bits (\w+)")[1]
        for ranks in (1, 2, 4)
    }
    assert len(said) == 1


def test_the_ranks_are_processes_of_one_jax_after_one_line(tmp_path):
    script = tmp_path / "one_jax.py"
    script.write_text(ONE_JAX)
    assert training_examples.run(script, 2, tells=r"sum (.*)")[1] == "6.0 2.0"


def test_the_devices_of_a_process_do_an_operation_together(tmp_path):
    if not hasattr(pytest.importorskip("jax"), "shard_map"):
        pytest.skip("jax.shard_map is of JAX 0.7")
    script = tmp_path / "devices.py"
    script.write_text(DEVICES)
    assert training_examples.run(script, 2, tells=r"sum (.*)")[1] == "16.0"
