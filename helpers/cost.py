"""What a run costs: its price, its place among the other choices, and what interruptions add.

Times are in hours. The notebook that teaches it: ``11_cost``.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from helpers.prices import MARKETS, Instance

MOST_INTERRUPTIONS = 1000  # expected in one run; with more, it hardly gets on


class CostError(ValueError):
    """A run or a choice that makes no sense, or one that would hardly ever end."""


def _check(allowed: str, accepted: bool, **values) -> None:
    if not accepted:
        given = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        raise CostError(f"{given}: expected {allowed}")


def _check_count(**values) -> None:
    for name, value in values.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        _check("a whole number from 1", whole and value >= 1, **{name: value})


def dollars(nodes: int, hours: float, price: float) -> float:
    """What so many nodes cost for so many hours, at a price for an hour of one.

    Clouds bill by the second; AWS at least one minute. Source:
    https://aws.amazon.com/ec2/pricing/on-demand/. Raises CostError for nonsense.
    """
    _check_count(nodes=nodes)
    _check("a number from 0", 0 <= hours < math.inf, hours=hours)
    _check("a number from 0", 0 <= price < math.inf, price=price)
    return nodes * hours * price


@dataclass(frozen=True)
class Option:
    """One way to do a job. Raises CostError for nonsense."""

    instance: str
    nodes: int
    market: str
    hours: float
    dollars: float

    def __post_init__(self):
        _check_count(nodes=self.nodes)
        _check(" or ".join(MARKETS), self.market in MARKETS, market=self.market)
        _check("a number above 0", 0 < self.hours < math.inf, hours=self.hours)
        _check("a number from 0", 0 <= self.dollars < math.inf, dollars=self.dollars)


def option(instance: Instance, nodes: int, hours: float, market: str = MARKETS[0]) -> Option:
    """The option to rent so many instances for so many hours, without interruptions."""
    _check(" or ".join(MARKETS), market in MARKETS, market=market)
    cost = dollars(nodes, hours, instance.price(market))
    return Option(instance.name, nodes, market, hours, cost)


def frontier(options: Iterable[Option]) -> list[Option]:
    """The options that no other one beats, from the fastest to the cheapest.

    One beats another if it is not worse in hours nor in dollars, and better in one of them: a
    Pareto frontier. Equal ones all stay.
    """
    best = []
    for its in sorted(options, key=lambda its: (its.hours, its.dollars)):
        if not best or its.dollars < best[-1].dollars or _equal(its, best[-1]):
            best.append(its)
    return best


def _equal(one: Option, other: Option) -> bool:
    return (one.hours, one.dollars) == (other.hours, other.dollars)


@dataclass(frozen=True)
class InterruptedRun:
    """A run that any of its nodes ends when it is taken away. Raises CostError for nonsense.

    ``hours`` it would take undisturbed and without checkpoints. Each of ``nodes`` is interrupted
    at a constant ``rate`` an hour. ``checkpoint`` hours go into saving the state once, ``restart``
    hours pass from an interruption until training goes on: new node, start, load.
    """

    hours: float
    nodes: int
    rate: float
    checkpoint: float
    restart: float

    def __post_init__(self):
        _check_count(nodes=self.nodes)
        _check("a number above 0", 0 < self.hours < math.inf, hours=self.hours)
        for name in ("rate", "checkpoint", "restart"):
            value = getattr(self, name)
            _check("a number from 0", 0 <= value < math.inf, **{name: value})

    @property
    def between(self) -> float:
        """Mean hours from one interruption to the next, of whichever node."""
        return 1 / (self.nodes * self.rate) if self.rate else math.inf

    def young(self) -> float:
        """The best hours between checkpoints, roughly: sqrt(2 checkpoint x between).

        Source: Young 1974, "A first order approximation to the optimum checkpoint interval",
        CACM 17(9).
        """
        return math.sqrt(2 * self.checkpoint * self.between) if self.checkpoint else 0.0

    def daly(self) -> float:
        """The same, to higher order; it stays good where interruptions are frequent.

        Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
        dumps", Future Generation Computer Systems 22(3), equation 37.
        """
        if self.checkpoint >= 2 * self.between:
            return self.between
        small = self.checkpoint / (2 * self.between)
        return self.young() * (1 + math.sqrt(small) / 3 + small / 9) - self.checkpoint

    def expected(self, interval: float) -> float:
        """Mean hours of the run with a checkpoint after each ``interval`` hours of training.

        between x e^(restart / between) x (e^((interval + checkpoint) / between) - 1) x hours /
        interval: exact where the interval divides the hours. Restarts may be interrupted, too, and
        the state is saved at the end. Infinity where the number is too large. Source: Daly 2006,
        equation 20.
        """
        step = self._step(interval)
        if self.between == math.inf:
            return self.hours * (1 + self.checkpoint / step)
        try:
            segment = math.expm1((step + self.checkpoint) / self.between)
            restarted = math.exp(self.restart / self.between)
            return self.between * restarted * segment * (self.hours / step)
        except OverflowError:
            return math.inf

    def simulate(self, interval: float, runs: int = 1000, seed: int = 0) -> np.ndarray:
        """Hours of so many runs, each with its own interruptions, drawn for each node.

        Raises CostError where a run would be interrupted more than ``MOST_INTERRUPTIONS`` times.
        """
        _check_count(runs=runs)
        self._refuse_endless(interval)
        step = self._step(interval)
        segments = math.ceil(self.hours / step - 1e-9)
        draw = np.random.default_rng(seed).exponential
        mean = 1 / self.rate if self.rate else math.inf
        hours, saved, running = np.zeros(runs), np.zeros(runs, int), np.arange(runs)
        pause = 0.0
        while running.size:
            until = draw(mean, (running.size, self.nodes)).min(axis=1)
            training = self.hours - step * saved[running]
            left = pause + training + self.checkpoint * (segments - saved[running])
            hours[running] += np.minimum(until, left)
            worked = np.clip(until - pause, 0, left)
            saved[running] += (worked // (step + self.checkpoint)).astype(int)
            running, pause = running[until < left], self.restart
        return hours

    def _step(self, interval: float) -> float:
        _check("a number above 0", interval > 0, interval=interval)
        return float(min(interval, self.hours))

    def _refuse_endless(self, interval: float) -> None:
        interruptions = self.expected(interval) / self.between
        if interruptions > MOST_INTERRUPTIONS:
            raise CostError(
                f"a checkpoint each {interval:.3g} h, {self.checkpoint:.3g} h to save, "
                f"{self.restart:.3g} h to restart and an interruption each {self.between:.3g} h: "
                f"a run would see about {interruptions:.2g} interruptions, and hardly ever get "
                "from one checkpoint to the next. Choose a shorter interval, or fewer nodes"
            )
