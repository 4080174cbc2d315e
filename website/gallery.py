"""Draw what jobs of the examples do: `python -m website.gallery`, in some minutes.

The losses of `examples/train_gpt.py` and `examples/same_bits.py`, the water of
`examples/shallow_water.py` and the recovery of `examples/survive.py` are those of jobs that this
starts with `hpcdist run`. The plate of
`examples/heat.py` is computed on simulated ranks, and is the same wherever it is drawn:
`website.pictures` draws it with the others.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import hpcdist as dist
from website.svg import INK, QUIET, RANKS, Picture

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/images"
ALARM = "#b91c1c"
HEAT = ("#eef2f7", "#fde68a", "#fbbf24", "#f97316", "#dc2626", "#7f1d1d")
"""Colours from cold to hot."""

GRIDS = {"1 rank": (1,), "4 ranks: pp=2 x mp=2": (4, "--pp", "2", "--mp", "2")}
"""What the curves are called; the number of ranks, and the arguments of `examples/train_gpt.py`."""

KILL = "2@25"
STEPS = 40


# ---- heat


def heat() -> Picture:
    """Draw the plate before the first step and after some, and who has which block of it."""
    rows, columns, size = 40, 60, 3.6
    picture = Picture(
        720, 218, "Heat spreads over a plate, of which each of four ranks has a block"
    )
    for number, steps in enumerate((0, 100, 500)):
        left = 16 + number * 236
        words = ["--rows", str(rows), "--columns", str(columns), "--steps", str(steps)]
        plate = dist.simulate(4, _plate, words)[0]
        bands = np.minimum(plate // 8, len(HEAT) - 1).astype(int)
        for y, row in enumerate(bands):
            for first, last in _runs(row.tolist()):
                x, width = left + first * size, (last - first) * size
                picture.patch(x, 16 + y * size, width, size + 0.3, HEAT[row[first]])
        for rank in range(4):
            x, y = left + rank % 2 * columns * size / 2, 16 + rank // 2 * rows * size / 2
            picture.box(x, y, columns * size / 2, rows * size / 2, stroke=RANKS[rank])
            picture.text(x + 8, y + 11, str(rank), 11, fill=QUIET)
        picture.text(left + columns * size / 2, 182, f"after {steps} steps", 12.5)
    picture.text(360, 204, "each block is of the rank whose colour its frame has", 11, fill=QUIET)
    return picture


def _plate(words: list[str]) -> np.ndarray:
    return np.asarray(dist.unshard_dtensor(_example("heat").main(words)))


def _runs(row: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where equal neighbours begin and end."""
    ends = [x for x in range(1, len(row)) if row[x] != row[x - 1]]
    yield from zip([0, *ends], [*ends, len(row)], strict=True)


# ---- GPT


def gpt() -> Picture:
    """Draw the losses of the same training in one process and on a grid."""
    with tempfile.TemporaryDirectory() as folder:
        curves = [
            _losses(_run("examples/train_gpt.py", ranks, *words, "--folder", f"{folder}/{ranks}"))
            for ranks, *words in GRIDS.values()
        ]
    picture = Picture(720, 250, "The losses of a GPT in one process, and on a grid of four ranks")
    top = max(map(max, curves))
    for height in range(int(top) + 1):
        picture.text(40, 210 - height * 36, str(height), 11, fill=QUIET)
    picture.text(360, 234, f"{STEPS} steps: the curves lie on each other", 11, fill=QUIET)
    for number, (name, losses) in enumerate(zip(GRIDS, curves, strict=True)):
        points = [(60 + step * 16, 210 - loss * 36) for step, loss in enumerate(losses)]
        picture.line(points, RANKS[number], 7 - 5 * number)
        picture.box(440, 22 + number * 24, 14, 14, fill=RANKS[number])
        picture.text(462, 29 + number * 24, name, 12.5, anchor="start", mono=True)
    return picture


def _losses(said: str) -> list[float]:
    return [float(word) for word in said.rpartition("losses ")[2].split()][:STEPS]


def _run(program: str, ranks: int, *words: str) -> str:
    command = [sys.executable, "-m", "hpcdist", "run", "-n", str(ranks), "--no-label"]
    return _said([*command, str(ROOT / program), "--steps", str(STEPS), *words])


def _said(command: list[str]) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, env=environ, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


# ---- the same bits


def same_bits() -> Picture:
    """Draw the losses of a training, those of one with a death, and their difference."""
    words = ["--survive", "-n", "4", "--no-label", "examples/same_bits.py"]
    command = [sys.executable, "-m", "hpcdist", "run", *words]
    said = _said([*command, "--kill", KILL, "--losses", "--steps", str(STEPS)])
    curves = [[float(each) for each in line.split()] for line in re.findall("losses (.*)", said)]
    picture = Picture(720, 268, "Losses of a training, and of one with a death; they do not differ")
    top = max(map(max, curves))
    names = "4 ranks", f"rank 2 of 4 dies at step {KILL.partition('@')[2]}"
    for number, (name, losses) in enumerate(zip(names, curves, strict=True)):
        points = [(60 + step * 16, 170 - loss * 140 / top) for step, loss in enumerate(losses)]
        picture.line(points, RANKS[number], 7 - 5 * number)
        picture.box(510, 22 + number * 24, 14, 14, fill=RANKS[number])
        picture.text(532, 29 + number * 24, name, 12.5, anchor="start")
    gaps = [abs(one - other) for one, other in zip(*curves, strict=True)]
    picture.text(50, 216, "difference", 11, fill=QUIET, anchor="start")
    highest = max(gaps) or 1.0
    picture.line(
        [(60 + step * 16, 236 - gap * 20 / highest) for step, gap in enumerate(gaps)], INK, 2
    )
    picture.text(684, 222, f"at most {max(gaps):g}", 12.5, anchor="end", bold=True)
    picture.text(360, 256, f"{STEPS} steps on 8 virtual ranks", 11, fill=QUIET)
    x = 60 + int(KILL.partition("@")[2]) * 16
    picture.line([(x, 20), (x, 170)], ALARM, 1)
    picture.text(x + 6, 160, "killed", 11, fill=ALARM, anchor="start")
    return picture


# ---- shallow water

WATER = ("#1e3a8a", "#2563eb", "#7db3f5", "#eef2f7", "#fbc887", "#ea7317", "#9a3412")
"""Colours from low to high."""


def waves() -> Picture:
    """Draw the height of the water in a channel, and who has which rows of it."""
    ranks, size = 4, 3.0
    picture = Picture(
        720, 196, "A hill of water runs apart in a channel that is cut into four strips"
    )
    for number, steps in enumerate((0, 100, 400)):
        left = 16 + number * 236
        water = _water(ranks, steps)
        rows, columns = water.shape
        bands = np.clip(np.round(water / 0.08) + 3, 0, len(WATER) - 1).astype(int)
        for y, row in enumerate(bands[::-1]):  # the north is above
            for first, last in _runs(row.tolist()):
                x, width = left + first * size, (last - first) * size
                picture.patch(x, 16 + y * size, width, size + 0.3, WATER[row[first]])
        for rank in range(ranks):
            height = rows * size / ranks
            y = 16 + (ranks - 1 - rank) * height
            picture.box(left, y, columns * size, height, stroke=RANKS[rank])
            picture.text(left + 8, y + 11, str(rank), 11, fill=QUIET)
        picture.text(left + columns * size / 2, 182, f"after {steps} steps", 12.5)
    return picture


def _water(ranks: int, steps: int) -> np.ndarray:
    words = ["--rows", "48", "--columns", "72", "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hpcdist", "run", "-n", str(ranks), "--no-label"]
        program = str(ROOT / "examples/shallow_water.py")
        _said([*command, program, *words, "--save", f"{folder}/water.npy"])
        return np.asarray(np.load(f"{folder}/water.npy"))


# ---- recovery


def survival() -> Picture:
    """Draw when each process of a job that loses one was in an operation."""
    with tempfile.TemporaryDirectory() as folder:
        survive = ["--survive", "--spares", "1", "-n", "4", "-m", "website.gallery", folder]
        _said([sys.executable, "-m", "hpcdist", "run", *survive])
        lives = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in Path(folder).iterdir()
        ]
    begin = min(life[0][1] for life in lives)
    return timeline(sorted(lives, key=lambda life: (life[0][1] > begin + 5e8, life[0][0])))


def timeline(lives: Sequence[Sequence[tuple[int, int, int]]]) -> Picture:
    """Draw the operations of processes: each is a rank, its begin and its end, in nanoseconds."""
    picture = Picture(760, 60 + 40 * len(lives), "Rank 2 is killed; a spare takes its place")
    begin = min(life[0][1] for life in lives)
    end = max(life[-1][2] for life in lives)
    gone = min(range(len(lives)), key=lambda number: lives[number][-1][2])
    for number, life in enumerate(lives):
        top = 24 + number * 40
        x = [(90 + (each - begin) * 640 / (end - begin)) for _, *span in life for each in span]
        is_spare = life[0][1] > begin + (end - begin) / 4
        picture.text(
            10, top + 14, "spare" if is_spare else f"rank {life[0][0]}", 12, anchor="start"
        )
        for (rank, *_), left, right in zip(life, x[::2], x[1::2], strict=True):
            picture.patch(left, top, max(right - left, 0.8), 28, RANKS[rank])
        if number == gone:
            picture.box(x[-1] + 2, top, 72, 28, stroke=ALARM, dashed=True)
            picture.text(x[-1] + 38, top + 14, "killed", 12, fill=ALARM)
        if is_spare:
            picture.text(
                x[0] - 8, top + 14, f"becomes rank {life[0][0]}", 12, anchor="end", fill=INK
            )
    seconds = (end - begin) / 1e9
    picture.text(410, 44 + 40 * len(lives), f"{seconds:.1f} s of training", 11, fill=QUIET)
    return picture


def record(folder: str) -> None:
    """Run the training of `examples/survive.py`; write what this process does, line by line."""
    begun: dict[int, int] = {}
    with open(Path(folder) / f"{os.getpid():010}", "a", buffering=1) as file:

        def hear(event: dist.Event) -> None:
            if event.phase == "begin":
                begun[event.id] = event.time_ns
            elif event.error is None and event.id in begun:
                span = begun.pop(event.id), event.time_ns
                file.write(json.dumps([dist.get_rank(), *span]) + "\n")

        dist.subscribe(hear)
        sys.argv[1:] = ["--kill", KILL, "--steps", "50", "--pause", "0.01"]
        _example("survive").main()


def _example(name: str) -> Any:
    """Return an example as a module."""
    path = ROOT / f"examples/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PICTURES = {
    "gallery-gpt": gpt,
    "gallery-waves": waves,
    "gallery-recovery": survival,
    "same-bits": same_bits,
}


def main() -> None:
    """Draw the pictures of jobs, or record a rank of one."""
    if sys.argv[1:]:
        record(sys.argv[1])
        return
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(re.sub(r"\d+\.\d{3,}", _rounded, str(draw())))


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}"


if __name__ == "__main__":
    main()
