"""What a training on N nodes should take: computation, and the communication that nothing hides.

A step is ``input + compute x (1 + spread x e(N)) + exposed / sum_every``. Latency and bandwidth
come from ``07_collectives`` or ``helpers.network``, the computation from a run on one rank. The
notebook that teaches it: ``10_scaling``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from helpers import published
from helpers.network import Link

BACKWARD = 2 / 3  # of a step's computation: twice the arithmetic of the forward pass
FAR = 10.0  # standard deviations


class ScalingError(ValueError):
    """A model of a training that makes no sense, or a fit that the measurements don't allow."""


def _check(link: Link, size: float, ranks: int) -> None:
    if not (0 <= link.latency < math.inf and 0 < link.bandwidth < math.inf):
        raise ScalingError(
            f"a link of {link.latency} s and {link.bandwidth} bytes/s: latency must be 0 or more, "
            "bandwidth above 0"
        )
    if not 0 <= size < math.inf or ranks < 1:
        raise ScalingError(f"{size} bytes on {ranks} ranks: expected bytes from 0, ranks from 1")


def ring(size: float, ranks: int, link: Link) -> float:
    """Seconds of an all-reduce of ``size`` bytes in a ring: 2 (n - 1) messages of size / n bytes.

    Source: Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication
    Operations in MPICH", sections 4.1 and 4.5. Raises ScalingError for nonsense.
    """
    _check(link, size, ranks)
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def tree(size: float, ranks: int, link: Link) -> float:
    """The same in a binomial tree: up to the root and down again, 2 log2(n) times all bytes.

    Source: as ``ring``, sections 4.3 and 4.4. Fewer messages, more bytes: for small ones.
    """
    _check(link, size, ranks)
    return 2 * math.ceil(math.log2(ranks)) * (link.latency + size / link.bandwidth)


ALGORITHMS: dict[str, Callable[[float, int, Link], float]] = {"ring": ring, "tree": tree}


def link_of(sizes: Sequence[float], seconds: Sequence[float], ranks: int) -> Link:
    """The link that explains all-reduce times, in a ring of so many ranks (``07_collectives``).

    Raises ScalingError for fewer than three sizes, a time that is not above 0, fewer than two
    ranks, or times that don't grow with the size.
    """
    from helpers.ccl.sweep import fit

    if len(set(sizes)) < 3:
        raise ScalingError(
            f"a fit of latency and bandwidth needs three sizes or more, got {len(set(sizes))}: two "
            "points fit any line, and don't show whether it is one"
        )
    if ranks < 2 or min(seconds) <= 0:
        raise ScalingError(f"{ranks} ranks and times from {min(seconds)} s: nothing to fit")
    cost = fit(sizes, seconds)
    if cost.bandwidth <= 0:
        raise ScalingError("the times don't grow with the size: measure larger messages")
    messages = 2 * (ranks - 1)
    return Link(bandwidth=cost.bandwidth * messages / ranks, latency=cost.latency / messages)


def expected_maximum(count: int) -> float:
    """How late the slowest of ``count`` ranks is, in standard deviations, if times are normal.

    The mean of the largest of ``count`` draws from a standard normal distribution: 0 for one,
    1 / sqrt(pi) for two. Source: David and Nagaraja 2003, "Order Statistics", section 3.1.
    """
    import numpy as np

    x = np.linspace(-FAR, FAR, 20_001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    below = np.cumsum(density) * (x[1] - x[0])
    return float(np.trapezoid(x * count * density * below ** (count - 1), x))


@dataclass(frozen=True)
class Step:
    """Seconds of a step, by what they go into."""

    input: float
    compute: float
    waiting: float
    exposed: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.input + self.compute + self.waiting + self.exposed


@dataclass(frozen=True)
class Training:
    """A training to be spread over nodes. Raises ScalingError for nonsense.

    ``samples`` an epoch, ``batch_size`` a rank; ``gradient_bytes`` are summed over the ranks.
    ``compute`` are the seconds that a rank computes in a step, beside the other ranks of its
    node, ``input`` those it waits for its samples. ``link`` leads to other nodes, ``inside`` to
    the other ranks of the node.

    ``overlap`` is the share of the backward pass in which communication gets on, as if it had the
    machine to itself; the last of the ``buckets`` can't hide. ``spread`` is the standard deviation
    of the ranks' compute times, as a share of ``compute``. Gradients are summed in one step of
    ``sum_every``.
    """

    samples: int
    epochs: int
    batch_size: int
    gradient_bytes: float
    compute: float
    link: Link
    input: float = 0.0
    ranks_per_node: int = 1
    inside: Link | None = None
    algorithm: str = "ring"
    overlap: float = 0.0
    buckets: int = 1
    spread: float = 0.0
    sum_every: int = 1

    def __post_init__(self):
        counts = {
            name: getattr(self, name)
            for name in ("samples", "epochs", "batch_size", "ranks_per_node", "buckets")
        } | {"sum_every": self.sum_every}
        for name, count in counts.items():
            if count < 1:
                raise ScalingError(f"{name} = {count}: expected 1 or more")
        if not 0 < self.compute < math.inf:
            raise ScalingError(f"compute = {self.compute} s: expected more than 0")
        if not (0 <= self.input < math.inf and 0 <= self.spread < math.inf):
            raise ScalingError(
                f"input = {self.input} s, spread = {self.spread}: expected 0 or more"
            )
        if not 0 <= self.overlap <= 1:
            raise ScalingError(f"overlap = {self.overlap}: expected a share from 0 to 1")
        if self.algorithm not in ALGORITHMS:
            raise ScalingError(f"algorithm {self.algorithm!r}: there are {', '.join(ALGORITHMS)}")
        if self.ranks_per_node > 1 and self.inside is None:
            raise ScalingError("several ranks a node need a link between them: set `inside`")
        _check(self.link, self.gradient_bytes, 1)
        _check(self.inside or self.link, self.gradient_bytes, 1)

    def ranks(self, nodes: int) -> int:
        """Ranks on so many nodes. Raises ScalingError for more nodes than samples allow."""
        ranks = nodes * self.ranks_per_node
        if nodes < 1 or ranks > self.samples:
            raise ScalingError(
                f"{nodes} nodes make {ranks} ranks for {self.samples} samples: expected 1 to "
                f"{self.samples // self.ranks_per_node} nodes"
            )
        return ranks

    def steps(self, nodes: int) -> int:
        """Steps of the whole training; the last one of an epoch may have fewer samples."""
        return self.epochs * math.ceil(self.samples / (self.batch_size * self.ranks(nodes)))

    def communication(self, nodes: int) -> float:
        """Seconds to sum the gradients with nothing else going on.

        First within each node, in a ring, then between the nodes; in each, bucket by bucket.
        """
        part = self.gradient_bytes / self.buckets
        within = ring(part, self.ranks_per_node, self.inside or self.link)
        return self.buckets * (within + ALGORITHMS[self.algorithm](part, nodes, self.link))

    def hideable(self) -> float:
        """Seconds of the backward pass behind which buckets can hide: after the first is ready."""
        return BACKWARD * self.compute * (1 - 1 / self.buckets)

    def step(self, nodes: int) -> Step:
        """A mean step on so many nodes. Raises ScalingError for more than samples allow."""
        ranks = self.ranks(nodes)
        communication = self.communication(nodes)
        last = communication / self.buckets
        exposed = max(last, communication - self.overlap * self.hideable())
        waiting = self.compute * self.spread * expected_maximum(ranks)
        return Step(self.input, self.compute, waiting, exposed / self.sum_every)

    def seconds(self, nodes: int) -> float:
        """The whole training on so many nodes."""
        return self.steps(nodes) * self.step(nodes).seconds

    def efficiency(self, nodes: int) -> float:
        """Speed-up over one node, divided by the nodes."""
        return self.seconds(1) / self.seconds(nodes) / nodes

    def knee(self, least: float = 0.5, most: int = 1024) -> int:
        """The most nodes whose efficiency, and that of all fewer, is at least ``least``."""
        found = 1
        for nodes in range(2, min(most, self.samples // self.ranks_per_node) + 1):
            if self.efficiency(nodes) < least:
                break
            found = nodes
        return found


BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


def from_published(task: str, link: Link, inside: Link | None = None) -> Training:
    """A published training, from its time on one node alone: without overlap, in a ring.

    ``task`` is "mrpc", "qqp" or "squad" (``helpers.published``), the batch 32 a rank. Where the
    run on several nodes had more ranks a node than the one on a single node, each rank has fewer
    cores, and computes as many times longer.
    """
    runs = [run for run in published.runs(task) if run["cpu"] == published.runs(task)[-1]["cpu"]]
    one, largest = runs[0], runs[-1]
    size = published.gradient_bytes(one["model"])
    per_node = largest["ranks"] // largest["nodes"]
    alone = Training(
        samples=published.samples(task),
        epochs=one["epochs"],
        batch_size=one["batch_size"],
        gradient_bytes=size,
        compute=one["seconds"],
        link=link,
        inside=inside,
        buckets=math.ceil(size / BUCKET_BYTES),
    )
    compute = per_node * one["seconds"] / alone.steps(1)
    return replace(alone, compute=compute, ranks_per_node=per_node)


def with_overlap(training: Training, nodes: int, seconds: float) -> Training:
    """The training with the overlap that makes it take ``seconds`` on so many nodes.

    Raises ScalingError where no overlap does.
    """
    step, communication = training.step(nodes), training.communication(nodes)
    other = step.seconds - step.exposed
    exposed = (seconds / training.steps(nodes) - other) * training.sum_every
    hidden = communication - exposed
    most = training.hideable()
    slack = 1e-9 * seconds
    if not -slack <= hidden <= most + slack:
        raise ScalingError(
            f"{nodes} nodes in {seconds:.0f} s leave {exposed:.3g} s a step to communication. "
            f"It takes {communication:.3g} s; 0 to {most:.3g} s can hide: state another link, "
            "spread or algorithm"
        )
    return replace(training, overlap=min(max(hidden / most, 0.0), 1.0) if most else 0.0)
