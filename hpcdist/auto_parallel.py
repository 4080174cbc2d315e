"""What is importable from ``paddle.distributed.auto_parallel``, as far as it is here."""

from hpcdist.data.shard_loader import ShardDataloader
from hpcdist.mesh.process_mesh import ProcessMesh, create_mesh, get_mesh, set_mesh
from hpcdist.parallel.absent import Engine, RingFlashAttention
from hpcdist.parallel.automatic import ToDistributedConfig
from hpcdist.parallel.strategy import Strategy

__all__ = [
    "Engine",
    "ProcessMesh",
    "RingFlashAttention",
    "ShardDataloader",
    "Strategy",
    "ToDistributedConfig",
    "create_mesh",
    "get_mesh",
    "set_mesh",
]
