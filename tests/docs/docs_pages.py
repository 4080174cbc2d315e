"""What the pages of the documentation contain, and how their examples are run.

An example is a block of Python; its page is one namespace. See CONTRIBUTING.md for the comments
that restrict where an example runs.
"""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
WAYS = ("alone", "simulated", "mpi")

_BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S
)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


class Example(NamedTuple):
    """One block; `output` is what it must print (and raise) on one rank, None if it is not said."""

    page: str
    line: int
    code: str
    ways: tuple[str, ...]
    needs: str
    is_script: bool
    output: str | None

    def __str__(self):
        return f"{self.page}:{self.line}"


def text_of(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    """Return the bodies of all blocks of a language."""
    return [m["body"] for m in _BLOCK.finditer(text_of(page)) if m["language"] == language]


def spans(page):
    """Return what stands in backticks within the text and the tables."""
    return _SPAN.findall(_BLOCK.sub("", text_of(page)))


def examples(page):
    text = text_of(page)
    found = list(_BLOCK.finditer(text))
    following = [*found, None][1:]
    return [
        _example(page, text, block, after)
        for block, after in zip(found, following, strict=True)
        if block["language"] == "python"
    ]


def _example(page, text, block, after):
    notes = dict(note.partition(": ")[::2] for note in (block["note"] or "").split("; "))
    output = None
    if after and after["language"] == "text" and not text[block.end() : after.start()].strip():
        output = after["body"]
    return Example(
        page,
        text.count("\n", 0, block.start("body")) + 1,
        block["body"],
        tuple(notes["only"].split()) if "only" in notes else WAYS,
        notes.get("needs", ""),
        "script" in notes,
        output,
    )


def run_page(page, way):
    """Run the examples of a page, in order; raise what the first one that fails raises."""
    namespace = {"__name__": "example"}
    for example in examples(page):
        missing = example.needs and importlib.util.find_spec(example.needs) is None
        if way in example.ways and not example.is_script and not missing:
            _run(example, namespace, check_output=way == "alone")


def _run(example, namespace, *, check_output):
    code = compile(example.code, "example.py", "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed) if check_output else contextlib.nullcontext():
        try:
            exec(code, namespace)
        except Exception as error:
            name = f"{type(error).__name__}: "
            if name not in (example.output or ""):
                raise AssertionError(f"the example at {example} failed") from error
            printed.write(f"{name}{error}\n")
    if check_output and example.output is not None:
        assert printed.getvalue() == example.output, f"the output of the example at {example}"
