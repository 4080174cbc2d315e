"""Which ranks work and which only serve: `Placement`, of what each rank has been told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hpcdist.comm.group import Group
from hpcdist.comm.groups import new_group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.session import Slot, require_session
from hpcdist.errors import UsageError
from hpcdist.fleet.roles import PaddleCloudRoleMaker, Role, RoleMakerBase, read_role
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.ps.cluster import CLUSTERS, Cluster
from hpcdist.runtime.process import snapshot
from hpcdist.text import counted


class Job(Protocol):
    """What others ask of the `Fleet` of a session."""

    cluster: Cluster
    peers: Group

    @property
    def grid(self) -> HybridCommunicateGroup:
        """The grid of those that train."""

    def is_server(self) -> bool:
        """Return whether this rank only serves."""


FLEET: Slot[Job | None] = Slot(lambda: None)
"""What `fleet.init` has made."""

_AGES_S = 10 * 365 * 86_400
"""The time limit of a group in which servers wait for what workers do next."""


class Placement(NamedTuple):
    """Ranks of a group, in the order of their numbers as workers and as servers."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]


class Post(NamedTuple):
    """A rank's post: its role, its number in the role, and the numbers of both roles."""

    role: Role
    number: int
    workers: int
    servers: int


def post_of(
    role_maker: RoleMakerBase | None, server_num: int | None, rank: int, size: int
) -> Post | None:
    """Return the post that a role maker, the environment or a number of servers gives this rank.

    Returns:
        None where nobody only serves.

    Raises:
        UsageError: what it is told cannot be.

    """
    if server_num is not None:
        whole = isinstance(server_num, int) and not isinstance(server_num, bool)
        if not whole or not 0 <= server_num < size:
            raise UsageError(
                f"server_num must be an integer from 0 on that leaves a worker of the {size} "
                f"ranks, got {server_num!r}"
            )
        if role_maker is not None:
            raise UsageError("a role maker says who serves; give that or server_num, not both")
        workers = size - server_num
        role = Role.WORKER if rank < workers else Role.SERVER
        number = rank if rank < workers else rank - workers
        return Post(role, number, workers, server_num) if server_num else None
    if role_maker is None:
        environ = snapshot()
        if read_role(environ) is Role.WORKER and not environ.get("PADDLE_PSERVERS_IP_PORT_LIST"):
            return None
        role_maker = PaddleCloudRoleMaker()
    roles = role_maker.roles
    if roles.role is Role.WORKER and not roles.server_endpoints:
        return None
    return Post(roles.role, roles.number, roles.workers, len(roles.server_endpoints))


def place(posts: Sequence[Post | None], ranks: Sequence[int]) -> Placement:
    """Return which ranks work and which serve, from the posts of all ranks. Pure.

    Raises:
        UsageError: two have the same number of a role, one is missing, or has another role.

    """
    found: dict[Role, dict[int, int]] = {Role.WORKER: {}, Role.SERVER: {}}
    for rank, post in enumerate(posts):
        if post is None or post.role not in found:
            told = "nothing" if post is None else post.role.name.lower()
            raise UsageError(
                f"in a job with servers each rank is a worker or a server, but rank {ranks[rank]} "
                f"was given {told}; give all of them role makers, or server_num"
            )
        if post[2:] != (posts[0] or post)[2:]:
            raise UsageError(
                f"rank {ranks[rank]} is set up for {post.workers} workers and {post.servers} "
                f"servers, but rank {ranks[0]} for {(posts[0] or post)[2:]}"
            )
        before = found[post.role].setdefault(post.number, rank)
        if before != rank:
            raise UsageError(
                f"ranks {ranks[before]} and {ranks[rank]} are both {post.role.name.lower()} "
                f"{post.number}; give each its own current_id"
            )
    placement = Placement(
        *(tuple(found[role][number] for number in sorted(found[role])) for role in found)
    )
    wanted = (posts[0] or posts[-1])[2:] if posts else (0, 0)  # type: ignore[index]
    if (len(placement.workers), len(placement.servers)) != tuple(wanted):
        raise UsageError(
            f"the roles name {counted(wanted[0], 'worker')} and {counted(wanted[1], 'server')}, "
            f"but the job has {len(placement.workers)} and {len(placement.servers)}; "
            "start as many ranks"
        )
    return placement


def divided(group: Group, post: Post) -> Cluster:
    """Return the cluster of a job with servers. Collective."""
    posts: list[Post | None] = tell_all("hpcdist.fleet.init", post, group)
    placement = place(posts, group.ranks)
    clusters = require_session()[CLUSTERS]
    before: Cluster | None = clusters.get(group.id)
    if before is not None and (before.workers, before.servers) == placement:
        return before
    if before is not None and before.tables:
        raise UsageError(
            "fleet.init got other servers than before, and there are tables; call "
            "hpcdist.destroy_process_group() before"
        )
    everyone = new_group(group.ranks, timeout=_AGES_S, name="workers and servers")
    made = clusters[group.id] = Cluster(everyone, group.id, *placement)
    return made


def servers_of(cluster: Cluster) -> Group:
    """Return a group of the ranks that serve. Collective over them."""
    return new_group(map(cluster.world_rank, cluster.servers), name="servers")


def workers_of(cluster: Cluster) -> Group:
    """Return a group of the workers, the same every time. Collective over them."""
    ranks = [cluster.world_rank(each) for each in cluster.workers]
    job = require_session()[FLEET]
    if job is not None:
        found: Group = job.grid.group
        if found.ranks == sorted(ranks):
            return found
    return new_group(ranks, name="workers")
