"""What `hpcdist run` would start, how lines are put together, and what a job's end amounts to."""

from __future__ import annotations

import threading

import pytest
from click.testing import CliRunner

import hpcdist
from hpcdist import compiled
from hpcdist.compiled import what_is_missing
from hpcdist.errors import UsageError
from hpcdist.launch import cli
from hpcdist.launch.command import (
    Command,
    Family,
    Launcher,
    Options,
    Site,
    build_command,
    shell_text,
)
from hpcdist.launch.environment import inherited
from hpcdist.launch.job.outcome import conclude, describe_exit, read_failure
from hpcdist.launch.job.output import Lines, in_lines_without_banner, read_label
from hpcdist.launch.launchers import identify, wanted_family
from hpcdist.launch.spawning.pickled_call import pack

PROGRAM = ("python", "x.py")
OPENMPI = Site(cpus=8, cores=4, uid=1000, mpiexec="/o/mpiexec", family=Family.OPENMPI, version=5)
MPICH = Site(cpus=8, cores=4, uid=1000, mpiexec="/m/mpiexec", family=Family.MPICH, version=5)
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}


def build(site=OPENMPI, environ=(), **options):
    return build_command(Options(PROGRAM, **options), site, dict(environ))


def on_slurm(site):
    return Site(**{**vars(site), "srun": "/s/srun"})


def test_open_mpi_that_fits_is_started_plainly():
    command = build(nprocs=4)
    assert command.argv == ("/o/mpiexec", "-n", "4", *PROGRAM)
    assert command.env == {"OMPI_MCA_osc": "^ucx"}
    assert command.local


def test_more_ranks_than_cores_are_not_bound_and_more_than_threads_yield():
    more_than_cores = build(nprocs=8)
    assert more_than_cores.argv[3:-2] == ("--oversubscribe", "--bind-to", "none")
    assert "OMPI_MCA_mpi_yield_when_idle" not in more_than_cores.env
    assert build(nprocs=9).env["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_root_is_let_through_by_open_mpi_and_needs_nothing_with_mpich():
    as_root = Site(**{**vars(OPENMPI), "uid": 0})
    assert build(as_root, nprocs=2).env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert build(Site(**{**vars(MPICH), "uid": 0}), nprocs=2).env == {}


def test_what_the_user_has_set_stays():
    environ = {"OMPI_MCA_osc": "rdma"}
    assert build(environ=environ, nprocs=2).env == {}


def test_mpich_is_started_plainly_however_many_ranks():
    assert build(MPICH, nprocs=64).argv == ("/m/mpiexec", "-n", "64", *PROGRAM)


def test_without_a_number_there_is_one_rank_per_cpu():
    assert build(MPICH).size == 8


def test_hosts_are_named_as_each_family_wants():
    openmpi = build(nprocs=4, hosts=("a", "b"))
    assert "--host a:2,b:2" in " ".join(openmpi.argv)
    mpich = build(MPICH, nprocs_per_node=2, hosts=("a", "b"))
    assert "-n 4 -ppn 2 -hosts a,b -prepend-rank" in " ".join(mpich.argv)
    assert (openmpi.local, openmpi.labels) == (False, "openmpi")
    assert (mpich.local, mpich.labels) == (False, "hydra")


def test_several_nodes_without_knowing_which_are_refused():
    with pytest.raises(UsageError, match="--hosts"):
        build(nprocs=4, nnodes=2)


def test_an_mpiexec_of_another_mpi_than_the_user_asks_for_is_named():
    other = Site(8, 4, 1000, family=Family.MPICH, passed_over="/o/mpiexec is of openmpi")
    with pytest.raises(UsageError, match="MPI4PY_MPIABI=mpich asks for mpich, but /o/mpiexec"):
        build(other, {"MPI4PY_MPIABI": "mpich"}, nprocs=2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bnch"], "no such command 'bnch'; did you mean 'bench'?"),
        (["qqq"], "No such command 'qqq'"),
        (["run", "-np", "2", "missing.py"], "there is no file missing.py in "),
        (["run", "-np", "2", "missing"], "there is no file missing in "),
        (["-np", "2", "train.py"], "hpcdist run -n 4 train.py"),
    ],
)
def test_what_is_misspelt_is_said(words, said):
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(("site", "kind"), [(OPENMPI, "pmix"), (MPICH, "pmi2")])
def test_inside_an_allocation_srun_starts_with_the_pmi_of_the_library(site, kind):
    command = build(on_slurm(site), SLURM)
    assert command.argv[:3] == ("/s/srun", "-n", "4")
    assert f"--mpi={kind}" in command.argv
    assert {"--kill-on-bad-exit=1", "--overlap", "--label"} <= set(command.argv)
    assert (command.size, command.local, command.labels) == (4, False, "srun")


def test_the_site_and_the_user_choose_the_pmi_first():
    by_site = build(on_slurm(MPICH), {**SLURM, "SLURM_MPI_TYPE": "cray_shasta"})
    assert not any(word.startswith("--mpi") for word in by_site.argv)
    by_user = build(on_slurm(MPICH), {**SLURM, "SLURM_MPI_TYPE": "pmix"}, mpi="pmi2")
    assert "--mpi=pmi2" in by_user.argv
    surrounding_step = build(on_slurm(MPICH), {**SLURM, "SLURM_MPI_TYPE": "none"})
    assert "--mpi=pmi2" in surrounding_step.argv


def test_ranks_per_node_and_nodes_reach_srun():
    command = build(on_slurm(OPENMPI), SLURM, nprocs_per_node=3)
    assert command.size == 6
    assert "--ntasks-per-node=3" in command.argv
    assert "-n 2 -N 1" in " ".join(build(on_slurm(OPENMPI), SLURM, nprocs=2, nnodes=1).argv)


def test_more_ranks_than_the_allocation_has_cpus_are_overcommitted():
    assert "--overcommit" in build(on_slurm(OPENMPI), SLURM, nprocs=17).argv
    assert "--overcommit" not in build(on_slurm(OPENMPI), SLURM, nprocs=16).argv


def test_more_ranks_than_open_mpi_has_slots_are_refused_unless_it_may_share_them():
    environ = {**SLURM, "SLURM_TASKS_PER_NODE": "2(x2)"}
    options = {"launcher": Launcher.MPIEXEC}
    assert build(OPENMPI, environ, nprocs=4, **options).size == 4
    assert build(MPICH, environ, nprocs=5, **options).size == 5
    with pytest.raises(UsageError, match=r"this allocation has 4 slots .* by `salloc -n 5`"):
        build(OPENMPI, environ, nprocs=5, **options)
    shared = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    assert build(OPENMPI, environ | shared, nprocs=5, **options).size == 5


def test_more_nodes_than_the_allocation_has_are_refused():
    with pytest.raises(UsageError, match="this allocation has 2: get them by `salloc -N 3`"):
        build(on_slurm(OPENMPI), SLURM, nnodes=3)


def test_one_rank_of_srun_is_not_labelled():
    assert build(on_slurm(OPENMPI), SLURM, nprocs=1).labels == ""


def test_cpus_per_task_of_the_batch_job_hold_for_srun():
    environ = {**SLURM, "SLURM_CPUS_PER_TASK": "4"}
    assert build(on_slurm(MPICH), environ).env == {"SRUN_CPUS_PER_TASK": "4"}


def test_mpiexec_can_be_chosen_inside_an_allocation():
    command = build(on_slurm(OPENMPI), SLURM, launcher=Launcher.MPIEXEC)
    assert command.argv[0] == "/o/mpiexec"
    assert (command.size, command.local) == (4, False)


def test_a_job_that_stays_here_forgets_the_allocation_and_the_job_around_it():
    around = {**SLURM, "OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1", "OMPI_MCA_btl": "tcp"}
    command = build(on_slurm(OPENMPI), around, nprocs=2, here=True)
    assert command.argv[0] == "/o/mpiexec"
    assert command.local
    assert set(command.unset) == set(around) - {"OMPI_MCA_btl"}


def test_a_job_inside_a_job_does_not_inherit_its_ranks():
    environ = {
        "PATH": "/bin",
        "PMIX_MCA_gds": "hash",
        "PMIX_NAMESPACE": "prterun-1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_MCA_pml": "ob1",
        "MPI_LOCALRANKID": "0",
        "SLURM_NTASKS": "2",
    }
    assert inherited(environ, False) == (
        "MPI_LOCALRANKID",
        "OMPI_COMM_WORLD_SIZE",
        "PMIX_NAMESPACE",
    )
    assert "SLURM_NTASKS" in inherited(environ, True)


def test_devices_are_what_the_ranks_may_see():
    assert build(MPICH, nprocs=2, devices="2,3").env == {"CUDA_VISIBLE_DEVICES": "2,3"}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"nprocs": 0}, "1 or more"),
        ({"nprocs": 3, "nprocs_per_node": 2}, "leave one"),
        ({"nnodes": 3, "hosts": ("a", "b")}, "leave the number out"),
        ({"launcher": Launcher.SRUN}, "no srun"),
        ({"launcher": Launcher.SRUN, "here": True}, "use mpiexec"),
    ],
)
def test_wishes_that_cannot_be_fulfilled_are_refused(options, remedy):
    with pytest.raises(UsageError, match=remedy):
        build(**options)


def test_without_any_mpi_the_message_says_how_to_get_one():
    with pytest.raises(UsageError, match="pip install"):
        build(Site(cpus=1, cores=1, uid=1), nprocs=1)


def test_the_command_is_text_for_a_shell():
    command = Command(("srun", "a b"), {"X": "^u"}, ("Y",), 1, False, "")
    assert shell_text(command) == "env -u Y X='^u' srun 'a b'"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs", (Family.OPENMPI, 5)),
        ("mpirun (Open MPI) 4.1.4", (Family.OPENMPI, 4)),
        ("HYDRA build details:\n    Version:      5.0.2\n", (Family.MPICH, 5)),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 2026 (id: x)",
            (Family.IMPI, 2021),
        ),
        ("something else", None),
    ],
)
def test_mpiexec_says_whose_it_is(text, family):
    assert identify(text) == family


def test_mpi4pys_own_variable_tells_the_family():
    assert wanted_family({"MPI4PY_MPIABI": "openmpi"}) is Family.OPENMPI
    assert wanted_family({}) is None


def test_pieces_become_whole_lines():
    lines = Lines()
    assert lines.feed(b"a") == []
    assert lines.feed(b"b\nc\nd") == [b"ab\n", b"c\n"]
    assert lines.feed(b" 1%\r 2%\r") == [b"d 1%\r"]
    assert lines.feed(b"\n") == [b" 2%\r\n"]
    assert lines.feed(b"rest") == []
    assert lines.end() == [b"rest\n"]
    assert lines.end() == []


@pytest.mark.parametrize(
    ("launcher", "line", "labelled"),
    [
        ("srun", b" 3: hi\n", (3, 1, b"hi\n")),
        ("hydra", b"[12] hi\n", (12, 1, b"hi\n")),
        ("openmpi", b"[1,2]<stderr>: hi\n", (2, 2, b"hi\n")),
        ("openmpi", b"[1,2]<stdout>:hi\n", (2, 1, b"hi\n")),
        ("srun", b"srun: error: n1\n", (-1, 1, b"srun: error: n1\n")),
    ],
)
def test_the_launchers_labels_are_taken_off(launcher, line, labelled):
    assert read_label(launcher, 1, line) == labelled


@pytest.mark.parametrize(
    ("first", "launcher", "interrupted", "code"),
    [
        (None, 0, 0, 0),
        ((1, 7), 7, 0, 7),
        ((1, 7), 0, 0, 7),
        ((1, -9), 137, 0, 137),
        ((1, -9), 9, 0, 137),
        ((1, -15), 7, 0, 7),
        ((1, -15), 143, 15, 143),
        (None, -15, 0, 143),
        ((0, -15), 1, 2, 130),
    ],
    ids=[
        "well",
        "exit code",
        "exit code that the launcher loses",
        "SIGKILL under Open MPI",
        "SIGKILL under MPICH",
        "MPI.Abort(7)",
        "SIGTERM to the job",
        "launcher killed",
        "Ctrl-C",
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(first, launcher, interrupted, code):
    assert conclude(first, {}, launcher, interrupted).code == code


@pytest.mark.parametrize(
    ("exits", "lost"),
    [({0: 0, 1: 0, 2: 0}, ()), ({0: 0, 2: 0}, (1,)), ({}, (0, 1, 2)), ({0: 0, 1: 0, 2: 3}, (2,))],
)
def test_a_job_has_ended_well_where_all_its_ranks_have(exits, lost):
    outcome = conclude(None, exits, 0, 0, told_of=3)
    assert (outcome.code, outcome.lost) == (int(bool(lost)), lost)
    assert conclude(None, exits, 4, 0, told_of=3).code == 4
    assert conclude(None, exits, 0, 0).code == 0  # nobody tells: the launcher is believed


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        ("srun: error: n1: task 1: Exited with exit code 7", (1, 7)),
        ("srun: error: n1: tasks 2-3: Exited with exit code 1", (2, 1)),
        ("srun: error: n1: task 0: Killed", (0, -9)),
        ("srun: error: n1: task 0: Segmentation fault (core dumped)", (0, -11)),
        ("srun: Force Terminated StepId=1.2", None),
    ],
)
def test_srun_says_which_rank_failed(said, failure):
    assert read_failure(said) == failure


def test_exits_are_described_in_words():
    assert describe_exit(7) == "exit code 7"
    assert describe_exit(-9) == "signal SIGKILL"


def test_calls_travel_by_name_and_bring_their_interpreters_path():
    function, arguments = pack(divmod, (7, 2)).unpack()
    assert function(*arguments) == (3, 1)


def test_what_no_pickle_can_carry_is_a_usage_error():
    with pytest.raises(UsageError, match="cannot be sent"):
        pack(print, (threading.Lock(),))


@pytest.fixture
def invoke(monkeypatch):
    def invoke(*words, site=MPICH, environ=()):
        monkeypatch.setattr("hpcdist.launch.launchers.find_site", lambda _: site)
        monkeypatch.setattr("hpcdist.runtime.process.snapshot", lambda: dict(environ))
        monkeypatch.setattr("sys.executable", "/bin/python")
        return CliRunner().invoke(cli.main, ["run", *words])

    return invoke


def test_dry_run_prints_the_command_and_runs_nothing(invoke):
    result = invoke("-n", "4", "--dry-run", "train.py", "--epochs", "2", "-n", "9")
    assert result.output == "/m/mpiexec -n 4 /bin/python train.py --epochs 2 -n 9\n"
    assert result.exit_code == 0


def test_modules_and_other_programs_are_run_too(invoke):
    assert invoke("-n", "1", "-m", "--dry-run", "a.b", "c").output.endswith("python -m a.b c\n")
    assert invoke("-n", "1", "--dry-run", "true", "c").output == "/m/mpiexec -n 1 true c\n"


def test_paddles_options_mean_what_they_meant(invoke):
    result = invoke("--nproc_per_node=2", "--backend", "mpi", "--dry-run", "x.py")
    assert result.output == "PADDLE_DISTRI_BACKEND=mpi /m/mpiexec -n 2 /bin/python x.py\n"
    devices = invoke("--devices", "0,1,2", "--dry-run", "x.py")
    assert devices.output == "CUDA_VISIBLE_DEVICES=0,1,2 /m/mpiexec -n 3 /bin/python x.py\n"


def test_paddles_options_that_mpi_does_not_need_are_accepted_with_a_note(invoke):
    result = invoke("--master", "a:1", "--nproc_per_node", "2", "--dry-run", "x.py")
    assert result.exit_code == 0
    assert "--master is not needed: MPI's launcher connects the ranks" in result.output


def test_the_launchers_of_the_other_nodes_have_nothing_to_do(invoke):
    result = invoke("--nnodes", "2", "--rank", "1", "--master", "a:1", "x.py")
    assert result.exit_code == 0
    assert "nothing to do here" in result.output


@pytest.mark.parametrize("words", [("--nnodes", "2:4"), ("--run_mode", "ps"), ("--bogus",)])
def test_what_is_not_there_is_refused_with_exit_code_2(invoke, words):
    assert invoke(*words, "x.py").exit_code == 2


def test_the_help_lists_the_commands():
    result = CliRunner().invoke(cli.main, ["--help"])
    shown = " ".join(result.output.split())
    assert all(f"{name} {text}" in shown for name, (_, text) in cli.COMMANDS.items())


def test_the_command_says_its_version():
    done = CliRunner().invoke(cli.main, ["--version"])
    first, *more = done.output.splitlines()
    assert (done.exit_code, first) == (0, f"hpcdist {hpcdist.__version__}")
    assert more == what_is_missing()


def test_the_command_names_the_compiled_parts_that_are_missing(monkeypatch):
    found = dict.fromkeys(compiled.PARTS, "not compiled")
    monkeypatch.setattr(compiled, "missing", lambda: found)
    assert CliRunner().invoke(cli.main, ["--version"]).output.splitlines()[1:] == [
        "without any compiled part: not compiled"
    ]
    monkeypatch.setattr(compiled, "missing", lambda: {"hpcdist.ps._native": "does not load: x"})
    assert CliRunner().invoke(cli.main, ["--version"]).output.splitlines()[1:] == [
        "without hpcdist.ps._native (rows of the parameter server): does not load: x"
    ]


RULE = b"-" * 74 + b"\n"


def test_what_open_mpi_says_of_an_abort_is_left_out_and_all_else_is_not():
    said = [
        [b"first\n"],
        [RULE, b"MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD\n", RULE],
        [RULE, b"Sorry!  You were supposed to get help about:\n", b"    mpi-abort\n", RULE],
        [RULE, b"prterun detected that one or more processes exited\n", RULE],
        [RULE, b"no end"],
    ]
    found = []
    take = in_lines_without_banner(found.append)
    for line in [line for block in said for line in block]:
        take(line)
    take(b"")
    assert found == [*said[0], *said[3], RULE, b"no end\n"]
