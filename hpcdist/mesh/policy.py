"""`array_policy`: what happens to a function without a rule, and how new arrays are spread.

A rule tells which part of a result each rank can compute from its parts of the arguments, and what
has to travel for it. Without one every rank would need the whole arguments: that is refused, with
what it would cost and what to do, unless a program says that it may be done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from hpcdist.comm.session import Slot, current_session
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import as_placements
from hpcdist.mesh.placements import Placement, Replicate, Shard
from hpcdist.mesh.rules.basis import (
    arrays_in,
    is_dist,
    resharded,
    result_array,
    uncut,
    whole_on,
)
from hpcdist.named_tuple import NamedTuple

_CHOICES = ("error", "warn", "allow")
_SUMS = ("fast", "reproducible")


class _Policy(NamedTuple):
    """What is done where a program does not say it."""

    replicate: str
    placements: tuple[Placement, ...]
    """Of new arrays; a dimension that an array lacks is not cut."""
    sums: str
    """See [Note: reproducible sums]."""


_policy: ContextVar[_Policy | None] = ContextVar("policy", default=None)


def _current() -> _Policy:
    """Return the policy of the innermost block, or that of the settings."""
    found = _policy.get()
    if found is not None:
        return found
    session = current_session()
    return _of_settings() if session is None else session[_POLICY]


def _of_settings() -> _Policy:
    config = read_config()
    placements = [Replicate() if dim is None else Shard(dim) for dim in config.array_placements]
    return _Policy(config.array_replicate, tuple(placements), config.array_sums)


_POLICY = Slot(_of_settings)


@contextmanager
def array_policy(
    replicate: str | None = None,
    *,
    placements: Sequence[Placement] | None = None,
    sums: str | None = None,
) -> Iterator[None]:
    """Set, for a block, how functions without a rule act, new arrays are spread, and sums are made.

    What is not given stays as it is around the block. Outside any block it is as
    ``HPCDIST_ARRAY_REPLICATE``, ``HPCDIST_ARRAY_PLACEMENTS`` and ``HPCDIST_ARRAY_SUMS`` say.
    It has to be the same on all ranks.

    Args:
        replicate: what is done where all ranks need the whole of an array that is cut, as in a
            function without a rule, ``np.asarray(a)`` or ``float(a)``. ``"error"``, the default:
            raise `UsageError`; ``"warn"``: gather the whole arrays on every rank, compute there,
            and warn of it; ``"allow"``: the same without a warning. The result is then whole on
            every rank.
        placements: of new arrays of `hpcdist.array` that are made without: what each axis of the
            mesh does. A ``Shard`` of a dimension that an array lacks is ``Replicate`` for it.
        sums: how floating-point numbers are added by sum, mean, var, std, average, norm, trace,
            dot, matmul and their like. ``"fast"``, the default: as NumPy and BLAS do it on each
            rank, then by a reduction; the last bits depend on the cut. ``"reproducible"``: with
            the same bits for every mesh, every cut and every number of ranks, and at least as
            accurate as NumPy's.

    Example:
        >>> import hpcdist as dist, hpcdist.array as xp
        >>> with dist.array_policy(placements=[dist.Shard(0)]):
        ...     xp.zeros((4, 3)).placements, xp.asarray(1.0).placements
        ([Shard(0)], [Replicate()])
        >>> with dist.array_policy(sums="reproducible"):
        ...     float(xp.asarray([1e16, 1.0, -1e16]).sum())
        1.0

    """
    now = _current()
    if replicate is None:
        replicate = now.replicate
    if replicate not in _CHOICES:
        raise UsageError(f"replicate must be one of {', '.join(_CHOICES)}, got {replicate!r}")
    given = now.placements if placements is None else as_placements(placements)
    if any(each.is_partial() for each in given):
        raise UsageError(f"new arrays have values, not contributions: {given} has a Partial")
    sums = now.sums if sums is None else sums
    if sums not in _SUMS:
        raise UsageError(f"sums must be one of {', '.join(_SUMS)}, got {sums!r}")
    token = _policy.set(_Policy(replicate, given, sums))
    try:
        yield
    finally:
        _policy.reset(token)


def reproducible_sums() -> bool:
    """Return whether sums are to have the same bits for every cut of an array."""
    return _current().sums == "reproducible"


def usual_placements(ndim: int, axes: int) -> tuple[Placement, ...]:
    """Return the placements of a new array that is made without, on a mesh of so many axes."""
    return tuple(
        [
            each if not isinstance(each, Shard) or -ndim <= each.dim < ndim else Replicate()
            for each in _current().placements[:axes]
        ]
    )


def without_rule(
    name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], hint: str = ""
) -> Any:
    """Compute what has no rule on the whole arrays, if they are whole or the policy allows it.

    Args:
        name: the function, for the message.
        function: computes the result from the whole arrays.
        args: its arguments.
        kwargs: and keyword arguments.
        hint: what to do instead, if there is something better than to gather.

    Raises:
        UsageError: an array is cut, and the policy is ``"error"``.

    """
    arrays = [*arrays_in((args, kwargs))]
    cut = [array for array in arrays if not array.layout.is_replicated]
    mesh = arrays[0].layout.mesh
    if cut and not may_gather(f"{name} has no rule for {_told(cut)}", cut):
        raise UsageError(_message(name, cut, hint))
    whole = _mapped((args, kwargs), _gathered)
    result = function(*whole[0], **whole[1])
    return _wrapped(result, lambda part: DistArray._of(part, whole_on(mesh, part.shape)))


def may_gather(why: str, cut: list[DistArray]) -> bool:
    """Return whether the policy is to gather arrays that are cut, and warn if it says so."""
    choice = _current().replicate
    if choice == "warn":
        nbytes = sum(array.nbytes for array in cut)
        warnings.warn(f"{why}: every rank gathers {nbytes:,} bytes", stacklevel=4)
    return choice != "error"


def whole_of(array: DistArray, what: str) -> Any:
    """Return the whole array for `what`: this rank's part, or gathered if the policy allows it."""
    layout = array.layout
    if layout.is_replicated or layout.mesh.coordinate is None:
        array._check_here(what)
        return array.local
    if not may_gather(f"{what} needs the whole of {_told([array])}", [array]):
        array._check_here(what)
    return _gathered(array)


def _gathered(array: DistArray) -> Any:
    """Return the whole array; read-only if it is a copy, for what is written there were lost."""
    whole = resharded(array, uncut(array.layout)).local
    if not array.layout.is_replicated and isinstance(whole, np.ndarray):
        whole.flags.writeable = False
    return whole


def _message(name: str, cut: list[DistArray], hint: str) -> str:
    nbytes = sum(array.nbytes for array in cut)
    whole = f"dist.reshard(a, {cut[0].layout.mesh!r}, [])"
    return (
        f"{name} has no rule for {_told(cut)}: every rank would have to gather {nbytes:,} bytes. "
        f"{hint + '; or make' if hint else 'Make'} them whole where that fits into memory, by "
        f"{whole} or as a NumPy array by dist.unshard_dtensor(a), or allow it with "
        'dist.array_policy(replicate="allow")'
    )


def _told(arrays: list[DistArray]) -> str:
    return " and ".join(f"{array.dtype} {array.layout!r}" for array in arrays)


def _mapped(tree: Any, change: Callable[[DistArray], Any]) -> Any:
    """Return the tree with each DistArray changed."""
    if is_dist(tree):
        return change(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(each, change) for each in tree])
    if isinstance(tree, dict):
        return {key: _mapped(each, change) for key, each in tree.items()}
    return tree


def _wrapped(result: Any, wrap: Callable[[Any], DistArray]) -> Any:
    if isinstance(result, (tuple, list)):
        parts = [_wrapped(each, wrap) for each in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if isinstance(result, type):  # such as that of `np.common_type`
        return result
    if isinstance(result, np.generic) or hasattr(result, "__array_interface__"):
        part = result_array(result)
        read_only = isinstance(part, np.ndarray) and not part.flags.writeable
        return wrap(part.copy() if read_only else part)
    return result
