"""A cluster whose engines are MPI ranks, started from a notebook: ipyparallel over mpiexec.

with Cluster("hosts", ranks_per_node=2) as cluster:
    cluster.table()
    cluster.view.apply_sync(train)

The notebook that teaches it: ``06_a_cluster``.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tqdm.auto import tqdm

from helpers import network
from helpers.ccl.mpi import MPIEXEC, end_session
from helpers.network import SSH_OPTIONS
from helpers.nodes import SPACE, ClusterError, Survey, read_hosts, survey
from helpers.tables import Table

STOP_SECONDS = 5
STACK_SECONDS = 5
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
ROOT = Path(__file__).resolve().parents[1]
ENGINE = (sys.executable, "-m", "helpers.engine")


def _place() -> dict:
    """A rank's own words, on the engine: MPI's numbers beside what ``nodes.describe`` finds."""
    import torch
    from mpi4py import MPI

    from helpers import network, nodes

    location = json.loads(os.environ["IPP_CONNECTION_INFO"])["location"]
    return nodes.describe() | {
        "rank": MPI.COMM_WORLD.rank,
        "world_size": MPI.COMM_WORLD.size,
        "local_rank": int(os.environ.get("MPI_LOCALRANKID", 0)),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "nic": network.interface_towards(location),
        "pid": os.getpid(),
    }


def by_rank(output: str) -> dict[int, str]:
    """What each rank wrote, out of what ``mpiexec -l`` made of it.

    mpiexec puts "[rank] " before each piece that it reads, also where that is half a line.
    """
    texts: dict[int, str] = {}
    _, *pieces = re.split(r"\[(\d+)\] ", output)
    for rank, piece in zip(pieces[::2], pieces[1::2], strict=True):
        texts[int(rank)] = texts.get(int(rank), "") + piece
    return texts


class Cluster:
    """Engines that are MPI ranks, for as long as the block lasts.

    ``hosts`` is a hosts file or its lines (``read_hosts``), default this machine;
    ``ranks_per_node`` as many ranks on each. ``variables`` are set for all ranks, over those of
    ``helpers.runtime``. More ranks than cores are refused unless ``oversubscribe``. ``timeout``
    limits the start, in seconds.

    In the block, ``view`` is ipyparallel's view of all engines, numbered by rank, and ``client``
    its client. ``%%px`` works on them. Raises ClusterError; whatever happens, no process is left:
    also where the notebook's kernel is killed, or this object is forgotten.
    """

    def __init__(
        self,
        hosts: str | Path | Sequence[str] | None = None,
        ranks_per_node: int = 2,
        variables: Mapping[str, str] | None = None,
        oversubscribe: bool = False,
        timeout: float = 60,
        say: Callable[[str], None] = print,
    ):
        if ranks_per_node < 1:
            raise ClusterError(f"{ranks_per_node} ranks a node: one at least")
        self.hosts = read_hosts(hosts)
        self.ranks_per_node = ranks_per_node
        self.variables = dict(variables or {})
        self.oversubscribe, self.timeout, self.say = oversubscribe, timeout, say
        self.client = self.view = None
        self.places: list[dict] = []
        self._cluster = self._watchdog = self._lifeline = self._folder = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.ranks_per_node * len(self.hosts)

    def table(self) -> Table:
        """A row for each rank: where it runs, its cores and threads, its stack."""
        columns = ("rank", "host", "local_rank", "cores", "threads", "nic", "isa", "torch")
        return Table({name: place[name] for name in columns} for place in self.places)

    def stacks(self) -> Table:
        """Where each rank is at this moment: what a hang looks like from inside.

        A row for each rank with its calls, from the innermost to the cell's line; "idle" for one
        that waits for a cell, and "no answer" for one that doesn't tell within 5 seconds.
        Raises ClusterError where there are no ranks any more.
        """
        if not self.client:
            raise ClusterError("the cluster is not started")
        if not self.client.ids:
            raise ClusterError(f"the ranks have ended. {self._log()}")
        skip = len(self._output())
        self.client.send_signal(signal.SIGUSR1, block=False)
        deadline = time.monotonic() + STACK_SECONDS
        output, before, written = "", None, {}
        # until all have answered, and what had begun to come is complete
        while time.monotonic() < deadline and (output != before or len(written) < self.world_size):
            time.sleep(0.3)
            before, output = output, self._output()[skip:]
            written = {rank: text for rank, text in by_rank(output).items() if FRAME.search(text)}
        rows = Table()
        for rank in range(self.world_size):
            calls = [
                f"{path}:{line} {name}" for path, line, name in FRAME.findall(written.get(rank, ""))
            ]
            in_cell = [i for i, call in enumerate(calls) if "/ipykernel_" in call]  # a cell's file
            where = "idle" if calls else "no answer"
            if in_cell:
                inner, cell = calls[: in_cell[0]], calls[in_cell[0]]
                line = cell.rpartition(":")[2].partition(" ")[0]
                where = " < ".join([call.rpartition("/")[2] for call in inner] + [f"cell:{line}"])
            rows.append({"rank": rank, "where, innermost first": where})
        return rows

    # ---- start

    def _survey(self) -> Survey:
        if not MPIEXEC.exists():
            raise ClusterError(f"no {MPIEXEC}: run env/setup.sh, or 'pip install impi-rt'")
        if self._remote and " " in sys.prefix:
            raise ClusterError(SPACE.format(sys.prefix))
        for host in self.hosts:
            if host.slots is not None and host.slots < self.ranks_per_node:
                raise ClusterError(
                    f"{host.name} has {host.slots} slots in the hosts file, and "
                    f"{self.ranks_per_node} ranks a node were asked for"
                )
        found = survey(self.hosts, self.ranks_per_node)
        crowded = found.crowded(self.ranks_per_node)
        if crowded and not self.oversubscribe:
            raise ClusterError(
                f"{crowded}: start fewer, or say oversubscribe=True (right, but slow)"
            )
        return found

    def _environment(self, found: Survey) -> dict[str, str]:
        made = found.variables(self.ranks_per_node)
        if self._remote:
            made |= {
                "I_MPI_HYDRA_BOOTSTRAP": "ssh",
                "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": " ".join(SSH_OPTIONS),
                "I_MPI_HYDRA_IFACE": network.interface_of(found.address),
                "FI_PROVIDER": os.environ.get("FI_PROVIDER", "tcp"),
            }
        # c10d warns, again and again, where nobody knows the nodes' names
        made |= {"I_MPI_ROOT": sys.prefix, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return made | self.variables

    @property
    def _remote(self) -> list[str]:
        return [host.name for host in self.hosts if not host.is_local]

    def _start(self) -> None:
        import ipyparallel as ipp
        from ipyparallel.cluster.launcher import MPIEngineSetLauncher

        began = time.monotonic()
        deadline = began + self.timeout
        found = self._survey()
        self._folder = tempfile.TemporaryDirectory(prefix="cluster-")
        machines = Path(self._folder.name, "hosts")
        machines.write_text("".join(f"{host.name}\n" for host in self.hosts))
        arguments = ["-l"]
        if self._remote:
            arguments += ["-f", str(machines), "-ppn", str(self.ranks_per_node), "-wdir", str(ROOT)]

        class Ranks(MPIEngineSetLauncher):
            mpi_cmd = [str(MPIEXEC)]
            mpi_args = arguments
            engine_cmd = list(ENGINE)
            environment = self._environment(found)

        self._cluster = ipp.Cluster(
            n=self.world_size,
            engines=Ranks,
            controller_ip=found.address,
            controller_location=found.address,
            profile_dir=str(Path(self._folder.name, "profile")),
            cluster_id="",
            load_profile=False,
            shutdown_atexit=False,
            log_level=40,
        )
        self._watch()
        try:
            self._cluster.start_controller_sync()
            self._tell_watchdog()
            self._cluster.start_engines_sync()
            self._tell_watchdog()
            self.client = self._cluster.connect_client_sync()
        except Exception as error:
            raise ClusterError(
                f"the controller at {found.address} did not start: {error}"
            ) from error
        self._wait(deadline)
        self._check_ranks(deadline)
        self.say(
            f"[cluster] {self.world_size} ranks on {', '.join(host.name for host in self.hosts)}; "
            f"controller at {found.address}; ready in {time.monotonic() - began:.0f} s"
        )

    def _wait(self, deadline: float) -> None:
        """Until all ranks are there. Raises ClusterError when it is late, or mpiexec has ended."""
        with tqdm(total=self.world_size, unit="rank", leave=False) as bar:
            while (there := len(self.client.ids)) < self.world_size:
                if there > bar.n:
                    bar.update(there - bar.n)
                ended = not _alive(self._engines().pid)
                if ended or time.monotonic() > deadline:
                    why = "mpiexec has ended" if ended else f"{self.timeout:.0f} s are over"
                    raise ClusterError(
                        f"{there} of {self.world_size} ranks came, and {why}. {self._log()}"
                    )
                time.sleep(0.1)

    def _check_ranks(self, deadline: float) -> None:
        """Asks each engine who it is. Its number has to be its rank: %%px prints that number.

        An engine asks the controller for its rank as a number. It may get another: then all
        labels would lie.
        """
        numbers = list(self.client.ids)
        asked = self.client.direct_view(numbers).apply_async(_place)
        asked.wait(max(1, deadline - time.monotonic()))
        if not asked.ready():
            raise ClusterError(
                f"all ranks came, {asked.progress} of {self.world_size} answered, and "
                f"{self.timeout:.0f} s are over. {self._log()}"
            )
        self.places = asked.get()
        for number, place in zip(numbers, self.places, strict=True):
            if place["world_size"] != self.world_size:
                raise ClusterError(
                    f"{place['host']}: MPI's world has {place['world_size']} ranks, not "
                    f"{self.world_size}: mpi4py and mpiexec are not from the same MPI"
                )
            if place["rank"] != number:
                raise ClusterError(
                    f"{place['host']}: rank {place['rank']} got the number {number} as an engine, "
                    "so output would carry wrong ranks. Start the cluster again"
                )
        crowds = Counter(place["host"] for place in self.places)
        if set(crowds.values()) != {self.ranks_per_node}:
            raise ClusterError(
                f"mpiexec spread the ranks unevenly: {dict(crowds)}, not {self.ranks_per_node} "
                "each. Do two nodes have the same hostname?"
            )
        self.view = self.client.direct_view(numbers, block=True)
        with contextlib.suppress(NameError):
            get_ipython()  # noqa: F821
            self.view.activate()

    def _engines(self):
        return next(iter(self._cluster.engines.values()), None)

    def _output(self) -> str:
        """What the ranks wrote so far (the launcher's own ``get_output`` reads it once only)."""
        return Path(self._engines().output_file).read_text(errors="replace")

    def _log(self, lines: int = 20) -> str:
        """Which ranks are missing, and the last lines of their log, else of all."""
        output = self._output().strip().splitlines()
        there = set(self.client.ids) if self.client else set()
        missing = sorted(set(range(self.world_size)) - there)
        nodes = sorted({self.hosts[rank // self.ranks_per_node].name for rank in missing})
        theirs = [line for line in output if line.startswith(tuple(f"[{r}]" for r in missing))]
        tail = "\n".join((theirs or output)[-lines:])
        who = f"Missing: ranks {missing} on {', '.join(nodes)}" if missing else "None is missing"
        return f"{who}. The end of the log:\n{tail}"

    # ---- end

    def _sessions(self) -> list[int]:
        launchers = [self._cluster.controller, self._engines()] if self._cluster else []
        # a launcher that has not started says -1
        return [launcher.pid for launcher in launchers if getattr(launcher, "pid", -1) > 0]

    def _watch(self) -> None:
        """A process that ends the ranks where this one is killed: it notices by a broken pipe.

        It also removes the folders that engines made, on all nodes.
        """
        folder = self._folder.name
        remove = shlex.join(["rm", "-rf", folder])
        ssh = shlex.join(["timeout", str(STOP_SECONDS - 1), "ssh", "-n", *SSH_OPTIONS])
        script = (
            "trap '' INT; sessions=; "
            'while read -r word && [ "$word" != done ]; do sessions="$word $sessions"; done; '
            'if [ "$word" != done ]; then kill $sessions; sleep 3; '
            f"for file in $(grep -lzs '^IPP_PROFILE_DIR={folder}' /proc/[0-9]*/environ); do "
            "pid=${file#/proc/}; kill -KILL ${pid%/environ}; done; fi; "
            f"{remove}; "
            + "".join(f"{ssh} {shlex.quote(name)} {remove} & " for name in self._remote)
            + "wait"
        )
        # a pipe of our own: that of a Popen stays open when the Popen is forgotten
        reading, writing = os.pipe()
        with open(reading) as lifeline:
            self._watchdog = subprocess.Popen(
                ["bash", "-c", script],
                stdin=lifeline,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._lifeline = open(writing, "w", buffering=1)  # noqa: SIM115

    def _tell_watchdog(self) -> None:
        print(self._sessions()[-1], file=self._lifeline)

    def stop(self) -> None:
        """Ends all ranks and what belongs to them; harmless where there are none."""
        try:
            self._end_ranks()
        finally:
            if self._watchdog:
                self._lifeline.write("done\n")
                self._lifeline.close()
                self._watchdog.wait(2 * STOP_SECONDS)
            if self._folder:
                self._folder.cleanup()
            self._cluster = self._watchdog = self._lifeline = self._folder = None
            self.client = self.view = None

    def _end_ranks(self) -> None:
        import psutil

        sessions, nannies = self._sessions(), []
        for session in sessions:
            with contextlib.suppress(psutil.NoSuchProcess):
                nannies += psutil.Process(session).children(recursive=True)
        if self.client:
            self.client.close()
        for session in reversed(sessions):  # engines first: their watchers talk to the controller
            end_session(session)
        # each engine has a watcher in a session of its own, which ends when its engine has
        for left in psutil.wait_procs(nannies, timeout=STOP_SECONDS)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()

    def start(self) -> "Cluster":
        """Starts the ranks, for a notebook whose cells share them; ``stop`` ends them."""
        if self._cluster:
            raise ClusterError("this cluster is started already: stop() it first")
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
