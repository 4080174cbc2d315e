"""`hpcdist.array`: the functions of the array API standard on arrays across ranks.

The names are those of the standard and of NumPy. Functions that make arrays take `mesh` and
`placements`; without them the array is on the mesh of `get_mesh`, or on all ranks, as
`array_policy` says, or else whole on every rank.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hpcdist.mesh.rules import creation, dtypes, words
from hpcdist.mesh.rules.table import NAMES

API_VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")
__array_api_version__ = "2024.12"

_UFUNCS = """
abs add bitwise_and bitwise_or bitwise_xor ceil conj copysign cos cosh divide equal exp
expm1 floor floor_divide greater greater_equal hypot isfinite isinf isnan less less_equal
log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor maximum
minimum multiply negative nextafter not_equal positive reciprocal remainder sign signbit
sin sinh sqrt square subtract tan tanh trunc
"""
_OTHERWISE = {  # the standard's name: NumPy's
    "acos": "arccos",
    "acosh": "arccosh",
    "asin": "arcsin",
    "asinh": "arcsinh",
    "atan": "arctan",
    "atan2": "arctan2",
    "atanh": "arctanh",
    "bitwise_invert": "invert",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "pow": "power",
}


bool = np.bool_
int8, int16, int32, int64 = np.int8, np.int16, np.int32, np.int64
uint8, uint16, uint32, uint64 = np.uint8, np.uint16, np.uint32, np.uint64
float32, float64, complex64, complex128 = np.float32, np.float64, np.complex64, np.complex128
e, pi, inf, nan, newaxis = np.e, np.pi, np.inf, np.nan, None
broadcast_shapes = np.broadcast_shapes

arange, asarray, empty, eye = creation.arange, creation.asarray, creation.empty, creation.eye
from_dlpack, full, linspace = creation.from_dlpack, creation.full, creation.linspace
ones, zeros = creation.ones, creation.zeros
finfo, iinfo, isdtype = dtypes.finfo, dtypes.iinfo, dtypes.isdtype


def meshgrid(*arrays: Any, indexing: str = "xy", **options: Any) -> list[Any]:
    """Return the coordinates of a grid in a list, which this revision of the standard has."""
    return [*NAMES["meshgrid"](*arrays, indexing=indexing, **options)]


def broadcast_arrays(*arrays: Any) -> list[Any]:
    """Return arrays, each as if repeated to their common shape, in a list as of `meshgrid`."""
    return [*NAMES["broadcast_arrays"](*arrays)]


_RULES = {name: rule for name, rule in NAMES.items() if name not in globals()}
globals().update({name: rule for name, rule in _RULES.items() if "." not in name})
globals().update({name: getattr(np, name) for name in _UFUNCS.split()})
globals().update({name: getattr(np, numpys) for name, numpys in _OTHERWISE.items()})


def _room(numpys: Any, prefix: str, **own: Any) -> SimpleNamespace:
    """Return the functions of one of NumPy's modules, by their rules where there are."""
    functions = {name: getattr(numpys, name) for name in numpys.__all__}
    rules = {name[len(prefix) :]: rule for name, rule in NAMES.items() if name.startswith(prefix)}
    return SimpleNamespace(**{**functions, **rules, **own})


linalg = _room(np.linalg, "linalg.")
strings = _room(getattr(np, words.ROOM), f"{words.ROOM}.")
fft = _room(np.fft, "fft.", fftfreq=creation.fftfreq, rfftfreq=creation.rfftfreq)


class __array_namespace_info__:  # noqa: N801 - the standard's name
    """What of the standard there is."""

    def capabilities(self) -> dict[str, Any]:
        """Return which optional parts there are."""
        return {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": 64,
        }

    def default_device(self) -> str:
        """Return where new arrays are."""
        return "cpu"

    def devices(self) -> list[str]:
        """Return where arrays can be made."""
        return ["cpu"]

    def default_dtypes(self, *, device: Any = None) -> dict[str, Any]:
        """Return the dtypes of arrays that are made without one."""
        creation.check_device(device)
        return {
            "real floating": np.dtype("float64"),
            "complex floating": np.dtype("complex128"),
            "integral": np.dtype("int64"),
            "indexing": np.dtype("int64"),
        }

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, Any]:
        """Return the dtypes of a kind, or of several, by their names."""
        creation.check_device(device)
        return {
            name: np.dtype(globals()[name])
            for name in _DTYPES.split()
            if kind is None or isdtype(np.dtype(globals()[name]), kind)
        }


_DTYPES = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128"
)

_MODULES = ("annotations", "creation", "dtypes", "np", "words")
__all__ = sorted(name for name in globals() if name[0].islower() and name not in _MODULES)
