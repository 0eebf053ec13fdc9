"""The structure that every notebook of the course keeps."""

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_numbers_have_no_gaps():
    assert NOTEBOOKS
    numbers = [int(path.name[:2]) for path in NOTEBOOKS]
    assert numbers == list(range(len(numbers)))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def test_title_cell_states_goals_needs_and_time(notebook):
    title = notebook.cells[0].source
    assert title.startswith("# ")
    for heading in ("**You will be able to**", "**You need**", "**Time**"):
        assert heading in title


def test_exercises_and_summary_are_there(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "## Exercise" in text
    assert "## Summary" in text


def test_no_outputs_installs_or_allowed_errors(notebook):
    assert not notebook.metadata.get("execution", {}).get("allow_errors")
    for cell in notebook.cells:
        assert "raises-exception" not in cell.metadata.get("tags", [])
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert "pip install" not in cell.source
            assert len(cell.source.splitlines()) <= 25
