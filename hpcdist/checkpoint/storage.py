"""Folders of checkpoints: what is in them, and how they change so that they are always whole.

A checkpoint is a folder with data files and one manifest that names them. A new one writes data
files of new names, then puts its manifest in the place of the old one, which no kill can divide,
and removes the old data at last. A series is a folder with one such folder per step. Only one rank
calls these functions. Links are not followed below the folder that the user has named, and only
files of the names that hpcdist gives are removed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from hpcdist.checkpoint import remote
from hpcdist.checkpoint.blocks import (
    Files,
    LocalFile,
    Progress,
    open_regular,
    opened,
    write_file,
)
from hpcdist.checkpoint.claim import (
    CLAIM_FILE,
    NEW_CLAIM,
    Claim,
    Holder,
    check,
    claim,
    judge,
    release,
)
from hpcdist.checkpoint.manifest import LARGEST, Manifest, from_json, to_json
from hpcdist.checkpoint.schema import DATA_FILE
from hpcdist.errors import CheckpointError, UsageError
from hpcdist.text import an

MANIFEST = "checkpoint.json"

_STEP = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,})")
_NEW = re.compile(r"checkpoint\.json\.(?:([0-9a-f]{12})\.)?new")
_OWN = (DATA_FILE, CLAIM_FILE, NEW_CLAIM, _NEW)
"""Names of what hpcdist writes, with the token of the save: nothing else is ever removed."""


def named(path: str | os.PathLike[str]) -> str:
    """Return the path that a user has given as text.

    Raises:
        UsageError: no file can have this name.

    """
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise UsageError(f"a path must be text or a Path, got {path!r}") from error
    if not text or "\0" in text:
        raise UsageError(f"no folder can have the name {text!r}; name the folder of a checkpoint")
    return text


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
    if remote.is_url(folder):
        name = remote.manifest_of(folder, MANIFEST)
        if name is None:
            raise CheckpointError(f"there is no checkpoint in {folder}: {_contents(folder)}")
        return _parsed(remote.content(folder, name, LARGEST + 1), where)
    try:
        fd = open_regular(where)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"there is no checkpoint in {folder}: {_contents(folder)}") from error
    with os.fdopen(fd, "rb") as file:
        # as much memory as is asked for is taken first
        return _parsed(file.read(min(os.fstat(fd).st_size, LARGEST) + 1), where)


def _parsed(text: bytes, where: str) -> Manifest:
    if len(text) > LARGEST:
        raise CheckpointError(f"{where} is damaged: it has more than {LARGEST} bytes")
    return from_json(text, where)


def open_checkpoint(path: str, step: int | None = None) -> tuple[str, Manifest]:
    """Return the folder of the checkpoint at `path`, see `find_checkpoint`, and its manifest."""
    folder = find_checkpoint(path, step)
    return folder, read_manifest(folder)


def prepare(folder: str, step: int | None = None) -> Claim:
    """Make a folder for a checkpoint, unless it is there; return the claim to save into it.

    Raises:
        CheckpointError: something else would be overwritten, or somebody else is saving there.
        OSError: the folder cannot be made.

    """
    if step is not None and os.path.islink(folder):
        raise CheckpointError(f"{folder} is a link, which is not followed; save somewhere else")
    if remote.is_url(folder):
        mine = remote.claim(folder)
        _refuse_others(folder)
        return mine
    missing = []
    above = os.path.abspath(folder)
    while not os.path.isdir(above):
        if os.path.lexists(above):
            raise CheckpointError(f"{above} exists and is not a folder; save somewhere else")
        missing.append(above)
        above = os.path.dirname(above)
    for each in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(each)
        sync_folder(os.path.dirname(each))  # or a crash could lose the folder with what is in it
    _refuse_others(folder)
    return claim(folder)


def _refuse_others(folder: str) -> None:
    """Raise `CheckpointError` where a manifest of something else would be overwritten."""
    if _has_manifest(folder) and not _is_own(folder):
        raise CheckpointError(
            f"{os.path.join(folder, MANIFEST)} does not belong to a checkpoint of hpcdist and "
            "would be overwritten; save somewhere else"
        )


def data_files(folder: str, manifest: Manifest, progress: Progress | None = None) -> Files:
    """Return the data files of a checkpoint, to be read."""
    kind = remote.RemoteFile if remote.is_url(folder) else LocalFile
    return Files(folder, manifest.files, progress, kind)


def write_data(
    folder: str, name: str, first: bytes, contents: Iterable[tuple[int, Iterable[memoryview]]]
) -> list[bytes]:
    """Write a data file into a folder; return checksums. See `write_file`."""
    if remote.is_url(folder):
        return remote.write(folder, name, first, contents)
    return write_file(os.path.join(folder, name), first, contents)


def commit(mine: Claim, manifest: Manifest) -> None:
    """Make `manifest`, whose data are on disk, the one of the checkpoint in the claimed folder."""
    folder = mine.folder
    if remote.is_url(folder):
        old = _files_of(folder)
        remote.commit(mine, MANIFEST, bytes(to_json(manifest)))
        remote.remove(folder, old - {name for name, _ in manifest.files})
        return
    new = os.path.join(folder, f"{MANIFEST}.{mine.token}.new")
    content = memoryview(to_json(manifest))
    # In this order a crash leaves the old checkpoint or the new one: the names of the data files
    # are on disk before a manifest names them, and its content before it replaces the old one.
    sync_folder(folder)
    with opened(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW) as fd:
        while content:
            content = content[os.write(fd, content) :]
        os.fsync(fd)
    check(mine)  # as late as can be: one who took this save for dead removes its data
    os.replace(new, os.path.join(folder, MANIFEST))
    sync_folder(folder)  # old data may be removed from here on


def _files_of(folder: str) -> set[str]:
    """Return the names of the data files of the checkpoint in a folder; none if there is none."""
    try:
        return {name for name, _ in read_manifest(folder).files}
    except CheckpointError:
        return set()


def finish(mine: Claim) -> None:
    """Remove what this save and dead ones have left beside the checkpoint; give the claim back."""
    with suppress(OSError, CheckpointError):
        _sweep(mine.folder, mine.token)
    give_up(mine)


def give_up(mine: Claim) -> None:
    """Give a claim back, after a save of which nothing more is known."""
    if not remote.is_url(mine.folder):
        release(mine)


def _sweep(folder: str, own: str = "") -> None:
    """Remove what belongs to saves that are over, and not to the checkpoint that stands.

    A save is found to be over before the manifest is read: one that commits in between stands.
    """
    found, own_claim = _own_files(folder), f"{own}.saving"
    tokens = {token for _, token in found}
    over = {each for each in tokens if each == own or _is_over(folder, each)}
    try:
        files = read_manifest(folder).files if _has_manifest(folder) else []
    except CheckpointError:  # nobody knows what is in it
        over, files = {own}, []
    kept = {name for name, _ in files} | {own_claim}
    gone = [name for name, token in found if token in over and name not in kept]
    if remote.is_url(folder):
        remote.remove(folder, gone)
    for name in [] if remote.is_url(folder) else gone:
        _remove(os.path.join(folder, name))


def _is_over(folder: str, token: str) -> bool:
    return not remote.is_url(folder) and judge(folder, token, True) is Holder.DEAD


def _own_files(folder: str) -> list[tuple[str, str]]:
    """Return the names of files that hpcdist has written beside a manifest, and their tokens."""
    return [
        (name, match[1] or "")
        for name in (remote.files(folder) if remote.is_url(folder) else os.listdir(folder))
        for pattern in _OWN
        if (match := pattern.fullmatch(name))
    ]


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
    """Remove the checkpoint in `folder`, and the folder if nothing else is in it.

    What is not of hpcdist, or leads elsewhere, stays; so does what somebody is saving.
    """
    if remote.is_url(folder):
        _remove_remote(folder)
        return
    where = os.path.join(folder, MANIFEST)
    with suppress(OSError, CheckpointError):
        if not _is_folder(folder) or (os.path.lexists(where) and not _is_own(folder)):
            return
        mine = claim(folder)
        try:
            _remove(where)  # first: without it nobody takes it for a checkpoint
            _sweep(folder, mine.token)
        finally:
            release(mine)
        os.rmdir(folder)  # after the claim, whose file is in it


def _remove_remote(folder: str) -> None:
    with suppress(OSError, CheckpointError):
        name = remote.manifest_of(folder, MANIFEST)
        if name is None or _is_own(folder):
            remote.remove(folder, [name] if name else [])
            remote.remove(folder, [each for each, _ in _own_files(folder)])
            remote.remove_folder(folder)


def check_step(step: Any, keep: object) -> None:
    """Refuse a step, or a number of checkpoints to keep, that is not valid.

    Raises:
        UsageError: `step` or `keep` is wrong.

    """
    whole = isinstance(step, int) and not isinstance(step, bool)
    if step is not None and not (whole and 0 <= step < 1 << 63):
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
        names = remote.folders(path) if remote.is_url(path) else os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
    return [(step, step_folder(path, step)) for step in found]


def _has_manifest(folder: str) -> bool:
    if remote.is_url(folder):
        return remote.manifest_of(folder, MANIFEST) is not None
    return os.path.lexists(os.path.join(folder, MANIFEST))


def _is_folder(path: str) -> bool:
    return stat.S_ISDIR(os.lstat(path).st_mode)


def _is_own(folder: str) -> bool:
    """Return whether the manifest in a folder is one of hpcdist, be it damaged."""
    return b'"hpcdist checkpoint"' in _first_of_manifest(folder)


def _first_of_manifest(folder: str) -> bytes:
    if remote.is_url(folder):
        return remote.content(folder, remote.manifest_of(folder, MANIFEST) or MANIFEST, 120)
    try:
        fd = open_regular(os.path.join(folder, MANIFEST))
    except CheckpointError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read(120)


def _contents(path: str) -> str:
    if remote.is_url(path):
        return _listed([*remote.folders(path), *remote.files(path)])
    if not os.path.isdir(path):
        return "it is a file" if os.path.exists(path) else "it does not exist"
    return _listed(sorted(os.listdir(path)))


def _listed(names: list[str]) -> str:
    return (
        f"it holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
        if names
        else ("it is empty")
    )


def _remove(path: str) -> None:
    """Remove a file, not a link."""
    with suppress(OSError):
        if stat.S_ISREG(os.lstat(path).st_mode):
            os.unlink(path)


def check_order(verb: str, state: object, path: object) -> None:
    """Raise `UsageError` where the arguments of `save` or `load` have changed places."""
    if isinstance(state, (str, os.PathLike)) and not isinstance(path, (str, bytes, os.PathLike)):
        folder = os.fspath(state)
        raise UsageError(
            f"checkpoint.{verb} takes the state first and the folder second, but got the folder "
            f"{folder!r} and {an(type(path).__name__)}: write checkpoint.{verb}(state, {folder!r})"
        )
