"""ignite: the process group is there before `idist.Parallel`, which takes it as it is."""

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from problem import dataset, network, tell
from torch.nn.functional import cross_entropy

import hpcdist.torch  # noqa: F401


def train(local_rank):
    """Train for two epochs; evaluate after each."""
    model = idist.auto_model(network())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    loader = idist.auto_dataloader(dataset(), batch_size=8, shuffle=True)
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    metrics = {"accuracy": Accuracy(), "loss": Loss(cross_entropy)}
    evaluator = create_supervised_evaluator(model, metrics)
    losses, evaluated = [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def _keep(engine):
        losses.append(idist.all_reduce(engine.state.output) / idist.get_world_size())

    @trainer.on(Events.EPOCH_COMPLETED)
    def _evaluate(engine):
        evaluated.append(list(evaluator.run(loader).metrics.values()))

    trainer.run(loader, max_epochs=2)
    tell(losses=losses, evaluated=evaluated)


torch.distributed.init_process_group(sys.argv[1])
with idist.Parallel() as parallel:
    assert idist.get_world_size() == torch.distributed.get_world_size() > 1
    assert idist.backend() == sys.argv[1]
    parallel.run(train)
torch.distributed.destroy_process_group()
