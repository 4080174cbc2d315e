"""`create_nccl_config`: settings of one NCCL communicator, which CuPy cannot hand on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.integers import as_integer
from hpcdist.transport.flight.call_site import outer_frame

_VARIABLES = {
    "commName": "",
    "ll_buffsize": "NCCL_LL_BUFFSIZE",
    "ll128_buffsize": "NCCL_LL128_BUFFSIZE",
    "simple_buffsize": "NCCL_BUFFSIZE",
    "buffsize_align": "",
    "nchannels": "NCCL_MAX_NCHANNELS",
    "algoStr": "NCCL_ALGO",
    "protoStr": "NCCL_PROTO",
}
"""The keys, and the variables that say the same to NCCL for all communicators."""

_TEXTS = ("commName", "algoStr", "protoStr")


def create_nccl_config(
    nccl_config: Mapping[str, int | str] | None = None,
) -> dict[str, int | str] | None:
    """Return settings of one NCCL communicator, for arguments named `nccl_config`. Local.

    They have no effect: NCCL is started through CuPy, which passes none of them on. A warning says
    which of NCCL's variables do the same for all communicators.

    Args:
        nccl_config: `commName`, `algoStr` and `protoStr`, strings, and `ll_buffsize`,
            `ll128_buffsize`, `simple_buffsize`, `buffsize_align` and `nchannels`, integers; None
            for none.

    Raises:
        UsageError: another key, or a value of a wrong type.

    Example:
        >>> import hpcdist as dist
        >>> dist.create_nccl_config({})
        {}

    """
    if nccl_config is None:
        return None
    if not isinstance(nccl_config, Mapping):
        advice = (
            f"; name a backend by keyword, as in init_parallel_env(backend={nccl_config!r})"
            if isinstance(nccl_config, str)
            else ""
        )
        raise UsageError(f"nccl_config must be a dictionary, got {nccl_config!r}{advice}")
    checked = {key: _checked(key, value) for key, value in nccl_config.items()}
    instead = [
        f"{_VARIABLES[key]}={value}" for key, value in checked.items() if _VARIABLES[key] and value
    ]
    if checked:
        advice = f"; for all of them set {' '.join(instead)}" if instead else ""
        warnings.warn(
            f"nccl_config: {', '.join(checked)} have no effect: NCCL is started through CuPy, "
            f"which passes on no settings of one communicator{advice}",
            stacklevel=outer_frame()[1],
        )
    return checked


def _checked(key: Any, value: Any) -> int | str:
    if key not in _VARIABLES:
        raise UsageError(f"nccl_config has no key {key!r}; there are {', '.join(_VARIABLES)}")
    try:
        if key not in _TEXTS:
            return as_integer(value)
        if isinstance(value, str):
            return value
    except TypeError:
        pass
    wanted = "a string" if key in _TEXTS else "an integer"
    raise UsageError(f"nccl_config[{key!r}] must be {wanted}, got {value!r}")
