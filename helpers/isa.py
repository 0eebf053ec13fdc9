"""Which instructions the CPU has, the kernel lets us use, and a library really ran.

The notebooks that teach it: ``01_what_can_this_cpu_do`` and ``02_bf16_and_amx``.
"""

import ctypes
import errno
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.tables import Table

CPUINFO = Path("/proc/cpuinfo")

# Names of /proc/cpuinfo, in the order in which Intel brought them.
FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512 F",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_fp16": "AVX-512 FP16",
    "amx_tile": "AMX tiles",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX bf16",
}

# Values of ONEDNN_MAX_CPU_ISA, weakest first. Source: oneDNN 3.7 developer guide, "CPU Dispatcher
# Control". oneDNN ignores a value that it does not know, without a word.
MAX_ISA = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
    "AVX512_CORE_BF16",
    "AVX10_1_512",
    "AVX10_1_512_AMX",
    "AVX10_1_512_AMX_FP16",
    "DEFAULT",
)
ICE_LAKE = "AVX512_CORE_VNNI"

# Primitives of oneDNN that multiply matrices.
PRODUCTS = ("matmul", "inner_product", "convolution", "deconvolution", "rnn")


class IsaError(RuntimeError):
    """A program that had to show its kernels failed: ``reason`` in short, the log's end beside."""

    def __init__(self, reason: str, log: str = ""):
        self.reason = reason
        super().__init__(f"{reason}\n--- end of its log ---\n{log}" if log else reason)


@dataclass(frozen=True)
class Finding:
    """What a check found: ``works``, and ``detail`` to read."""

    works: bool
    detail: str

    def __str__(self):
        return self.detail


def _cpuinfo_value(cpuinfo: Path, field: str) -> str | None:
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None


def _present_flags(cpuinfo: Path) -> set[str]:
    flags = _cpuinfo_value(cpuinfo, "flags")
    if flags is None:
        raise ValueError(f"{cpuinfo} has no line 'flags': this is not an x86 Linux machine")
    return set(flags.split())


def cpu_flags(cpuinfo: Path = CPUINFO) -> dict[str, bool]:
    """Maps each of ``FLAGS``' labels to whether the CPU advertises it.

    Raises OSError where ``cpuinfo`` cannot be read, ValueError where it lists no x86 flags.
    A flag is a promise only: a hypervisor or the kernel may still withhold the instruction.
    """
    present = _present_flags(cpuinfo)
    return {label: flag in present for flag, label in FLAGS.items()}


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """The CPU's name as the kernel reports it; a hypervisor may hide the real one."""
    return _cpuinfo_value(cpuinfo, "model name") or "unknown"


def under_hypervisor(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this is a virtual machine, whose hypervisor decides which flags it shows.

    Raises the errors of ``cpu_flags``.
    """
    return "hypervisor" in _present_flags(cpuinfo)


def bf16_tier(flags: dict[str, bool]) -> str:
    """Says in one line what bf16 can gain on a CPU with these flags (see ``cpu_flags``)."""
    if flags["AMX bf16"]:
        return "AMX: bf16 matrix products run on the tile unit"
    if flags["AVX-512 BF16"]:
        return "AVX-512 BF16 without AMX: bf16 is native, its gain is moderate"
    return "no native bf16: it is emulated, expect it to be slower than fp32"


def native_bf16(flags: dict[str, bool] | None = None, cap: str | None = None) -> bool:
    """Whether bf16 products have instructions of their own, which makes them faster than fp32.

    ``flags`` are ``cpu_flags()``, ``cap`` is what ``ONEDNN_MAX_CPU_ISA`` holds: by default, this
    process's. oneDNN ignores a cap that it does not know, and so does this.
    """
    flags = cpu_flags() if flags is None else flags
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "") if cap is None else cap
    capped = cap.upper() in MAX_ISA[: MAX_ISA.index("AVX512_CORE_BF16")]
    return (flags["AVX-512 BF16"] or flags["AMX bf16"]) and not capped


def kernel_knows_amx(release: str | None = None) -> bool:
    """Whether a Linux release such as "6.1.0-13-amd64" can hand out AMX tiles: 5.16 or later.

    Source: Linux 5.16 release notes; Documentation/arch/x86/xstate.rst. Without ``release``:
    the running kernel. Raises ValueError where no version can be read.
    """
    release = release or platform.release()
    version = re.match(r"(\d+)\.(\d+)", release)
    if not version:
        raise ValueError(f"cannot read a kernel version out of {release!r}")
    return (int(version[1]), int(version[2])) >= (5, 16)


# From Linux' asm/prctl.h and Documentation/arch/x86/xstate.rst.
_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP, _ARCH_GET_XCOMP_PERM, _ARCH_REQ_XCOMP_PERM = 0x1021, 0x1022, 0x1023
_XFEATURE_XTILEDATA = 18


def _arch_prctl(code: int, argument) -> int:
    """Returns 0, or the errno of the failure."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(code), argument)
    return ctypes.get_errno() if failed else 0


def tile_permission(arch_prctl: Callable[[int, object], int] = _arch_prctl) -> Finding:
    """Asks the kernel for the AMX tile registers, as oneDNN does before its first AMX kernel.

    The permission is this process's own, and harmless where it is not used. ``arch_prctl`` takes
    a code and an argument and returns 0 or an errno.
    """
    if platform.machine() != "x86_64":
        return Finding(False, f"no AMX on {platform.machine()}")
    mask = ctypes.c_uint64()
    if arch_prctl(_ARCH_GET_XCOMP_SUPP, ctypes.byref(mask)):
        return Finding(False, "the kernel cannot hand out tiles: AMX needs Linux 5.16 or later")
    if not mask.value >> _XFEATURE_XTILEDATA & 1:
        return Finding(False, "the kernel sees no tile registers: no AMX, or a hypervisor masks it")
    refused = arch_prctl(_ARCH_REQ_XCOMP_PERM, ctypes.c_ulong(_XFEATURE_XTILEDATA))
    if refused:
        return Finding(False, f"the kernel refuses the tiles: {errno.errorcode[refused]}")
    arch_prctl(_ARCH_GET_XCOMP_PERM, ctypes.byref(mask))
    granted = bool(mask.value >> _XFEATURE_XTILEDATA & 1)
    return Finding(granted, "granted" if granted else "asked for, not granted")


@dataclass(frozen=True)
class Kernel:
    """Calls of one oneDNN implementation: ``source`` is the input's type, times in ms."""

    primitive: str
    implementation: str
    source: str
    calls: int
    milliseconds: float


@dataclass(frozen=True)
class Dispatch:
    """What a program ran: its kernels, the most time-consuming first, and its own output.

    ``isa`` is the instruction set that oneDNN says it may use, ``unreadable`` counts the lines of
    its log that could not be parsed. ``output`` is the program's standard output without the log.
    """

    kernels: list[Kernel]
    output: str
    isa: str
    unreadable: int = 0

    @property
    def products(self) -> list[Kernel]:
        """The kernels that multiply matrices."""
        return [kernel for kernel in self.kernels if kernel.primitive in PRODUCTS]

    @property
    def uses_amx(self) -> bool:
        return any("amx" in kernel.implementation for kernel in self.products)

    @property
    def uses_bf16(self) -> bool:
        """Whether a matrix product had bf16 inputs; they may still be emulated."""
        return any(kernel.source == "bf16" for kernel in self.products)

    @property
    def json(self):
        """The last line of the output, read as JSON. Raises IsaError where it is none."""
        lines = self.output.splitlines() or [""]
        try:
            return json.loads(lines[-1])
        except json.JSONDecodeError:
            raise IsaError(f"the program's last line is not JSON: {lines[-1]!r}") from None

    def _repr_html_(self) -> str:
        table = Table(
            {
                "primitive": kernel.primitive,
                "kernel": kernel.implementation,
                "input": kernel.source,
                "calls": kernel.calls,
                "ms": kernel.milliseconds,
            }
            for kernel in self.kernels
        )
        notes = f"<p>oneDNN may use: {self.isa or 'not told, it ran nothing'}"
        if self.unreadable:
            notes += f"; {self.unreadable} lines of its log could not be read"
        return table._repr_html_() + notes + "</p>"


_MARKER = "onednn_verbose,"
_ISA_LINE = "onednn_verbose,v1,info,cpu,isa:"


def parse_verbose(log: str) -> Dispatch:
    """Separates oneDNN's verbose lines from a program's output and sums them up by kernel.

    Source of the format (version 1, oneDNN 3): developer guide, "Verbose Mode". PyTorch and IPEX
    carry a oneDNN each; both write it.
    """
    totals: dict[tuple[str, str, str], tuple[int, float]] = {}
    output, isa, unreadable = [], "", 0
    for line in log.splitlines():
        own, marker, rest = line.partition(_MARKER)
        if own or not marker:
            output.append(own)
        if line.startswith(_ISA_LINE):
            isa = line.removeprefix(_ISA_LINE)
        if not re.match(r"(v1,primitive,)?(exec|profile)\b", rest):
            continue
        try:
            key, milliseconds = _parse_exec(rest)
        except ValueError:
            unreadable += 1
            continue
        calls, total = totals.get(key, (0, 0.0))
        totals[key] = calls + 1, total + milliseconds
    kernels = [Kernel(*key, *sums) for key, sums in totals.items()]
    kernels.sort(key=lambda kernel: -kernel.milliseconds)
    return Dispatch(kernels, "\n".join(output), isa, unreadable)


def _parse_exec(fields: str) -> tuple[tuple[str, str, str], float]:
    version, *fields = fields.split(",")
    if version != "v1" or len(fields) < 11:
        raise ValueError("not a line of verbose format 1")
    primitive, implementation, _, memory = fields[3:7]
    source = memory.split(":")[1:2]  # src:bf16:...
    if not source:
        raise ValueError("no input type")
    return (primitive, implementation, source[0]), float(fields[-1])


def _stop(process: subprocess.Popen) -> None:
    """Ends the program and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def dispatched(
    program: str | Sequence[str],
    *,
    max_isa: str | None = None,
    env: dict[str, str] | None = None,
    timeout: float = 120,
) -> Dispatch:
    """Runs a fresh Python process and reports which oneDNN kernels it really dispatched.

    ``program`` is code, or the interpreter's arguments such as ``["-m", "timeit"]``. ``max_isa``,
    one of ``MAX_ISA``, caps the instructions (None: no cap, whatever this process inherited);
    oneDNN reads it once per process, hence the fresh one. ``env`` adds variables. ``timeout`` is
    in seconds. The log goes to a file: a full pipe would hang the program.

    Raises ValueError for an unknown ``max_isa``, IsaError where the program fails, dies by a
    signal or is too slow; a program that is stopped takes along what it started.
    """
    if max_isa is not None and max_isa not in MAX_ISA:
        raise ValueError(f"max_isa = {max_isa!r} is refused; allowed are {', '.join(MAX_ISA)}")
    arguments = ["-c", program] if isinstance(program, str) else list(program)
    variables = os.environ | {
        "ONEDNN_MAX_CPU_ISA": max_isa or "DEFAULT",
        "ONEDNN_VERBOSE": "1",
        "ONEDNN_VERBOSE_TIMESTAMP": "0",
        "PYTHONUNBUFFERED": "1",  # else lines of Python and of oneDNN cut each other in two
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=variables | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
            failure = _failure(code)
        except subprocess.TimeoutExpired:
            failure = f"the program did not end within {timeout:g} s"
        finally:
            _stop(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if failure:
        tail = "\n".join(texts).strip().splitlines()[-20:]
        raise IsaError(failure, "\n".join(tail))
    return parse_verbose(texts[0])


def _failure(code: int) -> str | None:
    if code >= 0:
        return f"the program ended with exit code {code}" if code else None
    name = signal.Signals(-code)
    return f"the program was killed by {name.name} ({signal.strsignal(name)})"


AMX_PROGRAM = """
import torch

a, b = torch.randn(512, 512), torch.randn(512, 512)
error = ((a.bfloat16() @ b.bfloat16()).float() - a @ b).norm() / (a @ b).norm()
assert error < 0.02, f"wrong result: relative error {error:.2f}"
"""


def probe_amx(
    flags: dict[str, bool] | None = None, program: str = AMX_PROGRAM, timeout: float = 60
) -> Finding:
    """Multiplies two bf16 matrices in a child process and sees whether AMX ran, and was right.

    An AMX that is advertised but faults kills the child, not the caller. ``flags`` are those of
    ``cpu_flags`` (None: this CPU's), ``program`` is the child's code, ``timeout`` in seconds.
    """
    flags = cpu_flags() if flags is None else flags
    if not (flags["AMX tiles"] and flags["AMX bf16"]):
        return Finding(False, "not advertised")
    try:
        ran = dispatched(program, timeout=timeout)
    except IsaError as error:
        return Finding(False, f"advertised, but faults: {error.reason}")
    if ran.uses_amx:
        return Finding(True, "works")
    chosen = ", ".join(kernel.implementation for kernel in ran.products) or "no oneDNN kernel"
    return Finding(False, f"advertised, but not used: the product ran on {chosen}")


_LIBRARY_PROGRAM = """
import importlib.metadata, json, torch

onednn = torch.ops.mkldnn
seen = {
    f"PyTorch {torch.__version__}: vector level": torch.backends.cpu.get_cpu_capability(),
    "PyTorch: AVX-512 BF16": torch.cpu._is_avx512_bf16_supported(),
    "PyTorch: AMX tiles": torch.cpu._is_amx_tile_supported(),
    "PyTorch: oneDNN takes bf16": onednn._is_mkldnn_bf16_supported(),
}
try:
    version = importlib.metadata.version("intel-extension-for-pytorch")
except importlib.metadata.PackageNotFoundError:
    seen["IPEX"] = "not installed"
else:
    from intel_extension_for_pytorch import _C as ipex
    seen[f"IPEX {version}: the CPU's level"] = ipex._get_highest_cpu_support_isa_level()
    seen["IPEX: level in use"] = ipex._get_current_isa_level()
    seen["IPEX: its oneDNN's level"] = ipex._get_current_onednn_isa_level()
print(json.dumps(seen))
"""


def library_view(env: dict[str, str] | None = None, timeout: float = 120) -> dict[str, str | bool]:
    """What PyTorch, and IPEX where it is installed, believe that the CPU can do.

    They are asked in a fresh process, since importing IPEX replaces operators. ``env`` adds
    variables, ``timeout`` is in seconds. Raises IsaError where a library does not import.
    """
    return dispatched(_LIBRARY_PROGRAM, env=env, timeout=timeout).json
