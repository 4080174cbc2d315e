"""The `Backend` behind a process group of torch 2.14 and later, where C++ and tools look for one.

Earlier versions do not let Python make a `Backend`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch._C._distributed_c10d import Backend

from hpcdist.torch.devices import Reach
from hpcdist.torch.verbs import UNSEEN


def stand_behind(process_group: Any) -> Any:
    """Register a backend for all devices hpcdist itself serves; None where torch has no such."""
    if not PYTHON_MAKES_BACKENDS:
        return None
    backend = _Behind(process_group)
    kind = c10d.ProcessGroup.BackendType.CUSTOM
    own = ["cpu", "cuda"] if process_group._reach is Reach.OWN else ["cpu"]
    for name in own:
        process_group._register_backend(torch.device(name), kind, backend)
    process_group._set_default_backend(kind)
    return backend


class _Behind(Backend):  # type: ignore[misc, unused-ignore] # typed where torch is installed
    """Does each verb as the process group does it when nobody looks on."""

    def __init__(self, process_group: Any) -> None:
        super().__init__(process_group.rank(), process_group.size())
        self._group = weakref.ref(process_group)  # which holds us, in C++, where no cycle is found

    @property
    def process_group(self) -> Any:
        """The process group before us."""
        return self._group()

    # Properties that C++ asks Python for: torch's own would ask C++ again.
    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = False

    @property
    def options(self) -> Any:
        """Return the name and the time limit."""
        transport = self.process_group.group.open_transport()
        limit = timedelta(seconds=min(transport.timeout_s, _LONGEST_S))
        return Backend.Options(self.getBackendName(), limit)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return ``"hpcdist"``."""
        name: str = self.process_group.getBackendName()
        return name

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of the group."""
        self.process_group.set_timeout(timeout)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Meet all ranks, or name those that are missing."""
        self.process_group.monitored_barrier(opts.timeout, wait_all_ranks)

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether `allocate_tensor` makes tensors on `device`."""
        return getattr(device, "type", None) == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new flat tensor in memory that the ranks of the node share."""
        made: torch.Tensor = self.process_group.allocate_tensor(size, dtype=dtype, device=device)
        return made

    def shutdown(self) -> None:
        """Free the group. Collective."""
        self.process_group.shutdown()

    abort = shutdown


_LONGEST_S = 1e9


def _forwarding(verb: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: _Behind, *args: Any) -> Any:
        return verb(self.process_group, *args)

    return forward


def _can_make_backends() -> bool:
    class Attempt(Backend):  # type: ignore[misc, unused-ignore] # as above
        pass

    try:
        Attempt(0, 1)
    except TypeError:
        return False
    return True


for _name, _verb in UNSEEN.items():
    setattr(_Behind, _name, _forwarding(_verb))
PYTHON_MAKES_BACKENDS = _can_make_backends()
