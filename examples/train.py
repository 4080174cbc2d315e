"""Train a small network on real handwritten digits, data-parallel, with plain NumPy.

    hpcdist run -n 4 examples/train.py

Every rank works on its share of each batch; `DataParallel` averages the gradients while they are
computed. The result does not depend on the number of ranks, but for rounding.
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
    """64 pixels, one hidden layer of rectified units, 10 digits."""

    def __init__(self, hidden, seed):
        random = np.random.default_rng(seed)
        self.w1 = dist.Parameter(random.normal(0, np.sqrt(2 / 64), (64, hidden)))
        self.b1 = dist.Parameter(np.zeros(hidden))
        self.w2 = dist.Parameter(random.normal(0, np.sqrt(2 / hidden), (hidden, 10)))
        self.b2 = dist.Parameter(np.zeros(10))

    def named_parameters(self):
        return vars(self).items()

    def __call__(self, images):
        """Return the hidden units and the probability of each digit."""
        hidden = np.maximum(images @ self.w1.data + self.b1.data, 0)
        scores = hidden @ self.w2.data + self.b2.data
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return hidden, odds / odds.sum(axis=1, keepdims=True)

    def backward(self, images, hidden, slopes):
        """Assign all gradients, last layer first, from the slopes of the loss in the scores."""
        self.b2.grad = slopes.sum(axis=0)
        self.w2.grad = hidden.T @ slopes
        behind = (slopes @ self.w2.data.T) * (hidden > 0)
        self.b1.grad = behind.sum(axis=0)
        self.w1.grad = images.T @ behind


class Momentum:
    """Stochastic gradient descent with momentum."""

    def __init__(self, parameters, rate):
        self.rate = rate
        self.speeds = [(p, np.zeros(p.shape)) for p in parameters]

    def step(self):
        for p, speed in self.speeds:
            speed *= 0.9
            speed += p.grad
            p.data -= self.rate * speed


def train_epoch(model, optimizer, images, labels, order):
    """Go once through the images in `order`; return the mean loss over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = np.zeros(1)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        share = batch[rank::size]
        hidden, odds = model(images[share])
        right = np.arange(len(share)), labels[share]
        loss -= np.log(odds[right]).sum()
        odds[right] -= 1
        # times size: the mean over the ranks is then the mean over the batch, whatever the shares
        model.backward(images[share], hidden, odds * size / len(batch))
        optimizer.step()
    dist.all_reduce(loss)
    return loss[0] / len(order)


def test(network, images, labels):
    """Return the share of test images recognised; each rank looks at its own part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    _, odds = network(images[rank::size])
    correct = np.array([(odds.argmax(axis=1) == labels[rank::size]).sum()])
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
    model = dist.DataParallel(network)  # every rank gets the parameters of rank 0
    optimizer = Momentum(model.parameters(), options.rate)
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
            loss = train_epoch(model, optimizer, images, labels, order)
            progress.update(bar, advance=1, loss=f"loss {loss:.4f}")
    accuracy = test(network, test_images, test_labels)
    if world.rank == 0:
        print(f"test accuracy {accuracy:.4f} on {len(test_labels)} images, loss {loss:.6f}")


if __name__ == "__main__":
    main()
