"""`split`: one linear layer or embedding whose weight is cut over the ranks of an axis.

Here arguments are checked; `split_arrays` computes with arrays, and `hpcdist.torch.split` with
tensors, which have gradients. Both get a `Layer` and the `Place` where it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from hpcdist.arrays.libraries import row_of
from hpcdist.comm.dispatch import as_flag
from hpcdist.errors import UsageAssertionError, UsageError
from hpcdist.lazy import load
from hpcdist.mesh.agreement import agree, refuse
from hpcdist.mesh.axes import model_axis, model_line, whole_line
from hpcdist.mesh.dist_array import DistArray
from hpcdist.mesh.layout import default_cuts
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.named_tuple import NamedTuple


def split(
    x: Any,
    size: Sequence[int],
    operation: str,
    axis: int = 0,
    num_partitions: int = 1,
    gather_out: bool = True,
    weight_attr: Any = None,
    bias_attr: Any = None,
    name: str | None = None,
) -> Any:
    """Apply a linear layer or an embedding whose weight is cut over the ranks.

    The ranks are those along the axis ``"mp"`` of the mesh, or its only axis; the mesh is that of
    `x`, the current one (`set_mesh`), or else all ranks in a row. Collective over these ranks. The
    parts are cut as `Shard` cuts, so that sizes need not be divisible.

    Args:
        x: the input: a NumPy array or torch tensor that the ranks have alike, or a `DistArray` or
            DTensor. Before a linear layer cut by its inputs it may also be this rank's part of the
            last dimension.
        size: the shape of the weight: inputs and outputs, or entries and features.
        operation: ``"linear"``, which is ``x @ weight + bias``, or ``"embedding"``, the rows of
            the weight that the integers `x` name.
        axis: the dimension of the weight that is cut: of a linear layer 0, its inputs, or 1, its
            outputs; of an embedding 0.
        num_partitions: how many ranks there are; 1 for a layer that every rank computes alone.
        gather_out: whether every rank gets the whole result. Otherwise each has its part of the
            outputs, or where the weight is cut along 0 its contribution to their sum.
        weight_attr: the weight: an array, tensor or parameter of this size or this rank's part of
            it, a `DistArray` or DTensor, or a function that makes the whole weight from its shape.
            None draws one by Xavier's rule for this call: torch's from its default generator, which
            must be seeded alike on all ranks; arrays by `name`.
        bias_attr: the bias of a linear layer, likewise; None for zeros, False for none.
        name: of the layer, for messages, and to draw the weight.

    Returns:
        The result, of the kind of `x`.

    Raises:
        UsageError: a wrong argument; `RemoteError` on the other ranks.
        MismatchError: the ranks call it with other sizes.

    Example:
        >>> import numpy as np, hpcdist as dist
        >>> world = dist.init_parallel_env()
        >>> x, weight = np.ones((2, 3)), np.arange(15.0).reshape(3, 5)
        >>> dist.split(x, (3, 5), "linear", 1, world.nranks, weight_attr=weight)
        array([[15., 18., 21., 24., 27.],
               [15., 18., 21., 24., 27.]])

    """
    place: Place | None = None
    layer: Layer | None = None
    try:
        place = _place_of(x, num_partitions)
        layer = _layer(size, operation, axis, num_partitions, gather_out, bias_attr, name)
        _check_parts(layer, place)
        prepare = load(row_of(type(x), _TENSORS) or _ARRAYS)
        compute = prepare(x, layer, place, weight_attr, bias_attr)
    except UsageError as error:
        if layer is not None and layer.parts == 1:  # nobody waits for this rank
            raise
        raise refuse(None if place is None else place.mesh, error) from None
    if layer.parts > 1:
        agree(place.mesh, f"split {layer.told}", np.dtype(np.uint8))
    return compute()


_ARRAYS = "hpcdist.parallel.split_arrays:prepared"
_TENSORS = {("torch", "Tensor"): "hpcdist.torch.split:prepared"}


class Layer(NamedTuple):
    """What is split, checked."""

    operation: str
    size: tuple[int, int]
    axis: int
    parts: int
    gathers: bool
    has_bias: bool
    name: str

    @property
    def told(self) -> str:
        """In words, which all ranks have to say."""
        rows, columns = self.size
        gathered = "" if self.gathers else ", not gathered"
        return f"{self.operation} {self.name!r} of {rows} x {columns} along {self.axis}{gathered}"

    @property
    def is_summed(self) -> bool:
        """Whether the results of the ranks are contributions to a sum."""
        return self.axis == 0 and self.parts > 1

    @property
    def cuts_outputs(self) -> bool:
        """Whether each rank has a part of the outputs."""
        return self.axis == 1 and self.parts > 1

    def bounds(self, part: int) -> tuple[int, int]:
        """Return where a part of the weight begins and ends along `axis`."""
        return [*pairwise(default_cuts(self.size[self.axis], (self.parts,)))][part]


class Place(NamedTuple):
    """The mesh that a layer is on, and the number of the axis that cuts it."""

    mesh: ProcessMesh
    axis: int

    def part(self, layer: Layer) -> int:
        """Return which part of the weight this rank has."""
        here = self.mesh.coordinate
        return here[self.axis] if here is not None and layer.parts > 1 else 0


# ---- arguments


def _layer(
    size: Any, operation: Any, axis: Any, parts: Any, gathers: Any, bias: Any, name: Any
) -> Layer:
    if operation not in ("linear", "embedding"):
        raise UsageAssertionError(f"operation must be 'linear' or 'embedding', got {operation!r}")
    lengths = _integers(size)
    if len(lengths) != 2 or min(lengths) < 1:
        raise UsageAssertionError(f"size must be two positive integers, got {size!r}")
    if _integers([axis]) not in ((0,), (1,)):
        raise UsageError(f"axis must be 0 or 1, got {axis!r}")
    if operation == "embedding" and axis == 1:
        raise UsageAssertionError("an embedding is cut along its entries: axis must be 0, got 1")
    count = _integers([parts])
    if min(count, default=0) < 1:
        raise UsageError(f"num_partitions must be a positive integer, got {parts!r}")
    if operation == "embedding" and not (bias is None or bias is False):
        raise UsageError("an embedding has no bias; leave bias_attr out")
    if name is not None and not isinstance(name, str):
        raise UsageError(f"name must be a string or None, got {name!r}")
    has_bias = operation == "linear" and bias is not False
    gathers = as_flag(gathers, "gather_out")
    rows, columns = lengths
    return Layer(operation, (rows, columns), int(axis), count[0], gathers, has_bias, name or "")


def _integers(values: Any) -> tuple[int, ...]:
    """Return integers; nothing if there are others among them."""
    try:
        listed = [*values]
        return () if bool in map(type, listed) else tuple(map(operator.index, listed))
    except TypeError:
        return ()


def _place_of(x: Any, parts: Any) -> Place:
    if isinstance(x, DistArray):
        mesh = x.process_mesh
    elif hasattr(x, "device_mesh"):  # a DTensor
        mesh = load("hpcdist.torch.mesh:process_mesh_of")(x.device_mesh)
    else:
        mesh = whole_line(parts) or model_line("split")
    if mesh.coordinate is None:
        raise UsageError(f"this rank is not part of {mesh!r}; let its ranks alone call split")
    return Place(mesh, model_axis(mesh, "split"))


def _check_parts(layer: Layer, place: Place) -> None:
    ranks = place.mesh.sizes[place.axis]
    if layer.parts not in (1, ranks):
        raise UsageAssertionError(
            f"num_partitions is {layer.parts}, but {place.mesh!r} has {ranks} ranks along "
            f"{place.mesh.names[place.axis]!r}; give their number"
        )


# ---- what an engine is given


def is_part(shape: Sequence[int], layer: Layer, part: int) -> bool:
    """Return whether an input of a linear layer is this rank's part of the last dimension.

    Raises:
        UsageError: it is neither that nor whole.

    """
    lo, hi = layer.bounds(part) if layer.is_summed else (0, layer.size[0])
    width = shape[-1] if shape else 0
    if width == layer.size[0]:
        return False
    if width != hi - lo:
        own = f" or, as this rank's part of it, {hi - lo}" if layer.is_summed else ""
        raise UsageError(
            f"the last dimension of x must be {layer.size[0]}{own}, the inputs of the layer, got "
            f"the shape {tuple(shape)}"
        )
    return True


def part_of_weight(value: Any, layer: Layer, part: int) -> Any:
    """Return this rank's part of a weight that is given: as a whole, or as this part."""
    lo, hi = layer.bounds(part)
    own = [*layer.size]
    own[layer.axis] = hi - lo
    return _own("weight_attr", value, layer.size, tuple(own), slice(lo, hi), layer.axis)


def part_of_bias(value: Any, layer: Layer, part: int) -> Any:
    """Return what this rank adds of a bias that is given."""
    whole = layer.size[1:]
    lo, hi = layer.bounds(part) if layer.cuts_outputs else (0, whole[0])
    return _own("bias_attr", value, whole, (hi - lo,), slice(lo, hi), 0)


def _own(
    what: str, value: Any, whole: tuple[int, ...], own: tuple[int, ...], where: slice, dim: int
) -> Any:
    made = value(whole) if callable(value) else value
    shape = tuple(getattr(made, "shape", ()))
    if shape == own:
        return made
    if shape == whole:
        return made[(slice(None),) * dim + (where,)]
    raise UsageError(
        f"{what} must be an array of the shape {whole}, or this rank's part of it, {own}, or a "
        f"function that makes the whole, or None, got {value!r}"
    )


def check_entries(layer: Layer, kind: str, low: int, high: int) -> None:
    """Refuse what names no entries of an embedding: other than integers in its range."""
    if kind not in "iu":
        raise UsageError("an embedding takes integers, the numbers of its entries")
    if not 0 <= low <= high < layer.size[0]:
        raise UsageError(
            f"x must name entries 0 to {layer.size[0] - 1} of the embedding, got {low} to {high}"
        )
