"""The site, built: without a warning, complete, of local files, searchable without a server."""

import inspect
import re
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from docs_pages import ROOT
from test_reference import value_of

from website import browser, moved

pytestmark = pytest.mark.thorough


class Page(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.path, self.links, self.loads, self.anchors, self.tags = path, [], [], set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.add(tag)
        self.anchors.update(filter(None, [values.get("id"), values.get("name")]))
        if tag == "a":
            self.links.append(values.get("href"))
        elif tag in ("script", "img", "source", "iframe"):
            self.loads.append(values.get("src"))
        elif tag == "link" and values.get("rel") in ("stylesheet", "preload", "icon"):
            self.loads.append(values.get("href"))


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_has_all_that_it_loads_and_links_to(site, pages):
    lost = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # it is shown under any address
        for each in filter(None, page.loads + page.links):
            parts = urlsplit(each)
            if parts.scheme in ("http", "https", "mailto") and each in page.links:
                continue  # a link for readers, which nothing loads
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            anchor = unquote(parts.fragment)
            lacks = known and anchor and anchor not in known.anchors
            if parts.scheme or not target.exists() or lacks:
                lost.append((str(path.relative_to(site)), each))
    assert lost == []


def test_examples_in_the_reference_are_code(site, pages):
    reference = [page for path, page in pages.items() if path.parent.name == "reference"]
    assert len(reference) > 20
    assert [page.path.name for page in reference if "blockquote" in page.tags] == []


SHOWN = re.compile(
    r'<h2 id="hpcdist\.(\S+)" .*?doc-symbol-heading doc-symbol-(\w+)"(.*?)(?=<h2 id="hpcdist\.|\Z)',
    re.S,
)


def test_the_reference_shows_functions_and_classes_with_their_release(site):
    shown = [
        found
        for page in (site / "reference").glob("*.html")
        for found in SHOWN.findall(page.read_text())
    ]
    assert len(shown) > 300
    kinds = ("function", "class")
    assert [name for name, kind, rest in shown if kind in kinds and "Since " not in rest] == []
    modules = {name for name, kind, _ in shown if kind == "module"} - {"launch"}  # it is both
    assert [name for name in modules if inspect.isroutine(value_of(name))] == []


def test_a_browser_finds_nothing_wrong_what_users_search_for_and_commands_to_copy(site, pages):
    if why := browser.missing():
        pytest.skip(why)
    shown = [path for path in pages if path.name != "404.html"]  # for servers: of absolute links
    assert browser.look(site, shown) == []
    assert "python hello.py\nhpcdist run -n 4 hello.py" in browser.copied(site, "tutorial.html")
    assert browser.search(site, browser.WORDS) == dict.fromkeys(browser.WORDS, True)


def test_an_old_address_leads_to_a_section_of_today(site, pages):
    for old, place in moved.MOVED.items():
        page, _, section = place.partition("#")
        assert not (ROOT / f"docs/{old}.md").exists()
        assert section in pages[site / page].anchors
        assert place in pages[site / f"{old}.html"].links
