"""What `hpcdist bench` computes: sizes, statistics, comparisons, plans, tables and pictures."""

import json
import os
import random
import sys
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
from click.testing import CliRunner

from hpcdist.bench import messages
from hpcdist.bench.baseline import compare, summary
from hpcdist.bench.cases import CASES, KINDS, choose_cases
from hpcdist.bench.command import bench
from hpcdist.bench.harness import measure_calls
from hpcdist.bench.interleaved import Interleaved, idle, interleave
from hpcdist.bench.libraries import PEERS, start_peer, start_peers
from hpcdist.bench.libraries.hpcdist import array_calls, start_own
from hpcdist.bench.output import predictable
from hpcdist.bench.overlap import hidden
from hpcdist.bench.plan import Plan, points_of
from hpcdist.bench.plots import check_plot, draw_predictions, draw_rows, heading_of, panels_of
from hpcdist.bench.progress import Bar, on_terminal
from hpcdist.bench.request import check_request, read_request, spread_against
from hpcdist.bench.rows import BUS_FACTOR, Point, bandwidths, row_of
from hpcdist.bench.runfile import read_run, write_run
from hpcdist.bench.tables import plain_console, print_rows
from hpcdist.bench.task import Messages, Task, make_task, read_dtype, thing_of
from hpcdist.bench.unavailable import Unavailable
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.text import bandwidth, duration, rate, read_size, read_sizes, times, volume

ALONE = Group([0], 0, 0, None)


def group_of(size, rank=0):
    """Return a group that describes its ranks and cannot communicate."""
    return Group(range(size), rank, 0, None)


def task_of(case, size=4, rank=0, nbytes=64):
    return make_task(case, group_of(size, rank), nbytes, np.dtype("f4"), "ordinary", "SUM")


# ---- figures


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("8,64K,2M", (8, 65536, 2 << 20)),
        ("2M,8,8", (8, 2 << 20)),
        ("8:64", (8, 16, 32, 64)),
        ("8:100", (8, 16, 32, 64)),
        ("8:64K:8", (8, 64, 512, 4096, 32768)),
        ("1G", (1 << 30,)),
        ("1GiB, 4kb", (4096, 1 << 30)),
    ],
)
def test_sizes_are_lists_or_ranges(text, sizes):
    assert read_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "8:", "x", "64:8", "0:8", "8:64:1", "8:64:2:2", "8T", "-1"])
def test_other_sizes_are_errors(text):
    with pytest.raises(UsageError, match=r"size|whole number"):
        read_sizes(text)


def test_sizes_are_shown_as_they_are_read():
    for nbytes in (8, 1 << 10, 3 << 20, 1 << 30):
        assert read_size(volume(nbytes).replace(" ", "")) == nbytes


def test_numbers_have_fitting_units():
    assert [duration(s) for s in (2.5, 1e-3, 2e-6, 3e-9)] == [
        "2.50 s",
        "1.00 ms",
        "2.00 us",
        "3 ns",
    ]
    assert [bandwidth(b) for b in (2e9, 3e6, 1e3)] == ["2.00 GB/s", "3.00 MB/s", "1.00 kB/s"]
    assert [rate(r) for r in (2e6, 3e3, 1)] == ["2.00 M/s", "3.00 k/s", "1.00 /s"]
    assert [times(r) for r in (2, 0.001)] == ["2.00 x", "0.001 x"]


# ---- the race


class OneRank:
    """A communicator of one rank."""

    size = 1

    def Barrier(self):  # noqa: N802
        pass

    def Allgather(self, own, everyone):  # noqa: N802
        everyone[0] = own


def test_contestants_alternate_and_the_order_rotates():
    called = []
    candidates = {name: lambda name=name: called.append(name) for name in "abc"}
    found = interleave(OneRank(), candidates, rounds=3, sample_s=0)
    assert called[-9:] == list("abcbcacab")
    assert all(taken.shape == (3,) and (taken > 0).all() for taken in found.seconds.values())
    assert [called.count(name) for name in "abc"] == [called.count("a")] * 3


def test_calls_timed_one_by_one_are_further_samples():
    called = []
    found = interleave(
        OneRank(), {"a": lambda: called.append(0)}, rounds=2, sample_s=1e-5, single=30
    )
    assert found.samples["a"].shape == (32,)
    assert (found.samples["a"][:2] == found.seconds["a"]).all()


def test_a_race_compares_what_was_taken_in_the_same_round():
    seconds = {"slow": np.array([2.0, 6.0, 9.0]), "fast": np.array([1.0, 2.0, 9.0])}
    found = Interleaved(seconds, {}, seconds)
    assert found.ratio("slow", to="fast") == 2.0
    assert found.added("slow", to="fast") == 1.0
    assert (found.median("slow"), found.best("slow")) == (6.0, 2.0)


def test_the_straggler_is_the_slowest_rank_beside_the_median_one():
    by_rank = np.array([[1.0, 1.0], [1.0, 1.0], [3.0, 5.0], [np.nan, np.nan]])
    assert Interleaved({}, {"a": by_rank}, {}).straggler("a") == 4.0


def test_hidden_is_what_both_together_save():
    seconds = {"x": np.array([2.0]), "compute": np.array([3.0]), "x both": np.array([3.5])}
    assert hidden(Interleaved(seconds, {}, seconds), "x") == 0.75


# ---- rows


def row(case="all_reduce", library="hpcdist", nbytes=8, median_s=2e-6, **more):
    return {
        "case": case,
        "library": library,
        "dtype": "float32",
        "memory": "ordinary",
        "nbytes": nbytes,
        "ranks": 2,
        "nodes": 1,
        "median_s": median_s,
        "min_s": median_s / 2,
        "p99_s": median_s * 2,
        "straggler": 1.0,
        "samples": 3,
        **more,
    }


def test_a_row_holds_what_one_of_the_parts_took():
    seconds = {"x": np.array([2.0, 4.0, 6.0])}
    samples = {"x": np.arange(0.0, 202.0, 2.0)}
    found = Interleaved(seconds, {"x": seconds["x"][np.newaxis]}, samples)
    point = Point("latency", "float32", "ordinary", 8)
    assert row_of(found, "x", "hpcdist", point, ranks=4, nodes=2, parts=2) == {
        "case": "latency",
        "library": "hpcdist",
        "dtype": "float32",
        "memory": "ordinary",
        "nbytes": 8,
        "ranks": 4,
        "nodes": 2,
        "median_s": 2.0,
        "min_s": 1.0,
        "p99_s": 99.0,
        "straggler": 1.0,
        "samples": 101,
        "bandwidth": 4.0,
        "bus_bandwidth": 4.0,
    }


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("gather", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("latency", 1),
        ("alltoall_single", 0.75),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(case, factor):
    assert BUS_FACTOR[case](4) == factor
    found = bandwidths(row(case, nbytes=100, median_s=2.0, ranks=4))
    assert found["bus_bandwidth"] == factor * found["bandwidth"]


@pytest.mark.parametrize(
    ("case", "nbytes"),
    [("all_reduce", 100), ("reduce_scatter", 100), ("all_gather", 400), ("gather", 400)],
)
def test_algorithm_bandwidth_counts_the_larger_of_what_a_rank_hands_in_and_gets(case, nbytes):
    assert bandwidths(row(case, nbytes=100, median_s=2.0, ranks=4))["bandwidth"] == nbytes / 2


def test_bandwidth_is_told_only_where_it_means_something():
    assert bandwidths(row("barrier", nbytes=None)) == {}
    assert bandwidths(row("all_gather_object", nbytes=8)) == {}
    for limit in ("copy", "pinned copy"):
        assert bandwidths(row("all_gather", limit, 100, 2.0)) == {"bandwidth": 50.0}
    assert bandwidths(row("bidirectional", nbytes=100, median_s=2.0))["bandwidth"] == 100.0


# ---- tasks and libraries


def test_size_is_what_a_rank_hands_in():
    gathered, scattered = task_of("all_gather"), task_of("scatter")
    assert (gathered.x.nbytes, gathered.out.nbytes) == (64, 256)
    assert (scattered.x.nbytes, scattered.out.nbytes) == (64, 16)
    assert [part.nbytes for part in scattered.parts] == [16] * 4
    assert task_of("all_reduce").out.nbytes == 64
    assert task_of("alltoall", nbytes=4).x.size == 4  # an element for each rank


def test_every_array_of_a_task_holds_zeros():
    for case in ("all_gather_list", "alltoall", "reduce_scatter"):
        task = task_of(case)
        assert all(not array.any() for array in (task.x, task.out, *task.parts))


def test_an_object_is_a_small_dictionary_with_an_array_if_it_has_a_size():
    assert "weights" not in thing_of(0)
    assert thing_of(1000)["weights"].nbytes == 1000


def test_dtypes_have_the_names_of_numpy_and_ml_dtypes():
    assert read_dtype("bfloat16").itemsize == 2
    assert read_dtype("float32") == np.float32
    for wrong in ("float31", "object"):
        with pytest.raises(UsageError, match=wrong):
            read_dtype(wrong)


def test_hpcdist_has_a_call_for_every_case_made_of_calls():
    wanted = {name for name, case in CASES.items() if case.measure is measure_calls}
    assert wanted == set(start_own(ALONE).calls)


def test_the_calls_that_paddle_shares_get_its_tensors():
    told = []

    class Verbs:
        def __getattr__(self, name):
            return lambda *args, **kwargs: told.append((name, args, kwargs))

    task = task_of("alltoall", size=2)
    calls = array_calls(Verbs(), "group", {"SUM": "sum"}, lambda array: array.size)
    for case in ("all_reduce", "broadcast", "alltoall", "alltoall_single", "barrier"):
        calls[case](task)()
    assert told == [
        ("all_reduce", (16, "sum", "group"), {}),
        ("broadcast", (16, 0, "group"), {}),
        ("alltoall", ([8, 8], [8, 8], "group"), {}),
        ("alltoall_single", (16, 16), {"group": "group"}),
        ("barrier", ("group",), {}),
    ]


# ---- messages


def told_by(pattern, rank, size, nbytes=8):
    """Return what one call of a pattern does on one rank, as (verb, partner)."""
    told = []

    def verb(name):
        return lambda _, partner: told.append((name, partner))

    fake = Messages(lambda array: array, *map(verb, ("send", "recv", "isend", "irecv")), len)
    call = pattern(task_of("latency", size, rank, nbytes), fake)
    if call is idle:
        return None
    call()
    return told


def test_send_and_back_is_between_rank_0_and_the_first_of_the_second_half():
    assert told_by(messages.send_and_back, 0, 4) == [("send", 2), ("recv", 2)]
    assert told_by(messages.send_and_back, 2, 4) == [("recv", 0), ("send", 0)]
    assert [told_by(messages.send_and_back, rank, 4) for rank in (1, 3)] == [None, None]


def test_a_window_is_sent_before_one_answer_comes():
    assert told_by(messages.one_way, 0, 2) == [("isend", 1)] * 64 + [("recv", 1)]
    assert told_by(messages.one_way, 1, 2) == [("irecv", 0)] * 64 + [("send", 0)]
    assert told_by(messages.both_ways, 0, 2) == [("irecv", 1)] * 64 + [("isend", 1)] * 64


def test_all_pairs_leave_the_odd_rank_out():
    partners = [told_by(messages.all_pairs, rank, 5) for rank in range(5)]
    assert [each and each[0][1] for each in partners] == [2, 3, 0, 1, None]


def test_windows_of_large_messages_are_smaller():
    assert [messages.window_of(1 << shift) for shift in (3, 20, 24, 30)] == [64, 64, 4, 2]


# ---- plans


def test_without_a_name_the_usual_cases_are_measured():
    usual = choose_cases([])
    assert {"latency", "all_reduce", "data_parallel"} <= set(usual) < set(CASES)


def test_a_set_stands_for_its_cases():
    assert choose_cases(["overlap", "barrier"]) == (
        "overlap_sleep", "overlap_numpy", "overlap_python", "overlap_matmul", "barrier",
    )  # fmt: skip
    assert choose_cases(["all"]) == tuple(CASES)
    assert not set(KINDS) & set(CASES)


def test_an_unknown_case_is_named_with_those_there_are():
    with pytest.raises(UsageError, match=r"'all_reduced'.*all_reduce.*collectives"):
        choose_cases(["all_reduced"])


def test_a_plan_says_where_each_case_is_measured():
    plan = Plan((), sizes=(6, 8), dtypes=("float32", "int8"), memories=("ordinary", "shared"))
    assert points_of(plan, "latency", 1) == []
    assert points_of(plan, "barrier", 1) == [Point("barrier")]
    assert points_of(plan, "all_gather_object", 2) == [
        Point("all_gather_object", nbytes=size) for size in (6, 8)
    ]
    assert [point[1:] for point in points_of(plan, "scan", 2)] == [
        ("float32", "ordinary", 8),  # 6 bytes are no number of float32
        ("float32", "shared", 8),
        *[("int8", memory, size) for memory in ("ordinary", "shared") for size in (6, 8)],
    ]


def test_results_that_would_fill_the_memory_are_left_out():
    plan = Plan((), sizes=(8, 64 << 20))
    assert [point.nbytes for point in points_of(plan, "all_gather", 16)] == [8, 64 << 20]
    assert [point.nbytes for point in points_of(plan, "all_gather", 17)] == [8]


def test_a_quick_plan_has_few_sizes_unless_they_are_asked_for():
    quick, full = (points_of(Plan((), quick=quick), "all_reduce", 2) for quick in (True, False))
    assert len(quick) < len(full)
    asked = points_of(Plan((), sizes=read_sizes("8:64K"), quick=True), "all_reduce", 2)
    assert len(asked) == 14


# ---- the command line


@pytest.mark.parametrize(
    ("line", "spread"),
    [
        ("--against mpi4py torch", "--against mpi4py,torch"),
        ("--against mpi4py,torch", "--against mpi4py,torch"),
        ("barrier --against mpi4py torch --quick", "barrier --against mpi4py,torch --quick"),
        ("--against mpi4py all_reduce messages", "--against mpi4py all_reduce messages"),
        ("--against mpi4py --against torch", "--against mpi4py --against torch"),
        ("--against", "--against"),
        ("scan --quick", "scan --quick"),
    ],
)
def test_against_takes_several_words(line, spread):
    assert spread_against(line.split()) == spread.split()


GIVEN = {
    "cases": (), "sizes": None, "ranks": None, "dtype": "float32", "memory": None,
    "device": "cpu", "op": "sum", "against": (), "rounds": None, "quick": False,
    "json_file": None, "plot": None, "baseline": None, "tolerance": 1.25, "predict": None,
    "source": None,
}  # fmt: skip


def test_options_become_a_request():
    given = {"cases": ("barrier",), "sizes": "8,16", "ranks": "2,4", "dtype": "float32,bfloat16"}
    given |= {"memory": "shared", "op": "max", "against": ("torch,mpi4py", "torch")}
    request = read_request(GIVEN | given | {"predict": "8,64"})
    assert request.plan == Plan(
        ("barrier",), (8, 16), (2, 4), ("float32", "bfloat16"), ("shared",), "MAX",
        ("torch", "mpi4py"),
    )  # fmt: skip
    assert request.predict == (8, 64)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("against", ("mpi4py,tensorflow",), "tensorflow is unknown; there is mpi4py"),
        ("op", "median", "MEDIAN is unknown; there is SUM"),
        ("memory", "fast", "fast is unknown; there is ordinary, shared"),
        ("dtype", "float31", "'float31' is not a dtype"),
        ("dtype", ",", "--dtype: a name is missing"),
        ("ranks", "2,0", "'0' is not a whole number"),
        ("sizes", "big", "'big' is not a size"),
        ("sizes", "8,3", "3 bytes are no whole number of float32"),
        ("source", "run.json", "--predict"),
    ],
)
def test_wrong_options_are_named(option, value, words):
    with pytest.raises(UsageError, match=words):
        read_request(GIVEN | {option: value})


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("ranks", "3", "--ranks 3, but this job has 2 ranks"),
        ("json_file", "/nowhere/run.json", "/nowhere/run.json cannot be written"),
        ("plot", "run.pdf", "ends in .png or .svg"),
        ("baseline", "/nowhere/run.json", "/nowhere/run.json cannot be read"),
    ],
)
def test_files_and_ranks_are_checked_before_anything_is_measured(option, value, words):
    with pytest.raises(UsageError, match=words):
        check_request(read_request(GIVEN | {option: value}), nranks=2)


def test_the_list_has_every_case():
    done = CliRunner().invoke(bench, ["--list"])
    assert done.exit_code == 0
    assert all(name in done.output for name in CASES)


@pytest.mark.parametrize("words", [["--nonsense"], ["nonsense"], ["--against", "me"]])
def test_a_wrong_command_line_exits_with_2(words):
    done = CliRunner().invoke(bench, words)
    assert done.exit_code == 2
    assert "Error" in done.output


def test_the_help_names_the_libraries():
    assert all(name in CliRunner().invoke(bench, ["--help"]).output for name in PEERS)


# ---- saved runs


def test_a_saved_run_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / "run.json")
    write_run(path, {"mpi": "none"}, [row()])
    assert read_run(path) == {"format": 1, "setting": {"mpi": "none"}, "rows": [row()]}
    assert [each.name for each in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a run of hpcdist bench"),
        ('{"format": 2, "rows": []}', "format 1"),
        ('{"format": 1}', "rows without"),
        ('{"format": 1, "rows": [{"case": "scan"}]}', "rows without"),
        (json.dumps({"format": 1, "rows": [row(median_s=0)]}), "rows without"),
    ],
)
def test_another_file_is_no_run(tmp_path, text, words):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        read_run(str(path))


def test_slower_is_slower_in_the_median_and_in_the_minimum():
    saved = [row(nbytes=size) for size in (8, 16, 32)]
    slower = row(nbytes=8, median_s=3e-6)
    noisy = row(nbytes=16, median_s=3e-6) | {"min_s": saved[1]["min_s"]}
    within = row(nbytes=32, median_s=2.4e-6)
    found = compare([slower, noisy, within], saved, tolerance=1.25)
    assert [each["nbytes"] for each in found.regressions] == [8]
    assert found.regressions[0]["median_ratio"] == pytest.approx(1.5)
    assert found.regressions[0]["was_s"] == 2e-6
    assert found.compared == 3


def test_rows_are_the_same_if_everything_but_their_times_is():
    saved = [row(), row("scan")]
    others = [row(ranks=4), row(memory="shared"), row(dtype="int8"), row(library="torch")]
    found = compare([*others, row(median_s=1.0)], saved, tolerance=1.25)
    assert len(found.regressions) == 1
    assert [each["case"] for each in found.missing] == ["scan"]
    assert found.new == others
    assert summary(found, 1.25) == (
        "1 measurements compared with the baseline; 1 more than 1.25 times as slow; "
        "1 of the baseline were not measured (scan); 4 are new"
    )


def test_models_are_fitted_where_there_are_several_sizes():
    several = [row(nbytes=size) for size in (8, 16)]
    copies = [row(library="copy", nbytes=size) for size in (8, 16)]
    barrier = row("barrier", nbytes=None)
    rows = [*several, *copies, barrier, row("scan", nbytes=8)]
    random.Random(0).shuffle(rows)
    assert sorted(map(str, predictable(rows))) == sorted(map(str, [*several, barrier]))
    assert predictable([row()]) == [row()]  # the fit says what is missing


def test_a_saved_run_is_enough_for_a_prediction(tmp_path):
    path = str(tmp_path / "run.json")
    rows = [row(nbytes=8 << shift, median_s=2e-6 + 1e-9 * (8 << shift)) for shift in range(12)]
    write_run(path, {}, rows)
    done = CliRunner().invoke(bench, ["--predict", "8,4096", "--from", path, "--sizes", "1K"])
    assert done.exit_code == 0, done.output
    predicted = done.output.partition("Predicted")[2]
    assert "4096" in predicted
    assert "1 KiB" in predicted


def test_a_table_says_what_its_ratio_is(capsys):
    compared = [row(ratio=1.0), row(library="torch", ratio=2.0)]
    print_rows(plain_console(), compared)
    assert "hpcdist takes: its time / the time of the row; above 1 x it is slower" in (
        capsys.readouterr().out
    )
    print_rows(plain_console(), compared[:1])
    assert "hpcdist takes" not in capsys.readouterr().out


def test_without_a_terminal_there_is_no_progress(capsys):
    bar = Bar(on_terminal(None))
    bar.at(1, 2, "barrier")
    bar.clear()
    assert capsys.readouterr() == ("", "")
    bar = Bar(on_terminal(True))
    bar.at(1, 2, "barrier")
    shown = capsys.readouterr().err
    bar.clear()
    assert shown.startswith("\x1b[2K")
    assert "barrier" in shown
    assert "50%" in shown
    assert shown.endswith("\r")
    assert capsys.readouterr() == ("", "\x1b[2K\r")


# ---- pictures


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_run_is_drawn(tmp_path, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run.{ending}"
    check_plot(str(path))
    rows = [row(library=name, nbytes=size) for name in ("hpcdist", "copy") for size in (8, 1 << 20)]
    assert draw_rows([*rows, row("barrier", nbytes=None)], str(path))
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert path.read_bytes().startswith(begins)


def test_a_picture_shows_sizes_and_libraries_and_the_limit(tmp_path):
    pytest.importorskip("matplotlib")
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "run.svg"
    rows = [row(library=name, nbytes=size) for name in ("torch", "copy") for size in (8, 1 << 20)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        draw_rows(rows, str(path))
    text = path.read_text()
    for words in ("torch", "copying the bytes once", "1 MiB", "all_reduce, float32", " us"):
        assert words in text


SETTING = {"host": "node17", "date": "2026-11-22T06:00:00+0000", "mpi": "Open MPI 5.0.8"}
SETTING |= {"ranks": 2, "nodes": 1}


def test_a_picture_says_where_and_when_it_was_measured(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    assert heading_of(SETTING) == "node17, 2026-11-22\nOpen MPI 5.0.8, 2 ranks, 1 node"
    assert heading_of({"mpi": "none"}) == "none"
    path = tmp_path / "run.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_rows([row(nbytes=8), row(nbytes=16)], str(path), heading_of(SETTING))
    assert "node17, 2026-11-22" in path.read_text()


def axes_of(rows):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    ((_, draw),) = panels_of(rows)
    draw(axes)
    return axes


def test_curves_have_a_band_from_the_fastest_to_the_99th_percentile():
    axes = axes_of([row(nbytes=size) for size in (8, 1 << 20)])
    (band,) = axes.collections
    heights = {point[1] for point in band.get_paths()[0].vertices}
    assert heights == {1e-6, 4e-6}  # half the median, and twice


@pytest.mark.parametrize(("longest", "scale"), [(90, "linear"), (200, "log")])
def test_bars_have_whiskers_and_are_logarithmic_where_they_differ_by_100(longest, scale):
    rows = [
        row("barrier", name, None, seconds, min_s=seconds, p99_s=1.05 * seconds)
        for name, seconds in {"hpcdist": 1e-6, "torch": longest * 1e-6}.items()
    ]
    axes = axes_of(rows)
    assert axes.get_xscale() == scale
    (whiskers,) = axes.collections
    ends = [segment[:, 0].tolist() for segment in whiskers.get_segments()]
    assert ends == [pytest.approx([each["min_s"], each["p99_s"]]) for each in rows]


def test_nothing_is_drawn_of_nothing(tmp_path):
    assert not draw_rows([], str(tmp_path / "run.png"))
    assert not list(tmp_path.iterdir())


def test_predictions_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    told = {"case": "scan", "library": "hpcdist", "dtype": "float32", "memory": "ordinary"}
    rows = [
        {**told, "ranks": ranks, "nbytes": size, "seconds": ranks * size * 1e-9}
        for ranks in (8, 64)
        for size in (8, None)
        if size
    ]
    assert draw_predictions(rows, str(path))
    assert path.stat().st_size > 1000


def test_a_picture_needs_a_known_ending_and_a_folder(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(UsageError, match="cannot be written"):
        check_plot(str(tmp_path / "none" / "run.png"))
    with pytest.raises(UsageError, match="ends in"):
        check_plot(str(tmp_path / "run"))


def test_without_matplotlib_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        check_plot("run.png")


def test_a_task_is_of_the_ranks_of_its_group():
    task = make_task("reduce", Group([4, 6], 6, 1, None), 8, np.dtype("f4"), "ordinary", "MAX")
    assert (task.rank, task.size, task.root, task.op) == (1, 2, 4, "MAX")
    assert isinstance(task, Task)


# ---- Paddle, where it is not installed

PADDLE = """
told = []

class CPUPlace: pass

def to_tensor(array, place): return ("tensor", array.size)

class distributed:
    class ReduceOp:
        SUM, MAX, MIN, PROD, AVG = "sum", "max", "min", "prod", "avg"

    class group: ranks = [0, 1]

    def init_parallel_env(): return distributed.group

    def all_reduce(*args): told.append(args)
"""


class TwoRanks:
    """A communicator that has the same from both of its ranks."""

    rank, size = 0, 2

    def allgather(self, thing):
        return [thing, thing]


@pytest.fixture
def paddle(tmp_path, monkeypatch):
    (tmp_path / "paddle").mkdir()
    (tmp_path / "paddle" / "__init__.py").write_text(PADDLE)
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(os.environ), mock.patch.dict(sys.modules):
        yield lambda: sys.modules["paddle"]


def test_paddle_is_told_its_ranks_and_takes_its_own_tensors(paddle):
    library = start_peer("paddle", TwoRanks(), whole=True)
    assert os.environ["PADDLE_TRAINERS_NUM"] == "2"
    assert os.environ["PADDLE_DISTRI_BACKEND"] == "gloo"
    first, second = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
    assert first == second == os.environ["PADDLE_CURRENT_ENDPOINT"] == os.environ["PADDLE_MASTER"]
    library.calls["all_reduce"](task_of("all_reduce", size=2))()
    ((tensor, op, group),) = paddle().told
    assert (tensor, op, group.ranks) == (("tensor", 16), "sum", [0, 1])


def test_paddle_is_left_out_where_only_some_ranks_measure(paddle):
    with pytest.raises(Unavailable, match="all ranks"):
        start_peer("paddle", TwoRanks(), whole=False)


@pytest.mark.skipif(find_spec("paddle") is not None, reason="Paddle is here")
def test_a_library_that_is_not_installed_is_left_out_with_the_reason():
    started, missing = start_peers(["paddle"], TwoRanks(), whole=True)
    assert started == []
    assert missing == {"paddle": "paddle is not installed"}
