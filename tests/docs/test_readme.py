"""README.md as an index shows it: of the metadata that are built, by the renderer of PyPI."""

import re
import shutil
import subprocess
import sys
import warnings
from email import message_from_string
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from docs_pages import ROOT

import hpcdist

FILES = f"/hpcdist/hpcdist/blob/v{hpcdist.__version__}/"
PICTURES = f"/hpcdist/hpcdist/v{hpcdist.__version__}/"
SOURCES = ["setup.py", "pyproject.toml", "README.md", "LICENSE", "hpcdist/__init__.py"]
BUILD = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
PLACES = {"github.com": FILES, "raw.githubusercontent.com": PICTURES}


class Targets(HTMLParser):
    """What a page links to and shows."""

    def __init__(self, html):
        super().__init__()
        self.links, self.pictures = [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "img":
            self.pictures.append(values["src"])


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """Build the metadata from a copy of what they are made of, as building leaves files behind."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.dist-info/METADATA")
    return message_from_string(path.read_text())


@pytest.fixture(scope="module")
def page(metadata):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what renders Markdown is missing
        markdown = pytest.importorskip("readme_renderer.markdown")
    if not markdown.variants:
        pytest.skip("there is no Markdown here: pip install 'readme_renderer[md]'")
    html = markdown.render(metadata.get_payload(), variant="GFM")
    assert html
    return Targets(html)


def test_an_index_shows_markdown_and_the_tagline(metadata):
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert f"**{metadata['Summary']}**" in metadata.get_payload()


def test_every_link_leads_to_a_file_of_the_release(page):
    ours = [urlsplit(link) for link in page.links if not link.startswith("#")]
    assert len(ours) > 20
    assert [link.geturl() for link in ours if not link.netloc] == []
    for link in ours:
        place = PLACES.get(link.netloc)
        if place and link.path.startswith(place):
            assert (ROOT / link.path.removeprefix(place)).is_file(), link.path


def test_every_picture_is_one_of_the_release(page):
    assert len(page.pictures) >= 2
    for picture in page.pictures:
        parts = urlsplit(picture)
        assert parts.netloc == "raw.githubusercontent.com"
        assert (ROOT / parts.path.removeprefix(PICTURES)).is_file(), picture


def test_sections_that_the_page_refers_to_are_there(page):
    text = (ROOT / "README.md").read_text()
    headings = {
        re.sub(r"[^\w -]", "", line).replace(" ", "-").lower()
        for line in re.findall(r"^#+ (.+)$", text, re.M)
    }
    referred = {link for link in page.links if link.startswith("#")}
    assert {link[1:].removeprefix("user-content-") for link in referred} <= headings
