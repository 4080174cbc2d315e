"""The text format of protocol buffers, as far as a strategy needs it. Pure.

Reference: protobuf.dev, "Text Format Language Specification".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.fleet.fields import FIELDS, Field, Path, Section, describe_path, field_at
from hpcdist.named_tuple import NamedTuple


def to_text(values: Mapping[Path, Any]) -> str:
    """Return the fields of a strategy, by their paths, as text."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return "".join(f"{line}\n" for line in _lines(tree, ()))


def _lines(tree: Mapping[str, Any], path: Path) -> Iterator[str]:
    indent = "  " * len(path)
    for name, value in tree.items():
        here = (*path, name)
        field = field_at(here)
        if not isinstance(field, Field):
            yield f"{indent}{name} {{"
            yield from _lines(value, here)
            yield f"{indent}}}"
        elif isinstance(value, dict):
            if value:
                raise UsageError(
                    f"{describe_path(here)} has no form in a file; leave it out to save others"
                )
        else:
            for each in value if isinstance(value, list) else [value]:
                yield f"{indent}{name}: {_word(each, enum=field.enum)}"


def _word(value: Any, *, enum: bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not enum:
        return '"' + "".join(_ESCAPES.get(each, each) for each in value) + '"'
    return str(value)


def from_text(text: str) -> dict[str, Any]:
    """Return the fields that a text has, sections as dictionaries.

    Raises:
        UsageError: it is not of this format, or has fields that a strategy has not: all are named.

    """
    tokens = [*_tokens(text), _Token("end", "", text.count("\n") + 1)]
    unknown: list[str] = []
    values, rest = _section(tokens, FIELDS, (), unknown)
    if tokens[rest].kind != "end":
        raise _unexpected(tokens[rest], "a field")
    if unknown:
        raise UsageError(f"a strategy has no {', '.join(unknown)}; take {_them(unknown)} out")
    return values


# ---- reading


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


_PATTERN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |(?P<word>[-+]?[A-Za-z0-9_.][-+A-Za-z0-9_.]*)
    |(?P<sign>[{}<>\[\]:;,])""",
    re.VERBOSE,
)


def _tokens(text: str) -> Iterator[_Token]:
    at, line = 0, 1
    while at < len(text):
        found = _PATTERN.match(text, at)
        if found is None:
            raise UsageError(
                f"line {line} has {text[at : at + 20]!r}, which is not the text format"
            )
        kind = found.lastgroup or ""
        if kind != "blank":
            yield _Token(kind, found[0], line)
        line += found[0].count("\n")
        at = found.end()


_CLOSING = {"{": "}", "<": ">"}


def _section(
    tokens: list[_Token], section: Section | None, path: Path, unknown: list[str]
) -> tuple[dict[str, Any], int]:
    """Return the values of the tokens up to the end of a section, and what is left, from where.

    `section` is None inside a section that is not known, whose names are not looked up.
    """
    values: dict[str, Any] = {}
    at = 0
    while tokens[at].kind == "word":
        name, line = tokens[at].text, tokens[at].line
        found = None if section is None else section.get(name)
        if section is not None and found is None:
            unknown.append(f"{describe_path((*path, name))} (line {line})")
        has_colon = tokens[at + 1].text == ":"
        at += has_colon
        opening = tokens[at + 1]
        if opening.text in _CLOSING:
            inside = found if isinstance(found, dict) else None
            value, used = _section(tokens[at + 2 :], inside, (*path, name), unknown)
            at += 2 + used
            if tokens[at].text != _CLOSING[opening.text]:
                raise _unexpected(tokens[at], f"{_CLOSING[opening.text]!r}")
            at += 1
            if inside is not None:
                values.setdefault(name, {}).update(value)
            elif found is not None:
                raise UsageError(f"line {line} has a section {name}, which is a field")
        elif not has_colon:
            raise _unexpected(opening, f"':' or '{{' behind {name}")
        else:
            entries, used = _scalars(tokens[at + 1 :])
            at += 1 + used
            if isinstance(found, dict):
                raise UsageError(f"line {line} has a value of {name}, which is a section")
            if isinstance(found, Field):
                read = [_value(found, each) for each in entries]
                is_list = isinstance(found.default, list)
                values[name] = [*values.get(name, []), *read] if is_list else read[-1]
        at += tokens[at].text in (",", ";")
    return values, at


def _scalars(tokens: list[_Token]) -> tuple[list[_Token], int]:
    """Return the value at the front, or those in brackets, and how many tokens they are."""
    if tokens[0].text != "[":
        one, used = _scalar(tokens)
        return [one], used
    found, at = [], 1
    while tokens[at].text != "]":
        one, used = _scalar(tokens[at:])
        found.append(one)
        at += used
        at += tokens[at].text == ","
    return found, at + 1


def _scalar(tokens: list[_Token]) -> tuple[_Token, int]:
    first = tokens[0]
    if first.kind == "word":
        return first, 1
    if first.kind != "string":
        raise _unexpected(first, "a value")
    used = next(at for at, each in enumerate(tokens) if each.kind != "string")
    return first._replace(text="".join(_unquoted(each.text) for each in tokens[:used])), used


def _value(field: Field, token: _Token) -> Any:
    kind = field.item if isinstance(field.default, list) else type(field.default)
    try:
        if (token.kind == "string") == (kind is str and not field.enum):
            return _KINDS[kind](token.text)
    except (KeyError, ValueError):
        pass
    raise UsageError(f"line {token.line} has {token.text!r}, which is not {_NAMES[kind]}")


_BOOLS = {"true": True, "True": True, "t": True, "1": True} | {
    "false": False, "False": False, "f": False, "0": False
}  # fmt: skip


def _integer(text: str) -> int:
    octal = re.fullmatch(r"([-+]?)0([0-7]+)", text)
    return int(f"{octal[1]}0o{octal[2]}" if octal else text, 0)


def _real(text: str) -> float:
    found = float(text.rstrip("fF") if text[-1:] in "fF" and text[-3:] != "inf" else text)
    if math.isnan(found):
        raise ValueError
    return found


_KINDS: dict[type, Any] = {bool: _BOOLS.__getitem__, int: _integer, float: _real, str: str}
_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_NAMES[dict] = "a value"

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_ESCAPE = re.compile(r"\\(?:x(?P<hex>[0-9A-Fa-f]{1,2})|(?P<octal>[0-7]{1,3})|(?P<letter>.))")


def _unquoted(text: str) -> str:
    """Return what is between quotes; escaped bytes are parts of UTF-8."""
    read = bytearray()
    at = 1
    for found in _ESCAPE.finditer(text, 1, len(text) - 1):
        read += text[at : found.start()].encode()
        if found["letter"]:
            read += _LETTERS.get(found["letter"], found["letter"]).encode()
        else:
            read.append(int(found["hex"], 16) if found["hex"] else int(found["octal"], 8) & 255)
        at = found.end()
    return (read + text[at:-1].encode()).decode(errors="replace")


def _unexpected(token: _Token, wanted: str) -> UsageError:
    got = repr(token.text) if token.text else "its end"
    return UsageError(f"line {token.line} has {got} where {wanted} is expected")


def _them(names: list[str]) -> str:
    return "it" if len(names) == 1 else "them"
