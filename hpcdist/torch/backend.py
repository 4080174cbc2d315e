"""Registration of the backend ``"hpcdist"`` with torch.distributed, and finding each other."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as c10d
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from hpcdist.comm.environment import init_parallel_env
from hpcdist.comm.group import Group
from hpcdist.comm.making import group_of
from hpcdist.comm.session import is_simulated
from hpcdist.errors import HpcdistError, UsageError, add_note
from hpcdist.runtime.process import snapshot
from hpcdist.runtime.torchrun import set_by_hpcdist, set_torchrun_variables
from hpcdist.torch.amendments import amend
from hpcdist.torch.process_group import BACKEND, HpcdistProcessGroup
from hpcdist.torch.stores import shared_store

_TORCHS_DEFAULT = timedelta(minutes=30)
_ALL_BEGIN = (
    "torch.distributed is initialized at the first use of a torch module, by all ranks together; "
    "if only some ranks use one, call hpcdist.torch.init() on all ranks before"
)


def register() -> None:
    """Make torch.distributed know the backend; once per process."""
    if hasattr(c10d.Backend, BACKEND.upper()):
        return
    c10d.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler(BACKEND, _meet)
    _answer_for_env()
    amend()
    set_torchrun_variables()


def init(timeout: Any = None) -> None:
    """Call ``torch.distributed.init_process_group("hpcdist")``, unless it has been called.

    After `destroy_process_group` and a new `init_parallel_env` torch's world is made anew, too.
    Collective.

    Args:
        timeout: a `datetime.timedelta`, as torch's `init_process_group` takes it.

    Example:
        >>> import torch, hpcdist.torch
        >>> hpcdist.torch.init()
        >>> torch.distributed.get_backend()
        'hpcdist'

    """
    if c10d.is_initialized():
        world = c10d.group.WORLD
        if isinstance(world, HpcdistProcessGroup) and world.group.is_closed:
            c10d.destroy_process_group()
    if not c10d.is_initialized():
        c10d.init_process_group(BACKEND, init_method=f"{BACKEND}://", timeout=timeout)


def process_group_of(group: Group) -> HpcdistProcessGroup:
    """Return torch's process group for the ranks of `group`, in their order; made when first asked.

    Collective over the group. `torch.distributed` is initialized if it is not, which all ranks do
    together: if only some will ask, call `init` on all of them before. A world of another backend
    (gloo, nccl) is left as it is.

    Args:
        group: a group of hpcdist that this rank is in.

    Example:
        >>> import torch, hpcdist as dist, hpcdist.torch
        >>> half = dist.init_parallel_env().split(dist.get_rank() % 2)
        >>> x = torch.ones(3)
        >>> torch.distributed.all_reduce(x, group=hpcdist.torch.process_group_of(half))

    """
    if is_simulated():
        raise UsageError(
            "torch.distributed has one rank per process, so it cannot run in simulate(); start "
            "ranks with mpiexec, srun or hpcdist run"
        )
    try:
        init()
    except HpcdistError as error:
        add_note(error, _ALL_BEGIN)
        raise
    world = c10d.group.WORLD
    if isinstance(world, HpcdistProcessGroup) and group.ranks == world.group.ranks:
        return world
    known = _made.get(group)
    if known is None or known.group.is_closed:
        known = c10d.new_group(
            group.ranks, backend=BACKEND, use_local_synchronization=True, **_in_order(group)
        )
        _made[group] = known
    return known


def _in_order(group: Group) -> dict[str, bool]:
    """Return the arguments with which torch keeps the order of the ranks; it would sort them."""
    if group.ranks == sorted(group.ranks):
        return {}
    if "sort_ranks" not in inspect.signature(c10d.new_group).parameters:
        raise UsageError(
            f"torch {torch.__version__} cannot keep the order of the ranks {group.ranks} of group "
            f"{group.name}: it sorts them; upgrade torch, or split with ascending keys"
        )
    return {"sort_ranks": False}


_made: WeakKeyDictionary[Group, HpcdistProcessGroup] = WeakKeyDictionary()
"""By hpcdist group: torch keeps process groups for ever, and finds them by name only."""


def _make(options: Any, _: Any = None) -> HpcdistProcessGroup:
    """Make a process group of some ranks; torch calls this on the members."""
    if not c10d.is_initialized():
        _forget_meshes()
    world = init_parallel_env()
    ranks = list(options.global_ranks_in_group) or list(range(world.nranks))
    timeout = None if options.timeout == _TORCHS_DEFAULT else options.timeout
    where = options.group_rank, options.group_size
    group = cast(Group, group_of(ranks, timeout))
    if where != (group.rank, group.nranks):
        group_words = f"rank {group.rank} of {group.nranks}"
        raise UsageError(
            f"torch.distributed calls this process rank {where[0]} of {where[1]}, but MPI calls "
            f"it {group_words}; leave rank and world_size to MPI: init_process_group('{BACKEND}')"
        )
    return HpcdistProcessGroup(group, options.store, options.group_id)


def _forget_meshes() -> None:
    """Clear torch's cache of the meshes of an earlier world, before there is a new one.

    It remembers what operations on distributed tensors return by mesh, takes meshes of equal ranks
    for one, and would use groups that are gone.
    """
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_sharding_prop_cache()


def _meet(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[c10d.Store, int, int]]:
    """Yield a store that all ranks share, and rank and size as MPI knows them."""
    world = init_parallel_env()
    yield shared_store(world), world.rank, world.nranks


def _answer_for_env() -> None:
    """Make MPI answer for ``env://``, torch's default, unless the user has set MASTER_ADDR."""
    torchs_own = _rendezvous_handlers["env"]

    def meet(url: str, *args: Any, **kwargs: Any) -> Any:
        environ = snapshot()
        told = environ.keys() - set_by_hpcdist(environ)
        handler = torchs_own if "MASTER_ADDR" in told else _meet
        return handler(url, *args, **kwargs)

    _rendezvous_handlers["env"] = meet
