"""Models in files under Paddle's names: ``paddle.distributed.io``."""

from hpcdist.checkpoint.persistables import (
    is_persistable,
    load_inference_model_distributed,
    load_persistables,
    save_persistables,
)

__all__ = [
    "is_persistable",
    "load_inference_model_distributed",
    "load_persistables",
    "save_persistables",
]
