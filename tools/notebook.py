"""Runs docs/notebook.ipynb on the demo model and stores its outputs.

python -m tools.notebook 127.0.0.1:9000: the address of a service of that model
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
SHOWN_ADDRESS = "127.0.0.1:9000"
TIMEOUT_S = 600


def run(address: str) -> Any:
    """Return the notebook with the outputs of a run. The service is at `address`.

    Raises CellExecutionError with the traceback of a cell that fails.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(SHOWN_ADDRESS, address)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=TIMEOUT_S, resources=resources).execute()
    for cell in notebook.cells:
        cell.source = cell.source.replace(address, SHOWN_ADDRESS)
    return notebook


def without_run(notebook: Any) -> Any:
    """Return a notebook without what another run changes: times, widgets, log lines, long texts."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if _is_stored(each)]
    for output in (each for cell in notebook.cells for each in cell.get("outputs", ())):
        if "text/html" in output.data:
            output.data.pop("text/plain", None)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _is_stored(output: Any) -> bool:
    shows = output.output_type in ("execute_result", "display_data")
    return shows and "application/vnd.jupyter.widget-view+json" not in output.data


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    nbformat.write(without_run(run(sys.argv[1])), NOTEBOOK)
