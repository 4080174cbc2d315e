"""`Gradients`: the memory of a model's gradients, averaged bucket by bucket.

Each bucket is one flat array, and every gradient a view of it: nothing is copied between the
parameter that is written and the bucket that is sent.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray, view_of
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.memory import empty_near
from hpcdist.errors import ENDS_ALL, UsageError
from hpcdist.parallel.attendance import Attendance
from hpcdist.parallel.averager import Averager, first_failure
from hpcdist.parallel.backward import BackwardPass, Policy
from hpcdist.parallel.compressed.averages import Parts
from hpcdist.parallel.compressed.scheme import Scheme
from hpcdist.parallel.gradient_groups import Bucket
from hpcdist.parallel.nan_watch import NanWatch, places_in
from hpcdist.parallel.parameter import Parameter
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import DONE, Work


@final
class Gradients(Policy):
    """Collective over `group` to create.

    Args:
        parameters: those that are trained, in order of registration.
        buckets: which gradients travel together and over which ranks, in an order that holds for
            all ranks.
        group: the ranks that train together.
        several: whether some gradient, of any rank, is averaged over other ranks than `group`.
        find_unused: parameters without a gradient contribute zeros instead of being an error.
        check_nan: look for NaN before a bucket is sent.
        owner: the model, which frees the parameters when it goes.
        after: called when a backward pass has ended well, with the first rank (of the world)
            that took part; collective.
        scheme: how buckets of the model's own group travel; None for whole.

    Attributes:
        backward: the passes, which call what is here.
        attendance: which ranks have batches.
        stats: see `Averager.stats`.

    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buckets: Sequence[Bucket],
        group: Group,
        *,
        several: bool,
        find_unused: bool,
        check_nan: bool,
        owner: weakref.ref[Any],
        after: Callable[[int], None],
        scheme: Scheme | None = None,
    ) -> None:
        self._parameters, self._buckets = parameters, buckets
        self._group, self._several = group, several
        self._find_unused, self._check_nan = find_unused, check_nan
        self._after = after
        self._averager = Averager(group, scheme=scheme)
        self._flats = [self._flat(bucket) for bucket in buckets]
        self._memories: dict[int, NumpyArray] = {}
        self._parts = [self._parts_of(bucket) for bucket in buckets]
        self._watch_nan = NanWatch(group)
        self.stats = self._averager.stats
        self._works: list[Work] = []
        self._peeked: set[int] = set()
        self.attendance = Attendance(group)
        self._shadowing = False
        indices = [bucket.indices for bucket in buckets]
        self.backward = BackwardPass(parameters, indices, self, owner, in_place=True)
        self._attach()
        self._held: list[int] | None = self._references() if self._averager.inline else None

    def _flat(self, bucket: Bucket) -> NumpyArray:
        """Return memory for the gradients of a bucket.

        In memory that the ranks of a node share a bucket is reduced soonest; adding to gradients
        there is slower while another one is reduced.
        """
        likes = [view_of(self._parameters[index].data) for index in bucket.indices]
        size = sum(like.size for like in likes)
        if not self._averager.inline:
            return np.empty_like(likes[0], shape=(size,))
        return empty_near(likes[0], size, bucket.group)

    def _references(self) -> list[int]:
        """Return how many references there are to the gradients and to the memory they are in."""
        seen: list[Any] = [*self._memories.values()]
        for flat in self._flats:  # a view may refer to any of those that this is a view of
            owner: Any = flat
            while owner is not None:
                seen.append(owner)
                owner = getattr(owner, "base", None)
        return [sys.getrefcount(each) for each in seen]

    def follow_policy(self) -> None:
        """Move to private memory if buckets turn out to travel beside the computing. Local.

        For when no pass is under way. Gradients stay where they are if anybody else has one, for
        `Parameter.grad` is always in the same memory; and so do tensors, which do not tell.
        """
        if self._held is None or self._averager.inline:
            return
        are_arrays = all(isinstance(each.data, np.ndarray) for each in self._parameters)
        if are_arrays and self._references() == self._held:
            self._flats = [self._flat(bucket) for bucket in self._buckets]
            self._attach()
        self._held = None

    def _attach(self) -> None:
        """Make the gradients views of the buckets."""
        self._looked_at = []
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            start = 0
            for index in bucket.indices:
                parameter = self._parameters[index]
                stop = start + int(np.prod(parameter.shape, dtype=np.int64))
                memory = self._memories[index] = flat[start:stop].reshape(parameter.shape)
                parameter.attach(self.backward.slot(index, memory))
                start = stop
            sizes = [self._memories[index].size for index in bucket.indices]
            self._looked_at.append(places_in(sizes))

    def _parts_of(self, bucket: Bucket) -> Parts | None:
        if bucket.group is not self._group:
            return None
        parameters = [self._parameters[index] for index in bucket.indices]
        return tuple((each.name, tuple(each.shape)) for each in parameters)

    def clear(self) -> None:
        """Clear the gradients of all parameters."""
        for parameter in self._parameters:
            parameter.has_grad = False

    # ---- a backward pass

    def begin(self, synced: bool) -> None:
        """See `Policy.begin`."""
        if synced:
            if self.attendance.wanted and not self._shadowing:
                self.attendance.call(active=True)
            self._averager.begin()

    def open(self, bucket: int) -> None:
        """No-op: gradients always have their memory."""

    def send(self, bucket: int, error: UsageError | None) -> UsageError | None:
        """See `Policy.send`."""
        error = error or self._nan_in(bucket)
        flat, group = self._flats[bucket], self._buckets[bucket].group
        factor = self.attendance.factor(group) if self.attendance.wanted else 1
        if factor != 1 and error is None:
            flat *= flat.dtype.type(factor)
        alone = group.nranks == 1 and group is not self._group
        parts = self._parts[bucket]
        average = partial(self._averager.average, flat, error, group=group, parts=parts)
        self._works.append(DONE if alone else average())
        return error

    def read(self, index: int) -> None:
        """Wait for the bucket of the gradient, if that has been sent."""
        reducer = self.backward.reducer
        if not reducer.is_ready(index):
            self._peeked.add(index)
        elif not reducer.is_launched(index):
            self.backward.end()
        else:
            self._await(reducer.bucket_of(index))

    def _await(self, bucket: int) -> None:
        try:
            self._works[bucket].wait()
        except ENDS_ALL:
            self.backward.reset()
            raise
        except Exception as failure:
            self.backward.end(_failed(failure))

    def fill_in(self, missing: Sequence[int]) -> UsageError | None:
        """Make parameters without a gradient contribute zeros, where they may have none."""
        error = self._complaint(missing)
        if error is None:
            for index in missing:
                if not self._parameters[index].has_grad:
                    self._memories[index].fill(0)
        return error

    def finish(self, missing: Sequence[int], error: UsageError | None) -> None:
        """See `Policy.finish`."""
        self._averager.computed()
        failure = first_failure(self._works)
        if self._several:  # buckets of which others know nothing may have failed
            error = error or _failed(failure)
            told = first_failure([self._averager.average(np.zeros(1), error)])
            failure = failure or told
        if failure is not None:
            raise failure
        self._hear_of_nan()
        if self._find_unused:
            self._note_use(missing)
        self._after(self.attendance.active[0])

    def _note_use(self, missing: Sequence[int]) -> None:
        """Mark parameters that any other rank has used as having a gradient here. Collective."""
        used = np.ones(len(self._parameters), np.uint8)
        used[missing] = [self._parameters[index].has_grad for index in missing]
        for group in dict.fromkeys([self._group, *(bucket.group for bucket in self._buckets)]):
            buckets = [bucket.indices for bucket in self._buckets if bucket.group is group]
            own = sorted(index for indices in buckets for index in indices)
            flags = used[own]
            all_reduce(flags, ReduceOp.MAX, group)
            used[own] = flags
        for index in missing:
            self._parameters[index].has_grad = bool(used[index])

    def discard(self) -> None:
        """See `Policy.discard`."""
        self.clear()

    def reset(self) -> None:
        """See `Policy.reset`."""
        self._works.clear()
        self._peeked.clear()

    def shadow(self) -> None:
        """Take part with zeros until no rank has batches left. Collective."""
        self._shadowing = True
        try:
            while self.attendance.call(active=False):
                self.clear()
                self.backward.begin(True)
                self.backward.end()
                self.clear()
        finally:
            self._shadowing = False

    # ---- errors

    def _complaint(self, missing: Sequence[int]) -> UsageError | None:
        names = self.backward.names
        if not (self._find_unused or self._shadowing):
            return UsageError(
                f"the backward pass ended without a gradient for {names(missing)}; give "
                "every parameter one, or build DataParallel with find_unused_parameters=True (with "
                "fleet: strategy.find_unused_parameters = True). "
                "(To change a gradient afterwards write into it: p.grad[...] *= 2)"
            )
        stale = sorted(self._peeked.intersection(missing))
        if stale:
            return UsageError(
                f"the gradient of {names(stale)} was read before the backward pass had "
                "ended; call synchronize() of the DataParallel model after the backward pass"
            )
        return None

    def _look_for_nan(self, bucket: int) -> None:
        """Tell once if some elements of a bucket are NaN here."""
        if self._watch_nan.looks and self._is_nan(bucket):
            indices = self._buckets[bucket].indices
            bad = [index for index in indices if np.isnan(self._memories[index]).any()]
            self._watch_nan.tell(self.backward.names(bad))

    def _hear_of_nan(self) -> None:
        """Be silent from now on if averaging has brought NaN, of which another rank tells."""
        watch = self._watch_nan
        if watch.looks and not self._check_nan and any(map(self._is_nan, range(len(self._flats)))):
            watch.heard()

    def _is_nan(self, bucket: int) -> bool:
        """Return whether some of the elements of a bucket that are looked at are NaN."""
        flat = self._flats[bucket]
        if not isinstance(flat, np.ndarray) or flat.dtype.kind not in "fc":
            return False
        return bool(np.isnan(flat[self._looked_at[bucket]]).any())

    def _nan_in(self, bucket: int) -> UsageError | None:
        if not self._check_nan:
            self._look_for_nan(bucket)
            return None
        if not np.isnan(self._flats[bucket]).any():
            return None
        indices = self._buckets[bucket].indices
        bad = [index for index in indices if np.isnan(self._memories[index]).any()]
        return UsageError(
            f"the gradient of {self.backward.names(bad)} contains NaN; look at the loss and the "
            "learning rate, or unset HPCDIST_CHECK_NAN to train on"
        )


def _failed(failure: Exception | None) -> UsageError | None:
    """Return why a pass cannot go on of which a bucket has failed."""
    if failure is None:
        return None
    return UsageError(f"a bucket of this backward pass has failed: {failure}")
