"""DeepSpeed: `init_distributed` is told the backend; the optimizer is sharded (ZeRO 2)."""

import sys

import deepspeed
import torch
from problem import dataset, network, tell
from torch.utils.data import DataLoader, DistributedSampler

import hpcdist.torch  # noqa: F401

deepspeed.init_distributed(sys.argv[1])
model = network()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
losses = []
for x, y in DataLoader(dataset(), batch_size=4, sampler=DistributedSampler(dataset())):
    loss = torch.nn.functional.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
assert torch.distributed.get_backend() == sys.argv[1]
tell(losses=losses)
torch.distributed.destroy_process_group()
