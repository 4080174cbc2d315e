"""`Encoded`: each rank adds up a share of the bucket; what travels are codes of one or two bytes.

An alltoall brings each rank its share of everyone's bucket, as codes; it decodes them, adds them up
in float32, in the order of the ranks, and encodes the sum, which an all_gather brings to all. Every
rank decodes the same bytes, so all get the same bits.

[Note: error feedback] What encoding has rounded away is added to the next gradient, before that is
encoded, so that nothing is lost for good: by each rank for its bucket, and by the rank that encodes
a share of the sum for that. Of blocks with NaN or infinity what was kept stays as it was.
Sources: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Tang et al.,
DoubleSqueeze, ICML 2019 (both ways).
"""

from __future__ import annotations

from math import prod
from typing import final

import numpy as np

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.collectives import all_gather, alltoall
from hpcdist.comm.group import Group
from hpcdist.parallel.compressed.encodings import BLOCK, ENCODINGS, decode, encode
from hpcdist.parallel.compressed.scheme import Kept, Scheme, Shapes
from hpcdist.parallel.compressed.steps import Steps
from hpcdist.transport.call.kinds import Kind


@final
class Encoded(Scheme):
    """`name` is that of an encoding; those with scales have error feedback."""

    def __init__(self, name: str) -> None:
        self._encoding = ENCODINGS[name]

    def nbytes(self, shapes: Shapes) -> int:
        """See `Scheme.nbytes`."""
        return self._encoding.nbytes(self.padded(sum(map(prod, shapes)), 1))

    def padded(self, size: int, ranks: int) -> int:
        """See `Scheme.padded`: each rank has whole blocks of it."""
        return -(-size // (BLOCK * ranks)) * BLOCK * ranks

    def add_up(
        self, values: NumpyArray, shapes: Shapes, kept: Kept, group: Group, steps: Steps
    ) -> None:
        """See `Scheme.add_up`."""
        ranks = group.nranks
        share = self._encoding.nbytes(values.size // ranks)
        sent, received = (np.empty(ranks * share, np.uint8) for _ in range(2))
        parts = values.reshape(ranks, -1)
        steps.compute(self._encode, parts, sent.reshape(ranks, -1), kept, "bucket")
        steps.communicate(Kind.ALLTOALL, group, alltoall, received, sent)
        mine = sent[:share]
        steps.compute(self._sum, received.reshape(ranks, -1), parts[:1], mine, kept)
        steps.communicate(Kind.ALL_GATHER, group, all_gather, received, mine)
        steps.compute(self._decode_all, received.reshape(ranks, -1), parts)

    def _sum(self, received: NumpyArray, total: NumpyArray, out: NumpyArray, kept: Kept) -> None:
        part = np.empty_like(total[0])
        decode(self._encoding, received[0], total[0])
        for data in received[1:]:
            decode(self._encoding, data, part)
            total += part
        self._encode(total, out[None], kept, "share")

    def _encode(self, parts: NumpyArray, out: NumpyArray, kept: Kept, what: str) -> None:
        """Encode rows of numbers, and keep what that rounds away; see [Note: error feedback]."""
        if what not in kept:
            has_scales = self._encoding.largest > 0
            kept[what] = np.zeros_like(parts) if has_scales else [None] * len(parts)
        for part, data, error in zip(parts, out, kept[what], strict=True):
            encode(self._encoding, part, data, error)

    def _decode_all(self, data: NumpyArray, parts: NumpyArray) -> None:
        for encoded, part in zip(data, parts, strict=True):
            decode(self._encoding, encoded, part)
