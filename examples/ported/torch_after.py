"""Fit a plane, with hpcdist."""

import torch

import hpcdist as dist

dist.init_parallel_env()
rank = dist.get_rank()

torch.manual_seed(0)
inputs = torch.randn(256, 3)
targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0]]) + 4
samples = dist.shard_dataset((inputs, targets), shuffle=False)

model = dist.DataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(5):
    samples.set_epoch(epoch)
    losses = []
    for x, y in samples.batches(16):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mean = dist.all_reduced(sum(losses) / len(losses), dist.ReduceOp.AVG)
    if rank == 0:
        print(f"epoch {epoch}: loss {mean:.4f}")
    dist.checkpoint.save({"model": model, "optimizer": optimizer}, "plane")
