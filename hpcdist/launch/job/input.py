"""Our own input, on its way to rank 0: `readable_input` and `Pump`.

The input is carried by us, not by the launcher: that lives in a session of its own, from which a
terminal cannot be read, and Open MPI 5 never tells rank 0 that the input has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

_PIECE = 1 << 16


def readable_input() -> int | None:
    """Return the descriptor of our input, None where there is none or reading would stop us.

    A program in the background of a terminal is stopped when it reads from it.
    """
    try:
        os.fstat(0)
        if os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp():
            return None
    except OSError:
        return None
    return 0


class Pump:
    """Copies one descriptor into another in a thread, until the end of either or `stop`.

    Args:
        source: what is read.
        open_sink: opens what is written; called in the thread, as it may block.

    """

    def __init__(self, source: int, open_sink: Callable[[], int]) -> None:
        self._source = source
        self._open_sink = open_sink
        self._over = threading.Event()
        threading.Thread(target=self._copy, name="hpcdist input", daemon=True).start()

    def stop(self) -> None:
        """Leave the rest of the source unread."""
        self._over.set()

    def _copy(self) -> None:
        with contextlib.suppress(OSError):
            sink = self._open_sink()
            try:
                while not self._over.is_set():
                    if select.select([self._source], [], [], 0.2)[0]:
                        data = os.read(self._source, _PIECE)
                        if not data:
                            break
                        while data:
                            data = data[os.write(sink, data) :]
            finally:
                os.close(sink)
