"""The site, built once for the tests that look at it."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest
from docs_pages import ROOT

from website.finish import finish

SOURCES = ["docs", "examples", "hpcdist", "website", "mkdocs.yml", "README.md"]
LIMIT_S = 600


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Build the site from a copy, so that tests side by side do not write into one folder."""
    for name in ("zensical", "mkdocstrings_handlers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'hpcdist[docs]'")
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    finish(folder / "site")
    return folder / "site"
