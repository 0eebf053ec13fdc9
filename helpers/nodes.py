"""The nodes of a cluster: the hosts file, and whether each node can do its part.

``python -m helpers.nodes HOSTS`` checks the nodes of a hosts file. The notebook that teaches it:
``06_a_cluster``.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from helpers import network, runtime

LOCAL = ("localhost", "127.0.0.1", "::1")
SAME_EVERYWHERE = ("python", "torch", "ipyparallel", "mpi4py")
PROBE_SECONDS = 25
CONNECT_SECONDS = 3
SPACE = (
    "mpiexec can't start ranks on other nodes from a path with a space in it ({}): "
    "move the course to another path"
)
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
        odd = len(text.split()) > 1 or not name or name.startswith("-")
        if odd or (colon and not (slots.isdecimal() and int(slots))):
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
    """This node's name, instructions and stack."""
    from helpers import isa

    return {
        "host": socket.gethostname(),
        "isa": isa.bf16_tier(isa.cpu_flags()).partition(":")[0],
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
    } | {name: version(name) for name in SAME_EVERYWHERE[1:]}


def capacity(ranks: int) -> dict:
    """Which machine this is, its cores, and the variables for so many ranks ({}: too few cores)."""
    hardware = runtime.hardware()
    crowded = ranks > len(hardware.usable)
    machine, namespace = network.machine()
    return {
        "machine": machine,
        "network": namespace,
        "usable": len(hardware.usable),
        "variables": {} if crowded else runtime.variables(runtime.settings(hardware, ranks)),
    }


def _unreachable(addresses: Mapping[str, Sequence]) -> dict[str, str]:
    """Of those addresses (host, port) by name, which can't be reached from here, and why."""

    def problem(address) -> str:
        try:
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
        except OSError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(min(64, len(addresses) or 1)) as pool:
        problems = pool.map(lambda address: problem(tuple(address)), addresses.values())
        return {name: why for name, why in zip(addresses, problems, strict=True) if why}


def _answer(ranks: int) -> None:
    """A node's half of a survey: says what it is, then tries to reach all others."""
    master = os.environ["SSH_CONNECTION"].split()[0]
    with network.listen(network.own_address()) as server:
        place = {"address": server.getsockname()[:2], "master": master}
        print(json.dumps(describe() | capacity(ranks) | place), flush=True)
        if others := sys.stdin.readline():
            print(json.dumps(_unreachable(json.loads(others))), flush=True)
        sys.stdin.read()  # until the master leaves: others may not have tried yet


class _Talk:
    """The master's half of a survey, with one node, over ssh."""

    def __init__(self, host: Host, ranks: int):
        self.host = host
        answer = shlex.join([sys.executable, "-m", "helpers.nodes", "--answer", str(ranks)])
        self._process = subprocess.Popen(
            ["ssh", *network.SSH_OPTIONS, host.name, answer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._late = False
        self._limit = threading.Timer(PROBE_SECONDS, self._give_up)
        self._limit.start()

    def _give_up(self) -> None:
        self._late = True
        self._process.kill()

    def _line(self) -> dict:
        for line in self._process.stdout:
            if line.startswith('{"') or line == "{}\n":  # a login script may greet
                return json.loads(line)
        raise ClusterError(self.failure())

    def failure(self) -> str:
        """What went wrong with this node, and the mend."""
        if self._late:
            return f"{self.host.name}: no answer within {PROBE_SECONDS} s over ssh"
        self._process.kill()  # else its stderr might not end
        told = self._process.stderr.read().strip()
        for words, (cause, mend) in SSH_ERRORS.items():
            if words in told:
                text = f"{self.host.name}: {cause}. {mend}"
                return text.format(host=self.host.name, python=sys.executable)
        last = (told.splitlines() or [f"exit code {self._process.wait()}"])[-1]
        return f"{self.host.name}: {' '.join(self._process.args)} failed: {last}"

    def found(self) -> dict:
        return self._line()

    def reach(self, addresses: Mapping[str, Sequence]) -> None:
        others = {name: where for name, where in addresses.items() if name != self.host.name}
        print(json.dumps(others), file=self._process.stdin, flush=True)
        _refuse_unreachable(self.host.name, self._line(), others)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._limit.cancel()
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            pipe.close()
        self._process.wait()


def _refuse_unreachable(name: str, problems: Mapping[str, str], addresses) -> None:
    if problems:
        other, why = next(iter(problems.items()))
        raise ClusterError(
            f"{name}: can't reach {other} at {addresses[other][0]}, port {addresses[other][1]} "
            f"({why}). Ranks talk on any port above 1023: open them between the nodes "
            "(firewall, security group), also towards the master"
        )


def _each(pool: ThreadPoolExecutor, function: Callable, talks: Sequence[_Talk]) -> list:
    """The results for all nodes at once. Raises ClusterError with the faults of all."""

    def attempt(talk):
        try:
            return function(talk)
        except ClusterError as error:
            return error
        except (OSError, ValueError):  # it left, or said something else
            return ClusterError(talk.failure())

    results = list(pool.map(attempt, talks))
    faults = [str(result) for result in results if isinstance(result, ClusterError)]
    if faults:
        raise ClusterError("\n".join(faults))
    return results


@dataclass(frozen=True)
class Survey:
    """What ``survey`` found: each node's own words, by its name in the hosts file.

    ``address`` is the master's, as the nodes see it: 127.0.0.1 where all ranks are local.
    """

    nodes: dict[str, dict]
    address: str

    @property
    def shares_machines(self) -> bool:
        """Whether several nodes are one machine, as those of ``env/lab`` are."""
        return len({node["machine"] for node in self.nodes.values()}) < len(self.nodes)

    def _shares(self, ranks_per_node: int) -> list[tuple[str, int, int]]:
        """Each node's name, its machine's cores, and all ranks on that machine."""
        nodes_of = Counter(node["machine"] for node in self.nodes.values())
        return [
            (name, node["usable"], nodes_of[node["machine"]] * ranks_per_node)
            for name, node in self.nodes.items()
        ]

    def crowded(self, ranks_per_node: int) -> str:
        """Which machine has fewer cores than ranks, as a sentence; "" where there is none."""
        for name, usable, ranks in self._shares(ranks_per_node):
            if usable < ranks:
                return f"{name} has {usable} cores for {ranks} ranks"
        return ""

    def threads(self, ranks_per_node: int) -> int:
        """Threads a rank that no machine has too few cores for; at least one."""
        return max(1, min(usable // ranks for _, usable, ranks in self._shares(ranks_per_node)))

    def variables(self, ranks_per_node: int) -> dict[str, str]:
        """The variables that suit every rank (``helpers.runtime``).

        Cores are bound only where all nodes number them alike and none shares its machine.
        """
        suggested = [node["variables"] for node in self.nodes.values()]
        alike = all(found == suggested[0] for found in suggested)
        if alike and suggested[0] and not self.shares_machines:
            return dict(suggested[0])
        return {
            "OMP_NUM_THREADS": str(self.threads(ranks_per_node)),
            "OMP_WAIT_POLICY": "passive",  # a thread that waits leaves its core to others
            "I_MPI_PIN": "0",
        }


def survey(hosts: Sequence[Host], ranks_per_node: int = 1) -> Survey:
    """Asks all nodes at once what they are, and whether they reach each other and the master.

    Raises ClusterError, with the name of the node, the cause and the mend: for nodes that can't be
    reached, want a password or stand there under two names, for another Python, torch, ipyparallel
    or mpi4py there, and for closed ports, within 30 s.
    """
    local = {host.name: describe() | capacity(ranks_per_node) for host in hosts if host.is_local}
    remote = [host for host in hosts if not host.is_local]
    address = "127.0.0.1"
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(max(1, len(remote))))
        talks = [stack.enter_context(_Talk(host, ranks_per_node)) for host in remote]
        found = dict(
            zip((host.name for host in remote), _each(pool, _Talk.found, talks), strict=True)
        )
        nodes = {host.name: (local | found)[host.name] for host in hosts}
        _check_alike(nodes)
        _check_different(nodes)
        if remote:
            address = found[remote[0].name]["master"]
            try:
                server = stack.enter_context(network.listen(address))
            except OSError as error:
                raise ClusterError(
                    f"{remote[0].name}: sees the master at {address}, which is not an address of "
                    f"this machine ({error.strerror}). Is a NAT between them? Start the notebook "
                    "on a machine in the nodes' own network"
                ) from error
            others = {name: node["address"] for name, node in found.items()}
            _each(
                pool,
                lambda talk: talk.reach(others | {"the master": server.getsockname()[:2]}),
                talks,
            )
            if local:
                _refuse_unreachable("the master", _unreachable(others), others)
    return Survey(nodes, address)


def _check_alike(nodes: Mapping[str, dict]) -> None:
    first, *others = nodes
    for name in others:
        for part in SAME_EVERYWHERE:
            if nodes[name][part] != nodes[first][part]:
                raise ClusterError(
                    f"{name} has {part} {nodes[name][part]}, {first} has {nodes[first][part]}: "
                    f"run env/setup.sh on {name} from the same commit (PYTHON=... chooses a Python)"
                )


def _check_different(nodes: Mapping[str, dict]) -> None:
    seen: dict[tuple, str] = {}
    for name, node in nodes.items():
        other = seen.setdefault((node["machine"], node["network"]), name)
        if other != name:
            raise ClusterError(f"{other} and {name} are the same node: remove one of them")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m helpers.nodes", description=__doc__)
    parser.add_argument("hosts", nargs="?", help="a hosts file")
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer is not None:
        network.exit_after(PROBE_SECONDS)
        _answer(options.answer)
        return
    try:
        found = survey(read_hosts(options.hosts))
    except ClusterError as error:
        sys.exit(str(error))
    for name, node in found.nodes.items():
        stack = ", ".join(f"{part} {node[part]}" for part in SAME_EVERYWHERE)
        print(f"{name}: {node['usable']} cores, {node['isa']}, {stack}")
    print(f"All reach each other, and the master at {found.address}.")


if __name__ == "__main__":
    main()
