"""What engines on virtual ranks have in common: what is checked, and means of plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.dispatch import decline
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.transport.call.kinds import Kind


def checked_count(virtual_ranks: Any, group: Group, find_unused_parameters: bool) -> int:
    """Return the number of virtual ranks. Local.

    Raises:
        UsageError: it is no integer from the number of real ranks on, or is given with what does
            not go with it.

    """
    count = integer(virtual_ranks, "virtual_ranks", 1)
    if count < group.nranks:
        raise UsageError(
            f"virtual_ranks={count} is less than the {group.nranks} ranks, of which some would "
            "have nothing to do; start at most as many ranks, or have more virtual ones"
        )
    if find_unused_parameters:
        raise UsageError(
            "find_unused_parameters does not go with virtual_ranks, where every parameter gets a "
            "gradient from each virtual rank; let it take part in the loss, with a factor of 0 if "
            "need be, or set requires_grad=False"
        )
    return count


def nan_in(names: list[str]) -> str:
    """Return what is wrong with parameters whose gradients have NaN."""
    return (
        f"the gradient of {', '.join(names[:8])} has NaN; look at the loss and the batch, or clip "
        "gradients and lower the learning rate"
    )


def refuse(group: Group, error: UsageError) -> NoReturn:
    """Raise `error` here, and a `RemoteError` on the ranks that exchange gradients. Collective."""
    if group.nranks > 1:
        decline(group, Kind.ALL_REDUCE, error)
    raise error


def mean_over(values: Iterable[Any], own: range, count: int, group: Group) -> float:
    """Return the mean over all virtual ranks, given a number for each of `own`. Collective."""
    listed = [float(value) for value in values]
    if len(listed) != len(own):
        refuse(
            group,
            UsageError(
                f"there are {len(own)} virtual ranks here, but {len(listed)} values for them; "
                "append one in each round of the loop over parts"
            ),
        )
    everyone = np.zeros(count)
    everyone[own.start : own.stop] = listed
    if group.nranks > 1:
        all_reduce(everyone, group=group)  # of each number but one summand is not 0
    return float(everyone.sum() / count)
