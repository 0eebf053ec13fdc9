"""Executes the notebooks and leaves the executed copies in build/.

Run as ``python -m helpers.run_notebooks``; exits with 1 where a notebook failed.
"""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from helpers.timing import Stopwatch

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 300  # seconds


def main() -> int:
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    failures = 0
    for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(source, as_version=4)
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT, resources={"metadata": {"path": source.parent}}
        )
        print(f"{source.name:40} ", end="", flush=True)
        failure = None
        with Stopwatch() as watch:
            try:
                client.execute()
            except (CellExecutionError, CellTimeoutError) as error:
                failure = error
        nbformat.write(notebook, build / source.name)
        print(f"{'failed' if failure else 'ok'}  {watch.seconds:6.1f} s", flush=True)
        if failure:
            failures += 1
            print(failure, file=sys.stderr)
    print(f"executed copies: {build}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
