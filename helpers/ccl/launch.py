"""Which rank am I, and where do the others meet? Contradictions are refused.

The notebook that teaches it: ``07_collectives``.
"""

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from helpers import network

# Each launcher's names for: rank, world size, local rank, local size.
LAUNCHERS = {
    "torchrun's variables": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Intel MPI's mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
OTHER_LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "Open MPI", "SLURM_NTASKS": "Slurm's srun"}


class LaunchError(RuntimeError):
    """The ranks are not told, or not told consistently, who and where they are."""


@dataclass(frozen=True)
class Placement:
    """A rank's place: in the world, and among the ranks of its node. ``source`` told it."""

    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    source: str
    mpi: bool = False


def _integer(variables: Mapping[str, str], name: str) -> int | None:
    if name not in variables:
        return None
    try:
        return int(variables[name])
    except ValueError:
        raise LaunchError(f"{name}={variables[name]!r} is not a whole number") from None


def _told(variables: Mapping[str, str], source: str) -> Placement | None:
    names = LAUNCHERS[source]
    values = [_integer(variables, name) for name in names]
    for (name, value), (bound, limit) in zip(
        zip(names[::2], values[::2], strict=True),
        zip(names[1::2], values[1::2], strict=True),
        strict=True,
    ):
        if (value is None) != (limit is None):
            missing = name if value is None else bound
            raise LaunchError(f"{missing} is not set: {name} and {bound} go together")
        if value is not None and not 0 <= value < limit:
            raise LaunchError(f"{name}={value} is out of range: {bound} is {limit}")
    rank, size, local_rank, local_size = values
    if rank is None:
        return None
    if local_size is not None and (local_size > size or local_rank > rank):
        raise LaunchError(
            f"{names[2]}={local_rank} of {names[3]}={local_size} can't be "
            f"{names[0]}={rank} of {names[1]}={size}"
        )
    return Placement(*values, source, mpi=source == "Intel MPI's mpiexec")


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process: mpiexec, torchrun, or one that is not supported."""
    return any(names[0] in variables for names in LAUNCHERS.values()) or any(
        name in variables for name in OTHER_LAUNCHERS
    )


def placement(variables: Mapping[str, str] = os.environ) -> Placement:
    """Reads this rank's place from the variables of torchrun or of Intel MPI's mpiexec.

    Raises LaunchError where there is none, where a rank is out of range, and where both
    launchers speak and disagree: then each process would train alone in a world of size 1.
    """
    told = [place for source in LAUNCHERS if (place := _told(variables, source))]
    for name, launcher in OTHER_LAUNCHERS.items():
        size = _integer(variables, name)
        if told and size and size > told[0].world_size:
            raise LaunchError(
                f"{launcher} started {size} processes ({name}), and {told[0].source} say a world "
                f"of {told[0].world_size}: each would train alone. Set RANK and WORLD_SIZE for all"
            )
    if not told:
        for name, launcher in OTHER_LAUNCHERS.items():
            if name in variables:
                raise LaunchError(
                    f"{launcher} started this process ({name}={variables[name]}), which is not "
                    "supported: start with Intel MPI's mpiexec, or with torchrun"
                )
        raise LaunchError(
            "no launcher's variables: start with 'mpiexec -n 2 python ...' or 'torchrun "
            "--nproc-per-node 2 ...', or set RANK and WORLD_SIZE"
        )
    if len({(place.rank, place.world_size) for place in told}) > 1:
        raise LaunchError(
            " but ".join(f"{p.source}: rank {p.rank} of {p.world_size}" for p in told)
            + ". Unset the variables that are wrong"
        )
    # mpiexec comes last and knows best; its ranks may run over MPI
    return told[-1]


def _unfinished() -> bool:
    """Whether oneCCL has operations whose end may never come."""
    backend = sys.modules.get("ccl_backend")
    return backend is not None and backend.unfinished(timedelta(seconds=1))


def destroy_groups() -> None:
    """Ends the process groups: one of gloo's that outlives Python may abort the process.

    All are left where oneCCL has operations in flight: their end would wait for the peers.
    """
    import torch.distributed as dist

    if dist.is_initialized() and not _unfinished():
        dist.destroy_process_group()


def _end_mpi() -> None:
    """Ends MPI, unless something went wrong.

    MPI's end waits for every rank, also for one that was killed. Where a rank leaves without it,
    mpiexec ends the others.
    """
    from mpi4py import MPI

    destroy_groups()
    if not (hasattr(sys, "last_value") or _unfinished() or MPI.Is_finalized()):
        MPI.Finalize()
        backend = sys.modules.get("ccl_backend")
        if backend and os.environ.get("CCL_ATL_TRANSPORT") == "ofi":
            backend.give_up()  # else oneCCL's end frees once more what MPI has freed


class _Mpi:
    """The world of MPI, for as long as the ranks need to agree on an address."""

    def __init__(self, place: Placement, timeout: timedelta):
        try:
            import mpi4py

            mpi4py.rc.finalize = False
            from mpi4py import MPI
        except (ImportError, RuntimeError) as cause:
            raise LaunchError(
                f"mpi4py can't be imported ({cause}): run env/setup.sh, or set MASTER_ADDR and "
                "MASTER_PORT to an address of rank 0 and a free port there"
            ) from cause
        atexit.register(_end_mpi)
        self.world = MPI.COMM_WORLD
        self.timeout = timeout
        if self.world.size != place.world_size:
            raise LaunchError(
                f"{place.source} says {place.world_size} ranks, MPI sees {self.world.size}: "
                "mpiexec and mpi4py's MPI library are not from the same MPI"
            )

    def gather(self, text: str) -> list[str]:
        """Every rank's text, of at most 256 bytes."""
        mine, all_texts = text.encode().ljust(256), bytearray(256 * self.world.size)
        request = self.world.Iallgather(mine, all_texts)
        deadline = time.monotonic() + self.timeout.total_seconds()
        while not request.Test():
            if time.monotonic() > deadline:
                raise LaunchError(f"not all ranks came within {self.timeout}")
            time.sleep(0.001)
        return [
            bytes(all_texts[i : i + 256]).decode().strip() for i in range(0, len(all_texts), 256)
        ]


def _address_for(hosts: list[str]) -> str:
    """Rank 0's address for the others: of its gloo interface, else where the next host is."""
    here = socket.gethostname()
    other = next((host for host in hosts if host != here), None)
    if other is None:
        return "127.0.0.1"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        return network.address_of(interface) if interface else network.address_towards(other)
    except OSError as cause:
        raise LaunchError(
            f"{here} finds no way to {other} ({cause}): set GLOO_SOCKET_IFNAME to the network "
            "interface that leads there, or MASTER_ADDR and MASTER_PORT"
        ) from cause


def rendezvous(place: Placement, timeout: timedelta):
    """The store where the ranks meet, and a word on where its address is from.

    ``MASTER_ADDR`` and ``MASTER_PORT`` are used where set. Otherwise, under mpiexec, rank 0
    opens a port and tells the others over MPI. Raises LaunchError.
    """
    import torch.distributed as dist

    variables = ("MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in variables if not os.environ.get(name)]
    source, opened = "from the environment", None
    if len(missing) == 1:
        raise LaunchError(f"{missing[0]} is not set: {variables[0]} and {variables[1]} go together")
    if missing and not place.mpi:
        raise LaunchError(
            "MASTER_ADDR and MASTER_PORT are not set, and there is no mpiexec to agree on them: "
            "set them to an address of rank 0 and a free port there, or start with torchrun"
        )
    if missing:
        source = "agreed over MPI"
        mpi = _Mpi(place, timeout)
        hosts = mpi.gather(socket.gethostname())
        mine = ""
        if place.rank == 0:
            try:
                address = _address_for(hosts)
            except LaunchError:
                mpi.gather("")  # the others must not wait for an address that won't come
                raise
            opened = dist.TCPStore(
                address,
                0,
                is_master=True,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
            mine = f"{address} {opened.port}"
        meeting = mpi.gather(mine)[0].split()
        if not meeting:
            raise LaunchError(f"rank 0, on {hosts[0]}, has no address for us; it says why")
        os.environ.update(zip(variables, meeting, strict=True))
    where = ":".join(os.environ[name] for name in variables)
    try:
        store, *_ = next(
            dist.rendezvous(
                f"env://?rank={place.rank}&world_size={place.world_size}", timeout=timeout
            )
        )
    except (dist.DistError, ValueError) as cause:
        reason = str(cause).partition("\n")[0]
        raise LaunchError(
            f"rank {place.rank} of {place.world_size}: no meeting at {where} ({reason}). Is "
            "MASTER_ADDR rank 0's address? Is the port taken, by another job or another rank 0?"
        ) from cause
    return store, f"{where} ({source})"


def settle(place: Placement, store, timeout: timedelta) -> Placement:
    """Compares the places of all ranks and fills in the local ones where nobody told them.

    Raises LaunchError where two processes claim the same rank, or the same slot of a node, and
    where a rank doesn't come within ``timeout``.
    """
    host = socket.gethostname()
    if store.add(f"claims/{place.rank}", 1) > 1:
        raise LaunchError(f"a second process claims rank {place.rank} (this one is on {host})")
    mine = {
        "machine": list(network.machine()),  # as JSON gives it back
        "host": host,
        "local_rank": place.local_rank,
        "world_size": place.world_size,
    }
    places = exchange(store, place, "place", json.dumps(mine), timeout)
    places = [json.loads(text) for text in places]
    if sizes := {there["world_size"] for there in places} - {place.world_size}:
        raise LaunchError(f"world sizes differ: {place.world_size} here, {sizes} elsewhere")
    neighbours = [r for r, there in enumerate(places) if there["machine"] == mine["machine"]]
    if place.local_rank is None:
        return replace(place, local_rank=neighbours.index(place.rank), local_size=len(neighbours))
    same = [r for r in neighbours if places[r]["local_rank"] == place.local_rank]
    if len(same) > 1:
        raise LaunchError(f"ranks {same} all claim slot {place.local_rank} of host {host}")
    return place


def exchange(store, place: Placement, topic: str, text: str, timeout: timedelta) -> list[str]:
    """Every rank's text, through the store. Raises LaunchError where a rank doesn't come."""
    store.set(f"{topic}/{place.rank}", text)
    texts = []
    for rank in range(place.world_size):
        try:
            store.wait([f"{topic}/{rank}"], timeout)
        except RuntimeError as cause:
            raise LaunchError(f"rank {rank} did not come within {timeout}") from cause
        texts.append(store.get(f"{topic}/{rank}").decode())
    return texts
