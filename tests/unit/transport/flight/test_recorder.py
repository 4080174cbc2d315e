"""The recorder and what is read of its file, compiled and in Python."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.call import Barrier, Message, Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for
from hpcdist.transport.flight import layout, recorder as recording_module, rings
from hpcdist.transport.flight.call_site import compiled
from hpcdist.transport.flight.python_recorder import CallLayout, PythonRecorder
from hpcdist.transport.flight.recording import read_recording


def _call(nbytes=80):
    data = np.zeros(nbytes // 8)
    dtype = dtype_row(data.dtype)
    rule = rule_for(ReduceOp.SUM, dtype)
    return Reduction(Kind.ALL_REDUCE, None, data, dtype, data.shape, 0, ReduceOp.SUM, rule)


WAYS = ["compiled", "python"] if compiled is not None else ["python"]


@pytest.fixture(params=WAYS)
def ring(request, monkeypatch, tmp_path):
    """Return the recorder of this process, recording in a folder of its own."""
    module = recording_module
    if request.param == "python":
        twin = PythonRecorder()
        twin._layouts.update(
            {Reduction: CallLayout(3, 4, 5, -1, -1), Barrier: CallLayout(-1, -1, -1, -1, -1),
             Message: CallLayout(2, 3, 4, -1, 5)}
        )  # fmt: skip
        monkeypatch.setattr(module, "recorder", twin)
    monkeypatch.setattr(module, "_file", module._File())
    module.open_ring({}, [str(tmp_path)])
    module.settle(2, 4, job="a job")
    yield module.recorder
    module.close_ring()


def _read():
    return read_recording(bytes(recording_module.memory()), 0)


def _group(ranks=range(4), number=0):
    return recording_module.enter_group(list(ranks), number, "world")


def test_an_operation_is_under_way_until_it_has_ended(ring):
    mark = ring.begin(_call(), _group(), 7, 0)
    [record] = _read().records
    assert (record.name, record.sequence, record.nbytes) == ("all_reduce", 7, 80)
    assert record.group.ranks == (0, 1, 2, 3)
    assert record.end_ns == 0
    assert not record.started
    ring.end(mark)
    [record] = _read().records
    assert record.begin_ns <= record.end_ns <= time.monotonic_ns()


def test_of_a_dtype_without_a_number_of_its_own_a_record_has_what_there_is_room_for(ring):
    """Its code is a hash, of days and times and of records."""
    days = dtype_row(np.dtype("M8[ns]"))
    assert days.code > 0xFFFF
    assert ring.begin(_call()._replace(dtype=days), _group(), 7, 0)
    [record] = _read().records
    assert (record.dtype, record.nbytes) == (days.code & 0xFFFF, 80)


def test_a_record_has_the_line_that_called(ring):
    group, lines = _group(), []
    for _ in range(3):
        lines.append((ring.begin(Barrier(), group, 1, 0), sys._getframe().f_lineno))
        lines.append((ring.begin(Barrier(), group, 2, 0), sys._getframe().f_lineno))
    told = [(record.number, record.site) for record in _read().records]
    assert told == [(mark, f"{__file__}:{line}") for mark, line in lines]


def test_more_lines_than_are_kept_are_found_all_the_same(ring):
    """Each piece of code is new, so the tables of known ones are emptied now and then."""
    group, expected = _group(), []
    names = {"begin": ring.begin, "call": Barrier(), "group": group}
    for number in range(2 * layout.CAPACITY + 100):
        name, line = f"generated_{number % 700}.py", number % 50 + 1
        exec(compile("\n" * (line - 1) + "begin(call, group, 1, 0)", name, "exec"), names)
        expected.append(f"{name}:{line}")
    told = [record.site for record in _read().records]
    known = [site for site in told if site != "an unknown line"]  # some files have no room
    assert len(known) > layout.CAPACITY / 2
    assert all(
        site in ("an unknown line", wanted)
        for site, wanted in zip(told, expected[-layout.CAPACITY :], strict=True)
    )


def test_the_last_operations_are_kept(ring):
    group, count = _group(), layout.CAPACITY + 10
    for number in range(1, count + 1):
        ring.end(ring.begin(Barrier(), group, number, 0))
    told = _read()
    assert [record.sequence for record in told.records] == list(range(11, count + 1))
    assert told.totals["barrier"].ended == count


def test_what_was_written_over_is_not_ended(ring):
    group = _group()
    first = ring.begin(Barrier(), group, 1, 0)
    for number in range(2, layout.CAPACITY + 2):
        last = ring.begin(Barrier(), group, number, 0)
    ring.end(first)
    assert all(record.end_ns == 0 for record in _read().records)
    ring.fail(last)
    assert _read().records[-1].failed


def test_an_operation_ends_once(ring):
    mark = ring.begin(Barrier(), _group(), 1, 0)
    ring.fail(mark)
    ended = _read().records[0].end_ns
    ring.end(mark)
    assert _read().records[0].failed
    assert _read().records[0].end_ns == ended


def test_the_last_number_of_a_group_outlives_its_records(ring):
    quiet, busy = _group(number=1), _group(number=2)
    ring.begin(Barrier(), quiet, 41, 0)
    last = ring.begin(Barrier(), quiet, 42, 0)
    for number in range(layout.CAPACITY - 1):
        ring.begin(Barrier(), busy, number + 1, 0)
    told = _read()
    assert last == 2
    assert {group.id: number for group, number in told.latest.items()} == {1: 42, 2: 2047}


def test_a_message_tells_its_peer_by_its_world_rank(ring):
    data = np.zeros(3, np.float32)
    ring.begin(Message(Kind.SEND, data, dtype_row(data.dtype), (3,), 1), _group([0, 3], 5), None, 0)
    [record] = _read().records
    assert (record.name, record.peer, record.nbytes, record.sequence) == ("send", 3, 12, 0)


def test_of_keys_and_tags_a_record_has_what_there_is_room_for(ring):
    data = np.zeros(3)
    for call in (
        Message(Kind.SEND, data, dtype_row(data.dtype), (3,), 1, 1 << 40),
        _call()._replace(root=(1 << 40) - 1),
    ):
        assert ring.begin(call, _group(), None, 0)
    assert [record.name for record in _read().records] == ["send", "all_reduce"]


def test_a_long_wait_is_told_and_forgotten(ring):
    slot = recording_module.note_wait("all_reduce(...)", 2.0)
    [wait] = _read().waits
    assert wait.words == "all_reduce(...)"
    assert wait.site.startswith(__file__)
    assert time.monotonic_ns() - wait.since_ns >= 2e9
    recording_module.forget_wait(slot)
    assert _read().waits == []


def test_a_recording_tells_its_rank_and_job(ring):
    told = _read()
    assert (told.rank, told.size, told.pid) == (2, 4, os.getpid())
    assert told.about["job"] == "a job"


def test_more_groups_than_there_is_room_for_are_not_recorded_and_harm_nothing(ring):
    places = [_group(number=number) for number in range(layout.TEXT_BYTES // 64)]
    assert places[-1] == 0
    assert ring.begin(Barrier(), places[-1], 1, 0) == 0
    ring.end(0)
    assert _read().records == []


def test_a_forked_child_does_not_record(ring):
    group = _group()
    child = os.fork()
    if child == 0:
        ring.begin(Barrier(), group, 1, 0)
        os._exit(0)
    os.waitpid(child, 0)
    assert _read().records == []


def test_a_ring_is_removed_at_the_end_and_stays_when_its_process_is_killed(tmp_path):
    program = f"""
import os, sys
from hpcdist.transport.flight import recorder
recorder.open_ring({{}}, [{str(tmp_path)!r}])
assert recorder.is_open()
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
"""
    for way, left in (("ends", 0), ("killed", 1)):
        subprocess.run([sys.executable, "-c", program, way], check=False)
        found = rings.find_rings([str(tmp_path)])
        assert len(found) == left
    raw = rings.read_ring(found[0])
    header = layout.HEADER.unpack_from(raw)
    assert rings.condition(header[1], header[2]) == "dead"
    rings.sweep([str(tmp_path)])
    assert rings.find_rings([str(tmp_path)]) == found  # it was alive lately
    os.utime(found[0], (0, 0))
    rings.sweep([str(tmp_path)])
    assert rings.find_rings([str(tmp_path)]) == []


def test_where_no_file_can_be_made_nothing_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(recording_module, "_file", recording_module._File())
    (tmp_path / f"flight-{os.getuid()}").write_text("in the way")
    recording_module.open_ring({}, [str(tmp_path), "/nowhere"])
    assert not recording_module.is_open()
    assert _group() == 0


def test_a_full_file_system_is_found_when_the_file_is_made(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert rings.make_ring(layout.TOTAL, "1-1", [str(tmp_path)]) is None
    assert rings.find_rings([str(tmp_path)]) == []


def keep(monkeypatch, count):
    monkeypatch.setattr(rings, "KEPT_RINGS", count)
    monkeypatch.setattr(rings, "MOST_RINGS", count)


def test_of_a_few_rings_only_those_made_long_ago_are_read(monkeypatch, tmp_path):
    read, map_ring = [], rings._map_ring
    monkeypatch.setattr(rings, "_map_ring", lambda path: read.append(path.stem) or map_ring(path))
    for name, age_s in (("young", 10), ("old", 2 * HOUR_S)):
        dead_ring(tmp_path, name, name, age_s)
    rings.sweep([str(tmp_path)])
    assert read == ["old"]
    assert [path.stem for path in rings.find_rings([str(tmp_path)])] == ["young"]


def test_of_a_few_rings_those_of_a_long_job_that_ended_lately_all_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(rings, "KEPT_RINGS", 1)
    for name in ("one", "other"):
        dead_ring(tmp_path, name, name, 2 * HOUR_S, time.monotonic() - 1)
    rings.sweep([str(tmp_path)])
    assert [path.stem for path in rings.find_rings([str(tmp_path)])] == ["one", "other"]


def test_of_many_dead_processes_the_newest_are_kept(monkeypatch, tmp_path):
    keep(monkeypatch, 2)
    for number in range(5):
        dead_ring(tmp_path, f"{number}-1", str(number), age_s=100 - number)
    rings.sweep([str(tmp_path)])
    assert [path.name for path in rings.find_rings([str(tmp_path)])] == ["3-1.ring", "4-1.ring"]


def test_a_process_that_an_exception_ends_leaves_it_in_its_ring(tmp_path):
    program = f"""
import os
from hpcdist.errors import RankFailure
from hpcdist.runtime import failure
from hpcdist.transport.flight import recorder
recorder.open_ring({{}}, [{str(tmp_path)!r}])
failure.abort = os._exit
failure.end_job_on_failure(0)
raise RankFailure("ranks have died", (3, 5))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert done.returncode == 1, done.stderr
    (ring,) = rings.find_rings([str(tmp_path)])
    end = read_recording(rings.read_ring(ring), 0).end
    assert (end.why, end.dead) == ("hpcdist.errors.RankFailure: ranks have died", (3, 5))
    assert abs(end.at_s - time.time()) < 3600


def dead_ring(tmp_path, name, job, age_s, ended_s=0.0):
    """Make the ring of a process of a job that is dead.

    Its only record ended at `ended_s` of the node's clock; there is none if that is 0.
    """
    about, raw = json.dumps({"job": job}).encode(), bytearray(layout.TOTAL)
    layout.HEADER.pack_into(
        raw, 0, layout.MAGIC, 1 << 30, 1, 0, 1, layout.CAPACITY, 0, 8, 0, 0, 8, len(about), 0
    )
    layout.RECORD.pack_into(raw, layout.RECORDS_AT, 0, 0, int(ended_s * 1e9), *[0] * 12)
    raw[layout.TEXT_AT + 8 : layout.TEXT_AT + 8 + len(about)] = about
    opened, path = rings.make_ring(layout.TOTAL, name, [str(tmp_path)])
    os.close(opened)
    path.write_bytes(raw)
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def test_dead_jobs_are_kept_whole_the_newest_however_large_it_is(monkeypatch, tmp_path):
    keep(monkeypatch, 5)

    def kept():
        rings.sweep([str(tmp_path)])
        return [path.stem for path in rings.find_rings([str(tmp_path)])]

    for rank in range(3):
        dead_ring(tmp_path, f"older-{rank}", "older", 200 + rank)
        dead_ring(tmp_path, f"newer-{rank}", "newer", 300 * (rank < 2) + 100)
    assert kept() == [f"newer-{rank}" for rank in range(3)]
    dead_ring(tmp_path, "single-0", "single", 500)
    assert kept() == [*[f"newer-{rank}" for rank in range(3)], "single-0"]
    for rank in range(7):
        dead_ring(tmp_path, f"large-{rank}", "large", 10)
    assert kept() == [f"large-{rank}" for rank in range(7)]


HOUR_S = 3600.0


@pytest.mark.parametrize("up_s", [60.0, 400 * 24 * HOUR_S], ids=["just booted", "long up"])
@pytest.mark.parametrize(
    ("made_s_ago", "ended_s_ago", "stays"),
    [
        (0.5 * HOUR_S, None, True),
        (2 * HOUR_S, None, False),
        (2 * HOUR_S, 30.0, True),
        (2 * HOUR_S, 1.5 * HOUR_S, False),
        (2 * HOUR_S, -HOUR_S, False),
    ],
    ids=["unused", "old and unused", "old and used", "used long ago", "of an earlier boot"],
)
def test_a_ring_is_as_old_as_what_happened_last(
    monkeypatch, tmp_path, up_s, made_s_ago, ended_s_ago, stays
):
    if ended_s_ago is not None and ended_s_ago > up_s:
        pytest.skip("nothing can have ended before the node was up")
    ended_s = 0.0 if ended_s_ago is None else up_s - ended_s_ago
    dead_ring(tmp_path, "1-1", "a job", made_s_ago, ended_s)
    monkeypatch.setattr(rings.time, "monotonic", lambda: up_s)
    rings.sweep([str(tmp_path)])
    assert bool(rings.find_rings([str(tmp_path)])) == stays


def test_a_place_that_is_nearly_full_is_left_to_others(monkeypatch, tmp_path):
    monkeypatch.setattr(rings, "LEFT_BYTES", 1 << 60)
    assert rings.make_ring(layout.TOTAL, "1-1", [str(tmp_path)]) is None


def test_a_folder_that_another_one_has_made_is_not_used(monkeypatch, tmp_path):
    (tmp_path / f"flight-{os.getuid()}").symlink_to("/tmp")
    assert rings.make_ring(layout.TOTAL, "1-1", [str(tmp_path)]) is None


def test_it_is_switched_off_by_its_variable():
    program = """
import hpcdist as dist
from hpcdist.transport.flight import recorder
world = dist.init_parallel_env(backend="local")
dist.barrier()
print(recorder.is_open(), world.flight)
"""
    environ = os.environ | {"HPCDIST_RECORDER": "off"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True
    )
    assert done.stdout == "False 0\n"
