"""WebDataset's archives: the files of a tar that share their name up to the first dot are a record.

``0017.jpg`` and ``0017.cls`` are columns ``jpg`` and ``cls`` of record ``0017``. What is asked for
as numbers is read as text (``cls``) or, where the name ends in npy, as an array.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcdist.data.bad_records import BadRecord, BadRecords
from hpcdist.data.columns import BYTES, STRING, Column, Columns, Fixed, Ragged
from hpcdist.data.slots import TRUTH, Slot, as_asked, float_of
from hpcdist.data.source import Settings, Source
from hpcdist.errors import DatasetError
from hpcdist.named_tuple import NamedTuple

KEY = "__key__"
"""The column of the records' names, for who asks for it."""


class _Member(tarfile.TarInfo):
    """A header, of which a fault is an error: behind the first one tarfile takes it for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # zeros, which are the end
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(
                f"{error} at byte {archive.offset}: the file is damaged, or has been cut"
            ) from error


class _Record(NamedTuple):
    key: str
    begin: int
    fields: dict[str, bytes]
    """Those that are wanted; in records before the piece they are empty."""


def read_tar(source: Source, settings: Settings, bad: BadRecords) -> Iterator[Columns]:
    """Return the records that begin in a piece. What is before it is skipped, header by header."""
    slots = [slot._replace(dtype=slot.dtype or _usual(slot.name)) for slot in settings.slots]
    rows: list[list[Any]] = []
    waiting = 0
    try:
        for number, record in enumerate(_records(source, {slot.name for slot in slots}), 1):
            slots = slots or [Slot(name, BYTES) for name in record.fields]
            if not source.has(record.begin):
                continue
            try:
                rows.append([_value(record, slot) for slot in slots])
            except ValueError as error:
                bad.add(BadRecord(source.name, number, f"record {record.key!r}: {error}"))
            waiting += sum(map(len, record.fields.values()))
            if waiting >= settings.block_bytes:
                yield _columns(rows, slots)
                rows, waiting = [], 0
    except tarfile.TarError as error:
        raise DatasetError(f"{source.name}: {type(error).__name__}: {error}") from error
    if rows:
        yield _columns(rows, slots)


def _usual(name: str) -> str:
    return STRING if name == KEY else BYTES


def _records(source: Source, wanted: set[str]) -> Iterator[_Record]:
    record: _Record | None = None
    mode: Any = "r:" if source.file.seekable() else "r|"
    with tarfile.open(fileobj=source.file, mode=mode, tarinfo=_Member) as archive:
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # or all headers stay in memory
            key, field = _name_of(member)
            if not member.isfile() or not field:
                continue
            if record is None or key != record.key:
                if record is not None:
                    yield record
                if source.stop is not None and member.offset >= source.stop:
                    return
                record = _Record(key, member.offset, {})
            take = source.has(record.begin) and (not wanted or field in wanted)
            if take or not wanted:
                opened = archive.extractfile(member) if take else None
                record.fields[field] = opened.read() if opened is not None else b""
        while source.file.read(1 << 20):  # of what is packed, the checksum is at the end
            pass
    if record is not None:
        yield record


def _name_of(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the key of a member's record and its field; "" where the name has no dot."""
    folder, slash, name = member.name.rpartition("/")
    stem, _, field = name.partition(".")
    return (folder + slash + stem, field) if stem else ("", "")


def _value(record: _Record, slot: Slot) -> Any:
    if slot.name == KEY:
        return record.key.encode()
    if slot.name not in record.fields:
        raise ValueError(f"there is no {slot.name!r}")
    data = record.fields[slot.name]
    if slot.is_text:
        if slot.dtype == STRING:
            data.decode()
        return data
    dtype = np.dtype(slot.dtype)
    if slot.name.rpartition(".")[2] == "npy":
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        values = as_asked(array.reshape(-1), slot)
    else:
        values = np.array(
            [_number(text, dtype, slot.name) for text in data.decode().split()], dtype
        )
    if slot.shape is not None and values.size != slot.width:
        raise ValueError(f"{slot.name!r} has {values.size} values, not {slot.width}")
    return values


def _number(text: str, dtype: np.dtype[Any], name: str) -> Any:
    """Return what NumPy makes a number of `dtype` of, or raise `ValueError`."""
    if dtype.kind == "f":
        return float_of(text, dtype, name)
    if dtype.kind == "b" and text in TRUTH:
        return TRUTH[text]
    if dtype.kind in "iu" and np.iinfo(dtype).min <= int(text) <= np.iinfo(dtype).max:
        return int(text)
    if dtype.kind in "biu":
        raise ValueError(f"{name!r}: {text[:40]!r} is not valid as {dtype}")
    return text


def _columns(rows: list[list[Any]], slots: list[Slot]) -> Columns:
    columns: dict[str, Column] = {}
    for place, slot in enumerate(slots):
        values = [row[place] for row in rows]
        if slot.is_text:
            texts = Ragged.of(values or [b""]).slice(0, len(rows))
            columns[slot.name] = Ragged(texts.values, texts.offsets, str(slot.dtype))
        elif slot.shape is None:
            columns[slot.name] = Ragged.of(values, slot.dtype)
        else:
            columns[slot.name] = Fixed(np.array(values, slot.dtype).reshape(-1, *slot.shape))
    return Columns(columns, len(rows))
