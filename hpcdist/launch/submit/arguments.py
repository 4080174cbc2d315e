"""The words of `hpcdist submit`: which are ours, which sbatch's, which the program's. Pure.

sbatch's options are not listed: what is not ours is sbatch's, whatever its version knows. Only
those that take no value must be known, to tell a value from the program.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple

_OWN_FLAGS = (
    "--dry-run", "--follow", "--no-follow", "-m", "--module", "--survive", "-h", "--help"
)  # fmt: skip
_OWN_VALUES = ("--mpi", "--spares", "--min-ranks", "--restarts")
_FLAGS = {
    "contiguous",
    "exclusive",
    "get-user-env",
    "hold",
    "ignore-pbs",
    "nice",
    "no-kill",
    "no-requeue",
    "overcommit",
    "oversubscribe",
    "parsable",
    "propagate",
    "quiet",
    "reboot",
    "requeue",
    "spread-job",
    "test-only",
    "use-min-nodes",
    "verbose",
    "wait",
}
"""Options of sbatch without a value, or with one only behind "="."""
_LONG = {
    "A": "account",
    "a": "array",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "J": "job-name",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "n": "ntasks",
    "O": "overcommit",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "S": "core-spec",
    "s": "oversubscribe",
    "t": "time",
    "w": "nodelist",
    "W": "wait",
    "x": "exclude",
}
_OURS_TO_SAY = {
    "wrap": "the script is written here: name the program instead",
    "parsable": "the number of the job is read here",
    "quiet": "--no-follow says the least",
    "wait": "the job is followed unless --no-follow is given",
    "test-only": "--dry-run prints the script, for `sbatch --test-only`",
}


class Arguments(NamedTuple):
    """What stands on the command line.

    Attributes:
        own: options of `hpcdist submit`.
        slurm: long names and values of sbatch's options; None for one without a value.
        program: the words of the program, its name first.

    """

    own: tuple[str, ...]
    slurm: tuple[tuple[str, str | None], ...]
    program: tuple[str, ...]


def split_arguments(words: Iterable[str]) -> Arguments:
    """Divide the command line into options and program; what follows ``--`` is the program's.

    Args:
        words: those behind ``hpcdist submit``.

    Raises:
        UsageError: an option lacks its value, or arguments of the program stand before ``--``.

    Example:
        >>> split_arguments(["train.py", "-N", "2", "--time=2:00:00", "--", "--epochs", "3"]).slurm
        (('nodes', '2'), ('time', '2:00:00'))

    """
    own: list[str] = []
    slurm: list[tuple[str, str | None]] = []
    program: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            program += left
            break
        name, given, value = word.partition("=")
        if word in _OWN_FLAGS:
            own.append(word)
        elif name in _OWN_VALUES:
            own += [name, value if given else _value_of(name, left)]
        elif word.startswith("-") and len(word) > 1:
            slurm.append(_slurm_option(word, left))
        elif program:
            raise UsageError(f"{word!r} stands before --: arguments of the program come after it")
        else:
            program.append(word)
    return Arguments(tuple(own), tuple(slurm), tuple(program))


def _slurm_option(word: str, left: list[str]) -> tuple[str, str | None]:
    if word.startswith("--"):
        name, given, value = word[2:].partition("=")
    else:
        name, value = _LONG.get(word[1], ""), word[2:].removeprefix("=")
        given = value
    if not name:
        raise UsageError(
            f"the option {word} is not known here: write the long name that sbatch has"
        )
    if name in _OURS_TO_SAY:
        raise UsageError(f"--{name} cannot be handed on to sbatch: {_OURS_TO_SAY[name]}")
    if given:
        return name, value
    return name, None if name in _FLAGS else _value_of(f"--{name}", left)


def _value_of(name: str, left: list[str]) -> str:
    if not left or left[0] == "--":
        raise UsageError(f"{name} needs a value")
    return left.pop(0)
