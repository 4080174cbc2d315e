"""How stages hand on tensors: a header tells how many there are, and of what kind; they follow.

So no rank has to know shapes beforehand, and micro-batches may differ. In place of tensors a rank
can hand on that it has none, because a stage has failed: see [Note: a stage fails] in `runner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch

from hpcdist.arrays.libraries import NumpyArray
from hpcdist.comm.group import Group
from hpcdist.comm.messages import isend, recv
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.transport.waiting.work import Work

Tensors = tuple[torch.Tensor, ...]

HEADER = 64
"""So many numbers a header has."""

_VOID = -1

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""What can be handed on; a header has the place in this row."""


class Kind(NamedTuple):
    """The description of a tensor that a receiver needs."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool


class Bundle(NamedTuple):
    """What one stage hands to the next: a tensor, or a tuple of them."""

    tensors: Tensors
    is_tuple: bool = False


def header_of(kinds: Sequence[Kind] | None, is_tuple: bool = False) -> NumpyArray:
    """Return the header of tensors, None for a failure. Pure.

    Raises:
        UsageError: they have too many dimensions, or a dtype that cannot be handed on.

    """
    numbers = [_VOID] if kinds is None else [len(kinds), int(is_tuple)]
    for dtype, shape, requires_grad in kinds or ():
        if dtype not in DTYPES:
            raise UsageError(f"stages cannot hand on tensors of {dtype}; convert them before")
        numbers += [DTYPES.index(dtype), int(requires_grad), len(shape), *shape]
    if len(numbers) > HEADER:
        raise UsageError(
            f"a stage hands on {len(kinds or ())} tensors, more than a header of {HEADER} numbers "
            "can tell of; concatenate some of them"
        )
    header = np.zeros(HEADER, np.int64)
    header[: len(numbers)] = numbers
    return header


def kinds_in(header: NumpyArray) -> tuple[list[Kind], bool] | None:
    """Return what a header tells; None for a failure. Pure."""
    count, is_tuple, *numbers = header.tolist()
    if count == _VOID:
        return None
    kinds, place = [], 0
    for _ in range(count):
        dtype, requires_grad, ndim = numbers[place : place + 3]
        place += 3 + ndim
        shape = tuple(numbers[place - ndim : place])
        kinds.append(Kind(DTYPES[dtype], shape, bool(requires_grad)))
    return kinds, bool(is_tuple)


@final
class Wire:
    """Messages between the ranks of `group`. What is under way is kept until it has arrived."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self.group, self.device = group, device
        self._sent: list[tuple[Work, Any]] = []

    def send(self, bundle: Bundle | None, rank: int, tag: int) -> None:
        """Begin to send tensors, or None for a failure, to a rank of the group."""
        kinds = None
        if bundle is not None:
            kinds = [Kind(each.dtype, tuple(each.shape), each.requires_grad) for each in bundle[0]]
        self._begin(header_of(kinds, bundle is not None and bundle.is_tuple), rank, tag)
        for each in bundle.tensors if bundle is not None else ():
            self._begin(each.detach(), rank, tag)

    def _begin(self, data: Any, rank: int, tag: int) -> None:
        self._sent = [each for each in self._sent if not each[0].is_completed()]
        self._sent.append((isend(data, self.group.ranks[rank], self.group, tag), data))

    def receive(self, rank: int, tag: int) -> Bundle | None:
        """Return what a rank of the group has sent, as leaves; None for a failure."""
        source = self.group.ranks[rank]
        header = np.empty(HEADER, np.int64)
        recv(header, source, self.group, tag=tag)
        told = kinds_in(header)
        if told is None:
            return None
        tensors = []
        for dtype, shape, requires_grad in told[0]:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            recv(tensor, source, self.group, tag=tag)
            tensors.append(tensor.requires_grad_(requires_grad))
        return Bundle(tuple(tensors), told[1])

    def flush(self) -> None:
        """Wait until everything has been received."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()
