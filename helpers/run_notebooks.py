"""Executes the notebooks; leaves the executed copies and one HTML page in build/.

Run as ``python -m helpers.run_notebooks``; ``COURSE_PROFILE`` chooses the size. Exits with 1 where
a notebook failed, 2 for a bad profile, 130 when it was stopped.
"""

import asyncio
import html
import os
import platform
import re
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell, new_notebook

from helpers import isa, profiles
from helpers.timing import Stopwatch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "intel-extension-for-pytorch", "transformers", "datasets")
PATIENCE = 2.5  # a cell may take so many times the profile's longest training
SHORTEST_PATIENCE = 300  # seconds, as pytest --nbmake has
TIME = re.compile(r"\*\*Time\*\* (\d+) minute")


@dataclass
class Executed:
    """A notebook with its outputs: ``minutes`` it took, ``expected`` ones as its title states them.

    ``failure`` tells in a line which cell failed and why; None where all of them ran.
    """

    name: str
    notebook: NotebookNode
    expected: int | None
    minutes: float
    failure: str | None


async def _execute(client: NotebookClient) -> None:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()

    stopped = False

    def stop():
        nonlocal stopped
        stopped = True
        task.cancel()

    def listen(notebook):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)

    client.on_notebook_start = listen
    try:
        await client.async_execute()
    except DeadKernelError:
        # what nbclient makes of a stop, too
        if stopped:
            raise asyncio.CancelledError from None
        raise


def execute(source: Path, cell_timeout: float) -> Executed:
    """Runs one notebook in a fresh kernel, which is gone afterwards.

    ``cell_timeout`` is in seconds. A failing notebook is reported in the result; Ctrl-C and
    SIGTERM raise asyncio.CancelledError.
    """
    notebook = nbformat.read(source, as_version=4)
    stated = TIME.search(notebook.cells[0].source if notebook.cells else "")
    expected = int(stated[1]) if stated else None
    label = f"{source.stem:32} expected {expected or '?':>2} min"
    print(label, end="", flush=True)
    position = 0

    def show_position(cell, cell_index):
        nonlocal position
        position = cell_index + 1
        if sys.stdout.isatty():
            print(f"\r{label}   cell {position} of {len(notebook.cells)} ", end="", flush=True)

    client = NotebookClient(
        notebook,
        timeout=cell_timeout,
        on_cell_execute=show_position,
        coalesce_streams=True,
        extra_arguments=["--IPKernelApp.log_level=CRITICAL"],
        resources={"metadata": {"path": source.parent}},
    )
    reason = None
    with Stopwatch() as watch:
        try:
            asyncio.run(_execute(client))
        except CellExecutionError as error:
            reason = f"{error.ename}: {error.evalue}"
        except CellTimeoutError:
            reason = f"took longer than {cell_timeout:.0f} s"
        except DeadKernelError:
            reason = "the kernel died: out of memory, or a crash inside a library"
        except RuntimeError as error:
            reason = f"the kernel did not start: {error}"
    failure = None
    if reason:
        code = notebook.cells[position - 1].source.strip() if position else ""
        failure = f"cell {position} ({_first_line(code)}): {_first_line(reason)}"
    minutes = watch.seconds / 60
    verdict = f"FAILED in {failure}" if failure else "ok"
    if sys.stdout.isatty():
        print(f"\r{label}", end="")
    print(f"   took {minutes:4.1f} min   {verdict}", flush=True)
    return Executed(source.stem, notebook, expected, minutes, failure)


def _first_line(text: str) -> str:
    first = (text.splitlines() or [""])[0]
    return first if len(first) <= 200 else first[:200] + "…"


def stamp(profile: str) -> str:
    """Says in Markdown what machine and stack an execution ran on, and which kernel really ran."""
    try:
        ran = isa.dispatched(isa.AMX_PROGRAM)
        allowed = ran.isa
        chosen = ", ".join(
            kernel.implementation for kernel in ran.products if kernel.source == "bf16"
        )
    except isa.IsaError as error:
        allowed = chosen = f"a bf16 matrix product failed: {error.reason}"
    advertised = ", ".join(name for name, present in isa.cpu_flags().items() if present)
    rows = {
        "CPU": f"{isa.cpu_model()}, {len(os.sched_getaffinity(0))} cores usable",
        "advertised": advertised or "none of AVX2, AVX-512, AMX",
        "oneDNN may use": allowed,
        "a bf16 matrix product ran on": chosen or "no oneDNN kernel",
        "Python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
        "profile": profile,
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }
    return "\n".join(
        ["| executed on | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
    )


def page(results: list[Executed], stamp: str) -> str:
    """Puts all notebooks on one HTML page: the stamp, a table of contents, then each notebook."""
    contents = ["| notebook | expected min | took min | |", "|---|--:|--:|---|"]
    for result in results:
        verdict = "ok"
        if result.failure:
            verdict = "**FAILED** in " + html.escape(result.failure).replace("|", "&#124;")
        contents.append(
            f"| [{result.name}](#{result.name}) | {result.expected or ''} "
            f"| {result.minutes:.1f} | {verdict} |"
        )
    cells = [new_markdown_cell("\n".join(["# The course, executed", "", *contents, "", stamp]))]
    for result in results:
        cells.append(new_markdown_cell(f'<hr><a id="{result.name}"></a>'))
        # cell ids are unique within a notebook only
        cells += [
            NotebookNode(cell, id=f"{result.name[:2]}-{number}")
            for number, cell in enumerate(result.notebook.cells)
        ]
    whole = new_notebook(cells=cells, metadata=results[0].notebook.metadata if results else {})
    exporter = HTMLExporter()
    text, _ = exporter.from_notebook_node(whole, {"metadata": {"name": "The course, executed"}})
    # links from notebook to notebook stay on the page
    return re.sub(r'href="([\w-]+)\.ipynb(?:#[^"]*)?"', r'href="#\1"', text)


def run(sources: Iterable[Path], build: Path, profile: profiles.Profile) -> list[Executed]:
    """Executes ``sources`` one after the other; writes copies and index.html into ``build``.

    A failing notebook does not stop the others. Raises asyncio.CancelledError or KeyboardInterrupt
    when stopped; no kernel is left then.
    """
    build.mkdir(parents=True, exist_ok=True)
    for old in (*build.glob("*.ipynb"), build / "index.html"):
        old.unlink(missing_ok=True)
    longest = max(task.minutes for task in (profile.mrpc, profile.qqp, profile.squad))
    where = stamp(profile.name)
    results = []
    for source in sources:
        result = execute(source, cell_timeout=max(SHORTEST_PATIENCE, 60 * PATIENCE * longest))
        results.append(result)
        copy = new_notebook(
            cells=[new_markdown_cell(where), *result.notebook.cells],
            metadata=result.notebook.metadata,
        )
        nbformat.write(copy, build / source.name)
    (build / "index.html").write_text(page(results, where), encoding="utf-8")
    return results


def main() -> int:
    try:
        profile = profiles.load()
    except profiles.ProfileError as error:
        print(error, file=sys.stderr)
        return 2
    build = ROOT / "build"
    print(f"profile {profile.name}; the expected minutes are those of laptop, on two cores")
    try:
        results = run(sorted((ROOT / "notebooks").glob("*.ipynb")), build, profile)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nstopped")
        return 130
    failed = [result.name for result in results if result.failure]
    print(f"{sum(result.minutes for result in results):.1f} minutes in all. See {build}/index.html")
    if failed:
        print(f"failed: {', '.join(failed)}; the full errors stand in the page", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
