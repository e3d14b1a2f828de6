"""The notebook of the examples, cell by cell in a real Jupyter kernel."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples/quickstart.ipynb"


def outputs(cells, kind):
    """Return what cells have put out, of one kind: "text/plain", "image/png", or "stdout" and "stderr"."""
    found = []
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        if output["output_type"] == "stream" and output["name"] == kind:
            found.append(output["text"])
        elif kind in output.get("data", {}):
            found.append(output["data"][kind])
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client; the kernel is a process of its own
def test_quickstart_runs_in_a_kernel(tmp_path, monkeypatch):
    """Every cell runs; three strategies train on two forked processes; the models here are trained; a plot appears."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(outputs(notebook.cells, "stdout") + outputs(notebook.cells, "stderr"))

    assert printed.count("% right") == 3
    assert printed.count("on 2 ranks; each sends about") == 3
    assert outputs(notebook.cells, "image/png")


def test_quickstart_is_stored_without_outputs():
    """The notebook is valid, and holds no outputs: they would go stale."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)

    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
