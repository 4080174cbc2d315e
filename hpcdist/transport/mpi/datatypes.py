"""hpcdist's vocabulary in MPI's: datatypes, operators and message specifications."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.transport.call.reduction import UFUNCS, Combine


class _Types(dict[np.dtype, MPI.Datatype]):
    """MPI's datatypes; one of its own is made for each dtype of pairs, whose bytes it moves."""

    def __missing__(self, dtype: np.dtype) -> MPI.Datatype:
        datatype = self[dtype] = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
        _DTYPES[datatype.handle] = dtype
        return datatype


_DTYPES: dict[int, np.dtype] = {}
"""By handle of a datatype: what numbers it stands for, for the operators that MPI has not."""

TYPES = _Types(
    (np.dtype(name), datatype)
    for name, datatype in {
        "?": MPI.C_BOOL,
        "i1": MPI.INT8_T,
        "i2": MPI.INT16_T,
        "i4": MPI.INT32_T,
        "i8": MPI.INT64_T,
        "u1": MPI.UINT8_T,
        "u2": MPI.UINT16_T,
        "u4": MPI.UINT32_T,
        "u8": MPI.UINT64_T,
        "f4": MPI.FLOAT,
        "f8": MPI.DOUBLE,
        "c8": MPI.C_FLOAT_COMPLEX,
        "c16": MPI.C_DOUBLE_COMPLEX,
        "g": MPI.LONG_DOUBLE,
        "G": MPI.C_LONG_DOUBLE_COMPLEX,
    }.items()
)
_DTYPES[MPI.LONG_DOUBLE.handle] = np.dtype("g")


class _Operators(dict[Combine, MPI.Op]):
    """MPI's operators; those it has not are made of our own functions when first used."""

    def __missing__(self, combine: Combine) -> MPI.Op:
        op = self[combine] = MPI.Op.Create(partial(_combine, combine), commute=False)
        return op


def _combine(combine: Combine, given: Any, result: Any, datatype: MPI.Datatype) -> None:
    """Compute what MPI asks of an operator: `result` becomes `given` combined with itself."""
    dtype = _DTYPES[datatype.handle]
    left, right = (np.frombuffer(each, dtype) for each in (given, result))
    UFUNCS[combine](left, right, out=right)


OPS = _Operators(
    {
        Combine.ADD: MPI.SUM,
        Combine.MULTIPLY: MPI.PROD,
        Combine.MAXIMUM: MPI.MAX,
        Combine.MINIMUM: MPI.MIN,
        Combine.OR: MPI.LOR,
        Combine.AND: MPI.LAND,
        Combine.XOR: MPI.LXOR,
        Combine.BIT_AND: MPI.BAND,
        Combine.BIT_OR: MPI.BOR,
        Combine.BIT_XOR: MPI.BXOR,
    }
)

INT_MAX = (1 << 31) - 1
"""The largest count of the MPI-3 interface; larger blocks travel as one big datatype."""

Spec = list[Any]


def numbers(array: NumpyArray) -> Spec:
    """Specify `array` as numbers that MPI can combine."""
    return [array, array.size, TYPES[array.dtype]]


def block(data: Any, nbytes: int) -> Spec:
    """Specify `nbytes` (per rank) of `data` as one block of bytes, of any length."""
    if nbytes <= INT_MAX:
        return [data, nbytes, MPI.BYTE]
    return [data, 1, of_items(nbytes)]


@lru_cache(maxsize=64)
def of_items(nbytes: int) -> MPI.Datatype:
    """Return the datatype of so many bytes, which are moved and not looked at."""
    return MPI.BYTE.Create_contiguous(nbytes).Commit()


def starts_of(counts: list[int]) -> list[int]:
    """Return where parts of so many elements begin that follow each other."""
    return [0, *accumulate(counts[:-1])]


def scattered(buffers: list[Any]) -> tuple[Spec, MPI.Datatype]:
    """Specify many buffers as one message; free the datatype after use."""
    lengths, places = [], []
    for buffer in buffers:
        address, nbytes = MPI.Get_address(buffer), memoryview(buffer).nbytes
        for start in range(0, nbytes, INT_MAX):
            lengths.append(min(INT_MAX, nbytes - start))
            places.append(address + start)
    datatype = MPI.BYTE.Create_hindexed(lengths, places).Commit()
    return [MPI.BOTTOM, 1, datatype], datatype
