"""The files of a dataset: which they are, agreed on by all ranks, and who reads what of them.

A *piece* is a range of bytes of a file. A record belongs to the piece in which its first byte
lies, so pieces are cut by arithmetic alone, anywhere, and every record is read once. The pieces of
rank 0, 1, ... follow each other: what ranks read one after the other is the order of the files.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from typing import Any

import xxhash

from hpcdist.comm.group import Group
from hpcdist.comm.together import together
from hpcdist.errors import DatasetError, MismatchError, UsageError
from hpcdist.fs.urls import file_system, is_url
from hpcdist.named_tuple import NamedTuple

_SHOWN = 8
_MAGIC = ("*", "?", "[")


class File(NamedTuple):
    """A file or URL, and how many bytes it has."""

    path: str
    size: int


class Piece(NamedTuple):
    """The records that begin in bytes `start` to `stop` of a file."""

    file: int
    """Its place in the list of files."""
    start: int
    stop: int


def deal(sizes: Sequence[int], ranks: int, cut: bool | Sequence[bool] = True) -> list[list[Piece]]:
    """Deal files to ranks so that each has about the same number of bytes.

    Args:
        sizes: bytes of each file.
        ranks: how many ranks there are.
        cut: whether files may be cut, all or each; what may not goes to the rank that has its
            middle, and the rank's share to the others is not made even.

    Returns:
        the pieces of each rank, in the order of the files; a rank may have none.

    Example:
        >>> from hpcdist.data.files import deal
        >>> [len(pieces) for pieces in deal([100, 100, 100], ranks=3)]
        [1, 1, 1]

    """
    may = [cut] * len(sizes) if isinstance(cut, bool) else list(cut)
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    bounds = [total * rank // ranks for rank in range(ranks + 1)]
    dealt: list[list[Piece]] = [[] for _ in range(ranks)]
    rank = 0
    for file, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        begin = end - size
        if may[file]:
            first = _rank_at(bounds, begin, rank)
            for rank in range(first, ranks):
                start, stop = max(bounds[rank], begin), min(bounds[rank + 1], end)
                if start < stop:
                    dealt[rank].append(Piece(file, start - begin, stop - begin))
                if bounds[rank + 1] >= end:
                    break
        else:
            rank = _rank_at(bounds, begin + size // 2, rank)
            dealt[rank].append(Piece(file, 0, size))
    return dealt


def _rank_at(bounds: Sequence[int], position: int, rank: int) -> int:
    """Return whose range holds a position, from `rank` on."""
    while rank < len(bounds) - 2 and bounds[rank + 1] <= position:
        rank += 1
    return rank


def agree_on(
    files: Iterable[str | os.PathLike[str]],
    group: Group | None = None,
    *,
    allow_empty: bool = False,
) -> list[File]:
    """Compare the list of files on all ranks; return it with the sizes. Collective.

    The ranks compare a digest of their lists. The first rank finds what patterns mean; each rank
    looks at its part of the files, so that nobody asks the file system for all.

    Args:
        files: paths, URLs (``s3://bucket/part-0.txt``) and patterns (``day/*.txt``); what a
            pattern means is sorted. The same list on all ranks.
        group: the ranks that take part; None for all.
        allow_empty: take files without a byte as such.

    Raises:
        MismatchError: ranks list different files; it names these ranks.
        DatasetError: files are missing, empty, folders, or cannot be read; it names them, on
            every rank.
        UsageError: `files` is not a list of paths.

    Example:
        >>> import pathlib, tempfile, hpcdist as dist
        >>> from hpcdist.data.files import agree_on
        >>> _ = dist.init_parallel_env()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for day in ("mon", "tue"):
        ...         _ = pathlib.Path(folder, f"{day}.txt").write_text("1 2 3")
        ...     print([file.size for file in agree_on([f"{folder}/*.txt"])])
        [5, 5]

    """
    party = together(group)
    digests = party.share(lambda: _digest(_names(files)))
    names = _names(files)
    if len(set(digests)) > 1:
        theirs = party.lead(lambda: names)
        notes = party.share(lambda: _first_difference(names, theirs))
        raise MismatchError(_told(party.ranks, party.first_world_rank, digests, notes))
    paths, problems = party.lead(lambda: _expanded(names))
    mine = paths[party.rank :: party.size]
    looks = party.share(lambda: [_look_at(path, allow_empty) for path in mine])
    found = [looks[place % party.size][place // party.size] for place in range(len(paths))]
    problems = problems + [look for look in found if isinstance(look, str)]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)
        raise DatasetError(
            f"{len(problems)} of {len(paths) or len(names)} files of the dataset cannot be read: "
            + "; ".join(problems[:_SHOWN] + more)
        )
    return [look for look in found if isinstance(look, File)]


def _names(files: Any) -> list[str]:
    if isinstance(files, (str, bytes, os.PathLike)) or not isinstance(files, Iterable):
        raise UsageError(f"files must be a list of paths or URLs, got {files!r}")
    names = list(files)
    for name in names:
        if not isinstance(name, (str, os.PathLike)) or not os.fspath(name):
            raise UsageError(f"files must be a list of paths or URLs, but it holds {name!r}")
    if not names:
        raise UsageError("the list of files is empty; a dataset has at least one")
    return [os.fsdecode(name) for name in names]


def _digest(names: Sequence[str]) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(names).encode("utf-8", "surrogateescape"))


def _first_difference(names: Sequence[str], theirs: Sequence[str]) -> str:
    for place, (mine, other) in enumerate(zip(names, theirs, strict=False)):
        if mine != other:
            return f"file {place} is {mine!r} instead of {other!r}"
    return f"it lists {len(names)} files instead of {len(theirs)}"


def _told(ranks: Sequence[int], first: int, digests: Sequence[str], notes: Sequence[str]) -> str:
    own = digests[ranks.index(first)]
    others = [
        f"rank {rank}: {note}"
        for rank, digest, note in zip(ranks, digests, notes, strict=True)
        if digest != own
    ]
    more = [f"and {len(others) - _SHOWN} more ranks"] * (len(others) > _SHOWN)
    return (
        f"the ranks list different files; other than rank {first} do "
        + "; ".join(others[:_SHOWN] + more)
        + ". Pass the same list on all ranks: hpcdist deals the files"
    )


def _expanded(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the paths that names and patterns mean, and what is wrong."""
    paths: list[str] = []
    problems: list[str] = []
    for name in names:
        found = _matches(name)
        paths += found
        if not found:
            problems.append(f"{name}: no file has such a name")
    return paths, problems


def _matches(name: str) -> list[str]:
    if not any(sign in name for sign in _MAGIC):
        return [name]
    store, inside = file_system(name)
    if store.is_exist(inside):
        return [name]
    if not is_url(name):
        return sorted(glob.glob(inside, recursive=True))
    folder, _, pattern = name.rpartition("/")
    store, inside = file_system(folder)
    names = store.ls_dir(inside)[1]
    return [f"{folder}/{each}" for each in sorted(names) if fnmatchcase(each, pattern)]


def _look_at(path: str, allow_empty: bool) -> File | str:
    """Return a file with its size, or what is wrong with it."""
    try:
        store, inside = file_system(path)
        if not store.is_exist(inside):
            return f"{path}: there is no such file"
        if not store.is_file(inside):
            return f"{path}: is a folder; list its files, or a pattern such as {path}/*"
        size = store.size(inside)
        if not size and not allow_empty:
            return f"{path}: is empty"
        with store.open(inside, "rb") as file:
            file.read(1)
    except (OSError, UsageError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"{path}: {type(error).__name__}: {reason}"
    return File(path, size)
