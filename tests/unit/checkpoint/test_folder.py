"""What lies in a checkpoint's folder: links and devices are not opened, strangers' files stay."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import hpcdist as dist
from hpcdist import checkpoint
from hpcdist.checkpoint import claim, holdings, saving

STATE = {"x": np.arange(5.0)}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "saved"
    checkpoint.save(STATE, path)
    return path


@pytest.fixture
def outside(tmp_path):
    """A file and a folder of somebody else."""
    path = tmp_path / "outside"
    path.mkdir()
    (path / "file").write_text("mine")
    return path


def data_of(folder):
    (path,) = folder.glob("*.safetensors")
    return path


# ---- reading


def put_link(path, tmp_path):
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


def put_fifo(path, _):
    path.unlink()
    os.mkfifo(path)


def put_device(path, _):
    path.unlink()
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


def put_folder(path, _):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("put", [put_link, put_fifo, put_device, put_folder])
@pytest.mark.parametrize("which", ["manifest", "data"])
def test_what_is_no_regular_file_is_not_opened(folder, tmp_path, put, which):
    path = data_of(folder) if which == "data" else folder / "checkpoint.json"
    put(path, tmp_path)
    target = np.full(5, 7.0)
    uses = [
        lambda: checkpoint.load(None, folder),
        lambda: checkpoint.load({"x": target}, folder),
        lambda: checkpoint.verify(folder),
        lambda: checkpoint.consolidate(folder, tmp_path / "all.safetensors"),
    ]
    for use in uses:
        with pytest.raises(dist.CheckpointError, match=r"is a link or a device, not a file"):
            use()
    assert (target == 7).all()
    assert not (tmp_path / "all.safetensors").exists()


def test_a_fifo_lets_no_rank_wait(folder, tmp_path):
    put_fifo(data_of(folder), tmp_path)

    def load():
        with pytest.raises(dist.CheckpointError, match="is a link or a device"):
            checkpoint.load(None, folder)
        return True

    assert dist.simulate(3, load) == [True] * 3


def test_the_command_opens_no_fifo(folder, tmp_path):
    put_fifo(folder / "checkpoint.json", tmp_path)
    for words in (["ls"], ["verify"]):
        command = [sys.executable, "-m", "hpcdist", "checkpoint", *words, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "is a link or a device" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_folder_that_the_user_reaches_by_a_link_is_read_and_written(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert (checkpoint.load(None, link)["x"] == STATE["x"]).all()
    checkpoint.save({"x": np.ones(2)}, link)
    assert (checkpoint.load(None, folder)["x"] == 1).all()


@pytest.mark.parametrize("path", ["", "a\0b", 3, None])
def test_a_path_that_no_folder_can_have_is_refused(path):
    for use in (lambda: checkpoint.save(STATE, path), lambda: checkpoint.load(None, path)):
        with pytest.raises(dist.UsageError, match=r"a path must be|no folder can have"):
            use()


# ---- writing


@pytest.mark.parametrize("put", [put_link, put_fifo])
def test_a_manifest_that_is_no_file_is_not_overwritten(folder, tmp_path, put):
    put(folder / "checkpoint.json", tmp_path)
    before = sorted(os.listdir(folder))
    with pytest.raises(dist.CheckpointError, match="would be overwritten"):
        checkpoint.save({"x": np.ones(2)}, folder)
    assert sorted(os.listdir(folder)) == before


def test_links_of_our_names_are_neither_followed_nor_removed(folder, outside):
    """Also at the name under which manifests were prepared before."""
    links = [
        folder / "checkpoint.json.new",
        folder / f"{'0' * 12}-00000.safetensors",
        folder / f"{'1' * 12}.saving",
    ]
    for link in links:
        link.symlink_to(outside / "file")
    checkpoint.save({"x": np.ones(2)}, folder)
    assert (checkpoint.load(None, folder)["x"] == 1).all()
    assert (outside / "file").read_text() == "mine"
    assert all(link.is_symlink() for link in links)


def test_every_new_file_has_a_random_name_and_is_made_for_sure(folder, monkeypatch):
    made = []
    real = os.open

    def noting(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            made.append(os.path.basename(path))
            assert flags & os.O_EXCL
            assert flags & os.O_NOFOLLOW
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", noting)
    checkpoint.save({"x": np.ones(2)}, folder)
    checkpoint.consolidate(folder, f"{folder}.all")
    assert len(made) == 4  # the claim, data, the manifest, and one file of all
    assert all(re.search(r"[0-9a-f]{12}", name) for name in made), made


def test_keep_removes_nothing_that_is_elsewhere_or_of_others(tmp_path, outside):
    series = tmp_path / "series"
    for step in (1, 2, 3):
        checkpoint.save(STATE, series, step=step)
    away = outside / "archive"
    (series / "step-000001").rename(away)
    (series / "step-000001").symlink_to(away)
    (series / "step-000002" / "notes.txt").write_text("mine")
    theirs = series / "step-000000"
    theirs.mkdir()
    (theirs / "checkpoint.json").write_text('{"theirs": 1}')
    (theirs / f"{'a' * 12}-00000.safetensors").write_text("theirs, too")
    checkpoint.save(STATE, series, step=4, keep=1)
    assert sorted(os.listdir(series)) == [
        "step-000000",
        "step-000001",
        "step-000002",
        "step-000004",
    ]
    assert (checkpoint.load(None, away)["x"] == STATE["x"]).all()
    assert os.listdir(series / "step-000002") == ["notes.txt"]
    assert len(os.listdir(theirs)) == 2


def test_a_step_that_is_a_link_is_not_saved_into(tmp_path, outside):
    series = tmp_path / "series"
    series.mkdir()
    (series / "step-000001").symlink_to(outside)
    with pytest.raises(dist.CheckpointError, match="is a link, which is not followed"):
        checkpoint.save(STATE, series, step=1)
    assert os.listdir(outside) == ["file"]


# ---- two jobs

SAVER = """
import sys, time
import numpy as np
from hpcdist import CheckpointError, checkpoint
from hpcdist.checkpoint import saving

folder, number, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
saved = refused = 0
for _ in range(rounds):
    try:
        checkpoint.save({"x": np.full(200_000, number), "number": number}, folder)
        saved += 1
    except CheckpointError as error:
        assert "is being saved to by process" in str(error), error
        refused += 1
print(saved, refused)
"""

HOLDER = """
import sys, time
import numpy as np
from hpcdist import checkpoint
from hpcdist.checkpoint import saving

commit = saving.commit

def slowly(*args):
    print("writing", flush=True)
    sys.stdin.readline()
    commit(*args)

saving.commit = slowly
checkpoint.save({"x": np.zeros(3)}, sys.argv[1])
"""


def job(text, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def files_of(folder):
    return [name for name in os.listdir(folder) if name.endswith(".safetensors")]


def test_a_second_job_is_refused_and_told_who_saves(folder):
    first = job(HOLDER, folder)
    assert first.stdout.readline() == "writing\n"
    with pytest.raises(dist.CheckpointError, match=f"is being saved to by process {first.pid} on"):
        checkpoint.save(STATE, folder)
    _, err = first.communicate("\n", timeout=120)
    assert first.returncode == 0, err
    assert (checkpoint.load(None, folder)["x"] == 0).all()
    checkpoint.save(STATE, folder)
    assert len(os.listdir(folder)) == 2


def test_a_job_that_was_killed_is_in_nobodys_way(folder):
    first = job(HOLDER, folder)
    assert first.stdout.readline() == "writing\n"
    assert len(files_of(folder)) == 2
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=120)
    assert (checkpoint.load(None, folder)["x"] == STATE["x"]).all()
    checkpoint.save({"x": np.ones(2)}, folder)
    assert len(os.listdir(folder)) == 2
    checkpoint.verify(folder)


def test_jobs_that_save_at_the_same_time_leave_whole_checkpoints(folder):
    jobs = [job(SAVER, folder, number, 8) for number in (1, 2)]
    while any(each.poll() is None for each in jobs):
        state = looked(folder)
        if state is not None and "number" in state:
            assert (state["x"] == state["number"]).all()
        time.sleep(0.01)
    told = [each.communicate() for each in jobs]
    assert [each.returncode for each in jobs] == [0, 0], told
    assert sum(int(out.split()[0]) for out, _ in told) >= 1
    checkpoint.verify(folder)
    checkpoint.save(STATE, folder)
    assert len(os.listdir(folder)) == 2


def looked(folder):
    """Return what is in a folder, unless it was replaced while it was read."""
    try:
        return checkpoint.load(None, folder)
    except dist.CheckpointError as error:
        if "is missing" not in str(error):
            raise
        return None


@pytest.mark.parametrize("locks", ["none", "of one node"])
def test_without_locks_two_jobs_are_whole_both(folder, monkeypatch, locks):
    """One begins, another saves and tidies up, then the first one ends, and stands."""
    if locks == "none":
        monkeypatch.setattr(claim.fcntl, "flock", no_locks)
    else:
        monkeypatch.setattr(claim.fcntl, "flock", lambda fd, kind: None)
        machines = iter(f"machine {number}" for number in range(1000))
        monkeypatch.setattr(claim, "_machine", lambda: next(machines))
    commit, begun, go_on = saving.commit, threading.Event(), threading.Event()

    def slowly(*args):
        if threading.current_thread().name == "first":
            begun.set()
            assert go_on.wait(60)
        commit(*args)

    monkeypatch.setattr(saving, "commit", slowly)
    first = threading.Thread(
        name="first", target=lambda: saving.save({"x": np.full(5, 1.0)}, folder)
    )
    monkeypatch.setattr(saving, "finish_saving", lambda ranks: None)
    first.start()
    assert begun.wait(60)
    for number in (2.0, 3.0):
        checkpoint.save({"x": np.full(5, number)}, folder)
        assert (checkpoint.load(None, folder)["x"] == number).all()
    go_on.set()
    first.join(60)
    assert (checkpoint.load(None, folder)["x"] == 1).all()
    checkpoint.verify(folder)


def no_locks(fd, kind):
    raise OSError(95, "Operation not supported")


def test_a_claim_is_whole_and_locked_from_its_first_moment(folder, monkeypatch):
    seen = []
    real = os.rename

    def looking(old, new):
        assert claim.tokens_claimed(folder) == []
        real(old, new)
        seen.append(claim.judge(folder, claim.tokens_claimed(folder)[0]))

    monkeypatch.setattr(os, "rename", looking)
    checkpoint.save(STATE, folder)
    assert seen == [claim.Holder.ALIVE]


def test_a_process_that_was_killed_while_it_made_a_claim_leaves_nothing_for_long(tmp_path):
    series = tmp_path / "series"
    for step in (1, 2):
        checkpoint.save(STATE, series, step=step)
    (series / "step-000001" / f"{'a' * 12}.saving.new").touch()
    checkpoint.save(STATE, series, step=3, keep=2)
    assert sorted(os.listdir(series)) == ["step-000002", "step-000003"]


def test_what_a_job_of_another_machine_left_goes_after_a_day(folder):
    token = "a" * 12
    left = [folder / f"{token}.saving", folder / f"{token}-00000.safetensors"]
    left[0].write_text(json.dumps({"machine": "another", "process": 3}))
    left[1].write_text("half")
    checkpoint.save(STATE, folder)
    assert all(path.exists() for path in left)
    day_ago = time.time() - 100_000
    os.utime(left[0], (day_ago, day_ago))
    checkpoint.save(STATE, folder)
    assert len(os.listdir(folder)) == 2


def test_a_save_whose_claim_was_taken_away_does_not_commit(folder, monkeypatch):
    commit = saving.commit

    def robbed(mine, manifest):
        os.unlink(folder / f"{mine.token}.saving")
        commit(mine, manifest)

    monkeypatch.setattr(saving, "commit", robbed)
    with pytest.raises(dist.CheckpointError, match="has removed what was being saved"):
        checkpoint.save({"x": np.ones(2)}, folder)
    monkeypatch.undo()
    assert (checkpoint.load(None, folder)["x"] == STATE["x"]).all()
    checkpoint.save({"x": np.ones(2)}, folder)
    assert len(os.listdir(folder)) == 2


@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_that_fails_gives_its_claim_back(folder, monkeypatch, async_save):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(holdings, "to_read", full)
    with pytest.raises(dist.CheckpointError, match="No space left"):
        checkpoint.save({"x": np.ones(2)}, folder, async_save=async_save).wait()
    monkeypatch.undo()
    assert len(os.listdir(folder)) == 2
    checkpoint.save({"x": np.ones(2)}, folder)
