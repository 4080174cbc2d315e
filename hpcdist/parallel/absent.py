"""Names of Paddle's that have no counterpart: each says what to use."""

from __future__ import annotations

from typing import Any, NoReturn, final

from hpcdist.errors import UsageError


@final
class Engine:
    """Not there: `to_static` makes what trains, evaluates and predicts."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "Engine is not there, as nothing is compiled: model = dist.to_static(layer, loader, "
            "loss, optimizer, strategy) trains a batch when it is called, and the loop over the "
            "batches is yours"
        )


@final
class RingFlashAttention:
    """Not there: `ContextParallel` attends to sequences that are cut."""

    def __init__(self, *_: Any, **__: Any) -> None:
        _refuse_attention()

    @staticmethod
    def apply(*_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        _refuse_attention()


def _refuse_attention() -> NoReturn:
    raise UsageError(
        "RingFlashAttention is not there: hpcdist.torch.sep_attention, and the plan "
        "ContextParallel('all2all') of dist.parallelize, attend to sequences that are cut"
    )
