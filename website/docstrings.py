"""How the reference reads docstrings."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:$", re.M)


def with_examples_sections(text: str) -> str:
    """Return a docstring in which `Example:` has the name that the reader knows, `Examples:`.

    A section of another name would be an admonition, whose prompts Markdown takes for quotations.
    """
    return _EXAMPLE.sub(r"\1Examples:", text)


class ExampleSections(griffe.Extension):
    """Let `Example:` in a docstring be the section of examples."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Mend the docstring of an object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = with_examples_sections(obj.docstring.value)
