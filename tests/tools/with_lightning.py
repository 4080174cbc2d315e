"""Lightning: the strategy is told the backend; the ranks are those of mpiexec."""

import os
import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from problem import dataset, network, tell
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hpcdist.torch  # noqa: F401


class Classifier(lightning.LightningModule):
    """Logs what it computes: the mean over the ranks, and sums of integers."""

    def __init__(self):
        super().__init__()
        self.network = network()
        self.losses, self.validated = [], []

    def training_step(self, batch, index):
        x, y = batch
        out = self.network(x)
        loss = cross_entropy(out, y)
        self.log("loss", loss, sync_dist=True)
        self.log("hits", (out.argmax(1) == y).sum(), sync_dist=True, reduce_fx="sum")
        self.log("most", (out.argmax(1) == y).sum(), sync_dist=True, reduce_fx="max")
        self.log("rows", len(y), sync_dist=True)
        return loss

    def on_train_batch_end(self, *_):
        self.losses.append([self.trainer.callback_metrics[key] for key in ("loss", "hits")])

    def validation_step(self, batch, index):
        x, y = batch
        self.log("validated", cross_entropy(self.network(x), y), sync_dist=True)

    def on_validation_end(self):
        self.validated.append(self.trainer.callback_metrics["validated"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy=DDPStrategy(process_group_backend=sys.argv[1]),
    max_epochs=2,
    log_every_n_steps=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loader = DataLoader(dataset(), batch_size=4, shuffle=True)
trainer.fit(model, loader, DataLoader(dataset(), batch_size=8))

assert trainer.world_size == torch.distributed.get_world_size() > 1
assert torch.distributed.get_backend() == sys.argv[1]
tell(losses=model.losses, validated=model.validated)
