"""The small programs that a launch puts in between; standard library only, run by path.

`shim.py rank DIR PROGRAM...` stands between a launcher and one rank. It starts the program with
its output going to the named pipes in DIR, tells DIR/events of its start and end, passes signals
on, and ends it when the reader of DIR/events is gone; then it ends as the program did. So whoever
began the job knows how each rank ended, whichever launcher there is, and no rank outlives it.

In a job that survives (HPCDIST_SURVIVE) the program leaves a report when it comes to its end, and
`rank` and `report` tell it with the exit code. They end a program that is still there long after
that, for MPI_Finalize may hang after a failure. A program that failed before MPI had started,
of which it leaves a sign, has the state "absent". They themselves end by a signal where the program
failed, whatever its exit code: only then does Open MPI tell the other ranks.

`shim.py report WORD PROGRAM...` is the same for a launcher that starts ranks on other machines.
The output of the program stays where it goes, and its end is told there, on a line of standard
error that begins with WORD. Where that never comes the rank did not end well, whatever is said.

`shim.py place PROGRAM...` turns into the program. It, `rank` and `report` tell the program its
place by torchrun's variables.

`shim.py die_with_parent PARENT PROGRAM...` turns into the program, which gets SIGTERM when PARENT
dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import resource
import select
import signal
import sys
import types
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_GRACE_S = 2.0
_LOOK_S = 1.0
_LEAVING_S = 30.0
"""Seconds that a program may take from its report to its end: for what it does at its exit."""
_RANK_NAMES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "PMIX_RANK", "SLURM_PROCID")
_FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)


def main(arguments: list[str]) -> NoReturn:
    """Become the program that the first argument names; see the module's text."""
    role, where, *program = arguments
    if role == "place":
        _tell_place()
        _become([where, *program])
    if role == "die_with_parent":
        _die_with_parent(signal.SIGTERM, int(where))
        _become(program)
    if role == "report":
        _stand_between(os.dup(2), f"{where} ", None, program)
    try:
        # Fails where nobody reads any more: the job is over before we have begun.
        events = os.open(f"{where}/events", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        os._exit(1)
    _stand_between(events, "", where, program)


def _stand_between(events: int, word: str, directory: str | None, program: list[str]) -> NoReturn:
    """Run the program, and tell `events` of its end; of its start too, where it has pipes."""
    rank = next((os.environ[name] for name in _RANK_NAMES if name in os.environ), "0")
    reports = _report_folder(directory)
    report = f"{reports}/rank-{rank}.json" if reports else ""
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signals = {*_FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    shim = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        _die_with_parent(signal.SIGKILL, shim)
        if directory is not None:
            _redirect(f"{directory}/{rank}")
        if reports:
            os.environ["HPCDIST_REPORT_DIR"] = reports
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        _tell_place()
        _become(program)

    def forward(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if directory is not None:
        _tell(events, f"start {rank} {pid} {shim}")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = os.waitstatus_to_exitcode(_await_end(pid, events, wake_read, directory, report))
    told = _take(report)
    if code and reports and not os.path.exists(f"{reports}/rank-{rank}.started"):
        told = f'{{"process":{rank},"rank":{rank},"state":"absent","code":{code}}}'
    _tell(events, f"{word}exit {rank} {code} {told}".rstrip())
    if reports and directory is None:
        _clear(reports)
    _end_like(-signal.SIGKILL if reports and code else code)


def _report_folder(directory: str | None) -> str:
    """Return where the program leaves its report, "" for a job that does not survive."""
    if os.environ.get("HPCDIST_SURVIVE") != "1":
        return ""
    if directory is None:
        directory = f"{os.environ.get('TMPDIR') or '/tmp'}/hpcdist-report-{os.getpid()}"
        os.makedirs(directory, 0o700, exist_ok=True)
    return directory


def _take(report: str) -> str:
    """Return the text of a report, "" where there is none."""
    try:
        with open(report) as file:
            return file.read()
    except OSError:
        return ""


def _await_end(pid: int, events: int, wake: int, directory: str | None, report: str) -> int:
    """Wait for the program, or end it once nobody reads its events, or it does not end."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(events, 0)  # only POLLERR, which says that there is no reader
    number = signal.SIGTERM
    is_asked = False
    looks = _LEAVING_S / _LOOK_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        timeout_s = _GRACE_S if is_asked else _LOOK_S if report else None
        ready = poll.poll(None if timeout_s is None else timeout_s * 1000)
        if any(fd == wake for fd, _ in ready):
            os.read(wake, 4096)
        lost = any(fd == events for fd, _ in ready)
        looks -= not ready and os.path.exists(report)
        if lost or (is_asked and not ready) or looks < 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)
            if lost:
                poll.unregister(events)
                if directory is not None:
                    _clear(directory)
            number, is_asked = signal.SIGKILL, True


def _clear(directory: str) -> None:
    """Remove the folder that its owner can no longer remove."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


def _redirect(stem: str) -> None:
    """Use the pipes made for this rank; without one there is no input, or output stays as is."""
    ends = ((0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY))
    for fd, end, mode in ends:
        path = f"{stem}.{end}" if os.path.exists(f"{stem}.{end}") or fd else os.devnull
        with contextlib.suppress(OSError):
            pipe = os.open(path, mode)
            os.dup2(pipe, fd)
            os.close(pipe)


def _tell_place() -> None:
    """Set torchrun's variables; what is wrong with the launcher's the program itself will find."""
    package = types.ModuleType("hpcdist")  # without what its __init__ imports: NumPy is not here
    package.__path__ = [os.path.abspath(__file__).rsplit(os.sep, 3)[0]]
    sys.modules["hpcdist"] = package
    with contextlib.suppress(Exception):
        importlib.import_module("hpcdist.runtime.torchrun").set_torchrun_variables()


def _become(program: list[str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, others should not
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        os.write(2, f"{program[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _die_with_parent(number: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _tell(events: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(events, f"{line}\n".encode())


def _end_like(code: int) -> NoReturn:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core file is enough
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
