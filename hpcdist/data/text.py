"""Files of lines: multislot text, csv and JSON lines.

Blocks of lines go through a parser that is fast, Arrow's where it is installed; a block in which it
finds a fault goes line by line through Python's, which leaves malformed lines out and says why.
"""

from __future__ import annotations

import csv
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, final

import numpy as np

from hpcdist.data.arrow import columns_of
from hpcdist.data.bad_records import BadRecord, BadRecords
from hpcdist.data.columns import BYTES, STRING, Column, Columns, Fixed, Ragged
from hpcdist.data.lines import Block, blocks
from hpcdist.data.multislot import Malformed, Multislot
from hpcdist.data.slots import TRUTH, Slot, float_of
from hpcdist.data.source import Settings, Source
from hpcdist.errors import DatasetError, UsageError

Parse = Callable[[bytes], tuple[Columns, Malformed]]
_HEAD = 1 << 16
_FLOAT = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|infinity|nan)", re.I)
_INTEGER = re.compile(r"[+-]?[0-9]+")


def read_multislot(source: Source, settings: Settings, bad: BadRecords) -> Iterator[Columns]:
    """Return the records of a piece of multislot text."""
    return _parsed(_blocks(source, settings), Multislot(settings.slots).parse, source, bad)


def read_csv(source: Source, settings: Settings, bad: BadRecords) -> Iterator[Columns]:
    """Return the records of a piece of a csv file, one on each line."""
    head, lines = _with_head(source, settings)
    names, first, skip = _csv_names(head, settings, source.name)
    slots = _asked(settings.slots, names, dict(zip(names, map(_csv_type, first), strict=True)))
    for slot in slots:
        _refuse(slot.shape not in (None, ()), source.name, slot, "csv files have single numbers")
    slots = [slot if slot.is_text else slot._replace(shape=()) for slot in slots]
    rows = _Rows(_Csv(names, slots, settings.separator), slots)
    return _parsed(lines, rows.parse, source, bad, skip if not source.start else 0)


def read_jsonl(source: Source, settings: Settings, bad: BadRecords) -> Iterator[Columns]:
    """Return the records of a piece of a file with a JSON object on each line."""
    head, lines = _with_head(source, settings)
    first = _first_object(head)
    slots = _asked(settings.slots, list(first), {key: _json_type(first[key]) for key in first})
    for slot in slots:
        _refuse(len(slot.shape or ()) > 1, source.name, slot, "lists are of one dimension")
        if slot.dtype is None:
            raise DatasetError(
                f"{source.name}: the first line does not say what {slot.name!r} is; write its "
                f'dtype in use_var, such as ("{slot.name}", "float32")'
            )
    return _parsed(lines, _Rows(_Json(slots), slots).parse, source, bad)


# ---- lines


def _blocks(source: Source, settings: Settings) -> Iterator[Block]:
    limits = settings.block_bytes, settings.max_line_bytes
    return blocks(source.file, source.start, source.stop, *limits)


def _with_head(source: Source, settings: Settings) -> tuple[bytes, Iterator[Block]]:
    """Return the beginning of the file, whatever the piece, and the blocks of the piece."""
    lines = _blocks(source, settings)
    if source.start or (source.stop is not None and source.file.seekable()):
        source.file.seek(0)
        begin = _beginning(blocks(source.file, 0, None, _HEAD, settings.max_line_bytes))
        source.file.seek(0)
        return _text_of(begin), lines
    begin = _beginning(lines)
    return _text_of(begin), chain(begin, lines)


def _beginning(lines: Iterator[Block]) -> list[Block]:
    """Take the blocks of the first two lines, if there are so many: a header and a record."""
    taken: list[Block] = []
    for block in lines:
        taken.append(block)
        if block.too_long or b"\n" in _text_of(taken).strip():
            break
    return taken


def _text_of(lines: Sequence[Block]) -> bytes:
    return b"".join(block.text for block in lines)


def _parsed(
    lines: Iterator[Block], parse: Parse, source: Source, bad: BadRecords, skip: int = 0
) -> Iterator[Columns]:
    """Return the records of blocks, without the first `skip` lines."""
    first_line = None
    for block in lines:
        text, at = block.text, 0
        for _ in range(skip - block.lines_before):
            at = text.find(b"\n", at) + 1 or len(text)
        columns, malformed = parse(text[at:] if at else text)
        if block.too_long:
            malformed = [(0, "the line is longer than max_line_bytes")]
        for where, reason in malformed:
            first_line = source.first_line() if first_line is None else first_line
            line = first_line + block.lines_before + text.count(b"\n", 0, at + where)
            bad.add(BadRecord(source.name, line, reason))
        if len(columns):
            yield columns


# ---- columns


def _asked(slots: Sequence[Slot], names: Sequence[str], told: dict[str, Slot]) -> list[Slot]:
    """Return the columns asked for, or all; what was left open is taken from the file."""
    found = []
    for slot in slots or [Slot(name) for name in names]:
        seen = told.get(slot.name, Slot(slot.name))
        shape = seen.shape if slot.shape is None else slot.shape
        dtype = seen.dtype if slot.dtype is None else slot.dtype
        found.append(Slot(slot.name, dtype, shape))
    return found


def _refuse(wrong: bool, file: str, slot: Slot, why: str) -> None:
    if wrong:
        raise UsageError(f"{file}: slot {slot.name!r} has shape {slot.shape}, but {why}")


class _Dialect(ABC):
    """How the lines of one kind of text become values."""

    @abstractmethod
    def table(self, text: bytes) -> Any:
        """Return a table of Arrow, or raise one of `faults`."""

    @abstractmethod
    def values(self, line: str) -> list[Any]:
        """Return the value of each slot, or raise `ValueError`."""


@final
class _Rows:
    """Parses blocks by Arrow or, in case of a fault or without it, line by line."""

    def __init__(self, dialect: _Dialect, slots: Sequence[Slot]) -> None:
        self._dialect, self._slots = dialect, slots
        self._wide = [slot._replace(dtype=_parsed_as(slot)) for slot in slots]
        try:
            import pyarrow

            self._faults: tuple[type[Exception], ...] | None = (
                pyarrow.ArrowException,
                DatasetError,
                UnicodeDecodeError,
            )
        except ImportError:
            self._faults = None

    def parse(self, text: bytes) -> tuple[Columns, Malformed]:
        if self._faults is not None and b"\0" not in text:
            try:
                table = self._dialect.table(text)
                columns, wrong = columns_of(table, self._wide)
                lines = text.count(b"\n") + (not text.endswith(b"\n"))
                if not wrong and table.num_rows == lines:
                    columns = self._narrowed(columns)
                    if not any(_has_infinity(columns[slot.name]) for slot in self._slots):
                        return columns, []  # else a number may have been too large
            except self._faults:
                pass
        return self._line_by_line(text)

    def _narrowed(self, columns: Columns) -> Columns:
        return Columns({s.name: _narrowed(columns[s.name], s) for s in self._slots}, len(columns))

    def _line_by_line(self, text: bytes) -> tuple[Columns, Malformed]:
        rows: list[list[Any]] = []
        malformed: Malformed = []
        at = 0
        for line in _lines(text):
            stripped = line.rstrip(b"\r\n")
            if stripped.strip():
                try:
                    rows.append(self._dialect.values(_decoded(stripped)))
                except (ValueError, csv.Error, RecursionError) as error:
                    malformed.append((at, str(error)))
            at += len(line)
        columns: dict[str, Column] = {}
        for place, slot in enumerate(self._slots):
            columns[slot.name] = _column([row[place] for row in rows], slot)
        return Columns(columns, len(rows)), malformed


def _lines(text: bytes) -> Iterator[bytes]:
    """Return lines with their newlines; a lone carriage return ends none."""
    at = 0
    while at < len(text):
        end = text.find(b"\n", at) + 1 or len(text)
        yield text[at:end]
        at = end


def _decoded(line: bytes) -> str:
    if b"\0" in line:
        raise ValueError("there is a NUL byte")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"invalid UTF-8: byte {line[error.start]:#04x} at {error.start}"
        ) from error


def _parsed_as(slot: Slot) -> Any:
    """Return the dtype in which text is read: floats as float64, rounded once more at the end."""
    if slot.is_text or slot.dtype is None:
        return STRING
    return np.dtype(np.float64) if np.dtype(slot.dtype).kind == "f" else slot.dtype


def _narrowed(column: Column, slot: Slot) -> Column:
    if isinstance(column, Ragged) and slot.is_text:
        return Ragged(column.values, column.offsets, str(slot.dtype))
    with np.errstate(over="ignore"):
        values = column.values.astype(np.dtype(slot.dtype), copy=False)
    return Fixed(values) if isinstance(column, Fixed) else Ragged(values, column.offsets)


def _has_infinity(column: Column) -> bool:
    return column.values.dtype.kind == "f" and bool(np.isinf(column.values).any())


def _column(values: list[Any], slot: Slot) -> Column:
    if slot.is_text:
        texts = Ragged.of([value.encode() for value in values] or [b""]).slice(0, len(values))
        return Ragged(texts.values, texts.offsets, str(slot.dtype))
    wide = _parsed_as(slot)
    if slot.shape is None:
        lists = Ragged.of(values or [[]], wide).slice(0, len(values))
        return _narrowed(lists, slot)
    return _narrowed(Fixed(np.array(values, wide).reshape(len(values), *slot.shape)), slot)


def _number(value: Any, slot: Slot) -> Any:
    """Return a number as it is to be kept, or raise `ValueError`."""
    dtype = np.dtype(slot.dtype)
    if dtype.kind == "b":
        good = isinstance(value, bool)
    elif dtype.kind == "f":
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        value = float_of(str(value), dtype, slot.name) if good else value
    else:
        good = isinstance(value, int) and not isinstance(value, bool)
        good = good and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    if not good:
        raise ValueError(f"{slot.name!r} is {_shown(value)}, which is not valid as {dtype}")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


# ---- csv


@final
class _Csv(_Dialect):
    def __init__(self, names: Sequence[str], slots: Sequence[Slot], separator: str) -> None:
        self._names, self._slots, self._separator = list(names), slots, separator
        self._places = [self._names.index(slot.name) for slot in slots]
        kinds = {np.dtype(slot.dtype).kind for slot in slots if not slot.is_text}
        before = rb"(?:^|[ \t\"]|%s)" % re.escape(separator.encode())
        self._has_integers = bool(kinds & {*"iu"})
        self._hexadecimal = re.compile(before + rb"[+-]?0x", re.M | re.I)

    def _may_be_hexadecimal(self, text: bytes) -> bool:
        has = self._has_integers and (b"0x" in text or b"0X" in text)
        return has and self._hexadecimal.search(text) is not None

    def table(self, text: bytes) -> Any:
        import pyarrow as pa
        from pyarrow import csv as arrow_csv

        if _has_loose_quote(text, self._separator):
            raise DatasetError("a quote is not closed, or something follows it: Arrow lets it pass")
        if self._may_be_hexadecimal(text):
            raise DatasetError("a number may be hexadecimal, which Arrow lets pass")
        types = {slot.name: _arrow_type(pa, _parsed_as(slot)) for slot in self._slots}
        return arrow_csv.read_csv(
            pa.BufferReader(text),
            arrow_csv.ReadOptions(
                use_threads=False, block_size=len(text) + 1, column_names=self._names
            ),
            arrow_csv.ParseOptions(delimiter=self._separator),
            arrow_csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=[],
                true_values=["true", "True", "1"],
                false_values=["false", "False", "0"],
            ),
        )

    def values(self, line: str) -> list[Any]:
        fields = _fields(line, self._separator)
        if len(fields) != len(self._names):
            raise ValueError(f"there are {len(fields)} fields, not {len(self._names)}")
        return [
            _csv_value(fields[place], slot)
            for place, slot in zip(self._places, self._slots, strict=True)
        ]


def _has_loose_quote(text: bytes, separator: str) -> bool:
    """Return whether a quote is not closed, or what follows one that closes ends no field."""
    data = np.frombuffer(text + b"\n", np.uint8)
    quotes = np.flatnonzero(data == ord('"'))
    after = np.frombuffer(b'\r\n"' + separator.encode(), np.uint8)
    return bool(quotes.size % 2) or not np.isin(data[quotes[1::2] + 1], after).all()


def _csv_value(field: str, slot: Slot) -> Any:
    if slot.is_text:
        return field
    kind, text = np.dtype(slot.dtype).kind, field.strip(" \t")
    if kind == "b":
        return _number(TRUTH.get(text, field), slot)
    if kind == "f":
        return _number(
            float_of(text, slot.dtype, slot.name) if _FLOAT.fullmatch(text) else field, slot
        )
    return _number(int(text) if _INTEGER.fullmatch(text) and len(text) < 40 else field, slot)


def _fields(line: str, separator: str) -> list[str]:
    (fields,) = csv.reader([line], delimiter=separator, strict=True)
    return fields


def _csv_names(head: bytes, settings: Settings, file: str) -> tuple[list[str], list[str], int]:
    """Return the names of the columns, the fields of the first record, how many lines to skip."""
    lines = (line.rstrip(b"\r\n") for line in _lines(head))
    if not settings.header:
        if not settings.slots:
            raise UsageError("a csv file without a header needs use_var, which names its columns")
        names = [slot.name for slot in settings.slots]
        return names, _first_record(lines, names, settings.separator), 0
    header = next(lines, b"")
    try:
        names = _fields(_decoded(header), settings.separator) if header else []
    except (csv.Error, ValueError) as error:
        raise DatasetError(f"{file}:1: the header is not csv: {error}") from error
    missing = [slot.name for slot in settings.slots if slot.name not in names]
    if missing or not names:
        raise DatasetError(
            f"{file}:1: there is no column {', '.join(map(repr, missing))}; the header has "
            f"{', '.join(names) or 'nothing'}"
        )
    return names, _first_record(lines, names, settings.separator), 1


def _first_record(lines: Iterator[bytes], names: Sequence[str], separator: str) -> list[str]:
    """Return the fields of the first line that has as many as there are names, or empty ones."""
    for line in lines:
        try:
            fields = _fields(_decoded(line), separator)
        except (csv.Error, ValueError):
            continue
        if len(fields) == len(names):
            return fields
    return [""] * len(names)


def _csv_type(field: str) -> Slot:
    if _INTEGER.fullmatch(field):
        return Slot("", np.dtype(np.int64), ())
    return Slot("", np.dtype(np.float64), ()) if _FLOAT.fullmatch(field) else Slot("", STRING)


# ---- JSON lines


@final
class _Json(_Dialect):
    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots

    def table(self, text: bytes) -> Any:
        import pyarrow as pa
        from pyarrow import json as arrow_json

        text.decode()  # which Arrow does not check
        if not _is_an_object_on_each_line(text):
            raise DatasetError("a line is not one object: Arrow lets it pass, or fails")
        fields = []
        for slot in self._slots:
            kind = _arrow_type(pa, _parsed_as(slot))
            is_list = slot.shape != () and not slot.is_text
            fields.append(pa.field(slot.name, pa.list_(kind) if is_list else kind))
        return arrow_json.read_json(
            pa.BufferReader(text),
            arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
            arrow_json.ParseOptions(
                explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"
            ),
        )

    def values(self, line: str) -> list[Any]:
        found: Any = json.loads(line, object_pairs_hook=_Object, parse_float=_json_float)
        if not isinstance(found, _Object):
            raise ValueError(f"the line is {_shown(found)}, not an object")
        for slot in self._slots:
            if slot.name in found.doubles:
                raise ValueError(f"{slot.name!r} comes twice in the object")
        return [_json_value(found, slot) for slot in self._slots]


def _json_float(text: str) -> float | Decimal:
    """Return a float; of one that is too large for that what `_number` refuses, if it is asked."""
    value = float(text)
    return value if math.isfinite(value) else Decimal(text)


class _Object(dict[str, Any]):
    """A JSON object; `doubles` are the names that come twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(name for name, _ in pairs) if len(self) < len(pairs) else {}
        self.doubles = {name for name, count in counts.items() if count > 1}


def _is_an_object_on_each_line(text: bytes) -> bool:
    """Return whether all lines begin and end as objects do, without spaces around."""
    lines = text.count(b"\n") + (not text.endswith(b"\n"))
    begun = text.count(b"\n{") + text.startswith(b"{")
    ended = text.count(b"}\n") + text.count(b"}\r\n") + text.endswith((b"}", b"}\r"))
    return lines == begun == ended


def _json_value(found: dict[str, Any], slot: Slot) -> Any:
    if slot.name not in found:
        raise ValueError(f"there is no {slot.name!r}")
    value = found[slot.name]
    if slot.is_text:
        if not isinstance(value, str):
            raise ValueError(f"{slot.name!r} is {_shown(value)}, which is not text")
        return value
    if slot.shape == ():
        return _number(value, slot)
    if not isinstance(value, list):
        raise ValueError(f"{slot.name!r} is {_shown(value)}, which is not a list")
    if slot.shape is not None and len(value) != slot.width:
        raise ValueError(f"{slot.name!r} has {len(value)} values, not {slot.width}")
    return [_number(each, slot) for each in value]


def _first_object(head: bytes) -> dict[str, Any]:
    """Return the first line that is an object."""
    for line in _lines(head):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _json_type(value: Any) -> Slot:
    if isinstance(value, list):
        inner = _json_type(value[0]) if value else Slot("")
        return Slot("", inner.dtype, None)
    dtypes = {bool: np.bool_, int: np.int64, float: np.float64}
    if type(value) in dtypes:
        return Slot("", np.dtype(dtypes[type(value)]), ())
    return Slot("", STRING if isinstance(value, str) else None)


def _arrow_type(pa: Any, dtype: Any) -> Any:
    return pa.string() if dtype in (STRING, BYTES) else pa.from_numpy_dtype(dtype)
