"""Blocks of lines hold every line once, whatever the cuts, and never more than the bound."""

import io

import pytest
from hypothesis import given, settings, strategies as some

from hpcdist.data.files import deal
from hpcdist.data.lines import EndlessLine, blocks, newlines_before


def lines_of(text, start=0, stop=None, block=4, most=10**6):
    """Return the lines of a piece, None for one that is too long."""
    found, before = [], 0
    for part in blocks(io.BytesIO(text), start, stop, block, most):
        assert part.lines_before == before
        if part.too_long:
            assert part.text == b""
            found.append(None)
            before += 1
        else:
            found += part.text.removesuffix(b"\n").split(b"\n")
            before += part.text.count(b"\n") or 1
    return found


def split(text):
    return text.removesuffix(b"\n").split(b"\n") if text else []


TEXTS = some.lists(some.sampled_from([b"", b"a", b"bc", b"defg", b"\r", b"hijklmnop"]), max_size=9)


@settings(max_examples=150, deadline=None)
@given(parts=TEXTS, end=some.booleans(), ranks=some.integers(1, 7), block=some.integers(1, 9))
def test_every_line_is_in_one_piece(parts, end, ranks, block):
    text = b"\n".join(parts) + b"\n" * end
    pieces = [piece for mine in deal([len(text)], ranks) for piece in mine]
    found = [line for p in pieces for line in lines_of(text, p.start, p.stop, block)]
    assert found == split(text)


@settings(max_examples=150, deadline=None)
@given(parts=TEXTS, end=some.booleans(), most=some.integers(1, 5), block=some.integers(1, 9))
def test_lines_beyond_the_bound_are_told_and_no_other(parts, end, most, block):
    text = b"\n".join(parts) + b"\n" * end
    want = [None if len(line) > most else line for line in split(text)]
    assert lines_of(text, block=block, most=most) == want


def test_a_line_without_end_takes_no_more_memory_than_the_bound():
    class Endless(io.RawIOBase):
        given = 0

        def read(self, size=-1):
            self.given += size
            assert self.given < 5000
            return b"x" * size

    (part,) = [next(blocks(Endless(), 0, None, 100, 1000))]
    assert part.too_long
    assert part.text == b""


@pytest.mark.parametrize("start", [0, 50])
def test_a_line_without_end_is_not_skipped_for_ever(start, monkeypatch):
    class Endless(io.RawIOBase):
        def read(self, size=-1):
            return b"x" * size

        def seek(self, position, whence=0):
            return position

    monkeypatch.setattr("hpcdist.data.lines._ENDLESS_NBYTES", 100_000)
    with pytest.raises(EndlessLine, match="a line has not ended after"):
        list(blocks(Endless(), start, None, 100, 1000))


def test_a_mark_of_byte_order_is_no_text():
    assert lines_of(b"\xef\xbb\xbfa\nb", block=64) == [b"a", b"b"]


@pytest.mark.parametrize(("at", "count"), [(0, 0), (1, 0), (2, 1), (4, 2), (5, 3), (99, 3)])
def test_newlines_before_a_position_are_counted(at, count):
    assert newlines_before(io.BytesIO(b"a\nb\n\nc"), at, block_bytes=2) == count
