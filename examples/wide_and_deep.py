"""Predict clicks with a wide and deep model, whose embeddings are spread over the ranks.

    hpcdist run -n 4 examples/wide_and_deep.py
    hpcdist run -n 4 examples/wide_and_deep.py --servers 1
    hpcdist run -n 4 examples/wide_and_deep.py --dense

The wide part has a weight for each id, the deep part a vector for each and a network above them
(Cheng et al. 2016). The ids are in tables, of which each rank keeps a part; `--servers` makes ranks
that do nothing else, `--dense` keeps all of it on every rank, in ordinary parameters: the result
is the same. Clicks are drawn from a hidden model of the same kind.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import hpcdist.torch
from hpcdist import fleet
from hpcdist.torch import SparseEmbedding

FIELDS = (1000, 300, 40)  # users, things to buy, hours: how many ids each has
IDS = sum(FIELDS)
BATCH, BATCHES = 240, 30
ADAGRAD = {"learning_rate": 0.1, "epsilon": 1e-10}


def make_clicks(seed=1, count=BATCH * BATCHES * 4 // 3):
    """Return ids, other features, and whether there was a click: the same on every rank."""
    rng = np.random.default_rng(seed)
    first = np.cumsum([0, *FIELDS[:-1]])
    drawn = [np.minimum(rng.zipf(1.3, count), size) - 1 for size in FIELDS]  # few are frequent
    ids = np.stack(drawn, axis=1) + first
    features = rng.normal(size=(count, 4)).astype(np.float32)
    taste, vectors = rng.normal(size=IDS), rng.normal(size=(IDS, 3))
    user, thing, _ = (vectors[ids[:, field]] for field in range(3))
    score = taste[ids].sum(1) + (user * thing).sum(1) + features @ rng.normal(size=4)
    clicks = rng.random(count) < 1 / (1 + np.exp(-score))
    return torch.from_numpy(ids), torch.from_numpy(features), torch.from_numpy(clicks).float()


class DenseEmbedding(nn.EmbeddingBag):
    """All rows on every rank, as those of the table `name` begin."""

    def __init__(self, name, dim, **options):
        super().__init__(IDS, dim, mode="sum")
        table = SparseEmbedding(name, dim, **options)
        with torch.no_grad():
            self.weight.copy_(table(torch.arange(IDS)[:, None]))


class WideAndDeep(nn.Module):
    """Weights of ids, and a network above vectors of ids and other features."""

    def __init__(self, embedding, dim=8):
        super().__init__()
        options = {"pooling": "sum", "optimizer": ("adagrad", ADAGRAD)}
        self.wide = embedding("wide", 1, **options)
        self.deep = embedding("deep", dim, **options)
        torch.manual_seed(0)
        self.network = nn.Sequential(
            nn.Linear(len(FIELDS) * dim + 4, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, ids, features):
        vectors = self.deep(ids.reshape(-1, 1)).view(len(ids), -1)
        deep = self.network(torch.cat([vectors, features], dim=1))
        return (self.wide(ids) + deep)[:, 0]


def area_under_curve(scores, clicks):
    """Return the chance that a click has a higher score than what was not clicked."""
    ranks = torch.empty(len(scores))
    ranks[scores.argsort()] = torch.arange(1.0, len(scores) + 1)
    positive = clicks.sum()
    wins = ranks[clicks == 1].sum() - positive * (positive + 1) / 2
    return float(wins / (positive * (len(clicks) - positive)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=0, help="ranks that only keep rows")
    parser.add_argument("--dense", action="store_true", help="keep all rows on every rank")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)

    fleet.init(server_num=args.servers)
    hpcdist.torch.init()  # torch's world is all ranks, those that only serve, too
    model = WideAndDeep(DenseEmbedding if args.dense else SparseEmbedding)
    if fleet.is_server():
        fleet.run_server()  # until all workers have stopped
        return
    fleet.init_worker()
    rank, size = fleet.worker_index(), fleet.worker_num()
    if BATCH % size:
        raise SystemExit(f"{size} workers cannot share a batch of {BATCH} equally")
    trained = fleet.distributed_model(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    ids, features, clicks = make_clicks()
    train = BATCH * BATCHES
    for epoch in range(args.epochs):
        for begin in range(0, train, BATCH):
            mine = slice(begin + rank, begin + BATCH, size)
            scores = trained(ids[mine], features[mine])
            loss = functional.binary_cross_entropy_with_logits(scores, clicks[mine])
            optimizer.zero_grad()
            loss.backward()  # pushes the gradients of rows, and averages the others
            optimizer.step()
        with torch.no_grad():
            auc = area_under_curve(model(ids[train:], features[train:]), clicks[train:])
        if rank == 0:
            print(f"epoch {epoch}: AUC {auc:.4f}")
    fleet.stop_worker()


if __name__ == "__main__":
    main()
