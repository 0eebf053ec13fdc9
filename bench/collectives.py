"""all_reduce on ccl against gloo, on the same two ranks: ``make bench``.

The backends take turns within one run, and the ranks are not pinned, so that neither side is
handicapped: the ratios count, not the times.
"""

import sys
from statistics import median

from helpers.ccl.mpi import run
from helpers.ccl.sweep import KB, MB, sweep

# how many times gloo's speed we want at least
GOALS = {
    "float32": {KB: 2.0, MB: 4.0, 25 * MB: 2.5, 100 * MB: 2.0},
    "bfloat16": {KB: 2.0, MB: 5.0, 25 * MB: 4.0, 100 * MB: 2.5},
}
CALLS, REPEATS = 2000, 7


def overhead() -> None:
    """What each rank does: times a call in a group of its own, through torch and bare oneCCL."""
    import torch
    import torch.distributed as dist

    from helpers import ccl
    from helpers.ccl import build
    from helpers.timing import Stopwatch

    ccl.init()
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group, tensor = groups[dist.get_rank()], torch.ones(1)
    backend = group._get_backend(torch.device("cpu"))
    ours, bare = [], []
    for _ in range(REPEATS):
        with Stopwatch() as watch:
            for _ in range(CALLS):
                dist.all_reduce(tensor, group=group)
        ours.append(watch.seconds / CALLS * 1e6)
        bare.append(build.load().bare_allreduce(backend, tensor, CALLS) / CALLS * 1e6)
    if dist.get_rank() == 0:
        print(
            f"one rank, one element: {median(ours):.1f} us a call, bare oneCCL "
            f"{median(bare):.1f} us, overhead {median(ours) - median(bare):.1f} us (goal: under 20)"
        )


def main() -> None:
    print(
        f"{'dtype':>9}{'KB':>8}{'gloo us':>10}{'ccl us':>10}{'ratio':>8}"
        f"{'(min-max)':>14}{'goal':>6}"
    )
    missed = 0
    for dtype, goals in GOALS.items():
        result = sweep(tuple(goals), dtype, rounds=9, timeout=600)
        if "ccl" not in result.seconds:
            sys.exit("no oneCCL here, so there is nothing to compare: python -m helpers.ccl.build")
        for size, goal in goals.items():
            times = result.comparison(size)
            ratios = times.speedups("ccl")
            print(
                f"{dtype:>9}{size // KB:>8}{times.median('gloo') * 1e6:>10.0f}"
                f"{times.median('ccl') * 1e6:>10.0f}{median(ratios):>8.2f}"
                f"{f'({min(ratios):.1f}-{max(ratios):.1f})':>14}{goal:>6.1f}"
                f"{'' if median(ratios) >= goal else '  missed'}",
                flush=True,
            )
            missed += median(ratios) < goal
    said = run(["-m", "bench.collectives", "overhead"], variables={"OMP_NUM_THREADS": "1"})
    print(next(line for line in said.splitlines() if "overhead" in line))
    sys.exit(f"{missed} goals missed" if missed else 0)


if __name__ == "__main__":
    overhead() if sys.argv[1:] == ["overhead"] else main()
