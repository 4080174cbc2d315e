"""The pictures of the documentation are what the library does, and what is drawn today."""

import xml.etree.ElementTree as ET

import pytest
from docs_pages import ROOT, text_of

from website import collectives, fences
from website.pictures import FOLDER, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_lies_in_the_folder_as_it_is_drawn(name):
    drawn = str(PICTURES[name]())
    assert (FOLDER / f"{name}.svg").read_text() == drawn, "run python -m website.pictures"
    assert ET.fromstring(drawn)[0].text  # a title for those who cannot see it


def test_every_picture_is_shown():
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert [path.name for path in FOLDER.iterdir() if f"images/{path.name}" not in pages] == []


def test_a_picture_moves_only_on_screens_of_those_who_like_it():
    moving = [path for path in FOLDER.iterdir() if "animation:" in path.read_text()]
    assert {path.stem for path in moving} == {name for name in PICTURES if "collective-" in name}
    for path in moving:
        style = path.read_text().partition("<style>\n")[2].partition("</style>")[0]
        query, *rules, end = style.splitlines()
        assert query == "@media screen and (prefers-reduced-motion: no-preference) {"
        assert end == "}"
        assert all(rule.startswith("  ") for rule in rules)


def test_a_picture_tells_which_blocks_are_in_a_sum():
    assert collectives.decoded(0) == ([], "")
    assert collectives.decoded(1 << 6) == ([1], "B2")
    assert collectives.decoded(1 << 2 | 1 << 14) == ([0, 3], "Σ2")


# ---- diagrams in fences


def test_a_chain_of_boxes_is_rendered_without_a_script():
    source = (
        'flowchart TB\n    a["<b>one</b><br>first & foremost"] --> b\n    b["<b>two</b><br>last"]'
    )
    assert fences.flowchart(source, "mermaid", "", {}, None) == (
        '<ol class="chain"><li><strong>one</strong><span>first &amp; foremost</span></li>'
        "<li><strong>two</strong><span>last</span></li></ol>"
    )


@pytest.mark.parametrize(
    "source",
    [
        "sequenceDiagram\n    a->>b: hello",
        'flowchart TB\n    a["<b>one</b><br>first"] --> c\n    b["<b>two</b><br>last"]',
    ],
)
def test_another_diagram_is_refused(source):
    with pytest.raises(ValueError, match="got:"):
        fences.chain(source)


def test_the_diagrams_of_the_pages_are_chains():
    for page in (ROOT / "docs").rglob("*.md"):
        for block in text_of(page).split("```mermaid\n")[1:]:
            assert fences.chain(block.partition("```")[0])
