"""`HpcdistProcessGroup`: an hpcdist group that torch takes for one of its own.

It is a subclass of torch's `ProcessGroup`, whose C++ part forwards to the methods here. From
torch 2.14 on there is a `Backend` behind it, too, where torch's tools look for one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import numpy as np
import torch
import torch.distributed as c10d

from hpcdist.comm import describe
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.groups import destroy_process_group
from hpcdist.comm.making import check_timeout
from hpcdist.comm.memory import empty
from hpcdist.errors import CollectiveTimeout, UsageError
from hpcdist.torch.behind import stand_behind
from hpcdist.torch.devices import Reach, agree_on_reach
from hpcdist.torch.verbs import Verbs, torchs_own
from hpcdist.torch.works import AllOf

BACKEND = "hpcdist"


@final
class HpcdistProcessGroup(Verbs, c10d.ProcessGroup):  # type: ignore[misc] # torch is untyped
    """The members of a group of hpcdist, for torch.

    Made by ``torch.distributed.init_process_group``, ``new_group`` and `process_group_of`.
    Collective to create, for GPUs may open connections of their own.
    """

    def __init__(self, group: Group, store: Any, name: str) -> None:
        super().__init__(group.rank, group.nranks)
        self.group = group
        self._store, self._name, self._description = store, name, ""
        self._coalesced: list[Any] | None = None
        self._reach = agree_on_reach(self)
        cuda = [] if self._reach is Reach.NOT else [torch.device("cuda")]
        self._devices = [torch.device("cpu"), *cuda]
        self._behind = stand_behind(self)

    def __repr__(self) -> str:
        return f"<HpcdistProcessGroup: {self.group!r}; torch's name {self._name!r}>"

    def handed_over(self, name: str, device: torch.device) -> Callable[..., Any] | None:
        """Return a function of torch's backend for `device`; None where hpcdist has its own.

        Args:
            name: of the verb.
            device: where its tensors are.

        """
        if all(device.type != each.type for each in self._devices):
            raise UsageError(
                f"{name} got a tensor on {device}, but this process group can reach "
                f"{', '.join(each.type for each in self._devices)} memory only; move it with "
                ".cpu(), or install CuPy (or a torch with NCCL) on all ranks"
            )
        return None if self._reach is Reach.OWN else torchs_own(name)

    def _go(self, *args: Any) -> Any:
        work = super()._go(*args)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # ---- what torch asks a group about itself

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return ``"hpcdist"``."""
        return BACKEND

    def name(self) -> str:
        """Return ``"hpcdist"``."""
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802 (torch's name)
        """Take the name torch has made.

        Args:
            name: unique in the job.

        """
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 (torch's name)
        """Return it."""
        return self._name

    _set_group_name = setGroupName

    @property
    def group_name(self) -> str:
        """The name by which torch's functional collectives find the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 (torch's name)
        """Take the description the user gave.

        Args:
            description: any text.

        """
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 (torch's name)
        """Return it."""
        return self._description

    _set_group_desc = setGroupDesc

    @property
    def group_desc(self) -> str:
        """The description given to ``torch.distributed.new_group``."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def get_group_store(self) -> Any:
        """Return the store torch made the group with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time limit of operations from now on. Local: each rank waits its own.

        Args:
            timeout: the limit.

        """
        self.group.open_transport().set_timeout(_limit_s(timeout))

    _set_default_timeout = set_timeout

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; after `timeout` raise `CollectiveTimeout`, which names the missing.

        Torch's words for it come first: they name one rank, or all if `wait_all_ranks`. Then all
        are named, on every rank that came in time; who comes later hears that it is too late.

        Args:
            timeout: a `datetime.timedelta`; None for the group's.
            wait_all_ranks: name all missing ranks, not just one, in torch's words.

        """
        transport = self.group.open_transport()
        usual_s = transport.timeout_s
        if timeout in (0, timedelta(0)):
            raise CollectiveTimeout(_no_time_left(self.rank()))
        limit_s = usual_s if timeout is None else _limit_s(timeout)
        try:
            dispatch(
                self.group,
                True,
                lambda group: describe.barrier(group)._replace(
                    begin=lambda: transport.set_timeout(limit_s),
                    ended=lambda _: transport.set_timeout(usual_s),
                ),
            )
        except CollectiveTimeout as error:
            missing = [self.group.get_group_rank(rank) for rank in error.missing]
            words = _of_monitored_barrier(self.rank(), missing, wait_all_ranks)
            raise CollectiveTimeout(f"{words}: {error}", error.missing) from None

    def _set_sequence_number_for_group(self) -> None:
        """No-op: hpcdist numbers the operations of a group itself."""

    def _has_hooks(self) -> bool:
        return False

    def _get_backend(self, device: torch.device) -> Any:
        """Return what serves tensors on `device`: before torch 2.14 this group itself."""
        if self._behind is None and all(device.type != each.type for each in self._devices):
            raise UsageError(
                f"this process group has no backend for {device}, only for "
                f"{', '.join(each.type for each in self._devices)}"
            )
        if self._behind is None and (device.type == "cpu" or self._reach is Reach.OWN):
            return self
        return super()._get_backend(device)

    # ---- memory that the ranks of the node share

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` makes tensors on `device`. Local.

        Args:
            device: where tensors are to be.

        """
        return bool(device.type == "cpu")

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a new flat tensor with any contents, in memory like that of `empty`. Local.

        Args:
            size: how many elements.
            dtype: of the elements.
            device: ``"cpu"``.

        """
        room = empty(size * dtype.itemsize, np.uint8, self.group)
        return torch.from_numpy(room).view(dtype)

    # ---- coalescing: several operations, one work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> AllOf:
        works, self._coalesced = self._coalesced or [], None
        return AllOf(works)

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    # ---- the end

    def shutdown(self) -> None:
        """Free the group. Collective."""
        self._store = None  # torch's caches may keep the group, but nine open files need not stay
        if not self.group.is_closed:
            destroy_process_group(self.group)

    abort = shutdown


def _of_monitored_barrier(rank: int, missing: list[int], every: bool) -> str:
    """Return what torch says of a barrier without the ranks `missing`; programs look for it."""
    if rank in missing:
        return _no_time_left(rank)
    if rank != 0:
        return (
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0"
        )
    if not missing:
        return _no_time_left(rank)
    named = sorted(missing) if every else sorted(missing)[:1]
    ranks = ", ".join(map(str, named))
    return f"Rank{'s' * (len(named) > 1)} {ranks} failed to pass monitoredBarrier"


def _no_time_left(rank: int) -> str:
    return f"Rank {rank} timed out in monitoredBarrier"


def _limit_s(timeout: Any) -> float:
    """Return torch's time limit in seconds; it must be positive."""
    return check_timeout(timeout, 0.0)
