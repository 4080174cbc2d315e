"""When buckets travel while the backward pass computes, and how much that hides."""

import subprocess
import sys
import time

import pytest
from hypothesis import given, strategies as st

from hpcdist.parallel.pace import CommStats, Pace, Trip, core_share, travel_times

moments = st.floats(0, 100, allow_nan=False)


def test_a_bucket_is_under_way_from_its_launch_to_its_arrival():
    assert travel_times([Trip(1.0, 3.0)], computed=10.0) == (2.0, 0.0)


def test_a_bucket_waits_for_the_one_before_it():
    assert travel_times([Trip(1.0, 3.0), Trip(2.0, 4.0)], computed=10.0) == (3.0, 0.0)


def test_what_travels_after_the_last_gradient_is_exposed():
    assert travel_times([Trip(1.0, 3.0), Trip(2.0, 6.0)], computed=4.0) == (5.0, 2.0)


@given(st.lists(st.tuples(moments, moments), max_size=8), moments)
def test_no_more_is_exposed_than_was_under_way(spans, computed):
    trips = sorted(Trip(*sorted(span)) for span in spans)
    total, exposed = travel_times(trips, computed)
    assert 0 <= exposed <= total <= 100


def test_cores_of_ones_own_count_whole_and_shared_ones_in_parts():
    assert core_share([0, 1], [[0, 1], [2, 3]]) == 2
    assert core_share([0, 1], [[0, 1], [0, 1]]) == 1
    assert core_share([0, 1, 2], [[0, 1, 2], [2]]) == 2.5


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_the_shares_of_all_ranks_are_the_cores_of_the_node(ranks):
    shares = sum(core_share(mine, ranks) for mine in ranks)
    assert shares == pytest.approx(len(set.union(*ranks)))


def backward(pace, compute):
    pace.begin()
    compute()
    pace.computed()


def busy():
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass


def idle():
    time.sleep(0.02)


def test_buckets_are_overlapped_once_the_backward_pass_is_seen_to_leave_cores_idle():
    pace = Pace(cores=1)
    for _ in range(2):
        backward(pace, idle)
        assert pace.inline
    backward(pace, idle)
    assert not pace.inline


def test_the_busiest_backward_pass_decides():
    pace = Pace(cores=1)
    for compute in (idle, busy, idle):
        backward(pace, compute)
    assert pace.inline


def test_buckets_stay_inline_where_the_backward_pass_needs_the_core():
    pace = Pace(cores=1)
    for _ in range(3):
        backward(pace, busy)
    assert pace.inline


def test_time_spent_in_the_exchange_is_not_taken_for_computing():
    pace = Pace(cores=1)
    for _ in range(3):
        pace.begin()
        began, cpu = time.perf_counter(), time.process_time()
        busy()
        pace.paused(time.perf_counter() - began, time.process_time() - cpu)
        idle()
        pace.computed()
    assert not pace.inline


@pytest.mark.parametrize(("overlap", "inline"), [("always", False), ("never", True)])
def test_a_setting_decides_at_once_and_for_good(overlap, inline):
    pace = Pace(cores=1, overlap=overlap)
    for compute in (idle, idle, busy):
        assert pace.inline is inline
        backward(pace, compute)


def test_the_statistics_add_up_over_backward_passes():
    pace = Pace(cores=1, overlap="always")
    for _ in range(3):
        pace.begin()
        now = time.perf_counter()
        pace.travelled(now, now + 2, 100)
        pace.computed()
    stats = pace.stats()
    assert (stats.backwards, stats.buckets, stats.nbytes) == (3, 3, 300)
    assert stats.comm_s == pytest.approx(6)
    assert stats.hidden == pytest.approx(0, abs=0.01)
    assert stats.overlapped


def test_backward_passes_that_only_measure_are_not_counted_as_exposed():
    pace = Pace(cores=1)
    for _ in range(4):
        pace.begin()
        pace.paused(0.0, 0.0)
        now = time.perf_counter()
        pace.travelled(now - 2, now - 1, 100)
        idle()
        pace.computed()
    assert pace.stats().overlapped
    assert (pace.stats().backwards, pace.stats().hidden) == (1, 1)


SHARING_A_CORE = """
import os, time
from hpcdist.runtime.cores import wanted_s
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
wanted, clock = wanted_s(), time.perf_counter()
while time.perf_counter() - clock < 0.5:
    pass
print((wanted_s() - wanted) / (time.perf_counter() - clock))
"""


def test_who_waits_for_a_core_wants_it():
    pair = [
        subprocess.Popen([sys.executable, "-c", SHARING_A_CORE], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    wanted = [float(each.communicate()[0]) for each in pair]
    assert all(0.9 < cores < 1.1 for cores in wanted), wanted  # each of them, not half a core


def test_nothing_sent_is_nothing_hidden():
    assert CommStats().hidden == 0
