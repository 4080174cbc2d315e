"""How the reference reads docstrings."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^( *)Example:$", re.M)
_BEHIND_RESULTS = re.compile(r"^(?:Raises|Examples):$|\Z", re.M)

RESULTS = {
    "Work": "The `Work` of the operation, to wait for.",
    "list[Work]": "A `Work` for each, in their order.",
    "Summary": "What the checkpoint has.",
    "Plan": "The operation, bound to its arrays; `start` begins it.",
}
"""What is said of a result whose type says it all, and which docstrings leave to the signature."""


def with_examples_sections(text: str) -> str:
    """Return a docstring in which `Example:` has the name that the reader knows, `Examples:`.

    A section of another name would be an admonition, whose prompts Markdown takes for quotations.
    """
    return _EXAMPLE.sub(r"\1Examples:", text)


def with_result(text: str, returned: str) -> str:
    """Return a docstring that tells what a function returns, if it does not do so already."""
    if returned not in RESULTS or re.search(r"^Returns:$", text, re.M):
        return text
    return _BEHIND_RESULTS.sub(
        lambda found: f"\n\nReturns:\n    {RESULTS[returned]}\n\n{found[0]}", text, count=1
    )


class Sections(griffe.Extension):
    """Let docstrings have the sections that the reference shows."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Mend the docstring of an object that has been read."""
        if obj.docstring is not None:
            text = with_examples_sections(obj.docstring.value)
            returned = str(obj.returns) if isinstance(obj, griffe.Function) else ""
            obj.docstring.value = with_result(text, returned)
