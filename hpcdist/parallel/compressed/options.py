"""What ``compress=`` of `DataParallel` may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from hpcdist.arrays.device import on_device
from hpcdist.arrays.libraries import view_of
from hpcdist.comm.states import State
from hpcdist.config import read_config
from hpcdist.errors import UsageError
from hpcdist.parallel.compressed.encoded import Encoded
from hpcdist.parallel.compressed.encodings import ENCODINGS
from hpcdist.parallel.compressed.low_rank import LowRank, PowerSGD
from hpcdist.parallel.compressed.scheme import Scheme


def scheme_of(compress: Any) -> Scheme | None:
    """Return what ``compress=`` asks for; None for nothing. Local.

    Raises:
        UsageError: there is no such compression, or every average is to have the same bits on any
            number of ranks.

    """
    if compress is None:
        return None
    if type(compress) is not PowerSGD and (
        not isinstance(compress, str) or compress not in ENCODINGS
    ):
        known = ", ".join(map(repr, ENCODINGS))
        raise UsageError(f"compress must be {known}, a PowerSGD or None, got {compress!r}")
    if read_config().reductions == "ordered":
        raise UsageError(
            f"compress={compress!r} rounds gradients as the ranks and nodes share them, which "
            "HPCDIST_REDUCTIONS=ordered rules out; leave one of the two out"
        )
    return LowRank(compress) if type(compress) is PowerSGD else Encoded(compress)


def states_for(compress: Any, named: Iterable[tuple[str, Any]]) -> list[State]:
    """Return what ranks compare of ``compress=``, whose gradients are those of `named` arrays.

    Raises:
        UsageError: there is no such compression, or it cannot be that of an array.

    """
    if scheme_of(compress) is None:
        return []
    for name, array in named:
        view = view_of(array)
        if on_device(view):
            raise UsageError(
                f"parameter {name!r} is on a GPU, and compress is for gradients in host memory; "
                "leave it out, or give a torch module one of torch's hooks by register_comm_hook"
            )
        if np.dtype(view.dtype).kind == "c":
            raise UsageError(
                f"parameter {name!r} is {view.dtype}, and compress is for real numbers; leave it "
                "out, or keep the real and the imaginary part as parameters"
            )
    return [(f"compress={compress!r}", (), "")]
