"""``torch.distributed`` on Intel oneCCL, started by mpiexec or by torchrun.

    from helpers import ccl

    place = ccl.init()            # or ccl.init("gloo")
    torch.distributed.all_reduce(tensor)

The notebook that teaches it: ``07_collectives``.
"""

import atexit
import contextlib
import importlib
import importlib.util
import itertools
import os
import re
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from helpers.ccl.launch import (
    LaunchError,
    Placement,
    destroy_groups,
    exchange,
    placement,
    rendezvous,
    settle,
)

__all__ = ["Group", "LaunchError", "Placement", "init", "register"]

BINDING = "oneccl_bindings_for_pytorch"
_meetings = itertools.count()


@dataclass(frozen=True)
class Group:
    """What ``init`` found: this rank's place and the backend that really runs."""

    place: Placement
    backend: str
    library: str


def register() -> str:
    """Makes ``init_process_group("ccl")`` work and returns the name of what is behind it.

    Intel's ``oneccl_bindings_for_pytorch`` where it is installed, otherwise the backend of this
    folder, compiled first where needed. Raises ``build.BuildError``.
    """
    import torch.distributed as dist

    from helpers.ccl import build

    with contextlib.suppress(LaunchError):  # who makes the group without init() tells ranks anyhow
        place = placement()
        if place.local_rank is not None:
            _set_variables(place)
    if importlib.util.find_spec(BINDING):
        try:
            return f"{BINDING} {importlib.import_module(BINDING).__version__}"
        except (ImportError, OSError) as cause:
            raise build.BuildError(
                f"{BINDING} is installed and can't be loaded ({cause}): it was made for another "
                f"torch. Remove it, and the course's own backend takes its place: "
                f"{sys.executable} -m pip uninstall {BINDING}"
            ) from cause
    module = build.load()
    if not hasattr(dist.Backend, "CCL"):
        dist.Backend.register_backend("ccl", module.create, devices=["cpu"])
    return f"oneCCL {module.oneccl_version().split()[0]}"


def _remove_orphans() -> None:
    """Removes the shared memory, named PID:N:N, that libfabric left where a rank was killed."""
    for segment in Path("/dev/shm").glob("*:*:*"):
        if not re.fullmatch(r"\d+:\d+:\d+", segment.name):
            continue
        pid = segment.name.partition(":")[0]
        with contextlib.suppress(FileNotFoundError):  # another rank was faster
            if segment.stat().st_uid == os.getuid() and not Path("/proc", pid).exists():
                segment.unlink()


def _set_variables(place: Placement) -> None:
    """oneCCL's and MPI's variables that matter here, where the user has not set them."""
    defaults = {"CCL_LOG_LEVEL": "error"}
    if not any(name.startswith("CCL_WORKER_") for name in os.environ):
        # Its worker threads poll on cores of their own, which nobody has reserved for them.
        defaults["CCL_WORKER_OFFLOAD"] = "0"
    _remove_orphans()
    if place.mpi and os.environ.get("CCL_ATL_TRANSPORT") != "ofi":
        defaults["I_MPI_ROOT"] = sys.prefix
        # MPI's own all-reduce is the fastest while a message fits into the caches, then a ring
        defaults["CCL_ALLREDUCE"] = "direct:0-33554431;ring:33554432-max"
    else:
        defaults |= {
            "CCL_ATL_TRANSPORT": "ofi",
            "CCL_PROCESS_LAUNCHER": "none",
            "CCL_ATL_SHM": "1",  # within a node through shared memory
            "CCL_LOCAL_RANK": str(place.local_rank),
            "CCL_LOCAL_SIZE": str(place.local_size),
            "FI_PROVIDER": "tcp",
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def init(backend: str = "ccl", timeout: timedelta = timedelta(minutes=5)) -> Group:
    """Makes the default process group and says, on rank 0, what it found and where from.

    ``backend`` is "ccl" or "gloo". Where a rank can't have ccl, all use gloo, and that is said.
    ``timeout`` limits the start and each collective. RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set for libraries that look for them.
    Raises LaunchError where the ranks aren't told consistently who and where they are.
    """
    import torch.distributed as dist

    from helpers.ccl import build

    if backend not in ("ccl", "gloo"):
        raise ValueError(f"backend {backend!r}: there are 'ccl' and 'gloo'")
    place = placement()
    root, where = rendezvous(place, timeout)
    # the store may outlive this group: each has keys of its own
    store = dist.PrefixStore(f"group/{next(_meetings)}", root)
    place = settle(place, store, timeout)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = (place.rank, place.world_size, place.local_rank, place.local_size)
    for name, value in zip(names, values, strict=True):
        os.environ.setdefault(name, str(value))
    library, problem = "gloo", ""
    if backend == "ccl":
        _set_variables(place)
        try:
            library = register()
        except build.BuildError as error:
            problem = str(error)
        problems = exchange(store, place, "problem", problem, timeout)
        if problem := next(filter(None, problems), ""):
            backend = library = "gloo"
    if place.rank == 0:
        if problem:
            print(
                f"[ccl] WARNING: rank {problems.index(problem)} has no oneCCL: {problem}\n"
                "[ccl] WARNING: ALL RANKS USE GLOO, and what is measured is gloo",
                flush=True,
            )
        print(
            f"[ccl] {place.world_size} ranks, {place.local_size} on this node, "
            f"from {place.source}; master {where}; backend {backend} ({library})",
            flush=True,
        )
    atexit.register(destroy_groups)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout
    )
    return Group(place, backend, library)
