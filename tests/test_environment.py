from pathlib import Path

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def requirements():
    lines = (ROOT / "env" / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_every_pin_is_exact_and_stands_once():
    pins = requirements()
    assert len({pin.name for pin in pins}) == len(pins)
    assert all([spec.operator for spec in pin.specifier] == ["=="] for pin in pins)


def test_conda_users_get_the_same_pins():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert dependencies[-1] == {"pip": ["-r env/requirements.txt"]}
    assert any(str(entry).startswith("python=3.11") for entry in dependencies)
