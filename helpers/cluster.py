"""A cluster whose engines are MPI ranks, started from a notebook: ipyparallel over mpiexec.

with Cluster("hosts", ranks_per_node=2) as cluster:
    cluster.table()
    cluster.view.apply_sync(train)

The notebook that teaches it: ``05_a_cluster``.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from helpers import runtime
from helpers.ccl.mpi import MPIEXEC, end_session
from helpers.tables import Table

LOCAL = ("localhost", "127.0.0.1", "::1")
SAME_EVERYWHERE = ("python", "torch", "ipyparallel", "mpi4py")
SSH_SECONDS = 5
PROBE_SECONDS = 25
STOP_SECONDS = 5
# what ssh says -> what it means, and the mend
SSH_ERRORS = {
    "HOST IDENTIFICATION HAS CHANGED": (
        "its host key has changed",
        "if the node was made anew: ssh-keygen -R {host}, then connect once by hand",
    ),
    "Host key verification failed": ("its host key is not known", "connect once: ssh {host}"),
    "Permission denied": ("it wants a password", "give it your key: ssh-copy-id {host}"),
    "Could not resolve": ("nobody knows this name", "put it into /etc/hosts, or use its address"),
    "refused": ("no ssh server answers there", "start sshd on the node"),
    "timed out": ("it does not answer", "is it on, and port 22 open?"),
    "No route": ("no network leads there", "is it on, and in the same network?"),
    "No such file": ("there is no {python}", "make the environment at the same path there"),
    "No module named": ("its environment lacks a package", "run env/setup.sh there"),
}


class ClusterError(RuntimeError):
    """The cluster can't be started or is broken; the message names the node, cause and mend."""


@dataclass(frozen=True)
class Host:
    """A node as the master knows it, and how many ranks it may hold (None: as many as asked)."""

    name: str
    slots: int | None = None

    @property
    def is_local(self) -> bool:
        return self.name in LOCAL or self.name == socket.gethostname()


def read_hosts(source: str | Path | Sequence[str] | None) -> tuple[Host, ...]:
    """Hosts from a hosts file or a list of its lines: ``name``, ``address`` or ``name:slots``.

    ``#`` begins a comment; None is this machine alone. Raises ClusterError naming file and line.
    """
    if source is None:
        return (Host("localhost"),)
    where = "hosts"
    if isinstance(source, (str, Path)):
        where = str(source)
        try:
            source = Path(source).read_text().splitlines()
        except OSError as error:
            raise ClusterError(f"hosts file {where} can't be read: {error.strerror}") from error
    hosts: list[Host] = []
    for number, line in enumerate(source, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        name, colon, slots = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
        if len(text.split()) > 1 or not name or (colon and not (slots.isdecimal() and int(slots))):
            raise ClusterError(
                f"{where}, line {number}: {text!r} is not 'name' or 'name:slots' (slots above 0)"
            )
        if name in {host.name for host in hosts}:
            raise ClusterError(f"{where}, line {number}: {name} stands there twice")
        hosts.append(Host(name, int(slots) if colon else None))
    if not hosts:
        raise ClusterError(f"{where}: no hosts")
    return tuple(hosts)


def describe() -> dict:
    """This process's place and stack: what ``Cluster.table`` shows of a rank."""
    from helpers import isa

    found = {
        "host": socket.gethostname(),
        "cores": sorted(os.sched_getaffinity(0)),
        "isa": isa.bf16_tier(isa.cpu_flags()).partition(":")[0],
        "python": sys.version.split()[0],
    }
    return found | {name: version(name) for name in SAME_EVERYWHERE[1:]}


def _place() -> dict:
    """A rank's own words, on the engine: MPI's numbers beside what ``describe`` finds."""
    import torch
    from mpi4py import MPI

    return describe() | {
        "rank": MPI.COMM_WORLD.rank,
        "world_size": MPI.COMM_WORLD.size,
        "local_rank": int(os.environ.get("MPI_LOCALRANKID", 0)),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def _probe(host: Host, ssh: Sequence[str]) -> dict:
    """What a node says of itself, over ssh. Raises ClusterError."""
    if host.is_local:
        return describe() | {"usable": len(runtime.hardware().usable)}
    command = [*ssh, host.name, sys.executable, "-m", "helpers.cluster"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{host.name}: no answer within {PROBE_SECONDS} s over ssh") from None
    if ran.returncode == 0:
        return json.loads(ran.stdout.splitlines()[-1])
    for words, (cause, mend) in SSH_ERRORS.items():
        if words in ran.stderr:
            told = f"{host.name}: {cause}. {mend}"
            raise ClusterError(told.format(host=host.name, python=sys.executable))
    last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    raise ClusterError(f"{host.name}: {' '.join(command)} failed: {last}")


def _check_alike(found: Mapping[str, dict]) -> None:
    first, *others = found
    for name in others:
        for part in SAME_EVERYWHERE:
            if found[name][part] != found[first][part]:
                raise ClusterError(
                    f"{name} has {part} {found[name][part]}, {first} has {found[first][part]}: "
                    f"run env/setup.sh on {name} from the same commit"
                )


def _address_towards(host: str) -> str:
    """This machine's address as a host sees it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing, only asks for the route
            return probe.getsockname()[0]
    except OSError as error:
        raise ClusterError(f"{host}: no way leads there ({error})") from error


class Cluster:
    """Engines that are MPI ranks, for as long as the block lasts.

    ``hosts`` is a hosts file or its lines (``read_hosts``), default this machine;
    ``ranks_per_node`` as many ranks on each. ``variables`` are set for all ranks, over those of
    ``helpers.runtime``. More ranks than cores are refused unless ``oversubscribe``. ``timeout``
    limits the start, in seconds. ``ssh_config`` is a file for ssh.

    In the block, ``view`` is ipyparallel's view of all engines in the order of their ranks, and
    ``client`` its client. ``%%px`` works on them. Raises ClusterError; whatever happens, no
    process is left: also where the notebook's kernel is killed.
    """

    def __init__(
        self,
        hosts: str | Path | Sequence[str] | None = None,
        ranks_per_node: int = 2,
        variables: Mapping[str, str] | None = None,
        oversubscribe: bool = False,
        timeout: float = 60,
        ssh_config: str | Path | None = None,
        say: Callable[[str], None] = print,
    ):
        self.hosts = read_hosts(hosts)
        self.ranks_per_node = ranks_per_node
        self.variables = dict(variables or {})
        self.oversubscribe, self.timeout, self.say = oversubscribe, timeout, say
        options = [f"-oConnectTimeout={SSH_SECONDS}", "-oBatchMode=yes"]
        self._ssh_options = (["-F", str(ssh_config)] if ssh_config else []) + options
        self.client = self.view = None
        self.places: list[dict] = []
        self._cluster = self._watchdog = self._folder = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks_per_node * len(self.hosts)

    def table(self) -> Table:
        """A row for each rank: where it runs, its cores and threads, its stack."""
        columns = ("rank", "engine", "host", "local_rank", "cores", "threads", "isa", "torch")
        return Table({name: place[name] for name in columns} for place in self.places)

    # ---- start

    def _check_hosts(self) -> dict[str, dict]:
        if not MPIEXEC.exists():
            raise ClusterError(f"no {MPIEXEC}: run env/setup.sh, or 'pip install impi-rt'")
        for host in self.hosts:
            if host.slots is not None and host.slots < self.ranks_per_node:
                raise ClusterError(
                    f"{host.name} has {host.slots} slots in the hosts file, and "
                    f"{self.ranks_per_node} ranks a node were asked for"
                )
        ssh = ["ssh", *self._ssh_options]
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            answers = list(pool.map(lambda host: _attempt(_probe, host, ssh), self.hosts))
        failures = [str(answer) for answer in answers if isinstance(answer, ClusterError)]
        if failures:
            raise ClusterError("\n".join(failures))
        found = dict(zip((host.name for host in self.hosts), answers, strict=True))
        _check_alike(found)
        for name, node in found.items():
            if node["usable"] < self.ranks_per_node and not self.oversubscribe:
                raise ClusterError(
                    f"{name} has {node['usable']} cores for {self.ranks_per_node} ranks: start "
                    "fewer, or say oversubscribe=True (right, but slow)"
                )
        return found

    def _environment(self, found: Mapping[str, dict]) -> dict[str, str]:
        smallest = min(node["usable"] for node in found.values())
        if smallest < self.ranks_per_node or len(self.hosts) > 1:
            # no masks: the nodes may number their cores differently
            threads = max(1, smallest // self.ranks_per_node)
            made = {"OMP_NUM_THREADS": str(threads), "I_MPI_PIN": "0"}
        else:
            made = runtime.variables(runtime.settings(runtime.hardware(), self.ranks_per_node))
        if any(not host.is_local for host in self.hosts):
            made |= {
                "I_MPI_HYDRA_BOOTSTRAP": "ssh",
                "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": " ".join(self._ssh_options),
                "FI_PROVIDER": "tcp",
            }
        return made | {"I_MPI_ROOT": sys.prefix} | self.variables

    def _start(self) -> None:
        import ipyparallel as ipp
        from ipyparallel.cluster.launcher import MPIEngineSetLauncher

        began = time.monotonic()
        found = self._check_hosts()
        remote = next((host.name for host in self.hosts if not host.is_local), None)
        address = _address_towards(remote) if remote else "127.0.0.1"
        self._folder = tempfile.TemporaryDirectory(prefix="cluster-")
        machines = Path(self._folder.name, "hosts")
        machines.write_text("".join(f"{host.name}:{self.ranks_per_node}\n" for host in self.hosts))
        arguments = ["-l", "-f", str(machines)] if remote else ["-l"]

        class Ranks(MPIEngineSetLauncher):
            mpi_cmd = [str(MPIEXEC)]
            mpi_args = arguments
            environment = self._environment(found)

        self._cluster = ipp.Cluster(
            n=self.world_size,
            engines=Ranks,
            controller_ip=address,
            controller_location=address,
            profile_dir=str(Path(self._folder.name, "profile")),
            cluster_id="",
            load_profile=False,
            shutdown_atexit=False,
            log_level=40,
        )
        self._cluster.start_controller_sync()
        self._cluster.start_engines_sync()
        self._watch()
        self.client = self._cluster.connect_client_sync()
        self._wait(began + self.timeout)
        self._order()
        self.say(
            f"[cluster] {self.world_size} ranks on {', '.join(host.name for host in self.hosts)}; "
            f"controller at {address}; ready in {time.monotonic() - began:.0f} s"
        )

    def _wait(self, deadline: float) -> None:
        """Until all ranks are there. Raises ClusterError when it is late, or mpiexec has ended."""
        with tqdm(total=self.world_size, unit="rank", leave=False) as bar:
            while (there := len(self.client.ids)) < self.world_size:
                bar.update(there - bar.n)
                ended = not _alive(self._engines().pid)
                if ended or time.monotonic() > deadline:
                    why = "mpiexec has ended" if ended else f"{self.timeout:.0f} s are over"
                    raise ClusterError(
                        f"{there} of {self.world_size} ranks came, and {why}. {self._log()}"
                    )
                time.sleep(0.1)

    def _order(self) -> None:
        """Asks each engine for its rank: an engine's number is not its rank."""
        everyone = self.client.direct_view(list(self.client.ids), block=True)
        places = everyone.apply_sync(_place)
        for engine, place in zip(self.client.ids, places, strict=True):
            place["engine"] = engine
            if place["world_size"] != self.world_size:
                raise ClusterError(
                    f"{place['host']}: MPI's world has {place['world_size']} ranks, not "
                    f"{self.world_size}: mpi4py and mpiexec are not from the same MPI"
                )
        self.places = sorted(places, key=lambda place: place["rank"])
        self.view = self.client.direct_view([place["engine"] for place in self.places], block=True)
        with contextlib.suppress(NameError):
            get_ipython()  # noqa: F821
            self.view.activate()

    def _engines(self):
        return next(iter(self._cluster.engines.values()), None)

    def _log(self, lines: int = 20) -> str:
        """Which ranks said nothing, and the end of what all said."""
        output = self._engines().get_output(remove=False)
        tail = "\n".join(output.strip().splitlines()[-lines:])
        silent = [rank for rank in range(self.world_size) if f"[{rank}]" not in output]
        if not silent:
            return f"The end of their log:\n{tail}"
        nodes = sorted({self.hosts[rank // self.ranks_per_node].name for rank in silent})
        return f"Ranks {silent} on {', '.join(nodes)} said nothing. The end of the log:\n{tail}"

    # ---- end

    def _sessions(self) -> list[int]:
        launchers = [self._cluster.controller, self._engines()] if self._cluster else []
        return [launcher.pid for launcher in launchers if getattr(launcher, "pid", None)]

    def _watch(self) -> None:
        """A process that ends the ranks where this one is killed: it notices by a broken pipe."""
        sessions = " ".join(map(str, self._sessions()))
        folder = self._folder.name
        script = (
            "trap '' INT; read -r done && exit; "
            f"for s in {sessions}; do pkill -TERM -s $s; done; sleep 2; "
            f"for s in {sessions}; do pkill -KILL -s $s; done; rm -rf '{folder}'"
        )
        self._watchdog = subprocess.Popen(
            ["bash", "-c", script], stdin=subprocess.PIPE, start_new_session=True
        )

    def stop(self) -> None:
        """Ends all ranks and what belongs to them; harmless where there are none."""
        import psutil

        sessions, nannies = self._sessions(), []
        for session in sessions:
            with contextlib.suppress(psutil.NoSuchProcess):
                nannies += psutil.Process(session).children(recursive=True)
        if self.client:
            self.client.close()
        for session in sessions:
            with contextlib.suppress(ProcessLookupError):
                os.kill(session, signal.SIGTERM)
        for session in sessions:
            end_session(session)
        # each engine has a watcher in a session of its own, which ends when its engine has
        for left in psutil.wait_procs(nannies, timeout=STOP_SECONDS)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        if self._watchdog:
            self._watchdog.communicate(b"done\n", timeout=STOP_SECONDS)
        if self._folder:
            self._folder.cleanup()
        self._cluster = self._watchdog = self._folder = self.client = self.view = None

    def start(self) -> "Cluster":
        """Starts the ranks, for a notebook whose cells share them; ``stop`` ends them."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    __enter__ = start

    def __exit__(self, *_) -> None:
        self.stop()


def _alive(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _attempt(function, *arguments):
    """The result, or the ClusterError, so that all nodes' faults can be told at once."""
    try:
        return function(*arguments)
    except ClusterError as error:
        return error


if __name__ == "__main__":
    print(json.dumps(describe() | {"usable": len(runtime.hardware().usable)}))
