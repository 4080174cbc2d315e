"""The version of the project, which stands in `hpcdist/__init__.py`, and the files that repeat it.

    python packaging/versions.py            tell it, and which files say otherwise
    python packaging/versions.py 0.2.0      write it everywhere

A version that is no candidate (0.2.0rc1) is a release: what the changelog has under `Unreleased`
becomes its section, of today, and `Unreleased` is empty again.

What is built from pyproject.toml reads it from the package; recipes of others cannot.
"""

import re
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = "hpcdist/__init__.py"
PLACES = {
    SOURCE: r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "mkdocs.yml": r"^repo_name: hpcdist (.+)$",
    "packaging/apptainer/hpcdist.def": r"image\.version (.+)$",
    "packaging/conda-forge/recipe.yaml": r'^  version: "(.+)"$',
    "packaging/easybuild/hpcdist-*.eb": r"^version = '(.+)'$",
    "packaging/spack/package.py": r'^    version\("(.+)"',
}
RELEASE = r"\d+\.\d+\.\d+"
NUMBER = rf"{RELEASE}((a|b|rc|\.dev)\d+)?"
UNRELEASED = "## [Unreleased]\n"


def file_of(place):
    """Return the one file that a name or pattern means."""
    (path,) = ROOT.glob(place)
    return path


def found():
    """Return the version that each file has."""
    texts = {place: file_of(place).read_text() for place in PLACES}
    return {place: re.search(PLACES[place], texts[place], re.M)[1] for place in PLACES}


def write(version):
    """Write a version into all files; the easyconfig is called after it, too."""
    if not re.fullmatch(NUMBER, version):
        raise SystemExit(f"a version is like 0.2.0 or 0.2.0rc1, got {version!r}")
    for place, old in found().items():
        path = file_of(place)
        pattern = PLACES[place].replace("(.+)", re.escape(old))
        text = re.sub(
            pattern,
            lambda line, old=old: line[0].replace(old, version),
            path.read_text(),
            flags=re.M,
        )
        path.write_text(text)
        if path.suffix == ".eb":
            path.rename(path.with_name(path.name.replace(old, version)))


def date_changes(version, day):
    """Give what is unreleased a heading with a version and a day, unless it has one."""
    path = ROOT / "CHANGELOG.md"
    text = path.read_text()
    if f"## [{version}]" not in text:
        heading = f"{UNRELEASED}\n## [{version}] - {day.isoformat()}\n"
        path.write_text(text.replace(UNRELEASED, heading, 1))


def main():
    if len(sys.argv) > 1:
        write(sys.argv[1])
        if re.fullmatch(RELEASE, sys.argv[1]):
            date_changes(sys.argv[1], date.today())
    versions = found()
    print(versions[SOURCE])
    others = [place for place, version in versions.items() if version != versions[SOURCE]]
    if others:
        raise SystemExit(f"another version is in {', '.join(others)}")


if __name__ == "__main__":
    main()
