"""Train a small network on real handwritten digits, data-parallel, with plain NumPy.

    mpiexec -n 4 python examples/train.py

Every rank works on its share of each batch; the gradients are averaged with one all_reduce.
The result does not depend on the number of ranks, but for rounding.
"""

import argparse

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits

import hpcdist as dist

BATCH = 96
TEST_IMAGES = 360


def load(seed):
    """Return training and test images (64 pixels from 0 to 1) and labels, equally on all ranks."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order] / 16, labels[order]
    return (
        images[TEST_IMAGES:],
        labels[TEST_IMAGES:],
        images[:TEST_IMAGES],
        labels[:TEST_IMAGES],
    )


class Network:
    """64 pixels, one hidden layer of rectified units, 10 digits.

    All parameters are views of one array, and so are all gradients: one all_reduce moves them.
    """

    def __init__(self, hidden, seed):
        shapes = [(64, hidden), (hidden,), (hidden, 10), (10,)]
        ends = np.cumsum([np.prod(shape) for shape in shapes])
        self.parameters, self.gradients = np.zeros(ends[-1]), np.zeros(ends[-1])

        def views(flat):
            return [
                part.reshape(shape)
                for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)
            ]

        self.w1, self.b1, self.w2, self.b2 = views(self.parameters)
        self.slopes = views(self.gradients)
        if dist.get_rank() == 0:
            generator = np.random.default_rng(seed)
            self.w1[:] = generator.normal(0, np.sqrt(2 / 64), self.w1.shape)
            self.w2[:] = generator.normal(0, np.sqrt(2 / hidden), self.w2.shape)
        dist.broadcast(self.parameters, src=0)

    def forward(self, images):
        """Return the hidden units and the probability of each digit."""
        hidden = np.maximum(images @ self.w1 + self.b1, 0)
        scores = hidden @ self.w2 + self.b2
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, odds / odds.sum(axis=1, keepdims=True)

    def backward(self, images, labels, batch):
        """Set `gradients` to this share's part of the batch's mean; return its summed loss."""
        hidden, odds = self.forward(images)
        loss = -np.log(odds[np.arange(len(labels)), labels]).sum()
        odds[np.arange(len(labels)), labels] -= 1
        odds /= batch
        behind = (odds @ self.w2.T) * (hidden > 0)
        w1, b1, w2, b2 = self.slopes
        w1[:], b1[:] = images.T @ behind, behind.sum(axis=0)
        w2[:], b2[:] = hidden.T @ odds, odds.sum(axis=0)
        return loss

    def correct(self, images, labels):
        """Count the images whose digit is recognised."""
        return int((self.forward(images)[1].argmax(axis=1) == labels).sum())


def train_epoch(network, momentum, images, labels, order, rate):
    """Go once through the images in `order`; return the mean loss over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = np.zeros(1)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        share = batch[rank::size]
        loss += network.backward(images[share], labels[share], len(batch))
        dist.all_reduce(network.gradients)
        momentum *= 0.9
        momentum += network.gradients
        network.parameters -= rate * momentum
    dist.all_reduce(loss)
    return loss[0] / len(order)


def test(network, images, labels):
    """Return the share of test images recognised; each rank looks at its own part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    correct = np.array([network.correct(images[rank::size], labels[rank::size])])
    dist.all_reduce(correct)
    return correct[0] / len(images)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    world = dist.init_parallel_env()
    images, labels, test_images, test_labels = load(options.seed)
    network = Network(options.hidden, options.seed)
    momentum = np.zeros_like(network.parameters)
    shuffle = np.random.default_rng(options.seed)  # the same order on every rank
    columns = (
        TextColumn(f"training on {world.nranks} ranks"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, disable=world.rank != 0) as progress:
        bar = progress.add_task("epochs", total=options.epochs, loss="")
        for _ in range(options.epochs):
            order = shuffle.permutation(len(images))
            loss = train_epoch(network, momentum, images, labels, order, options.rate)
            progress.update(bar, advance=1, loss=f"loss {loss:.4f}")
    accuracy = test(network, test_images, test_labels)
    if world.rank == 0:
        print(f"test accuracy {accuracy:.4f} on {len(test_labels)} images, loss {loss:.6f}")


if __name__ == "__main__":
    main()
