"""Train a classifier of short texts, which are read, shuffled and dealt by `InMemoryDataset`.

    hpcdist run -n 4 examples/train_text.py --folder /tmp/texts

The texts are made up, once, and written as JSON lines to the folder. Every rank trains on its share
of each batch. The order of an epoch depends on its seed and number alone, and `--batch` is that of
all ranks together, so the losses are the same for any number of ranks, but for rounding. A run that
ends early (`--stop STEP`) goes on where it stood, on another number of ranks too.
"""

import argparse
import json
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np

import hpcdist as dist

BUCKETS = 1 << 12
SLOTS = [("text", "string"), ("label", "int64", ())]
TOPICS = ("sea", "hill")
SYLLABLES = {
    "sea": ["wa", "ve", "sal", "ti", "de", "ma", "ri", "no", "cor", "al"],
    "hill": ["gra", "nit", "pe", "ak", "mos", "fir", "ro", "ck", "val", "ley"],
}


def write_texts(folder, texts, files=4):
    """Write texts of two topics, each with some words of the other one; return the files."""
    paths = [Path(folder) / f"texts-{texts}-{file}.jsonl" for file in range(files)]
    random = np.random.default_rng(0)
    for path in paths:
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for label in random.integers(0, 2, texts // files):
            words = []
            for _ in range(random.integers(3, 20)):
                topic = TOPICS[label if random.random() < 0.7 else 1 - label]
                words.append("".join(random.choice(SYLLABLES[topic], random.integers(1, 4))))
            lines.append(json.dumps({"text": " ".join(words), "label": int(label)}))
        path.write_text("\n".join(lines) + "\n")
    return [str(path) for path in paths]


def counts_of(values, offsets):
    """Return how often words fall into each bucket, one row for each text."""
    counts = np.zeros((len(offsets) - 1, BUCKETS))
    for row, (start, stop) in enumerate(pairwise(offsets)):
        for word in values[start:stop].tobytes().split():
            counts[row, zlib.crc32(word) % BUCKETS] += 1
    return counts


class Classifier:
    """One weight for each bucket: the odds that a text is about hills."""

    def __init__(self):
        self.weights = np.zeros(BUCKETS)

    def step(self, batch, rate):
        """Learn from the samples of all ranks; return their mean loss."""
        counts, labels = counts_of(*batch["text"]), batch["label"]
        chance = 1 / (1 + np.exp(-(counts @ self.weights)))
        right = np.where(labels == 1, chance, 1 - chance)
        told = np.concatenate([counts.T @ (chance - labels), [-np.log(right).sum(), len(labels)]])
        dist.all_reduce(told)
        self.weights -= rate * told[:-2] / told[-1]
        return told[-2] / told[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="/tmp/hpcdist-texts")
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=120, help="samples of all ranks together")
    parser.add_argument("--stop", type=int, help="end after so many steps, and go on next time")
    options = parser.parse_args()

    world = dist.init_parallel_env()
    dataset = dist.InMemoryDataset()
    dataset.init(
        format="jsonl", use_var=SLOTS, batch_size=options.batch // world.nranks, tail="keep", seed=3
    )
    dataset.set_filelist(dist.together().lead(write_texts, options.folder, options.texts))
    dataset.load_into_memory()

    classifier, steps, losses = Classifier(), 0, []
    saved = Path(options.folder) / "state.json"
    state = dist.together().lead(lambda: json.loads(saved.read_text()) if saved.exists() else None)
    if state is None:
        dataset.global_shuffle()
    else:
        dataset.load_state_dict(state["dataset"])
        classifier.weights[:], steps = state["weights"], state["steps"]
    for epoch in range(dataset.state_dict()["epoch"], options.epochs):
        for batch in dataset.batches(epoch):
            losses.append(classifier.step(batch, rate=1.0))
            steps += 1
            if steps == options.stop:
                break
        if steps == options.stop:
            break
    if world.rank == 0:
        print("losses", *(f"{loss:.6f}" for loss in losses))
        state = {
            "dataset": dataset.state_dict(),
            "weights": classifier.weights.tolist(),
            "steps": steps,
        }
        saved.write_text(json.dumps(state))


if __name__ == "__main__":
    main()
