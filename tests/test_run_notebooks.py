import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from helpers import isa, profiles, run_notebooks

ROOT = Path(__file__).parent.parent


def write(folder: Path, name: str, *code: str) -> Path:
    title = f"# {name}\n[start](00_good.ipynb)\n\n**Time** 2 minutes."
    cells = [new_markdown_cell(title, id="title"), *map(new_code_cell, code)]
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_failing_notebook_is_told_and_does_not_stop_the_others(tmp_path, capsys):
    sources = [
        write(tmp_path, "00_good", "import os", "print('pid', os.getpid())"),
        write(tmp_path, "01_raises", "x = 0", "y = 1 / x | 1\nx", "never = 1"),
        write(tmp_path, "02_dies", "import os; os._exit(3)"),
        write(tmp_path, "03_good", "20 + 22"),
    ]
    build = tmp_path / "build"
    build.mkdir()
    (build / "09_gone.ipynb").touch()
    results = run_notebooks.run(sources, build, profiles.load("laptop"))

    good, raises, dies, last = (result.failure for result in results)
    assert good is None and last is None
    assert raises == "cell 3 (y = 1 / x | 1): ZeroDivisionError: division by zero"
    assert dies.startswith("cell 2 (import os; os._exit(3)): the kernel died")
    assert [result.expected for result in results] == [2, 2, 2, 2]

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [source.stem for source in sources]
    assert all("expected  2 min   took  0." in line for line in lines)
    assert lines[1].endswith(f"FAILED in {raises}")

    assert sorted(build.iterdir()) == sorted(
        [build / source.name for source in sources] + [build / "index.html"]
    )
    stamp, _, _, output = nbformat.read(build / "00_good.ipynb", as_version=4).cells
    assert isa.cpu_model() in stamp.source and version("torch") in stamp.source
    assert not is_alive(int(output.outputs[0].text.split()[1]))

    page = (build / "index.html").read_text()
    for source in sources:
        assert f'href="#{source.stem}"' in page and f'id="{source.stem}"' in page
    assert ".ipynb" not in page
    assert "ZeroDivisionError: division by zero" in page and isa.cpu_model() in page


def test_a_cell_that_hangs_has_a_limit(tmp_path):
    source = write(tmp_path, "00_hangs", "import time; time.sleep(600)")
    result = run_notebooks.execute(source, cell_timeout=1)
    assert result.failure == "cell 2 (import time; time.sleep(600)): took longer than 1 s"
    assert result.minutes < 0.5


def test_the_stamp_says_which_kernel_ran_or_why_none(monkeypatch):
    assert "| a bf16 matrix product ran on | " in run_notebooks.stamp("laptop")

    def faults(program):
        raise isa.IsaError("killed by SIGILL", "")

    monkeypatch.setattr(isa, "dispatched", faults)
    assert "failed: killed by SIGILL" in run_notebooks.stamp("laptop")


def start(folder: Path, **variables: str) -> subprocess.Popen:
    program = (
        "import sys, pathlib, helpers.run_notebooks as r;"
        "r.ROOT = pathlib.Path(sys.argv[1]); sys.exit(r.main())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, folder],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_kernel_too(tmp_path, number):
    note = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid()))"
    write(tmp_path / "notebooks", "00_long", code, "time.sleep(600)")
    with start(tmp_path) as process:
        limit = time.monotonic() + 60
        while not (note.exists() and note.read_text()):
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert out.endswith("stopped\n")
    assert not is_alive(int(note.read_text()))


def test_a_failure_shows_in_the_exit_status(tmp_path):
    write(tmp_path / "notebooks", "00_bad", "nonsense")
    with start(tmp_path) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "NameError: name 'nonsense' is not defined" in out
    assert err == "failed: 00_bad; the full errors stand in the page\n"


def test_an_unknown_profile_is_refused_before_anything_runs(tmp_path):
    with start(tmp_path, COURSE_PROFILE="huge") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "COURSE_PROFILE may be laptop, paper, workshop" in err
    assert not (tmp_path / "build").exists()


def test_one_core_is_enough():
    first = next((run_notebooks.ROOT / "notebooks").glob("00_*.ipynb"))
    code = (
        "import pathlib, sys\n"
        "from helpers import run_notebooks\n"
        f"ran = run_notebooks.execute(pathlib.Path({str(first)!r}), cell_timeout=120)\n"
        "sys.exit(ran.failure)"
    )
    core = min(os.sched_getaffinity(0))
    ran = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-c", code],
        cwd=run_notebooks.ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
