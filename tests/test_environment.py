"""The pins agree (requirements.txt, its lock, environment.yml); notebooks run in this stack."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
REQUIREMENTS = ROOT / "env" / "requirements.txt"
LOCK = ROOT / "env" / "requirements.lock"
# Addresses and folders that only one machine or company can reach.
FOREIGN = re.compile(r"https?://|file:|--(extra-)?index-url|--find-links|--trusted-host| @ ")


def pins(text: str) -> list[Requirement]:
    lines = (line.rstrip("\\").strip() for line in text.splitlines() if line[:1].isalnum())
    return [Requirement(line) for line in lines]


def lock_problems(requirements: str, lock: str) -> list[str]:
    found = []
    checksum = hashlib.sha256(requirements.encode()).hexdigest()
    if lock.splitlines()[0] != f"# sha256 of requirements.txt: {checksum}":
        found.append("stale")
    locked = {(pin.name, str(pin.specifier)) for pin in pins(lock)}
    found += [
        f"{pin} is missing"
        for pin in pins(requirements)
        if (pin.name, str(pin.specifier)) not in locked
    ]
    entries = re.split(r"^(?=\w)", lock, flags=re.M)[1:]
    found += [f"no hash: {entry}" for entry in entries if "--hash=sha256:" not in entry]
    found += [f"address: {line}" for line in lock.splitlines() if FOREIGN.search(line)]
    return found


def test_every_pin_is_exact_and_stands_once():
    found = pins(REQUIREMENTS.read_text())
    assert {"torch", "intel-extension-for-pytorch", "transformers"} <= {pin.name for pin in found}
    assert len({pin.name for pin in found}) == len(found)
    assert all([spec.operator for spec in pin.specifier] == ["=="] for pin in found)
    assert not FOREIGN.search(REQUIREMENTS.read_text())


def test_the_lock_is_fresh():
    problems = lock_problems(REQUIREMENTS.read_text(), LOCK.read_text())
    assert not problems, f"run `make lock`: {problems}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda req, lock: (req + "# a word\n", lock), "stale"),
        (lambda req, lock: (req, lock.replace("torch==2", "torch==1")), "torch==2.8.0 is missing"),
        (lambda req, lock: (req, lock + "six==1.17.0\n"), "no hash: six==1.17.0\n"),
        (lambda req, lock: (req, "--find-links /wheels\n" + lock), "address: --find-links /wheels"),
    ],
)
def test_a_bad_lock_is_found(change, problem):
    assert problem in lock_problems(*change(REQUIREMENTS.read_text(), LOCK.read_text()))


def test_conda_users_get_the_same_pins():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert dependencies == ["python=3.11", "pip", {"pip": ["-r env/requirements.txt", "-e ."]}]


def run_pytest_on_a_notebook(code: str, home: Path) -> subprocess.CompletedProcess:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        nbformat.write(new_notebook(cells=[new_code_cell(code)]), Path(folder) / "00.ipynb")
        return subprocess.run(
            [sys.executable, "-m", "pytest", "--nbmake", folder],
            cwd=ROOT,
            env=os.environ | {"HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )


def test_a_kernel_of_the_same_name_in_the_home_folder_does_not_take_over(tmp_path):
    planted = tmp_path / ".local" / "share" / "jupyter" / "kernels" / "python3"
    planted.mkdir(parents=True)
    spec = {"argv": ["/bin/false"], "display_name": "another", "language": "python"}
    (planted / "kernel.json").write_text(json.dumps(spec))
    code = f"import sys, helpers; assert sys.prefix == {sys.prefix!r}"
    result = run_pytest_on_a_notebook(code, home=tmp_path)
    assert result.returncode == 0, result.stdout


def test_a_read_only_home_is_replaced():
    code = "import os, pathlib; assert os.access(pathlib.Path.home(), os.W_OK)"
    result = run_pytest_on_a_notebook(code, home=Path("/proc/nowhere"))
    assert result.returncode == 0, result.stdout
    show = subprocess.run(
        ["make", "--silent", "--eval", "show:; @echo $$HOME", "show"],
        cwd=ROOT,
        env=os.environ | {"HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert show.stdout == f"{ROOT / 'build' / 'home'}\n", show.stderr
