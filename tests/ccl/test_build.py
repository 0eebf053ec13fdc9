"""The build: once, again when something changed, and a clear word where it can't be."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.ccl import build
from helpers.ccl.build import BuildError


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache, a oneCCL of two empty files, and this machine's compiler."""
    if not shutil.which("c++"):
        pytest.skip("the machine has no C++ compiler")
    for name in ("lib/libccl.so.1", "include/oneapi/ccl.hpp", "include/oneapi/ccl/config.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("CCL_ROOT", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "_directory", lambda: tmp_path / "cache" / build.NAME)
    monkeypatch.delitem(sys.modules, build.NAME, raising=False)
    return tmp_path


@pytest.fixture
def compiled(fresh, monkeypatch):
    """How often it was compiled; the result is a file that is no library."""
    calls = []

    def compile(recipe, compiler):
        calls.append(compiler)
        build._directory().mkdir(exist_ok=True)
        (build._directory() / f"{build.NAME}.so").write_text("no library")

    monkeypatch.setattr(build, "_compile", compile)
    return calls


def compiler(folder, monkeypatch, script: str) -> None:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_compiled_once(compiled):
    assert [build.build(), build.build()] == [True, False]
    assert len(compiled) == 1


def test_compiled_anew_when_oneccl_changes(compiled, fresh):
    build.build()
    (fresh / "include/oneapi/ccl/config.h").write_text("#define CCL_MINOR_VERSION 16")
    assert build.build()


def test_compiled_anew_when_torch_changes(compiled, monkeypatch):
    import torch

    build.build()
    monkeypatch.setattr(torch, "__version__", "2.9.0")
    assert build.build()


def test_compiled_anew_when_the_source_changes(compiled, fresh, monkeypatch):
    build.build()
    other = fresh / "backend.cpp"
    other.write_text(build.SOURCE.read_text() + "\n")
    monkeypatch.setattr(build, "SOURCE", other)
    assert build.build()


def test_compiled_anew_when_the_compiler_changes(compiled, fresh, monkeypatch):
    build.build()
    compiler(fresh, monkeypatch, "echo other 99.1")
    assert build.build()
    assert compiled[-1] == "other 99.1"


def test_a_node_without_compiler_uses_what_was_built(compiled, monkeypatch):
    build.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not build.build()


def test_compiled_anew_after_an_interruption(compiled, monkeypatch):
    build.build()
    (build._directory() / "built.json").write_text('{"torch": "2.')
    assert build.build()


def test_no_compiler(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C.. compiler: 'no-such-compiler'.*apt-get install"):
        build.build()


def test_old_compiler(fresh, monkeypatch):
    compiler(
        fresh,
        monkeypatch,
        'case "$*" in *--version*) echo old 4.8;; *) echo planted >&2; exit 1;; esac',
    )
    with pytest.raises(
        BuildError, match=r"\(old 4.8\) is too old or broken.*planted.*GCC 9 or newer"
    ):
        build.build()


def test_no_oneccl(fresh):
    (fresh / "lib/libccl.so.1").unlink()
    with pytest.raises(BuildError, match="oneCCL is not installed.*pip install .*oneccl-cpu-devel"):
        build.build()


def test_no_python_headers(fresh, monkeypatch):
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(fresh))
    with pytest.raises(BuildError, match=r"Python.h.*sudo apt-get install python3.\d+-dev"):
        build.build()


def test_source_that_does_not_fit_torch(fresh, monkeypatch):
    compiler(
        fresh,
        monkeypatch,
        'case "$*" in *backend.cpp*) echo "error: no member named planted" >&2; exit 1;; '
        '*) exec c++ "$@";; esac',
    )
    with pytest.raises(BuildError, match="written for torch 2.8.*no member named planted") as error:
        build.build()
    log = str(error.value).rpartition(": ")[2]
    assert "planted" in Path(log).read_text()
    with pytest.raises(BuildError):  # the failure is not taken for a build
        build.build()


def test_library_that_cannot_be_loaded(compiled):
    with pytest.raises(
        BuildError, match="can't be loaded.*pip install --force-reinstall oneccl-cpu"
    ):
        build.load()


def test_another_process_builds(compiled, monkeypatch):
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.3)
    with build._locked(), pytest.raises(BuildError, match="another process has held"):
        build.build()


def test_helpers_ccl_imports_without_torch():
    script = "import sys, helpers.ccl; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environment)
