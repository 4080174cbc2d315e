"""Checkpoints in memory of what the engines of training shard, on the ranks of this MPI job.

The last rank is lost as far as the memory goes: the others bring its part back. Whether all is as
it was is seen in checkpoints on disk, written before and after.
"""

import numpy as np
import pytest
from training_engines import ENGINES, everything, fingerprint

import hpcdist as dist
from hpcdist.checkpoint.memory.vault import Vault

OFTEN = "data parallel", "arrays p_g_os"


def memory_of(training, group, vault=None):
    """Return a memory of a training, with what another one has kept."""
    memory = dist.Memory(training.model, training.optimizer, group=group)
    if vault is not None:
        memory._vault = vault
    return memory


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.thorough) for name in ENGINES],
)
def test_what_a_rank_had_is_brought_back_by_the_others(engine, folder, world):
    if "torch" in engine:
        pytest.importorskip("torch")
    make = ENGINES[engine]
    training = make(world)
    memory = memory_of(training, world)
    for number in range(2):
        training.step(number)
    memory.commit(2)
    before = fingerprint(everything(training, f"{folder}/before", world))
    training.step(2)  # is lost

    training = make(world)  # with a rank that has nothing in the place of the last
    is_new = 0 < world.rank == world.nranks - 1
    again = memory_of(training, world, Vault() if is_new else memory._vault)
    assert again.restore() == 2
    assert fingerprint(everything(training, f"{folder}/after", world)) == before
    training.step(2)
    again.commit(3)
    before = fingerprint(everything(training, f"{folder}/then", world))

    left = dist.new_group(world.ranks[: max(1, world.nranks - 1)])  # without the last
    training = make(left) if left.is_member() or engine == "torch fsdp2" else None
    if training is not None:
        assert memory_of(training, left, again._vault).restore() == 3
        assert fingerprint(everything(training, f"{folder}/left", left)) == before
    dist.barrier()
    dist.destroy_process_group(left)


@pytest.mark.thorough
def test_copies_are_on_another_node(world_with, size):
    world_with(ranks_per_node=2)
    rank = dist.get_rank()
    memory = dist.Memory({"x": np.zeros(3)})
    memory.commit(1)
    (generation,) = memory._vault.generations
    owners = generation.headers.keys() - {rank}
    if size > 2:
        assert all(owner // 2 != rank // 2 for owner in owners)
    everyone = []
    dist.all_gather_object(everyone, owners)
    assert sorted(owner for each in everyone for owner in each) == [*range(size)] * (size > 1)
