"""`hpcdist submit`: what belongs to whom on its command line, the script, the log."""

import os
import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hpcdist.errors import UsageError
from hpcdist.launch.cli import main
from hpcdist.launch.command import Family, Site
from hpcdist.launch.submit import job
from hpcdist.launch.submit.arguments import split_arguments
from hpcdist.launch.submit.job import (
    Follower,
    Log,
    Task,
    exit_code,
    kept_script,
    read_tasks,
    submit,
)
from hpcdist.launch.submit.script import Batch, build_script, full_options, log_folder
from hpcdist.launch.survival import Survive

# ---- the command line


def test_options_of_sbatch_go_to_sbatch_by_their_long_names():
    text = "train.py -N 2 -n8 --gpus-per-node 4 --time=2:00:00 -p gpu -J=x --new-option 3"
    words = split_arguments(text.split())
    assert words.slurm == (
        ("nodes", "2"),
        ("ntasks", "8"),
        ("gpus-per-node", "4"),
        ("time", "2:00:00"),
        ("partition", "gpu"),
        ("job-name", "x"),
        ("new-option", "3"),
    )
    assert words.program == ("train.py",)
    assert words.own == ()


@pytest.mark.parametrize("flag", ["--exclusive", "--requeue", "--contiguous", "-O", "-H"])
def test_an_option_without_a_value_takes_none(flag):
    words = split_arguments([flag, "train.py"])
    assert words.program == ("train.py",)
    assert words.slurm[0][1] is None


def test_a_value_may_stand_behind_an_equals_sign_of_an_option_that_needs_none():
    assert split_arguments(["--exclusive=user", "train.py"]).slurm == (("exclusive", "user"),)


def test_our_own_options_are_found_anywhere():
    words = split_arguments(["--dry-run", "-N2", "train.py", "--mpi", "pmi2", "-m", "--mpi=pmix"])
    assert words.own == ("--dry-run", "--mpi", "pmi2", "-m", "--mpi", "pmix")
    assert words.slurm == (("nodes", "2"),)


def test_behind_two_dashes_all_is_the_programs():
    words = split_arguments(["train.py", "--", "--dry-run", "-N", "2", "--", "x"])
    assert words.program == ("train.py", "--dry-run", "-N", "2", "--", "x")
    assert (words.own, words.slurm) == ((), ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.py data.csv", "'data.csv' stands before --"),
        ("train.py --time", "--time needs a value"),
        ("train.py --time -- 3", "--time needs a value"),
        ("train.py --mpi", "--mpi needs a value"),
        ("train.py -y", "the option -y is not known here: write the long name"),
        ("train.py --wrap ls", "--wrap cannot be handed on to sbatch: the script is written here"),
        ("train.py --wait", "the job is followed unless --no-follow"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(text, said):
    with pytest.raises(UsageError) as refused:
        split_arguments(text.split())
    assert said in str(refused.value)


# ---- the script


def options(*given):
    return dict(full_options(Batch(given, ("python", "x.py"), "x", "/home/me")))


def test_the_script_has_all_that_was_asked_for():
    batch = Batch(
        (("nodes", "2"), ("comment", "it's mine"), ("exclusive", None)),
        ("python", "x.py", "a b"),
        "x",
        "/home/me",
        "pmix",
        ("hpcdist", "submit", "x.py", "-N", "2"),
        "openmpi/5.0",
    )
    assert (
        build_script(batch)
        == """#!/bin/bash
#SBATCH --job-name=x
#SBATCH --chdir=/home/me
#SBATCH --output=x-%j.out
#SBATCH --nodes=2
#SBATCH --comment='it'"'"'s mine'
#SBATCH --exclusive

# Written by: hpcdist submit x.py -N 2
# Modules then: openmpi/5.0
export PYTHONUNBUFFERED=1  # lines come when they are written

exec srun --mpi=pmix --kill-on-bad-exit=1 python x.py 'a b'
"""
    )


def test_the_script_is_one_that_bash_understands():
    batch = Batch((("comment", "a 'b\" $c"),), ("python", "x 'y\" $z.py"), "x", "/", said=("a\nb",))
    text = build_script(batch)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    told = text.replace("exec srun", "printf '%s|'")
    done = subprocess.run(["bash"], input=told, text=True, capture_output=True)
    assert done.stdout == "--kill-on-bad-exit=1|python|x 'y\" $z.py|"


UNSEEN = ["\n", "\r", "\0", "\x1b[2J", "\t", "\x7f", "\x85", "\u2028", "\u2029", "\u202e", "\udcff"]


@pytest.mark.parametrize("unseen", UNSEEN)
@pytest.mark.parametrize(
    "field", ["name", "folder", "mpi", "modules", "job-name", "chdir", "export"]
)
def test_what_cannot_be_seen_is_refused_wherever_it_would_be_in_the_script(field, unseen):
    text = f"x{unseen}touch /tmp/evil"
    fields = {"name": "x", "folder": "/home/me"}
    options = ()
    if field in ("job-name", "chdir", "export"):
        options = ((field, text),)
    else:
        fields[field] = text
    with pytest.raises(UsageError) as refused:
        build_script(Batch(options, ("python", "x.py"), **fields))
    assert "cannot be seen" in str(refused.value)
    assert repr(text) in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["a\nb", "time 1", "", "-x", "a#", "a\u2028b"])
def test_only_a_name_is_the_name_of_an_option(name):
    with pytest.raises(UsageError, match="not the name of an option of sbatch"):
        build_script(Batch(((name, "1"),), ("python", "x.py"), "x", "/home/me"))


ODD = [
    *(f"a{unseen}b" for unseen in UNSEEN if unseen != "\0"),
    "\nmore",
    "it's",
    '"$HOME" `id` $(id) \\n \\',
    "-N",
    "--",
    ":",
    "",
    "\n'\\\"\x1b é \udcff\udc80",
    "#SBATCH --time=1",
    "a\n#SBATCH --time=1",
]


def test_arguments_of_the_program_arrive_unchanged_whatever_they_hold():
    tell = "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])"
    program = (sys.executable, "-c", tell, *ODD)
    said = ("hpcdist", "submit", "x.py", "--", *ODD)
    text = build_script(Batch((), program, "x", "/home/me", said=said))
    assert all(line.isprintable() for line in text.split("\n"))
    assert [line for line in text.split("\n") if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=x",
        "#SBATCH --chdir=/home/me",
        "#SBATCH --output=x-%j.out",
    ]
    for locale in ("C", "C.UTF-8"):  # a batch script runs in the locale of the job
        done = subprocess.run(
            ["bash", "-c", text.replace("exec srun --kill-on-bad-exit=1", "exec")],
            capture_output=True,
            text=True,
            env={"LC_ALL": locale, "PATH": os.environ["PATH"]},
        )
        assert done.stdout.strip() == str([os.fsencode(word) for word in ODD]), done.stderr


@pytest.mark.parametrize(
    ("given", "tasks"),
    [
        ((("gpus-per-node", "4"),), ("ntasks-per-node", "4")),
        ((("gpus-per-node", "a100:2"),), ("ntasks-per-node", "2")),
        ((("gres", "gpu:h200:8"),), ("ntasks-per-node", "8")),
        ((("gpus", "16"),), ("ntasks", "16")),
    ],
)
def test_there_is_one_rank_for_each_gpu(given, tasks):
    assert tasks in options(*given).items()


@pytest.mark.parametrize(
    "given",
    [
        (("gpus-per-node", "4"), ("ntasks", "2")),
        (("gpus-per-node", "4"), ("ntasks-per-node", "2")),
        (("gres", "lustre:1"),),
        (("nodes", "2"),),
    ],
)
def test_tasks_are_as_they_were_given_or_as_sbatch_has_them(given):
    told = options(*given)
    asked = dict(given)
    for name in ("ntasks", "ntasks-per-node"):
        assert told.get(name) == asked.get(name)


def test_what_is_given_is_not_said_twice():
    told = full_options(Batch((("job-name", "y"), ("output", "z")), ("x",), "x", "/"))
    names = [name for name, _ in told]
    assert sorted(names) == sorted(set(names))
    assert dict(told)["job-name"] == "y"


def test_an_array_has_a_log_for_each_task_and_a_requeued_job_one_for_all_runs():
    assert options(("array", "0-3"))["output"] == "x-%A_%a.out"
    assert options(("requeue", None))["open-mode"] == "append"
    assert "open-mode" not in options()


def test_srun_is_told_the_cores_of_a_task():
    batch = Batch((("cpus-per-task", "4"),), ("x",), "x", "/")
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in build_script(batch)


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ((), "/home/me"),
        ((("output", "logs/%j.out"),), "/home/me/logs"),
        ((("output", "/scratch/%x.out"),), "/scratch"),
        ((("output", "%u/%j.out"),), "None"),
    ],
)
def test_the_folder_of_the_log_is_known(given, folder):
    assert str(log_folder(Batch(given, ("x",), "x", "/home/me"))) == folder


# ---- what Slurm tells


ONE = (
    "JobId=7 JobName=a b UserId=me(1) JobState={state} Reason=None ExitCode={code} "
    "WorkDir=/a b StdErr=/a b/x=7.out StdIn=/dev/null StdOut=/a b/x=7.out Power= \n"
)


def test_a_job_is_read_from_what_slurm_tells():
    (task,) = read_tasks(ONE.format(state="RUNNING", code="0:0"))
    assert task == Task("7", "RUNNING", 0, "/a b/x=7.out", "", "None")
    assert not task.ended
    assert read_tasks("slurm_load_jobs error: Invalid job id specified\n") == []


@pytest.mark.parametrize(
    ("state", "told", "code"),
    [
        ("COMPLETED", "0:0", 0),
        ("FAILED", "3:0", 3),
        ("FAILED", "0:11", 139),
        ("CANCELLED", "0:15", 143),
        ("TIMEOUT", "0:0", 1),
        ("NODE_FAIL", "0:0", 1),
    ],
)
def test_an_exit_code_is_that_of_a_shell(state, told, code):
    assert exit_code(told, state) == code
    (task,) = read_tasks(ONE.format(state=state, code=told))
    assert (task.ended, task.code) == (True, code)


# ---- the log


def test_a_log_is_read_as_it_grows(tmp_path):
    path = tmp_path / "log"
    log = Log(str(path))
    assert log.news() == ""
    path.write_text("one\ntw")
    assert log.news() == "one\n"
    with path.open("a") as file:
        file.write("o\n\nthree")
    assert log.news() == "two\n\n"
    assert log.news(last=True) == "three"
    assert log.news(last=True) == ""


def test_a_log_that_begins_anew_is_read_anew(tmp_path):
    path = tmp_path / "log"
    path.write_text("first run\n")
    log = Log(str(path))
    assert log.news() == "first run\n"
    path.write_text("second\n")
    assert log.news() == "second\n"


def test_the_lines_of_an_array_have_their_numbers(tmp_path):
    (tmp_path / "log").write_text("a\nb")
    log = Log(str(tmp_path / "log"), "[3] ")
    assert (log.news(), log.news(last=True)) == ("[3] a\n", "[3] b")


# ---- following


@pytest.fixture
def following(tmp_path, monkeypatch):
    """Follow a job that goes through these states, and write a line of its log in each."""
    monkeypatch.setattr(job, "_LOOK_S", 0.0)
    monkeypatch.setattr(job, "_ASK_S", 0.0)

    def follow(*steps):
        left, shown, told = list(steps), [], []

        def ask():
            tasks = left.pop(0) if left else []
            for task in tasks:
                if task.state != "PENDING":
                    with open(task.log, "a") as file:
                        file.write(f"{task.state.lower()}\n")
            return tasks

        return Follower(ask, shown.append, told.append).follow(), "".join(shown), told

    def task(state, code=0, array=""):
        log = str(tmp_path / f"log{array}")
        return Task("7", state, code, log, array, "Priority")

    return follow, task


def test_a_job_is_followed_to_its_end(following):
    follow, task = following
    states = [[task("PENDING")], [task("RUNNING")], [task("COMPLETING")], [task("FAILED", 3)]]
    code, shown, told = follow(*states)
    assert code == 3
    assert shown == "running\ncompleting\nfailed\n"
    assert told == ["waits (Priority)", "runs"]


def test_a_requeued_job_is_followed_on(following):
    follow, task = following
    code, _, told = follow([task("RUNNING")], [task("PENDING")], [task("RUNNING")],
                           [task("COMPLETED")])  # fmt: skip
    assert (code, told) == (0, ["runs", "waits (Priority)", "runs"])


def test_of_an_array_the_worst_exit_code_counts(following):
    follow, task = following
    running, ended = task("RUNNING", 0, "1"), task("COMPLETED", 0, "1")
    waiting = task("PENDING", 0, "2")
    code, shown, _ = follow([running, waiting], [ended, task("FAILED", 4, "2")])
    assert code == 4
    assert sorted(shown.splitlines()) == ["[1] completed", "[1] running", "[2] failed"]


def test_a_job_that_slurm_has_forgotten_did_not_succeed(following):
    follow, task = following
    assert follow([task("RUNNING")], [])[0] == 1


# ---- the command


def invoke(*words, path="/nowhere"):
    return CliRunner(env={"PATH": path, "SLURM_MPI_TYPE": ""}).invoke(main, ["submit", *words])


def test_a_dry_run_prints_the_script_and_does_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("--dry-run", "my train.py", "-N", "2", "--mpi", "pmi2", "--", "--epochs", "3")
    assert done.exit_code == 0, done.output
    last = done.output.splitlines()[-1]
    assert last == (
        "exec srun --mpi=pmi2 --kill-on-bad-exit=1 "
        f"{shlex.quote(sys.executable)} 'my train.py' --epochs 3"
    )
    assert f"#SBATCH --chdir={tmp_path}\n" in done.output
    assert "#SBATCH --job-name='my train'\n" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("chosen", "kind"), [("pmix_v4", "pmix_v4"), ("none", None)])
def test_the_choice_of_the_environment_is_kept(monkeypatch, chosen, kind):
    site = Site(1, 1, 0, family=Family.MPICH)
    monkeypatch.setattr("hpcdist.launch.submit.command.find_site", lambda environ: site)
    environ = {"SLURM_MPI_TYPE": chosen}
    done = CliRunner(env=environ).invoke(main, ["submit", "--dry-run", "x.py"])
    assert f"srun --mpi={kind or 'pmi2'} " in done.output


def test_a_module_is_run_as_one():
    done = invoke("--dry-run", "-m", "package.train", "--mpi=pmix")
    assert done.output.endswith(f"{shlex.quote(sys.executable)} -m package.train\n")
    assert "#SBATCH --job-name=train\n" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-N", "2"], "name the program"),
        (["train.py", "-N"], "--nodes needs a value"),
        (["train.py", "--mpi", "pmix", "-J", "a\nrm -rf ~"], "--job-name is 'a\\nrm -rf ~', which"),
        (["a\nb.py", "--mpi", "pmix"], "the name of the program is 'a\\nb'"),
        (["train.py", "--mpi", "pmix"], "sbatch was not found on PATH: log in to a node"),
    ],
)
def test_what_cannot_be_submitted_is_said(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = invoke(*words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_not_here_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"there is no file x.py in {tmp_path}; the job needs it" in invoke("x.py").output
    (tmp_path / "x.py").touch()
    assert "there is no file" not in invoke("x.py").output


def test_a_script_that_sbatch_refuses_is_not_left_behind(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    (tools / "sbatch").chmod(0o755)
    with pytest.raises(UsageError, match="sbatch says: invalid partition"):
        submit("#!/bin/sh\n", "x", tmp_path / "logs", {"PATH": f"{tools}:{os.environ['PATH']}"})
    assert list((tmp_path / "logs").iterdir()) == []


def test_a_script_is_kept_under_a_name_that_is_a_file(tmp_path):
    assert kept_script(tmp_path, "a/b c", "7") == tmp_path / "a_b_c-7.sbatch"


# ---- jobs that survive


def test_a_job_that_survives_is_started_by_run_which_outlives_its_ranks():
    batch = Batch((("ntasks", "5"),), ("python", "x y.py"), "x", "/home/me", "pmix",
                  survive=Survive(1, 3), python="/v/python")  # fmt: skip
    assert build_script(batch).splitlines()[-1] == (
        "exec /v/python -m hpcdist run --no-label --survive --spares 1 --min-ranks 3 -- "
        "python 'x y.py'"
    )


def test_a_job_that_may_be_started_again_is_queued_again_by_slurm_and_counts_both():
    batch = Batch((), ("python", "x.py"), "x", "/home/me", "pmi2", restarts=3)
    lines = build_script(batch).splitlines()
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)
    ran = [run_script(lines, str(again)) for again in (0, 2, 4)]
    assert ran == [
        (0, "-m hpcdist run --no-label --mpi pmi2 --restarts 3 -- python x.py\n"),
        (0, "-m hpcdist run --no-label --mpi pmi2 --restarts 1 -- python x.py\n"),
        (1, ""),
    ]
    again = build_script(Batch((("no-requeue", None),), ("x",), "x", "/", restarts=3))
    assert "--requeue" not in again


def run_script(lines, again):
    """Run a script of which `python` only prints its arguments."""
    text = "\n".join(lines).replace("exec python", "exec echo")
    environ = {"PATH": os.environ["PATH"], "SLURM_RESTART_COUNT": again}
    done = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_options_of_a_job_that_survives_are_not_sbatchs():
    text = "x.py --survive --spares 1 --min-ranks=2 --restarts 3 -n 5"
    words = split_arguments(text.split())
    assert words.own == ("--survive", "--spares", "1", "--min-ranks", "2", "--restarts", "3")
    assert words.slurm == (("ntasks", "5"),)


def test_a_job_that_could_not_survive_is_refused_before_it_is_submitted(monkeypatch):
    site = Site(cpus=1, cores=1, uid=1, mpiexec="/m/mpiexec", family=Family.MPICH, version=5)
    monkeypatch.setattr("hpcdist.launch.submit.command.find_site", lambda _: site)
    done = CliRunner().invoke(main, ["submit", "x.py", "--survive", "--dry-run"])
    assert done.exit_code == 2
    assert "--survive needs Open MPI 5" in " ".join(done.output.split())
