"""The command `hpcdist module`: a modulefile for an installation, for Lmod or in Tcl.

`find_installation` looks at the folder, `lua_text` and `tcl_text` write what was found; both are
pure. Reference: Lmod, "Lua modulefile functions"; Environment Modules, modulefile(4).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from hpcdist.errors import UsageError

_PLAIN = re.compile(r"(?!-)[\w./+@=:,-]+")
_DIST_INFO = re.compile(r"hpcdist-(?P<version>[^-]+)\.dist-info")
_ABOUT = "MPI collectives and distributed training for NumPy, torch and JAX: errors, not hangs"


@dataclass(frozen=True)
class Installation:
    """Where hpcdist is installed.

    Attributes:
        prefix: the folder that holds bin and lib.
        version: of the hpcdist there.
        site_packages: where Python finds it.
        is_venv: whether it is a virtual environment, which finds its packages by itself.

    """

    prefix: Path
    version: str
    site_packages: Path
    is_venv: bool


@dataclass(frozen=True)
class ModuleOptions:
    """What the modulefile sets besides the paths.

    Attributes:
        name, version: of the module.
        mpi: what ``srun`` takes for ``--mpi=`` where nothing is said.
        tuning: the tuning file.
        needs: modules to be loaded before.

    """

    name: str
    version: str
    mpi: str | None = None
    tuning: str | None = None
    needs: tuple[str, ...] = field(default=())


def find_installation(prefix: Path) -> Installation:
    """Return what is installed in a folder.

    Raises:
        UsageError: there is no hpcdist in it.

    """
    prefix = prefix.absolute()
    for site_packages in sorted(prefix.glob("lib*/python3*/*-packages")):
        for found in sorted(site_packages.glob("hpcdist-*.dist-info")):
            match = _DIST_INFO.fullmatch(found.name)
            if match is not None:
                is_venv = (prefix / "pyvenv.cfg").exists()
                return Installation(prefix, match["version"], site_packages, is_venv)
    raise UsageError(
        f"there is no hpcdist in {prefix}: install it there, by `python -m venv {prefix}` and "
        f"`{prefix}/bin/pip install hpcdist`, or by `pip install --prefix {prefix} hpcdist`"
    )


def variables_of(place: Installation, wishes: ModuleOptions) -> Iterator[tuple[str, str]]:
    """Give the variables that the module sets."""
    if place.is_venv:
        yield "VIRTUAL_ENV", str(place.prefix)
    if wishes.mpi:
        yield "SLURM_MPI_TYPE", wishes.mpi
    if wishes.tuning:
        yield "HPCDIST_TUNING", wishes.tuning


def paths_of(place: Installation) -> Iterator[tuple[str, str]]:
    """Give the variables before which the module puts a folder."""
    yield "PATH", str(place.prefix / "bin")
    if not place.is_venv:
        yield "PYTHONPATH", str(place.site_packages)


def lua_text(place: Installation, wishes: ModuleOptions) -> str:
    """Return the modulefile for Lmod."""
    lines = [
        "-- Modulefile for Lmod, written by `hpcdist module`",
        f"help([[hpcdist {place.version}: {_ABOUT}. `hpcdist doctor` checks that all is well.]])",
        f'whatis("Name: {wishes.name}")',
        f'whatis("Version: {wishes.version}")',
        f'whatis("Description: {_ABOUT}")',
        f'conflict("{wishes.name}")',
        *(f'depends_on("{name}")' for name in wishes.needs),
        f'if mode() == "load" and not isDir("{place.prefix}") then',
        f'    LmodError("{place.prefix} is not there: was hpcdist moved or removed?")',
        "end",
        *(f'setenv("{name}", "{value}")' for name, value in variables_of(place, wishes)),
        *(f'prepend_path("{name}", "{folder}")' for name, folder in paths_of(place)),
    ]
    return "\n".join([*lines, ""])


def tcl_text(place: Installation, wishes: ModuleOptions) -> str:
    """Return the modulefile in Tcl, for Environment Modules and for Lmod."""
    lines = [
        "#%Module1.0",
        "# Modulefile in Tcl, written by `hpcdist module`",
        "proc ModulesHelp { } {",
        f'    puts stderr "hpcdist {place.version}: {_ABOUT}."',
        '    puts stderr "`hpcdist doctor` checks that all is well."',
        "}",
        f'module-whatis "{wishes.name} {wishes.version}: {_ABOUT}"',
        f"conflict {wishes.name}",
        *(f"module load {name}" for name in wishes.needs),
        f'if {{ [module-info mode load] && ![file isdirectory "{place.prefix}"] }} {{',
        f'    puts stderr "{place.prefix} is not there: was hpcdist moved or removed?"',
        "    exit 1",
        "}",
        *(f"setenv {name} {value}" for name, value in variables_of(place, wishes)),
        *(f"prepend-path {name} {folder}" for name, folder in paths_of(place)),
    ]
    return "\n".join([*lines, ""])


def check_plain(*words: str) -> None:
    """Raise for a word that could mean something else in a modulefile."""
    for word in words:
        if not _PLAIN.fullmatch(word):
            raise UsageError(
                f"{word!r} cannot stand in a modulefile: take letters, digits and ./+@=:,-_ only, "
                "the first not a -"
            )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--prefix", required=True, type=click.Path(path_type=Path),
              help="A virtual environment with hpcdist, or pip's --prefix.")  # fmt: skip
@click.option("--tcl", is_flag=True, help="Write Tcl, which Environment Modules and Lmod read.")
@click.option("--tuning", type=click.Path(path_type=Path), help="Tuning file of `hpcdist tune`.")
@click.option("--mpi", help="What srun takes for --mpi= where nothing is said: pmix or pmi2.")
@click.option("--needs", multiple=True, metavar="MODULE",
              help="Module to load before, such as openmpi/5.0.7; repeat it.")  # fmt: skip
@click.option("--name", default="hpcdist", show_default=True, help="Name of the module.")
@click.option("--version", help="Its version; default: that of the hpcdist installed there.")
def module(
    prefix: Path,
    tcl: bool,
    tuning: Path | None,
    mpi: str | None,
    needs: tuple[str, ...],
    name: str,
    version: str | None,
) -> None:
    """Print a modulefile for an installation of hpcdist.

    Put it in a folder of MODULEPATH, as hpcdist/VERSION.lua, or hpcdist/VERSION for Tcl.
    """
    try:
        place = find_installation(prefix)
        if tuning is not None and not tuning.is_file():
            raise UsageError(f"there is no tuning file {tuning}: `hpcdist tune -o` writes one")
        wishes = ModuleOptions(
            name, version or place.version, mpi, str(tuning.absolute()) if tuning else None, needs
        )
        values = [value for _, value in (*variables_of(place, wishes), *paths_of(place))]
        check_plain(wishes.name, wishes.version, place.version, *wishes.needs, *values)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    click.echo((tcl_text if tcl else lua_text)(place, wishes), nl=False)
