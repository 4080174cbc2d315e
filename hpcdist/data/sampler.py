"""`DistributedSampler`: the indices of one rank, epoch by epoch, and where it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, final

import numpy as np

from hpcdist.comm.group import Group
from hpcdist.comm.session import resolve_group
from hpcdist.data.shares import (
    IndexArray,
    Shares,
    Tail,
    order_of,
    plan_shares,
    samples_at,
    virtual_ranks_of,
)
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.text import an


@final
class DistributedSampler:
    """Give the indices of this rank's samples, in an order that all ranks agree on. Local.

    An iterable of integers with a length: the ``sampler=`` of a `torch.utils.data.DataLoader`, or
    a loop of your own. Every rank makes one, with the same arguments; nothing is communicated.

    The order of an epoch depends on `seed`, the epoch and the number of samples only, and is dealt
    to the ranks in turn. So the samples of a step are the same for any number of ranks that
    together take as many, and a job can go on in the middle of an epoch with another number of
    ranks (`load_state_dict`).

    Args:
        dataset: an object with a length, or the length itself: the number of samples, the same on
            all ranks. It may be 0.
        shuffle: another order in every epoch; False for the natural order in all.
        seed: an integer of at least 0.
        tail: what to do if the ranks do not divide the samples evenly: ``"pad"`` repeats the first
            ones of the order, so that all ranks have equally many; ``"drop"`` leaves the last ones
            out; ``"keep"`` gives every sample exactly once, so that some ranks have one less.
        group: the ranks that share the samples; None for all.
        num_replicas: with `rank`, instead of a group: the number of shares.
        rank: which of them, from 0.
        virtual_ranks: deal the samples to so many virtual ranks, as in `DataParallel`. This rank
            gets those of its virtual ranks in turn, one for each: what the ``parts`` of the model
            take apart again. Let the loader's batch size be that of one virtual rank, times
            ``len(sampler.virtual_ranks)``.

    Attributes:
        virtual_ranks: the shares that this rank has, a range: its own rank, unless there are
            virtual ones.

    Raises:
        UsageError: a wrong argument; ``tail="keep"`` with virtual ranks; this rank is not in
            `group`; fewer samples than ranks, but not 0, with ``tail="drop"``.

    Example:
        >>> import hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> list(dist.DistributedSampler(4, shuffle=False))
        [0, 1, 2, 3]
        >>> sampler = dist.DistributedSampler(10, shuffle=False, num_replicas=4, rank=1)
        >>> list(sampler)
        [1, 5, 9]

    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        tail: Tail = "pad",
        group: Group | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        virtual_ranks: int | None = None,
    ) -> None:
        self._length = _length_of(dataset)
        self._shuffle = bool(shuffle)
        self._seed = integer(seed, "seed", 0)
        self._tail = tail
        self._rank, self._ranks = _place(group, num_replicas, rank)
        self._size, self.virtual_ranks = _shares_of(
            self._rank, self._ranks, virtual_ranks, self._tail
        )
        self._epoch = 0
        self._begun = 0  # the position of the order at which the latest iteration began
        self._taken = 0  # the samples it has handed out on this rank
        self._ended = False  # it has handed out all
        self._check_everyone_gets_some()

    @property
    def epoch(self) -> int:
        """The current epoch, from 0; set by `set_epoch` and `load_state_dict`."""
        return self._epoch

    def __len__(self) -> int:
        """Return how many samples this rank has in this epoch, or in its rest after a resume."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        return (int(batch[0]) for batch in self.batches(1))

    def batches(self, batch_size: int, *, drop_last: bool = False) -> Iterator[IndexArray]:
        """Iterate over the same indices in arrays of `batch_size`.

        Args:
            batch_size: samples per batch of this rank.
            drop_last: leave out a last batch with fewer.

        Raises:
            UsageError: `batch_size` is not an integer of at least 1; raised before the loop begins.

        """
        batch_size = integer(batch_size, "batch_size", 1)
        return self._hand_out(self._begin(), batch_size, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; call it on every rank before each epoch.

        The epoch at hand stays as it is, so that one that was resumed goes on where it was.
        Without this call every iteration has the same order.

        Args:
            epoch: its number, from 0; with the seed it decides the order.

        """
        epoch = integer(epoch, "epoch", 0)
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    def state_dict(self, consumed: int | None = None) -> dict[str, int]:
        """Return where all ranks stand, in plain numbers; the same on all after a common step.

        It counts what has been *handed out*, the sample in the loop's body included. A DataLoader
        with workers asks for indices ahead of the training: say how far that is by `consumed`.
        The end of an epoch is the start of the next. With ``tail="keep"`` save the state of rank
        0, which is the last to end.

        Args:
            consumed: the samples that this rank has really worked on since its loop over this
                epoch began (or was resumed); default: those handed out.

        Raises:
            UsageError: more `consumed` than have been handed out.

        """
        taken = self._taken if consumed is None else integer(consumed, "consumed", 0)
        if taken > self._taken:
            raise UsageError(
                f"consumed={taken} samples, but only {self._taken} have been handed out on this "
                "rank; count its own samples, from the start of its loop over the epoch"
            )
        here = len(self.virtual_ranks)
        all_ended = taken >= len(self._shares().positions(0)) * here
        if all_ended or (consumed is None and self._ended):
            return {"epoch": self._epoch + 1, "consumed": 0, **self._identity()}
        done = self._begun + taken // here * self._size
        return {"epoch": self._epoch, "consumed": done, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was made, also on another number of ranks.

        Call it on every rank with the same state. The next iteration gives the rest of the epoch.

        Args:
            state: what `state_dict` returned.

        Raises:
            UsageError: it is not a state, or one with another length, seed or `shuffle`; nothing
                has changed then.

        """
        self._check_state(state)
        self._go_to(int(state["epoch"]), int(state["consumed"]))

    def __repr__(self) -> str:
        return f"DistributedSampler({self.in_words()})"

    def in_words(self) -> str:
        """Describe the share: its rank, its dataset, the order, and the position in it."""
        order = f"shuffled with seed {self._seed}" if self._shuffle else "in order"
        return (
            f"{self._length} samples {order}, rank {self._rank} of {self._ranks}, "
            f"epoch {self._epoch}, {self._taken} handed out"
        )

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._begun, self._taken, self._ended = position, 0, False

    def _begin(self) -> IndexArray:
        self._go_to(self._epoch, 0 if self._ended else self._begun)
        order = order_of(self._length, self._seed, self._epoch) if self._shuffle else None
        return samples_at(self._positions(), self._length, order)

    def _hand_out(
        self, samples: IndexArray, batch_size: int, drop_last: bool
    ) -> Iterator[IndexArray]:
        size = len(samples)
        for first in range(0, size - size % batch_size if drop_last else size, batch_size):
            batch = samples[first : first + batch_size]
            self._taken = first + len(batch)
            yield batch
        self._ended = True

    def _shares(self) -> Shares:
        return plan_shares(self._length, self._begun, self._size, self._tail)

    def _positions(self) -> range | IndexArray:
        first, *others = self.virtual_ranks
        shares = self._shares()
        return shares.dealt_to(self.virtual_ranks) if others else shares.positions(first)

    def _identity(self) -> dict[str, int]:
        return {"length": self._length, "seed": self._seed, "shuffle": self._shuffle}

    def _check_state(self, state: Any) -> None:
        own = self._identity()
        if not isinstance(state, Mapping) or not {"epoch", "consumed", *own} <= {*state}:
            raise UsageError(
                f"this is not a state of a sampler: {state!r}; pass what state_dict() returned"
            )
        for name, value in own.items():
            if state[name] != value:
                raise UsageError(
                    f"this state was made with {name}={state[name]!r}, but here it is {value!r}, "
                    "so the rest of the epoch would be another one; use the same dataset, seed "
                    "and shuffle, or start the epoch anew with set_epoch"
                )
        integer(state["epoch"], "the state's epoch", 0)
        if integer(state["consumed"], "the state's consumed", 0) > self._length:
            raise UsageError(
                f"this state has consumed {state['consumed']} samples of {self._length}; pass "
                "what state_dict() returned"
            )

    def _check_everyone_gets_some(self) -> None:
        if not self._shares().positions(0) and self._length:
            raise UsageError(
                f"no rank would get a sample: {self._length} samples go to {self._size} ranks with "
                "tail='drop'; use tail='pad' or 'keep', or fewer ranks"
            )


def _length_of(dataset: Any) -> int:
    if _is_whole(dataset):
        return integer(dataset, "the length of the dataset", 0)
    try:
        return len(dataset)
    except TypeError as error:
        raise UsageError(
            f"a dataset needs a length to be shared among ranks, got {an(type(dataset).__name__)}; "
            "pass an object with len(), or the number of samples"
        ) from error


def _place(group: Group | None, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks that share the samples."""
    if num_replicas is None and rank is None:
        group = resolve_group(group)
        if not group.is_member():
            raise UsageError(
                f"rank {group.world_rank} has no share of the data: it is not a member of group "
                f"{group.name}, whose world ranks are {group.ranks}; call this on members only"
            )
        return group.rank, group.nranks
    if group is not None or num_replicas is None or rank is None:
        raise UsageError(
            f"got num_replicas={num_replicas!r}, rank={rank!r} and group={group!r}; pass a group, "
            "or both of num_replicas and rank, or none of them"
        )
    size, rank = integer(num_replicas, "num_replicas", 1), integer(rank, "rank", 0)
    if rank >= size:
        raise UsageError(f"rank must be less than num_replicas={size}, got {rank}")
    return rank, size


def _shares_of(rank: int, size: int, count: int | None, tail: str) -> tuple[int, range]:
    """Return the number of shares, and those of a rank."""
    if count is None:
        return size, range(rank, rank + 1)
    count = integer(count, "virtual_ranks", size)
    if tail == "keep":
        raise UsageError(
            "tail='keep' gives some virtual ranks a sample less, so that a batch cannot be dealt "
            "to them evenly; use 'pad' or 'drop' with virtual_ranks"
        )
    return count, virtual_ranks_of(rank, size, count)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
