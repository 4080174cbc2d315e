"""Files of samples that know their number, and what all ranks together have made of them."""

from itertools import chain, zip_longest

import numpy as np

import hpcdist as dist

SLOTS = [("id", "int64", ()), ("x", "int64")]


def write_files(folder, total, files=3):
    """Write samples 0 to `total` into so many files: a number, and a list that belongs to it."""
    paths = []
    for file in range(files):
        mine = range(total * file // files, total * (file + 1) // files)
        paths.append(str(folder / f"{total}-{files}-{file}.txt"))
        lines = [f"1 {i} {i % 3 + 1} {' '.join([str(i)] * (i % 3 + 1))}\n" for i in mine]
        (folder / paths[-1]).write_text("".join(lines))
    return paths


def dataset_of(files, kind=dist.InMemoryDataset, **settings):
    """Return a dataset of such files."""
    dataset = kind()
    dataset.init(**{"use_var": SLOTS, "batch_size": 4, **settings})
    dataset.set_filelist(files)
    return dataset


def loaded(files, **settings):
    dataset = dataset_of(files, **settings)
    dataset.load_into_memory()
    return dataset


def ids_of(batch):
    """Return the samples of a batch, whose lists must be theirs."""
    ids = batch["id"].tolist() if "id" in batch else []
    for row, sample in enumerate(ids):
        values, offsets = batch["x"]
        found = values[offsets[row] : offsets[row + 1]].tolist()
        assert found == [sample] * (sample % 3 + 1)
    return ids


def steps_of(batches):
    """Return the samples of each batch."""
    return [ids_of(batch) for batch in batches]


def in_order(of_ranks):
    """Return the samples of all ranks in the order of the epoch; a step deals them in turn."""
    assert len({len(steps) for steps in of_ranks}) == 1
    nothing = object()
    found = []
    for step in zip(*of_ranks, strict=True):
        dealt = chain.from_iterable(zip_longest(*step, fillvalue=nothing))
        found += [sample for sample in dealt if sample is not nothing]
    return found


def expected_order(total, seed, epoch):
    from hpcdist.data.order import Shuffled

    return Shuffled(total, seed, epoch).samples(np.arange(total)).tolist()
