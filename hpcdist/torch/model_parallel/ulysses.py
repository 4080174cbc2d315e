"""Attention over a sequence of which each rank has a part (the axis "sep"), by Ulysses.

Ranks exchange parts of the sequence for heads: each computes some heads over the whole sequence, by
torch's own kernel, and gives the parts of its result back. What a rank sends does not grow with the
number of ranks.

Reference: Jacobs et al., DeepSpeed Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812 (torch's habit)

from hpcdist.comm.group import Group
from hpcdist.errors import UsageError
from hpcdist.torch.model_parallel.axes import axis_group
from hpcdist.torch.model_parallel.functions import all_to_all, scatter_to

HEADS, SEQUENCE = -3, -2
"""The dimensions of queries, keys and values, as torch has them."""


def sep_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: str = "ulysses",
    sep_group: Group | None = None,
) -> torch.Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention` over the whole sequence.

    Collective, and so is the backward pass.

    Args:
        query: of shape (..., heads, part of the sequence, length of a head); the parts are equal,
            and in the order of the ranks.
        key: the same, with as many heads, or fewer with `enable_gqa`.
        value: as `key`.
        attn_mask: for the whole sequence, with one row of heads, or all of them.
        dropout_p: as torch's.
        is_causal: as torch's; positions are those in the whole sequence.
        scale: as torch's.
        enable_gqa: as torch's.
        method: ``"ulysses"``, the only one there is.
        sep_group: the ranks; None for the axis "sep" of the grid of `fleet.init`.

    Returns:
        This rank's part of the sequence, of the shape of `query` but for the length of a head.

    Raises:
        UsageError: the heads cannot be divided, or another method is wanted.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import sep_attention
        >>> query = key = value = torch.ones(1, 4, 6, 8)  # this rank's 6 places of the sequence
        >>> sep_attention(query, key, value, sep_group=dist.init_parallel_env()).shape
        torch.Size([1, 4, 6, 8])

    """
    _check_method(method)
    group = axis_group("sep", sep_group)
    check_heads([query, key, value], group)
    heads = query.shape[HEADS]
    query, key, value = by_heads([query, key, value], group)
    if attn_mask is not None and attn_mask.ndim > 2 and attn_mask.shape[HEADS] == heads:
        attn_mask = scatter_to(attn_mask, group, HEADS)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return all_to_all(attended, group, cut=SEQUENCE, join=HEADS)


@final
class UlyssesAttention(torch.nn.Module):  # type: ignore[misc] # torch is untyped
    """`sep_attention` as a module; there is no dropout in evaluation.

    Arguments as of `sep_attention`.

    Example:
        >>> import torch, hpcdist as dist
        >>> from hpcdist.torch.model_parallel import UlyssesAttention
        >>> attention = UlyssesAttention(is_causal=True, sep_group=dist.init_parallel_env())
        >>> query = key = value = torch.ones(1, 4, 6, 8)
        >>> attention(query, key, value).shape
        torch.Size([1, 4, 6, 8])

    """

    def __init__(
        self,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        method: str = "ulysses",
        sep_group: Group | None = None,
    ) -> None:
        super().__init__()
        _check_method(method)
        self.dropout_p, self.is_causal = dropout_p, is_causal
        self.scale, self.enable_gqa = scale, enable_gqa
        self.group = axis_group("sep", sep_group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention over the whole sequence. Collective.

        Args:
            query: as of `sep_attention`, like the others.
            key: of the same.
            value: of the same.
            attn_mask: of the same.

        """
        dropout = self.dropout_p if self.training else 0.0
        return sep_attention(
            query,
            key,
            value,
            attn_mask,
            dropout,
            self.is_causal,
            self.scale,
            self.enable_gqa,
            sep_group=self.group,
        )


def _check_method(method: str) -> None:
    if method != "ulysses":
        raise UsageError(
            f"attention over the axis 'sep' is done by \"ulysses\", got method={method!r}; ring "
            "attention is not there, as it needs a kernel that returns its softmax's sums, which "
            "torch does not have on all devices: use as many ranks as divide the heads"
        )


def check_heads(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Refuse queries, keys and values whose heads the ranks cannot have equal parts of."""
    for tensor, what in zip(tensors, ("query", "key", "value"), strict=True):
        if tensor.ndim < 3:
            raise UsageError(
                f"{what} has the shape (..., heads, sequence, length of a head), got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.shape[HEADS] % group.nranks:
            raise UsageError(
                f"the {tensor.shape[HEADS]} heads of {what} must be divisible by the "
                f"{group.nranks} ranks of sep; choose a degree of sep that divides them, or repeat "
                "the heads of key and value"
            )


def by_heads(tensors: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Return some heads of the whole sequence, for parts of it with all heads. Collective."""
    if len({(each.shape, each.dtype) for each in tensors}) > 1:
        return [all_to_all(each, group, cut=HEADS, join=SEQUENCE) for each in tensors]
    together = all_to_all(torch.stack([*tensors]), group, cut=HEADS, join=SEQUENCE)
    return list(together.unbind())
