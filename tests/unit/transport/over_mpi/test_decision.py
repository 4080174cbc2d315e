"""What the numbers of an agreement mean, whatever the ranks contribute."""

import pytest
from hypothesis import given, settings, strategies as st

from hpcdist.errors import CollectiveTimeout, MismatchError, RemoteError
from hpcdist.transport.mpi.decision import (
    CANNOT,
    LATE,
    Called,
    Told,
    Verdict,
    decide,
    disagreement,
    not_begun,
    not_joined,
    voided,
)

S = 1_000_000_000
NOW = 1_900_000_000 * S
FINGERPRINTS = st.integers(0, (1 << 62) - 1)
DETAILS = st.integers(0, 1 << 62)


def contribution(fingerprint, detail, now, limit):
    number, opposite = CANNOT if fingerprint is None else (fingerprint, -fingerprint)
    return number, opposite, detail, -detail, now + limit, -now


def least(contributions):
    return tuple(map(min, zip(*contributions, strict=True)))


@settings(deadline=None)
@given(FINGERPRINTS, st.lists(DETAILS, min_size=1))
def test_ranks_that_call_the_same_learn_the_range_of_their_details(fingerprint, details):
    found = least([contribution(fingerprint, each, NOW, S) for each in details])
    assert decide(found) == (min(details), max(details))


@settings(deadline=None)
@given(st.lists(FINGERPRINTS, min_size=2).filter(lambda each: len(set(each)) > 1), DETAILS)
def test_ranks_that_call_different_operations_do_not_agree(fingerprints, detail):
    found = least([contribution(each, detail, NOW, S) for each in fingerprints])
    assert decide(found) is Verdict.MISMATCH


@settings(deadline=None)
@given(st.lists(FINGERPRINTS), DETAILS)
def test_nobody_agrees_with_a_rank_that_cannot_take_part(fingerprints, detail):
    given = [*fingerprints, None]
    found = least([contribution(each, detail, NOW, S) for each in given])
    assert decide(found) is Verdict.MISMATCH


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 100 * S), min_size=1), st.integers(1, 50 * S), st.booleans(), DETAILS
)
def test_an_operation_is_void_if_and_only_if_a_rank_came_after_a_deadline(
    arrivals, limit, alike, detail
):
    found = least(
        contribution(7 if alike else place, detail, NOW + at, limit)
        for place, at in enumerate(arrivals)
    )
    void = max(arrivals) > min(arrivals) + limit
    assert (decide(found) is Verdict.VOID) == void


@settings(deadline=None)
@given(st.lists(FINGERPRINTS), DETAILS, st.integers(0, 1 << 61))
def test_a_rank_that_gave_up_earlier_makes_it_void_however_long_the_others_wait(
    fingerprints, detail, limit
):
    found = least([*(contribution(each, detail, NOW, limit) for each in fingerprints), LATE])
    assert decide(found) is Verdict.VOID


@pytest.mark.parametrize(
    ("arrived", "rank", "words"),
    [(2 * S, (12,), r"this rank joined 1\.0 s after that"), (S // 2, (), "a rank was late")],
)
def test_a_rank_that_was_late_is_told_so(arrived, rank, words):
    found = least([contribution(1, 0, NOW, S), contribution(1, 0, NOW + 2 * S, S)])
    error = voided("barrier()", found, NOW + arrived, 12)
    assert isinstance(error, CollectiveTimeout)
    assert error.missing == rank
    with pytest.raises(CollectiveTimeout, match=words):
        raise error


def test_where_a_rank_has_gone_on_nobody_is_told_to_be_late_by_decades():
    found = least([contribution(1, 0, NOW, S), LATE])
    assert "has gone on to later operations" in str(voided("barrier()", found, NOW, 12))


def test_ranks_that_disagree_are_listed_by_what_they_called():
    told = {10: Told("barrier()", "a.py:1"), 20: Told("scan()", "a.py:2")}
    told |= {30: Told("barrier()", "a.py:1"), 40: Told("barrier()", "a.py:3")}
    error = disagreement("operation #1", told)
    assert isinstance(error, MismatchError)
    assert (
        "ranks 10, 30: barrier() at a.py:1\n"
        "  rank 20: scan() at a.py:2\n"
        "  rank 40: barrier() at a.py:3\n"
    ) in str(error)
    assert error.call_sites == {10: "a.py:1", 20: "a.py:2", 30: "a.py:1", 40: "a.py:3"}


def test_ranks_that_have_gone_on_are_listed_by_what_the_others_did_not_call():
    given, same = Called("broadcast(root 0)", "a.py:2"), Called("broadcast(root 1)", "a.py:1")
    told = {0: Told("barrier()", "a.py:3", earlier=(same, given))}
    told |= {1: Told("barrier()", "a.py:9", earlier=(same,))}
    error = disagreement("operation #1", told)
    assert (
        "rank 0: broadcast(root 0) at a.py:2, and had gone on to barrier() at a.py:3\n"
        "  rank 1: barrier() at a.py:9\n"
    ) in str(error)
    assert "nothing was sent" not in str(error)
    assert error.call_sites == {0: "a.py:2", 1: "a.py:9"}


def test_the_rank_that_cannot_take_part_is_named_with_its_words():
    failure = "no memory", "Traceback ..."
    told = {10: Told("barrier()", "a.py:1"), 20: Told("scan()", "a.py:2", failure)}
    error = disagreement("operation #1", told)
    assert isinstance(error, RemoteError)
    assert "rank 20 cannot take part: no memory" in str(error)
    assert error.rank == 20


@pytest.mark.parametrize("make", [not_joined, not_begun])
def test_ranks_that_are_missing_are_named(make):
    error = make("barrier()", [10, 30], 2.0, "\nRank 10 waits in recv.")
    assert error.missing == (10, 30)
    assert "10, 30" in str(error)
    assert str(error).endswith("Rank 10 waits in recv.")
