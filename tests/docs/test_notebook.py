"""The notebook runs in a kernel, cell by cell, and its outputs are those that it shows."""

import os

import pytest
from docs_pages import ROOT

from hpcdist.launch.environment import inherited
from hpcdist.launch.launchers import find_site

nbformat = pytest.importorskip("nbformat", reason="pip install 'hpcdist[test]'")
nbclient = pytest.importorskip("nbclient", reason="pip install 'hpcdist[test]'")
pytest.importorskip("ipykernel", reason="pip install 'hpcdist[test]'")

PATH = ROOT / "examples/notebook.ipynb"
LIMIT_S = 120
pytestmark = pytest.mark.thorough


def outputs(notebook):
    return [
        [each.get("text") or each["data"]["text/plain"] for each in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.filterwarnings("ignore:::(jupyter|zmq|traitlets|tornado)")
def test_every_cell_gives_what_the_notebook_shows(monkeypatch, tmp_path):
    if find_site(os.environ).mpiexec is None:
        pytest.skip("there is no mpiexec that fits the MPI library")
    for name in inherited(os.environ, here=True):
        monkeypatch.delenv(name, raising=False)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(PATH, as_version=4)
    shown = outputs(notebook)
    nbclient.NotebookClient(notebook, timeout=LIMIT_S).execute(cwd=str(tmp_path))
    assert outputs(notebook) == shown
    calls = "".join(cell.source for cell in notebook.cells)
    assert "dist.simulate(" in calls
    assert "dist.spawn(" in calls
