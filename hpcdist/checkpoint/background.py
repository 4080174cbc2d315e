"""`Saving`: a save under way, in a thread of its own beside what the ranks compute.

The ranks that save have one save under way at a time, and a group of their own for it, so that it
agrees with nobody's order of operations. The threads are no daemons: the program waits for them.
"""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from typing import Any, final
from weakref import WeakKeyDictionary

from hpcdist.checkpoint.together import of_group
from hpcdist.comm.group import Group
from hpcdist.comm.groups import new_group
from hpcdist.comm.together import Together
from hpcdist.errors import CollectiveTimeout
from hpcdist.named_tuple import NamedTuple
from hpcdist.runtime.mpi import load_mpi
from hpcdist.transport.waiting.queue import seconds
from hpcdist.transport.waiting.work import Known, Work


@final
class Saving(Work):
    """The work of a save; without `write` of one that has ended."""

    def __init__(self, folder: str, write: Callable[[], Any] | None = None) -> None:
        self._folder = folder
        self._write = write
        self._error: BaseException | None = None
        self._told = False
        self._thread: threading.Thread | None = None

    def begin(self, beside: bool) -> None:
        """Write: in a thread, or at once."""
        if not beside:
            self._run()
            return
        name = f"hpcdist-save-{self._folder}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        self._thread.start()

    def _run(self) -> None:
        write, self._write = self._write, None  # the copies can go when they are written
        try:
            if write is not None:
                write()
        except BaseException as error:
            self._error = error

    def wait(self, timeout: Any = None) -> bool:
        """Block until the checkpoint is on disk; raise what went wrong."""
        limit = seconds(timeout)
        if self._thread is not None:
            self._thread.join(limit)
            if self._thread.is_alive():
                raise CollectiveTimeout(
                    f"saving {self._folder} takes more than {limit} s; it goes on: wait() again"
                )
        self._told = True
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether the save has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def known(self) -> Known:
        """See `Work.known`."""
        return Known(f"save of {self._folder}", self.is_completed(), self._error)

    def result(self) -> str:
        """Wait, and return the folder of the checkpoint."""
        self.wait()
        return self._folder

    def finish(self) -> None:
        """Wait; warn of an error that has not been reported yet."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not self._told:
            self._told = True
            warnings.warn(
                f"the checkpoint {self._folder} was not saved: {self._error}; call wait() on what "
                "save(async_save=True) returns",
                RuntimeWarning,
                stacklevel=3,
            )


class _AsyncSlot(NamedTuple):
    """The group that ranks use for saving beside their work, and their last save."""

    group: Group | None
    saving: Saving


class _Alone:
    """Stands for the group of a process that has none: None cannot be a weak key."""


_ALONE = _Alone()
_slots: WeakKeyDictionary[Any, _AsyncSlot] = WeakKeyDictionary()
"""By group. A thread outlives the call that began it, so someone must know of it."""


def start_saving(ranks: Together, folder: str, write: Callable[[Together], Any]) -> Saving:
    """Begin `write` beside what comes next; collective, after `finish_saving`.

    Without MPI_THREAD_MULTIPLE it has ended when this returns.
    """
    key, known = _slot(ranks)
    group = known.group if known else None
    if group is None and ranks.group is not None and ranks.size > 1:
        group = new_group(ranks.group.ranks, name=f"saving of {ranks.group.name}")
    own = of_group(group, ranks.first_world_rank) if group is not None else of_group(None)
    saving = Saving(folder, lambda: write(own))
    _slots[key] = _AsyncSlot(group, saving)
    # Anew each time: handlers run in reverse order, and this one must run before the one that
    # leaves MPI, which may have been registered again since the last save.
    atexit.unregister(_finish_all)
    atexit.register(_finish_all)
    saving.begin(beside=group is None or _may_communicate(group))
    return saving


def finish_saving(ranks: Together) -> None:
    """Wait for the save that these ranks have under way, if any."""
    _, known = _slot(ranks)
    if known is not None:
        known.saving.finish()


def _slot(ranks: Together) -> tuple[Any, _AsyncSlot | None]:
    key = _ALONE if ranks.group is None else ranks.group
    return key, _slots.get(key)


def _may_communicate(group: Group) -> bool:
    """Return whether a thread may communicate beside others."""
    if group.mpi_comm is None:
        return True
    mpi = load_mpi()
    return bool(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)


def _finish_all() -> None:
    for slot in list(_slots.values()):
        slot.saving.finish()
