"""The structure that every notebook of the course keeps, and proof that each rule bites."""

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAXIMUM_LINES = 25
TIME = re.compile(r"\*\*Time\*\* \d+ minutes?\b")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
INSTALL = re.compile(
    r"^\s*[!%].*\binstall\b|\b(pip3?|conda|mamba|apt|apt-get)\b.*\binstall\b", re.M
)
FORGIVEN = re.compile(r"allow_errors|raises-exception")


def problems(notebook, folder: Path = FOLDER) -> list[str]:
    found = []
    title = notebook.cells[0].source
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    if not re.match(r"# \d\d · \S", title):
        found.append("title")
    for heading in ("**You will be able to**", "**You need**"):
        if heading not in title:
            found.append(heading)
    if not TIME.search(title):
        found.append("time")
    for heading in ("## Exercise", "## Summary"):
        if heading not in text:
            found.append(heading)
    if len(re.findall(r"^\d\. .*\?$", text.partition("## Summary")[2], re.M)) != 3:
        found.append("three questions")
    for target in LINK.findall(text):
        if not (folder / target).exists():
            found.append(f"dead link {target}")
    if FORGIVEN.search(str(notebook.metadata)):
        found.append("errors allowed")
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if FORGIVEN.search(str(cell.metadata)):
            found.append("errors allowed")
        if "skip-execution" in tags and "**Skipped**" not in text:
            found.append("skip without a reason")
        if cell.cell_type != "code":
            continue
        if cell.outputs or cell.execution_count:
            found.append("stored output")
        if INSTALL.search(cell.source):
            found.append("install")
        if len(cell.source.splitlines()) > MAXIMUM_LINES:
            found.append("long cell")
    if not any("assert" in cell.source for cell in notebook.cells if cell.cell_type == "code"):
        found.append("no check")
    return found


def test_numbers_have_no_gaps():
    assert NOTEBOOKS
    assert [int(path.name[:2]) for path in NOTEBOOKS] == list(range(len(NOTEBOOKS)))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_keeps_the_anatomy(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook) == []
    assert notebook.cells[0].source.startswith(f"# {path.name[:2]} ")


def sound_notebook():
    return new_notebook(
        cells=[
            new_markdown_cell(
                "# 00 · Title\n**You will be able to**\n**You need**\n**Time** 1 minute."
            ),
            new_code_cell("assert 1 + 1 == 2"),
            new_markdown_cell("## Exercise"),
            new_markdown_cell("## Summary\n1. Why?\n2. How?\n3. When?"),
        ]
    )


def test_a_sound_notebook_has_no_problems():
    assert problems(sound_notebook()) == []


@pytest.mark.parametrize(
    ("cell", "change", "problem"),
    [
        (0, lambda cell: cell.update(source="# Title\n" + cell.source.partition("\n")[2]), "title"),
        (0, lambda cell: cell.update(source=cell.source.replace("**You need**", "")), "need"),
        (0, lambda cell: cell.update(source=cell.source.replace("1 minute", "soon")), "time"),
        (1, lambda cell: cell.update(source="print(2)"), "no check"),
        (1, lambda cell: cell.update(source="assert 1\n!pip install torch"), "install"),
        (1, lambda cell: cell.update(source="assert 1\n" * 26), "long cell"),
        (1, lambda cell: cell.update(execution_count=3), "stored output"),
        (1, lambda cell: cell.metadata.update(tags=["raises-exception"]), "errors allowed"),
        (1, lambda cell: cell.metadata.update(tags=["skip-execution"]), "skip without a reason"),
        (2, lambda cell: cell.update(source="## Exercise [x](01_gone.ipynb)"), "dead link 01_gone"),
        (2, lambda cell: cell.update(source="nothing"), "## Exercise"),
        (3, lambda cell: cell.update(source="## Summary\n1. Why?"), "three questions"),
    ],
)
def test_each_planted_fault_is_found(cell, change, problem):
    notebook = sound_notebook()
    change(notebook.cells[cell])
    assert any(problem in found for found in problems(notebook))


def test_the_map_of_the_readme_links_every_notebook_with_its_minutes():
    readme = (FOLDER.parent / "README.md").read_text()
    rows = re.findall(r"^\| \[.*\]\(notebooks/(\S+)\) \|.*\| (\d+) \|$", readme, re.M)
    titles = {path.name: nbformat.read(path, as_version=4).cells[0].source for path in NOTEBOOKS}
    stated = {name: re.search(r"\d+", TIME.search(title)[0])[0] for name, title in titles.items()}
    assert dict(rows) == stated


def test_errors_allowed_for_a_whole_notebook_are_found():
    notebook = sound_notebook()
    notebook.metadata["execution"] = {"allow_errors": True}
    assert "errors allowed" in problems(notebook)
