"""Functions on several ranks: what `spawn` hands over, gives back, raises and leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from hpcdist.errors import RemoteError, UsageError
from hpcdist.launch import spawn
from hpcdist.launch.launchers import find_site
from hpcdist.runtime.place import read_place
from hpcdist.runtime.process import snapshot

pytestmark = pytest.mark.skipif(find_site(snapshot()).mpiexec is None, reason="no mpiexec")

ROOT = Path(__file__).parents[2]
SOON_S = 40.0  # the functions sleep for longer


def rank_of_me():
    return read_place(snapshot()).rank


def tell_place(*arguments):
    place = read_place(snapshot())
    return place.rank, place.size, *arguments


def sum_over_mpi(value):
    from mpi4py import MPI

    return MPI.COMM_WORLD.allreduce(value + MPI.COMM_WORLD.rank)


def sum_over_hpcdist():
    import numpy as np

    import hpcdist as dist

    dist.init_parallel_env()
    values = np.full(3, dist.get_rank() + 1.0)
    dist.all_reduce(values)
    return values.tolist(), dist.get_world_size()


def fail_after_a_collective_of_hpcdist():
    import hpcdist as dist

    dist.init_parallel_env()
    if dist.get_rank() == 1:
        raise ValueError("boom")
    dist.barrier()


def raise_on_rank(rank):
    if rank_of_me() == rank:
        raise ValueError("boom")
    time.sleep(60)


def raise_on_rank_inside_mpi(rank):
    from mpi4py import MPI

    if rank == MPI.COMM_WORLD.rank:
        raise ValueError("boom")
    MPI.COMM_WORLD.Barrier()


def exit_on_rank(rank, code):
    if rank_of_me() == rank:
        sys.exit(code)
    time.sleep(60)


def kill_on_rank(rank):
    if rank_of_me() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleep(seconds):
    time.sleep(seconds)
    return "slept"


def visible_devices():
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["PADDLE_DISTRI_BACKEND"]


@pytest.fixture(autouse=True)
def leaves_nothing(monkeypatch, tmp_path_factory):
    """Fail where a process or the folder of a job is left; its name is in every command line."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is
    folders = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", folders)
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    until = time.monotonic() + SOON_S
    while (left := processes(folders)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []
    assert list(Path(folders).glob("hpcdist-*")) == []
    shutil.rmtree(folders, ignore_errors=True)


def processes(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if mark in line:
                found.append(line)
    return found


def python(code, *, path=None, **options):
    """Run Python code in a process of its own: by -c, or as a script at `path`."""
    code = textwrap.dedent(code)
    if path is not None:
        path.write_text(code)
    words = ["-c", code] if path is None else [str(path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": ""}
    return subprocess.run(
        [sys.executable, *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def test_results_come_back_by_rank():
    context = spawn(tell_place, ("a", 2), nprocs=3)
    assert context.results == [(rank, 3, "a", 2) for rank in range(3)]
    assert [queue.get() for queue in context.return_queues] == context.results
    assert [process.exitcode for process in context.processes] == [0, 0, 0]


def test_the_ranks_are_one_mpi_job():
    assert spawn(sum_over_mpi, (10,), nprocs=3).results == [33, 33, 33]


def test_the_ranks_use_hpcdist_like_any_others():
    assert spawn(sum_over_hpcdist, nprocs=2).results == [([3.0, 3.0, 3.0], 2)] * 2


def test_one_rank_is_a_job_too():
    assert spawn(tell_place, nprocs=1).results == [(0, 1)]


@pytest.mark.thorough
def test_by_default_there_is_a_rank_for_every_cpu_or_device():
    cpus = len(os.sched_getaffinity(0))
    assert len(spawn(tell_place).results) == cpus
    results = spawn(visible_devices, gpus="2,5", backend="mpi").results
    assert results == [("2,5", "mpi")] * 2


@pytest.mark.thorough
def test_the_job_around_us_is_not_joined(monkeypatch):
    for name, value in {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert spawn(sum_over_mpi, (0,), nprocs=2).results == [1, 1]


def test_lambdas_and_closures_go_by_value():
    pytest.importorskip("cloudpickle")
    factor = 3
    assert spawn(lambda x: factor * x, (2,), nprocs=2).results == [6, 6]


def test_without_cloudpickle_a_lambda_is_a_usage_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match="top level of a module"):
        spawn(lambda: 1, nprocs=2)


def test_functions_and_classes_of_a_script_are_found_in_it(tmp_path):
    code = """
        from hpcdist.launch import spawn

        print("read")

        class Point:
            def __init__(self, x):
                self.x = x

        def double(point):
            return Point(2 * point.x)

        if __name__ == "__main__":
            results = spawn(double, (Point(4),), nprocs=2).results
            print([point.x for point in results], {type(p) is Point for p in results})
    """
    done = python(code, path=tmp_path / "script.py")
    assert done.stdout.splitlines()[-1] == "[8, 8] {True}", done.stderr
    assert done.stdout.splitlines().count("read") == 3


def test_a_rank_can_spawn_functions_of_the_script_too(tmp_path):
    code = """
        from hpcdist.launch import spawn

        def double(x):
            return 2 * x

        def inner(x):
            return spawn(double, (x,), nprocs=1).results

        if __name__ == "__main__":
            print(spawn(inner, (4,), nprocs=1).results)
    """
    done = python(code, path=tmp_path / "script.py")
    assert done.stdout == "[[8]]\n", done.stderr


@pytest.mark.thorough
def test_a_rank_can_spawn_by_value_what_uses_the_script(tmp_path):
    pytest.importorskip("cloudpickle")
    code = """
        from hpcdist.launch import spawn

        def double(x):
            return 2 * x

        def inner(x):
            return spawn(lambda f: f(x), (double,), nprocs=1).results

        if __name__ == "__main__":
            print(spawn(inner, (4,), nprocs=1).results)
    """
    done = python(code, path=tmp_path / "script.py")
    assert done.stdout == "[[8]]\n", done.stderr


def test_functions_of_a_command_line_go_by_value():
    pytest.importorskip("cloudpickle")
    done = python("""
        from hpcdist.launch import spawn
        def double(x): return 2 * x
        print(spawn(double, (4,), nprocs=2).results)
    """)
    assert done.stdout == "[8, 8]\n", done.stderr


@pytest.mark.thorough
def test_a_script_that_would_spawn_without_end_is_stopped(tmp_path):
    code = """
        from hpcdist.launch import spawn

        def nothing(): pass

        spawn(nothing, nprocs=2)
    """
    done = python(code, path=tmp_path / "script.py")
    assert done.returncode == 1
    assert 'under `if __name__ == "__main__":`' in done.stderr


def test_an_exception_comes_back_with_its_traceback_and_rank():
    begin = time.monotonic()
    with pytest.raises(RemoteError) as caught:
        spawn(raise_on_rank, (1,), nprocs=3)
    assert time.monotonic() - begin < SOON_S
    assert caught.value.rank == 1
    assert str(caught.value).startswith("Process 1 terminated with the following error:")
    assert "in raise_on_rank\n" in caught.value.traceback
    assert "ValueError: boom" in caught.value.traceback


@pytest.mark.thorough
@pytest.mark.parametrize("function", [raise_on_rank_inside_mpi, fail_after_a_collective_of_hpcdist])
def test_an_exception_ends_ranks_that_wait_inside_mpi(function):
    begin = time.monotonic()
    arguments = (1,) if function is raise_on_rank_inside_mpi else ()
    with pytest.raises(RemoteError, match="boom") as caught:
        spawn(function, arguments, nprocs=3)
    assert time.monotonic() - begin < SOON_S
    assert caught.value.rank == 1


def test_an_exit_code_is_reported():
    with pytest.raises(RemoteError, match=r"Process 1 terminated with exit code 7\.") as caught:
        spawn(exit_on_rank, (1, 7), nprocs=2)
    assert caught.value.rank == 1


def test_a_signal_is_reported():
    with pytest.raises(RemoteError, match=r"Process 0 terminated with signal SIGKILL\."):
        spawn(kill_on_rank, (0,), nprocs=2)


def leave_mpi_on_rank(rank):
    from mpi4py import MPI

    if rank == MPI.COMM_WORLD.rank:
        os._exit(0)
    MPI.COMM_WORLD.Barrier()


@pytest.mark.skipif(
    find_site(snapshot()).family != "openmpi", reason="only Open MPI ends the other ranks then"
)
def test_a_rank_that_ends_without_ending_mpi_is_named_though_its_exit_code_is_0():
    with pytest.raises(RemoteError, match=r"Process 1 .* exit code 0, .* sys\.exit") as caught:
        spawn(leave_mpi_on_rank, (1,), nprocs=2)
    assert caught.value.rank == 1


@pytest.mark.thorough
def test_what_cannot_come_back_is_an_error_of_its_rank(monkeypatch):
    with pytest.raises(RemoteError, match="what it returned cannot be sent"):
        spawn(compile_generator, nprocs=1)


def compile_generator():
    return (x for x in ())


class TwoArgumentsError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def return_error_on_rank(rank):
    return TwoArgumentsError(1, 2) if rank_of_me() == rank else None


def test_a_result_that_cannot_be_made_again_is_a_usage_error_that_names_its_rank():
    context = spawn(return_error_on_rank, (1,), nprocs=2, join=False)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"what rank 1 returned .*: return plain") as got:
            context.join()
        assert type(got.value.__cause__) is TypeError


@pytest.mark.thorough
def test_join_waits_as_long_as_it_is_told():
    context = spawn(sleep, (2,), nprocs=2, join=False)
    assert context.processes[0].is_alive()
    assert context.processes[1].pid > 0
    assert not context.join(timeout=0.1)
    assert context.processes[0].exitcode is None
    while not context.join(timeout=0.5):
        pass
    assert context.results == ["slept", "slept"]
    assert not context.processes[0].is_alive()


def test_a_job_can_be_ended_from_outside():
    context = spawn(sleep, (60,), nprocs=2, join=False)
    assert context.processes[0].pid
    begin = time.monotonic()
    context.terminate()
    assert time.monotonic() - begin < SOON_S
    with pytest.raises(RemoteError):
        context.join()


def test_a_rank_that_is_killed_from_outside_ends_the_job():
    context = spawn(sleep, (60,), nprocs=2, join=False)
    context.processes[1].kill()
    with pytest.raises(RemoteError, match="Process 1 terminated with signal SIGKILL"):
        context.join()


JOB = """
    import sys, time
    from hpcdist.launch import spawn
    context = spawn(time.sleep, (60,), nprocs=2, join=False, daemon={daemon})
    print([process.pid for process in context.processes], flush=True)
    {then}
"""


def test_a_daemon_job_ends_with_the_program():
    done = python(JOB.format(daemon=True, then=""))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("daemon", [True, False])
def test_no_job_outlives_a_program_that_is_killed(daemon):
    done = python(JOB.format(daemon=daemon, then="import os; os.kill(os.getpid(), 9)"))
    assert done.returncode == -signal.SIGKILL


def test_ctrl_c_ends_the_job():
    then = (
        "import os, signal, threading; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # may have been ignored
        "threading.Timer(0.5, os.kill, (os.getpid(), 2)).start()"
    )
    done = python(JOB.format(daemon=False, then=f"{then}; context.join()"))
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in done.stderr


@pytest.mark.thorough
def test_what_ranks_print_is_printed_in_whole_lines():
    done = python("""
        from hpcdist.launch import spawn
        spawn(print, ("a" * 3000,), nprocs=3)
    """)
    assert done.stdout == ("a" * 3000 + "\n") * 3, done.stderr


def test_the_command_can_be_printed(capfd):
    spawn(tell_place, nprocs=1, print_config=True)
    assert re.search(r"mpiexec'? -n 1", capfd.readouterr().out)  # quoted in a folder with a space


def test_a_number_of_ranks_may_be_one_of_numpy():
    assert spawn(tell_place, nprocs=np.int64(1)).results == [(0, 1)]


def test_one_argument_that_is_not_in_a_tuple_is_refused():
    with pytest.raises(UsageError, match=r"got int 5: put a single one into a tuple"):
        spawn(tell_place, 5, nprocs=1)


@pytest.mark.parametrize("nprocs", [0, -2, 1.5, "2", True])
def test_nonsense_numbers_are_refused(nprocs):
    with pytest.raises(ValueError, match="nprocs"):
        spawn(tell_place, nprocs=nprocs)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bogus": 1}, "it knows start_method, gpus, xpus, ips, backend, print_config"),
        ({"gpus": "0,1,2"}, "the devices 0,1,2 are 3"),
        ({"start_method": "teleport"}, "spawn, fork, forkserver"),
        ({"ips": "10.0.0.1,10.0.0.2"}, "hpcdist run --hosts"),
    ],
)
def test_unknown_and_contradicting_options_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        spawn(tell_place, nprocs=2, **options)


def test_start_methods_of_multiprocessing_are_accepted():
    assert spawn(tell_place, nprocs=1, start_method="fork").results == [(0, 1)]


def test_what_spawn_returns_tells_its_ranks_and_how_they_stand():
    context = spawn(rank_of_me, nprocs=2, join=False)
    assert repr(context).startswith("<MultiprocessContext of 2 ranks, ")
    context.join()
    assert repr(context) == "<MultiprocessContext of 2 ranks, ended>"
    assert [repr(each).split(", ")[0] for each in context.processes] == [
        "<SpawnedProcess rank 0",
        "<SpawnedProcess rank 1",
    ]
    assert all(repr(each).endswith("exit code 0>") for each in context.processes)
    assert repr(context.return_queues[1]) == "<ReturnQueue of rank 1>"
