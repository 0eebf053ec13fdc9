"""Runs Python on several ranks of this machine, under Intel MPI's mpiexec.

The notebook that uses it: ``07_collectives``.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MPIEXEC = Path(sys.prefix) / "bin/mpiexec"
GRACE_SECONDS = 3
# oneCCL says this of the very line that makes it quiet
NOISE = "value of CCL_LOG_LEVEL changed"


class RanksError(RuntimeError):
    """The ranks failed, or did not end in time: ``late``. The message ends like their output."""

    def __init__(self, cause: str, output: str = "", late: bool = False):
        super().__init__(f"{cause}\n{output[-4000:]}".rstrip())
        self.cause, self.late = cause, late


def session_members(leader: int) -> list[int]:
    """Processes of the session that ``leader`` began, zombies not counted."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                members.append(int(stat.parent.name))
    return members


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_session(leader: int) -> None:
    """Ends mpiexec, its proxies and its ranks: politely, then by force.

    mpiexec is asked alone, since it waits long for proxies on other nodes whose ssh is gone.
    """
    members = session_members(leader)
    _signal([leader] if leader in members else members, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while members := session_members(leader):
        if time.monotonic() > deadline:
            _signal(members, signal.SIGKILL)
        if time.monotonic() > 2 * GRACE_SECONDS + deadline:
            raise RanksError(f"did not end, not even by force: processes {members}")
        time.sleep(0.05)


def run(
    arguments: Sequence[str],
    ranks: int = 2,
    timeout: float = 120,
    variables: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> str:
    """Runs ``python *arguments`` on every rank; returns what they said, each line with its rank.

    ``variables`` are set for the ranks; ``say`` gets each line when it comes. Where the
    environment doesn't say otherwise, the cores are shared out evenly (OMP_NUM_THREADS) and ranks
    are not pinned (I_MPI_PIN=0). After ``timeout`` seconds, on Ctrl-C and on any other exception
    all processes are ended. Raises RanksError where a rank fails or is late, and where there is
    no mpiexec.
    """
    if not MPIEXEC.exists():
        raise RanksError(f"no {MPIEXEC}: run env/setup.sh, or 'pip install impi-rt'")
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    environment = {"OMP_NUM_THREADS": str(threads), "I_MPI_PIN": "0"} | os.environ
    environment.pop("PYTHONUNBUFFERED", None)  # lines come in pieces then, each with a rank
    command = [str(MPIEXEC), "-l", "-n", str(ranks), sys.executable, *arguments]
    lines = []
    late = threading.Event()
    with subprocess.Popen(
        command,
        env=environment | dict(variables or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:

        def give_up():
            late.set()
            end_session(process.pid)

        limit = threading.Timer(timeout, give_up)
        limit.start()
        try:
            for line in process.stdout:
                if NOISE not in line:
                    lines.append(line)
                    if say:
                        say(line.rstrip("\n"))
            process.wait()
        finally:
            limit.cancel()
            end_session(process.pid)
    output = "".join(lines)
    if late.is_set():
        raise RanksError(f"were not done within {timeout} s", output, late=True)
    if process.returncode:
        raise RanksError(f"ended with exit code {process.returncode}", output)
    return output
