"""Which backend a group's device memory takes: one pure decision, from what every rank can do.

NCCL and CUDA-aware MPI are never both in use in one process, because together on one device they
may dead-lock (NCCL user guide, "Using NCCL with MPI"): a process that has NCCL never hands device
pointers to MPI, unless it was told to leave NCCL alone (`Candidate.alone`). Staging through host
memory is always there, and takes what the chosen backend cannot do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

STAGED = "staged"
"""The name of what is there on every rank."""


class Release(NamedTuple):
    """A version of a library: its number, and how it is called."""

    number: int
    words: str


class Candidate(NamedTuple):
    """A backend that may be chosen; `name` is the one that settings use.

    Args:
        name: of the backend.
        why: what speaks for it where all ranks can use it.
        alone: never in a process that could use one that is preferred to it.
        shares: the first version of its library that lets several ranks use one GPU, and only
            where the backend is asked for by name; None where ranks may always share.

    """

    name: str
    why: str
    alone: bool = False
    shares: Release | None = None


class Standing(NamedTuple):
    """What one rank can do with one backend.

    `closed` says why it cannot be used, and is empty where it can; `version` is the number of its
    library, as 22809 for NCCL 2.28.9.
    """

    closed: str = ""
    version: int = 0


class Ability(NamedTuple):
    """What one rank can do with the device its array is on; `standings` are by backend.

    `node` tells ranks of one node apart from those of another.
    """

    rank: int
    node: int
    uuid: str
    standings: Mapping[str, Standing]


class Choice(NamedTuple):
    """The name of a backend, and the reason for it."""

    backend: str
    why: str


def choose_backend(
    abilities: Sequence[Ability], candidates: Sequence[Candidate], *, wanted: str, may_share: bool
) -> Choice:
    """Choose for a group; equal on all ranks, for all of them know all `abilities`.

    Args:
        abilities: one per rank of the group.
        candidates: all but staging, the best first.
        wanted: ``"auto"`` or the name of a backend.
        may_share: whether several ranks may use one GPU.

    Raises:
        UsageError: ranks share a GPU without leave, or not all of them can use what is wanted.

    """
    shared = shared_gpus(abilities)
    if shared and not may_share:
        raise UsageError(_complaint(shared))
    if wanted == STAGED:
        return Choice(STAGED, "HPCDIST_DEVICE_BACKEND=staged")
    closed = {
        each.name: _first_closed(each.name, abilities)
        or _why_not_shared(each, abilities, shared, wanted)
        for each in candidates
    }
    if wanted != "auto":
        if closed[wanted]:
            raise UsageError(f"HPCDIST_DEVICE_BACKEND={wanted}, but {closed[wanted]}")
        return Choice(wanted, f"HPCDIST_DEVICE_BACKEND={wanted}")
    best = closed[candidates[0].name]
    for place, each in enumerate(candidates):
        preferred = [other.name for other in candidates[:place]]
        if not closed[each.name] and not (each.alone and _any_open(preferred, abilities)):
            return Choice(each.name, f"{each.why}, and {best}" if best else each.why)
    return Choice(STAGED, best)


def shared_gpus(abilities: Sequence[Ability]) -> list[str]:
    """Name the ranks, in words, that use one GPU together."""
    users: dict[tuple[int, str], list[int]] = defaultdict(list)
    for each in abilities:
        users[each.node, each.uuid].append(each.rank)
    return [f"ranks {', '.join(map(str, ranks))}" for ranks in users.values() if len(ranks) > 1]


def _first_closed(name: str, abilities: Sequence[Ability]) -> str:
    """Return why a backend cannot be used on the first rank where it cannot; empty if on none."""
    for each in abilities:
        reason = each.standings[name].closed
        if reason:
            return f"on rank {each.rank} {reason}"
    return ""


def _any_open(names: Sequence[str], abilities: Sequence[Ability]) -> bool:
    """Return whether some rank could use one of the backends."""
    return any(not each.standings[name].closed for each in abilities for name in names)


def _why_not_shared(
    candidate: Candidate, abilities: Sequence[Ability], shared: Sequence[str], wanted: str
) -> str:
    """Return why a backend does not serve the GPUs that ranks share; empty if it does.

    With NCCL it is an experiment (user guide, NCCL_MULTI_RANK_GPU_ENABLE), so not made unasked.
    """
    if not shared or candidate.shares is None:
        return ""
    if wanted != candidate.name:
        return f"{shared[0]} share a GPU"
    oldest = min(abilities, key=lambda each: each.standings[candidate.name].version)
    version = oldest.standings[candidate.name].version
    if version >= candidate.shares.number:
        return ""
    return (
        f"{shared[0]} share a GPU, for which {candidate.shares.words} or newer is needed, and "
        f"rank {oldest.rank} has {version}"
    )


def _complaint(shared: Sequence[str]) -> str:
    return (
        f"{'; '.join(shared)} use the same GPU; give each rank its own (srun "
        "--gpus-per-node=N --ntasks-per-node=N --gpu-bind=none, and "
        "init_parallel_env(device='gpu')), or allow it with HPCDIST_SHARE_GPU=1"
    )
