"""Compiles the backend once and loads it: ``python -m helpers.ccl.build``.

The notebook that uses it: ``07_collectives``.
"""

import atexit
import fcntl
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).with_name("backend.cpp")
NAME = "ccl_backend"
LOCK_SECONDS = 600
DRAIN_SECONDS = 10  # for callbacks that still run when the process ends
REINSTALL = (
    f"{sys.executable} -m pip install --force-reinstall oneccl-cpu==2021.15.2 "
    "oneccl-cpu-devel==2021.15.2 impi-rt==2021.15.0"
)


class BuildError(RuntimeError):
    """The backend can't be compiled or loaded; the message says why and what to do."""


def _directory() -> Path:
    return Path(sys.prefix) / "share" / NAME


def _oneccl() -> Path:
    """The folder with oneCCL's ``include`` and ``lib``: oneAPI's, or where pip puts them."""
    root = Path(os.environ.get("CCL_ROOT", sys.prefix))
    for needed in ("lib/libccl.so.1", "include/oneapi/ccl.hpp"):
        if not (root / needed).exists():
            raise BuildError(
                f"oneCCL is not installed: no {root / needed}. Install it: {REINSTALL}"
            )
    return root


def _compiler() -> str | None:
    """First line of the compiler's ``--version``, None where there is no compiler."""
    command = os.environ.get("CXX", "c++")
    if not shutil.which(command):
        return None
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    return answer.stdout.partition("\n")[0]


def _check_compiler(compiler: str | None) -> None:
    command = os.environ.get("CXX", "c++")
    if compiler is None:
        raise BuildError(
            f"no C++ compiler: {command!r} is not found. "
            "On Debian or Ubuntu: sudo apt-get install g++; then run env/setup.sh again"
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        raise BuildError(
            f"no {headers / 'Python.h'}. On Debian or Ubuntu: "
            f"sudo apt-get install python{sysconfig.get_python_version()}-dev"
        )
    probe = subprocess.run(
        [command, "-std=c++17", "-fsyntax-only", "-x", "c++", "-"],
        input="#include <optional>\nstd::optional<int> number;\n"
        "#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 9\n#error old\n#endif\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    if probe.returncode:
        raise BuildError(
            f"the compiler ({compiler}) is too old or broken: it can't compile a small C++17 "
            f"program ({probe.stderr.strip()}). GCC 9 or newer is needed"
        )


def _recipe() -> dict[str, str]:
    """What the result depends on."""
    import torch

    return {
        "source": SOURCE.read_text(),
        "python": sys.version,
        "torch": torch.__version__,
        "oneCCL": (_oneccl() / "include/oneapi/ccl/config.h").read_text(),
    }


def _built(recipe: dict[str, str], compiler: str | None) -> bool:
    """Whether the library is there, and fits. Without a compiler, any compiler's is good."""
    if not (_directory() / f"{NAME}.so").exists():
        return False
    try:
        found = json.loads((_directory() / "built.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return found == recipe | {"compiler": compiler or found.get("compiler")}


@contextmanager
def _locked():
    """One rank builds, the others wait. The lock ends with its process."""
    path = _directory().with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as cause:
        raise BuildError(f"no place for the backend: {cause}") from cause
    with file:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has held {path} for {LOCK_SECONDS} s: end it"
                    ) from None
                time.sleep(0.1)
        yield


def _command(target: Path) -> list[str]:
    """The compiler's command line, as torch.utils.cpp_extension would make it on Linux.

    cpp_extension itself writes a file for ninja, which breaks where a path holds a space.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime"
    import torch
    from torch.utils import cpp_extension

    root = _oneccl()
    macros = {
        "TORCH_EXTENSION_NAME": NAME,
        "TORCH_API_INCLUDE_EXTENSION_H": "",
        "_GLIBCXX_USE_CXX11_ABI": int(torch._C._GLIBCXX_USE_CXX11_ABI),
    }
    for part in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):
        if value := getattr(torch._C, f"_PYBIND11_{part}", None):
            macros[f"PYBIND11_{part}"] = f'"{value}"'
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include"), root / "include"]
    libraries = ("c10", "torch_cpu", "torch", "torch_python", "ccl")
    return [
        os.environ.get("CXX", "c++"),
        *("-std=c++17", "-O2", "-fPIC", "-shared"),
        *(f"-D{name}={value}" for name, value in macros.items()),
        *(f"-I{path}" for path in includes),
        str(SOURCE),
        *("-o", str(target)),
        *(f"-L{path}" for path in (*cpp_extension.library_paths(), root / "lib")),
        *(f"-l{library}" for library in libraries),
        # an RPATH also serves the libraries that libccl opens by itself (MPI, libfabric)
        *("-Wl,--disable-new-dtags", f"-Wl,-rpath,{root}/lib"),
    ]


def _compile(recipe: dict[str, str], compiler: str) -> None:
    directory = _directory()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    print(f"[ccl] compiling the backend for torch {recipe['torch']} with {compiler}", flush=True)
    start = time.monotonic()
    log = directory / "build.log"
    try:
        with log.open("w") as output:
            subprocess.run(
                _command(directory / f"{NAME}.so"),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=LOCK_SECONDS,
                check=True,
            )
    except (subprocess.SubprocessError, OSError) as cause:
        lines = log.read_text().splitlines()
        errors = [line for line in lines if "error" in line.lower()]
        raise BuildError(
            f"the backend doesn't compile with torch {recipe['torch']} and {compiler} "
            f"(it is written for torch 2.8): {errors[0] if errors else cause}. All of it: {log}"
        ) from cause
    print(f"[ccl] compiled in {time.monotonic() - start:.0f} s: {directory}", flush=True)


def build() -> bool:
    """Compiles the backend where that is not done yet; True where it had to be.

    It is compiled anew where its source, Python, torch, oneCCL or the compiler has changed.
    Raises BuildError.
    """
    recipe, compiler = _recipe(), _compiler()
    with _locked():
        if _built(recipe, compiler):
            return False
        _check_compiler(compiler)
        _compile(recipe, compiler)
        built = json.dumps(recipe | {"compiler": compiler})
        (_directory() / "built.json").write_text(built)
        return True


def load() -> ModuleType:
    """The backend's Python module, compiled first where needed. Raises BuildError."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    build()
    spec = importlib.util.spec_from_file_location(NAME, _directory() / f"{NAME}.so")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as cause:
        raise BuildError(
            f"the backend can't be loaded: {cause}. Install oneCCL again: {REINSTALL}"
        ) from cause
    sys.modules[NAME] = module
    atexit.register(module.drain, timedelta(seconds=DRAIN_SECONDS))
    return module


if __name__ == "__main__":
    try:
        if not build():
            print(f"[ccl] the backend is up to date: {_directory()}")
    except BuildError as error:
        sys.exit(f"[ccl] ERROR: {error}")
