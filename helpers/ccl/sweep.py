"""How long an all-reduce takes, over message sizes, on oneCCL and gloo side by side.

The notebook that teaches it: ``07_collectives``.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

from helpers.ccl.mpi import run
from helpers.timing import Comparison

KB, MB = 1 << 10, 1 << 20
SIZES = tuple(KB << power for power in range(0, 16, 2))


@dataclass(frozen=True)
class Sweep:
    """Seconds an all-reduce took: ``seconds[backend][size]`` has one value a round.

    Sizes are in bytes; ``library`` was behind ccl. Where there is no oneCCL, only gloo is there.
    """

    ranks: int
    dtype: str
    library: str
    seconds: dict[str, dict[int, list[float]]]

    def comparison(self, size: int) -> Comparison:
        """The backends compared at one size. Raises ValueError where there is only one."""
        return Comparison({name: by_size[size] for name, by_size in self.seconds.items()})

    def median(self, backend: str) -> list[float]:
        """Median seconds at each size, in the order of the sizes."""
        return [median(times) for times in self.seconds[backend].values()]


@dataclass(frozen=True)
class Cost:
    """A message of n bytes takes ``latency`` + n / ``bandwidth`` (seconds, bytes/s)."""

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """What a call with so many bytes should take."""
        return self.latency + size / self.bandwidth


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Cost:
    """The latency and bandwidth that come closest to measured times, relative errors counted.

    Source of the model: Hockney 1994, "The communication challenge for MPP", Parallel Computing
    20(3). Raises ValueError for fewer than two different sizes.
    """
    import numpy as np

    if len(set(sizes)) < 2:
        raise ValueError("latency and bandwidth need times of two sizes or more")
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    columns = np.stack([np.ones_like(size), size], axis=1) / time[:, None]
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones_like(time), rcond=None)
    return Cost(max(float(latency), 0.0), 1 / float(slope))


def bus_bandwidth(size: float, seconds: float, ranks: int) -> float:
    """Bytes/s that each rank's link carries in an all-reduce: 2 (n - 1) / n x size / time.

    Source: NVIDIA, nccl-tests, doc/PERFORMANCE.md; the factor is the least that each rank has to
    send (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2)).
    """
    return 2 * (ranks - 1) / ranks * size / seconds


def sweep(
    sizes: Sequence[int] = SIZES,
    dtype: str = "float32",
    ranks: int = 2,
    rounds: int = 5,
    variables: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> Sweep:
    """Times all_reduce on fresh ranks, gloo and ccl taking turns; one thread and no pinning each.

    ``sizes`` are in bytes; ``variables`` are set for all ranks. Raises RanksError.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        arguments = ["-m", "helpers.ccl.sweep", str(result), dtype, str(rounds), *map(str, sizes)]
        run(arguments, ranks, timeout, {"OMP_NUM_THREADS": "1"} | dict(variables or {}))
        found = json.loads(result.read_text())
    seconds = {
        name: dict(zip(sizes, times, strict=True)) for name, times in found["seconds"].items()
    }
    return Sweep(ranks, dtype, found["library"], seconds)


def _calls(size: int) -> int:
    """Calls in a turn: enough to be timed, few enough to be over soon."""
    return max(2, min(100, 32 * MB // size))


def main() -> None:
    """What each rank does; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    from helpers import ccl
    from helpers.timing import Stopwatch

    parser = argparse.ArgumentParser(prog="python -m helpers.ccl.sweep", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("rounds", type=int)
    parser.add_argument("sizes", type=int, nargs="+")
    options = parser.parse_args()
    found = ccl.init(timeout=timedelta(seconds=60))
    groups = {"gloo": dist.new_group(backend="gloo")}
    if found.backend == "ccl":
        groups["ccl"] = dist.group.WORLD
    dtype = getattr(torch, options.dtype)
    seconds = {name: [] for name in groups}
    for size in options.sizes:
        tensor = torch.zeros(max(1, size // dtype.itemsize), dtype=dtype)
        times = {name: [] for name in groups}
        for turn in range(1 + options.rounds):
            for name, group in groups.items():
                dist.barrier(group)
                with Stopwatch() as watch:
                    for _ in range(_calls(size)):
                        dist.all_reduce(tensor, group=group)
                if turn:  # the first one warms up
                    times[name].append(watch.seconds / _calls(size))
        for name in groups:
            seconds[name].append(times[name])
    if found.place.rank == 0:
        options.result.write_text(json.dumps({"library": found.library, "seconds": seconds}))


if __name__ == "__main__":
    main()
