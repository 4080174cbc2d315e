"""Who can be called, by which names, and at which addresses."""

import pytest

from hpcdist.errors import UsageError
from hpcdist.rpc.names import Directory, WorkerInfo, check_name
from hpcdist.rpc.networks import addresses

TWO = [WorkerInfo("a", 3, "10.0.0.1", 0), WorkerInfo("b", 5, "10.0.0.2", 99)]


def test_a_rank_is_found_by_name_rank_and_info():
    directory = Directory(TWO)
    for to in ("b", 5, TWO[1]):
        assert directory.find(to) is TWO[1]
        assert directory.rank_of(to) == 5


def test_equal_names_are_refused_with_both_ranks():
    with pytest.raises(UsageError, match="ranks 3 and 7 both call themselves 'a'"):
        Directory([*TWO, WorkerInfo("a", 7, "", 0)])


@pytest.mark.parametrize("to", [True, 1, "c", None, 3.0, [], ("a", 3), b"a", "3"])
def test_who_is_not_there_is_refused(to):
    with pytest.raises(UsageError, match=r"there are ranks 3 to 5: 'a', 'b'"):
        Directory(TWO).rank_of(to)


def test_a_name_is_made_of_the_rank_or_checked():
    assert check_name(None, 4) == "worker4"
    assert check_name("näme", 4) == "näme"
    for wrong in ("", "x" * 129, 3, b"a"):
        with pytest.raises(UsageError, match="the name of a rank is a str"):
            check_name(wrong, 0)


NETWORKS = {
    "lo": "127.0.0.1",
    "docker0": "172.17.0.1",
    "eth0": "10.1.0.4",
    "ib0": "10.2.0.4",
    "ib1": "10.3.0.4",
}


def test_networks_between_nodes_are_tried_the_fast_ones_first():
    assert addresses(NETWORKS, None) == ["10.2.0.4", "10.3.0.4", "10.1.0.4"]
    assert addresses({"lo": "127.0.0.1"}, None) == ["127.0.0.1"]
    assert addresses({}, None) == []


def test_the_networks_that_are_wanted_are_taken_in_their_order():
    assert addresses(NETWORKS, "eth0") == ["10.1.0.4"]
    assert addresses(NETWORKS, "eth0, ib") == ["10.1.0.4", "10.2.0.4", "10.3.0.4"]
    assert addresses(NETWORKS, "127.0.0.1") == ["127.0.0.1"]
    for wrong in ("ib7", "", ",", "10.9.9.9"):
        with pytest.raises(UsageError, match=r"there are lo \(127.0.0.1\)"):
            addresses(NETWORKS, wrong)
