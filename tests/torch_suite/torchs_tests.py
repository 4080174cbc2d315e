"""torch's tests of torch.distributed, to be run by ranks that are there already.

The tests are made for the backends that torch ships, and ask for the backend's name at every turn:
decorators skip a test unless it is "gloo", or unless it is "mpi". So they are loaded in the guise
of one of these two, and then told the backend that really runs.
"""

from __future__ import annotations

import os
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

BARRIER_S = 120.0
"""How long ranks wait for each other between the parts of a test."""


class Named(str):
    """The name of a backend, which equals those of the guises in the branches of torch's tests."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other in ("gloo", "mpi")

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class TorchsTests:
    """The tests on one backend; all ranks run a test at once, and share `folder`."""

    def __init__(self, backend: str, guise: str, rank: int, size: int, folder: Path) -> None:
        self._backend, self._rank, self._folder = backend, rank, folder
        os.environ |= {
            "BACKEND": guise,
            "WORLD_SIZE": str(size),
            "TEMP_DIR": str(folder),
            "INIT_METHOD": f"file://{folder}/init",
        }
        if backend == "hpcdist":
            import hpcdist.torch  # noqa: F401
        from torch.testing._internal.distributed import distributed_test

        distributed_test.BACKEND = Named(backend)
        # torch runs its tests of the group [1, 2] on 8 ranks, or on as few as they need on "mpi"
        os.environ["BACKEND"] = "mpi" if size > 2 else "gloo"
        self._module = distributed_test
        self._class = _class_of(distributed_test)

    def names(self) -> list[str]:
        """Return the tests there are."""
        return list(unittest.TestLoader().getTestCaseNames(self._class))

    def run(self, name: str) -> tuple[str, str]:
        """Run a test; return its outcome on this rank, and why."""
        import torch.distributed as dist

        function = getattr(self._class, name)
        if getattr(function, "__unittest_skip__", False):
            return "skipped", function.__unittest_skip_why__
        try:
            test = self._started(name)
            outcome = self._outcome(test, name)
            test._barrier()
            dist.destroy_process_group()
        except Exception:
            return "failed", traceback.format_exc()
        return outcome

    def _started(self, name: str) -> Any:
        """Return a test with what torch gives to a process it spawns: a folder, and the backend."""
        import torch.distributed as dist
        from torch.testing._internal.common_utils import set_rng_seed

        folder = self._folder / name
        for part in ("barrier", "test_dir"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"] = str(folder)
        self._module.Barrier.barrier_id = 0
        test = self._class(name)
        test.rank, test.file_name = self._rank, str(folder / "store")
        limit = self._module.CUSTOM_PG_TIMEOUT.get(name, self._module.default_pg_timeout)
        where = {"rank": self._rank, "world_size": int(test.world_size)}
        own = {} if self._backend == "hpcdist" else {"init_method": test.init_method, **where}
        dist.init_process_group(self._backend, timeout=timedelta(seconds=limit), **own)
        test._barrier()
        set_rng_seed()
        return test

    def _outcome(self, test: Any, name: str) -> tuple[str, str]:
        try:
            getattr(test, name)()
        except unittest.SkipTest as skip:
            return "skipped", str(skip)
        except SystemExit as skip:  # how a process that torch has spawned tells of a skip
            words = {each.exit_code: each.message for each in self._module.TEST_SKIPS.values()}
            return "skipped", words[skip.code]
        return "passed", ""


def _class_of(module: Any) -> type[Any]:
    """Return the class of the tests, whose barrier is as patient as a loaded machine needs."""

    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def _barrier(self, wait_for: int | None = None, timeout: float = BARRIER_S) -> None:
            module.Barrier.sync(wait_for, timeout)

    return Tests
