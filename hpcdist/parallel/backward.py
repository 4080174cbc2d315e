"""`BackwardPass`: which gradients are there, which buckets have been sent, and when a pass ends.

A parameter tells its `GradSlot` when its gradient is written. As soon as all gradients of a bucket
are there the bucket is sent; with the last one the pass ends by itself. What sending means is up to
a `Policy`: `Gradients` averages buckets, `ShardedGradients` scatters them to the ranks that own
them.

[Note: in step] Whatever goes wrong, each rank sends every bucket once per backward pass: a rank
that cannot send one calls it off, and those after it. So all ranks raise, none hangs, and the
next backward pass begins on all ranks with the first bucket. Only where a rank never comes, or is
dead, the others end their pass at once.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.errors import ENDS_ALL, UsageError
from hpcdist.parallel.parameter import GradSlot, Parameter
from hpcdist.parallel.reducer import Reducer


class Policy(ABC):
    """What is done with gradients; gradients and buckets are counted from 0."""

    @abstractmethod
    def begin(self, synced: bool) -> None:
        """Prepare for a pass, which communicates if `synced`. Collective then."""

    @abstractmethod
    def open(self, bucket: int) -> None:
        """Provide memory for the gradients of a bucket, one of which is about to be written."""

    @abstractmethod
    def send(self, bucket: int, error: UsageError | None) -> UsageError | None:
        """Send a bucket, or call it off with `error`; return why to call off the next ones."""

    @abstractmethod
    def read(self, index: int) -> None:
        """Prepare for gradient `index` to be read before the pass has ended."""

    @abstractmethod
    def fill_in(self, missing: Sequence[int]) -> UsageError | None:
        """Make up for gradients that have not come, or return why that is an error."""

    @abstractmethod
    def finish(self, missing: Sequence[int], error: UsageError | None) -> None:
        """Wait for all that was sent, and raise what went wrong; `error` called buckets off."""

    @abstractmethod
    def discard(self) -> None:
        """Forget all gradients: some have been sent, others have not."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the pass: it has ended, well or not."""


@final
class BackwardPass:
    """The backward passes of one model, one after the other. Local to create.

    Args:
        parameters: those that are trained, in order of registration.
        buckets: which gradients travel together, in the order in which they are sent; the same on
            all ranks.
        policy: what is done with them.
        owner: the model, which frees the parameters when it goes.
        in_place: all gradients always have their memory, so that `Policy.open` has nothing to do.

    Attributes:
        sync: whether the next pass communicates, unless a forward pass has decided.
        reducer: what is ready, and what has been sent.

    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buckets: Sequence[Sequence[int]],
        policy: Policy,
        owner: weakref.ref[Any],
        *,
        in_place: bool,
    ) -> None:
        self._parameters, self._policy = parameters, policy
        self._owner, self._in_place = owner, in_place
        self.reducer = Reducer(buckets)
        self.sync = True
        self._forward: bool | None = None
        self._synced: bool | None = None  # None: no backward pass is under way
        self._error: UsageError | None = None
        self._intercept = bytearray(b"\1" * len(parameters))  # cleared where writing needs no look
        self._adds = bytearray(len(parameters))  # set where a gradient waits to be sent

    def slot(self, index: int, memory: NumpyArray) -> GradSlot:
        """Return the slot of gradient `index`, which lives in `memory` at first."""
        hooks = self._before_write, self._after_write, self._before_read
        return GradSlot(memory, index, self._intercept, *hooks, self._owner, self._adds)

    # ---- what the model says

    def forward(self) -> None:
        """Note a forward pass; it decides whether the next backward pass communicates."""
        self.synchronize_begun()
        self._forward = self.sync

    def synchronize(self) -> None:
        """End the backward pass, also one in which this rank has no gradient at all. Collective."""
        if self._synced is None and self._forward:
            self.begin(True)
        self.synchronize_begun()

    def synchronize_begun(self) -> None:
        """End the backward pass if one is under way. Collective if it communicates."""
        if self._synced:
            self.end()
        self.end_local()

    def end_local(self) -> None:
        """End a backward pass that does not communicate, if one is under way."""
        if self._synced is False:
            self.reset()

    # ---- what the parameters say

    def _before_write(self, index: int, error: UsageError | None) -> None:
        again = self.reducer.is_ready(index)
        # A pass that does not communicate has no end of its own: a second gradient begins the next.
        if self._synced is None or (again and not self._synced):
            self.begin(self.sync if self._forward is None else self._forward)
        elif again:
            error = error or self._second(index)
        if error is not None:
            if self._synced:  # the others wait for our buckets: call them off
                self.end(error)
            raise error
        self._policy.open(self.reducer.bucket_of(index))

    def _after_write(self, index: int) -> None:
        self._intercept[index] = 1  # a second gradient in this pass needs a look again
        if not self._synced:
            self._adds[index] = 1
        buckets = self.reducer.ready(index)
        if buckets and self._synced:
            for bucket in buckets:
                self._send(bucket)
            if self.reducer.is_complete():
                self.end()

    def _before_read(self, index: int) -> None:
        if self._synced:
            self._policy.read(index)

    # ---- a pass

    def begin(self, synced: bool) -> None:
        """Begin a pass. Collective if it communicates."""
        self.reset()
        self._forward = None
        self._policy.begin(synced)
        self._synced = synced
        if self._in_place:  # writing costs no call until a parameter is written twice
            self._intercept[:] = bytes(len(self._intercept))

    def _send(self, bucket: int) -> None:
        try:
            self._error = self._policy.send(bucket, self._error)
        except ENDS_ALL:  # the buckets left would only wait for the same rank
            self._policy.discard()
            self.reset()
            raise

    def end(self, error: UsageError | None = None) -> None:
        """Send what has not been sent, wait for everything, and raise the first error."""
        missing = [] if self.reducer.is_complete() else self.reducer.missing()
        if missing and error is None:
            error = self._policy.fill_in(missing)
        self._error = self._error or error
        try:
            for bucket in self.reducer.rest():
                self._policy.open(bucket)  # one without any gradient may have no memory yet
                self._send(bucket)
            self._policy.finish(missing, self._error)
        except BaseException:
            self._policy.discard()
            raise
        finally:
            self._adds[:] = bytes(len(self._adds))
            self.reset()

    def call_off(self, error: UsageError) -> bool:
        """End a pass that communicates with an error, if one is under way; return whether one was.

        Collective then.
        """
        if not self._synced:
            return False
        with suppress(Exception):  # this one, which it gives to all ranks
            self.end(error)
        return True

    def reset(self) -> None:
        """Forget the pass that is under way, if one is."""
        self._synced = None
        self._error = None
        self._intercept[:] = b"\1" * len(self._intercept)
        self.reducer.restart()
        self._policy.reset()

    # ---- errors

    def _second(self, index: int) -> UsageError:
        others = self.names(self.reducer.missing())
        return UsageError(
            f"parameter {self._parameters[index].name!r} got a second gradient in one backward "
            f"pass, while {others} had none yet; add up gradients before assigning them, or let "
            "each backward pass begin with a call of the model"
        )

    def names(self, indices: Sequence[int]) -> str:
        """Return the names of some parameters, for a message."""
        names = [repr(self._parameters[index].name) for index in indices[:8]]
        more = f" and {len(indices) - 8} more" if len(indices) > 8 else ""
        return f"parameter{'s' if len(indices) > 1 else ''} {', '.join(names)}{more}"
