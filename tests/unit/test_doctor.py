"""What the doctor says of a job, from plain data."""

import json

import pytest

from hpcdist.config import Config
from hpcdist.diagnostics.doctor import Report, as_plain, in_words
from hpcdist.diagnostics.facts import (
    Job,
    Load,
    Memory,
    Rank,
    Tuning,
    differing,
    loads_of,
    settings_of,
)
from hpcdist.diagnostics.problems import problems_of, refused
from hpcdist.diagnostics.sizes import read_sizes, volume
from hpcdist.diagnostics.ways import BOARD, folded, meanings, way_rows
from hpcdist.errors import UsageError
from hpcdist.transport.select import DEFAULT, EXPLAINED, Rule, Selection, Way

KiB, MiB = 1 << 10, 1 << 20
WELL = Job(
    launcher="slurm",
    ranks=4,
    nodes=1,
    one_node=True,
    meant=(4, "SLURM_STEP_NUM_TASKS"),
    thread_level="MULTIPLE",
    yields=False,
    loads=[Load("node1", 4, 8)],
    memory=Memory(True, "", pipe=True, limit=1 << 32),
)
DTYPES = ["float32"]
BETWEEN = WELL._replace(one_node=False, nodes=2, loads=[Load("a", 2, 2), Load("b", 2, 2)])


# ---- problems


def test_nothing_is_wrong_with_a_job_that_is_well():
    assert problems_of(WELL, Config(), DTYPES) == []
    alone = WELL._replace(ranks=1, meant=(1, "SLURM_NTASKS"), memory=Memory(None))
    assert problems_of(alone, Config(), DTYPES) == []


@pytest.mark.parametrize(
    ("changes", "settings", "what", "remedy", "stops"),
    [
        ({"ranks": 1, "meant": (4, "PMI_SIZE")}, {}, "PMI_SIZE=4 says", "launcher", True),
        ({"differs": ["settings"]}, {}, "different values of: settings", "one env", True),
        ({"differs": ["NumPy"]}, {}, "different values of: NumPy", "one env", False),
        ({"memory": Memory(False, "hidden")}, {}, "do not share memory: hidden", "hidepid", False),
        ({"loads": [Load("n", 9, 8)]}, {}, "9 ranks share 8 core(s) on n", "yield_when", False),
        ({"thread_level": "SINGLE"}, {}, "at level SINGLE", "THREAD_MULTIPLE", False),
        ({}, {"kernel": "never"}, "HPCDIST_KERNEL=never", "unset", False),
        ({"tuning": Tuning("f.json")}, {}, "f.json has no rule for 4 ranks", "tune -o", False),
        ({}, {"ranks_per_node": 2}, "every 2 ranks", "unset", False),
    ],
)
def test_a_problem_is_named_with_its_remedy(changes, settings, what, remedy, stops):
    (problem,) = problems_of(WELL._replace(**changes), Config(**settings), DTYPES)
    assert what in problem.what
    assert remedy in problem.remedy
    assert problem.stops is stops


def test_without_a_compiler_it_is_slower():
    (problem,) = problems_of(WELL, Config(), [])
    assert "without a C compiler" in problem.what
    assert not problem.stops


def test_waiting_ranks_that_give_way_need_not_be_told_to():
    full = WELL._replace(loads=[Load("n", 9, 8)])
    for yields in (True, None):
        (problem,) = problems_of(full._replace(yields=yields), Config(), DTYPES)
        assert "yield_when_idle" not in problem.remedy


def test_what_stops_the_job_comes_first():
    ill = WELL._replace(thread_level="SINGLE", differs=["NumPy", "settings"])
    assert [problem.stops for problem in problems_of(ill, Config(), [])][:2] == [True, False]


def test_a_job_that_does_not_start_has_the_errors_own_remedy():
    problem = refused(UsageError("HPCDIST_KERNEL='x' is wrong; set one or unset it"))
    assert problem == (True, "HPCDIST_KERNEL='x' is wrong", "set one or unset it")


# ---- facts


def test_cores_of_a_node_are_counted_once():
    ranks = [Rank("a", cores, {}, "") for cores in [(0, 1), (0, 1), (2,)]] + [
        Rank("b", (0,), {}, "")
    ]
    assert loads_of(ranks) == [Load("a", 3, 3), Load("b", 1, 1)]


def test_what_differs_between_ranks_is_named():
    assert differing([{"NumPy": "1", "rules": 3}, {"NumPy": "2", "rules": 3}]) == ["NumPy"]
    assert differing([{"NumPy": "1"}]) == []


def test_every_setting_has_its_value_and_its_source():
    settings = settings_of(Config(kernel="never"), {"HPCDIST_KERNEL": "never"})
    told = {setting.variable: (setting.value, setting.source) for setting in settings}
    assert told["HPCDIST_KERNEL"] == ("never", "environment")
    assert told["HPCDIST_TUNING"] == ("None", "default")
    assert len(told) == len(vars(Config()))


# ---- ways


def rows_of(job, operation, nbytes, rules=DEFAULT):
    selection = Selection(rules, job.ranks, several_nodes=not job.one_node)
    rows = way_rows(job, selection, [operation], [nbytes])
    return {(row.arrays, row.numbers): row.outcome for row in rows}


def test_small_contributions_go_on_the_board():
    assert set(rows_of(WELL, "all_reduce", 8 * KiB).values()) == {BOARD}
    assert rows_of(WELL, "all_reduce", 8 * KiB + 4)["ordinary", "wide"].way == "pipe"


def test_the_rule_behind_a_way_is_named():
    found = rows_of(WELL, "broadcast", 64 * KiB)
    assert found["ordinary", "wide"] == (
        "staged",
        EXPLAINED[Way.STAGED],
        "rule: default, up to 1 MiB",
    )
    assert found["shared", "wide"] == ("direct", EXPLAINED[Way.DIRECT], "rule: default")
    assert rows_of(WELL, "broadcast", 2 * MiB)["ordinary", "wide"].why == "no rule says otherwise"


def test_rules_of_the_tuning_file_are_named_as_such():
    rules = (Rule("broadcast", "ordinary", Way.MPI), Rule("broadcast", "shared", Way.MPI))
    job = WELL._replace(tuning=Tuning("site.json", rules, 2))
    found = rows_of(job, "broadcast", 64 * KiB, (*rules, *DEFAULT))
    assert {(each.way, each.why) for each in found.values()} == {("mpi", "rule: tuning file")}


def test_shared_arrays_that_do_not_stay_in_place_go_like_ordinary_ones():
    rules = (Rule("broadcast", "shared", Way.MPI), *DEFAULT)
    assert rows_of(WELL, "broadcast", 64 * KiB, rules)["shared", "wide"].way == "staged"


@pytest.mark.parametrize(
    ("job", "operation", "why"),
    [
        (WELL._replace(memory=Memory(False)), "all_reduce", "do not share memory"),
        (WELL._replace(memory=Memory(True)), "all_reduce", "pipe needs the compiled kernel"),
        (BETWEEN._replace(memory=Memory(False)), "all_reduce", "lanes need shared memory"),
        (BETWEEN, "broadcast", "no rule says otherwise"),
    ],
)
def test_it_says_why_mpi_is_left_to_do_it(job, operation, why):
    outcome = rows_of(job, operation, 256 * KiB)["ordinary", "wide"]
    assert outcome.way == "mpi"
    assert why in outcome.why


def test_between_nodes_all_arrays_and_numbers_fare_alike():
    found = rows_of(BETWEEN, "all_reduce", MiB)
    assert {outcome.way for outcome in found.values()} == {"lanes"}


def test_rows_that_fare_alike_are_told_once():
    selection = Selection(DEFAULT, 4, several_nodes=False)
    rows = way_rows(WELL, selection, ["reduce"], [KiB, 64 * KiB, MiB])
    assert [list(row.values())[1:4] for row in folded(rows)] == [
        ["any", "1 KiB", "board"],
        ["ordinary", "64 KiB", "pipe"],
        ["ordinary, 16-bit floats and means", "64 KiB, 1 MiB", "pipe"],
        ["shared", "64 KiB, 1 MiB", "direct"],
        ["ordinary", "1 MiB", "mpi"],
    ]
    assert [row["way"] for row in meanings(rows)] == ["board", "pipe", "mpi", "direct"]


# ---- the report


def report(**changes):
    job = WELL._replace(**changes)
    rows = way_rows(job, Selection(DEFAULT, 4, several_nodes=False), ["scan"], [64 * KiB])
    settings = settings_of(Config(), {})
    problems = problems_of(job, Config(), DTYPES)
    return Report({"hpcdist": "1.2.3"}, DTYPES, settings, problems, job, rows)


def test_only_what_is_wrong_makes_the_exit_code_1():
    assert report().code == 0
    assert report(thread_level="SINGLE").code == 0
    assert report(differs=["settings"]).code == 1


def test_the_report_in_words_has_everything():
    text = in_words(report(differs=["settings"]))
    for part in ("1.2.3", "4 on 1 node", "8 for the 4 ranks on node1", "HPCDIST_TIMEOUT_S",
                 "staged", "wrong", "different values of: settings"):  # fmt: skip
        assert part in text
    assert "no problem found" in in_words(report())


def test_the_report_in_json_has_the_same():
    plain = json.loads(json.dumps(as_plain(report())))
    assert plain["versions"] == {"hpcdist": "1.2.3"}
    assert plain["job"]["memory"]["shared"] is True
    assert plain["job"]["loads"] == [{"host": "node1", "ranks": 4, "cores": 8}]
    assert {row["outcome"]["way"] for row in plain["ways"]} == {"staged"}


def test_a_report_without_a_job_is_a_report():
    problem = refused(UsageError("no MPI; load one"))
    stopped = Report({"hpcdist": "1"}, [], settings_of(Config(), {}), [problem])
    assert "no MPI" in in_words(stopped)
    assert as_plain(stopped)["job"] is None
    assert stopped.code == 1


# ---- sizes


def test_sizes_are_read_and_shown():
    assert read_sizes("64K,8, 2M,8") == (8, 64 * KiB, 2 * MiB)
    assert [volume(size) for size in (0, 8, 1536, 64 * KiB, 3 << 30)] == [
        "0 B",
        "8 B",
        "1.5 KiB",
        "64 KiB",
        "3 GiB",
    ]


@pytest.mark.parametrize("text", ["", "x", "8,", "8:64"])
def test_what_is_no_list_of_sizes_is_refused(text):
    with pytest.raises(UsageError, match="is not a size"):
        read_sizes(text)
