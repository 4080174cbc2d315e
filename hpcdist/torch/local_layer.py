"""`LocalLayer`: a module that computes on this rank's parts, between modules that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcdist.errors import UsageError
from hpcdist.mesh.placements import Placement
from hpcdist.mesh.process_mesh import ProcessMesh
from hpcdist.torch.mesh import from_local, torch_placements

Attributes = Sequence[tuple[ProcessMesh, Sequence[Placement]]]


class LocalLayer(torch.nn.Module):  # type: ignore[misc] # torch is untyped
    """Base of modules whose ``forward`` gets and returns this rank's parts.

    It takes DTensors and returns DTensors; between the two everything is an ordinary tensor. Its
    parameters are ordinary ones, too.

    Args:
        out_dist_attrs: for each output, the mesh and the placements of the whole output, of which
            this rank returns a part. All parts have the same length.
        grad_dist_attrs: for each input, the mesh and the placements of its gradient; those of the
            input if not given.

    Example:
        class MeanLoss(dist.LocalLayer):  # of the parts: an average of averages
            def forward(self, outputs, labels):
                return (outputs - labels).square().mean()

        loss = MeanLoss([(mesh, [dist.Partial(dist.ReduceType.kRedAvg)])])

    """

    def __init__(
        self, out_dist_attrs: Attributes, grad_dist_attrs: Attributes | None = None
    ) -> None:
        super().__init__()
        self.out_dist_attrs = _checked(out_dist_attrs, "out_dist_attrs")
        self.grad_dist_attrs = _checked(grad_dist_attrs or (), "grad_dist_attrs")

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Compute on this rank's parts. Local, unless ``forward`` communicates."""
        local = [self._local(each, index) for index, each in enumerate(inputs)]
        outputs = super().__call__(*local, **kwargs)
        listed = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        if len(listed) != len(self.out_dist_attrs):
            raise UsageError(
                f"out_dist_attrs describes {len(self.out_dist_attrs)} outputs, but forward of "
                f"{type(self).__name__} returned {len(listed)}"
            )
        spread = [
            from_local(each, mesh, placements)
            for each, (mesh, placements) in zip(listed, self.out_dist_attrs, strict=True)
        ]
        return type(outputs)(spread) if isinstance(outputs, (list, tuple)) else spread[0]

    def _local(self, value: Any, index: int) -> Any:
        if not isinstance(value, DTensor):
            return value
        if index >= len(self.grad_dist_attrs):
            return value.to_local()
        mesh, placements = self.grad_dist_attrs[index]
        return value.to_local(grad_placements=torch_placements(placements, mesh))


def _checked(attributes: Any, name: str) -> list[tuple[ProcessMesh, Sequence[Placement]]]:
    listed: list[Any] = list(attributes) if isinstance(attributes, (list, tuple)) else [None]
    for each in listed:
        is_pair = isinstance(each, (list, tuple)) and len(each) == 2
        if not is_pair or not isinstance(each[0], ProcessMesh):
            raise UsageError(
                f"{name} must be a list of pairs of a mesh and its placements, got {attributes!r}"
            )
    return [(mesh, list(placements)) for mesh, placements in listed]
