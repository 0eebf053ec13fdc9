"""Addresses, interfaces and ssh of a node, and what a link between two nodes gives.

``python -m helpers.network node1 node2`` measures and prints it. The notebook that uses it:
``06_a_cluster``.
"""

import argparse
import os
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# never asks, gives up soon
SSH_OPTIONS = ("-oConnectTimeout=5", "-oBatchMode=yes")
PINGS = 200
LIMIT_SECONDS = 30


class NetworkError(RuntimeError):
    """Two nodes can't reach each other; the message names both, and why."""


@dataclass(frozen=True)
class Link:
    """Bandwidth in bytes/s; latency in s: half of a round trip of one byte, the median."""

    bandwidth: float
    latency: float

    def __str__(self):
        return f"{8 * self.bandwidth / 1e9:.2f} Gbit/s, {1e6 * self.latency:.0f} µs"


def machine() -> tuple[str, str]:
    """Boot id and network namespace: they tell machines apart, and the nodes that one plays."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/net")


def exit_after(seconds: float) -> None:
    """Ends this process then, whatever it waits for: its peer may be silent for ever."""
    limit = threading.Timer(seconds, os._exit, [1])
    limit.daemon = True
    limit.start()


def own_address() -> str:
    """The address at which the other side of this ssh session found us; 127.0.0.1 without one."""
    return os.environ.get("SSH_CONNECTION", "? ? 127.0.0.1 ?").split()[2]


def address_towards(host: str) -> str:
    """This machine's address as a host sees it. Raises OSError where no way leads there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, only asks for the route
        return probe.getsockname()[0]


def interface_of(address: str) -> str:
    """The name of this machine's network interface with that address, or raises OSError."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if address in {entry.address.partition("%")[0] for entry in entries}:
            return name
    raise OSError(f"no interface has the address {address}")


def interface_towards(host: str) -> str:
    """The name of the interface that leads to a host, or raises OSError."""
    return interface_of(address_towards(host))


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this machine, or raises OSError."""
    import psutil

    for entry in psutil.net_if_addrs().get(interface, ()):
        if entry.family == socket.AF_INET:
            return entry.address
    raise OSError(f"there is no interface {interface} with an IPv4 address")


def listen(address: str) -> socket.socket:
    """A server on a free port of one of this machine's addresses. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=512)


def _receive() -> None:
    with listen(own_address()) as server:
        server.settimeout(LIMIT_SECONDS)
        print(*server.getsockname()[:2], flush=True)
        peer, _ = server.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            peer.sendall(peer.recv(1))
        total, began, block = 0, None, bytearray(1 << 20)
        while count := peer.recv_into(block):
            began = began or time.perf_counter()
            total += count
        print(total / (time.perf_counter() - began), flush=True)


def _send(address: str, port: int, seconds: float) -> None:
    with socket.create_connection((address, port), timeout=5) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(PINGS):
            began = time.perf_counter()
            peer.sendall(b"x")
            peer.recv(1)
            times.append((time.perf_counter() - began) / 2)
        block, deadline = bytes(1 << 18), time.perf_counter() + seconds
        peer.settimeout(None)
        while time.perf_counter() < deadline:
            peer.sendall(block)
    print(statistics.median(times), flush=True)


def measure(source: str, target: str, seconds: float = 1.0) -> Link:
    """Sends from one node to another, for so many seconds, and says what the link gave.

    Nodes are names that ``ssh`` knows, or "localhost". Raises NetworkError where one can't be
    reached or doesn't answer within 30 s.
    """

    processes = []

    def python(node: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "helpers.network", *arguments]
        process = subprocess.Popen(
            command if node == "localhost" else ["ssh", *SSH_OPTIONS, node, shlex.join(command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    def answer(process: subprocess.Popen, node: str) -> str:
        output, errors = process.communicate()
        if process.returncode:
            why = (errors.strip().splitlines() or [f"no answer within {LIMIT_SECONDS} s"])[-1]
            raise NetworkError(f"{source} to {target}: {node} failed: {why}")
        return output

    def stop() -> None:
        for process in processes:
            process.kill()

    limit = threading.Timer(LIMIT_SECONDS, stop)
    limit.start()
    try:
        receiver = python(target, "--receive")
        address = receiver.stdout.readline().split()
        if not address:
            answer(receiver, target)
        sender = python(source, "--send", *address, str(seconds))
        latency = float(answer(sender, source))
        return Link(float(answer(receiver, target)), latency)
    finally:
        limit.cancel()
        stop()
        for process in processes:
            process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m helpers.network", description=__doc__)
    parser.add_argument("nodes", nargs="*", metavar="NODE")
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive or options.send:
        exit_after(LIMIT_SECONDS)
    if options.receive:
        _receive()
    elif options.send:
        address, port, seconds = options.send
        _send(address, int(port), float(seconds))
    elif len(options.nodes) == 2:
        try:
            print(measure(*options.nodes))
        except NetworkError as error:
            sys.exit(str(error))
    else:
        parser.error("name two nodes")


if __name__ == "__main__":
    main()
