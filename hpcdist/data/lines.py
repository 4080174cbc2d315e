"""Text in blocks of whole lines: those that begin in a piece of a file, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from hpcdist.named_tuple import NamedTuple
from hpcdist.text import volume

_BOM = b"\xef\xbb\xbf"
_ENDLESS_NBYTES = 16 << 30


class EndlessLine(OSError):
    """A line goes on for so long that it is taken for one without end, as a command may write."""


class Block(NamedTuple):
    """Whole lines, or one that is longer than allowed, whose `text` is empty."""

    text: bytes
    lines_before: int
    """In the piece."""
    too_long: bool = False


def blocks(
    file: BinaryIO, start: int, stop: int | None, block_bytes: int, max_line_bytes: int
) -> Iterator[Block]:
    """Return the lines that begin in bytes `start` to `stop` of a file.

    The last line need not end in a newline. Of a line of more than `max_line_bytes` its beginning
    is dropped while it is read.

    Raises:
        EndlessLine: there is a line whose end has not come after 16 GiB.

    """
    rest, begin, ended = b"", start, False
    if start:
        file.seek(start - 1)
        rest, begin, ended = _skip_line(file, start - 1, block_bytes)
    lines = 0
    while (stop is None or begin < stop) and not (ended and not rest):
        data = b"" if ended else file.read(block_bytes)
        ended = not data
        text = rest + data if rest else data
        if not begin and text.startswith(_BOM):
            text, begin = text[len(_BOM) :], len(_BOM)
        cut = _cut(text, begin, stop, ended)
        rest = text[cut:]
        for block in _bounded(text[:cut], lines, max_line_bytes):
            yield block
            lines = block.lines_before + (block.text.count(b"\n") or 1)
        begin += cut
        if len(rest) > max_line_bytes and not ended:
            yield Block(b"", lines, too_long=True)
            lines += 1
            rest, begin, ended = _skip_line(file, begin + len(rest), block_bytes)


def _cut(text: bytes, begin: int, stop: int | None, ended: bool) -> int:
    """Return how much of a text is whole lines that begin before `stop`."""
    if stop is not None and begin + len(text) >= stop:
        last = text.find(b"\n", max(0, stop - begin - 1))
        if last >= 0:
            return last + 1
    return len(text) if ended else text.rfind(b"\n") + 1


def _skip_line(file: BinaryIO, at: int, block_bytes: int) -> tuple[bytes, int, bool]:
    """Read to the end of the line at `at`; return what was read beyond, where, and if it ended."""
    last = at + _ENDLESS_NBYTES
    while data := file.read(block_bytes):
        newline = data.find(b"\n")
        if newline >= 0:
            return data[newline + 1 :], at + newline + 1, False
        at += len(data)
        if at > last:
            raise EndlessLine(f"a line has not ended after {volume(_ENDLESS_NBYTES)}")
    return b"", at, True


def _bounded(text: bytes, lines: int, max_line_bytes: int) -> Iterator[Block]:
    """Return a text of whole lines without those that are too long, which are reported."""
    at = 0
    while len(text) - at > max_line_bytes:
        end = text.rfind(b"\n", at, at + max_line_bytes + 1) + 1
        if end:
            block = Block(text[at:end], lines)
        else:
            end = text.find(b"\n", at) + 1 or len(text)
            long = end - at - text.endswith(b"\n", at, end) > max_line_bytes
            block = Block(b"" if long else text[at:end], lines, too_long=long)
        yield block
        lines += block.text.count(b"\n") or 1
        at = end
    if at < len(text):
        yield Block(text[at:], lines)


def newlines_before(file: BinaryIO, position: int, block_bytes: int = 4 << 20) -> int:
    """Return how many lines end before a position of a file."""
    file.seek(0)
    count = 0
    while position > 0 and (data := file.read(min(block_bytes, position))):
        count += data.count(b"\n")
        position -= len(data)
    return count
