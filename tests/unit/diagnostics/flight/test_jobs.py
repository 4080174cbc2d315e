"""Which job is meant, what its ranks did between two looks, and one clock for all of them."""

from __future__ import annotations

import json
import os
import time

import numpy as np
import pytest
from click.testing import CliRunner

import hpcdist as dist
from hpcdist.diagnostics.flight import across, activity, clocks, commands, jobs, timeline
from hpcdist.diagnostics.flight.jobs import Job, Snapshot
from hpcdist.errors import UsageError
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.flight import layout
from hpcdist.transport.flight.analysis import Subject
from hpcdist.transport.flight.recording import GroupKey, Record, Recording, Total

S = 10**9
WORLD = GroupKey(1, 0, "world", (0, 1))


def record(sequence, begin_s, end_s, kind=Kind.BARRIER, started=False):
    end_ns = 0 if end_s is None else round(end_s * S)
    return Record(
        sequence, layout.NAMES[kind], WORLD, sequence, 80, None, "a.py:1", round(begin_s * S),
        end_ns, False, started, kind, 0, 0,
    )  # fmt: skip


def subject(rank, *records, about=None, totals=None, pid=None, condition="running"):
    pid = 100 + rank if pid is None else pid
    told = {"host": "n1", "program": "a.py", "here": "0-1"} | (about or {})
    return Subject(Recording(pid, 7, rank, 2, told, records, [], {}, totals or {}), condition)


def job(name, pid=100, **more):
    about = {"job": name, "ancestors": [50, 40]} | more
    return Job([subject(rank, about=about, pid=pid + rank) for rank in range(2)])


def test_the_only_job_needs_no_name():
    assert jobs.choose([job("n1:100")], None).name == "n1:100"
    assert jobs.choose([], None) is None


@pytest.mark.parametrize("wanted", ["n1:100", "100", "101", "50", "40", "7", "7.0"])
def test_a_job_is_meant_by_its_name_its_processes_and_its_number_in_slurm(wanted):
    others = job("n1:900", 900, ancestors=[800])
    assert jobs.choose([others, job("n1:100", slurm="7.0")], wanted).name == "n1:100"


def test_of_several_jobs_one_has_to_be_named():
    with pytest.raises(UsageError, match=r"several jobs(.|\n)*n1:100(.|\n)*n1:900"):
        jobs.choose([job("n1:100"), job("n1:900", 900)], None)


def test_a_dead_job_is_meant_where_none_lives():
    dead = Job([subject(0, about={"job": "n1:100"}, condition="dead")])
    assert jobs.choose([dead], None) is dead
    assert jobs.choose([dead, job("n1:900", 900)], None).name == "n1:900"


def test_an_unknown_job_is_none():
    assert jobs.choose([job("n1:100")], "12345") is None


def test_a_job_is_whole_where_all_its_nodes_were_read():
    assert job("n1:100").is_whole
    assert not Job([subject(0, about={"here": "0"})]).is_whole


# ---- top


def test_what_is_done_between_two_looks_is_counted_per_second_and_rank():
    before = Job([subject(rank, totals={"scan": Total(10, 100, 1.0)}) for rank in range(2)])
    after = Job(
        [
            subject(rank, totals={"scan": Total(30, 500, 2.0), "barrier": Total(2, 0, 0.1)})
            for rank in range(2)
        ]
    )
    scan, barrier = activity.activities(before, after, 2.0)
    assert (scan.name, scan.per_s, scan.bytes_per_s) == ("scan", 20.0, 400.0)
    assert scan.each_s == pytest.approx(0.05)
    assert scan.share == pytest.approx(0.5)
    assert (barrier.name, barrier.per_s) == ("barrier", 2.0)


def test_what_is_not_done_has_no_row():
    same = Job([subject(0, totals={"scan": Total(10, 100, 1.0)})])
    assert activity.activities(same, same, 1.0) == []


# ---- clocks


def test_a_clock_that_is_ahead_is_found_from_what_ranks_did_together():
    mine = [record(each, each, each + 0.10) for each in range(1, 20)]
    ahead = [record(each, each + 5.02, each + 5.11) for each in range(1, 20)]
    bounds = clocks.ahead(ahead, mine)
    assert bounds.least <= 5 * S <= bounds.most
    assert abs(bounds.middle - 5 * S) < 0.1 * S
    off = clocks.corrections({0: mine, 1: ahead}, {0: "n1", 1: "n2"})
    assert off == {"n1": 0, "n2": bounds.middle}


def test_an_operation_that_a_rank_may_leave_early_says_nothing_of_clocks():
    sends = [record(1, 0, 1, Kind.BROADCAST)]
    assert clocks.ahead(sends, sends).middle == 0


def test_nodes_that_have_done_nothing_together_keep_their_clocks():
    assert clocks.corrections({0: [], 1: []}, {0: "n1", 1: "n2"}) == {"n1": 0, "n2": 0}


# ---- dump


def test_a_timeline_has_a_row_for_each_rank_on_one_clock():
    ends = [record(1, 1.0, 1.1), record(2, 2.0, 2.1)]
    late = [
        each._replace(begin_ns=each.begin_ns + 3 * S, end_ns=each.end_ns + 3 * S) for each in ends
    ]
    beside = record(3, 6.0, None, started=True)
    found = Job([subject(0, *ends), subject(1, *late, beside, about={"host": "n2"})])
    events = [each for each in timeline.as_trace(found)["traceEvents"] if each["ph"] == "X"]
    first = {each["pid"]: each["ts"] for each in reversed(events)}
    assert first[0] == pytest.approx(first[1])
    assert events[-1]["cat"] == "under way"
    assert events[-1]["tid"] == 1
    rows = timeline.as_json(found)["ranks"]
    assert [len(each["records"]) for each in rows] == [2, 3]
    json.dumps(timeline.as_trace(found))


# ---- across nodes


def test_snapshots_pass_in_short_lines_between_others():
    rng = np.random.default_rng(1)
    found = [Snapshot(rng.bytes(5000), each, "running") for each in range(3)]
    lines = [*across.packed(found)]
    assert max(map(len, lines)) < 1000
    assert across.unpacked("\n".join(["a word of the system", *lines])) == found


def test_a_node_that_tells_nothing_is_not_waited_for_when_others_have_told_all():
    end = [*across.packed([], "n1")][-1]
    began = time.monotonic()
    text = across.output_of(["sh", "-c", f"echo {end}; exec sleep 60"], 2, later_s=0.1)
    assert text.splitlines() == [end]
    assert time.monotonic() - began < 30


def test_a_job_names_the_nodes_that_do_not_answer_and_the_ranks_there():
    told = Job([subject(0, about={"here": "0"})], ("n2",))
    assert "=> node n2 does not answer, where rank 1 ran" in jobs.report(told)


def test_a_step_is_asked_for_by_its_job():
    command = across.reader_command("12.0", 3)
    assert "--jobid=12" in command
    assert "--nodes=3" in command


# ---- the commands, on this process


@pytest.fixture
def world(monkeypatch):
    """Start a world of this process alone, which records; it is gone afterwards."""
    monkeypatch.setenv("HPCDIST_RECORDER", "on")
    yield dist.init_parallel_env(backend="local")
    dist.destroy_process_group()


def test_ps_shows_a_rank_that_computes(world):
    dist.all_reduce(np.ones(10))
    done = CliRunner().invoke(commands.ps, [_pid()])
    assert done.exit_code == 0, done.output
    assert "rank 0: outside of hpcdist" in done.output
    assert f"all_reduce #1 (80 B, group 0) at {__file__}" in done.output


def test_ps_shows_no_start_that_failed(world):
    dist.destroy_process_group()
    with pytest.raises(dist.UsageError):
        dist.init_parallel_env(timeout=-1)
    dist.init_parallel_env()
    done = CliRunner().invoke(commands.ps, [_pid()])
    assert "in init_parallel_env" not in done.output
    assert "rank 0: outside of hpcdist" in done.output


def test_top_counts(world, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: dist.all_reduce(np.ones(10)))
    done = CliRunner().invoke(commands.top, [_pid(), "--times", "2"])
    assert done.exit_code == 0, done.output
    assert done.output.count("all_reduce") >= 2


def test_dump_writes_both_files(world, tmp_path):
    dist.barrier()
    done = CliRunner().invoke(commands.dump, [_pid(), "-o", str(tmp_path / "flight")])
    assert done.exit_code == 0, done.output
    names = {each.name for each in tmp_path.iterdir()}
    assert names == {"flight.json", "flight.trace.json"}


def test_a_job_that_is_not_there_is_an_error_that_says_what_to_do():
    done = CliRunner().invoke(commands.ps, ["999999999"])
    assert done.exit_code == 1
    assert "HPCDIST_RECORDER=off" in done.output


def _pid():
    return str(os.getpid())
