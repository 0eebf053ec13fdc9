"""Executes notebook 02 and keeps its roofline as the README's picture: ``make picture``."""

import base64
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/roofline.png"


def main() -> None:
    source = next((ROOT / "notebooks").glob("02_*.ipynb"))
    notebook = nbformat.read(source, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": source.parent}}).execute()
    cell = next(cell for cell in notebook.cells if "plots.roofline(" in cell.source)
    picture = next(
        out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})
    )
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_bytes(base64.b64decode(picture))
    print(TARGET.relative_to(ROOT))


if __name__ == "__main__":
    main()
