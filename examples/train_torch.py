"""Train a small convolutional network on real handwritten digits, data-parallel, with torch.

    hpcdist run -n 4 examples/train_torch.py

`shard_dataset` gives every rank its share of each batch; `DataParallel` averages the gradients
while they are computed. Any number of ranks that divides the batch of 96 gives the same result, but
for rounding.
"""

import argparse

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

import hpcdist as dist

BATCH = 96
TEST_IMAGES = 357  # which leaves 15 batches for training


def load():
    """Return training and test images (8 x 8 pixels from 0 to 1), each with their labels."""
    pixels, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    order = torch.randperm(len(labels))  # the same on every rank, by torch's seed
    images, labels = pixels[order].view(-1, 1, 8, 8).float() / 16, labels[order]
    return (
        (images[TEST_IMAGES:], labels[TEST_IMAGES:]),
        (images[:TEST_IMAGES], labels[:TEST_IMAGES]),
    )


class Net(nn.Module):
    """Two convolutions, each followed by pooling, and 10 digits."""

    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.head = nn.Linear(2 * channels * 2 * 2, 10)

    def forward(self, images):
        half = functional.max_pool2d(functional.relu(self.conv1(images)), 2)
        quarter = functional.max_pool2d(functional.relu(self.conv2(half)), 2)
        return self.head(quarter.flatten(1))


def train_epoch(model, optimizer, batches):
    """Go once through this rank's batches; return the mean loss over all ranks."""
    summed = torch.zeros(2)  # loss and images
    for images, labels in batches:
        loss = functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # averages the gradients, too
        optimizer.step()
        summed += torch.tensor([loss.item() * len(labels), len(labels)])
    dist.all_reduce(summed)
    return float(summed[0] / summed[1])


@torch.no_grad()
def test(model, images, labels):
    """Return the share of test images recognised; each rank looks at its own part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model.eval()
    guesses = model(images[rank::size]).argmax(dim=1)
    correct = (guesses == labels[rank::size]).sum()
    dist.all_reduce(correct)
    model.train()
    return float(correct / len(images))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    world = dist.init_parallel_env()
    torch.set_num_threads(1)  # the ranks of a node share its cores
    torch.manual_seed(options.seed)
    training, testing = load()
    sharded = dist.shard_dataset(training, seed=options.seed)
    model = dist.DataParallel(Net(options.channels))  # every rank gets the parameters of rank 0
    optimizer = torch.optim.SGD(model.parameters(), options.rate, momentum=0.9)
    columns = (
        TextColumn(f"training on {world.nranks} ranks"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=world.rank != 0) as progress:
        bar = progress.add_task("epochs", total=options.epochs, loss="")
        for epoch in range(options.epochs):
            sharded.set_epoch(epoch)  # another order
            batches = sharded.batches(max(1, BATCH // world.nranks))
            loss = train_epoch(model, optimizer, batches)
            progress.update(bar, advance=1, loss=f"loss {loss:.4f}")
    accuracy = test(model, *testing)
    if world.rank == 0:
        print(f"test accuracy {accuracy:.4f} on {TEST_IMAGES} images, loss {loss:.6f}")


if __name__ == "__main__":
    main()
