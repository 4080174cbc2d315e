"""What the arguments of `fleet.init` come to, and what is wrong with them. Nothing is sent here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.fleet.roles import Role, RoleMakerBase, read_role
from hpcdist.fleet.strategy import DistributedStrategy
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.hybrid_options import HybridOptions
from hpcdist.parallel.topology import describe_degrees, infer_degrees, plan_axes
from hpcdist.runtime.process import snapshot


class Plan(NamedTuple):
    """The plan made from the arguments of `init`; the same on all ranks."""

    options: HybridOptions
    degrees: Mapping[str, int]


def plan_of(strategy: DistributedStrategy, keywords: Mapping[str, int | None], size: int) -> Plan:
    """Return what a strategy and the degrees beside it come to on `size` ranks."""
    told = strategy.degrees()
    for axis, degree in keywords.items():
        field = f"hybrid_configs['{axis}_degree']"
        if degree is None:
            continue
        if told[axis] not in (None, -1, degree):
            raise UsageError(f"{axis}={degree!r}, but {field} is {told[axis]}; say it in one place")
        told[axis] = degree
    if keywords["dp"] is not None and not strategy.is_set(("hybrid_configs", "sharding_degree")):
        told["sharding"] = keywords["sharding"]
    return Plan(strategy.freeze(), plan_axes(infer_degrees(size, told), strategy.order()))


def settings_of(plan: Plan) -> list[str]:
    """Return what ranks compare of their plans, setting by setting."""
    degrees = [f"{axis}={degree}" for axis, degree in plan.degrees.items()]
    return [*degrees, *(f"{name}={value!r}" for name, value in vars(plan.options).items())]


def other_options(plan: Plan, strategy: DistributedStrategy, size: int) -> HybridOptions:
    """Return the options of engines by another strategy than the plan's, on the same grid."""
    check_arguments(None, False, strategy)
    told = strategy.degrees()
    if any(each is not None for each in told.values()):
        degrees, made = infer_degrees(size, told), infer_degrees(size, plan.degrees)
        if degrees != made:
            raise UsageError(
                f"the strategy wants {describe_degrees(degrees)}, but fleet.init has made "
                f"{describe_degrees(made)}; give fleet.init that strategy"
            )
    return strategy.freeze()


def check_arguments(role_maker: Any, is_collective: Any, strategy: Any) -> None:
    """Check the types of the arguments of `init`."""
    if not isinstance(is_collective, bool):
        raise UsageError(
            f"`is_collective` should be instance of `bool`, got {is_collective!r}; give strategy "
            "by keyword"
        )
    if role_maker is not None and not isinstance(role_maker, RoleMakerBase):
        raise UsageError(f"`role_maker` should be subclass of `RoleMakerBase`, got {role_maker!r}")
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise UsageError(f"strategy must be a fleet.DistributedStrategy, got {strategy!r}")


def check_roles(
    role_maker: RoleMakerBase | None, group: Group, world: Group, with_servers: bool = False
) -> None:
    """Check that a role maker agrees with what MPI knows of the workers."""
    told = read_role(snapshot()) if role_maker is None else role_maker.roles.role
    serves = told is not Role.WORKER or (role_maker is not None and role_maker.server_num())
    if serves and not with_servers:
        raise UsageError(
            "fleet trains collectively, without parameter servers; leave is_collective out, or "
            "unset TRAINING_ROLE and PADDLE_PSERVERS_IP_PORT_LIST, and let every rank be a worker"
        )
    if role_maker is None:
        return
    named = role_maker.worker_index(), role_maker.worker_num()
    if named not in [(each.rank, each.nranks) for each in (group, world)]:
        raise UsageError(
            f"the role maker says worker {named[0]} of {named[1]}, but this is rank {group.rank} "
            f"of {group.nranks}; leave role_maker out, or let it say what MPI knows"
        )


def level_of(level: Any) -> int:
    """Return the number of a log level, given by its name or its number."""
    names = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "WARN": 30, "ERROR": 40, "CRITICAL": 50}
    if isinstance(level, str) and level.upper() in names:
        return names[level.upper()]
    if isinstance(level, int) and not isinstance(level, bool):
        return level
    raise UsageError(f"a log level is one of {', '.join(names)} or an integer, got {level!r}")
