"""Numbers in fewer bits: float32 to codes of one or two bytes and back, a block at a time.

Codes of one byte are scaled: of each `BLOCK` of numbers, the largest magnitude becomes the largest
that a code has, and the scale, a float32, travels with the codes. Infinity and NaN make their whole
block NaN, so that whoever looks for them after averaging still finds some.

Sources: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016 (blocks and
scales); Micikevicius et al., FP8 Formats for Deep Learning, 2022 (E4M3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.named_tuple import NamedTuple

BLOCK = 256
"""Numbers that share a scale: 4 bytes of it for 256 of codes."""

_CHUNK = 256 * BLOCK
"""Numbers that are encoded at a time: they and what is made of them stay in a core's cache."""

_SMALLEST = 1e-30
"""Blocks with nothing above are encoded as zeros: the inverse of their scale would overflow."""


class Encoding(NamedTuple):
    """How numbers are encoded; `largest` is 0 for codes that are not scaled.

    `write` puts codes of scaled numbers, which it may change, into an array; `read` puts the
    numbers of codes, times the scales of their rows, into one.
    """

    dtype: np.dtype[Any]
    largest: float = 0.0
    write: Callable[[NumpyArray, NumpyArray], None] | None = None
    read: Callable[[NumpyArray, NumpyArray, NumpyArray], Any] | None = None

    def nbytes(self, size: int) -> int:
        """Return the bytes of `size` encoded numbers; `size` is a multiple of `BLOCK`."""
        return size * self.dtype.itemsize + (4 * size // BLOCK if self.largest else 0)


def encode(
    encoding: Encoding, values: NumpyArray, out: NumpyArray, error: NumpyArray | None = None
) -> None:
    """Encode `values`, float32 and a multiple of `BLOCK`, into the bytes of `out`.

    With `error`, which an encoding with scales may have, that is added to the values, in place, and
    becomes what their codes lack of the sums; but not in blocks with NaN or infinity.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        if encoding.write is None:
            out.view(encoding.dtype)[...] = values
            return
        codes, scales = _halves(encoding, out, values.size)
        scratch = np.empty((min(_CHUNK, values.size) // BLOCK, BLOCK), np.float32)
        for rows in _chunks(values.size):
            block = values.reshape(-1, BLOCK)[rows]
            if error is not None:
                block += error.reshape(-1, BLOCK)[rows]
            scaled = scratch[: len(block)]
            scales[rows] = scale = _scales(np.abs(block, out=scaled).max(axis=1), encoding.largest)
            inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
            np.multiply(block, inverse[:, None], out=scaled)
            encoding.write(scaled, codes[rows])
            if error is not None and encoding.read is not None:
                encoding.read(codes[rows], scale[:, None], scaled)
                np.subtract(block, scaled, out=scaled)
                lacks = error.reshape(-1, BLOCK)[rows]
                np.copyto(lacks, scaled, where=np.isfinite(scale)[:, None])


def decode(encoding: Encoding, data: NumpyArray, out: NumpyArray) -> None:
    """Put the numbers that `encode` has made the bytes of `data` from into `out`, float32."""
    if encoding.read is None:
        out[...] = data.view(encoding.dtype)
        return
    codes, scales = _halves(encoding, data, out.size)
    for rows in _chunks(out.size):
        encoding.read(codes[rows], scales[rows, None], out.reshape(-1, BLOCK)[rows])


def _halves(encoding: Encoding, data: NumpyArray, size: int) -> tuple[NumpyArray, NumpyArray]:
    """Return the codes, a row for each block, and the scales."""
    codes = data[:size].view(encoding.dtype).reshape(-1, BLOCK)
    return codes, data[size:].view(np.float32)


def _chunks(size: int) -> Iterator[slice]:
    step = _CHUNK // BLOCK
    return (slice(start, start + step) for start in range(0, size // BLOCK, step))


def _scales(magnitudes: NumpyArray, largest: float) -> NumpyArray:
    scales: NumpyArray = magnitudes / np.float32(largest)
    scales[magnitudes < _SMALLEST] = 0
    scales[~np.isfinite(magnitudes)] = np.nan
    return scales


# ---- integers


def _write_integers(scaled: NumpyArray, codes: NumpyArray) -> None:
    np.copyto(codes, np.rint(scaled, out=scaled), casting="unsafe")


# ---- floats of one byte: ml_dtypes casts them twenty times as slowly as these tables

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@cache
def _codes() -> NumpyArray:
    """Return the code of each bfloat16, by its bits; made when a model first needs it."""
    with np.errstate(invalid="ignore", over="ignore"):
        every = np.arange(1 << 16, dtype=np.uint16).view(_BFLOAT16)
        codes: NumpyArray = every.astype(_FP8).view(np.uint8)
        return codes


_VALUES = np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)


def _write_floats(scaled: NumpyArray, codes: NumpyArray) -> None:
    bits = scaled.astype(_BFLOAT16).view(np.uint16)
    np.take(_codes(), bits, out=codes, mode="clip")


def _read_floats(codes: NumpyArray, scales: NumpyArray, out: NumpyArray) -> None:
    np.take(_VALUES, codes, out=out, mode="clip")
    np.multiply(out, scales, out=out)


ENCODINGS = {
    "float16": Encoding(np.dtype(np.float16)),
    "bfloat16": Encoding(_BFLOAT16),
    "int8": Encoding(np.dtype(np.int8), 127.0, _write_integers, np.multiply),
    "fp8": Encoding(np.dtype(np.uint8), 448.0, _write_floats, _read_floats),
}
"""By the name that ``compress=`` takes."""
