"""The notebook of the documentation: its stored outputs, and a run on SmolLM2 and its service."""

import ast

import pytest

pytest.importorskip("nbclient", reason="needs nbclient: pip install -e '.[dev]'")

import nbformat

from tools.notebook import NOTEBOOK, TIMEOUT_S, run, without_run

SHOWN = ("batch", "prediction", "stream", "client", "async-client")
"""Cells that show an output with marked tokens."""


def cells_of(notebook):
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def shown_by(cell):
    return [output.data for output in cell.outputs]


@pytest.fixture(scope="module")
def stored():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    return notebook


def test_the_stored_notebook_has_been_run_as_it_is(stored):
    cells = cells_of(stored)
    assert [cell.execution_count for cell in cells.values()] == [*range(1, len(cells) + 1)]
    for cell in cells.values():
        compile(cell.source, cell.id, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        assert all(output.output_type != "error" for output in cell.outputs)
    for name in SHOWN:
        [data] = shown_by(cells[name])
        assert "<mark title='drafted'>" in data["text/html"], name
    assert nbformat.writes(without_run(stored)) == nbformat.writes(stored), (
        "python -m tools.notebook"
    )


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(TIMEOUT_S)
def test_every_cell_runs_where_an_event_loop_runs(stored, smollm2):
    """The kernel runs an event loop, on which the cells call LLM, AsyncLLM and both clients."""
    executed = run(smollm2.grpc_address)
    assert "Processed prompts" in str(cells_of(executed)["batch"].outputs), "a progress bar"
    cells, before = cells_of(without_run(executed)), cells_of(stored)
    assert {name: cell.source for name, cell in cells.items()} == {
        name: cell.source for name, cell in before.items()
    }
    for name in SHOWN:
        [data] = shown_by(cells[name])
        assert "<div class='text'" in data["text/html"], name
    assert "<mark title='drafted'>" in cells["prediction"].outputs[0].data["text/html"]
    assert [data["text/plain"] for data in shown_by(cells["same"])] == ["True"]
