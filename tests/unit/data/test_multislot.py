"""Both parsers of multislot text take the same lines and give the same bits; faults have names."""

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as some

from hpcdist.compiled import load
from hpcdist.data import multislot as module
from hpcdist.data.multislot import Multislot, _parse_compiled, _parse_numpy
from hpcdist.data.slots import slots_of
from hpcdist.errors import UsageError

compiled = load("hpcdist.data._native")
PARSERS = [_parse_numpy] + [_parse_compiled] * (compiled is not None)
USE = [("ids", "int64"), ("pair", "float32", (2,)), ("label", "int32", ())]
TOKENS = some.one_of(
    some.integers(-(10**20), 10**20).map(str),
    some.floats(width=64).map(repr),
    some.floats(-1e6, 1e6).map(lambda x: f"{x:.3f}"),
    some.sampled_from(
        [
            "+1",
            "-0",
            "007",
            "1.",
            ".5",
            ".",
            "1e5",
            "1E-400",
            "1e400",
            "-1e39",
            "3.4028235677973366e38",
            "3.4028235677973362e38",
            "INF",
            "-nan",
            "infinity",
            "1_0",
            "0x1",
            "\u0661",
            "-",
            "+",
            "1.5.2",
            "\x00",
            "a",
            "18446744073709551615",
            "18446744073709551616",
            "9223372036854775808",
            "-9223372036854775808",
            "-9223372036854775809",
            "2147483648",
            "-2147483648",
            "123456789012345678901234567890",
            "0.1234567890123456789",
            "9007199254740993",
            "5e-324",
            "2.2250738585072011e-308",
            "00000000000000000001",
        ]
    ),
)
LINES = some.lists(
    some.tuples(some.lists(TOKENS, max_size=4), some.sampled_from(["", " ", "\t", "\r", " 7"])),
    max_size=6,
)


@pytest.fixture(params=PARSERS, ids=lambda parser: parser.__name__)
def parse(request, monkeypatch):
    monkeypatch.setattr(module, "_parser", request.param)
    return lambda text, use=USE: Multislot(slots_of(use)).parse(text)


def test_counts_tell_how_many_values_each_slot_has(parse):
    rows, malformed = parse(b"2 17 4 2 0.5 1e3 1 7\n0 2 -.25 3 1 -1\n")
    assert malformed == []
    assert [row["ids"].tolist() for row in rows] == [[17, 4], []]
    assert rows["pair"].values.tolist() == [[0.5, 1000.0], [-0.25, 3.0]]
    assert rows["label"].values.tolist() == [7, -1]
    assert [column.values.dtype for _, column in rows.items()] == [np.int64, np.float32, np.int32]


@pytest.mark.parametrize(
    "text", [b"1 5\r\n1 6\r\n", b"1 5\n1 6", b"\n\n 1\t5 \n\r\n\t1   6\n\n", b"1 5\n1 6 \r"]
)
def test_blanks_empty_lines_and_a_missing_newline_change_nothing(parse, text):
    rows, malformed = parse(text, [("x", "int64", ())])
    assert (rows["x"].values.tolist(), malformed) == ([5, 6], [])


@pytest.mark.parametrize("text", [b"", b"\n", b" \r\n\t\n"])
def test_text_of_nothing_has_no_records(parse, text):
    rows, malformed = parse(text)
    assert (len(rows), rows.names, malformed) == (0, ("ids", "pair", "label"), [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"1 5", "the line ends before slot 'pair'"),
        (b"x 5 2 1 2 1 7", "slot 'ids': the number of its values is 'x'"),
        (b"-1 5 2 1 2 1 7", "slot 'ids': the number of its values is '-1'"),
        (b"99999999999999999999 5", "slot 'ids' is to have 99999999999999999999 values, but"),
        (b"3 5 6", "slot 'ids' is to have 3 values, but the line ends after 2"),
        (b"1 5 3 1 2 3 1 7", "slot 'pair' has 3 values, not 2"),
        (b"1 5.5 2 1 2 1 7", "slot 'ids': '5.5' is not valid as int64"),
        (b"1 5 2 1 zwei 1 7", "slot 'pair': 'zwei' is not valid as float32"),
        (b"1 5 2 1 1e39 1 7", "slot 'pair': '1e39' is too large for float32"),
        (b"1 5 2 1 -1e400 1 7", "slot 'pair': '-1e400' is too large for float32"),
        (b"1 5 2 1 2 1 3000000000", "slot 'label': '3000000000' is not valid as int32"),
        (b"1 5 2 1 2 1 7 8", "there is '8' behind the last slot"),
        (b"1 5 2 1 \x002 1 7", r"slot 'pair': '\x002', with a NUL byte is not valid as float32"),
        (b"1 5 2 1 \xff 1 7", r"slot 'pair': '\\xff' is not valid as float32"),
        (b"1 5\x0b 2 1 2 1 7", r"slot 'ids': '5\x0b' is not valid as int64"),
    ],
)
def test_a_malformed_line_is_left_out_with_its_reason(parse, line, reason):
    good = b"1 1 2 1 2 1 1\n"
    rows, malformed = parse(good + line + b"\n" + good)
    assert rows["ids"].values.tolist() == [1, 1]
    ((at, said),) = malformed
    assert at == len(good)
    assert said.startswith(reason)


def test_ids_beyond_2_to_the_63_are_kept_by_their_bits(parse):
    rows, _ = parse(b"2 18446744073709551615 9223372036854775808\n", [("id", "int64")])
    assert rows["id"].values.tolist() == [-1, -(1 << 63)]
    rows, malformed = parse(b"1 18446744073709551615\n1 -1\n", [("id", "uint64")])
    assert rows["id"].values.tolist() == [(1 << 64) - 1]
    assert len(malformed) == 1


@given(numbers=some.lists(some.floats(allow_nan=False), min_size=1, max_size=20))
def test_floats_are_the_nearest_to_their_text(numbers):
    text = f"{len(numbers)} {' '.join(map(repr, numbers))}\n".encode()
    for parser in PARSERS:
        parsed = parser(text, np.array([3], np.int32), np.array([-1]))
        assert parsed.cells.view(np.float64).tolist() == numbers


@settings(max_examples=40, deadline=None)
@example(lines=[(["1", "1", "1", "2"], " 7")])
@given(lines=LINES)
def test_both_parsers_take_the_same_lines_and_give_the_same_bits(lines):
    text = "\n".join(
        f"{len(tokens)} {' '.join(tokens)} 2 {(tokens * 2 + ['1'] * 2)[0]} 1 1 {end[-1:] or 3}"
        for tokens, end in lines
    ).encode()
    types = np.array([0, 3, 1], np.int32)
    for widths in ([-1, 2, 1], [2, -1, -1]):
        results = [parser(text, types, np.array(widths)) for parser in PARSERS]
        for result in results[1:]:
            assert np.array_equal(result.cells, results[0].cells)
            assert np.array_equal(result.lengths, results[0].lengths)
            assert result.wrong == results[0].wrong
    for kind in range(4):
        one = np.array([kind], np.int32)
        for tokens, end in lines:
            line = f"{len(tokens)} {' '.join(tokens)}{end}".encode()
            found = [parser(line, one, np.array([-1])) for parser in PARSERS]
            assert len({(str(f.cells.tolist()), str(f.lengths), str(f.wrong)) for f in found}) == 1


@settings(max_examples=40, deadline=None)
@given(text=some.binary(max_size=60))
def test_whatever_the_bytes_are_both_parsers_agree_and_each_fault_has_a_reason(text):
    slots = Multislot(slots_of(USE))
    found = [parser(text, slots._types, slots._widths) for parser in PARSERS]
    assert len({(str(f.cells.tolist()), str(f.lengths), str(f.wrong)) for f in found}) == 1
    rows, malformed = slots.parse(text)
    assert all(reason for _, reason in malformed)
    lines = [line for line in text.split(b"\n") if line.strip(b" \t\r")]
    assert len(rows) + len(malformed) == len(lines)


@pytest.mark.skipif(compiled is None, reason="the kernel is not compiled")
def test_the_compiled_parser_writes_within_its_arrays_only():
    text, one, width = b"3 1 2 3\n1 4\n", np.array([0], np.int32), np.array([-1])
    for n_cells, n_lengths in [(2, 9), (9, 0), (0, 0), (3, 1)]:
        cells, lengths = np.full(9, 77, np.uint64), np.full(9, 77)
        compiled.parse_slots(text, 0, one, width, cells[:n_cells], lengths[:n_lengths])
        assert (cells[n_cells:] == 77).all()
        assert (lengths[n_lengths:] == 77).all()
    for wrong in [
        (text, -1, one, width, cells, lengths),
        (text, 99, one, width, cells, lengths),
        (text, 0, one + 9, width, cells, lengths),
        (text, 0, one[:0], width[:0], cells, lengths),
        (text, 0, one, width[:0], cells, lengths),
    ]:
        with pytest.raises(ValueError, match="no such slots"):
            compiled.parse_slots(*wrong)


def test_slots_need_names_and_dtypes_of_multislot_text():
    with pytest.raises(UsageError, match="pass use_var"):
        Multislot(())
    with pytest.raises(ValueError, match="'x' has dtype float16; multislot text has int64"):
        Multislot(slots_of([("x", "float16")]))
    rows, _ = Multislot(slots_of(["ids"])).parse(b"2 3 4\n")
    assert rows["ids"].values.dtype == np.int64
