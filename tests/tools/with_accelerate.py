"""accelerate: the process group is there before the Accelerator, which takes it as it is."""

import sys

import torch
from accelerate import Accelerator
from problem import dataset, network, tell
from torch.utils.data import DataLoader

import hpcdist.torch  # noqa: F401

torch.distributed.init_process_group(sys.argv[1])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

model = network()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
loader = DataLoader(dataset(), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses, hits = [], []
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            out = model(x)
            loss = torch.nn.functional.cross_entropy(out, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        hits.append(accelerator.gather_for_metrics((out.argmax(1) == y).float()).mean().item())

assert accelerator.num_processes == torch.distributed.get_world_size() > 1
assert torch.distributed.get_backend() == sys.argv[1]
tell(losses=losses, hits=hits)
accelerator.end_training()
