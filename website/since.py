"""Since which release each name of the reference is there, told before its arguments.

`since.txt` has a line for each name of the releases so far, such as `0.1.0 Group.split`. What is
not in it is new in the version that is being made. `python -m website.since` adds these names to
it: a step of a release.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("since.txt")
UNRELEASED = "the next release"


def recorded() -> dict[str, str]:
    """Return the release of each name that is in the file."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    return {name: version for version, name in map(str.split, lines)}


def version_at_hand() -> str:
    """Return the version of the package."""
    source = (ROOT / "hpcdist/__init__.py").read_text()
    (found,) = re.findall(r'^__version__ = "(.+)"$', source, re.M)
    return str(found)


def release_of(name: str, records: Mapping[str, str], version: str) -> str:
    """Return the release that a name came with.

    Args:
        name: a name below `hpcdist`.
        records: the names of the releases so far.
        version: that of the package; if it is among the records, it has been released.

    """
    return records.get(name, UNRELEASED if version in records.values() else version)


def named() -> list[str]:
    """Return what the pages of the reference ask for, below `hpcdist`."""
    pages = sorted((ROOT / "docs/reference").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    return re.findall(r"^::: hpcdist\.(\S+)$", text, re.M)


def described(package: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    """Yield what these pages describe, members included, by name."""
    for name in named():
        found = _target(package[name])
        if found is not None and not found.is_module:
            yield name, found
        for member, inside in found.members.items() if found is not None else ():
            target = _target(inside) if not member.startswith("_") else None
            if target is not None and (target.is_function or target.is_class):
                yield f"{name}.{member}", target


def _target(found: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """Return what a name means; None for what is not of the package."""
    try:
        return found.final_target if isinstance(found, griffe.Alias) else found
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


_SECTION = re.compile(r"^(?:Args|Attributes|Returns|Raises|Yields|Examples?):$|\Z", re.M)


def with_release(text: str, release: str) -> str:
    """Return a docstring that tells a release, behind what it says before its sections."""
    line = f"<small>Since {release}</small>"
    return _SECTION.sub(lambda found: f"\n\n{line}\n\n{found[0]}", text, count=1)


class Since(griffe.Extension):
    """Tell of what the reference describes its release; of members, if theirs is another one."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Mend the docstrings of a package that has been read."""
        records, version = recorded(), version_at_hand()
        told = set()
        for name, found in described(pkg):
            release = release_of(name, records, version)
            owner = name.rpartition(".")[0]
            of_class = found.parent is not None and found.parent.is_class
            if of_class and release == release_of(owner, records, version):
                continue
            if found.docstring is not None and found.path not in told:
                found.docstring.value = with_release(found.docstring.value, release)
                told.add(found.path)


def main() -> None:
    """Record all names that are new as those of the version at hand."""
    records, version = recorded(), version_at_hand()
    names = sorted({name for name, _ in described(griffe.load("hpcdist", search_paths=[ROOT]))})
    lines = [f"{records.get(name, version)} {name}" for name in names]
    FILE.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
