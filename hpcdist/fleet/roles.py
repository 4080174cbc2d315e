"""Role makers: who is who in a job, as a program or the environment tells it.

`Roles` is the answer. Which ranks there are MPI knows; `fleet.init` finds out a role maker that
says something else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, final

from hpcdist.comm.parallel_env import ParallelEnv
from hpcdist.errors import UsageError
from hpcdist.integers import integer
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.vocabulary import known
from hpcdist.runtime.process import snapshot


class Role(IntEnum):
    """What a process does in a job."""

    WORKER = 1
    SERVER = 2
    HETER_WORKER = 3
    ALL = 4
    COORDINATOR = 5


class Roles(NamedTuple):
    """Who is who.

    Attributes:
        role: of this process.
        number: its number among those of its role.
        workers: how many workers there are.
        worker_endpoints: ``host:port`` of each; empty where nobody has told.
        server_endpoints: of each parameter server.

    """

    role: Role
    number: int
    workers: int
    worker_endpoints: tuple[str, ...] = ()
    server_endpoints: tuple[str, ...] = ()


class RoleMakerBase(ABC):
    """Base of role makers; see `UserDefinedRoleMaker` and `PaddleCloudRoleMaker`."""

    @property
    @abstractmethod
    def roles(self) -> Roles:
        """The roles of all processes."""

    def worker_num(self) -> int:
        """Return how many workers there are."""
        return self.roles.workers

    def worker_index(self) -> int:
        """Return the number of this process among those of its role."""
        return self.roles.number

    def server_num(self) -> int:
        """Return how many parameter servers there are."""
        return len(self.roles.server_endpoints)

    def is_worker(self) -> bool:
        """Return whether this process trains."""
        return self.roles.role is Role.WORKER

    def is_server(self) -> bool:
        """Return whether this process is a parameter server."""
        return self.roles.role is Role.SERVER

    def is_first_worker(self) -> bool:
        """Return whether this process is the first worker."""
        return self.is_worker() and self.roles.number == 0

    def get_trainer_endpoints(self) -> list[str]:
        """Return ``host:port`` of each worker."""
        return list(self.roles.worker_endpoints)

    def get_pserver_endpoints(self) -> list[str]:
        """Return ``host:port`` of each parameter server."""
        return list(self.roles.server_endpoints)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.roles})"


@final
class UserDefinedRoleMaker(RoleMakerBase):
    """The roles of all processes, given by the program. Local.

    Args:
        is_collective: accepted: without servers the job is collective.
        init_gloo: accepted: MPI connects the ranks.
        kwargs: `current_id`, the number of this process among those of its role; `role`, a `Role`;
            `worker_num`; `worker_endpoints` and `server_endpoints`, lists of ``host:port``.

    Raises:
        UsageError: another keyword, a value of a wrong type, or a number beyond its count.

    Example:
        >>> UserDefinedRoleMaker(is_collective=True, current_id=0, worker_num=2).worker_num()
        2

    """

    def __init__(self, is_collective: bool = False, init_gloo: bool = False, **kwargs: Any) -> None:
        _check_flag("is_collective", is_collective)
        for name in kwargs:
            known(name, _KEYWORDS, "UserDefinedRoleMaker takes no")
        workers = _endpoints("worker_endpoints", kwargs.get("worker_endpoints", ()))
        servers = _endpoints("server_endpoints", kwargs.get("server_endpoints", ()))
        count = integer(kwargs.get("worker_num", max(len(workers), 1)), "worker_num", 1)
        if workers and len(workers) != count:
            raise UsageError(
                f"worker_num={count}, but worker_endpoints has {len(workers)}: {workers}"
            )
        role = _role(kwargs.get("role", Role.WORKER))
        index = integer(kwargs.get("current_id", 0), "current_id", 0)
        self._roles = _checked(Roles(role, index, count, workers, servers))

    @property
    def roles(self) -> Roles:
        """The roles of all processes."""
        return self._roles


_KEYWORDS = ("current_id", "role", "worker_num", "worker_endpoints", "server_endpoints")


@final
class PaddleCloudRoleMaker(RoleMakerBase):
    """The roles of all processes from the environment: Paddle's variables or the launcher's.

    Local. The variables are read when somebody first asks.

    Args:
        is_collective: accepted: without servers the job is collective.
        kwargs: accepted: `init_gloo`, `path` and `http_port`; MPI connects the ranks.

    Example:
        >>> import hpcdist as dist
        >>> roles = dist.fleet.PaddleCloudRoleMaker(is_collective=True)
        >>> _ = dist.fleet.init(roles)

    """

    def __init__(self, is_collective: bool = False, **kwargs: Any) -> None:
        _check_flag("is_collective", is_collective)
        for name in kwargs:
            known(name, ("init_gloo", "path", "http_port"), "PaddleCloudRoleMaker takes no")
        self._roles: Roles | None = None

    @property
    def roles(self) -> Roles:
        """The roles of all processes."""
        if self._roles is None:
            here = ParallelEnv()
            self._roles = read_roles(snapshot(), here.rank, here.world_size)
        return self._roles


_TRAINING_ROLES = {
    "TRAINER": Role.WORKER,
    "PSERVER": Role.SERVER,
    "HETER_TRAINER": Role.HETER_WORKER,
    "COORDINATOR": Role.COORDINATOR,
}


def read_role(environ: Mapping[str, str]) -> Role:
    """Return what this process does, by the variable of Paddle's launcher. Pure."""
    told = environ.get("TRAINING_ROLE", "TRAINER")
    if told not in _TRAINING_ROLES:
        raise UsageError(
            f"TRAINING_ROLE={told!r} is not one of {', '.join(_TRAINING_ROLES)}; unset it"
        )
    return _TRAINING_ROLES[told]


def read_roles(environ: Mapping[str, str], rank: int, size: int) -> Roles:
    """Return who is who by Paddle's variables; without them, by rank and size. Pure.

    Raises:
        UsageError: a variable that is needed is missing, or has a value that cannot be.

    """
    role = read_role(environ)
    workers = _listed(environ.get("PADDLE_TRAINER_ENDPOINTS", ""))
    servers = _listed(environ.get("PADDLE_PSERVERS_IP_PORT_LIST", ""))
    if not {"PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"} & {*environ} and role is Role.WORKER:
        return Roles(role, rank, size, (), servers)
    count = _number(environ, "PADDLE_TRAINERS_NUM", 1)
    if role is Role.SERVER:
        own = f"{environ.get('POD_IP', '')}:{environ.get('PADDLE_PORT', '')}"
        if own not in servers:
            raise UsageError(
                f"POD_IP and PADDLE_PORT say that this server is {own}, which is not one of "
                f"PADDLE_PSERVERS_IP_PORT_LIST: {', '.join(servers) or 'it is empty'}"
            )
        return Roles(role, servers.index(own), count, workers, servers)
    return _checked(Roles(role, _number(environ, "PADDLE_TRAINER_ID", 0), count, workers, servers))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    if name not in environ:
        raise UsageError(
            f"{name} is not set, but other variables of Paddle's launcher are; set it too"
        )
    text = environ[name]
    if not text.isdigit() or int(text) < least:
        raise UsageError(f"{name}={text!r} is not an integer of at least {least}")
    return int(text)


# ---- arguments


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, got {value!r}")


def _role(value: Any) -> Role:
    try:
        return Role(value)
    except ValueError:
        raise UsageError(f"role must be a Role such as Role.WORKER, got {value!r}") from None


def _endpoints(name: str, given: Any) -> tuple[str, ...]:
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, bytes))
    found: Sequence[Any] = tuple(given) if is_list else ()
    if not is_list or not all(isinstance(each, str) and each for each in found):
        raise UsageError(f"{name} must be a list of strings such as ['node1:6170'], got {given!r}")
    return tuple(found)


def _checked(roles: Roles) -> Roles:
    count = len(roles.server_endpoints) if roles.role is Role.SERVER else roles.workers
    if roles.role in (Role.WORKER, Role.SERVER) and roles.number >= count:
        raise UsageError(
            f"this process is {roles.role.name.lower()} {roles.number}, but there are {count} of "
            "them, counted from 0"
        )
    return roles
