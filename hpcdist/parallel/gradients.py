"""`Gradients`: the memory of a model's gradients, and the backward passes that fill it.

Each bucket is one flat array, and every gradient a view of it: nothing is copied between the
parameter that is written and the bucket that is sent. When all gradients of a bucket are there,
`Averager` averages it; when all buckets have been sent, the backward pass ends by itself.

[Note: in step] Whatever goes wrong, each rank sends every bucket once per backward pass: a rank
that cannot send one calls it off, and those after it. So all ranks raise, none hangs, and the
next backward pass begins on all ranks with the first bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.comm.collectives import all_gather, all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty_near
from hpcdist.errors import CollectiveTimeout, UsageError
from hpcdist.parallel.averager import Averager, wait_all
from hpcdist.parallel.buckets import plan_buckets
from hpcdist.parallel.parameter import GradSlot, Parameter
from hpcdist.parallel.reducer import Reducer
from hpcdist.transport.base import Work
from hpcdist.transport.reduction import ReduceOp


@final
class Gradients:
    """Collective over `group` to create.

    Args:
        parameters: those that are trained, in order of registration.
        group: the ranks to average over.
        limits: bytes, as in `plan_buckets`.
        find_unused: parameters without a gradient contribute zeros instead of being an error.
        check_nan: look for NaN before a bucket is sent.
        owner: the model, which frees the parameters when it goes.
        after: called when a backward pass has ended well, with the first rank (of the world)
            that took part; collective.

    Attributes:
        sync: whether the next backward pass averages, unless a forward pass has decided.
        joining: ranks may have no more batches; every backward pass asks who is left.
        scale_to_active: divide sums by the number of ranks that are left.

    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        group: Group,
        limits: Sequence[int],
        *,
        find_unused: bool,
        check_nan: bool,
        owner: weakref.ref[Any],
        after: Callable[[int], None],
    ) -> None:
        self._parameters = parameters
        self._group = group
        self._find_unused, self._check_nan = find_unused, check_nan
        self._after = after
        self.sync, self.joining, self.scale_to_active = True, False, False
        likes = [view_of(each.data) for each in parameters]
        self.buckets = plan_buckets(
            [like.nbytes for like in likes],
            [(dtype_row(like.dtype).name, device_runtime_of(like)) for like in likes],
            limits,
        )
        self._reducer = Reducer(self.buckets)
        self._flats: list[NumpyArray] = []
        self._memories: list[NumpyArray] = [likes[0]] * len(likes)
        for bucket in self.buckets:
            self._lay_out(bucket, likes)
        self._averager = Averager(group)
        self._intercept = bytearray(
            b"\1" * len(parameters)
        )  # cleared while a gradient may just come
        for index, parameter in enumerate(parameters):
            memory = self._memories[index]
            hooks = self._before_write, self._after_write, self._before_read
            parameter.attach(GradSlot(memory, index, self._intercept, *hooks, owner))
        self._forward: bool | None = None
        self._synced: bool | None = None  # None: no backward pass is under way
        self._works: list[Work] = []
        self._error: UsageError | None = None
        self._peeked: set[int] = set()
        self._active: Sequence[int] = group.ranks
        self.stats = self._averager.stats

    def _lay_out(self, bucket: Sequence[int], likes: Sequence[NumpyArray]) -> None:
        sizes = [likes[index].size for index in bucket]
        flat = empty_near(likes[bucket[0]], sum(sizes), self._group)
        self._flats.append(flat)
        start = 0
        for index, size in zip(bucket, sizes, strict=True):
            self._memories[index] = flat[start : start + size].reshape(likes[index].shape)
            start += size

    # ---- what the model says

    def forward(self) -> None:
        """Note a forward pass; it decides whether the next backward pass averages."""
        self.synchronize_begun()
        self._forward = self.sync

    def synchronize(self) -> None:
        """End the backward pass, also one in which this rank has no gradient at all. Collective."""
        if self._synced is None and self._forward:
            self._begin()
        self.synchronize_begun()

    def synchronize_begun(self) -> None:
        """End the backward pass if one is under way. Collective if it averages."""
        if self._synced:
            self._end()
        elif self._synced is not None:
            self._reset()

    def end_local(self) -> None:
        """End a backward pass that does not average, if one is under way."""
        if self._synced is False:
            self._reset()

    def clear(self) -> None:
        """Let no parameter have a gradient."""
        for parameter in self._parameters:
            parameter.has_grad = False

    # ---- what the parameters say

    def _before_write(self, index: int, error: UsageError | None) -> None:
        if self._synced is None:
            self._begin()
        elif self._reducer.is_ready(index):
            if not self._synced:
                self._begin()
            else:
                error = error or self._second(index)
        if error is not None:
            if self._synced:
                self._end(error)
            raise error

    def _after_write(self, index: int) -> None:
        self._intercept[index] = 1
        buckets = self._reducer.ready(index)
        if buckets and self._synced:
            for bucket in buckets:
                self._send(bucket)
            if self._reducer.is_complete():
                self._end()

    def _before_read(self, index: int) -> None:
        if not self._synced:
            return
        if not self._reducer.is_ready(index):
            self._peeked.add(index)
        elif not self._reducer.is_launched(index):
            self._end()
        else:
            self._await(self._reducer.bucket_of(index))

    # ---- a backward pass

    def _begin(self) -> None:
        self._reset()
        synced = self.sync if self._forward is None else self._forward
        self._forward = None
        if synced:
            if self.joining:
                self._active = self._roll_call(active=True)
            self._averager.begin()
        self._synced = synced
        self._intercept[:] = bytes(len(self._intercept))

    def _send(self, bucket: int, error: UsageError | None = None) -> None:
        error = self._error = self._error or error or self._nan_in(bucket)
        flat = self._flats[bucket]
        if error is None and self.scale_to_active and len(self._active) < self._group.nranks:
            flat *= flat.dtype.type(self._group.nranks / len(self._active))
        try:
            self._works.append(self._averager.average(flat, error))
        except CollectiveTimeout:
            self._reset()
            raise

    def _await(self, bucket: int) -> None:
        try:
            self._works[bucket].wait()
        except CollectiveTimeout:
            self._reset()
            raise
        except Exception as failure:
            self._end(UsageError(f"a bucket of this backward pass has failed: {failure}"))

    def _end(self, error: UsageError | None = None, *, shadow: bool = False) -> None:
        """Send what has not been sent, wait for everything, and raise the first error."""
        missing = [] if self._reducer.is_complete() else self._reducer.missing()
        if missing and error is None:
            error = self._complaint(missing, allowed=self._find_unused or shadow)
        for index in missing:
            if not self._parameters[index].has_grad:
                self._memories[index].fill(0)
        try:
            for bucket in self._reducer.rest():
                self._send(bucket, error)
            self._averager.computed()
            wait_all(self._works)
            if self._find_unused:
                self._note_use(missing)
            self._after(self._active[0])
        except BaseException:
            self.clear()  # some are averaged, others are not
            raise
        finally:
            self._reset()

    def _note_use(self, missing: Sequence[int]) -> None:
        """Let those that another rank has used have a gradient here, too. Collective."""
        used = np.ones(len(self._parameters), np.uint8)
        used[missing] = [self._parameters[index].has_grad for index in missing]
        all_reduce(used, ReduceOp.MAX, self._group)
        for index in missing:
            self._parameters[index].has_grad = bool(used[index])

    def _reset(self) -> None:
        self._synced = None
        self._error = None
        self._works.clear()
        self._peeked.clear()
        self._reducer.restart()
        self._intercept[:] = b"\1" * len(self._intercept)

    # ---- uneven numbers of batches

    def _roll_call(self, *, active: bool) -> list[int]:
        """Return the world ranks that still have batches. Collective."""
        flags = np.zeros(self._group.nranks, np.uint8)
        all_gather(flags, np.array([active], np.uint8), self._group)
        return [self._group.ranks[rank] for rank in np.flatnonzero(flags)]

    def leave_join(self) -> None:
        """Count on all ranks again."""
        self.joining, self.scale_to_active = False, False
        self._active = self._group.ranks

    def shadow(self) -> int:
        """Take part with zeros until no rank has batches left; return one that was last."""
        while active := self._roll_call(active=False):
            self._reset()
            self._active = active
            self.clear()
            self._averager.begin()
            self._end(shadow=True)
            self.clear()
        return self._active[0]

    # ---- errors

    def _second(self, index: int) -> UsageError:
        others = self._names(self._reducer.missing())
        return UsageError(
            f"parameter {self._parameters[index].name!r} got a second gradient in one backward "
            f"pass, while {others} had none yet; add up gradients before assigning them, or let "
            "each backward pass begin with a call of the model"
        )

    def _complaint(self, missing: Sequence[int], *, allowed: bool) -> UsageError | None:
        if not allowed:
            return UsageError(
                f"the backward pass ended without a gradient for {self._names(missing)}; give "
                "every parameter one, or build DataParallel with find_unused_parameters=True. "
                "(To change a gradient afterwards write into it: p.grad[...] *= 2)"
            )
        stale = sorted(self._peeked.intersection(missing))
        if stale:
            return UsageError(
                f"the gradient of {self._names(stale)} was read before the backward pass had "
                "ended; call synchronize() of the DataParallel model after the backward pass"
            )
        return None

    def _nan_in(self, bucket: int) -> UsageError | None:
        if not self._check_nan or not np.isnan(self._flats[bucket]).any():
            return None
        bad = [index for index in self.buckets[bucket] if np.isnan(self._memories[index]).any()]
        return UsageError(
            f"the gradient of {self._names(bad)} contains NaN; look at the loss and the learning "
            "rate, or unset HPCDIST_CHECK_NAN to train on"
        )

    def _names(self, indices: Sequence[int]) -> str:
        names = [repr(self._parameters[index].name) for index in indices[:8]]
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        return f"parameter{'s' if len(indices) > 1 else ''} {', '.join(names)}{more}"
