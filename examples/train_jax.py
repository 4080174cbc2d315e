"""Train a small network on real handwritten digits, data-parallel, with plain JAX.

    hpcdist run -n 4 examples/train_jax.py

The whole training is one jitted function. Every rank works on its share of each batch, and the
gradients are averaged inside. The result does not depend on the number of ranks, but for rounding.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import hpcdist as dist
import hpcdist.jax as hj

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


@jax.value_and_grad
def loss_and_slopes(network, images, labels):
    """Return the summed loss of the images, and its gradients."""
    odds = jax.nn.log_softmax(scores(network, images))
    return -odds[jnp.arange(len(labels)), labels].sum()


@jax.jit
def train(network, images, labels, shares, rate):
    """Go a step, with momentum, for each row of `shares`; return the losses of the steps, too."""
    # the mean over the ranks times this is the mean over the batch
    scale = dist.get_world_size() / BATCH

    def step(carry, share):
        network, speed = carry
        sums = hj.average_gradients(loss_and_slopes(network, images[share], labels[share]))
        loss, slopes = jax.tree.map(lambda x: scale * x, sums)
        speed = jax.tree.map(lambda v, slope: 0.9 * v + slope, speed, slopes)
        network = jax.tree.map(lambda p, v: p - rate * v, network, speed)
        return (network, speed), loss

    begin = network, jax.tree.map(jnp.zeros_like, network)
    (network, _), losses = jax.lax.scan(step, begin, shares)
    return network, losses


def shuffled(count, epochs, seed):
    """Return the images of each batch, which is a row; what is left of an epoch is left out."""
    shuffle = np.random.default_rng(seed)  # the same order on every rank
    whole = count // BATCH * BATCH
    orders = [shuffle.permutation(count)[:whole] for _ in range(epochs)]
    return np.concatenate(orders).reshape(-1, BATCH)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    world = dist.init_parallel_env()
    images, labels, test_images, test_labels = load(options.seed)
    images, labels = jnp.asarray(images), jnp.asarray(labels)
    network = make_network(options.hidden, options.seed)
    batches = shuffled(len(images), options.epochs, options.seed)
    shares = batches[:, world.rank :: world.nranks]
    network, losses = train(network, images, labels, shares, options.rate)
    loss = losses[-(len(images) // BATCH) :].mean()  # of the last epoch
    accuracy = (scores(network, test_images).argmax(axis=1) == test_labels).mean()
    if world.rank == 0:
        print(f"test accuracy {accuracy:.4f} on {len(test_labels)} images, loss {loss:.6f}")


if __name__ == "__main__":
    main()
