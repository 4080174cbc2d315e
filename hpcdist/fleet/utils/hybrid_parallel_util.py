"""Paddle's ``fleet.utils.hybrid_parallel_util``: gradients and weights that are shared by hand."""

from typing import TYPE_CHECKING, Any

from hpcdist.fleet.absent import refusing
from hpcdist.parallel.averages import fused_allreduce_gradients as fused_allreduce_gradients
from hpcdist.parallel.hybrid import HybridCommunicateGroup
from hpcdist.parallel.module_state import sync_params_buffers


def broadcast_mp_parameters(
    model: Any, hcg: HybridCommunicateGroup, fuse_params: bool = True
) -> None:
    """Make the weights equal that ranks along mp have whole. Collective over them.

    Args:
        model: anything with ``named_parameters()``.
        hcg: the grid.
        fuse_params: accepted: many arrays always travel together.

    """
    _broadcast(model, hcg, "mp", apart=True)


def broadcast_dp_parameters(
    model: Any, hcg: HybridCommunicateGroup, fuse_params: bool = True
) -> None:
    """Make the weights of ranks along dp equal. Collective over them.

    Args:
        model: anything with ``named_parameters()``.
        hcg: the grid.
        fuse_params: accepted: many arrays always travel together.

    """
    _broadcast(model, hcg, "dp")


def broadcast_sharding_parameters(
    model: Any, hcg: HybridCommunicateGroup, fuse_params: bool = True
) -> None:
    """Make the weights of ranks along sharding equal. Collective over them.

    Args:
        model: anything with ``named_parameters()``, whose parameters are not cut over sharding.
        hcg: the grid.
        fuse_params: accepted: many arrays always travel together.

    """
    _broadcast(model, hcg, "sharding")


def broadcast_sep_parameters(
    model: Any, hcg: HybridCommunicateGroup, fuse_params: bool = True
) -> None:
    """Make the weights of ranks along sep equal. Collective over them.

    Args:
        model: anything with ``named_parameters()``.
        hcg: the grid.
        fuse_params: accepted: many arrays always travel together.

    """
    _broadcast(model, hcg, "sep")


def _broadcast(model: Any, hcg: HybridCommunicateGroup, axis: str, *, apart: bool = False) -> None:
    group = hcg[axis]
    sync_params_buffers(model, group, group.ranks[0], is_model_parallel=apart)


if not TYPE_CHECKING:  # checkers and editors see what there is
    __getattr__ = refusing(__name__)
