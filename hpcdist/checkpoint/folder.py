"""Folders of checkpoints: what is in them, and how they change so that they are always whole.

A checkpoint is a folder with data files and one manifest that names them. A new one writes data
files of new names, then puts its manifest in the place of the old one, which no kill can divide,
and removes the old data at last. A series is a folder with one such folder per step. Only one rank
calls these functions.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress

from hpcdist.checkpoint.blocks import opened
from hpcdist.checkpoint.manifest import Manifest, from_json, to_json
from hpcdist.errors import CheckpointError, UsageError

MANIFEST = "checkpoint.json"

_STEP = re.compile(r"step-(\d{6}|[1-9]\d{6,})")
_OWN = re.compile(r"[0-9a-f]{12}-\d+\.safetensors|checkpoint\.json\.new")
"""Names of what hpcdist writes: nothing else is ever removed."""


def step_folder(path: str, step: int) -> str:
    """Return the folder of a step in the series at `path`."""
    return os.path.join(path, f"step-{step:06d}")


def data_file(token: str, rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"{token}-{rank:05d}.safetensors"


def steps_of(path: str) -> list[int]:
    """Return the steps in a series whose checkpoints are whole, in ascending order."""
    return [step for step, folder in _step_folders(path) if _has_manifest(folder)]


def find_checkpoint(path: str, step: int | None = None) -> str:
    """Return the folder of the checkpoint at `path`: itself, or a step of the series there.

    Args:
        path: a checkpoint or a series.
        step: of the series; None for the last one.

    Raises:
        CheckpointError: there is none.

    """
    if step is None and _has_manifest(path):
        return path
    steps = steps_of(path)
    if steps if step is None else step in steps:
        return step_folder(path, steps[-1] if step is None else step)
    if step is not None:
        there = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(f"{path} has no checkpoint of step {step}; steps there: {there}")
    raise CheckpointError(f"there is no checkpoint in {path}: {_contents(path)}")


def read_manifest(folder: str) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: there is none, or it is damaged.
        OSError: it cannot be read.

    """
    where = os.path.join(folder, MANIFEST)
    try:
        with open(where, "rb") as file:
            return from_json(file.read(), where)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint in {folder}: {_contents(folder)}") from error


def open_checkpoint(path: str, step: int | None = None) -> tuple[str, Manifest]:
    """Return the folder of the checkpoint at `path`, see `find_checkpoint`, and its manifest."""
    folder = find_checkpoint(path, step)
    return folder, read_manifest(folder)


def prepare(folder: str) -> str:
    """Make a folder for a checkpoint, unless it is there; return the token of its data files.

    Raises:
        CheckpointError: something else would be overwritten.
        OSError: the folder cannot be made.

    """
    missing = []
    above = os.path.abspath(folder)
    while not os.path.isdir(above):
        if os.path.lexists(above):
            raise CheckpointError(f"{above} is there and is not a folder; save somewhere else")
        missing.append(above)
        above = os.path.dirname(above)
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each)
        sync_folder(os.path.dirname(each))
    where = os.path.join(folder, MANIFEST)
    if os.path.lexists(where) and not _is_own(where):
        raise CheckpointError(
            f"{where} does not belong to a checkpoint of hpcdist and would be overwritten; save "
            "somewhere else"
        )
    return secrets.token_hex(6)


def commit(folder: str, manifest: Manifest) -> None:
    """Make `manifest`, whose data are on disk, the one of the checkpoint in `folder`."""
    new = os.path.join(folder, f"{MANIFEST}.new")
    content = memoryview(to_json(manifest))
    sync_folder(folder)
    with opened(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        while content:
            content = content[os.write(fd, content) :]
        os.fsync(fd)
    os.replace(new, os.path.join(folder, MANIFEST))
    sync_folder(folder)


def tidy(folder: str) -> None:
    """Remove what other saves have left in `folder` beside its checkpoint, as far as possible."""
    with suppress(OSError, CheckpointError):
        kept = read_manifest(folder).files if _has_manifest(folder) else []
        _sweep(folder, [name for name, _ in kept])


def _sweep(folder: str, kept: Iterable[str]) -> None:
    names = {*kept, MANIFEST}
    for name in os.listdir(folder):
        if name not in names and _OWN.fullmatch(name):
            _remove(os.path.join(folder, name))


def prune(path: str, step: int, keep: int) -> None:
    """Remove checkpoints from the series at `path`, but for `step` and the last `keep` - 1 others.

    Steps before `step` that are not whole were never finished, and go, too.
    """
    others = [each for each in steps_of(path) if each != step]
    kept = {step, *others[len(others) - keep + 1 :]} if keep > 1 else {step}
    for each, folder in _step_folders(path):
        if each not in kept and (each < step or _has_manifest(folder)):
            remove_checkpoint(folder)


def remove_checkpoint(folder: str) -> None:
    """Remove the checkpoint in `folder`, and the folder if nothing else is in it."""
    _remove(os.path.join(folder, MANIFEST))  # first: without it nobody takes it for a checkpoint
    with suppress(OSError):
        _sweep(folder, ())
        os.rmdir(folder)


def check_step(step: object, keep: object) -> None:
    """Refuse what is no step, or no number of checkpoints to keep.

    Raises:
        UsageError: `step` or `keep` is wrong.

    """
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise UsageError(f"step must be a number from 0 on, or None, got {step!r}")
    if keep is None:
        return
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise UsageError(f"keep must be at least 1, or None for all, got {keep!r}")
    if step is None:
        raise UsageError("keep is for a series of checkpoints; give each a number: step=...")


def sync_folder(folder: str) -> None:
    """Bring the names in `folder` to disk."""
    with opened(folder or ".", os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without that
                raise


def _step_folders(path: str) -> list[tuple[int, str]]:
    try:
        names = os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
    return [(step, step_folder(path, step)) for step in found]


def _has_manifest(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, MANIFEST))


def _is_own(where: str) -> bool:
    """Say whether a manifest is one of hpcdist, be it damaged."""
    with open(where, "rb") as file:
        start = file.read(120)
    return b'"hpcdist checkpoint"' in start


def _contents(path: str) -> str:
    if not os.path.isdir(path):
        return "it is a file" if os.path.exists(path) else "it does not exist"
    names = sorted(os.listdir(path))
    return (
        f"it holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        if names
        else ("it is empty")
    )


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)


def check_order(verb: str, state: object, path: object) -> None:
    """Raise `UsageError` where the arguments of `save` or `load` have changed places."""
    if isinstance(state, (str, os.PathLike)) and not isinstance(path, (str, bytes, os.PathLike)):
        folder = os.fspath(state)
        raise UsageError(
            f"checkpoint.{verb} takes the state first and the folder second, but got the folder "
            f"{folder!r} and a {type(path).__name__}: write checkpoint.{verb}(state, {folder!r})"
        )
