"""Threads, affinity, allocator and communication variables of the ranks of one node.

``python -m helpers.runtime 2`` explains them for two ranks on this machine. The notebook that
teaches them: ``05_threads_affinity_memory``.
"""

import argparse
import ctypes
import ctypes.util
import os
import pkgutil
import resource
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# A rank needs so many cores before one of them is worth giving to oneCCL.
CORES_FOR_A_WORKER = 8
# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
ALLOCATORS = ("tcmalloc", "tcmalloc_minimal", "jemalloc")


class RuntimeLimit(ValueError):
    """The hardware can't hold what was asked for; the message says what it holds."""


@dataclass(frozen=True)
class Core:
    """A physical core: its socket, and its hardware threads (numbers of logical CPUs)."""

    socket: int
    threads: tuple[int, ...]


@dataclass(frozen=True)
class Hardware:
    """The cores that this process may use, socket by socket.

    ``quota`` is the CPU time that a container may use, in cores; None where there is no limit.
    """

    cores: tuple[Core, ...]
    quota: float | None = None

    @property
    def usable(self) -> tuple[Core, ...]:
        """As many cores as the quota can keep busy, at least one."""
        if self.quota is None:
            return self.cores
        return self.cores[: max(1, int(self.quota))]


@dataclass(frozen=True)
class Setting:
    """A variable's value, and why."""

    value: str
    reason: str


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _quota(cgroups: Path) -> float | None:
    """A container's limit in cores: cgroup v2's cpu.max, or v1's cpu.cfs_quota_us."""
    try:
        limit, period = (cgroups / "cpu.max").read_text().split()
    except FileNotFoundError:
        limit = _number(cgroups / "cpu/cpu.cfs_quota_us")
        period = _number(cgroups / "cpu/cpu.cfs_period_us")
    if limit in ("max", None) or not period or int(limit) <= 0:
        return None
    return int(limit) / int(period)


def hardware(system: Path = Path("/sys"), allowed: set[int] | None = None) -> Hardware:
    """Reads this machine's cores, as far as cpusets, affinity and cgroup quotas allow them.

    ``allowed`` are numbers of logical CPUs, by default those of this process. A CPU whose topology
    the kernel doesn't tell counts as a core of socket 0.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    threads: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(allowed):
        topology = system / f"devices/system/cpu/cpu{cpu}/topology"
        socket, core = (_number(topology / name) for name in ("physical_package_id", "core_id"))
        # a virtual machine may say -1
        place = (max(socket or 0, 0), core if core is not None and core >= 0 else cpu)
        threads.setdefault(place, []).append(cpu)
    cores = tuple(Core(socket, tuple(cpus)) for (socket, _), cpus in sorted(threads.items()))
    return Hardware(cores, _quota(system / "fs/cgroup"))


def shares(machine: Hardware, ranks: int) -> list[tuple[Core, ...]]:
    """The cores of each rank: equally many, no core twice, over one socket only where possible.

    Raises RuntimeLimit for less than one rank, and for more ranks than usable cores.
    """
    cores = machine.usable
    if not 1 <= ranks <= len(cores):
        raise RuntimeLimit(
            f"{ranks} ranks don't go on {len(cores)} cores (one a rank at least): "
            f"start 1 to {len(cores)} ranks on this node"
        )
    by_socket: dict[int, list[Core]] = {}
    for core in cores:
        by_socket.setdefault(core.socket, []).append(core)
    if ranks % len(by_socket) == 0 and len({len(group) for group in by_socket.values()}) == 1:
        groups = list(by_socket.values())
    else:
        groups = [list(cores)]
    result = []
    for group in groups:
        each = len(group) // (ranks // len(groups))
        result += [tuple(group[i * each : (i + 1) * each]) for i in range(ranks // len(groups))]
    return result


def _openmp(prefix: Path) -> str | None:
    """Intel's OpenMP runtime, where pip or the system has it."""
    found = prefix / "lib/libiomp5.so"
    return str(found) if found.exists() else ctypes.util.find_library("iomp5")


def _allocator() -> str | None:
    return next(filter(None, map(ctypes.util.find_library, ALLOCATORS)), None)


def settings(
    machine: Hardware,
    ranks: int,
    workers: int | None = None,
    preload: tuple[str, ...] | None = None,
) -> dict[str, Setting]:
    """The variables for so many ranks on a node, the same for all of them, by name.

    ``workers`` is the number of cores that each rank leaves to oneCCL's threads (default: one
    where a rank has 8 cores or more, else none); ``preload`` are libraries for LD_PRELOAD
    (default: tcmalloc or jemalloc and Intel's OpenMP, where installed). Raises RuntimeLimit where
    a rank would have no core left to compute.

    Sources: Intel MPI and oneCCL environment variable references; OpenMP 5.0, section 6.
    """
    parts = shares(machine, ranks)
    cores = min(map(len, parts))
    if workers is None:
        workers = 1 if cores >= CORES_FOR_A_WORKER else 0
    if not 0 <= workers < cores:
        raise RuntimeLimit(
            f"{workers} of {cores} cores a rank for oneCCL leave none to compute: "
            f"choose 0 to {cores - 1} workers"
        )
    if preload is None:
        preload = tuple(filter(None, (_allocator(), _openmp(Path(sys.prefix)))))
    # the workers get the rank's last cores, so that computing ones stay together
    compute = [part[: cores - workers] for part in parts]
    helping = [part[cores - workers : cores] for part in parts]
    masks = [hex(sum(1 << core.threads[0] for core in part)) for part in compute]
    found = {
        "OMP_NUM_THREADS": Setting(
            str(cores - workers),
            f"{len(machine.usable)} cores, {ranks} ranks: {cores} each"
            + (f", less {workers} for oneCCL" if workers else "")
            + "; one thread a core, since two would share its matrix unit",
        ),
        "I_MPI_PIN_DOMAIN": Setting(
            f"[{','.join(masks)}]",
            "MPI binds each rank to its own computing cores; a mask a rank, no core twice",
        ),
    }
    if any("iomp5" in library for library in preload):
        found["KMP_AFFINITY"] = Setting(
            "granularity=fine,compact,1,0", "Intel's OpenMP keeps each thread on a core of its own"
        )
        found["KMP_BLOCKTIME"] = Setting(
            "1", "a thread with nothing to do sleeps after 1 ms, and leaves its core to others"
        )
        found["KMP_HW_SUBSET"] = Setting("1T", "one thread a core, as above")
    else:
        found["OMP_PROC_BIND"] = Setting("close", "each thread keeps its core, neighbours close by")
        found["OMP_PLACES"] = Setting("cores", "a place is a core, not a hardware thread")
    if workers:
        found["CCL_WORKER_COUNT"] = Setting(
            str(workers), "oneCCL's threads communicate while the others compute"
        )
        found["CCL_WORKER_AFFINITY"] = Setting(
            ",".join(str(core.threads[0]) for part in helping for core in part),
            "their cores, rank by rank; none of them computes",
        )
    else:
        found["CCL_WORKER_OFFLOAD"] = Setting(
            "0", f"cores a rank: {cores}; a polling worker would take one that computes"
        )
    if any("jemalloc" in library for library in preload):
        found["MALLOC_CONF"] = Setting(
            "dirty_decay_ms:-1,muzzy_decay_ms:-1", "jemalloc keeps freed memory only if told to"
        )
    if preload:
        found["LD_PRELOAD"] = Setting(
            ":".join(preload), "an allocator that keeps freed memory, and Intel's OpenMP"
        )
    return found


def variables(found: Mapping[str, Setting]) -> dict[str, str]:
    """Names and values alone, for an environment."""
    return {name: setting.value for name, setting in found.items()}


def explain(found: Mapping[str, Setting]) -> str:
    """A line for each variable: its value, and why."""
    return "\n".join(
        f"{name}={setting.value}   # {setting.reason}" for name, setting in found.items()
    )


def tune() -> str:
    """Tunes this process for training, for good; returns a line that says what was done.

    Freed memory is kept, as notebook 05's variables for glibc do it, but without a new start:
    mallopt(3). An allocator that was preloaded keeps its own ways. And there is a thread a core,
    unless OMP_NUM_THREADS says otherwise. The notebook that measures it:
    ``05_threads_affinity_memory``.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(hardware().usable))
    other = next((name for name in ALLOCATORS if has_loaded(f"lib{name}")), None)
    libc = ctypes.CDLL(None)
    if other:
        kept = f"{other} allocates"
    elif hasattr(libc, "mallopt") and all(
        libc.mallopt(option, value) for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    ):
        kept = "freed memory is kept"
    else:
        kept = "this C library can't be told to keep freed memory"
    return f"{kept}; {torch.get_num_threads()} threads"


def has_loaded(library: str) -> bool:
    """Whether a shared library of this name is in memory, by LD_PRELOAD for example."""
    return library in Path("/proc/self/maps").read_text()


def memory() -> dict[str, int]:
    """The bytes of memory that this process holds "now", and its "peak"."""
    status = Path("/proc/self/status").read_text()
    names = {"now": "VmRSS:", "peak": "VmHWM:"}
    return {what: 1024 * int(status.partition(name)[2].split()[0]) for what, name in names.items()}


class Rank:
    """An object in a process that can be pinned and watched, for a ``helpers.workers.Worker``.

    ``target`` names its class, as in "helpers.finetune:FineTuning". ``load`` imports and builds it:
    several processes start one after the other, each with variables of its own, and load at the
    same time. All other methods are the object's.
    """

    def __init__(self, target: str, *arguments):
        self._build = target, arguments
        self._object = None

    def load(self) -> None:
        name, arguments = self._build
        self._object = pkgutil.resolve_name(name)(*arguments)

    def value(self, name: str):
        """An attribute of the object."""
        return getattr(self._object, name)

    def pin(self, cpus: Iterable[int]) -> None:
        """Moves all threads that the process has to these logical CPUs, as ``taskset -ap`` does."""
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus)

    def cpus(self) -> set[int]:
        """The logical CPUs that its threads may use."""
        threads = Path("/proc/self/task").iterdir()
        return set().union(*(os.sched_getaffinity(int(thread.name)) for thread in threads))

    def faults(self) -> int:
        """Minor page faults since its start: pages that the kernel gave it, and cleared."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    def memory(self) -> dict[str, int]:
        """``helpers.runtime.memory`` of its process."""
        return memory()

    def has_loaded(self, library: str) -> bool:
        """``helpers.runtime.has_loaded`` in its process."""
        return has_loaded(library)

    def __getattr__(self, name: str):
        if self._object is None:
            raise AttributeError(f"no {name!r} yet: {self._build[0]} is not loaded; call load")
        return getattr(self._object, name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m helpers.runtime", description=__doc__)
    parser.add_argument("ranks", type=int, nargs="?", default=1)
    parser.add_argument("--workers", type=int)
    options = parser.parse_args()
    try:
        print(explain(settings(hardware(), options.ranks, options.workers)))
    except RuntimeLimit as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
