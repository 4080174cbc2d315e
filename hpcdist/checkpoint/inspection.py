"""Looking at checkpoints: `latest`, `verify`, and `consolidate` into one ordinary file."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

from hpcdist.checkpoint.blocks import Files, Piece, Progress, blocks_of, write_file
from hpcdist.checkpoint.cover import grid_of, in_one_view
from hpcdist.checkpoint.formats import Tensor, lay_out
from hpcdist.checkpoint.host_copies import bytes_of
from hpcdist.checkpoint.manifest import Manifest, entry_of
from hpcdist.checkpoint.reading import read_arrays
from hpcdist.checkpoint.storage import (
    data_files,
    find_checkpoint,
    named,
    open_checkpoint,
    sync_folder,
)
from hpcdist.checkpoint.together import reading_together
from hpcdist.comm.group import Group
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.named_tuple import NamedTuple


class Summary(NamedTuple):
    """What a checkpoint has."""

    folder: str
    step: int | None
    ranks: int
    """How many saved it."""
    arrays: int
    files: int
    nbytes: int
    """Bytes of all arrays."""


def summary_of(folder: str, manifest: Manifest) -> Summary:
    """Return what a manifest tells."""
    return Summary(
        folder,
        manifest.step,
        manifest.ranks,
        len(manifest.arrays),
        len(manifest.files),
        manifest.total,
    )


def division_of(manifest: Manifest, name: str) -> str:
    """Describe how an array is divided: as a grid of boxes, if it is one."""
    boxes = [piece.box for piece in manifest.pieces[name]]
    if len(boxes) <= 1:
        return "whole"
    counts = grid_of(*in_one_view(boxes, manifest.arrays[name].shape))
    if counts is None or math.prod(counts) != len(boxes):
        return f"{len(boxes)} parts"
    return f"{' x '.join(map(str, counts))} {'runs' if len(counts) == 1 else 'boxes'}"


def latest(path: str | os.PathLike[str], group: Group | None = None) -> str | None:
    """Return the folder of the last checkpoint of the series at `path`; None if there is none.

    Collective over `group`: its first rank looks. A checkpoint that was not finished does not
    count.

    Args:
        path: the folder of the series, whose checkpoints have the number of their step.
        group: the ranks that ask; None for all.

    Example:
        >>> import os, tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for step in (10, 20):
        ...         _ = dist.checkpoint.save({"w": np.ones(3)}, folder, step=step)
        ...     print(os.path.relpath(dist.checkpoint.latest(folder), folder))
        step-000020

    """

    def look() -> str | None:
        with suppress(CheckpointError):
            return find_checkpoint(named(path))
        return None

    return reading_together(group).lead(look)


def verify(
    path: str | os.PathLike[str],
    group: Group | None = None,
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Read a whole checkpoint and compare it with its checksums; return its contents. Collective.

    Arrays are compared with their checksums, the headers of files, which only other programs read,
    with the manifest.

    Args:
        path: the folder given to `save`; without `step`, the last checkpoint of a series.
        group: the ranks that share the reading; None for all.
        step: this checkpoint of a series.
        progress: called again and again with the number of bytes that this rank has just read.

    Raises:
        CheckpointError: something is damaged or missing; on every rank, naming all of it.

    Example:
        >>> import tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dist.checkpoint.save({"w": np.ones(3)}, folder)
        ...     print(dist.checkpoint.verify(folder).arrays)
        1

    """
    ranks = reading_together(group)
    folder, manifest = ranks.lead(lambda: open_checkpoint(named(path), step))
    found = ranks.share(lambda: _damages(folder, manifest, ranks.rank, ranks.size, progress))
    damages = [damage for each in found for damage in each]
    if damages:
        raise CheckpointError("\n".join(damages))
    return summary_of(folder, manifest)


def _damages(
    folder: str, manifest: Manifest, rank: int, size: int, progress: Progress | None
) -> list[str]:
    """Return what is wrong with the files assigned to this rank, each fault once."""
    damages: list[str] = []
    own = set(range(rank, len(manifest.files), size))
    with data_files(folder, manifest, progress) as files:
        for number in sorted(own):
            gone = _faults(files.measure, [number])
            damages += gone or _faults(_check_head, files, number, manifest)
            if gone:
                own.remove(number)
        for name, pieces in manifest.pieces.items():
            for piece in pieces:
                if piece.file in own:
                    damages += _faults(_read_all, files, manifest, name, piece)
    return list(dict.fromkeys(damages))


def _faults(check: Callable[..., None], *args: Any) -> list[str]:
    """Return what a check raises."""
    try:
        check(*args)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    return []


def _read_all(files: Files, manifest: Manifest, name: str, piece: Piece) -> None:
    for _ in files.read(name, piece, piece.box.size * manifest.itemsize(name)):
        pass


def _check_head(files: Files, number: int, manifest: Manifest) -> None:
    """Compare the header of a file with the manifest; hpcdist itself does not read it."""
    entries = [
        entry_of(name, piece.box, manifest.arrays[name])._replace(offset=piece.offset)
        for name, pieces in manifest.pieces.items()
        for piece in pieces
        if piece.file == number
    ]
    head = files.head(number)
    first, placed = lay_out(sorted(entries, key=attrgetter("offset")))
    more = 8 + len(head) - len(first)
    try:
        found = json.loads(head)
    except ValueError:
        found = None
    begin = {each.name: each.offset + more for each in placed}
    if found != json.loads(first[8:]) or begin != {each.name: each.offset for each in entries}:
        raise CheckpointError(
            f"{files.path(number)} is damaged: its header, by which other programs read it, is not "
            "the one that was saved; load the checkpoint, which needs no header, and save it again"
        )


def consolidate(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Write all arrays of a checkpoint, whole, to one new file in the safetensors format. Local.

    What is not an array is written, as JSON, to the file's metadata ``structure``.

    Args:
        path: the folder given to `save`; without `step`, the last checkpoint of a series.
        output: a file that does not exist.
        step: this checkpoint of a series.
        progress: called again and again with the number of bytes just written.

    Raises:
        UsageError: there is something at `output`.
        CheckpointError: the checkpoint is damaged; nothing is left at `output`.

    Example:
        >>> import os, tempfile, numpy as np, hpcdist as dist
        >>> _ = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fit = os.path.join(folder, "fit")
        ...     _ = dist.checkpoint.save({"w": np.ones(3)}, fit)
        ...     print(dist.checkpoint.consolidate(fit, f"{fit}.safetensors").arrays)
        1

    """
    output = named(output)
    if os.path.lexists(output):
        raise UsageError(f"{output} exists and would be overwritten; name a new file")
    folder, manifest = open_checkpoint(named(path), step)
    first, placed = lay_out(
        (
            Tensor(name, array.dtype, array.shape, manifest.nbytes(name))
            for name, array in manifest.arrays.items()
        ),
        {"structure": json.dumps(manifest.structure)},
    )
    new = f"{output}.{secrets.token_hex(6)}.new"
    try:
        with data_files(folder, manifest, progress) as files:
            contents = (
                (each.offset, _whole(files, manifest, each.name, progress)) for each in placed
            )
            write_file(new, first, contents)
        os.replace(new, output)
    except OSError as error:
        raise CheckpointError(f"{error.filename or output}: {error.strerror}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(new)
    sync_folder(os.path.dirname(output))
    return summary_of(folder, manifest)


def _whole(
    files: Files, manifest: Manifest, name: str, progress: Progress | None
) -> Iterator[memoryview]:
    """Give an array in C order: runs as they are read; boxes are put ranks in memory."""
    pieces = sorted(manifest.pieces[name], key=attrgetter("box"))
    if all(piece.box.is_run for piece in pieces):
        for piece in pieces:
            yield from files.read(name, piece, piece.box.size * manifest.itemsize(name))
        return
    for block in blocks_of(bytes_of(read_arrays(files, manifest, [name])[name])):
        yield block
        if progress is not None:
            progress(block.nbytes)
