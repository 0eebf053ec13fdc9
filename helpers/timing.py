"""Fair comparisons: warm-up, interleaved repeats, median, spread, ratio.

The notebook that teaches them: ``00_start_here``.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from tqdm import tqdm

from helpers.tables import Table

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


class Throughput(Stopwatch):
    """Stopwatch with a progress bar that counts samples.

    ``total`` is the number of samples to come, ``label`` stands before the bar. Call
    ``update(count)`` after each batch; ``samples_per_second`` is there when the block has ended.
    Of several ranks, one should ``show`` the bar.
    """

    def __init__(self, total: int, label: str = "", show: bool = True):
        self._bar = tqdm(
            total=total,
            desc=label,
            unit=" samples",
            file=sys.stdout,
            leave=False,
            delay=0.5,
            disable=not show,
        )
        self.samples = 0

    def update(self, count: int) -> None:
        self.samples += count
        self._bar.update(count)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._bar.close()

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds


@dataclass(frozen=True)
class Comparison:
    """Times of several variants that took turns.

    ``seconds`` maps each variant's name to its times, one a round, in seconds. The first
    variant is the baseline. ``beside`` adds columns to the table, so that no speed-up stands
    without its metric: it maps a column's name to a value for each variant.

    Raises ValueError for fewer than two variants, rounds that differ in number, fewer than
    ``MINIMUM_REPEATS`` rounds, or a column that lacks a variant.
    """

    seconds: dict[str, list[float]]
    beside: dict[str, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self):
        counts = {name: len(times) for name, times in self.seconds.items()}
        if len(counts) < 2:
            raise ValueError(f"a comparison needs two variants or more, got {list(counts)}")
        if len(set(counts.values())) > 1:
            raise ValueError(f"every variant needs the same number of repeats, got {counts}")
        _refuse_too_few(min(counts.values()))
        for column, values in self.beside.items():
            if values.keys() != counts.keys():
                raise ValueError(f"column {column!r} needs a value for each of {list(counts)}")

    @property
    def baseline(self) -> str:
        """Name of the variant that the others are compared with."""
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

    def verdict(self, name: str) -> str:
        """Faster or slower than the baseline, where all rounds agree on it."""
        if name == self.baseline:
            return "baseline"
        ratios = self.speedups(name)
        if min(ratios) > 1:
            return "faster"
        if max(ratios) < 1:
            return "slower"
        return "unclear: the spread is larger than the difference"

    def rows(self) -> list[dict[str, object]]:
        """The table, one row a variant; times in seconds, ratios as median (min-max)."""
        table = []
        for name in self.seconds:
            ratios = self.speedups(name)
            speedup = f"{median(ratios):.2f}x"
            if name != self.baseline:
                speedup += f" ({min(ratios):.2f}-{max(ratios):.2f})"
            table.append(
                {
                    "variant": name,
                    "median": f"{self.median(name):.3g} s",
                    "spread": f"{self.spread(name):.0%}",
                    "speed-up": speedup,
                    "verdict": self.verdict(name),
                }
                | {column: values[name] for column, values in self.beside.items()}
            )
        return table

    def _repr_html_(self) -> str:
        rounds = len(self.seconds[self.baseline])
        return (
            f"{Table(self.rows())._repr_html_()}"
            f"<p>{rounds} rounds, variants in turn; spread is (max - min) / median.</p>"
        )


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
