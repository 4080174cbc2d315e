"""`Closed`, `Dormant`: what stands in the place of a group's transport while it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, final

from hpcdist.errors import UsageError
from hpcdist.transport.base import Plan, Transport
from hpcdist.transport.call.call import AnyMessage, Call, Collective
from hpcdist.transport.waiting.work import Work


@final
class Closed(Transport):
    """Stands where a group had its transport: every use is an error that says `why`."""

    backend = "CLOSED"
    one_node = False

    def __init__(self, why: str, former: Transport | None = None) -> None:
        self._why = why
        self._former = former  # kept as it is: its end would touch what others use

    def _refuse(self) -> NoReturn:
        raise UsageError(self._why)

    def run(self, call: Call) -> Any:
        """Refuse."""
        self._refuse()

    def start(self, call: Call) -> Work:
        """Refuse."""
        self._refuse()

    def plan(self, call: Collective) -> Plan:
        """Refuse."""
        self._refuse()

    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[Transport, int]:
        """Refuse."""
        self._refuse()

    def synchronize(self, *, on_device: bool = False) -> None:
        """Refuse."""
        self._refuse()

    def reopen(self) -> Transport:
        """Refuse."""
        self._refuse()

    def together_at_end(self) -> bool:
        """Return False: it cannot ask."""
        return False

    def leave(self, why: str) -> None:
        """No-op: everyone knows."""

    def close(self) -> None:
        """No-op: it is closed."""


@final
class Dormant(Transport):
    """Stands where a group was shut down: the first operation restarts its transport."""

    def __init__(self, name: str, former: Transport, wake: Callable[[], Transport]) -> None:
        self._name = name
        self.wake = wake
        """Restarts the transport, which takes the place of this one; collective."""
        self.user_comm = getattr(former, "user_comm", None)
        self.backend, self.one_node = former.backend, former.one_node

    def run(self, call: Call) -> Any:
        """Restart and run."""
        return self.wake().run(call)

    def start(self, call: Call) -> Work:
        """Restart and start."""
        return self.wake().start(call)

    def start_batch(self, calls: Sequence[AnyMessage]) -> list[Work]:
        """Restart and start."""
        return self.wake().start_batch(calls)

    def plan(self, call: Collective) -> Plan | None:
        """Restart and plan."""
        return self.wake().plan(call)

    def subgroup(
        self, ranks: Sequence[int], next_id: int, timeout: float, error: Exception | None = None
    ) -> tuple[Transport, int]:
        """Refuse: only some ranks call this, but all must restart."""
        raise UsageError(
            f"group {self._name} has been shut down; restart it on all its ranks with "
            "restart_process_group first"
        )

    def synchronize(self, *, on_device: bool = False) -> None:
        """Nothing is under way."""

    def reopen(self) -> Transport:
        """Restart."""
        return self.wake()

    def together_at_end(self) -> bool:
        """Return False: there is no communicator to ask on."""
        return False

    def leave(self, why: str) -> None:
        """No-op: there is no communicator to tell it on."""

    def close(self) -> None:
        """Nothing is open."""
