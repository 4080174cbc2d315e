"""What the doctor says of a job, from plain data."""

import json

import pytest

from hpcdist.config import Config
from hpcdist.diagnostics.algorithms import EAGER, algorithm_rows, folded, meanings
from hpcdist.diagnostics.checks import check_rows
from hpcdist.diagnostics.doctor import Report, as_plain, describe_report, summary
from hpcdist.diagnostics.gpus import Gpu, Gpus, chosen, no_kernel
from hpcdist.diagnostics.hardware import doubly_used
from hpcdist.diagnostics.installation import Library, settings_of
from hpcdist.diagnostics.launcher import (
    Starter,
    describe_starter as starting_words,
    starter_problems,
)
from hpcdist.diagnostics.machine import Machine, crowded
from hpcdist.diagnostics.network import Link, Network, pairings, slow_links, slow_nodes
from hpcdist.diagnostics.numerics import numeric_problems, numerics, threads_of
from hpcdist.diagnostics.probe import (
    Difference,
    Job,
    Launch,
    Load,
    Memory,
    Tuning,
    differing,
    loads_of,
)
from hpcdist.diagnostics.problem import Check, refused
from hpcdist.diagnostics.problems import problems_of
from hpcdist.diagnostics.sockets import Sockets, socket_problems, try_sockets
from hpcdist.errors import UsageError
from hpcdist.launch.command import Family
from hpcdist.runtime.cuda_awareness import Awareness
from hpcdist.runtime.remedy import not_together
from hpcdist.text import in_short, read_short, read_sizes, volume
from hpcdist.transport.tuning import DEFAULT, EXPLAINED, Algorithm, TuningRule, TuningTable

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
PLACE = Machine("node1", (0,), ((0, 1, 2, 3), (4, 5, 6, 7)), shm=(8 * GiB, 4 * GiB))
WELL = Job(
    launch=Launch("slurm", (4, "SLURM_STEP_NUM_TASKS"), "pmix"),
    ranks=4,
    nodes=1,
    one_node=True,
    library=Library("Open MPI", "Open MPI 5.0.11, MPI 3.1", "MULTIPLE", False),
    loads=[Load("node1", 4, 8)],
    machines=[PLACE._replace(cores=(core,)) for core in range(4)],
    memory=Memory(True, "", pipe=True, limit=1 << 32),
)
DTYPES = ["float32"]
FOUR = tuple(Gpu(f"GPU-{n}", "H200") for n in range(4))
WITHOUT_KERNEL = WELL._replace(ranks=64, memory=Memory(True))
BETWEEN = WELL._replace(one_node=False, nodes=2, loads=[Load("a", 2, 2), Load("b", 2, 2)])


# ---- problems


def test_nothing_is_wrong_with_a_job_that_is_well():
    assert problems_of(WELL, Config(), DTYPES) == []
    alone = WELL._replace(ranks=1, launch=Launch("slurm", (1, "SLURM_NTASKS")), memory=Memory(None))
    assert problems_of(alone, Config(), DTYPES) == []


@pytest.mark.parametrize(
    ("changes", "settings", "what", "remedy", "stops"),
    [
        (
            {"ranks": 1, "launch": Launch("mpich", (4, "PMI_SIZE"))},
            {},
            "PMI_SIZE=4 says",
            "launcher",
            True,
        ),
        (
            {"differs": [Difference("HPCDIST_KERNEL", {"auto": "0-2", "never": "3"})]},
            {},
            "different values of HPCDIST_KERNEL: auto on 0-2; never on 3",
            "one env",
            True,
        ),
        ({"differs": [Difference("NumPy", {"1": "0"})]}, {}, "values of NumPy", "one env", False),
        (
            {"other_bits": [Difference("processor", {"A, AVX2": "0", "B, AVX-512": "1-3"})]},
            {},
            "ranks differ in processor: A, AVX2 on 0; B, AVX-512 on 1-3",
            "ATEN_CPU_CAPABILITY",
            False,
        ),
        (
            {"other_bits": [Difference("threads of BLAS", {"1": "0-2", "8": "3"})]},
            {},
            "differ in threads of BLAS: 1 on 0-2; 8 on 3",
            "OMP_NUM_THREADS",
            False,
        ),
        ({"memory": Memory(False, "hidden")}, {}, "do not share memory: hidden", "hidepid", False),
        ({"loads": [Load("n", 9, 8)]}, {}, "9 ranks share 8 core(s) on n", "yield_when", False),
        (
            {"library": WELL.library._replace(thread_level="SINGLE")},
            {},
            "at level SINGLE",
            "THREAD_MULTIPLE",
            False,
        ),
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


def test_a_compiled_part_that_is_missing_is_named_with_the_reason():
    sentence = "without hpcdist.ps._native (rows of the parameter server): not compiled"
    (problem,) = problems_of(WELL, Config(), DTYPES, [sentence])
    assert sentence in problem.what
    assert "install again" in problem.remedy
    assert not problem.stops
    (kernel,) = problems_of(WELL, Config(), [], [sentence])
    assert "without a C compiler" in kernel.what


def test_without_a_compiler_it_is_slower():
    (problem,) = problems_of(WELL, Config(), [])
    assert "without a C compiler" in problem.what
    assert not problem.stops


def test_waiting_ranks_that_give_way_need_not_be_told_to():
    full = WELL._replace(loads=[Load("n", 9, 8)])
    for yields in (True, None):
        library = WELL.library._replace(yields=yields)
        (problem,) = problems_of(full._replace(library=library), Config(), DTYPES)
        assert "yield_when_idle" not in problem.remedy


SINGLE = WELL.library._replace(thread_level="SINGLE")
DIFFERENT = [Difference("HPCDIST_KERNEL", {"auto": "0-2", "never": "3"})]


def test_what_stops_the_job_comes_first():
    ill = WELL._replace(library=SINGLE, differs=DIFFERENT)
    assert [problem.stops for problem in problems_of(ill, Config(), [])][:2] == [True, False]


@pytest.mark.parametrize(
    ("text", "what", "remedy"),
    [
        ("HPCDIST_KERNEL='x' is wrong; set one or unset it", "HPCDIST_KERNEL='x' is wrong",
         "set one or unset it"),
        ("MPI sees only one: use `srun --mpi=pmix`.", "MPI sees only one",
         "use `srun --mpi=pmix`."),
    ],
)  # fmt: skip
def test_a_job_that_does_not_start_has_the_errors_own_remedy(text, what, remedy):
    assert refused(UsageError(text)) == (Check.LAUNCH, True, what, remedy)


def test_the_remedy_of_a_wrong_launcher_is_told_whole():
    error = not_together("MPI sees one rank of 4", "srun ran without --mpi; add `--mpi=pmix`")
    problem = refused(error)
    assert problem.what == "MPI sees one rank of 4"
    assert problem.remedy == "srun ran without --mpi; add `--mpi=pmix`"


# ---- problems of the nodes and of what lies between them


def ill(**changes):
    """Return what is the matter with a job all of whose machines are changed in this way."""
    machines = [each._replace(**changes) for each in WELL.machines]
    return problems_of(WELL._replace(machines=machines), Config(), DTYPES)


@pytest.mark.parametrize(
    ("changes", "check", "what", "remedy"),
    [
        ({"cores": (2,)}, Check.BINDING, "on node1 more ranks are bound to core(s) 2",
         "--cpu-bind=cores"),
        ({"cores": (3, 4, 5, 6)}, Check.NUMA, "rank(s) 0-3 belong to several", "numa"),
        ({"shm": (64 * MiB, 64 * MiB)}, Check.SHM, "on node1 has 64 MiB free", "--shm-size"),
        ({"shm": (8 * GiB, MiB)}, Check.SHM, "1 MiB free of 8 GiB", "earlier jobs"),
        ({"shm": None}, Check.SHM, "0 B free", "docker"),
        ({"memlock": 8 * MiB, "rdma": ("mlx5_0",)}, Check.MEMLOCK, "may lock 8 MiB", "LimitMEM"),
        ({"visible": "0,1", "gpus": Gpus((), "no driver")}, Check.GPUS,
         "CUDA_VISIBLE_DEVICES=0,1 on node1, but no GPU can be used: no driver", "centre"),
        ({"gpus": Gpus(FOUR, no_kernel="RuntimeError: Failed to find CUDA headers")}, Check.GPUS,
         "kernel on node1: RuntimeError: Failed to find CUDA headers", "cupy-cuda12x[ctk]"),
        ({"gpus": Gpus((Gpu("GPU-a", "H200"),))}, Check.GPUS,
         "GPU-a those with the local ranks 0-3", "--gpus-per-task=1"),
    ],
)  # fmt: skip
def test_a_problem_of_the_nodes_is_named_with_its_remedy(changes, check, what, remedy):
    (problem,) = ill(**changes)
    assert problem.check is check
    assert what in problem.what
    assert remedy in problem.remedy
    assert not problem.stops


@pytest.mark.parametrize(
    "changes",
    [
        {"memlock": 8 * MiB},  # nothing is registered without RDMA
        {"memlock": None, "rdma": ("mlx5_0",)},
        {"gpus": Gpus(FOUR)},
        {"visible": "", "gpus": Gpus((), "hidden on purpose")},
        {"cores": (0, 1, 2, 3)},  # not bound, and room for all
    ],
)
def test_what_is_no_problem_of_the_nodes(changes):
    assert ill(**changes) == []


def test_cores_are_too_few_for_the_ranks_bound_to_them():
    assert crowded([(0,), (1,), (2, 3), (2, 3)]) == ()
    assert crowded([(0,), (0,), (2, 3)]) == (0,)
    assert crowded([(0, 1), (0,), (1,)]) == (0, 1)
    assert crowded([]) == ()


def test_each_rank_takes_the_gpu_of_its_place():
    a, b = Gpu("GPU-a", "H200"), Gpu("GPU-b", "H200")
    both, only_b = PLACE._replace(gpus=Gpus((a, b))), PLACE._replace(gpus=Gpus((b,)))
    assert doubly_used([both, both]) is None
    assert doubly_used([both, both, both]) == ("GPU-a", [0, 2])
    assert doubly_used([both, only_b]) is None
    assert doubly_used([only_b, both]) == ("GPU-b", [0, 1])
    assert doubly_used([both._replace(wanted=1), both]) == ("GPU-b", [0, 1])


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a1", "GPU-b1"]),
        ("1", ["GPU-b1"]),
        ("1,0", ["GPU-b1", "GPU-a1"]),
        ("0,7,1", ["GPU-a1"]),  # CUDA stops at the first that is not there
        ("GPU-b", ["GPU-b1"]),
        ("GPU-", []),  # which one?
        ("", []),
        ("-1", []),
        ("MIG-c", ["MIG-c"]),
    ],
)
def test_gpus_are_chosen_as_cuda_does(visible, uuids):
    gpus = [Gpu("GPU-a1", "H200"), Gpu("GPU-b1", "H200")]
    assert [gpu.uuid for gpu in chosen(gpus, visible)] == uuids


def test_a_kernel_is_tried_where_cupy_is_installed(tmp_path, monkeypatch):
    cupy = tmp_path / "cupy.py"
    cupy.write_text("raise RuntimeError('Failed to find CUDA headers')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert no_kernel() == "RuntimeError: Failed to find CUDA headers"
    cupy.write_text("zeros = int")
    assert no_kernel() == ""


def between(skews=(0.0, 0.0), links=(), names=("a", "b", "c", "d")):
    job = BETWEEN._replace(network=Network(names[: max(2, len(skews))], skews, links))
    return problems_of(job, Config(), DTYPES)


def test_clocks_that_differ_are_named():
    assert between(skews=(0.0, 0.09)) == []
    (problem,) = between(skews=(0.0, -0.25, 0.1))
    assert problem.what.startswith("the clock of c is 350 ms ahead of that of b")


def links_of(rates):
    return tuple(Link(pair, rate * 1e9) for pair, rate in rates.items())


def test_a_slow_pair_of_nodes_is_named():
    links = links_of({(0, 1): 9, (0, 2): 10, (1, 2): 4})
    assert slow_links(links) == [Link((1, 2), 4e9)]
    assert slow_nodes(links) == []
    (problem,) = between(skews=(0.0,) * 3, links=links)
    assert problem.what == "slow: b-c 4.00 GB/s; the median is 9.00 GB/s"
    assert "--exclude" in problem.remedy


def test_a_node_that_is_slow_to_all_others_is_named():
    links = links_of({(0, 1): 9, (0, 2): 9, (0, 3): 2, (1, 2): 9, (1, 3): 2, (2, 3): 2})
    assert slow_nodes(links) == [3]
    (problem,) = between(skews=(0.0,) * 4, links=links)
    assert problem.what.startswith("node d is slow to all others: a-d 2.00 GB/s")


def test_of_two_nodes_none_is_slow():
    assert slow_links(links_of({(0, 1): 1})) == []
    assert between(links=links_of({(0, 1): 0.001})) == []


@pytest.mark.parametrize("count", range(10))
def test_in_a_tournament_all_meet_once_and_nobody_twice_in_a_round(count):
    rounds = pairings(count)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for pairs in rounds:
        players = [player for pair in pairs for player in pair]
        assert len(players) == len(set(players))
    assert len(rounds) <= count


# ---- what would start ranks


def test_an_mpiexec_of_another_family_is_wrong():
    starter = Starter("/usr/bin/mpiexec", Family.MPICH)
    (problem,) = starter_problems(starter, "Open MPI")
    assert problem.stops
    assert "/usr/bin/mpiexec is of mpich, but the ranks would load Open MPI" in problem.what
    assert list(starter_problems(starter, "MPICH")) == []
    assert list(starter_problems(starter, "somebody's MPI")) == []


def test_a_slurm_without_the_right_pmi_is_named():
    starter = Starter(srun="/bin/srun", family=Family.OPENMPI, kinds=("none", "pmi2"))
    (problem,) = starter_problems(starter, "Open MPI")
    assert "needs `srun --mpi=pmix`, and this Slurm offers none, pmi2" in problem.what
    assert list(starter_problems(starter._replace(kinds=("pmix_v4",)), "Open MPI")) == []
    assert list(starter_problems(starter._replace(kinds=()), "Open MPI")) == []


def test_it_says_what_would_start_ranks():
    assert starting_words(Starter()) == "nothing here starts several ranks"
    both = Starter("/bin/mpiexec", Family.MPICH, "/bin/srun")
    assert starting_words(both) == "srun --mpi=pmi2 or /bin/mpiexec (mpich)"


# ---- facts


def test_cores_of_a_node_are_counted_once():
    machines = [Machine("a", cores) for cores in [(0, 1), (0, 1), (2,)]] + [Machine("b", (0,))]
    assert loads_of(machines) == [Load("a", 3, 3), Load("b", 1, 1)]


def test_all_that_bits_depend_on_has_a_remedy_where_it_differs():
    problems = [*numeric_problems((name, {"": "0", "other": "1"}) for name in numerics({}))]
    assert len(problems) == 4
    assert all(problem.remedy and not problem.stops for problem in problems)


@pytest.mark.parametrize(
    ("blas", "variables", "threads"),
    [
        ("scipy-openblas", {"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}, "3"),
        ("mkl-sdl", {"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}, "2"),
        ("unknown", {}, "8"),
    ],
)
def test_a_blas_has_as_many_threads_as_its_variable_says_or_as_there_are_cores(
    blas, variables, threads
):
    assert threads_of(blas, variables, 8) == threads


def test_what_differs_between_ranks_is_named_with_who_has_what():
    ranks = [
        {"NumPy": "1", "rules": "3"},
        {"NumPy": "2", "rules": "3"},
        {"NumPy": "1", "rules": "3"},
    ]
    assert differing(ranks) == [("NumPy", {"1": "0,2", "2": "1"})]
    assert differing(ranks[:1]) == []


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 8), "0-2,8"), ((1, 3), "1,3")]
)
def test_numbers_are_written_in_short_and_read(numbers, text):
    assert in_short(reversed(numbers)) == text
    assert read_short(text) == numbers


def test_every_setting_has_its_value_and_its_source():
    settings = settings_of(Config(kernel="never"), {"HPCDIST_KERNEL": "never"})
    told = {setting.variable: (setting.value, setting.source) for setting in settings}
    assert told["HPCDIST_KERNEL"] == ("never", "environment")
    assert told["HPCDIST_TUNING"] == ("None", "default")
    assert len(told) == len(Config())
    former = settings_of(Config(device_backend="mpi"), {"HPCDIST_DEVICE_WAY": "mpi"})
    assert ("HPCDIST_DEVICE_WAY", "mpi", "environment") in map(tuple, former)


# ---- ways


def rows_of(job, operation, nbytes, rules=DEFAULT):
    tuning_table = TuningTable(rules, job.ranks, several_nodes=not job.one_node)
    rows = algorithm_rows(job, tuning_table, [operation], [nbytes])
    return {(row.arrays, row.numbers): row.outcome for row in rows}


def test_small_contributions_go_on_the_board():
    assert set(rows_of(WELL, "all_reduce", 8 * KiB).values()) == {EAGER}
    assert rows_of(WELL, "all_reduce", 8 * KiB + 4)["ordinary", "wide"].algorithm == "pipelined"


def test_the_rule_behind_a_way_is_named():
    found = rows_of(WELL, "scan", 64 * KiB)
    assert found["ordinary", "wide"] == (
        "staged",
        EXPLAINED[Algorithm.STAGED],
        "rule: default, up to 1 MiB",
    )
    found = rows_of(WELL, "broadcast", 64 * KiB)
    assert found["shared", "wide"] == ("direct", EXPLAINED[Algorithm.DIRECT], "rule: default")
    assert rows_of(WELL, "scan", 2 * MiB)["ordinary", "wide"].why == "no rule says otherwise"


def test_rules_of_the_tuning_file_are_named_as_such():
    rules = (
        TuningRule("broadcast", "ordinary", Algorithm.MPI),
        TuningRule("broadcast", "shared", Algorithm.MPI),
    )
    job = WELL._replace(tuning=Tuning("site.json", rules, 2))
    found = rows_of(job, "broadcast", 64 * KiB, (*rules, *DEFAULT))
    assert {(each.algorithm, each.why) for each in found.values()} == {("mpi", "rule: tuning file")}


def test_shared_arrays_that_do_not_stay_in_place_go_like_ordinary_ones():
    rules = (TuningRule("broadcast", "shared", Algorithm.MPI), *DEFAULT)
    assert rows_of(WELL, "broadcast", 2 * MiB, rules)["shared", "wide"].algorithm == "attached"


@pytest.mark.parametrize(
    ("job", "operation", "why"),
    [
        (WELL._replace(memory=Memory(False)), "all_reduce", "do not share memory"),
        (WITHOUT_KERNEL, "all_reduce", "pipelined needs the compiled kernel"),
        (BETWEEN._replace(memory=Memory(False)), "all_reduce", "hierarchical needs shared memory"),
    ],
)
def test_it_says_why_mpi_is_left_to_do_it(job, operation, why):
    outcome = rows_of(job, operation, 256 * KiB)["ordinary", "wide"]
    assert outcome.algorithm == "mpi"
    assert why in outcome.why


def test_between_nodes_all_arrays_and_numbers_fare_alike():
    found = rows_of(BETWEEN, "all_reduce", MiB)
    assert {outcome.algorithm for outcome in found.values()} == {"hierarchical"}


def test_rows_that_fare_alike_are_told_once():
    tuning_table = TuningTable(DEFAULT, 64, several_nodes=False)
    rows = algorithm_rows(WELL, tuning_table, ["reduce"], [KiB, 64 * KiB, MiB])
    assert [list(row.values())[1:4] for row in folded(rows)] == [
        ["any", "1 KiB", "eager"],
        ["ordinary", "64 KiB", "pipelined"],
        ["ordinary, 16-bit floats and means", "64 KiB, 1 MiB", "pipelined"],
        ["shared", "64 KiB, 1 MiB", "direct"],
        ["ordinary", "1 MiB", "mpi"],
    ]
    assert [row["algorithm"] for row in meanings(rows)] == ["eager", "pipelined", "mpi", "direct"]


# ---- the report


def report(**changes):
    job = WELL._replace(**changes)
    rows = algorithm_rows(job, TuningTable(DEFAULT, 4, several_nodes=False), ["scan"], [64 * KiB])
    settings = settings_of(Config(), {})
    problems = problems_of(job, Config(), DTYPES)
    return Report({"hpcdist": "1.2.3"}, DTYPES, settings, problems, job, rows)


def test_only_what_is_wrong_makes_the_exit_code_1():
    assert report().code == 0
    assert report(library=SINGLE).code == 0
    assert report(differs=DIFFERENT).code == 1


def test_every_check_has_a_result_and_a_verdict():
    rows = {row.check: row for row in report(cuda=Awareness(False, "asked")).checks}
    assert {row.verdict for row in rows.values()} == {"ok"}
    results = {check: row.result for check, row in rows.items()}
    assert results["launcher and MPI"] == (
        "Open MPI 5.0.11, MPI 3.1; started by slurm, srun --mpi=pmix"
    )
    assert results["ranks"] == "4 on 1 node"
    assert results["transport"] == "shared memory and MPI"
    assert results["cores"] == "8 for the 4 ranks on node1"
    assert results["binding to cores"] == "each rank has cores of its own"
    assert results["NUMA"] == "2 NUMA nodes in a node"
    assert results["/dev/shm"] == "4.0 GiB free of 8.0 GiB"
    assert results["locked memory"] == "no limit; no RDMA devices"
    assert results["CUDA-aware MPI"] == "no (asked)"
    assert results["NCCL"] == "not installed"
    assert results["calls (RPC)"] == "Unix sockets"
    assert "bandwidth between nodes" not in results


def test_a_check_that_finds_something_has_the_problem_and_its_remedy():
    rows = [row for row in report(library=SINGLE).checks if row.check == "MPI threads"]
    assert [row.verdict for row in rows] == ["warning"]
    assert "at level SINGLE" in rows[0].result
    assert "THREAD_MULTIPLE" in rows[0].remedy
    rows = report(differs=[*DIFFERENT, Difference("NumPy", {"1": "0", "2": "1"})]).checks
    alike = [row.verdict for row in rows if row.check == "alike on all ranks"]
    assert alike == ["wrong", "warning"]


def test_between_nodes_clocks_and_links_have_their_lines():
    network = Network(("a", "b"), (0.0, 2e-6), links_of({(0, 1): 1.25}))
    results = {
        row.check: row.result for row in check_rows(BETWEEN._replace(network=network), DTYPES, [])
    }
    assert results["clocks"] == "at most 0.002 ms apart"
    assert results["bandwidth between nodes"] == "1.25 GB/s in 1 pair"
    assert results["transport"] == "MPI between the nodes, shared memory and MPI in each"


FAST = Sockets("a", ("ib0 (10.0.0.1)", "eth0 (192.168.0.1)"))


def test_what_calls_go_by_has_its_line():
    def line(job):
        (found,) = [row for row in report_of(job) if row.check == "calls (RPC)"]
        return found

    def report_of(job):
        return check_rows(job, DTYPES, problems_of(job, Config(), DTYPES))

    two = BETWEEN._replace(sockets=[FAST, Sockets("b", ("ib0 (10.0.0.2)",))])
    assert line(two).result == "Unix sockets in a node, TCP between nodes by ib0"
    mixed = two._replace(sockets=[FAST, Sockets("b", ("eth0 (192.168.0.2)",), by_value=False)])
    assert line(mixed).result == (
        "Unix sockets in a node, TCP between nodes by ib0, eth0; no cloudpickle, so functions "
        "without a name cannot be sent"
    )
    ill = line(two._replace(sockets=[FAST, Sockets("b", why_not="Permission denied")]))
    assert ill.verdict == "warning"
    assert ill.result == "on b ranks cannot listen for calls: Permission denied"
    assert "link='mpi'" in ill.remedy


def test_a_rank_tries_what_it_would_open():
    found = try_sockets("a", None)
    assert found.why_not == ""
    assert found.networks
    missing = try_sockets("a", "no-such-network")
    assert "there is no network 'no-such-network'" in missing.why_not
    (problem,) = socket_problems([missing])
    assert problem.what.endswith("no network 'no-such-network' on this node")
    assert "HPCDIST_RPC_INTERFACE" in problem.remedy


def test_the_report_in_words_has_everything():
    text = describe_report(report(differs=DIFFERENT))
    for part in ("1.2.3", "4 on 1 node", "8 for the 4 ranks on node1", "HPCDIST_TIMEOUT_S",
                 "staged", "wrong", "auto on 0-2", "1 wrong"):  # fmt: skip
        assert part in text
    assert "no problem found" in describe_report(report())


def test_the_last_line_counts():
    problems = problems_of(WELL._replace(library=SINGLE, differs=DIFFERENT), Config(), [])
    assert summary(problems) == "1 wrong, 2 warnings"
    assert summary(problems[1:2]) == "1 warning"


def test_the_report_in_json_has_the_same():
    plain = json.loads(json.dumps(as_plain(report(differs=DIFFERENT))))
    assert plain["versions"] == {"hpcdist": "1.2.3"}
    assert plain["job"]["memory"]["shared"] is True
    assert plain["job"]["loads"] == [{"host": "node1", "ranks": 4, "cores": 8}]
    assert plain["job"]["tuning"] == {"path": None, "rules": 0, "fitting": 0}
    assert {row["outcome"]["algorithm"] for row in plain["algorithms"]} == {"staged"}
    assert [each["check"] for each in plain["problems"]] == ["alike on all ranks"]
    assert {row["check"]: row["verdict"] for row in plain["checks"]}[
        "alike on all ranks"
    ] == "wrong"


def test_a_report_without_a_job_is_a_report():
    problem = refused(UsageError("no MPI; load one"))
    stopped = Report({"hpcdist": "1"}, [], settings_of(Config(), {}), [problem])
    assert "no MPI" in describe_report(stopped)
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


@pytest.mark.parametrize("text", ["", "x", "8,", "8:"])
def test_what_is_no_list_of_sizes_is_refused(text):
    with pytest.raises(UsageError, match="is not a size"):
        read_sizes(text)
