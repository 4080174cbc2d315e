"""Make torch's tools see operations that do not pass through its dispatcher.

The profiler and every `TorchDispatchMode` (`CommDebugMode`, ...) look at torch's dispatcher. A
verb of hpcdist does without it, as that is faster. While somebody looks on, it goes there: the
dispatcher tells them of the operation, and beneath them all a mode of our own carries it out.

So do operations of tensors that wrap others (`torchao`'s): the dispatcher asks their class, which
calls the operation for each tensor within.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from hpcdist.errors import UsageError
from hpcdist.torch.works import AllOf

_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def somebody_looks_on() -> bool:
    """Return whether a dispatch mode or the profiler is active in this thread."""
    return _count_modes() > 0 or _is_profiling()


def wraps_others(kind: type) -> bool:
    """Return whether torch's dispatcher asks a class of tensors itself what an operation does.

    A `DTensor` is none of them: it knows no meaning of collectives.
    """
    asked = getattr(kind, "__torch_dispatch__", _NOBODYS) is not _NOBODYS
    return asked and not hasattr(kind, "to_local")


_NOBODYS = torch._C._disabled_torch_dispatch_impl


def shown(dispatch: Callable[..., Any], run: Callable[..., Any], group: Any, *args: Any) -> Any:
    """Return what ``run(group, *args)`` makes, called by torch's dispatcher when `dispatch` is.

    A mode that answers the operation itself, as one for fake tensors does, has its way. Where
    tensors wrap others, their class runs it for each of those, and the work is that of them all.
    """
    modes = _get_current_dispatch_mode_stack()
    if any(_is_torchs(mode) for mode in modes):
        return dispatch(group, *(each for each in args if each is not None))
    carrier = _Carrier(lambda *given: run(group, *given), args)
    with _beneath_all_modes(carrier):
        answer = dispatch(group, *(each for each in args if each is not None))
    return carrier.work() or answer


def _is_torchs(mode: Any) -> bool:
    """Return whether this is a mode of torch's compiler, which is beneath all others."""
    return getattr(mode, "_mode_key", None) is not None


@final
class _Carrier(TorchDispatchMode):  # type: ignore[misc] # torch is untyped
    """Carries out one operation when the dispatcher arrives at it, once for all tensors within."""

    def __init__(self, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self._run, self._args = run, args
        self._works: list[Any] = []
        self._wrapped: Any = None  # the operation, once it has been called for tensors that wrap

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = func.namespace == "c10d" and (not self._works or func is self._wrapped)
        if not mine:
            return func(*args, **(kwargs or {}))
        if any(map(wraps_others, types)):
            _refuse_any_source(func, types)
            self._wrapped = func
            return NotImplemented  # their class calls us again
        tensors = args[: _count_tensors(func)]
        given = (*tensors, *self._args[len(tensors) :]) if self._wrapped else self._args
        self._works.append(self._run(*given))
        work = self._works[-1].boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work

    def work(self) -> Any:
        """Return the work of all that was carried out; None if nothing was."""
        if self._works and self._wrapped:
            return AllOf(self._works, tree_leaves(self._args[0]))
        return self._works[0] if self._works else None


def _refuse_any_source(func: Any, types: Any) -> None:
    if func.__name__.startswith("recv_any_source"):
        raise UsageError(
            f"a {types[0].__name__} wraps several tensors, which would be received from any rank "
            "each; pass src"
        )


def _count_tensors(func: Any) -> int:
    """Return how many arguments of an operation are tensors or lists of them; they come first."""
    names = [each.name for each in func._schema.arguments]
    return names.index("process_group")


@contextmanager
def _beneath_all_modes(mode: TorchDispatchMode) -> Iterator[None]:
    above = list(_get_current_dispatch_mode_stack())
    for _ in above:
        _pop_mode()
    for each in (mode, *above):
        _push_mode(each)
    try:
        yield
    finally:
        for _ in (mode, *above):
            _pop_mode()
        for each in above:
            _push_mode(each)
