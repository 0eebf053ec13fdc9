"""Several nodes on one machine: ``env/lab/nodes`` from Python.

with Lab(3) as lab, Cluster(lab.hosts, 1, oversubscribe=True) as cluster:
    ...

The notebook that teaches it: ``06_a_cluster``.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.nodes import SPACE

SCRIPT = Path(__file__).resolve().parents[1] / "env/lab/nodes"
LIMIT_SECONDS = 180  # the first time, it may install sshd
NOT_POSSIBLE = 3


class LabError(RuntimeError):
    """``env/lab/nodes`` refused or failed; the message is its own."""


class NoLab(LabError):
    """This machine can't play several nodes, or not in this way; the message says why."""


class Lab:
    """So many nodes on this machine, each with an address, a hostname and an sshd of its own.

    They share its cores, memory and files. ``prefix`` and ``network`` (three numbers) name
    nodes and addresses. ``with Lab(3)`` removes them at the end, unless they were up before.
    Raises NoLab without root, or where the kernel has no network namespaces.
    """

    def __init__(self, nodes: int = 3, prefix: str = "node", network: str = "10.77.0"):
        self.nodes = [f"{prefix}{i + 1}" for i in range(nodes)]
        self._environment = {"LAB_PREFIX": prefix, "LAB_NET": network}
        self._folder = Path(f"/run/course-{prefix}s")
        self.made = False

    @property
    def hosts(self) -> Path:
        """The hosts file."""
        return self._folder / "hosts"

    def _run(self, *arguments: str) -> str:
        try:
            ran = subprocess.run(
                [SCRIPT, *arguments],
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise LabError(f"{SCRIPT} took over {LIMIT_SECONDS} s") from None
        if ran.returncode:
            kind = NoLab if ran.returncode == NOT_POSSIBLE else LabError
            raise kind(ran.stderr.strip().removeprefix("[lab] ERROR: "))
        return ran.stdout

    def up(self) -> str:
        """Makes the nodes; where these or more are up already, does nothing. Returns what was said.

        Raises LabError where fewer are up: somebody may be using them.
        """
        if " " in sys.prefix:
            raise NoLab(SPACE.format(sys.prefix))
        said = self._run("up", str(len(self.nodes)))
        self.made = self.made or "already" not in said
        return said

    def down(self) -> str:
        """Removes the nodes and all that belongs to them; harmless where there are none."""
        self.made = False
        return self._run("down")

    @contextmanager
    def rate(self, speed: str, delay: str = "", loss: str = "") -> Iterator[None]:
        """Shapes each link, both ways, for a block: "1gbit", and delay ("1ms"), loss ("0.1%").

        Raises NoLab for delay and loss where the kernel has no netem.
        """
        record = self._folder / "rate"
        before = record.read_text().split() if record.exists() else ["none"]
        self._run("rate", speed, *filter(None, (delay, loss)))
        try:
            yield
        finally:
            self._run("rate", *before)

    def status(self) -> str:
        """The nodes, their links and traffic, as a text."""
        return self._run("status")

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent by each node over the bridge, since it is up."""
        # what the bridge's end of the cable sends, the node receives
        counters = {node: Path("/sys/class/net", node, "statistics") for node in self.nodes}
        return {
            node: tuple(int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
            for node, folder in counters.items()
        }

    def __enter__(self):
        self.up()
        return self

    def __exit__(self, *_):
        if self.made:
            self.down()
