"""Starts the rank programs of ``programs.py`` and brings back what they say and how they end."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from helpers.ccl.mpi import MPIEXEC, session_members

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "PMI_", "MPI_", "CCL_", "FI_", "I_MPI_")


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its output (both streams) and its exit code."""

    output: str
    code: int


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without any launcher's variables, one thread a rank."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run(commands: list[tuple[list[str], dict[str, str]]], timeout: float) -> list[Ended]:
    """Runs commands (each with its environment) side by side. None outlives this call.

    Raises AssertionError where one needs more than ``timeout`` seconds or leaves a process.
    """
    running = [
        subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command, environment in commands
    ]
    deadline = time.monotonic() + timeout
    ended, late, left = [], False, []
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        ended.append(Ended(output, process.returncode))
    for process in running:
        left += session_members(process.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    told = "\n".join(f"--- {end.code}\n{end.output}" for end in ended)
    assert not late, f"not done within {timeout} s:\n{told}"
    assert not left, f"processes {left} were left behind:\n{told}"
    return ended


def plain(program: str, size: int, timeout: float = 60, **variables: str) -> list[Ended]:
    """One process a rank, with torchrun's variables and no launcher."""
    command, port = [sys.executable, "-m", "tests.ccl.programs", program], free_port()
    return run(
        [
            (command, clean_environment(**torchrun_variables(rank, size, port), **variables))
            for rank in range(size)
        ],
        timeout,
    )


def mpiexec(program: str, size: int, timeout: float = 60, **variables: str) -> Ended:
    """Intel MPI's launcher, unpinned: several tests may share the cores."""
    command = [str(MPIEXEC), "-n", str(size), sys.executable, "-m", "tests.ccl.programs", program]
    return run([(command, clean_environment(I_MPI_PIN="0", **variables))], timeout)[0]


def check(ended: list[Ended] | Ended, said: str = "") -> None:
    """All ended well, and each said ``said``."""
    for end in ended if isinstance(ended, list) else [ended]:
        assert end.code == 0, end.output
        assert said in end.output, end.output
