"""`HybridCommunicateGroup`: the grid of hybrid training, with a group along each of its axes.

The places are a `ProcessMesh`; its groups are made when they are first asked for, by the ranks
along that axis alone. `current_grid` is the one that `fleet.init` has made.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast, final

from hpcdist.comm.group import Group, world_of
from hpcdist.comm.making import group_of
from hpcdist.comm.nccl_config import create_nccl_config
from hpcdist.comm.session import Slot, current_session, require_session
from hpcdist.errors import UsageError
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.parallel.grid_picture import picture_of
from hpcdist.parallel.topology import (
    LONG,
    SHORT,
    CommunicateTopology,
    ParallelMode,
    describe_degrees,
    mode_of,
    short_name,
)
from hpcdist.parallel.vocabulary import known

GRID: Slot[HybridCommunicateGroup | None] = Slot(lambda: None)
_ORDERED: Slot[dict[tuple[int, ...], Group]] = Slot(dict)
"""Groups whose ranks do not ascend."""


def current_grid() -> HybridCommunicateGroup | None:
    """Return the grid that `fleet.init` has made on this rank; None before it, or without one.

    Example:
        >>> import hpcdist as dist
        >>> from hpcdist.parallel.hybrid import current_grid
        >>> _ = dist.fleet.init(dp=-1)
        >>> current_grid().get_data_parallel_world_size() == dist.get_world_size()
        True

    """
    session = current_session()
    return None if session is None else session[GRID]


def set_current_grid(grid: HybridCommunicateGroup | None) -> None:
    """Make `grid` what `current_grid` returns on this rank, until `destroy_process_group`."""
    require_session()[GRID] = grid


@final
class HybridCommunicateGroup:
    """The ranks of a group on a grid, and the groups along its axes. Making one is local.

    A group is made when it is first asked for: collective over the ranks of that group alone. A
    group along one axis has its ranks in the order of their coordinates.

    Args:
        topology: the axes, by either name ("mp" or "model"), and the places of the ranks.
        hybrid_configs: accepted for Paddle's sake; NCCL's settings for each axis.
        group: the ranks that are laid out, where the topology counts from 0; None for all.

    Attributes:
        group: the ranks that are laid out.
        nranks: how many they are.
        global_rank: this rank in the world.
        mesh: the grid as a `ProcessMesh`, its axes by their short names.
        stage_id: this rank's coordinate along the pipeline.

    Raises:
        UsageError: the grid has another number of ranks than the group, or this rank is not in it.

    Example:
        >>> import hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> grid = HybridCommunicateGroup(CommunicateTopology(["data", "model"], [1, 1]))
        >>> grid["mp"].nranks, grid.rank("dp")
        (1, 0)

    """

    def __init__(
        self,
        topology: CommunicateTopology,
        hybrid_configs: Any = None,
        *,
        group: Group | None = None,
    ) -> None:
        if not isinstance(topology, CommunicateTopology):
            raise UsageError(f"a grid needs a CommunicateTopology, got {topology!r}")
        session = require_session()
        self.group = world_of(session) if group is None else group
        self._topology = _laid_over(topology, self.group)
        names = [
            SHORT[known(name, SHORT, "hybrid training has no axis")]
            for name in topology.get_hybrid_group_names()
        ]
        self.mesh = ProcessMesh(self._topology.mesh.mesh, names)
        self._degrees = dict(zip(names, self.mesh.sizes, strict=True))
        self.nranks = self.mesh.size
        self.global_rank = session.world.rank
        place: tuple[int, ...] = self._topology.get_coord(self.global_rank)
        self._coordinate = dict(zip(names, place, strict=True))
        self.stage_id = self.rank("pp")
        self._groups: dict[tuple[str, ...], Group] = {}
        self._warn_of_nodes()

    # ---- by the name of an axis

    def __getitem__(self, axis: str) -> Group:
        return self.fused(axis)

    def degree(self, axis: str) -> int:
        """Return how many ranks there are along an axis; 1 for one that the grid does not have.

        Args:
            axis: its name, short or long: "dp" or "data".

        """
        return self._degrees.get(short_name(axis), 1)

    def rank(self, axis: str) -> int:
        """Return this rank's coordinate along an axis; 0 along one that the grid does not have.

        Args:
            axis: its name, short or long: "dp" or "data".

        """
        return self._coordinate.get(short_name(axis), 0)

    @property
    def degrees(self) -> dict[str, int]:
        """How many ranks there are along each axis, by short names in the order of the grid."""
        return dict(self._degrees)

    def ranks(self, *axes: str) -> tuple[int, ...]:
        """Return the world ranks along some axes through this rank, in C order. Local.

        Args:
            axes: names of axes.

        """
        wanted = {short_name(axis) for axis in axes}
        kept = [slice(None) if name in wanted else at for name, at in self._coordinate.items()]
        found = self.mesh.mesh[tuple(kept)]
        return tuple(found.reshape(-1).tolist())

    def fused(self, *axes: str) -> Group:
        """Return the group of the ranks along some axes together, through this rank.

        Its ranks are in C order of the grid. Made by the first call, collective over these ranks;
        groups of equal ranks are one.

        Args:
            axes: names of axes, at least one.

        """
        found = self._groups.get(axes)
        if found is None or found.is_closed:
            found = self._groups[axes] = self._made(axes)
        return found

    def _made(self, axes: tuple[str, ...]) -> Group:
        if not axes:
            raise UsageError('a group needs an axis at least, for example fused("dp", "sep")')
        ranks = self.ranks(*axes)
        if ranks == tuple(sorted(ranks)):
            return ProcessMesh([*ranks]).group
        kept = require_session()[_ORDERED]
        found = kept.get(ranks)
        if found is None or found.is_closed:
            found = kept[ranks] = cast(Group, group_of([*ranks]))
        return found

    # ---- what it looks like

    @property
    def hosts(self) -> list[str]:
        """The node of each rank of the grid, in C order."""
        endpoints = require_session().whereabouts.endpoints
        return [endpoints[rank].rpartition(":")[0] for rank in self._topology.ranks]

    def describe(self) -> str:
        """Return a picture of the grid: which ranks are where, on which nodes. Local."""
        return picture_of(self._degrees, self._topology.ranks, self.hosts)

    def _warn_of_nodes(self) -> None:
        """Warn, on the first rank, where the ranks of mp are not on one node."""
        if self.degree("mp") == 1 or self.global_rank != self._topology.ranks[0]:
            return
        if self.mesh.crosses_nodes[self.mesh.axis("mp")]:
            local = max(self.hosts.count(host) for host in self.hosts)
            warnings.warn(
                f"ranks of mp={self.degree('mp')} are on different nodes, and every layer waits "
                f"for them; let mp be last in the order of the axes and divide the ranks of each "
                f"node (at most {local}). The grid is\n{self.describe()}",
                stacklevel=3,
            )

    def __repr__(self) -> str:
        return f"HybridCommunicateGroup({describe_degrees(self._degrees)})"

    # ---- Paddle's getters

    def get_parallel_mode(self) -> ParallelMode:
        """Return how a model of this grid is wrapped."""
        return mode_of(self._degrees)

    def topology(self) -> CommunicateTopology:
        """Return the topology, in world ranks."""
        return self._topology

    def get_global_rank(self) -> int:
        """Return this rank in the world."""
        return self.global_rank

    def get_data_parallel_rank(self) -> int:
        """Return this rank's coordinate along dp."""
        return self.rank("dp")

    def get_data_parallel_world_size(self) -> int:
        """Return the degree of dp."""
        return self.degree("dp")

    def get_data_parallel_group(self) -> Group:
        """Return the group along dp."""
        return self["dp"]

    def get_data_parallel_group_src_rank(self) -> int:
        """Return the first world rank along dp. Local."""
        return self.ranks("dp")[0]

    def get_model_parallel_rank(self) -> int:
        """Return this rank's coordinate along mp."""
        return self.rank("mp")

    def get_model_parallel_world_size(self) -> int:
        """Return the degree of mp."""
        return self.degree("mp")

    def get_model_parallel_group(self) -> Group:
        """Return the group along mp."""
        return self["mp"]

    def get_model_parallel_group_src_rank(self) -> int:
        """Return the first world rank along mp. Local."""
        return self.ranks("mp")[0]

    def get_stage_id(self) -> int:
        """Return this rank's coordinate along pp."""
        return self.stage_id

    def get_pipe_parallel_rank(self) -> int:
        """Return this rank's coordinate along pp."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the degree of pp."""
        return self.degree("pp")

    def get_pipe_parallel_group(self) -> Group:
        """Return the group along pp."""
        return self["pp"]

    def get_pipe_parallel_group_src_rank(self) -> int:
        """Return the first world rank along pp. Local."""
        return self.ranks("pp")[0]

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is in the first stage of the pipeline."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last stage of the pipeline."""
        return self.stage_id == self.degree("pp") - 1

    @property
    def next_rank(self) -> int:
        """The world rank of the next stage; the last stage is followed by the first."""
        return self.get_rank_from_stage((self.stage_id + 1) % self.degree("pp"))

    @property
    def prev_rank(self) -> int:
        """The world rank of the stage before; the first stage is preceded by the last."""
        return self.get_rank_from_stage((self.stage_id - 1) % self.degree("pp"))

    def get_p2p_groups(self) -> tuple[Group, Group, Group, Group]:
        """Return the groups for messages to and from both neighbours: all are that along pp."""
        pipe = self["pp"]
        return pipe, pipe, pipe, pipe

    def get_rank_from_stage(self, stage_id: int, **kwargs: int) -> int:
        """Return the world rank in a stage at this rank's other coordinates, or those of `kwargs`.

        Args:
            stage_id: the stage of the pipeline, from 0.
            kwargs: coordinates along other axes, by their names.

        """
        told = {"pp": stage_id, **{short_name(axis): at for axis, at in kwargs.items()}}
        names = {SHORT[name]: name for name in self._topology.get_hybrid_group_names()}
        return self._topology.get_rank_from_stage(
            self.global_rank, **{names.get(axis, LONG[axis]): at for axis, at in told.items()}
        )

    def get_sharding_parallel_rank(self) -> int:
        """Return this rank's coordinate along sharding."""
        return self.rank("sharding")

    def get_sharding_parallel_world_size(self) -> int:
        """Return the degree of sharding."""
        return self.degree("sharding")

    def get_sharding_parallel_group(self) -> Group:
        """Return the group along sharding."""
        return self["sharding"]

    def get_sharding_parallel_group_src_rank(self) -> int:
        """Return the first world rank along sharding. Local."""
        return self.ranks("sharding")[0]

    def get_sep_parallel_rank(self) -> int:
        """Return this rank's coordinate along sep."""
        return self.rank("sep")

    def get_sep_parallel_world_size(self) -> int:
        """Return the degree of sep."""
        return self.degree("sep")

    def get_sep_parallel_group(self) -> Group:
        """Return the group along sep."""
        return self["sep"]

    def get_sep_parallel_group_src_rank(self) -> int:
        """Return the first world rank along sep. Local."""
        return self.ranks("sep")[0]

    def get_context_parallel_rank(self) -> int:
        """Return this rank's coordinate along cp."""
        return self.rank("cp")

    def get_context_parallel_world_size(self) -> int:
        """Return the degree of cp."""
        return self.degree("cp")

    def get_context_parallel_group(self) -> Group:
        """Return the group along cp."""
        return self["cp"]

    def get_context_parallel_group_src_rank(self) -> int:
        """Return the first world rank along cp. Local."""
        return self.ranks("cp")[0]

    def get_check_parallel_group(self, sharding: bool = False) -> Group:
        """Return the group of one model: over all axes but dp (or sharding), for norms and NaN.

        Args:
            sharding: leave out the axis of sharding instead of dp.

        """
        left_out = "sharding" if sharding else "dp"
        return self.fused(*(axis for axis in SHORT.values() if axis != left_out))

    def get_dp_sep_parallel_group(self) -> Group:
        """Return the group over dp and sep."""
        return self.fused("dp", "sep")

    def get_pp_mp_parallel_group(self) -> Group:
        """Return the group over pp and mp."""
        return self.fused("pp", "mp")

    def get_dp_cp_parallel_group(self) -> Group:
        """Return the group over dp and cp."""
        return self.fused("dp", "cp")

    def get_cp_mp_parallel_group(self) -> Group:
        """Return the group over cp and mp."""
        return self.fused("cp", "mp")

    def get_cp_sharding_parallel_group(self) -> Group:
        """Return the group over cp and sharding."""
        return self.fused("cp", "sharding")

    def get_moe_sharding_parallel_world_size(self) -> int:
        """Return 0: a grid has no axis for experts."""
        return 0

    def create_fuse_group(
        self, fused_strategy_list: Sequence[str], nccl_config: Any = None
    ) -> tuple[list[int], Group]:
        """Return the ranks and the group over several axes.

        Args:
            fused_strategy_list: names of axes.
            nccl_config: as in `new_group`.

        """
        create_nccl_config(nccl_config)
        group = self.fused(*fused_strategy_list)
        return list(group.ranks), group


def _laid_over(topology: CommunicateTopology, group: Group) -> CommunicateTopology:
    """Return the topology in world ranks; check that it is one of all ranks of `group`."""
    size = topology.world_size()
    if size != group.nranks:
        raise UsageError(
            f"{describe_degrees(topology.degrees)} make {size} places, but group {group.name} has "
            f"{group.nranks} ranks; let the product of the degrees be {group.nranks}"
        )
    if not group.is_member():
        raise UsageError(
            f"rank {group.world_rank} is not in group {group.name} (ranks {group.ranks}), so it "
            "has no place in a grid of it; let the members alone make it"
        )
    if topology.ranks == tuple(range(size)):
        topology = CommunicateTopology(
            topology.get_hybrid_group_names(), [*topology.degrees.values()], ranks=group.ranks
        )
    if set(topology.ranks) != set(group.ranks):
        raise UsageError(
            f"the grid is of the ranks {sorted(topology.ranks)}, but group {group.name} has "
            f"{sorted(group.ranks)}"
        )
    return topology
