"""Programs that make multislot text of any other: what a `pipe_command` starts.

A user's class says what samples a line has (`generate_sample`); `run_from_stdin` writes them to
standard output. Names are those of Paddle, and so are the texts of the errors in samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from numbers import Integral, Real
from typing import Any

from hpcdist.errors import UsageError
from hpcdist.integers import integer

Samples = Callable[[], Iterable[Any]]


class DataGenerator:
    """Base of generators of samples from lines; users derive from `MultiSlotDataGenerator`.

    Example:
        >>> import hpcdist.fleet as fleet
        >>> class Words(fleet.MultiSlotDataGenerator):
        ...     def generate_sample(self, line):
        ...         def samples():
        ...             yield [("words", [len(word) for word in line.split()]), ("label", [1])]
        ...
        ...         return samples
        >>> words = Words()
        >>> print(words._gen_str(next(iter(words.generate_sample("to be or not")()))), end="")
        4 2 2 2 3 1 1

    """

    def __init__(self) -> None:
        self._proto_info: list[tuple[str, str]] | None = None
        self.batch_size_ = 32
        self._line_limit: int | None = None

    def set_batch(self, batch_size: int) -> None:
        """Set how many samples `generate_batch` gets at a time; 32 if this is not called.

        Args:
            batch_size: a number of samples.

        """
        integer(batch_size, "batch_size", 1)
        self.batch_size_ = batch_size

    def _set_line_limit(self, line_limit: int) -> None:
        """Read no more than so many lines."""
        integer(line_limit, "line_limit", 0)
        self._line_limit = line_limit

    def run_from_stdin(self) -> None:
        """Read lines from standard input, and write their samples to standard output."""
        lines = islice(sys.stdin, self._line_limit)
        self._write(sample for line in lines for sample in self._samples_of(line))

    def run_from_memory(self) -> None:
        """Write the samples that ``generate_sample(None)`` makes to standard output."""
        self._write(self._samples_of(None))

    def _samples_of(self, line: str | None) -> Iterator[Any]:
        samples = self.generate_sample(line)
        if not callable(samples):
            raise UsageError(
                "generate_sample must return a function without arguments that makes samples, "
                f"such as a local generator, got {samples!r}"
            )
        return (sample for sample in samples() if sample is not None)

    def _write(self, samples: Iterator[Any]) -> None:
        while batch := list(islice(samples, self.batch_size_)):
            for sample in self.generate_batch(batch)():
                sys.stdout.write(self._gen_str(sample))
        sys.stdout.flush()

    def _gen_str(self, line: Any) -> str:
        """Return the line of text that a sample is."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say how a sample is written; derive it from "
            "MultiSlotDataGenerator or MultiSlotStringDataGenerator, or define _gen_str"
        )

    def generate_sample(self, line: str | None) -> Samples:
        """Return a function that makes the samples of a line; users write this.

        Args:
            line: a line with its newline, or None in `run_from_memory`.

        Returns:
            a function without arguments; what it returns is iterated for samples, each a list or
            tuple of pairs (name of the slot, list of its values). None is left out.

        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say which samples a line has; define "
            "generate_sample(self, line), which returns a function that yields samples such as "
            "[('words', [19, 8]), ('label', [1])]"
        )

    def generate_batch(self, samples: list[Any]) -> Samples:
        """Return a function that makes samples of a batch of samples; users may write this.

        Args:
            samples: as many as `set_batch` says, the last time fewer.

        """
        return lambda: iter(samples)


class MultiSlotStringDataGenerator(DataGenerator):
    """Writes samples of strings as multislot text: ``("words", ["19", "8"])``.

    The values are written as they are, which is faster, and not looked at.

    Example:
        >>> from hpcdist.data.generators import MultiSlotStringDataGenerator
        >>> class Words(MultiSlotStringDataGenerator):
        ...     def generate_sample(self, line):
        ...         yield [("words", line.split()), ("label", ["1"])]

    """

    def _gen_str(self, line: Any) -> str:
        pairs = _pairs(line, "Examples: [('words', ['1926', '08', '17']), ('label', ['1'])]")
        return " ".join(f"{len(values)} {' '.join(values)}" for _, values in pairs) + "\n"


class MultiSlotDataGenerator(DataGenerator):
    """Writes samples of numbers as multislot text: ``("words", [19, 8])``.

    All samples have the same slots in one order; no slot is empty.

    Example:
        >>> from hpcdist.data.generators import MultiSlotDataGenerator
        >>> class Words(MultiSlotDataGenerator):
        ...     def generate_sample(self, line):
        ...         yield [("words", [int(word) for word in line.split()]), ("label", [1])]

    """

    def _gen_str(self, line: Any) -> str:
        pairs = _pairs(line, "Example: [('words', [1926, 08, 17]), ('label', [1])]")
        known = self._proto_info
        if known is not None and len(pairs) != len(known):
            raise ValueError("the complete field set of two given line are inconsistent.")
        kinds = []
        texts = []
        for place, (name, values) in enumerate(pairs):
            _check_slot(name, values)
            if known is not None and name != known[place][0]:
                raise ValueError(
                    "the field name of two given line are not match: "
                    f"require<{known[place][0]}>, get<{name}>."
                )
            is_float = any(not isinstance(value, Integral) for value in values)
            was_float = known is not None and known[place][1] == "float"
            kinds.append((name, "float" if is_float or was_float else "uint64"))
            texts.append(f"{len(values)} {' '.join(map(_text_of, values))}")
        self._proto_info = kinds
        return " ".join(texts) + "\n"


def _pairs(line: Any, example: str) -> list[Any]:
    if not isinstance(line, (list, tuple, zip)):
        raise ValueError(f"the output of process() must be in list or tuple type{example}")
    return list(line)


def _check_slot(name: Any, values: Any) -> None:
    if not isinstance(name, str):
        raise ValueError(f"name{type(name)} must be in str type")
    if not isinstance(values, list):
        raise ValueError(f"elements{type(values)} must be in list type")
    if not values:
        raise ValueError(
            "the elements of each field can not be empty, you need padding it in process()."
        )


def _text_of(value: Any) -> str:
    if not isinstance(value, Real):  # numbers of NumPy are these, too
        raise ValueError(f"the type of element{type(value)} must be in int or float")
    return str(int(value)) if isinstance(value, Integral) else repr(float(value))
