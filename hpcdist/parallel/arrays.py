"""`ArrayDataParallel`: the engine of `DataParallel` for models made of `Parameter`s."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from hpcdist.comm.group import Group
from hpcdist.comm.states import verifying
from hpcdist.config import read_config
from hpcdist.parallel.array_model import ArrayModel
from hpcdist.parallel.attendance import heard_of
from hpcdist.parallel.clipping import Measured, measure_groups
from hpcdist.parallel.compressed.options import scheme_of, states_for
from hpcdist.parallel.gradient_groups import agree, by_group, group_of, plan
from hpcdist.parallel.gradients import Gradients
from hpcdist.parallel.model import DataParallel
from hpcdist.parallel.module_state import (
    broadcast_state,
    buffers_of,
    is_trained,
    parameters_and_buffers,
    states_of,
    trainable,
    unique,
)
from hpcdist.parallel.options import DEFAULT_MB, bucket_limits, training_group
from hpcdist.parallel.overlap import CommStats
from hpcdist.parallel.parameter import Parameter


@final
class ArrayDataParallel(ArrayModel, DataParallel):
    """Trains a model whose ``named_parameters()`` gives names and `Parameter`s.

    Its backward pass is yours: assign ``p.grad`` (or call ``p.accumulate``) for every parameter,
    best for those registered last first. As soon as all gradients of a bucket are assigned, the
    bucket is averaged; with the last gradient the backward pass ends. Made by `DataParallel`.

    Attributes:
        group: the ranks that train together.
        norm_is_collective: whether parameters, of any rank, have groups of their own.
        group_indices: the buckets in the order in which they are sent, as lists of the indices
            of parameters.
        comm_buffer_size: the size of a bucket that was asked for, in bytes.
        find_unused_parameters: as given.

    """

    def __init__(
        self,
        layers: Any,
        strategy: Any = None,
        comm_buffer_size: float = DEFAULT_MB,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: Group | None = None,
        *,
        check_nan: bool | None = None,
        virtual_ranks: None = None,
        seed: int = 0,
        compress: Any = None,
    ) -> None:
        self._layers = layers
        self.group = training_group(group)
        self.comm_buffer_size = 0
        self.find_unused_parameters = bool(find_unused_parameters)
        with verifying(self.group) as alike:
            limits = bucket_limits(self.group, comm_buffer_size, last_comm_buffer_size)
            entries = trainable(layers)
            shared = by_group(entries, self.group)
            states = {each: states_of(listed) for each, listed in shared.items()}
            trained = [_named(name, entry) for name, entry in entries if is_trained(entry)]
            buckets = plan(trained, self.group, limits)
            alike += states.pop(self.group, ())
            alike += states_for(compress, [(each.name, each.data) for each in trained])
        buckets, several = agree(states, buckets, self.group)
        self.comm_buffer_size = int(comm_buffer_size * (1 << 20))
        for each, listed in shared.items():
            broadcast_state(listed, each, each.ranks[0])
        self.norm_is_collective = several
        self._gradients = Gradients(
            trained,
            buckets,
            self.group,
            several=several,
            find_unused=self.find_unused_parameters,
            check_nan=read_config().check_nan if check_nan is None else check_nan,
            owner=weakref.ref(self),
            after=partial(_broadcast_buffers, layers, self.group),
            scheme=scheme_of(compress),
        )
        self._backward = self._gradients.backward
        self.group_indices = [list(bucket.indices) for bucket in buckets]

    # ---- training

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model; whether its gradients will be averaged is decided here."""
        self._backward.forward()
        self._gradients.follow_policy()
        run = self._layers if callable(self._layers) else self._layers.forward
        return run(*inputs, **kwargs)

    def synchronize(self) -> None:
        """End the backward pass: afterwards all gradients are averaged. Collective.

        It ends by itself when every parameter has its gradient; call this where a parameter may
        have none.

        Raises:
            UsageError: a parameter has no gradient on this rank, which `find_unused_parameters`
                would allow.
            RemoteError: that is so on another rank.

        """
        self._backward.synchronize()

    def apply_collective_grads(self) -> None:
        """Alias of `synchronize`."""
        self.synchronize()

    def zero_grad(self) -> None:
        """Clear all gradients; ends a backward pass that is under way."""
        self._backward.synchronize_begun()
        self._gradients.clear()

    @property
    def grad_need_sync(self) -> bool:
        """Whether gradients of forward passes from here on will be averaged."""
        return self._backward.sync

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients of forwards inside the context on this rank only.

        Those that are assigned add to the ones that wait, as with ``p.accumulate``.
        The forward decides: the next backward of a forward outside averages what has gathered.
        Without a forward through the model, the first gradient of a backward pass decides.
        """
        backward, before = self._backward, self._backward.sync
        backward.sync = False
        try:
            yield
        finally:
            backward.sync = before
            backward.end_local()

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True
    ) -> Iterator[None]:
        """Allow ranks to have different numbers of batches. Collective over the group.

        Use no other collectives of the group inside. A rank that has left its loop contributes
        zeros until all have; then every rank gets the parameters of one that was last. Where a rank
        leaves with an error, the others get `RemoteError` in their next batch.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks; if
                False, by the number of ranks that still have batches.
            enable: False makes the context do nothing.

        """
        if not enable:
            yield
            return
        attendance = self._gradients.attendance
        attendance.enter(scales=not divide_by_initial_world_size)
        try:
            with heard_of(self.group, self._backward.call_off):
                yield
                self._backward.synchronize_begun()
                self._gradients.shadow()
        finally:
            attendance.leave()
        entries = unique(parameters_and_buffers(self._layers))
        for group, listed in by_group(entries, self.group).items():
            broadcast_state(listed, group, attendance.last_of(group))

    def measure_gradients(self, norm_type: float) -> Measured:
        """Return the norm of all gradients, and a function that scales them. Collective.

        Each parameter counts once, on however many ranks it is.

        Args:
            norm_type: the power: 2 for the Euclidean norm, ``inf`` for the largest absolute value.

        """
        gradients = [
            (memory, group_of(each, self.group))
            for each in self.parameters()
            if (memory := each.memory()) is not None
        ]
        return measure_groups(gradients, self.group, norm_type)

    def comm_stats(self) -> CommStats:
        """Return the cost of exchanging gradients so far, and the hidden share of it. Local."""
        return self._gradients.stats()

    def __repr__(self) -> str:
        return f"DataParallel({self._layers!r}, {self.group.nranks} ranks)"


def _named(name: str, parameter: Parameter) -> Parameter:
    parameter.name = name
    return parameter


def _broadcast_buffers(layers: Any, group: Group, src: int) -> None:
    """Give the buffers of the model, those it has now, the values of one rank. Collective."""
    if buffers := buffers_of(layers):
        broadcast_state(unique(buffers), group, src)
