"""`VirtualRanks`: what engines on virtual ranks have in common, a step above all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.clipping import Measured
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.overlap import CommStats
from hpcdist.parallel.virtual.exchange import Exchange
from hpcdist.parallel.virtual.heap import keep_freed
from hpcdist.parallel.virtual.memory import Empty, FlatMemory, OwnedMemory
from hpcdist.parallel.virtual.parts import Part, dealt
from hpcdist.parallel.virtual.settings import mean_over, refuse
from hpcdist.parallel.virtual.streams import Streams
from hpcdist.parallel.virtual.tree import Span, TreeSum

Arrays = list[Any]


class _Kept(NamedTuple):
    """What a virtual rank has between two loops of `no_sync`."""

    gradients: Sequence[Any]
    buffers: list[NumpyArray]


class VirtualRanks(DataParallel):
    """A model that trains as V ranks would, with the same bits on any number of real ones.

    Made by `DataParallel` with ``virtual_ranks=V``. A step is a loop over `parts`. In its body this
    process is one virtual rank: with its share of the batch, its random numbers (Python's, NumPy's
    and torch's), and buffers as they were when the loop began. At the end of the loop each
    parameter has the mean of the gradients of all virtual ranks, added in an order that depends on
    V alone, and the buffers are those of virtual rank 0, as they are with `DataParallel`.

    Attributes:
        virtual_ranks: those that live on this rank, a range.
        group: the real ranks.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> model = dist.DataParallel(torch.nn.Linear(8, 1), virtual_ranks=4)
        >>> for part in model.parts(torch.ones(4 * len(model.virtual_ranks), 8)):
        ...     model(part.batch).sum().backward()
        >>> model.weight.grad[0, 0]
        tensor(4.)

    """

    group: Group
    virtual_ranks: range
    _count: int
    _check_nan: bool
    _streams: Streams
    _exchange: Exchange
    _memory: FlatMemory
    _kept: dict[int, _Kept]
    _syncs: bool
    _has_turn: bool
    _owners: Mapping[int, int] | None = None
    """By the ``id`` of parameters the ranks that keep their gradients, where not all do."""

    # ---- what libraries do in their own ways

    @abstractmethod
    def _named(self) -> list[tuple[str, Any]]:
        """Return names and parameters that are trained now."""

    @abstractmethod
    def _lay_out(self, trained: Sequence[Any]) -> FlatMemory:
        """Return memory for the gradients of some parameters."""

    @abstractmethod
    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them.

        Collective where the gradients are sharded.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """

    @abstractmethod
    def _listed_buffers(self) -> Arrays:
        """Return the buffers that there are now."""

    @abstractmethod
    def _fill_buffers(self, contents: Sequence[NumpyArray]) -> None:
        """Write into the buffers; nothing where there are no contents."""

    @abstractmethod
    def _broadcast_buffers(self) -> None:
        """Give the buffers of the first rank to all. Collective."""

    @abstractmethod
    def _taken(self, trained: Sequence[Any]) -> Arrays:
        """Return the gradients, None where there is none; nobody else changes them."""

    @abstractmethod
    def _give(self, trained: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Let parameters have these gradients."""

    @abstractmethod
    def _add(self, trained: Sequence[Any], means: Arrays) -> None:
        """Add to the gradients that there are; None adds nothing."""

    @abstractmethod
    def _wide(self, gradients: Sequence[Any]) -> Arrays:
        """Return gradients in the dtypes in which they are summed."""

    @abstractmethod
    def _summed(self, one: Arrays, other: Arrays) -> Arrays:
        """Add gradients to `one`, and return it."""

    @abstractmethod
    def _flaw(self, named: Sequence[tuple[str, Any]], gradients: Sequence[Any]) -> str | None:
        """Return what is wrong with the gradients of a virtual rank, in words."""

    # ---- a step

    def parts(self, batch: Any = None) -> Iterator[Part]:
        """Iterate over the virtual ranks that live here; then average the gradients. Collective.

        The body of the loop calls the model and runs the backward pass, as often as it likes: the
        gradients of one part add up. It must not communicate, for real ranks may have different
        numbers of parts, and all ranks go to the end of the loop. Several loops before a step of
        the optimizer add up their means.

        Args:
            batch: the rows of all virtual ranks that live here, dealt to them in turn, as a
                `DistributedSampler` gives them: arrays, also in dicts, tuples and lists. Without it
                the body takes the samples of `Part.rank`.

        Raises:
            UsageError: the rows cannot be dealt evenly, or a parameter has got no gradient.
            RemoteError: that is so on another rank.

        """
        named = self._named()
        trained = [each for _, each in named]
        if not self._memory.is_for(trained):
            self._memory = self._lay_out(trained)
            self._kept.clear()
            if len(self.virtual_ranks) > 1:
                keep_freed(self._memory.nbytes)
        before = self._taken(trained)
        sums: TreeSum[Arrays] = TreeSum(self._count, self.virtual_ranks.start, self._summed)
        try:
            yield from self._turns(self._dealt(batch), named, sums)
            if self._syncs:
                fresh = any(each is not None for each in before)
                means = self._memory.means([value for _, value in sums.pieces], fresh=fresh)
                self._broadcast_buffers()
        finally:
            self._has_turn = False
            self._give(trained, before)
        if self._syncs:
            self._add(trained, means)

    def _turns(
        self, batches: Sequence[Any], named: Sequence[tuple[str, Any]], sums: TreeSum[Arrays]
    ) -> Iterator[Part]:
        """Let one virtual rank after the other compute its gradients."""
        error, trained = None, [each for _, each in named]
        at_first, of_first = self._copied_buffers(), list[NumpyArray]()
        with self._streams.turn() as give:
            for rank, batch in zip(self.virtual_ranks, batches, strict=True):
                kept = self._kept.pop(rank, _Kept([None] * len(trained), at_first))
                self._give(trained, kept.gradients)
                self._fill_buffers(kept.buffers)
                give(rank)
                self._has_turn = True
                yield Part(rank, batch)
                self._has_turn = False
                gradients = self._taken(trained)
                of_first = of_first or self._copied_buffers()
                if not self._syncs:
                    self._kept[rank] = _Kept(gradients, self._copied_buffers())
                    continue
                error = error or self._complaint(rank, named, gradients)
                if error is None:
                    sums.push(Span(rank, rank + 1), self._wide(gradients))
        self._fill_buffers(of_first)
        if error is not None:
            refuse(self.group, error)

    def _dealt(self, batch: Any) -> Sequence[Any]:
        count = len(self.virtual_ranks)
        try:
            return [dealt(batch, place, count) for place in range(count)]
        except UsageError as error:
            if self._syncs:
                refuse(self.group, error)
            raise

    def _copied_buffers(self) -> list[NumpyArray]:
        """Return copies of the buffers, where they will be needed."""
        needed = len(self.virtual_ranks) > 1 or not self._syncs or bool(self._kept)
        return [view_of(each).copy() for each in self._listed_buffers()] if needed else []

    def _complaint(
        self, rank: int, named: Sequence[tuple[str, Any]], gradients: Sequence[Any]
    ) -> UsageError | None:
        missing = [name for (name, _), each in zip(named, gradients, strict=True) if each is None]
        if missing:
            return UsageError(
                f"virtual rank {rank} has no gradient for {', '.join(missing[:8])}; run the "
                "backward pass in the body of the loop, and let every parameter take part in the "
                "loss, or set requires_grad=False on what shall not be trained"
            )
        flaw = self._flaw(named, gradients)
        return None if flaw is None else UsageError(f"virtual rank {rank}: {flaw}")

    def mean_of_parts(self, values: Iterable[Any]) -> float:
        """Return the mean of a number that each virtual rank has, such as its loss. Collective.

        Added in the order of the virtual ranks, in float64.

        Args:
            values: one for each virtual rank that lives here, in order: numbers, or arrays of one
                element.

        Raises:
            UsageError: there are more or fewer.

        """
        return mean_over(values, self.virtual_ranks, self._count, self.group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let loops over `parts` in the context keep gradients, without averaging. Local.

        Each virtual rank adds up its own, and the next loop outside averages the sums. That saves
        their exchange, and takes memory for the gradients of all virtual ranks that live here.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    # ---- gradients that each rank keeps of what it owns

    norm_is_collective = True
    """As of a model, not of its parameters: only the model knows where the gradients are."""

    def shard_gradients(self, owners: Mapping[int, int]) -> None:
        """Keep the mean gradients of the parameters that this rank owns, and no others. Local.

        Args:
            owners: ranks in the group, by the ``id`` of the parameters that are trained.

        """
        self._owners = owners
        self._memory = self._lay_out([])

    def _owners_of(self, trained: Sequence[Any]) -> list[int]:
        """Return the owners of parameters.

        Raises:
            UsageError: a parameter has none.

        """
        owners = self._owners or {}
        if any(id(each) not in owners for each in trained):
            raise UsageError(
                "a parameter is trained now that the sharded optimizer has not got; call "
                "group_sharded_parallel when all that will be trained has requires_grad=True"
            )
        return [owners[id(each)] for each in trained]

    def _memory_for(
        self, trained: Sequence[Any], likes: Sequence[Any], limit: int, empty: Empty
    ) -> FlatMemory:
        """Return memory for travelling gradients, by how much of them is kept."""
        if self._owners is None:
            return FlatMemory(trained, likes, self._exchange, limit, empty)
        owners = self._owners_of(trained)
        return OwnedMemory(trained, likes, self._exchange, limit, empty, owners=owners)

    # ---- what DataParallel has, too

    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> NoReturn:
        """Refuse: virtual ranks have equal numbers of batches.

        Args:
            divide_by_initial_world_size: of no effect.
            enable: of no effect.

        Raises:
            UsageError: always.

        """
        raise UsageError(
            "join does not go with virtual_ranks, which have equal numbers of batches: give "
            "DistributedSampler(..., virtual_ranks=V) tail='pad' or 'drop'"
        )

    def apply_collective_grads(self) -> None:
        """No-op: a loop over `parts` ends when its gradients have been averaged."""

    def comm_stats(self) -> CommStats:
        """Return nothing but zeros: the exchange of virtual ranks is not timed. Local."""
        return CommStats()

    # ---- checkpoints

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return what checkpoints save: the model's state, and the streams of virtual ranks.

        Raises:
            UsageError: gradients of `no_sync` wait to be averaged.

        """
        if self._kept:
            raise UsageError(
                "gradients of no_sync wait to be averaged; save the state after a step"
            )
        return {**self.state_dict(), _STREAMS: self._streams.state_dict()}

    def load_sharded_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `sharded_state_dict` has returned, on any number of ranks. Local.

        Args:
            state: as a checkpoint brings it, with what this rank needs of it.

        """
        self.load_state_dict({name: each for name, each in state.items() if name != _STREAMS})
        self._streams.load_state_dict(state[_STREAMS])


_STREAMS = "virtual_ranks"
"""The name of the streams among those of the model's state."""
