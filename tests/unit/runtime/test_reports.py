"""The report that a process of a job that survives leaves when it ends."""

import json

import pytest

from hpcdist.runtime import reports


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Return the folder of the reports, of process 2 of 4."""
    monkeypatch.setenv("HPCDIST_REPORT_DIR", str(tmp_path))
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(reports, "_noted", {})
    return tmp_path


def read(folder):
    return json.loads((folder / "rank-2.json").read_text())


def test_a_process_that_came_to_its_end_says_so(folder):
    reports.write_report(None)
    assert read(folder) == {
        "process": 2,
        "rank": 2,
        "state": "ended",
        "code": 0,
        "recoveries": [],
    }


def test_a_failure_has_its_exit_code(folder):
    reports.write_report(1)
    assert (read(folder)["state"], read(folder)["code"]) == ("failed", 1)


def test_a_process_with_a_rank_leaves_a_sign_that_mpi_has_started(folder):
    assert not (folder / "rank-2.started").exists()
    reports.note_rank(2)
    assert (folder / "rank-2.started").exists()


def test_recoveries_are_told_with_the_rank_that_came_of_them(folder):
    reports.note_recovery((1, 0), 0.25)
    reports.note_rank(0)
    reports.write_report(None)
    assert read(folder)["rank"] == 0
    assert read(folder)["recoveries"] == [{"dead": [0, 1], "seconds": 0.25}]


def test_deaths_stay_in_the_report_however_many_recoveries(folder):
    reports.note_recovery((7,), 0.5)
    for _ in range(100):
        reports.note_recovery((), 0.1)
        reports.note_recovery((3,), 0.1)
    reports.write_report(None)
    found = read(folder)["recoveries"]
    assert [rank for each in found for rank in each["dead"]] == [7, *[3] * 100]


def test_a_spare_that_was_never_needed_is_parked_until_it_gets_a_rank(folder, monkeypatch):
    monkeypatch.setenv("HPCDIST_SPARES", "2")
    reports.write_report(None)
    assert read(folder)["state"] == "parked"
    reports.note_rank(1)
    reports.write_report(None)
    assert (read(folder)["state"], read(folder)["rank"]) == ("ended", 1)


def test_a_report_fits_into_one_write_to_a_pipe_however_many_recoveries(folder):
    for _ in range(1000):
        reports.note_recovery((100_000, 100_001), 12.3456, [100_000, 100_001], {100_000: 100_002})
    reports.note_world(1000, 100_000)
    reports.write_report(None)
    assert (folder / "rank-2.json").stat().st_size < 4000


def test_without_a_folder_nothing_is_noted_or_written(folder, monkeypatch):
    monkeypatch.delenv("HPCDIST_REPORT_DIR")
    reports.note_recovery((1,), 1.0)
    reports.write_report(1)
    assert list(folder.iterdir()) == []
    assert reports._noted == {}


def test_a_recovery_tells_who_died_and_who_took_which_place(folder):
    reports.note_recovery((3, 1), 0.25, [1, 5], {3: 6})
    reports.note_world(1, 4)
    reports.write_report(None)
    assert read(folder)["recoveries"] == [
        {"dead": [1, 3], "seconds": 0.25, "who": [1, 5], "by": [-1, 6]}
    ]
    assert read(folder)["world"] == [1, 4]
