"""Where a job puts large files that it alone needs: on the node, gone when it ends."""

from __future__ import annotations

import os
import tempfile


def node_folder() -> str:
    """Return a folder of this node for scratch files: ``$SLURM_TMPDIR``, or where Python puts them.

    The latter is ``$TMPDIR``, or ``/tmp``.
    """
    return os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()
