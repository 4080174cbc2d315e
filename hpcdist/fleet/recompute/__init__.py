"""Paddle's ``fleet.recompute``: recomputing in the backward pass. It can be called, too.

``fleet.recompute(function, *args)`` is `recompute`: the package has the name of its function.
"""

import sys
from types import ModuleType
from typing import Any

from hpcdist.torch.recompute import (
    recompute as recompute,
    recompute_hybrid as recompute_hybrid,
    recompute_sequential as recompute_sequential,
)


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recompute(*args, **kwargs)


_Callable.__call__.__doc__ = recompute.__doc__
sys.modules[__name__].__class__ = _Callable
