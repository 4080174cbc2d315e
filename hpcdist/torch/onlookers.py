"""Make torch's tools see operations that do not pass through its dispatcher.

The profiler and every `TorchDispatchMode` (`CommDebugMode`, ...) look at torch's dispatcher. A
verb of hpcdist does without it, as that is faster. While somebody looks on, it goes there: the
dispatcher tells them of the operation, and beneath them all a mode of our own carries it out.
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

_count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def somebody_looks_on() -> bool:
    """Return whether a dispatch mode or the profiler is active in this thread."""
    return _count_modes() > 0 or _is_profiling()


def shown(dispatch: Callable[..., Any], run: Callable[..., Any], *args: Any) -> Any:
    """Return what `run` makes of `args`, called by torch's dispatcher when `dispatch` is.

    A mode that answers the operation itself, as one for fake tensors does, has its way.
    """
    given = [each for each in args if each is not None]
    if any(_is_torchs(mode) for mode in _get_current_dispatch_mode_stack()):
        return dispatch(*given)
    carrier = _Carrier(lambda: run(*args))
    with _beneath_all_modes(carrier):
        answer = dispatch(*given)
    return answer if carrier.work is None else carrier.work


def _is_torchs(mode: Any) -> bool:
    """Return whether this is a mode of torch's compiler, which is beneath all others."""
    return getattr(mode, "_mode_key", None) is not None


@final
class _Carrier(TorchDispatchMode):  # type: ignore[misc] # torch is untyped
    """Carries out one operation when the dispatcher arrives at it."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self._run = run
        self.work: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or self.work is not None:
            return func(*args, **(kwargs or {}))
        self.work = self._run()
        work = self.work.boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work


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
