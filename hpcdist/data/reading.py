"""`Reading`: this rank's part of the files of a dataset, read by several threads."""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final
from warnings import warn

from hpcdist.comm.session import current_session
from hpcdist.data.columns import Columns
from hpcdist.data.dataset import Feed
from hpcdist.data.files import File, Piece, agree_on, deal
from hpcdist.data.formats import Format, Settings, open_format
from hpcdist.data.spill import Spill, read_spill
from hpcdist.data.store import Hoard
from hpcdist.errors import DatasetWarning
from hpcdist.named_tuple import NamedTuple


class Lane(NamedTuple):
    """What one thread reads, in the order of the files."""

    format: Format
    files: Sequence[File]
    pieces: Sequence[Piece]

    def __iter__(self) -> Iterator[Columns]:  # type: ignore[override]
        for file, start, stop in self.pieces:
            yield from self.format.read(self.files[file].path, start=start, stop=stop)


@final
class Reading:
    """The ranks agree on the settings and the files, and deal the files. Collective.

    Raises:
        MismatchError: ranks name different files, or have different settings.
        DatasetError: files cannot be read.
        UsageError: there are none, or a setting is wrong.

    """

    def __init__(self, feed: Feed, also: Mapping[str, Any] | None = None) -> None:
        ranks, settings = feed.ranks, feed.settings
        feed.agree(also)
        self._threads = settings["thread_num"]
        self.spill: Spill | None = ranks.share(lambda: read_spill(settings.get("spill")))[
            ranks.rank
        ]
        self._wanted = Settings(
            settings["use_var"] if settings["columns"] is None else settings["columns"],
            **{name: settings[name] for name in _FOR_FORMATS},
        )
        self._name, self._formats = settings["format"], list[Format]()
        self._open_format()
        self.files = agree_on(feed.files, ranks.group, allow_empty=self._wanted.allow_empty)
        self._rank, self._size = ranks.rank, ranks.size

    @property
    def digest(self) -> int:
        """A number of the files' names and sizes, in order, wherever they lie."""
        names = (f"{posixpath.basename(path)} {size}" for path, size in self.files)
        return zlib.crc32("\n".join(names).encode(errors="surrogateescape"))

    def lanes(
        self, rank: int, ranks: int, threads: int, order: Iterable[int] | None = None
    ) -> list[Lane]:
        """Return what each thread of a rank reads: the first what comes first. Local.

        Args:
            rank: which.
            ranks: how many there are.
            threads: of each rank.
            order: of the files; None for their own.

        """
        files = [self.files[at] for at in order] if order is not None else self.files
        formats = [self._open_format() for _ in range(threads)]
        cut = [formats[0].can_cut(file.path) for file in files]
        dealt = deal([file.size for file in files], ranks * threads, cut)[rank * threads :]
        return [Lane(each, files, pieces) for each, pieces in zip(formats, dealt, strict=False)]

    def _open_format(self) -> Format:
        self._formats.append(open_format(self._name, self._wanted))
        return self._formats[-1]

    def rows(self) -> list[Columns]:
        """Read all of this rank. Local."""
        lanes = self.lanes(self._rank, self._size, self._threads)
        lanes = [lane for lane in lanes if lane.pieces]
        if len(lanes) < 2:
            return [part for lane in lanes for part in self._hoarded(lane)]
        with ThreadPoolExecutor(len(lanes), "hpcdist-read") as pool:
            return [part for parts in pool.map(self._hoarded, lanes) for part in parts]

    def _hoarded(self, lane: Lane) -> list[Columns]:
        hoard = Hoard(*self._kept(), compact=lane.format.is_compact)
        for rows in lane:
            hoard.add(rows)
        return hoard.parts()

    def _kept(self) -> tuple[int, str | None]:
        if self.spill is None:
            return 0, None
        session = current_session()
        ranks = session.whereabouts.local_size if session is not None else 1
        return self.spill.nbytes // (ranks * self._threads), self.spill.folder

    def tell_left_out(self) -> None:
        """Warn of malformed records that this rank has left out, if they are to be counted."""
        bad = [each.bad for each in self._formats if each.bad.count]
        if bad and bad[0].on_bad == "count":
            warn("; ".join(each.summary() for each in bad), DatasetWarning, stacklevel=5)


_FOR_FORMATS = (
    "on_bad",
    "pipe_command",
    "pipe_timeout",
    "allow_empty",
    "separator",
    "header",
    "max_line_bytes",
    "block_bytes",
)
