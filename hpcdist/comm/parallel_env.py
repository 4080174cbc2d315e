"""`ParallelEnv`: what a rank can know about itself and its job."""

from __future__ import annotations

from threading import TIMEOUT_MAX
from typing import final

from hpcdist.comm.session import Whereabouts, current_session
from hpcdist.config import read_config
from hpcdist.runtime.place import world_place
from hpcdist.runtime.process import snapshot


@final
class ParallelEnv:
    """The rank, its node and its job (Paddle's `ParallelEnv`).

    Before `init_parallel_env` the launcher's environment answers, afterwards MPI does.

    Example:
        >>> import hpcdist as dist
        >>> env = dist.ParallelEnv()
        >>> env.rank < env.world_size
        True

    """

    def __init__(self) -> None:
        session = current_session()
        if session is not None:
            self._rank, self._size = session.world.rank, session.world.nranks
            self._where, self._timeout_s = session.whereabouts, session.timeout_s
            return
        place = world_place(snapshot())
        self._rank, self._size = place.rank, place.size
        self._where = Whereabouts(
            place.local_rank, place.local_size, place.node_rank, place.nnodes, ()
        )
        self._timeout_s = read_config().timeout_s

    @property
    def rank(self) -> int:
        """Rank in the world."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return self._size

    @property
    def nranks(self) -> int:
        """Same as `world_size`."""
        return self._size

    @property
    def local_rank(self) -> int:
        """Rank on this node."""
        return self._where.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return self._where.local_size

    @property
    def node_rank(self) -> int:
        """Number of this node."""
        return self._where.node_rank

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return self._where.nnodes

    @property
    def device_id(self) -> int:
        """Number of this rank's GPU among those it sees; 0 on CPUs."""
        return self._where.gpu or 0

    @property
    def dev_id(self) -> int:
        """Same as `device_id`."""
        return self.device_id

    @property
    def device_type(self) -> str:
        """Kind of this rank's device: ``"cpu"``, or ``"gpu"`` where one was made current."""
        return "cpu" if self._where.gpu is None else "gpu"

    @property
    def current_endpoint(self) -> str:
        """``host:port`` that names this rank; empty before `init_parallel_env`."""
        return self.trainer_endpoints[self._rank] if self._where.endpoints else ""

    @property
    def trainer_endpoints(self) -> list[str]:
        """The endpoints of all ranks. They are names only: nobody listens there."""
        return list(self._where.endpoints)

    @property
    def nrings(self) -> int:
        """Communicator rings per group: always 1."""
        return 1

    @property
    def pg_timeout(self) -> int:
        """Time limit of operations in milliseconds; a very large number stands for no limit."""
        return int(min(self._timeout_s, TIMEOUT_MAX) * 1000)

    def __repr__(self) -> str:
        where = self._where
        return (
            f"ParallelEnv(rank {self.rank} of {self.world_size}, local rank {where.local_rank} of "
            f"{where.local_size}, node {where.node_rank} of {where.nnodes}, {self.device_type})"
        )
