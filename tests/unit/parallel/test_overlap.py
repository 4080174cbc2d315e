"""When buckets travel while the backward pass computes, and how much that hides."""

import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from hpcdist.parallel.overlap import (
    Clock,
    CommStats,
    OverlapPolicy,
    Transfer,
    core_share,
    transfer_times,
)

moments = st.floats(0, 100, allow_nan=False)


def test_a_bucket_is_under_way_from_its_launch_to_its_arrival():
    assert transfer_times([Transfer(1.0, 3.0)], computed=10.0) == (2.0, 0.0)


def test_a_bucket_waits_for_the_one_before_it():
    assert transfer_times([Transfer(1.0, 3.0), Transfer(2.0, 4.0)], computed=10.0) == (3.0, 0.0)


def test_what_travels_after_the_last_gradient_is_exposed():
    assert transfer_times([Transfer(1.0, 3.0), Transfer(2.0, 6.0)], computed=4.0) == (5.0, 2.0)


@given(st.lists(st.tuples(moments, moments), max_size=8), moments)
def test_no_more_is_exposed_than_was_under_way(spans, computed):
    trips = sorted(Transfer(*sorted(span)) for span in spans)
    total, exposed = transfer_times(trips, computed)
    assert 0 <= exposed <= total <= 100


def test_cores_of_ones_own_count_whole_and_shared_ones_in_parts():
    assert core_share([0, 1], [[0, 1], [2, 3]]) == 2
    assert core_share([0, 1], [[0, 1], [0, 1]]) == 1
    assert core_share([0, 1, 2], [[0, 1, 2], [2]]) == 2.5


@given(st.lists(st.sets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_the_shares_of_all_ranks_are_the_cores_of_the_node(ranks):
    shares = sum(core_share(mine, ranks) for mine in ranks)
    assert shares == pytest.approx(len(set.union(*ranks)))


class Cores:
    """A machine whose clock moves only while a test lets it compute or wait."""

    def __init__(self):
        self.now = self.wanted = 0.0

    def busy(self):
        self.now += 1
        self.wanted += 1

    def idle(self):
        self.now += 1

    def pace(self, overlap="auto"):
        """Return a `OverlapPolicy` of a rank with one core of this machine."""
        return OverlapPolicy(1, overlap, Clock(lambda: self.now, lambda: self.wanted))


@pytest.fixture
def machine():
    return Cores()


def backward(pace, compute):
    pace.begin()
    compute()
    pace.computed()


def test_buckets_are_overlapped_once_the_backward_pass_is_seen_to_leave_cores_idle(machine):
    pace = machine.pace()
    for _ in range(2):
        backward(pace, machine.idle)
        assert pace.inline
    backward(pace, machine.idle)
    assert not pace.inline


def test_the_busiest_backward_pass_decides(machine):
    pace = machine.pace()
    for compute in (machine.idle, machine.busy, machine.idle):
        backward(pace, compute)
    assert pace.inline


def test_buckets_stay_inline_where_the_backward_pass_needs_the_core(machine):
    pace = machine.pace()
    for _ in range(3):
        backward(pace, machine.busy)
    assert pace.inline


def test_time_spent_in_the_exchange_is_not_taken_for_computing(machine):
    pace = machine.pace()
    for _ in range(3):
        pace.begin()
        machine.busy()
        pace.paused(wall_s=1, cpu_s=1)
        machine.idle()
        pace.computed()
    assert not pace.inline


@pytest.mark.parametrize(("overlap", "inline"), [("always", False), ("never", True)])
def test_a_setting_decides_at_once_and_for_good(machine, overlap, inline):
    pace = machine.pace(overlap)
    for compute in (machine.idle, machine.idle, machine.busy):
        assert pace.inline is inline
        backward(pace, compute)


def test_the_statistics_add_up_over_backward_passes(machine):
    pace = machine.pace("always")
    for _ in range(3):
        pace.begin()
        pace.record_transfer(machine.now, machine.now + 2, 100)
        pace.computed()
    stats = pace.stats()
    assert (stats.backwards, stats.buckets, stats.nbytes) == (3, 3, 300)
    assert stats.comm_s == 6
    assert stats.hidden == 0
    assert stats.overlapped


def test_backward_passes_that_only_measure_are_not_counted_as_exposed(machine):
    pace = machine.pace()
    for _ in range(4):
        pace.begin()
        pace.paused(0.0, 0.0)
        pace.record_transfer(machine.now - 2, machine.now - 1, 100)
        machine.idle()
        pace.computed()
    assert pace.stats().overlapped
    assert (pace.stats().backwards, pace.stats().hidden) == (1, 1)


SHARING_A_CORE = """
import os, time
from hpcdist.runtime.process import demand_s
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
wanted, clock = demand_s(), time.perf_counter()
while time.perf_counter() - clock < 0.5:
    pass
print((demand_s() - wanted) / (time.perf_counter() - clock))
"""


def test_who_waits_for_a_core_wants_it():
    pair = [
        subprocess.Popen([sys.executable, "-c", SHARING_A_CORE], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    wanted = [float(each.communicate()[0]) for each in pair]
    assert all(0.7 < cores < 1.3 for cores in wanted), wanted  # each of them, not half a core


def test_nothing_sent_is_nothing_hidden():
    assert CommStats().hidden == 0
