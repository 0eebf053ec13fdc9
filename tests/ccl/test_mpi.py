"""Ranks started from a notebook: their output, their failures, and that none is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from helpers.ccl import mpi
from helpers.ccl.mpi import RanksError, run, session_members

pytestmark = pytest.mark.skipif(not mpi.MPIEXEC.exists(), reason="Intel MPI is not installed")
FORGETFUL = "import os, time; print(os.getsid(0), flush=True); time.sleep(100)"


def shell() -> InteractiveShell:
    InteractiveShell.clear_instance()
    made = InteractiveShell.instance()
    made.run_line_magic("load_ext", "helpers.ccl.notebook")
    return made


def test_every_rank_speaks_with_its_number():
    said = []
    output = run(["-c", "import os; print('PMI', os.environ['PMI_RANK'])"], 3, 30, say=said.append)
    assert sorted(output.splitlines()) == ["[0] PMI 0", "[1] PMI 1", "[2] PMI 2"]
    assert sorted(said) == sorted(output.splitlines())


def test_cores_are_shared_out_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = ["-c", "import os; print(os.environ['OMP_NUM_THREADS'], os.environ.get('MORE'))"]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"[0] {share} None" in run(program, 2, 30)
    assert "[0] 7 yes" in run(program, 2, 30, {"OMP_NUM_THREADS": "7", "MORE": "yes"})


def test_a_failing_rank_is_told_with_what_it_said():
    with pytest.raises(RanksError, match=r"exit code(?s:.*)planted") as error:
        run(["-c", "raise SystemExit('planted')"], 2, 30)
    assert not error.value.late


def test_late_ranks_are_ended():
    begun = time.monotonic()
    with pytest.raises(RanksError, match="were not done within 4 s") as error:
        run(["-c", FORGETFUL], 2, 4)
    assert error.value.late
    assert time.monotonic() - begun < 4 + 2 * mpi.GRACE_SECONDS


def test_an_interrupt_leaves_nothing_behind(tmp_path):
    program = (
        "import signal\n"
        "from helpers.ccl.mpi import run\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # nohup ignores it
        f"run(['-c', {FORGETFUL!r}], 2, 60, say=lambda line: print(line, flush=True))"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    session = int(caller.stdout.readline().split()[-1])
    assert session_members(session)
    caller.send_signal(signal.SIGINT)
    assert caller.wait(timeout=20) != 0
    caller.stdout.close()
    assert session_members(session) == []


def test_without_mpiexec_the_mend_is_told(monkeypatch):
    monkeypatch.setattr(mpi, "MPIEXEC", Path("/nowhere/mpiexec"))
    with pytest.raises(RanksError, match="no /nowhere/mpiexec: run env/setup.sh"):
        run(["-c", ""])


def test_a_cell_runs_on_ranks(capfd):
    shell().run_cell_magic("ranks", "2 COLOR=red", "import os\nprint(os.environ['COLOR'], 'cell')")
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] red cell", "[1] red cell"]


def test_a_cell_that_should_fail_must_fail():
    made = shell()
    made.run_cell_magic("ranks", "2 fails", "raise ValueError('planted')")
    with pytest.raises(RanksError, match="should have failed"):
        made.run_cell_magic("ranks", "2 fails", "1 + 1")
    with pytest.raises(RanksError, match="exit code"):
        made.run_cell_magic("ranks", "2", "raise ValueError('planted')")


@pytest.mark.parametrize("line", ["", "two", "2 red", "-1", "0"])
def test_a_wrong_line_tells_the_usage(line):
    with pytest.raises(ValueError, match="usage: %%ranks NUMBER"):
        shell().run_cell_magic("ranks", line, "1 + 1")
