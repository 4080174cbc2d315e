"""Multislot text: on each line, for each slot, a count and so many numbers.

``2 17 4 1 0.5`` is two ids and a float. The compiled parser and the one in NumPy take the same
lines and give the same bits: each number becomes a *cell* of 64 bits, an integer's own or those of
the float64 nearest to the text, and each line the lengths of its slots. Which lines they leave out,
`reason_of` explains one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from hpcdist.compiled import expect, load
from hpcdist.data.columns import Columns, Fixed, IndexArray, NumpyArray, Ragged, gathered
from hpcdist.data.slots import Slot, float_of
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

Malformed = list[tuple[int, str]]
"""Where in a text a malformed line begins, and why it is one."""

_BLANK = b" \t\r"
_FLOAT_AT = 3
_LEAST = {0: -(1 << 63), 1: -(1 << 31), 2: 0}
_MOST = {0: (1 << 64) - 1, 1: (1 << 31) - 1, 2: (1 << 64) - 1}
_TYPES = {"int64": 0, "int32": 1, "uint64": 2, "float64": _FLOAT_AT, "float32": 4}
"""How the text of a number is read. An id beyond 2^63 is kept in an int64 slot by its bits."""

_GAP = re.compile(rb"[ \t\r]")
_COUNT = re.compile(rb"[0-9]+")
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_FLOAT = re.compile(
    rb"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|infinity|nan)", re.IGNORECASE
)
_POWERS = 10.0 ** np.arange(16)
_PLAIN = 15
"""So many digits are a float64 exactly, and what a power of ten makes of it is rounded once."""


_compiled = load("hpcdist.data._native")
expect(_compiled, **{name.upper(): number for name, number in _TYPES.items()})


class _Parsed(NamedTuple):
    cells: NumpyArray
    """uint64: all numbers of the good lines, in their order."""
    lengths: IndexArray
    """For each good line and slot."""
    wrong: list[int]
    """Where the malformed lines begin."""


@final
class Multislot:
    """Parses text of certain slots.

    Raises:
        UsageError: there is no slot, or one of a dtype that multislot text does not have. It is a
            `ValueError`, as Paddle's.

    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        if not slots:
            raise UsageError(
                "multislot text does not name its slots: pass use_var, such as "
                '[("words", "int64"), ("label", "float32", ())]'
            )
        self._slots = [slot._replace(dtype=slot.dtype or np.dtype(np.int64)) for slot in slots]
        for slot in self._slots:
            if str(slot.dtype) not in _TYPES:
                raise UsageError(
                    f"slot {slot.name!r} has dtype {slot.dtype}; multislot text has "
                    f"{', '.join(_TYPES)}"
                )
        self._types = np.array([_TYPES[str(slot.dtype)] for slot in self._slots], np.int32)
        self._widths = np.array([slot.width for slot in self._slots], np.int64)

    def parse(self, text: bytes) -> tuple[Columns, Malformed]:
        """Return the records of whole lines, and which lines are malformed."""
        cells, lengths, wrong = _parser(text, self._types, self._widths)
        malformed = [(at, self.reason_of(text[at : _line_end(text, at)])) for at in wrong]
        return self._columns(cells, lengths), malformed

    def _columns(self, cells: NumpyArray, lengths: IndexArray) -> Columns:
        starts = np.zeros(lengths.size + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        begins = starts[:-1].reshape(lengths.shape)
        columns: dict[str, Fixed | Ragged] = {}
        for place, slot in enumerate(self._slots):
            values, offsets = gathered(cells, begins[:, place], lengths[:, place])
            values = _converted(values, np.dtype(slot.dtype))
            columns[slot.name] = (
                Ragged(values, offsets)
                if slot.shape is None
                else Fixed(values.reshape(len(lengths), *slot.shape))
            )
        return Columns(columns)

    def reason_of(self, line: bytes) -> str:
        """Return why a line is malformed."""
        tokens = [token for token in _GAP.split(line) if token]
        place = 0
        for slot in self._slots:
            what = f"slot {slot.name!r}"
            if place >= len(tokens):
                return f"the line ends before {what}"
            if not _COUNT.fullmatch(tokens[place]):
                return f"{what}: the number of its values is {_shown(tokens[place])}"
            count = int(tokens[place][:30])
            values = tokens[place + 1 : place + 1 + count]
            if slot.shape is not None and count != slot.width:
                return f"{what} has {count} values, not {slot.width}"
            if len(values) < count:
                return f"{what} is to have {count} values, but the line ends after {len(values)}"
            bad = next((value for value in values if not _is_number(value, slot)), None)
            if bad is not None:
                is_float = _TYPES[str(slot.dtype)] >= _FLOAT_AT and _FLOAT.fullmatch(bad)
                how = "too large for" if is_float else "not valid as"
                return f"{what}: {_shown(bad)} is {how} {slot.dtype}"
            place += 1 + count
        return f"there is {_shown(b' '.join(tokens[place:]))} behind the last slot"


def _converted(cells: NumpyArray, dtype: np.dtype[Any]) -> NumpyArray:
    numbers = cells.view(np.float64 if dtype.kind == "f" else np.int64)
    if dtype == np.uint64:
        return cells
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(dtype, copy=False)


def _is_number(token: bytes, slot: Slot) -> bool:
    kind = _TYPES[str(slot.dtype)]
    if kind >= _FLOAT_AT:
        return _float(token, str(slot.dtype)) is not None
    return _INTEGER.fullmatch(token) is not None and _LEAST[kind] <= _whole(token) <= _MOST[kind]


def _float(token: bytes, dtype: Any) -> float | None:
    """Return the number of a token; None where it is none, or too large."""
    if not _FLOAT.fullmatch(token):
        return None
    try:
        return float_of(token.decode(), dtype)
    except ValueError:
        return None


def _whole(token: bytes) -> int:
    """Return the number of a token of digits; of very many digits one that is too large."""
    digits = token.lstrip(b"+-0")
    number = int(digits or b"0") if len(digits) <= 20 else 1 << 70
    return -number if token[:1] == b"-" else number


def _shown(token: bytes) -> str:
    text = token[:40].decode("utf-8", "backslashreplace")
    return repr(text) + "..." * (len(token) > 40) + ", with a NUL byte" * (b"\0" in token)


def _line_end(text: bytes, at: int) -> int:
    end = text.find(b"\n", at)
    return len(text) if end < 0 else end


# ---- the compiled parser


def _parse_compiled(text: bytes, types: NumpyArray, widths: IndexArray) -> _Parsed:
    most = len(text) // 2 + 1  # a number and what is behind it
    cells, lengths = np.empty(most, np.uint64), np.empty(most, np.int64)
    at = n_cells = n_lengths = 0
    wrong: list[int] = []
    while at < len(text):
        at, more_cells, more_lengths, good = _compiled.parse_slots(
            text, at, types, widths, cells[n_cells:], lengths[n_lengths:]
        )
        n_cells += more_cells
        n_lengths += more_lengths
        if not good:
            wrong.append(at)
            at = _line_end(text, at) + 1
    return _Parsed(cells[:n_cells], lengths[:n_lengths].reshape(-1, len(types)), wrong)


# ---- the same in NumPy


class _Tokens(NamedTuple):
    text: bytes
    codes: NumpyArray
    """The bytes of the text."""
    begins: IndexArray
    ends: IndexArray

    def at(self, which: IndexArray) -> _Tokens:
        return self._replace(begins=self.begins[which], ends=self.ends[which])

    def token(self, place: int) -> bytes:
        return self.text[self.begins[place] : self.ends[place]]


def _parse_numpy(text: bytes, types: NumpyArray, widths: IndexArray) -> _Parsed:
    codes = np.frombuffer(text, np.uint8)
    newline = codes == ord("\n")
    space = newline | np.isin(codes, list(_BLANK))
    edges = np.flatnonzero(np.diff(~space, prepend=False, append=False))
    tokens = _Tokens(text, codes, edges[::2], edges[1::2])
    breaks = np.flatnonzero(newline)
    line = np.searchsorted(breaks, tokens.begins)
    first = np.flatnonzero(np.diff(line, prepend=-1))
    last = np.append(first[1:], len(line))
    lengths, begins, good = _walk(tokens, first, last, widths)
    runs, counts = begins[good].ravel(), lengths[good].ravel()
    which, _ = gathered(np.arange(len(line)), runs, counts)
    cells, fine = _numbers(tokens.at(which), np.repeat(np.tile(types, int(good.sum())), counts))
    if not fine.all():
        row = np.repeat(np.arange(len(good))[good], lengths[good].sum(axis=1))
        good[row[~fine]] = False
        cells = cells[good[row]]
    line_starts = np.append(0, breaks + 1)
    return _Parsed(cells, lengths[good], line_starts[line[first[~good]]].tolist())


def _walk(
    tokens: _Tokens, first: IndexArray, last: IndexArray, widths: IndexArray
) -> tuple[IndexArray, IndexArray, NumpyArray]:
    """Return the lengths of the slots of each line, where they begin, and which lines fit."""
    lengths, begins = np.zeros((2, len(first), len(widths)), np.int64)
    good, place = np.ones(len(first), bool), first.copy()
    for slot, width in enumerate(widths.tolist()):
        good &= place < last
        at = tokens.at(np.where(good, place, 0))
        cells, fine = _integers(at, 2) if len(first) else (place.view(np.uint64), good)
        fine &= np.isin(at.codes[at.begins], list(b"+-"), invert=True) if len(first) else fine
        good &= fine & (cells <= (last - place - 1).clip(0).astype(np.uint64))
        lengths[:, slot] = np.where(good, cells.astype(np.int64), 0)
        good &= (width < 0) | (lengths[:, slot] == width)
        begins[:, slot] = place + 1
        place = begins[:, slot] + lengths[:, slot]
    return lengths, begins, good & (place == last)


def _numbers(tokens: _Tokens, types: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
    """Return the cells of tokens, and which are numbers."""
    cells, fine = np.zeros(len(types), np.uint64), np.zeros(len(types), bool)
    for kind in np.unique(types).tolist():
        which = np.flatnonzero(types == kind)
        at = tokens.at(which)
        read = _floats if kind >= _FLOAT_AT else _integers
        cells[which], fine[which] = read(at, kind)
    return cells, fine


def _integers(tokens: _Tokens, kind: int) -> tuple[NumpyArray, NumpyArray]:
    cells, _, fine, negative = _digits(tokens, 18, point=False)
    numbers = np.where(negative, -cells.view(np.int64), cells.view(np.int64))
    if kind == 1:
        fine &= (numbers >= _LEAST[kind]) & (numbers <= _MOST[kind])
    elif kind == 2:
        fine &= numbers >= 0
    result = numbers.view(np.uint64)
    for place in np.flatnonzero(~fine).tolist():
        token = tokens.token(place)
        if _INTEGER.fullmatch(token) and _LEAST[kind] <= _whole(token) <= _MOST[kind]:
            result[place], fine[place] = _whole(token) % (1 << 64), True
    return result, fine


def _floats(tokens: _Tokens, kind: int) -> tuple[NumpyArray, NumpyArray]:
    cells, places, fine, negative = _digits(tokens, _PLAIN, point=True)
    values = cells.astype(np.float64) / _POWERS[places]
    values = np.where(negative, -values, values)
    for place in np.flatnonzero(~fine).tolist():
        value = _float(tokens.token(place), "float64" if kind == _FLOAT_AT else "float32")
        if value is not None:
            values[place], fine[place] = value, True
    return values.view(np.uint64), fine


def _digits(
    tokens: _Tokens, most: int, point: bool
) -> tuple[NumpyArray, IndexArray, NumpyArray, NumpyArray]:
    """Return the digits of each token as a number, and more.

    The rest: how many digits are behind its point, whether it is a number of at most `most`
    digits, and whether it has a minus.
    """
    codes = tokens.codes
    leading = codes[tokens.begins] if len(tokens.begins) else np.empty(0, np.uint8)
    negative = leading == ord("-")
    begins = tokens.begins + (negative | (leading == ord("+")))
    sizes = tokens.ends - begins
    numbers = np.zeros(len(begins), np.uint64)
    counts, places = np.zeros((2, len(begins)), np.int64)
    pointed = np.zeros(len(begins), bool)
    fine = (sizes > 0) & (sizes <= most + point)
    for step in range(int(min(sizes.max(initial=0), most + point))):
        here = step < sizes
        code = codes[np.where(here, begins + step, 0)]
        digit = code - np.uint8(ord("0"))
        is_digit = here & (digit < 10)
        is_point = here & (code == ord(".")) & ~pointed & point
        fine &= is_digit | is_point | ~here
        numbers = np.where(is_digit, numbers * np.uint64(10) + digit, numbers)
        counts += is_digit
        places += is_digit & pointed
        pointed |= is_point
    return numbers, places.clip(0, _PLAIN), fine & (counts > 0) & (counts <= most), negative


_parser: Callable[[bytes, NumpyArray, IndexArray], _Parsed] = (
    _parse_numpy if _compiled is None else _parse_compiled
)
