"""`HpcdistProcessGroup`: an hpcdist group that torch takes for one of its own.

torch up to 2.13 lets Python subclass `ProcessGroup` only (its C++ part forwards to the methods
here); a `BackendBase` of later versions needs a second small class beside this one, on the same
`Verbs`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as c10d

from hpcdist.comm.group import Closed, Group
from hpcdist.comm.groups import destroy_process_group
from hpcdist.errors import UsageError
from hpcdist.torch.devices import Reach, agree_on_reach
from hpcdist.torch.verbs import Verbs
from hpcdist.torch.works import AllOf

BACKEND = "hpcdist"


@final
class HpcdistProcessGroup(Verbs, c10d.ProcessGroup):  # type: ignore[misc] # torch is untyped
    """The members of `group`; collective to create, for GPUs may open connections of their own."""

    def __init__(self, group: Group, store: Any, name: str) -> None:
        super().__init__(group.rank, group.nranks)
        self.group = group
        self._store, self._name, self._description = store, name, ""
        self._coalesced: list[Any] | None = None
        self._reach = agree_on_reach(self)
        cuda = [] if self._reach is Reach.NOT else [torch.device("cuda")]
        self._devices = [torch.device("cpu"), *cuda]

    def handed_over(self, name: str, device: torch.device) -> Callable[..., Any] | None:
        """Return a verb of torch's backend for `device`; None where it is hpcdist's own."""
        if all(device.type != each.type for each in self._devices):
            raise UsageError(
                f"{name} got a tensor on {device}, but this process group can reach "
                f"{', '.join(each.type for each in self._devices)} memory only; move it with "
                ".cpu(), or install CuPy (or a torch with NCCL) on all ranks"
            )
        return None if self._reach is Reach.OWN else getattr(c10d.ProcessGroup, name)

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
        """Take the name torch has made."""
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
        """Take the description the user gave."""
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
        """Refuse: time limits are agreed on when a group is made."""
        raise UsageError(
            f"the time limit of a group cannot be changed to {timeout}; give it to new_group or "
            "init_process_group"
        )

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: hpcdist numbers the operations of a group itself."""

    def _has_hooks(self) -> bool:
        return False

    # ---- coalescing: several operations, one work

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> AllOf:
        works, self._coalesced = self._coalesced or [], None
        return AllOf(works)

    # ---- the end

    def shutdown(self) -> None:
        """Free the group. Collective."""
        if not isinstance(self.group.transport, Closed):
            destroy_process_group(self.group)

    abort = shutdown
