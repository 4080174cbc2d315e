"""The built site in a real browser, from the file system: `python -m website.browser site`.

Reading it from files is the hardest case: no server, no network, as on a cluster without either.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WORDS = {
    "Scatterv": "scatter",
    "Allreduce": "all_reduce",
    "PROC_NULL": "Messages",
    "Sendrecv": "Messages",
    "ncclAllReduce": "Collectives",
}
"""What users of MPI and NCCL search for, and a heading that must be among the results."""

SHOWN = (
    "index.html",
    "tutorial.html",
    "concepts.html",
    "guide.html",
    "cookbook.html",
    "troubleshooting.html",
    "architecture.html",
    "mesh.html",
    "coming-from.html",
    "reference/collectives.html",
)
"""Pages of which screenshots are kept."""

PHONE = {"width": 390, "height": 844}
LIMIT_MS = 60_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """Return the browser of the system, if it has one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing() -> str:
    """Return why pages cannot be looked at here, or an empty string."""
    if executable() is None:
        return "there is no chromium: apt-get install chromium"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "there is no playwright: pip install playwright"
    return ""


@contextmanager
def browser(**options: Any) -> Iterator[Any]:
    """Give a browser's context that notes in `problems` what goes wrong in its pages."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=executable(), args=["--no-sandbox"], timeout=LIMIT_MS
        )
        context = chromium.new_context(**options)
        context.set_default_timeout(LIMIT_MS)
        yield context
        chromium.close()


def look(site: Path, pages: list[Path]) -> list[str]:
    """Open all pages on a phone; return what is wrong with them.

    That is: errors on the console, assets that are missing, requests to elsewhere, and pages that
    must be scrolled sideways.
    """
    problems: list[str] = []
    with browser(viewport=PHONE) as context:
        page = context.new_page()
        page.on("console", lambda said: said.type == "error" and problems.append(said.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "requestfailed",  # aborted: the next page was opened before this one had its icon
            lambda request: (
                request.failure != "net::ERR_ABORTED"
                and problems.append(f"missing: {request.url}, {request.failure}")
            ),
        )
        page.on(
            "request",
            lambda request: (
                request.url.startswith("http") and problems.append(f"from elsewhere: {request.url}")
            ),
        )
        for path in pages:
            before = len(problems)
            page.goto(path.resolve().as_uri(), wait_until="load")
            if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                problems.append("it is wider than a phone")
            problems[before:] = [f"{path.relative_to(site)}: {each}" for each in problems[before:]]
    return problems


def copied(site: Path, path: str) -> list[str]:
    """Return what the copy buttons of the console blocks of a page take."""
    with browser() as context:
        page = context.new_page()
        page.goto((site / path).resolve().as_uri(), wait_until="load")
        blocks = page.locator("[data-copy]").all()
        return [block.get_attribute("data-copy") for block in blocks]


def search(site: Path, words: dict[str, str]) -> dict[str, bool]:
    """Return for each word whether the search finds the heading that belongs to it."""
    from playwright.sync_api import TimeoutError as Waited

    found = {}
    with browser() as context:
        for word, heading in words.items():
            page = context.new_page()
            page.goto((site / "index.html").resolve().as_uri(), wait_until="load")
            page.keyboard.press("Control+k")
            page.get_by_placeholder("Search").fill(word)
            result = page.get_by_role("listbox").get_by_text(heading, exact=True).first
            try:
                result.wait_for()
                found[word] = True
            except Waited:
                found[word] = False
    return found


def take_screenshots(site: Path, folder: Path) -> None:
    """Write pictures of some pages, by day and by night, and of one on a phone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in {
        "light": {"color_scheme": "light"},
        "dark": {"color_scheme": "dark"},
        "phone": {"viewport": PHONE},
    }.items():
        with browser(**options) as context:
            page = context.new_page()
            for path in SHOWN if name == "light" else SHOWN[:1]:
                page.goto((site / path).resolve().as_uri(), wait_until="load")
                stem = path.removesuffix(".html").replace("/", "-")
                page.screenshot(path=str(folder / f"{stem}-{name}.png"))


def main() -> None:
    """Look at the site that is named, and tell what is wrong with it."""
    site = Path(sys.argv[1])
    pages = sorted(set(site.rglob("*.html")) - {site / "404.html"})
    problems = look(site, pages)
    problems += [f"{word} is not found" for word, hit in search(site, WORDS).items() if not hit]
    take_screenshots(site, site / "screenshots")
    print(*problems, sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
