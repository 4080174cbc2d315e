"""Fit a plane, with torch.distributed."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
inputs = torch.randn(256, 3)
data = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 4)
sampler = DistributedSampler(data, shuffle=False)
loader = DataLoader(data, batch_size=16, sampler=sampler)

model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    sampler.set_epoch(epoch)
    total = torch.zeros(1)
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}")
        torch.save(model.module.state_dict(), "plane.pt")
dist.destroy_process_group()
