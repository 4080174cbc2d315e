"""torchmetrics: metrics meet in whatever process group there is."""

import sys

import torch
from problem import dataset, network, tell
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

import hpcdist.torch  # noqa: F401

torch.distributed.init_process_group(sys.argv[1])
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
assert torch.distributed.get_backend() == sys.argv[1]
assert size > 1

model = torch.nn.parallel.DistributedDataParallel(network())
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
sampler = DistributedSampler(dataset())
loss_of = torch.nn.CrossEntropyLoss()
mean, most, total = MeanMetric(), MaxMetric(), SumMetric()
per_class = MetricCollection(
    [MulticlassAccuracy(3), MulticlassF1Score(3, average=None), MulticlassAUROC(3)]
)
ragged = CatMetric()  # as many values as the rank has rows

losses, scores = [], []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in DataLoader(dataset(), batch_size=4, sampler=sampler):
        optimizer.zero_grad()
        out = model(x)
        loss = loss_of(out, y)
        loss.backward()
        optimizer.step()
        mean.update(loss)
        most.update(loss)
        total.update(len(y) + rank)
        per_class.update(out.detach(), y)
        ragged.update(out.detach()[: 1 + rank, 0])
    losses.append([metric.compute() for metric in (mean, most, total)])
    scores += [each.flatten() for each in per_class.compute().values()]
    for metric in (mean, most, total, per_class):
        metric.reset()

values = ragged.compute()
assert len(values) == sum(12 * (1 + each) for each in range(size)), len(values)
tell(losses=losses, scores=torch.cat(scores), ragged=values)
torch.distributed.destroy_process_group()
