"""env/setup.sh in a copy, with planted faults; a stand-in for Python replaces all slow steps."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Does what setup.sh asks an interpreter for; FAULT names what goes wrong. Notes each call.
PYTHON = f"""#!{Path(sys.executable).resolve()}
import os, shutil, sys
from pathlib import Path

FAULT = os.environ.get("FAULT")
UV = '''#!/bin/bash
echo "uv $* index=$UV_DEFAULT_INDEX" >> calls
mkdir -p "$UV_CACHE_DIR" .venv/half && touch "$UV_CACHE_DIR/download"
[[ $FAULT == slow ]] && sleep 40
[[ $FAULT != download ]]
'''
call = sys.argv[1:]
with open("calls", "a") as calls:
    print(Path(sys.argv[0]).name, *call, file=calls)
if call[0] == "-c" and "urlopen" in call[1]:
    sys.exit(FAULT == "cpu index")
elif call[0] == "-c":
    major, minor = os.environ.get("VERSION", "3.12").split(".")
    sys.version_info = (int(major), int(minor), 1)
    if FAULT == "ensurepip":
        sys.modules["ensurepip"] = None
    exec(call[1])
elif call[:2] == ["-m", "venv"]:
    Path(call[2], "bin").mkdir(parents=True)
    shutil.copy(__file__, Path(call[2], "bin", "python"))
elif "config" in call:
    print(os.environ.get("PIP_CONFIG", ""))
elif "install" in call:
    Path(".venv/bin/uv").write_text(UV)
    Path(".venv/bin/uv").chmod(0o755)
    sys.exit(FAULT == "index")
elif call == ["-"] and FAULT == "stack":
    sys.exit("ImportError: libexample.so.1")
"""


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "a folder"
    (folder / "bin").mkdir(parents=True)
    shutil.copytree(ROOT / "env", folder / "env")
    stand_in(folder, "python3", PYTHON)
    return folder


def stand_in(checkout: Path, command: str, text: str) -> None:
    (checkout / "bin" / command).write_text(text)
    (checkout / "bin" / command).chmod(0o755)


def start(checkout: Path, **variables: str) -> subprocess.Popen:
    path = f"{checkout / 'bin'}:/usr/bin:/bin"
    return subprocess.Popen(
        ["bash", checkout / "env" / "setup.sh"],
        env={"PATH": path, "HOME": "/proc/nowhere", "PYTHON": "python3"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    with process:
        out, _ = process.communicate(timeout=60)
    return process.returncode, out


def setup(checkout: Path, **variables: str) -> tuple[int, str]:
    return finish(start(checkout, **variables))


def calls(checkout: Path) -> str:
    return (checkout / "calls").read_text()


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_it_installs_once_and_is_quiet_afterwards(checkout, version):
    code, out = setup(checkout, VERSION=version)
    assert (code, out.splitlines()[-1]) == (0, "[setup] ready: .venv")
    assert f"Python {version}" in out
    assert not (checkout / ".venv" / "cache").exists()
    before = calls(checkout)
    assert "uv pip install" in before
    assert setup(checkout, VERSION=version) == (0, "")
    assert "install" not in calls(checkout).removeprefix(before)


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14"])
def test_a_wrong_python_is_refused(checkout, version):
    code, out = setup(checkout, VERSION=version)
    assert code == 1
    assert "no Python 3.10-3.13 found (tried: python3)" in out
    assert "apt-get install python3 python3-venv" in out
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("ensurepip", "sudo apt-get install python3.12-venv"),
        ("index", "the Python package index cannot be reached"),
        ("download", "run env/setup.sh again: finished downloads are kept"),
        ("stack", "the stack does not import: ImportError: libexample.so.1"),
    ],
)
def test_a_fault_says_what_to_do_and_the_next_run_repairs(checkout, fault, advice):
    code, out = setup(checkout, FAULT=fault)
    assert code == 1
    assert "[setup] ERROR: " in out
    assert advice in out
    assert setup(checkout)[0] == 0
    assert setup(checkout) == (0, "")


def test_a_repair_starts_afresh_but_keeps_the_downloads(checkout):
    setup(checkout, FAULT="download")
    assert (checkout / ".venv" / "half").exists()
    assert setup(checkout, FAULT="index")[0] == 1
    assert not (checkout / ".venv" / "half").exists()
    assert (checkout / ".venv" / "cache" / "download").exists()


def test_it_says_which_torch_it_chose(checkout):
    assert "torch: the CPU build" in setup(checkout)[1]
    assert "--torch-backend cpu" in calls(checkout)


def test_without_the_cpu_index_torch_comes_from_the_package_index(checkout):
    assert "torch: the default build" in setup(checkout, FAULT="cpu index")[1]
    assert "--torch-backend" not in calls(checkout)


def test_the_index_of_pip_is_used(checkout):
    config = "global.extra-index-url='http://b/simple'\nglobal.index-url='http://a/simple'"
    setup(checkout, PIP_CONFIG=config)
    assert "index=http://a/simple\n" in calls(checkout)


def test_new_pins_are_installed_into_the_same_environment(checkout):
    setup(checkout)
    (checkout / ".venv" / "mine").touch()
    with (checkout / "env" / "requirements.txt").open("a") as requirements:
        requirements.write("# changed\n")
    assert "the pins have changed" in setup(checkout)[1]
    assert (checkout / ".venv" / "mine").exists()


def test_a_moved_checkout_gets_a_new_environment(checkout):
    setup(checkout)
    (checkout / ".venv" / "mine").touch()
    moved = checkout.rename(checkout.with_name("moved"))
    code, out = setup(moved)
    assert (code, out.splitlines()[-1]) == (0, "[setup] ready: .venv")
    assert not (moved / ".venv" / "mine").exists()


def test_a_full_disk_is_noticed_before_the_download(checkout):
    stand_in(checkout, "df", "#!/bin/sh\necho Avail\necho 2097152\n")
    code, out = setup(checkout)
    assert code == 1
    assert "needs 3 GB, 2 GB are free" in out
    assert "uv pip" not in calls(checkout)


def test_another_architecture_is_refused(checkout):
    stand_in(checkout, "uname", "#!/bin/sh\necho Linux aarch64\n")
    code, out = setup(checkout)
    assert code == 1
    assert "needs x86-64 Linux; this is Linux aarch64" in out


def test_a_second_set_up_waits_and_an_interrupted_one_says_so(checkout):
    first = start(checkout, FAULT="slow")
    limit = time.monotonic() + 20
    while not (checkout / ".venv" / "cache" / "download").exists():
        assert time.monotonic() < limit and first.poll() is None
        time.sleep(0.05)
    second = start(checkout)
    assert "another set-up is at work here" in second.stdout.readline()
    os.killpg(first.pid, signal.SIGINT)
    code, out = finish(first)
    assert code == 1
    assert "interrupted. Run env/setup.sh again" in out
    assert finish(second)[0] == 0


@pytest.mark.parametrize("listens", [False, True], ids=["refusing", "silent"])
def test_an_unreachable_index_is_found_out_in_seconds(checkout, listens):
    began = time.monotonic()
    with socket.socket() as index:
        index.bind(("127.0.0.1", 0))
        if listens:
            index.listen()
        code, out = setup(
            checkout,
            PYTHON=sys.executable,
            PIP_INDEX_URL=f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            PIP_DEFAULT_TIMEOUT="600",
            PIP_RETRIES="20",
            PIP_CONFIG_FILE=os.devnull,
        )
    assert code == 1
    assert "the Python package index cannot be reached" in out
    assert time.monotonic() - began < 60
