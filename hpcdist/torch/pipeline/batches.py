"""Micro-batches: how the batch of a step is cut, and what ranks tell each other of it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hpcdist.errors import MismatchError, UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.parallel.hybrid_options import Pipeline
from hpcdist.text import counted


class Batch(NamedTuple):
    """The batch of a step: inputs of the first stage, labels of the last one."""

    inputs: Any
    labels: Any


def as_batch(data: Any) -> Batch:
    """Return what `train_batch` was given as inputs and labels; None for what is not there.

    Raises:
        UsageError: it is not ``(inputs, labels)``.

    """
    if data is None:
        return Batch(None, None)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        got = (
            counted(len(data), "entry", "entries")
            if isinstance(data, (tuple, list))
            else type(data).__name__
        )
        raise UsageError(
            "train_batch and eval_batch take (inputs, labels), each a tensor or tensors in tuples, "
            f"lists and dicts, or None where a rank does not need it, got {got}"
        )
    return Batch(*data)


def rows_of(part: Any, what: str) -> int | None:
    """Return how many samples the inputs or the labels have; None if they are not there."""
    tensors = [each for each in tree_leaves(part) if isinstance(each, torch.Tensor)]
    if not tensors:
        if part is not None:
            raise UsageError(f"the {what} have no tensor; give tensors, a sample in each row")
        return None
    rows = {each.shape[0] if each.ndim else 0 for each in tensors}
    if len(rows) > 1 or 0 in rows:
        raise UsageError(
            f"the tensors of the {what} have {sorted(rows)} rows; give each a row for each sample, "
            "and at least one"
        )
    return rows.pop()


def common_rows(told: Sequence[tuple[int, int]]) -> int:
    """Return how many samples there are, as told by world ranks; by some 0, which do not know.

    Raises:
        MismatchError: two ranks differ.

    """
    known = [(rank, rows) for rank, rows in told if rows]
    if not known:
        raise UsageError(
            "no rank has a batch; give the first stage inputs, and the last one labels"
        )
    (first, rows), *others = known
    for rank, other in others:
        if other != rows:
            raise MismatchError(
                f"the ranks of the pipeline have different batches: rank {first} has {rows} "
                f"samples, but rank {rank} has {other}; give all stages the same batch"
            )
    return rows


def cuts_of(rows: int, options: Pipeline) -> list[int]:
    """Return the first sample of each micro-batch, and the number of samples.

    The last micro-batch may be smaller, and there may be fewer of them.

    Raises:
        UsageError: there are more samples than micro-batches take.

    """
    size, most = options.micro_batch_size, options.accumulate_steps
    if rows > size * most:
        raise UsageError(
            f"a batch of {rows} samples is more than accumulate_steps={most} micro-batches of "
            f"micro_batch_size={size}; let one of them be larger, for example "
            f"micro_batch_size={-(-rows // most)}"
        )
    return [*range(0, rows, size), rows]


def cut(part: Any, cuts: Sequence[int]) -> list[Any]:
    """Return inputs or labels of each micro-batch, as views."""

    def one(first: int, end: int) -> Any:
        return tree_map(lambda each: each[first:end] if torch.is_tensor(each) else each, part)

    return [one(first, end) for first, end in itertools.pairwise(cuts)]
