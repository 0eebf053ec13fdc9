"""Fair comparisons: warm-up, interleaved repeats, median, spread, ratio."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

MINIMUM_REPEATS = 3


def _refuse_too_few(repeats: int) -> None:
    if repeats < MINIMUM_REPEATS:
        raise ValueError(f"{repeats} repeats are too few to compare: use {MINIMUM_REPEATS} or more")


class Stopwatch:
    """Context manager that measures wall time: ``seconds`` is set when the block ends."""

    seconds: float | None = None

    def __enter__(self):
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exception):
        self.seconds = time.perf_counter() - self._start


@dataclass(frozen=True)
class Comparison:
    """Times of several variants that took turns.

    ``seconds`` maps each variant's name to its times, one a round, in seconds. The first
    variant is the baseline.
    """

    seconds: dict[str, list[float]]

    def __post_init__(self):
        counts = {name: len(times) for name, times in self.seconds.items()}
        if len(counts) < 2:
            raise ValueError(f"a comparison needs two variants or more, got {list(counts)}")
        if len(set(counts.values())) > 1:
            raise ValueError(f"every variant needs the same number of repeats, got {counts}")
        _refuse_too_few(min(counts.values()))

    @property
    def baseline(self) -> str:
        return next(iter(self.seconds))

    def median(self, name: str) -> float:
        """Median time of a variant, in seconds."""
        return median(self.seconds[name])

    def spread(self, name: str) -> float:
        """(max - min) / median of a variant's times."""
        times = self.seconds[name]
        return (max(times) - min(times)) / median(times)

    def speedups(self, name: str) -> list[float]:
        """How many times faster than the baseline, round by round."""
        pairs = zip(self.seconds[self.baseline], self.seconds[name], strict=True)
        return [base / other for base, other in pairs]

    def speedup(self, name: str) -> float:
        """Median over the rounds of baseline time / variant time."""
        return median(self.speedups(name))

    def is_clear(self, name: str) -> bool:
        """Whether every round agrees on which of baseline and variant is faster."""
        ratios = self.speedups(name)
        return min(ratios) > 1 or max(ratios) < 1

    def rows(self) -> list[dict]:
        """One row a variant: name, median in seconds, spread, speed-up, and the verdict."""
        return [
            {
                "variant": name,
                "median s": self.median(name),
                "spread": self.spread(name),
                "speed-up": self.speedup(name),
                "verdict": "baseline" if name == self.baseline else self.verdict(name),
            }
            for name in self.seconds
        ]

    def verdict(self, name: str) -> str:
        if not self.is_clear(name):
            return "no clear difference: the spread is larger than it"
        return "faster" if self.speedup(name) > 1 else "slower"

    def _repr_html_(self) -> str:
        head = "<tr><th>variant<th>median<th>spread<th>speed-up<th>verdict"
        body = "".join(
            f"<tr><td>{row['variant']}<td>{row['median s']:.4g} s<td>±{row['spread'] / 2:.0%}"
            f"<td>{row['speed-up']:.2f}x<td>{row['verdict']}"
            for row in self.rows()
        )
        return f"<table>{head}{body}</table>"


def compare(
    variants: dict[str, Callable[[], object]], repeats: int = 5, warmup: int = 1
) -> Comparison:
    """Times variants that take turns (A B A B ...), after ``warmup`` rounds that do not count.

    Raises ValueError for fewer than two variants or fewer than ``MINIMUM_REPEATS`` repeats,
    before anything runs.
    """
    _refuse_too_few(repeats)
    if len(variants) < 2:
        raise ValueError(f"a comparison needs two variants or more, got {list(variants)}")
    seconds = {name: [] for name in variants}
    for turn in range(warmup + repeats):
        for name, run in variants.items():
            with Stopwatch() as watch:
                run()
            if turn >= warmup:
                seconds[name].append(watch.seconds)
    return Comparison(seconds)
