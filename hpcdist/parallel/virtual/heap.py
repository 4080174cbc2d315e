"""`keep_freed`: freed gradients stay with the process, for those of the next virtual rank.

[Note: freed gradients] A virtual rank's gradients are there all at once, and are freed all at once
when they have been added. The C library then gives the end of its heap back to the system, and the
next virtual rank's gradients cost page faults: a sixth of a step of a wide network. Those of plain
accumulation do not, because there one gradient is freed before the next one is computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from hpcdist.runtime.process import snapshot

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of ``mallopt`` of the GNU C library, which other libraries lack."""
_MOST = 2**31 - 1
_kept = {_TRIM_THRESHOLD: 0, _MMAP_THRESHOLD: 0}


def keep_freed(nbytes: Sequence[int]) -> None:
    """Let the process keep as much freed memory as gradients take twice. Local.

    Nothing happens where a variable of the C library says how it is done
    (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``, ``GLIBC_TUNABLES``).

    Args:
        nbytes: of each gradient.

    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    said = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in snapshot())
    if mallopt is None or said or not nbytes:
        return
    page = 1 << 16
    wanted = {_TRIM_THRESHOLD: 2 * sum(nbytes) + page, _MMAP_THRESHOLD: max(nbytes) + page}
    for option, size in wanted.items():
        if size > _kept[option]:
            _kept[option] = size
            mallopt(option, min(max(size, 1 << 17), _MOST))
