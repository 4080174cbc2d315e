"""`array_policy`: what happens to a function that has no rule for arrays that are cut.

A rule tells which part of a result each rank can compute from its parts of the arguments, and what
has to travel for it. Without one every rank would need the whole arguments: that is refused, with
what it would cost and what to do, unless a program says that it may be done.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from hpcdist.errors import UsageError
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.rules.basis import is_dist, resharded, result_array, uncut, whole_on

_CHOICES = ("error", "warn", "allow")
_replicate: ContextVar[str] = ContextVar("replicate", default="error")


@contextmanager
def array_policy(replicate: str = "error") -> Iterator[None]:
    """Say, for a block, what a function without a rule does to arrays that are cut.

    Args:
        replicate: ``"error"``, the default outside any block: raise `UsageError`; ``"warn"``:
            gather the whole arrays on every rank, compute there, and warn of it; ``"allow"``: the
            same without a warning. The result is then whole on every rank.

    """
    if replicate not in _CHOICES:
        raise UsageError(f"replicate must be one of {', '.join(_CHOICES)}, got {replicate!r}")
    token = _replicate.set(replicate)
    try:
        yield
    finally:
        _replicate.reset(token)


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
    arrays = [*_dist_arrays((args, kwargs))]
    cut = [array for array in arrays if not array.layout.is_replicated]
    mesh = arrays[0].layout.mesh
    if cut:
        choice = _replicate.get()
        if choice == "error":
            raise UsageError(_message(name, cut, hint))
        if choice == "warn":
            nbytes = sum(array.nbytes for array in cut)
            warnings.warn(
                f"{name} has no rule for {_told(cut)}: every rank gathers {nbytes:,} bytes",
                stacklevel=3,
            )
    whole = _mapped((args, kwargs), _gathered)
    result = function(*whole[0], **whole[1])
    return _wrapped(result, lambda part: DistArray._of(part, whole_on(mesh, part.shape)))


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


def _dist_arrays(tree: Any) -> Iterator[DistArray]:
    if is_dist(tree):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _dist_arrays(each)
    elif isinstance(tree, dict):
        yield from _dist_arrays([*tree.values()])


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
    if isinstance(result, np.generic) or hasattr(result, "__array_interface__"):
        part = result_array(result)
        read_only = isinstance(part, np.ndarray) and not part.flags.writeable
        return wrap(part.copy() if read_only else part)
    return result
