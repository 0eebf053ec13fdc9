"""Which instructions the CPU has, as the kernel reports them.

The notebook that teaches it: ``00_start_here``.
"""

from pathlib import Path

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


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, bool]:
    """Maps each of ``FLAGS``' names to whether the CPU advertises it.

    Raises OSError where ``cpuinfo`` cannot be read, ValueError where it lists no x86 flags.
    A flag is a promise only: a hypervisor or the kernel may still withhold the instruction.
    """
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            present = set(value.split())
            return {label: flag in present for flag, label in FLAGS.items()}
    raise ValueError(f"{cpuinfo} has no line 'flags': this is not an x86 Linux machine")


def bf16_tier(flags: dict[str, bool]) -> str:
    """Says in one line what bf16 can gain on a CPU with these flags (see ``cpu_flags``)."""
    if flags["AMX bf16"]:
        return "AMX: bf16 matrix products run on the tile unit"
    if flags["AVX-512 BF16"]:
        return "AVX-512 BF16 without AMX: bf16 is native, its gain is moderate"
    return "no native bf16: it is emulated, expect it to be slower than fp32"
