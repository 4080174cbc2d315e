"""Train a small GPT on poems, on a grid of data, pipeline and tensor parallel ranks.

    mpiexec -n 8 python examples/train_gpt.py --dp 2 --pp 2 --mp 2
    mpiexec -n 4 python examples/train_gpt.py --pp 4 --resume      # goes on, on another grid
    python examples/train_gpt.py                                   # the same, in one process

The weights that the model begins with, the samples of each step and the checkpoint are the same on
every grid, and so are the losses, but for rounding. A step has 8 micro-batches: dp divides 8.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import hpcdist as dist
from hpcdist import fleet
from hpcdist.fleet.meta_parallel import (
    ColumnParallelLinear,
    LayerDesc,
    ParallelCrossEntropy,
    PipelineLayer,
    RowParallelLinear,
    SharedLayerDesc,
    VocabParallelEmbedding,
)
from hpcdist.torch.model_parallel.functions import copy_to

TEXT = Path(__file__).parent / "data" / "poems.txt"
CHARACTERS = 128  # ASCII
LENGTH = 64  # of a sample, in characters
BATCH, MICRO = 16, 2  # samples of a step, of all ranks together; samples of a micro-batch


def small(weight):
    """Fill a weight as GPT-2 does."""
    nn.init.normal_(weight, std=0.02)


class Position(nn.Module):
    """Adds to the row of each character that of its place."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(LENGTH, width))
        small(self.weight.data)

    def forward(self, x):
        return x + self.weight[: x.shape[1]]


class Attention(nn.Module):
    """Causal attention, of which each rank of mp has some of the heads."""

    def __init__(self, width, heads):
        super().__init__()
        self.size = width // heads  # of a head; its query, key and value are next to each other
        self.project = ColumnParallelLinear(width, 3 * width, has_bias=True, gather_output=False)
        self.out = RowParallelLinear(width, width, input_is_parallel=True)

    def forward(self, x):
        batch, length, _ = x.shape
        heads = self.project(x).view(batch, length, -1, 3, self.size).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = ColumnParallelLinear(width, 4 * width, has_bias=True, gather_output=False)
        self.down = RowParallelLinear(4 * width, width, input_is_parallel=True)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


def logits(embedding, x):
    """Return for each place the scores of the characters that this rank of mp has."""
    return functional.linear(copy_to(x, embedding.group), embedding.weight)


def gpt(layers, width, heads):
    """Return the model; the embedding of the characters is used at both ends."""
    table = (CHARACTERS, width, small)
    entropy = ParallelCrossEntropy()
    return PipelineLayer(
        [
            SharedLayerDesc("table", VocabParallelEmbedding, None, "weight", *table),
            LayerDesc(Position, width),
            *(LayerDesc(Block, width, heads) for _ in range(layers)),
            LayerDesc(nn.LayerNorm, width),
            SharedLayerDesc("table", VocabParallelEmbedding, logits, "weight", *table),
        ],
        loss_fn=lambda scores, labels: entropy(scores, labels).mean(),
        seg_method="layer:Block",
    )


def samples(text, step, part, parts):
    """Return this part of the samples of a step, and of what follows each character."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=generator)
    windows = torch.stack([text[start : start + LENGTH + 1] for start in starts.chunk(parts)[part]])
    return windows[:, :-1], windows[:, 1:]


def train(state, text, grid, options):
    """Train up to the last step; return the losses."""
    model, optimizer, losses = state["model"], state["optimizer"], state["losses"]
    while len(losses) < options.steps:
        batch = samples(text, len(losses), grid.rank("dp"), grid.degree("dp"))
        loss = model.train_batch(batch, optimizer)
        dist.all_reduce(loss, dist.ReduceOp.AVG, grid["dp"])
        losses.append(loss.item())
        if len(losses) == options.steps or len(losses) % 50 == 0:
            dist.checkpoint.save(state, options.folder, step=len(losses), keep=2)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dp", type=int, default=-1, help="default: the ranks that are left")
    parser.add_argument("--pp", type=int, default=1, help="stages")
    parser.add_argument("--mp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("gpt"), help="of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on after the last one")
    parser.add_argument("--picture", type=Path, help="draw the last step here, as SVG")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the ranks of a node share its cores
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": options.pp, "mp_degree": options.mp}
    world = dist.init_parallel_env()
    copies = options.dp if options.dp > 0 else world.nranks // (options.pp * options.mp)
    strategy.pipeline_configs = {
        "micro_batch_size": MICRO,
        "accumulate_steps": BATCH // MICRO // max(1, copies),
        "schedule_mode": options.schedule,
    }
    fleet.init(strategy=strategy, log_level="WARNING", dp=options.dp)
    grid = fleet.get_hybrid_communicate_group()

    torch.manual_seed(0)
    model = fleet.distributed_model(gpt(options.layers, options.width, options.heads))
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": fleet.distributed_optimizer(adam), "losses": []}
    if options.resume:
        dist.checkpoint.load(state, options.folder)
    done = len(state["losses"])
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    losses = train(state, text, grid, options)
    if options.picture:
        model.draw(options.picture)
    if world.rank == 0:
        print(f"{grid}: steps {done} to {len(losses)}, losses {' '.join(map(repr, losses[done:]))}")


if __name__ == "__main__":
    main()
