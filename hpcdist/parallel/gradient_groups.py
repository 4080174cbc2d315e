"""A group per parameter: over which ranks each gradient is averaged, and in which order.

Experts of a mixture, or the slices of a weight, are not on all ranks that train together: their
`Parameter.group` is the ranks that have the same ones. A bucket has gradients of one group.

[Note: one order] Groups overlap, and ranks that send the buckets of two groups in different orders
would wait for each other for ever. So all ranks tell each other their buckets, and each computes
the same order of all of them: where a bucket comes latest on any rank, there it comes on all. That
is each rank's own order where models are alike, and leaves the order within a group as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcdist.arrays.device import device_runtime_of
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.arrays.libraries import view_of
from hpcdist.comm.group import Group
from hpcdist.comm.objects import tell_all
from hpcdist.comm.states import State, first_difference
from hpcdist.errors import MismatchError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.buckets import plan_buckets
from hpcdist.parallel.parameter import Parameter

Key = tuple[tuple[int, ...], int]
"""A group by its world ranks and its id: equal on all its members, and on no other group's."""

BucketName = tuple[Key, int]
"""A bucket by its group and its number among those of the group."""


class Bucket(NamedTuple):
    """Gradients that travel together, by index, and the ranks they are averaged over."""

    indices: Sequence[int]
    group: Group


class Offer(NamedTuple):
    """A rank's description: its gradients in groups of their own, and its buckets."""

    states: Mapping[Key, Sequence[State]]
    order: Sequence[BucketName]


def key_of(group: Group) -> Key:
    """Return what `group` is called on all ranks."""
    return tuple(group.ranks), group.id


def by_group(
    entries: Iterable[tuple[str, Any]], group: Group
) -> dict[Group, list[tuple[str, Any]]]:
    """Return names and entries for each group they have; first those of the model's `group`.

    The other groups come in an order that holds for all ranks.

    Raises:
        UsageError: a parameter's group is not a group of ranks of `group` that includes this one.

    """
    found: dict[Group, list[tuple[str, Any]]] = {group: []}
    for name, entry in entries:
        own = group_of(entry, group)
        _check_group(name, own, group)
        found.setdefault(own, []).append((name, entry))
    others = sorted((each for each in found if each is not group), key=key_of)
    return {each: found[each] for each in (group, *others)}


def group_of(entry: Any, group: Group) -> Group:
    """Return the ranks that have the same parameter or buffer; `group` unless it says otherwise."""
    own = own_group(entry)
    return group if own is None or getattr(own, "ranks", None) == group.ranks else own


def own_group(entry: Any) -> Any:
    """Return a `Parameter`'s ``group``, or what a torch parameter has as ``hpcdist_group``."""
    return entry.group if type(entry) is Parameter else getattr(entry, "hpcdist_group", None)


def _check_group(name: str, own: Any, group: Group) -> None:
    if not isinstance(own, Group) or not own.is_member() or own.is_closed:
        raise UsageError(
            f"the group of parameter {name!r} is {own!r}, but must be a group that this rank is a "
            "member of, the ranks that have the same parameter; make it by new_group or split"
        )
    outside = sorted({*own.ranks} - {*group.ranks})
    if outside:
        raise UsageError(
            f"the group of parameter {name!r} has ranks {outside}, which are not in the model's "
            f"group {group.name} (ranks {group.ranks}); give DataParallel a group with all ranks"
        )


def plan(parameters: Sequence[Any], group: Group, limits: Sequence[int]) -> list[Bucket]:
    """Return the buckets of the parameters that are trained, in this rank's own order."""
    views = [view_of(each.data) for each in parameters]
    groups = [group_of(each, group) for each in parameters]
    kinds = [
        (dtype_row(view.dtype).name, device_runtime_of(view), own)
        for view, own in zip(views, groups, strict=True)
    ]
    buckets = plan_buckets([view.nbytes for view in views], kinds, limits)
    return [Bucket(indices, groups[indices[0]]) for indices in buckets]


def agree(
    states: Mapping[Group, Sequence[State]], buckets: Sequence[Bucket], group: Group
) -> tuple[list[Bucket], bool]:
    """Return the buckets in one order for all ranks, and whether any rank has several groups.

    Collective over `group`.

    Args:
        states: what this rank has in groups other than `group`.
        buckets: those of this rank, in its own order.
        group: the ranks that train together.

    Raises:
        MismatchError: two members of a group have other parameters in it; on every rank.

    """
    named = _named(buckets)
    own = Offer({key_of(each): tuple(listed) for each, listed in states.items()}, list(named))
    offers: list[Offer] = tell_all("a comparison of gradients", own, group)
    several = any(offer.states for offer in offers)
    if not several:
        return list(buckets), False
    problem = difference(dict(zip(group.ranks, offers, strict=True)))
    if problem is not None:
        raise MismatchError(problem)
    return [
        named[each] for each in one_order(offer.order for offer in offers) if each in named
    ], True


def _named(buckets: Sequence[Bucket]) -> dict[BucketName, Bucket]:
    counts: dict[Key, int] = {}
    named = {}
    for bucket in buckets:
        key = key_of(bucket.group)
        number = counts[key] = counts.get(key, -1) + 1
        named[key, number] = bucket
    return named


def difference(offers: Mapping[int, Offer]) -> str | None:
    """Return where two members of a group first differ, given what each rank has in its groups."""
    for key in sorted({key for offer in offers.values() for key in offer.states}):
        ranks = key[0]
        everyone = [offers[rank].states.get(key, ()) for rank in ranks]
        if any(states != everyone[0] for states in everyone):
            return f"in the group of ranks {list(ranks)}, {first_difference(everyone, ranks)}"
    return None


def one_order(orders: Iterable[Sequence[BucketName]]) -> list[BucketName]:
    """Return one order of all ranks' buckets; see [Note: one order].

    Example:
        >>> world, expert = ((0, 1, 2), 0), ((0, 2), 1)
        >>> one_order([[(world, 0), (expert, 0)], [(world, 0)], [(expert, 0), (world, 0)]])
        [(((0, 1, 2), 0), 0), (((0, 2), 1), 0)]

    """
    latest: dict[BucketName, int] = {}
    for order in orders:
        for position, bucket in enumerate(order):
            latest[bucket] = max(position, latest.get(bucket, 0))
    return sorted(latest, key=lambda bucket: (latest[bucket], bucket))
