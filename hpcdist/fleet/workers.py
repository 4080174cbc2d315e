"""`UtilBase`: small things that the ranks of a job do together, really across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from hpcdist.comm.collectives import barrier
from hpcdist.comm.group import Group, world_of
from hpcdist.comm.objects import all_gather_object
from hpcdist.comm.reduced import all_reduced
from hpcdist.comm.session import current_session
from hpcdist.comm.states import verify_states, verifying
from hpcdist.errors import UsageError
from hpcdist.fleet.placement import FLEET
from hpcdist.parallel.hybrid import current_grid
from hpcdist.parallel.vocabulary import known
from hpcdist.transport.call.reduction import ReduceOp

_MODES = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX}
_WORLDS = ("worker", "server", "all")


def workers() -> Group:
    """Return the group of the ranks that train; before `fleet.init`, all ranks."""
    session, grid = current_session(), current_grid()
    if session is None:
        raise UsageError("fleet.util needs the workers: call hpcdist.fleet.init() first")
    job = session[FLEET]
    if job is not None and job.is_server():
        raise UsageError(
            "this rank is a parameter server, and this is for workers; call it where "
            "fleet.is_worker()"
        )
    return world_of(session) if grid is None else grid.group


def reduced(
    value: Any,
    mode: Any,
    modes: Mapping[str, ReduceOp],
    group: Group,
    error: UsageError | None = None,
) -> npt.NDArray[Any]:
    """Return the reduction of numbers, nested lists or arrays over a group, as an array.

    Collective. What one rank cannot give (`error`, too) is raised on all.
    """
    array: npt.NDArray[Any] = np.zeros(0)
    try:
        if error is not None:
            raise error
        op = modes[known(mode, modes, "there is no mode")]
        array = _as_array(value)
    except UsageError as reason:
        verify_states((), group, "value", reason)
        raise
    if op in (ReduceOp.SUM, ReduceOp.AVG) and array.dtype == bool:
        array = array.astype(np.int64)  # how many
    return np.asarray(all_reduced(array, op, group))


def _as_array(value: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception:  # lists of different lengths, a tensor with gradients, whatever it is
        array = np.asarray(None)
    if array.dtype.kind not in "biufcV":
        raise UsageError(
            f"numbers, nested lists of equal lengths or arrays can be reduced, got {value!r}"
        )
    return array


@final
class UtilBase:
    """Collectives over the ranks of a job, by Paddle's names; ``fleet.util`` is one of these.

    In `comm_world` "worker" are the ranks that train, "server" those that only serve tables, and
    "all" both: each of them calls the function. Ranks that serve do nothing else between
    `fleet.init_worker` and `fleet.stop_worker`, so "all" is for the time before and after.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> job = dist.fleet.init()
        >>> job.util.all_reduce(np.ones(2), "sum", "worker").tolist()
        [1.0, 1.0]

    """

    def all_reduce(
        self, input: Any, mode: str = "sum", comm_world: str = "worker"
    ) -> npt.NDArray[Any]:
        """Return the sum, smallest or largest of numbers, nested lists or arrays over the ranks.

        Collective. `input` stays as it is; the result is an array of its shape, on all ranks.

        Args:
            input: numbers, nested lists of equal lengths, or an array; of one shape on all ranks.
            mode: "sum", "min" or "max".
            comm_world: "worker", "server" or "all".

        Raises:
            UsageError: another `mode` or `comm_world`, one that this rank is none of, or no
                numbers; on every rank of its role an error.
            MismatchError: shapes or dtypes of two ranks differ.

        Example:
            >>> import hpcdist as dist
            >>> from hpcdist import fleet
            >>> _ = fleet.init()
            >>> fleet.util.all_reduce([[1, 2], [3, 4]], "max")
            array([[1, 2],
                   [3, 4]])

        """
        return reduced(input, mode, _MODES, *_named(comm_world))

    def all_gather(self, input: Any, comm_world: str = "worker") -> list[Any]:
        """Return what each rank has given, in order. Collective.

        Args:
            input: anything that can be pickled.
            comm_world: "worker", "server" or "all".

        """
        found: list[Any] = []
        all_gather_object(found, input, _checked(comm_world))
        return found

    def barrier(self, comm_world: str = "worker") -> None:
        """Wait until all ranks have called this. Collective.

        Args:
            comm_world: "worker", "server" or "all".

        """
        barrier(_checked(comm_world))

    def get_file_shard(self, files: list[str]) -> list[str]:
        """Return this rank's consecutive part of a list of files; the first ranks get one more.

        Collective: the ranks make sure that they have listed the same files.

        Args:
            files: names, the same on every rank.

        Raises:
            UsageError: `files` is not a list of names.
            MismatchError: two ranks have other files; the message has the first that differs.

        """
        group = workers()
        with verifying(group, "file") as alike:
            if not isinstance(files, list) or not all(isinstance(each, str) for each in files):
                raise UsageError(f"files should be a list of file need to be read, got {files!r}")
            alike += [(each, (), "") for each in files]
        return part_of(files, group.rank, group.nranks)

    def get_heter_file_shard(self, files: list[str]) -> list[str]:
        """Alias of `get_file_shard`: all workers of a collective job are of one kind."""
        return self.get_file_shard(files)

    def print_on_rank(self, message: str, rank_id: int) -> None:
        """Print a message on the worker of a number. Local.

        Args:
            message: what is printed.
            rank_id: the number of the worker, from 0.

        """
        group = workers()
        group.get_global_rank(rank_id)  # there is one
        if group.rank == rank_id:
            print(message, flush=True)


def part_of(files: Sequence[str], rank: int, size: int) -> list[str]:
    """Return the files of one rank: a run of them, longer by one on the first ranks.

    Example:
        >>> [part_of("abcde", rank, 3) for rank in range(3)]
        [['a', 'b'], ['c', 'd'], ['e']]

    """
    each, more = divmod(len(files), size)
    first = rank * each + min(rank, more)
    return list(files[first : first + each + (rank < more)])


def _named(comm_world: Any) -> tuple[Group, UsageError | None]:
    """Return the ranks that `comm_world` names; or those who hear why it names none."""
    session: Any = current_session()
    job: Any = None if session is None else session[FLEET]
    served = job is not None and job.cluster.dedicated
    own = "server" if job is not None and job.is_server() else "worker"
    peers: Group = job.peers if served else workers()
    if comm_world not in _WORLDS:
        why = f"comm_world must be one of {', '.join(_WORLDS)}, got {comm_world!r}"
    elif comm_world == own or not (served or comm_world == "server"):
        return peers, None
    elif not served:
        why = "a collective job has no servers; comm_world is 'worker' or 'all'"
    elif comm_world != "all":
        why = f"this rank is a {own}; comm_world is {own!r} or 'all' here, got {comm_world!r}"
    elif job.cluster.begun and not job.cluster.over:
        why = (
            "the servers are serving, and hear of nothing else; call this with comm_world='all' on "
            "all ranks before fleet.init_worker and run_server, or after stop_worker"
        )
    else:
        return cast(Group, session.groups[job.cluster.key]), None
    return peers, UsageError(why)


def _checked(comm_world: Any) -> Group:
    """Return the ranks that `comm_world` names; raise on all of this rank's role if it is none."""
    group, error = _named(comm_world)
    if error is not None:
        verify_states((), group, "value", error)
    return group
