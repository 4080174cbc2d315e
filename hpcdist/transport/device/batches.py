"""`MessageBatches`: messages on device memory that travel together, for backends that can do so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcdist.arrays.device import DeviceRuntime
from hpcdist.errors import CollectiveTimeout, MismatchError
from hpcdist.transport.call.call import Barrier, Message
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.waiting.work import Work

if TYPE_CHECKING:
    from hpcdist.transport.mpi.context import MpiContext


class MessageBatches(ABC):
    """The batches of one group, each the device's part of a `batch_isend_irecv`."""

    @abstractmethod
    def start(self, messages: Sequence[Message]) -> list[Work]:
        """Begin `messages`, all on device memory; return a work for each."""


def meet(context: MpiContext, runtime: DeviceRuntime) -> None:
    """Bring all ranks of a group to its first batch, which needs only some of them later."""
    try:
        context.agree(Barrier(Kind.BATCH_ISEND_IRECV, device=runtime), enters=True)
    except (CollectiveTimeout, MismatchError) as error:
        error.args = (
            f"{error}. With HPCDIST_DEVICE_BATCHES={context.site.config.device_batches} the first "
            "operation of a group on arrays of a GPU connects all its ranks: let all of them call "
            "it, or let a collective come first",
        )
        raise
