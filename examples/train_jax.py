"""Train a small network on real handwritten digits, data-parallel, with plain JAX.

    hpcdist run -n 4 examples/train_jax.py

Every rank works on its share of each batch; `average_gradients` averages what `jax.grad` gives.
The result does not depend on the number of ranks, but for rounding.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import hpcdist as dist

BATCH = 96
TEST_IMAGES = 360


def load(seed):
    """Return training and test images (64 pixels from 0 to 1) and labels, equally on all ranks."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))
    images, labels = images[order].astype("float32") / 16, labels[order]
    return (
        images[TEST_IMAGES:],
        labels[TEST_IMAGES:],
        images[:TEST_IMAGES],
        labels[:TEST_IMAGES],
    )


def layer(key, inputs, outputs):
    weight = jax.random.normal(key, (inputs, outputs)) * np.sqrt(2 / inputs)
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def make_network(hidden, seed):
    """Return the parameters of 64 pixels, one hidden layer and 10 digits, equally on all ranks."""
    first, second = jax.random.split(jax.random.key(seed))
    return [layer(first, 64, hidden), layer(second, hidden, 10)]


def scores(network, images):
    first, second = network
    hidden = jax.nn.relu(images @ first["weight"] + first["bias"])
    return hidden @ second["weight"] + second["bias"]


@jax.jit
@jax.value_and_grad
def loss_and_slopes(network, images, labels):
    """Return the summed loss of the images, and its gradients."""
    odds = jax.nn.log_softmax(scores(network, images))
    return -odds[jnp.arange(len(labels)), labels].sum()


@jax.jit
def step(network, speed, slopes, scale, rate):
    """Go a step down the slopes times `scale`, with momentum."""
    speed = jax.tree.map(lambda v, slope: 0.9 * v + scale * slope, speed, slopes)
    return jax.tree.map(lambda p, v: p - rate * v, network, speed), speed


def train_epoch(network, speed, images, labels, order, rate):
    """Go once through the images in `order`; return the mean loss over all ranks, too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = np.zeros(1)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        share = batch[rank::size]
        loss, slopes = loss_and_slopes(network, images[share], labels[share])
        total += float(loss)
        slopes = dist.average_gradients(slopes)
        # the mean over the ranks times their number is the sum over the batch
        network, speed = step(network, speed, slopes, size / len(batch), rate)
    dist.all_reduce(total)
    return network, speed, total[0] / len(order)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    world = dist.init_parallel_env()
    images, labels, test_images, test_labels = load(options.seed)
    network = make_network(options.hidden, options.seed)
    speed = jax.tree.map(jnp.zeros_like, network)
    shuffle = np.random.default_rng(options.seed)  # the same order on every rank
    for _ in range(options.epochs):
        order = shuffle.permutation(len(images))
        network, speed, loss = train_epoch(network, speed, images, labels, order, options.rate)
    accuracy = (scores(network, test_images).argmax(axis=1) == test_labels).mean()
    if world.rank == 0:
        print(f"test accuracy {accuracy:.4f} on {len(test_labels)} images, loss {loss:.6f}")


if __name__ == "__main__":
    main()
