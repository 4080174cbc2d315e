"""Weights that several stages of a pipeline share: equal at the start, with one gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hpcdist.comm.collectives import all_reduce
from hpcdist.comm.group import Group
from hpcdist.comm.groups import new_group
from hpcdist.comm.objects import broadcast_object_list
from hpcdist.comm.states import verify_states
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.module_state import broadcast_states
from hpcdist.torch.pipeline.descriptions import SharedLayerDesc


class Member(NamedTuple):
    """A layer that shares its weight: its place in the model, who has it, and, here, itself."""

    place: int
    rank: int
    desc: SharedLayerDesc
    layer: torch.nn.Module | None


class Tie(NamedTuple):
    """A weight that several ranks of the pipeline share, and this is one of them.

    Its `name` is that of the first layer that has it, as in one process.
    """

    name: str
    weight: torch.nn.Parameter
    ranks: list[int]


def tie_here(shared: Mapping[str, Sequence[Member]]) -> None:
    """Share one weight, the first one's, among the layers on this rank with the same key. Local."""
    for members in shared.values():
        own = [(each.desc, each.layer) for each in members if each.layer is not None]
        for desc, layer in own:
            desc.give_weight(layer, own[0][0].weight_of(own[0][1]))


def tie_ranks(group: Group, shared: Mapping[str, Sequence[Member]]) -> list[Tie]:
    """Give the first layer's weight to all ranks that have one of its key; return those weights.

    Collective over the ranks that share one.
    """
    ties = []
    for key, members in shared.items():
        ranks = list(dict.fromkeys(each.rank for each in members))
        weights = [each.desc.weight_of(each.layer) for each in members if each.layer is not None]
        if weights and len(ranks) > 1:
            sharing = new_group([group.ranks[each] for each in ranks])
            ties.append(Tie(_name_of(members[0], sharing), weights[0], ranks))
            _make_equal(group, sharing, key, ties[-1])
    return ties


def _name_of(first: Member, sharing: Group) -> str:
    """Return what the model calls the weight: the first layer's rank tells. Collective."""
    place, _, desc, layer = first
    told = [None if layer is None else f"{place}.{desc.name_in(layer)}"]
    broadcast_object_list(told, sharing.ranks[0], sharing)
    return f"{told[0]}"


def _make_equal(group: Group, sharing: Group, key: str, tie: Tie) -> None:
    _, weight, ranks = tie
    dtype = f"{weight.dtype}".removeprefix("torch.")
    verify_states([(f"weight shared by {key}", tuple(weight.shape), dtype)], sharing)
    broadcast_states([weight.detach()], sharing, group.ranks[ranks[0]])
    weight.is_firstly_shared = group.rank == ranks[0]


def add_gradients(weight: torch.nn.Parameter, group: Group, copies: int) -> None:
    """Sum the gradients of a shared weight, divided by `copies`, over the ranks of `group`.

    Collective. All ranks get the same bits, so that their weights stay equal.
    """
    if not weight.requires_grad:
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    weight.grad.div_(copies)  # before it: a sum of 16-bit numbers could be too large
    all_reduce(weight.grad, group=group)
