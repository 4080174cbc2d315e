"""Every row finds its node, and the ranks of a node have as much to do."""

from collections import Counter

import pytest

from hpcdist.data.nodes import Nodes

NODES = [[0], [0, 0], [0, 1], [0, 0, 1], [0, 1, 0, 1, 1, 2], [0] * 4 + [1] * 4]


@pytest.mark.parametrize("names", NODES)
def test_what_goes_to_a_rank_is_taken_on_its_node(names):
    nodes = Nodes.of(names)
    for rank in range(len(names)):
        receivers = nodes.receivers(rank).tolist()
        assert [names[each] for each in receivers] == names
        assert receivers[rank] == rank, "what stays leaves the rank"
        takers = {(name, each) for name, each in zip(names, receivers, strict=True)}
        assert len(takers) == len({*names}), "one rank for each node"


@pytest.mark.parametrize("names", NODES)
def test_ranks_of_a_node_take_from_as_many_ranks(names):
    nodes = Nodes.of(names)
    for name in {*names}:
        members = [rank for rank, each in enumerate(names) if each == name]
        taken = Counter(dict.fromkeys(members, 0))
        for sender in range(len(names)):
            taken[nodes.receivers(sender).tolist()[members[0]]] += 1
        others = len({*names})
        assert max(taken.values()) - min(taken.values()) <= others


def test_ranks_apart_take_what_is_theirs():
    nodes = Nodes.apart(5)
    assert nodes.most == 1
    assert not nodes.are_one
    assert [nodes.receivers(rank).tolist() for rank in range(5)] == [list(range(5))] * 5
    assert Nodes.apart(1).are_one
    assert Nodes.of(["a"] * 3).are_one
