"""`Averager`: the buckets of one model's gradients, averaged over the ranks of a group.

Every rank sends each bucket exactly once per backward pass, in order, whatever happens: a rank
that cannot send one calls it off with an error, which reaches all ranks, and a failed bucket
does not keep a rank from sending the next. So after an error all ranks are still in step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, thread_time
from typing import Any, final

from hpcdist.comm import describe
from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.dispatch import dispatch
from hpcdist.comm.group import Group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.tensor_lists import cannot
from hpcdist.config import read_config
from hpcdist.errors import ENDS_ALL, UsageError
from hpcdist.parallel.compressed.averages import CompressedAverages, Parts
from hpcdist.parallel.compressed.scheme import Scheme
from hpcdist.parallel.overlap import CommStats, OverlapPolicy, core_share
from hpcdist.runtime.process import my_cores
from hpcdist.transport.call.call import Call, Reduction
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
from hpcdist.transport.waiting.work import DONE, Known, Work

Describe = Callable[[Group, Any], Call]
Then = Callable[[BaseException | None], None]
BytesEnded = Callable[[int, BaseException | None], None]
Issue = Callable[[bool, BytesEnded], Work]
"""Runs an average if its first argument is true, else starts it."""


@final
class Averager:
    """Averages buckets over `group`; collective to create.

    `describe_mean` describes the averaging of one bucket, by an operation of `kind`, for engines
    whose buckets are more than arrays. Buckets whose parts are told travel by `scheme`, if there is
    one.
    """

    def __init__(
        self,
        group: Group,
        describe_mean: Describe | None = None,
        kind: Kind = Kind.ALL_REDUCE,
        scheme: Scheme | None = None,
    ) -> None:
        self._group = group
        self._describe_mean = describe_mean or _mean
        self._kind = kind
        self._cores = _cores(group)
        self._overlap = self._new_policy()
        self._compressed: CompressedAverages | None = None
        if scheme is not None and group.nranks > 1:
            self._compressed = CompressedAverages(group, scheme)

    def _new_policy(self) -> OverlapPolicy:
        overlap = read_config().overlap if self._group.nranks > 1 else "never"
        return OverlapPolicy(self._cores, overlap)

    def afresh(self) -> Averager:
        """Return that of another model on the same ranks, which has averaged nothing. Local."""
        twin = copy.copy(self)
        twin._overlap = self._new_policy()
        if self._compressed is not None:
            twin._compressed = self._compressed.afresh()
        return twin

    @property
    def inline(self) -> bool:
        """Whether buckets are averaged at once, not on a thread; for this rank, and for now."""
        return self._overlap.inline

    def begin(self) -> None:
        """Call at the first gradient of a backward pass whose gradients are averaged. Local."""
        self._overlap.begin()

    def average(
        self,
        bucket: Any,
        error: UsageError | None = None,
        then: Then | None = None,
        group: Group | None = None,
        parts: Parts | None = None,
    ) -> Work:
        """Replace `bucket`, an array, by its mean over the ranks; collective.

        Args:
            bucket: as in `all_reduce`.
            error: why this rank cannot send the bucket; raised by every rank's `Work.wait`.
            then: called once the bucket has arrived, with what went wrong or None; from another
                thread, if the exchange is overlapped.
            group: other ranks than those of the model, to average this bucket over.
            parts: what is in the bucket, an array of NumPy's, if it is to travel by the scheme:
                on all ranks or on none.

        Returns:
            The work, which may have ended already; its `wait` raises what went wrong.

        Raises:
            CollectiveTimeout: a rank did not come (from here, or from `Work.wait`).
            RankFailure: a rank has died; likewise.

        """
        launched = perf_counter()
        if self._compressed is not None and parts is not None:
            issue: Issue = partial(self._compressed.dispatch, bucket, parts, error)
        else:
            issue = partial(self._issue, group or self._group, bucket, error)
        # Each rank decides for itself: both ways issue the same operations in the same order.
        if not self._overlap.inline:
            return issue(False, partial(self._ended, launched, then))
        failure = self._average_now(issue, launched)
        if then is not None:
            then(failure)
        return DONE if failure is None else Failed(failure)

    def _issue(
        self, group: Group, bucket: Any, error: UsageError | None, sync_op: bool, ended: BytesEnded
    ) -> Work:
        if sync_op and error is None and self._describe_mean is _mean:
            _mean_now(group, bucket, ended)
            return DONE
        return dispatch(group, sync_op, self._describe, bucket, error, ended)

    def _average_now(self, issue: Issue, launched: float) -> Exception | None:
        """Average a bucket before returning; return what went wrong."""
        cpu = thread_time()
        try:
            issue(True, partial(self._ended, launched, None))
        except ENDS_ALL:
            raise
        except Exception as failure:  # kept, so that this rank goes on to send the next bucket
            return failure
        finally:
            self._overlap.paused(perf_counter() - launched, thread_time() - cpu)
        return None

    def computed(self) -> None:
        """Call when the backward pass has computed everything, before waiting. Local."""
        self._overlap.computed()

    def stats(self) -> CommStats:
        """Return what the exchange has cost so far. Local."""
        return self._overlap.stats()

    def _describe(self, group: Group, bucket: Any, error: UsageError | None, ended: Any) -> Call:
        if error is None:
            call = self._describe_mean(group, bucket)
        else:
            call = cannot(self._kind, group, error)
        if isinstance(call, Reduction) and call.kind is Kind.ALL_REDUCE:
            call = call._replace(beside=not self._overlap.inline)
        nbytes = 0 if call.recv is None else call.recv.nbytes
        return call._replace(ended=partial(ended, nbytes))

    def _ended(
        self, launched: float, then: Then | None, nbytes: int, error: BaseException | None
    ) -> None:
        self._overlap.record_transfer(launched, perf_counter(), nbytes)
        if then is not None:
            then(error)


def _mean(group: Group, bucket: Any) -> Call:
    return describe.all_reduce(group, bucket, ReduceOp.AVG)


def _mean_now(group: Group, bucket: Any, ended: BytesEnded) -> None:
    """Do what `_mean` describes, in one compiled call where that can be."""
    try:
        all_reduce(bucket, ReduceOp.AVG, group)
    except BaseException as error:
        ended(bucket.nbytes, error)
        raise
    ended(bucket.nbytes, None)


def _cores(group: Group) -> float:
    """Return this rank's share of its node's cores; collective over `group`."""
    places = tell_all("a look at the cores of the node", my_cores(), group)
    node, mine = places[group.rank]
    return core_share(mine, [cores for host, cores in places if host == node])


@final
class Failed(Work):
    """An operation that failed before its function returned."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, timeout: Any = None) -> bool:
        """Raise what went wrong."""
        raise self._error

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def known(self) -> Known:
        """See `Work.known`."""
        return Known("operation", True, self._error)


def wait_all(works: Sequence[Work]) -> None:
    """Wait for all `works`; then raise the first error, if there was one."""
    failure = first_failure(works)
    if failure is not None:
        raise failure


def first_failure(works: Sequence[Work]) -> Exception | None:
    """Wait for all `works`; return the first error.

    Raises:
        CollectiveTimeout: at once.
        RankFailure: at once.

    """
    first: Exception | None = None
    for work in works:  # all of them, also after an error: their memory is in use until then
        try:
            if work is not DONE:
                work.wait()
        except ENDS_ALL:
            raise
        except Exception as error:
            first = first or error
    return first
