"""Pairs of ranks tell each other what they mean to do, or both hear why not."""

from random import Random

import pytest
from fake_mpi import results

from hpcdist.errors import CollectiveTimeout, RemoteError
from hpcdist.transport.mpi.handshake import Handshakes

SEEDS = range(8)
LIMIT_S = 2.0
NOBODY = dict


def handshakes_of(comm, departed=NOBODY):
    ranks = tuple(10 * (rank + 1) for rank in range(comm.size))
    return Handshakes(comm, ranks, LIMIT_S, departed)


@pytest.mark.parametrize("nbytes", [10, 1 << 20])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_pair_learns_what_the_other_one_means_to_do(seed, nbytes):
    def program(comm):
        shake, others = handshakes_of(comm), set(range(comm.size)) - {comm.rank}
        for turn in range(3):
            told, troubles = shake.exchange(
                {peer: (comm.rank, peer, turn, bytes(nbytes)) for peer in others}, "a batch"
            )
            assert not troubles
            assert told == {peer: (peer, comm.rank, turn, bytes(nbytes)) for peer in others}

    results(3, program, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_peer_that_does_not_come_is_named_and_the_others_are_heard(seed):
    def program(comm):
        if comm.rank == 2:
            return
        told, troubles = handshakes_of(comm).exchange({1 - comm.rank: "here", 2: "you?"}, "a batch")
        assert told == {1 - comm.rank: "here"}
        assert troubles.keys() == {2}
        assert isinstance(troubles[2], CollectiveTimeout)
        assert troubles[2].missing == (30,)
        assert comm.world.now < 2 * LIMIT_S

    results(3, program, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_peer_that_has_left_is_not_waited_for(seed):
    def program(comm):
        if comm.rank:
            return
        shake = handshakes_of(comm, lambda: {1: "has ended"})
        told, troubles = shake.exchange({1: "you?"}, "a batch")
        assert not told
        assert isinstance(troubles[1], RemoteError)
        assert troubles[1].rank == 20
        assert comm.world.now < LIMIT_S

    results(2, program, seed=seed)


@pytest.mark.parametrize("seed", range(30))
def test_both_ranks_of_a_pair_hear_each_other_or_neither_does(seed):
    """However late they come, again and again: a pair that has missed each other is in step."""
    size, turns = 2 + seed % 3, 5
    late = (0.0, 0.01, LIMIT_S - 0.1, LIMIT_S, LIMIT_S + 0.1, 2 * LIMIT_S)

    def program(comm):
        shake, chance = handshakes_of(comm), Random(1000 * seed + comm.rank)
        for turn in range(turns):
            comm.world.sleep(chance.choice(late))
            peers = set(range(size)) - {comm.rank}
            told, troubles = shake.exchange(dict.fromkeys(peers, (comm.rank, turn)), "a batch")
            assert told.keys() | troubles.keys() == peers
            assert told == {peer: (peer, turn) for peer in told}
            yield set(told)

    found = results(size, lambda comm: list(program(comm)), seed=seed, skew_s=0.4)
    for turn in range(turns):
        for rank in range(size):
            for peer in found[rank][turn]:
                assert rank in found[peer][turn], (turn, found)
