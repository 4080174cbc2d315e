"""A spawned job from outside: `MultiprocessContext`, its `processes` and `return_queues`.

The job lives in a thread; the names are those of Paddle and `multiprocessing`.
"""

from __future__ import annotations

import atexit
import shutil
import signal
import threading
import time
from typing import Any

from hpcdist.errors import RemoteError
from hpcdist.launch.job.job import Job
from hpcdist.launch.job.outcome import Outcome, describe_exit
from hpcdist.launch.spawning.pickled_call import load_result, read_answers


class SpawnedProcess:
    """One rank of a spawned job, in the manner of `multiprocessing.Process`."""

    def __init__(self, rank: int, context: MultiprocessContext) -> None:
        self.rank = rank
        self.name = f"rank {rank}"
        self._context = context

    @property
    def pid(self) -> int | None:
        """The process number; waits until the rank has started, None if it never did."""
        while self.rank not in self._context.job.ranks and self._context.alive():
            time.sleep(0.005)
        known = self._context.job.ranks.get(self.rank)
        return None if known is None else known.pid

    @property
    def exitcode(self) -> int | None:
        """The exit code, -n after signal n, None while the rank runs.

        A rank that was ended because another failed may count as ended by SIGKILL.
        """
        known = self._context.job.ranks.get(self.rank)
        if known is not None and known.code is not None:
            return known.code
        return None if self._context.alive() else -signal.SIGKILL

    def __repr__(self) -> str:
        known = self._context.job.ranks.get(self.rank)
        if known is None:
            return f"<SpawnedProcess {self.name}, not started>"
        state = "running" if known.code is None else describe_exit(known.code)
        return f"<SpawnedProcess {self.name}, pid {known.pid}, {state}>"

    def is_alive(self) -> bool:
        """Return whether the rank has not ended."""
        return self.exitcode is None

    def terminate(self) -> None:
        """Send SIGTERM to the rank, which takes the job along."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the rank, which takes the job along."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.pid is not None:
            self._context.job.ranks[self.rank].send(number)


class ReturnQueue:
    """Gives what one rank's function returned, as Paddle's queue of the rank does."""

    def __init__(self, rank: int, context: MultiprocessContext) -> None:
        self._rank = rank
        self._context = context

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the end of the job and return the rank's result.

        Args:
            timeout: the longest wait in seconds.

        Raises:
            TimeoutError: the job was still running after `timeout`.
            RemoteError: a rank failed.

        """
        if not self._context.join(timeout):
            raise TimeoutError(f"the job was still running after {timeout} s")
        return self._context.results[self._rank]

    def __repr__(self) -> str:
        return f"<ReturnQueue of rank {self._rank}>"


class MultiprocessContext:
    """A spawned job, made by `spawn`: `join` waits for it.

    Attributes:
        results: what the ranks returned, by rank, once they have ended.
        processes: a process for each rank, like those of multiprocessing.
        return_queues: a queue for each rank, with what it returned.

    """

    def __init__(self, job: Job, directory: str, said: list[bytes], daemon: bool) -> None:
        size = job.command.size
        self.job = job
        self.results: list[Any] = []
        self.processes = [SpawnedProcess(rank, self) for rank in range(size)]
        self.return_queues = [ReturnQueue(rank, self) for rank in range(size)]
        self._directory = directory
        self._said = said
        self._outcome: Outcome | None = None
        self._failure: BaseException | None = None
        self._answers: tuple[dict[int, bytes], dict[int, str]] = ({}, {})
        # Not the thread's own join: that takes a thread for dead once Ctrl-C has interrupted it.
        self._over = threading.Event()
        thread = threading.Thread(target=self._run, name="hpcdist spawn", daemon=daemon)
        thread.start()
        if daemon:
            atexit.register(self.terminate)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for all ranks, and raise if one failed.

        Args:
            timeout: the longest wait in seconds; None for any time.

        Returns:
            True when all ranks have ended, False after `timeout`.

        Raises:
            RemoteError: a rank failed; `rank` and `traceback` tell which and how.
            UsageError: what a rank returned cannot be unpickled here.
            KeyboardInterrupt: after Ctrl-C; the job has been ended.

        """
        try:
            self._over.wait(timeout)
        except KeyboardInterrupt:
            self.terminate()
            raise
        if self.alive():
            return False
        self._raise_failure()
        if not self.results:
            bodies = self._answers[0]
            self.results = [load_result(bodies.get(p.rank), p.rank) for p in self.processes]
        return True

    def __repr__(self) -> str:
        state = "under way" if self.alive() else "ended"
        return f"<MultiprocessContext of {len(self.processes)} ranks, {state}>"

    def alive(self) -> bool:
        """Return whether the job has not ended."""
        return not self._over.is_set()

    def terminate(self) -> None:
        """End all ranks and return when they have ended."""
        self.job.stop()
        self._over.wait()
        atexit.unregister(self.terminate)

    def _run(self) -> None:
        try:
            self._outcome = self.job.run()
            self._answers = read_answers(self._directory, self.job.command.size)
        except BaseException as error:
            self._failure = error
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._over.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        outcome, errors = self._outcome, self._answers[1]
        if outcome is None or outcome.code == 0:
            return
        rank, code = outcome.first or (min(outcome.lost, default=-1), outcome.code)
        if rank < 0 and errors:
            rank = min(errors)
        if rank in errors:
            text = f"Process {rank} terminated with the following error:\n\n{errors[rank]}"
            raise RemoteError(text, rank, errors[rank])
        if outcome.left:
            rank = outcome.left[0]
            raise RemoteError(
                f"Process {rank} terminated with exit code 0, but without ending MPI (os._exit), so"
                " that the other ranks were ended: return from the function, or call sys.exit(0).",
                rank,
            )
        if rank >= 0:
            raise RemoteError(f"Process {rank} terminated with {describe_exit(code)}.", rank)
        said = b"".join(self._said).decode(errors="replace").strip()
        raise RemoteError(
            f"The ranks were ended, or could not be started: {self.job.command.argv[0]} ended with"
            f" {describe_exit(outcome.launcher)}.\n{said}"
        )
