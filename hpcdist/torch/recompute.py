"""`recompute`: what a function computes inside is computed again in the backward pass, not kept.

On torch's own `torch.utils.checkpoint`, without reentry. Random states are brought back for the
second time: torch's, and those of the tracker, which torch knows nothing of. Arguments can be kept
elsewhere in between: in host memory, or a part on each rank that has them alike.

Reference: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.torch.model_parallel.axes import axis_group
from hpcdist.torch.model_parallel.functions import gathered
from hpcdist.torch.model_parallel.random import AsOf, snapshot

Restore = Callable[[], torch.Tensor]
Keep = Callable[[torch.Tensor], "Restore | None"]
"""Puts a tensor away, and returns what brings it back; None to keep it where it is."""


def recompute(
    function: Callable[..., Any],
    *args: Any,
    preserve_rng_state: bool = True,
    use_reentrant: bool = True,
    offload_indices: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``; the backward pass computes its activations again.

    Args:
        function: a module or function; it computes the same the second time.
        *args: its arguments: tensors, anything else, and what has tensors in it.
        preserve_rng_state: let it draw the same random numbers the second time, also from
            `get_rng_state_tracker`.
        use_reentrant: accepted for Paddle's sake; there is one way, which does what either can.
        offload_indices: positions in `args` of tensors on GPUs that are kept in host memory until
            then.
        **kwargs: its arguments by keyword.

    Raises:
        UsageError: an input needs a gradient, but no output has one, so nothing is gained.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> recompute(torch.sin, x).sum().backward()
        >>> bool((x.grad == torch.cos(x)).all())
        True

    """
    for each in offload_indices:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 <= each < len(args):
            raise UsageError(
                f"offload_indices are positions among the {len(args)} arguments, got {each!r}"
            )
    keep = dict.fromkeys(offload_indices, _on_host)
    return _recomputed(function, args, kwargs, preserve_rng_state, keep)


def recompute_sequential(ctx: Mapping[str, Any], functions: Any, *args: Any, **kwargs: Any) -> Any:
    """Call functions in a row; the backward pass recomputes them segment by segment.

    All but the last one, whose insides are needed at once.

    Args:
        ctx: ``segments``, how many there are (1); ``preserve_rng_state`` (True).
        functions: a `torch.nn.Sequential`, or functions, each of which takes what the one before
            has returned.
        *args: of the first one.
        **kwargs: further arguments of `recompute`, such as `offload_indices`.

    Raises:
        UsageError: there are fewer functions than segments.

    Example:
        >>> import torch
        >>> layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> x = torch.ones(2, 8, requires_grad=True)
        >>> recompute_sequential({"segments": 2}, layers, x).sum().backward()

    """
    settings = _settings(ctx, {"segments": 1, "preserve_rng_state": True})
    segments, listed = settings["segments"], list(functions)
    if isinstance(segments, bool) or not isinstance(segments, int) or segments < 1:
        raise UsageError(f"segments must be a positive integer, got {segments!r}")
    if segments > len(listed):
        raise UsageError(
            f"{len(listed)} functions cannot be cut into {segments} segments; let segments be at "
            f"most {len(listed)}"
        )
    unknown = kwargs.keys() - {"use_reentrant", "offload_indices"}
    if unknown:
        raise UsageError(
            f"functions that follow each other take no arguments by keyword, got {sorted(unknown)};"
            " bind them before, by functools.partial"
        )
    size = len(listed) // segments
    for begin in range(0, size * (segments - 1), size):
        part = partial(_one_by_one, listed[begin : begin + size])
        preserve = settings["preserve_rng_state"]
        args = (recompute(part, *args, preserve_rng_state=preserve, **kwargs),)
    return _one_by_one(listed[size * (segments - 1) :], *args)


def recompute_hybrid(
    ctx: Mapping[str, Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call `recompute`, and keep its arguments cut or in host memory until the backward pass.

    Args:
        ctx: ``mp_group``, the ranks that have the same arguments (required); ``partition``: each
            of them keeps a part, and the backward pass gathers the parts, which makes it
            collective (False); ``offload``: the tensors are kept in host memory (False).
        function: as for `recompute`.
        *args: arguments of the function; the tensors among them are kept in this manner.
        **kwargs: keyword arguments of the function, which stay where they are, and
            `preserve_rng_state`.

    Example:
        >>> import torch, hpcdist as dist
        >>> x = torch.ones(2, 8, requires_grad=True)
        >>> ctx = {"mp_group": dist.init_parallel_env(), "partition": True}
        >>> recompute_hybrid(ctx, torch.sin, x).sum().backward()

    """
    defaults = {"mp_group": None, "offload": False, "partition": False, "preserve_rng_state": True}
    settings = _settings(ctx, defaults)
    if settings["mp_group"] is None:
        raise UsageError(
            "ctx must contains mp_group and mp_group can not be None: give the ranks that have the "
            'same arguments, such as {"mp_group": hcg["mp"]}'
        )
    group = axis_group("mp", settings["mp_group"])
    preserve = kwargs.pop("preserve_rng_state", settings["preserve_rng_state"])
    kwargs.pop("use_reentrant", None)
    keep: Keep = _on_host if settings["offload"] else _here
    if settings["partition"] and group.nranks > 1:
        keep = partial(_a_part, group, keep)
    return _recomputed(function, args, kwargs, preserve, dict.fromkeys(range(len(args)), keep))


def _settings(ctx: Mapping[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(ctx, Mapping) or ctx.keys() - defaults.keys():
        raise UsageError(f"ctx is a dict with keys of {sorted(defaults)}, got {ctx!r}")
    return {**defaults, **ctx}


def _one_by_one(functions: Sequence[Callable[..., Any]], *args: Any) -> Any:
    for each in functions:
        args = (each(*args),)
    return args[0]


# ---- computing again


def _recomputed(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    preserve: bool,
    keep: Mapping[int, Keep],
) -> Any:
    if not callable(function):
        raise UsageError(f"recompute needs a function or module, got {function!r}")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    given = [_away(each, keep.get(place, _here)) for place, each in enumerate(args)]
    again = AsOf(snapshot()) if preserve else nullcontext()

    def run(*given: Any) -> Any:
        return function(*map(_taken, given), **kwargs)

    output = checkpoint(
        run,
        *given,
        use_reentrant=False,
        preserve_rng_state=False,  # it would not bring back the tracker's
        context_fn=lambda: (nullcontext(), again),
    )
    found = tree_leaves(output)
    if (
        any(_needs_grad(each) for each in tree_leaves((args, kwargs)))
        and all(isinstance(each, torch.Tensor) for each in found)
        and not any(map(_needs_grad, found))
    ):
        raise UsageError(
            "none of output has requires_grad=True, this recompute() is not necessary; call the "
            "function itself, or let an output depend on an input with a gradient"
        )
    return output


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _away(value: Any, keep: Keep) -> Any:
    """Return what stands for an argument until the second time."""
    restore = keep(value.detach()) if isinstance(value, torch.Tensor) else None
    return value if restore is None else _Away(value, restore)


def _taken(value: Any) -> Any:
    return value.take() if isinstance(value, _Away) else value


@final
class _Away:
    """An argument that is kept elsewhere between the first time and the second."""

    def __init__(self, tensor: torch.Tensor, restore: Restore) -> None:
        self._first: torch.Tensor | None = tensor
        self._needs_grad = tensor.requires_grad
        self._restore = restore

    def take(self) -> torch.Tensor:
        """Return the argument: itself the first time, and then what is brought back."""
        first, self._first = self._first, None
        if first is not None:
            return first
        return self._restore().requires_grad_(self._needs_grad)


def _here(tensor: torch.Tensor) -> None:
    """Keep a tensor where it is."""


def _on_host(tensor: torch.Tensor) -> Restore | None:
    """Keep a copy in host memory."""
    return None if tensor.device.type == "cpu" else partial(tensor.cpu().to, tensor.device)


def _a_part(group: Group, keep: Keep, tensor: torch.Tensor) -> Restore:
    """Keep this rank's part of a tensor that all ranks have alike; it is brought back together."""
    count = -(-tensor.numel() // group.nranks)
    part = tensor.new_zeros(count)
    own = tensor.reshape(-1)[group.rank * count :][:count]
    part[: own.numel()] = own
    restore = keep(part) or part.detach
    shape = tensor.shape

    def together() -> torch.Tensor:
        whole = gathered(restore(), group, 0)
        return whole[: shape.numel()].view(shape)

    return together
