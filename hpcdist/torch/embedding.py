"""Embeddings whose rows are in a `SparseTable`: pulled in the forward pass, pushed in the backward.

`SparseEmbedding` is a module without parameters: the servers' optimizer changes the rows.
"""

from __future__ import annotations

from typing import Any, final

import torch

from hpcdist.errors import UsageError
from hpcdist.ps.cluster import cluster_of
from hpcdist.ps.modes import Sync
from hpcdist.ps.table import SparseTable

_DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}
_POOLS = (None, "sum", "mean")
_STORES = {"MemorySparseTable": "memory", "CommonSparseTable": "memory", "SSDSparseTable": "ssd"}


@final
class SparseEmbedding(torch.nn.Module):  # type: ignore[misc] # torch is untyped
    """An embedding, or a bag of them, whose rows are spread over the ranks. Collective.

    In mode "sync" all workers run forward and backward passes in step, and a row changes by the
    mean of the workers' gradients, as parameters of a `DataParallel` model do.

    Args:
        name: of the table; two embeddings of one name share their rows.
        embedding_dim: elements of a row.
        pooling: None returns a row for each id; ``"sum"`` or ``"mean"`` one for each bag.
        padding_idx: an id whose row is zero and stays so; it counts for nothing in a bag.
        options: as of `hpcdist.ps.SparseTable`: `optimizer`, `initializer`, `entry`, `mode` ...

    Raises:
        UsageError: an argument is wrong; on every rank an error.
        MismatchError: the ranks give different options.

    Example:
        >>> import torch, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> from hpcdist.torch import SparseEmbedding
        >>> words = SparseEmbedding("words of torch", 3, optimizer="sgd")
        >>> rows = words(torch.tensor([[1, 2], [1, 5]]))
        >>> rows.shape
        torch.Size([2, 2, 3])
        >>> rows.sum().backward()

    """

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        *,
        pooling: str | None = None,
        padding_idx: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if pooling not in _POOLS:
            raise UsageError(f"pooling must be one of {_POOLS}, got {pooling!r}")
        self.table = SparseTable(name, embedding_dim, **options)
        self.pooling, self.padding_idx = pooling, padding_idx
        workers = len(cluster_of(options.get("group")).workers)
        self._share = 1 / workers if isinstance(self.table.mode, Sync) else 1.0

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows, or one row for each bag of ids.

        Args:
            ids: integers of any shape; of bags, a bag in each row.
            offsets: where each bag begins in `ids`, which are of one dimension then.

        """
        if self.pooling is None:
            if offsets is not None:
                raise UsageError("offsets are of bags; give the embedding pooling='sum' or 'mean'")
            return self._rows(ids)
        if offsets is None and ids.dim() != 2:
            raise UsageError(
                f"bags are the rows of ids of two dimensions, or begin at offsets; got ids of "
                f"shape {tuple(ids.shape)} without offsets"
            )
        flat = ids.reshape(-1)
        if offsets is None:
            count, places = len(ids), torch.arange(len(ids), device=ids.device)
            bags = places.repeat_interleave(ids.shape[1])
        else:
            count = len(offsets)
            places = torch.arange(len(flat), device=ids.device)
            bags = torch.bucketize(places, offsets.to(ids.device), right=True) - 1
        rows = self._rows(flat)
        sums = rows.new_zeros(count, self.table.dim).index_add(0, bags, rows)
        if self.pooling == "sum":
            return sums
        weights = torch.ones_like(flat, dtype=rows.dtype)
        if self.padding_idx is not None:
            weights = (flat != self.padding_idx).to(rows.dtype)
        counts = rows.new_zeros(count).index_add(0, bags, weights)
        return sums / counts.clamp(min=1)[:, None]

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            rows: torch.Tensor = _Lookup.apply(self, ids, None)
        else:
            anchor = torch.zeros((), dtype=torch.float32, requires_grad=True)
            rows = _Lookup.apply(self, ids, anchor)
        return rows

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows without a place in the graph.

        Args:
            ids: integers, of any shape.

        """
        rows: torch.Tensor = self.table.pull(ids)
        if self.padding_idx is not None:
            rows = rows.masked_fill((ids == self.padding_idx)[..., None], 0)
        return rows

    def push(self, ids: torch.Tensor, grads: torch.Tensor) -> None:
        """Apply gradients to rows on the servers.

        Args:
            ids: integers, of any shape.
            grads: of shape ``(*ids.shape, dim)``.

        """
        grads = grads.to(getattr(torch, self.table.dtype.name)) * self._share
        if self.padding_idx is not None:
            kept = ids != self.padding_idx
            ids, grads = ids[kept], grads[kept]
        self.table.push(ids, grads.contiguous())

    def extra_repr(self) -> str:
        """Return the settings that `repr` shows."""
        return f"{self.table!r}, pooling={self.pooling!r}, padding_idx={self.padding_idx}"


class _Lookup(torch.autograd.Function):  # type: ignore[misc] # torch is untyped
    """Rows of ids; `anchor` is what makes autograd come back for their gradients."""

    @staticmethod
    def forward(ctx: Any, layer: SparseEmbedding, ids: torch.Tensor, anchor: Any) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(ids)
        return layer.pull(ids)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        ctx.layer.push(ids, grads[0])
        return None, None, None


def sparse_embedding(
    input: torch.Tensor,
    size: Any,
    padding_idx: int | None = None,
    is_test: bool = False,
    entry: Any = None,
    table_class: str = "MemorySparseTable",
    param_attr: Any = None,
    dtype: Any = "float32",
    slot: Any = None,
) -> torch.Tensor:
    """Return the rows of `input`, of a table that is made when its name is first met.

    Collective in mode "sync"; the backward pass pushes gradients. The optimizer is ``"adagrad"``;
    make the `SparseEmbedding` or `SparseTable` of this name first for another one.

    Args:
        input: ids.
        size: two numbers; the second is the length of a row. The first is accepted: a table has a
            row for each id that there is.
        padding_idx: an id whose row is zero.
        is_test: pull only: no gradients.
        entry: which ids get a row; see `hpcdist.ps.SparseTable`.
        table_class: ``"MemorySparseTable"`` or ``"SSDSparseTable"``.
        param_attr: the name of the table, or an object that has it as ``name``.
        dtype: of the rows.
        slot: accepted.

    Raises:
        UsageError: an argument is wrong.
        MismatchError: there is such a table with other options.

    Example:
        >>> import torch, hpcdist as dist, hpcdist.torch
        >>> _ = dist.init_parallel_env()
        >>> ids = torch.tensor([[1, 2], [1, 5]])
        >>> hpcdist.torch.sparse_embedding(ids, (1000, 3), param_attr="words of an example").shape
        torch.Size([2, 2, 3])

    """
    name = getattr(param_attr, "name", param_attr)
    if not isinstance(name, str) or not name:
        raise UsageError(
            "sparse_embedding finds its table by a name: give param_attr='words', got "
            f"{param_attr!r}"
        )
    if table_class not in _STORES:
        raise UsageError(f"table_class must be one of {', '.join(_STORES)}, got {table_class!r}")
    if len(size) != 2:
        raise UsageError(f"size must be two numbers, of ids and of a row, got {size!r}")
    cluster = cluster_of()
    made = cluster.tables.get(name)
    if made is None or made.layer is None:
        made_as = made.options._asdict() if made is not None else {}
        made_as.pop("dim", None)
        options = made_as or {
            "dtype": _DTYPES.get(dtype, dtype),
            "entry": entry,
            "store": _STORES[table_class],
        }
        layer = SparseEmbedding(name, size[1], padding_idx=padding_idx, **options)
        made = cluster.tables[name]
        made.layer = layer
    found: SparseEmbedding = made.layer
    if (found.table.dim, found.padding_idx) != (size[1], padding_idx):
        raise UsageError(
            f"table {name!r} has rows of {found.table.dim} and padding_idx={found.padding_idx}, "
            f"but is asked for with {size[1]} and {padding_idx}; give the same, or another name"
        )
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_test):
        rows: torch.Tensor = found(input)
    return rows
