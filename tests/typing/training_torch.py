"""Training a torch module: what `DataParallel` returns goes wherever a module does."""
# pyright: standard, reportMissingImports=false

import torch
from typing_extensions import assert_type

import hpcdist as dist
from hpcdist import fleet, torch as hpcdist_torch
from hpcdist.fleet.meta_parallel import LayerDesc, PipelineLayer


class Stages(PipelineLayer):
    def __init__(self, width: int) -> None:
        self.width = width
        layers = [LayerDesc(torch.nn.Linear, width, 1)]
        super().__init__(layers=layers, loss_fn=torch.nn.functional.mse_loss)


def evaluate(model: torch.nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(model(torch.ones(2, 8)).mean())


def main() -> None:
    world = dist.init_parallel_env()
    module = hpcdist_torch.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Linear(8, 1))
    model = dist.DataParallel(module, group=world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for inputs in dist.shard_dataset(torch.ones(64, 8)).batches(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    assert_type(evaluate(model), float)
    model.train()
    model.load_state_dict(model.state_dict())
    tensor = torch.ones(3)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert isinstance(model, dist.DataParallel)
    fleet.init()
    stages = Stages(8)
    assert fleet.distributed_model(stages).module is stages
    assert stages.width == 8


if __name__ == "__main__":
    main()
