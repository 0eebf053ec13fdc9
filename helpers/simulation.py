"""A training on many nodes, simulated message by message: a check of ``helpers.scaling``.

The formula says how long a mean step takes. Here each rank has its own clock, each message waits
for both its ends, and a rank that is late holds up its neighbours first. The notebook that uses it:
``10_scaling``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helpers.network import Link
from helpers.scaling import BACKWARD, ScalingError, Training, ring


@dataclass(frozen=True)
class _Network:
    """Messages between nodes that also compute, until ``busy_until`` (seconds, one a node)."""

    link: Link
    overlap: float
    busy_until: np.ndarray

    def work(self, begin: np.ndarray, seconds: float, where=slice(None)) -> np.ndarray:
        """When communication is over that begins then; beside computation it is slowed down."""
        computing = np.maximum(self.busy_until[where] - begin, 0)
        if self.overlap:
            done = np.minimum(self.overlap * computing, seconds)
            alone = seconds - done
            return begin + np.where(alone > 0, computing, done / self.overlap) + alone
        return begin + computing + seconds

    def ring(self, clock: np.ndarray, size: float) -> np.ndarray:
        """Clocks after an all-reduce of ``size`` bytes; each round passes a part to the right."""
        nodes = len(clock)
        message = self.link.latency + size / nodes / self.link.bandwidth
        for _ in range(2 * (nodes - 1)):
            clock = self.work(np.maximum(clock, np.roll(clock, 1)), message)
        return clock

    def tree(self, clock: np.ndarray, size: float) -> np.ndarray:
        """The same: to node 0 in pairs, pairs of pairs, and so on, then back the same way."""
        nodes, message = len(clock), self.link.latency + size / self.link.bandwidth
        clock = clock.copy()
        distances = [2**level for level in range((nodes - 1).bit_length())]
        pairs = [np.arange(distance, nodes, 2 * distance) for distance in distances]
        up = [(children - d, children) for d, children in zip(distances, pairs, strict=True)]
        for target, source in up + [(children, parents) for parents, children in reversed(up)]:
            begin = np.maximum(clock[target], clock[source])
            clock[target] = self.work(begin, message, target)
            clock[source] = np.maximum(clock[source], clock[target])  # it sends one at a time
        return clock


def simulate(
    training: Training,
    nodes: int,
    steps: int = 20,
    seed: int = 0,
    traced: Sequence[float] | None = None,
) -> np.ndarray:
    """Seconds of each of ``steps`` steps on so many nodes, at the slowest rank's pace.

    A rank's computation in a step is drawn from ``traced``, seconds that were measured, or else
    from a normal distribution with the training's ``compute`` and ``spread``. Raises ScalingError
    as ``Training.step`` does, and for ``sum_every`` above 1 or traced times that aren't above 0.
    """
    ranks = training.ranks(nodes)
    if steps < 1 or training.sum_every > 1:
        raise ScalingError(
            f"{steps} steps, sum_every {training.sum_every}: the simulation needs 1 or "
            "more steps, and sums in each"
        )
    if traced is not None and (len(traced) == 0 or min(traced) <= 0):
        raise ScalingError("traced times: expected some, all above 0")
    random = np.random.default_rng(seed)
    if traced is not None:
        computes = random.choice(np.asarray(traced, float), (steps, ranks))
    else:
        drawn = random.normal(1, training.spread, (steps, ranks))
        computes = training.compute * np.maximum(drawn, 0)
    part = training.gradient_bytes / training.buckets
    within = ring(part, training.ranks_per_node, training.inside or training.link)
    clock, ends = np.zeros(ranks), [0.0]
    for compute in computes:
        begin = clock + training.input
        backward = (begin + compute).reshape(nodes, -1)
        network = _Network(training.link, training.overlap, backward.max(1))
        all_reduce = getattr(network, training.algorithm)
        done = np.zeros(nodes)
        for bucket in range(1, training.buckets + 1):
            still = BACKWARD * compute * (1 - bucket / training.buckets)
            ready = (begin + compute - still).reshape(nodes, -1).max(1)
            done = all_reduce(network.work(np.maximum(done, ready), within), part)
        clock = np.maximum(np.repeat(done, training.ranks_per_node), begin + compute)
        ends.append(clock.max())
    return np.diff(ends)
