"""`TorchVirtualRanks`: `hpcdist.DataParallel` of a `torch.nn.Module` on virtual ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, final

import torch

from hpcdist.arrays.libraries import view_of
from hpcdist.comm.collectives import broadcast
from hpcdist.comm.group import Group
from hpcdist.comm.states import verifying
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.parallel.buckets import plan_buckets
from hpcdist.parallel.gradient_groups import own_group
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.module_state import broadcast_states
from hpcdist.parallel.options import DEFAULT_MB, training_group
from hpcdist.parallel.overlap import CommStats
from hpcdist.parallel.virtual.exchange import Exchange
from hpcdist.parallel.virtual.parts import Part, dealt
from hpcdist.parallel.virtual.settings import checked_count, mean_over, refuse
from hpcdist.parallel.virtual.streams import GENERATORS, Generator, Streams
from hpcdist.parallel.virtual.tree import Span, TreeSum
from hpcdist.torch.batch_norm import SyncBatchNorm
from hpcdist.torch.module_state import agree
from hpcdist.torch.wrapper import Wrapper

Tensors = list[torch.Tensor]


class _Kept(NamedTuple):
    """What a virtual rank has between two loops of `no_sync`."""

    gradients: list[torch.Tensor | None]
    buffers: Tensors


@final
class TorchVirtualRanks(DataParallel, Wrapper):
    """A module that trains as V ranks would, with the same bits on any number of real ones.

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

    def __init__(
        self,
        layers: torch.nn.Module,
        strategy: Any = None,
        comm_buffer_size: float = DEFAULT_MB,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Group | None = None,
        *,
        check_nan: bool | None = None,
        virtual_ranks: int,
        seed: int = 0,
    ) -> None:
        torch.nn.Module.__init__(self)
        group = training_group(group)
        with verifying(group, "condition") as alike:
            count = checked_count(virtual_ranks, group, find_unused_parameters)
            _check_layers(layers)
            seed = integer(seed, "seed")
            alike.append((f"virtual_ranks={count}, seed={seed}", (), ""))
            alike.append((f"torch.set_num_threads({torch.get_num_threads()})", (), ""))
        self._limit = agree(layers, group, comm_buffer_size, last_comm_buffer_size)
        self._layers, self.group, self._count = layers, group, count
        _broadcast([*layers.parameters(), *layers.buffers()], group)
        self._exchange = Exchange(group, count)
        self.virtual_ranks = self._exchange.own
        self._streams = Streams(self.virtual_ranks, count, seed, _generators())
        self._check_nan = read_config().check_nan if check_nan is None else check_nan
        self._memory = _Memory([], self._exchange, self._limit)
        self._kept: dict[int, _Kept] = {}
        self._syncs, self._has_turn = True, False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module, as the virtual rank whose turn it is.

        Args:
            inputs: of the module, by position.
            kwargs: of the module, by name.

        Raises:
            UsageError: the module trains, and this is no virtual rank's turn.

        """
        if not self._has_turn and self.training and torch.is_grad_enabled():
            raise UsageError(
                "a model on virtual ranks trains in `for part in model.parts(batch):`; elsewhere "
                "call it after model.eval(), or in torch.no_grad()"
            )
        return self._layers(*inputs, **kwargs)

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
        trained = self._trained()
        before = [each.grad for each in trained]
        sums: TreeSum[Tensors] = TreeSum(self._count, self.virtual_ranks.start, _added)
        try:
            yield from self._turns(self._dealt(batch), trained, sums)
            if self._syncs:
                fresh = any(each is not None for each in before)
                means = self._memory.means([value for _, value in sums.pieces], fresh=fresh)
                _broadcast(list(self._layers.buffers()), self.group)
        finally:
            self._has_turn = False
            _set(trained, before)
        if self._syncs:
            _add(trained, means)

    def _turns(
        self, batches: Sequence[Any], trained: Sequence[Any], sums: TreeSum[Tensors]
    ) -> Iterator[Part]:
        """Let one virtual rank after the other compute its gradients."""
        error = None
        at_first, of_first = self._copied_buffers(), list[torch.Tensor]()
        with self._streams.turn() as give:
            for rank, batch in zip(self.virtual_ranks, batches, strict=True):
                kept = self._kept.pop(rank, _Kept([None] * len(trained), at_first))
                _set(trained, kept.gradients)
                _fill(self._layers.buffers(), kept.buffers)
                give(rank)
                self._has_turn = True
                yield Part(rank, batch)
                self._has_turn = False
                gradients = [each.grad for each in trained]
                of_first = of_first or self._copied_buffers()
                if not self._syncs:
                    self._kept[rank] = _Kept(gradients, self._copied_buffers())
                    continue
                error = error or self._complaint(rank, gradients)
                if error is None:
                    sums.push(Span(rank, rank + 1), list(map(_wide, gradients)))
        _fill(self._layers.buffers(), of_first)
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

    def _copied_buffers(self) -> Tensors:
        """Return copies of the buffers, where they will be needed."""
        needed = len(self.virtual_ranks) > 1 or not self._syncs or bool(self._kept)
        return [each.clone() for each in self._layers.buffers()] if needed else []

    def _trained(self) -> list[Any]:
        """Return the parameters that are trained now; lay out memory for their gradients anew."""
        trained = [each for each in self._layers.parameters() if each.requires_grad]
        if not self._memory.is_for(trained):
            self._memory = _Memory(trained, self._exchange, self._limit)
            self._kept.clear()
        return trained

    def _complaint(self, rank: int, gradients: Sequence[Any]) -> UsageError | None:
        named = [pair for pair in self._layers.named_parameters() if pair[1].requires_grad]
        missing = [name for (name, _), each in zip(named, gradients, strict=True) if each is None]
        if missing:
            return UsageError(
                f"virtual rank {rank} has no gradient for {', '.join(missing[:8])}; run the "
                "backward pass in the body of the loop, and let every parameter take part in the "
                "loss, or set requires_grad=False on what shall not be trained"
            )
        if any(each.is_sparse for each in gradients):
            return UsageError("virtual ranks have no sparse gradients; use sparse=False")
        looked_at = zip(named, gradients, strict=True) if self._check_nan else ()
        wrong = [name for (name, _), each in looked_at if bool(each.isnan().any())]
        if wrong:
            return UsageError(
                f"the gradient of {', '.join(wrong[:8])} has NaN on virtual rank {rank}; look at "
                "the loss and the batch, or clip gradients and lower the learning rate"
            )
        return None

    def mean_of_parts(self, values: Iterable[Any]) -> float:
        """Return the mean of a number that each virtual rank has, such as its loss. Collective.

        Added in the order of the virtual ranks, in float64.

        Args:
            values: one for each virtual rank that lives here, in order: numbers, or tensors of one
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

    def register_comm_hook(self, state: Any, hook: Any) -> NoReturn:
        """Refuse: a hook would add in an order of its own.

        Args:
            state: of no effect.
            hook: of no effect.

        Raises:
            UsageError: always.

        """
        raise UsageError(
            "a communication hook does not go with virtual_ranks: it would decide in which order "
            "gradients are added; leave one of them out"
        )

    def apply_collective_grads(self) -> None:
        """No-op: a loop over `parts` ends when its gradients have been averaged."""

    def comm_stats(self) -> CommStats:
        """Return the cost of exchanging gradients so far; nothing of it is hidden. Local."""
        return self._memory.stats

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Alias of `load_state_dict`. Local."""
        return self.load_state_dict(state_dict)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return what checkpoints save: the module's state, and the streams of virtual ranks.

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
        own = {name: value for name, value in state.items() if name != _STREAMS}
        self.load_state_dict(own)
        self._streams.load_state_dict(state[_STREAMS])

    def extra_repr(self) -> str:
        """Return how many ranks train together; torch shows it with the module."""
        return f"{self._count} virtual ranks on {self.group.nranks} ranks"


_STREAMS = "virtual_ranks"
"""The name of the streams among those of the module's state."""


def _check_layers(layers: torch.nn.Module) -> None:
    norms = (torch.nn.SyncBatchNorm, SyncBatchNorm)
    wrong = [name for name, each in layers.named_modules() if isinstance(each, norms)]
    if wrong:
        raise UsageError(
            f"{wrong[0] or 'the module'} is a SyncBatchNorm, whose statistics are those of all "
            "ranks at once, while virtual ranks compute one after the other; use BatchNorm, each "
            "virtual rank with its own statistics, or GroupNorm"
        )
    apart = [name for name, each in layers.named_parameters() if own_group(each) is not None]
    if apart:
        raise UsageError(
            f"{apart[0]} has an hpcdist_group, so not all ranks have it; virtual ranks need every "
            "parameter on all ranks: take the group away, or leave virtual_ranks out"
        )


def _broadcast(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Give tensors the contents that they have on the first rank. Collective."""
    if group.nranks == 1 or not tensors:
        return
    own = [each.detach() for each in tensors]
    broadcast_states([each for each in own if each.device.type == "cpu"], group, group.ranks[0])
    for each in own:
        if each.device.type != "cpu":
            broadcast(each, group.ranks[0], group)


# ---- gradients


def _set(trained: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient


def _add(trained: Sequence[Any], means: Tensors) -> None:
    """Add the means to the gradients that there are."""
    for parameter, mean in zip(trained, means, strict=True):
        if parameter.grad is None:
            parameter.grad = mean
        else:
            parameter.grad.add_(mean)


def _fill(buffers: Iterable[torch.Tensor], contents: Tensors) -> None:
    for buffer, content in zip(buffers, contents, strict=False):
        buffer.copy_(content)


_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the dtype in which it is added."""
    return gradient.to(_SUMMED_IN.get(gradient.dtype, gradient.dtype))


def _added(one: Tensors, other: Tensors) -> Tensors:
    torch._foreach_add_(one, other)
    return one


@final
class _Memory:
    """Flat memory in which gradients travel, bucket by bucket.

    [Note: aligned gradients] Each begins at a multiple of 64 bytes, so that norms and optimizers
    find it at the same places of vectors, in whatever bucket it is.
    """

    def __init__(self, trained: Sequence[Any], exchange: Exchange, limit: int) -> None:
        self._trained, self._exchange = [*trained], exchange
        like = [each.detach().new_empty(0, dtype=_wide(each[:0]).dtype) for each in trained]
        nbytes = [part.numel() * each.itemsize for part, each in zip(trained, like, strict=True)]
        kinds = [(each.dtype, each.device) for each in like]
        self._buckets = plan_buckets(nbytes, kinds, [limit])
        self._like = like
        self._flats = [self._flat(bucket) for bucket in self._buckets]
        self.stats = CommStats()

    def is_for(self, trained: Sequence[Any]) -> bool:
        """Return whether the gradients are those of these parameters."""
        known = self._trained
        return len(known) == len(trained) and all(map(lambda a, b: a is b, known, trained))

    def means(self, pieces: Sequence[Tensors], *, fresh: bool) -> Tensors:
        """Return the mean gradients, given this rank's sums. Collective.

        Args:
            pieces: the sums of the spans that are this rank's alone.
            fresh: the last means are in use still.

        """
        found: dict[int, torch.Tensor] = {}
        for bucket, kept in zip(self._buckets, self._flats, strict=True):
            flats = [self._flat(bucket) for _ in pieces]
            if not fresh:
                flats[0] = kept
            for flat, piece in zip(flats, pieces, strict=True):
                torch._foreach_copy_(self._views(bucket, flat), [piece[index] for index in bucket])
            self._exchange.mean([view_of(each) for each in flats], view_of(flats[0]))
            found |= zip(bucket, self._views(bucket, flats[0]), strict=True)
        return [_shaped_as(each, found[index]) for index, each in enumerate(self._trained)]

    def _flat(self, bucket: Sequence[int]) -> torch.Tensor:
        size = sum(self._room(index) for index in bucket)
        return self._like[bucket[0]].new_empty(self._exchange.padded(size))

    def _room(self, index: int) -> int:
        step: int = 64 // self._like[index].itemsize
        return step * -(-int(self._trained[index].numel()) // step)

    def _views(self, bucket: Sequence[int], flat: torch.Tensor) -> Tensors:
        views, start = [], 0
        for index in bucket:
            like = self._trained[index]
            views.append(flat[start : start + like.numel()].view(like.shape))
            start += self._room(index)
        return views


def _shaped_as(parameter: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the dtype and the layout of its parameter."""
    if mean.dtype == parameter.dtype and parameter.is_contiguous():
        return mean
    return torch.empty_like(parameter, requires_grad=False).copy_(mean)


# ---- torch's generators


def _generators() -> dict[str, Generator]:
    of_gpu = {"torch on the GPU": _generator("cuda")} if torch.cuda.is_available() else {}
    return {**GENERATORS, "torch": _generator("cpu"), **of_gpu}


def _generator(device: str) -> Generator:
    read, write = {
        "cpu": (torch.get_rng_state, torch.set_rng_state),
        "cuda": (torch.cuda.get_rng_state, torch.cuda.set_rng_state),
    }[device]

    def swap(state: torch.Tensor) -> torch.Tensor:
        before: torch.Tensor = read()
        write(state)
        return before

    return Generator(
        lambda seed: torch.Generator(device).manual_seed(seed).get_state(),
        swap,
        lambda state: state.numpy().tobytes(),
        lambda content: torch.frombuffer(bytearray(content), dtype=torch.uint8),
    )
