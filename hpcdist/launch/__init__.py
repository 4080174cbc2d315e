"""Starting ranks: `hpcdist run` for scripts, `spawn` for functions.

Read `command` (what is started, pure), `launchers` (what there is to start it with), `job` (one job
under way, with `streams`, `output`, `input`, `processes` and `outcome`), then the two uses: `run`
behind `cli`, and `spawn` with its `context`, `pickled_call` and `worker`. `submit` hands
a job to Slurm, `modulefile` describes an installation. The package is callable:
`hpcdist.launch()` is `hpcdist run` with the arguments of this program.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcdist.launch.spawning.context import MultiprocessContext
    from hpcdist.launch.spawning.spawn import spawn

__all__ = ["MultiprocessContext", "launch", "spawn"]


def launch() -> None:
    """Start a job from this program's own arguments and exit with its exit code.

    `python -m hpcdist.launch -n 4 train.py` does the same.

    Raises:
        SystemExit: always, with the exit code of the job.

    Example:
        >>> launch()  # doctest: +SKIP

    """
    from hpcdist.launch.cli import run

    run.main(args=sys.argv[1:], prog_name="python -m hpcdist.launch")


class _Launch(ModuleType):
    """The package itself, which Paddle's users call like a function."""

    def __call__(self) -> None:
        launch()


sys.modules[__name__].__class__ = _Launch


def _lazy(name: str) -> Any:
    if name in ("spawn", "MultiprocessContext"):
        from hpcdist.launch.spawning import spawn as spawning

        return getattr(spawning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # or no checker would find a misspelt name
    __getattr__ = _lazy
