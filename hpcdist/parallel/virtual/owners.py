"""Which rank steps which parameters, where the optimizer is sharded; pure.

[Note: whole parameters] A rank owns whole parameters, not slices of flat memory as elsewhere: then
whatever an optimizer computes of a parameter (norms of LAMB and LARS, the last elements of a vector
loop) is computed once and by one rank, with the bits it has without sharding.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest

from hpcdist.parallel.buckets import plan_buckets


def plan_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the owner of each parameter: the largest goes first, to who has least.

    Example:
        >>> plan_owners([3, 9, 4, 3], ranks=2)
        [1, 0, 1, 1]

    """
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


def plan_owned_buckets(
    nbytes: Sequence[int], kinds: Sequence[Hashable], owners: Sequence[int], ranks: int, limit: int
) -> list[list[int]]:
    """Return buckets of about `limit` bytes, each with gradients of all owners, in their order.

    Example:
        >>> plan_owned_buckets([8] * 5, ["float32"] * 5, owners=[0, 1, 0, 1, 0], ranks=2, limit=16)
        [[4, 3], [2, 1], [0]]

    """
    found = []
    for kind in dict.fromkeys(kinds):
        queues = []
        for rank in range(ranks):
            own = [at for at, each in enumerate(owners) if each == rank and kinds[at] == kind]
            sizes = [nbytes[index] for index in own]
            planned = plan_buckets(sizes, [kind] * len(own), [limit // ranks])
            queues.append([[own[place] for place in bucket] for bucket in planned])
        for buckets in zip_longest(*queues, fillvalue=[]):
            found.append([index for bucket in buckets for index in bucket])
    return found
