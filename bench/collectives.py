"""all_reduce on ccl against gloo, on the same two ranks: ``python -m bench.collectives``.

The backends take turns within one run, and the ranks are not pinned, so that neither side is
handicapped: the ratios count, not the times. Results go to build/collectives.json.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

RESULT = Path("build/collectives.json")
KB, MB = 1 << 10, 1 << 20
CALLS = {KB: 200, MB: 40, 25 * MB: 4, 100 * MB: 2}
# how many times gloo's speed we want at least
GOALS = {
    "float32": {KB: 2.0, MB: 4.0, 25 * MB: 2.5, 100 * MB: 2.0},
    "bfloat16": {KB: 2.0, MB: 5.0, 25 * MB: 4.0, 100 * MB: 2.5},
}


def overhead(calls: int = 2000) -> dict[str, float]:
    """Microseconds a call in a group of one rank: through torch.distributed, and bare."""
    import torch
    import torch.distributed as dist

    from helpers.ccl import build
    from helpers.timing import Stopwatch

    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group, tensor = groups[dist.get_rank()], torch.ones(1)
    backend = group._get_backend(torch.device("cpu"))
    ours, bare = [], []
    for _ in range(7):
        with Stopwatch() as watch:
            for _ in range(calls):
                dist.all_reduce(tensor, group=group)
        ours.append(watch.seconds / calls * 1e6)
        bare.append(build.load().bare_allreduce(backend, tensor, calls) / calls * 1e6)
    ours, bare = sorted(ours)[3], sorted(bare)[3]
    return {"call_us": ours, "bare_us": bare, "overhead_us": ours - bare}


def measure(rounds: int) -> dict:
    """What one rank does: both backends in turn, each size and dtype."""
    import torch
    import torch.distributed as dist

    from helpers import ccl
    from helpers.timing import compare

    place = ccl.init(timeout=timedelta(seconds=60))
    if place.backend != "ccl":
        sys.exit("no ccl here, so there is nothing to compare; the reason stands above")
    torch.set_num_threads(1)
    groups = {"gloo": dist.new_group(backend="gloo"), "ccl": dist.group.WORLD}
    rows = []
    for dtype, goals in GOALS.items():
        for size, goal in goals.items():
            tensor = torch.zeros(
                size // getattr(torch, dtype).itemsize, dtype=getattr(torch, dtype)
            )

            def run(group, tensor=tensor, calls=CALLS[size]):
                for _ in range(calls):
                    dist.all_reduce(tensor, group=group)

            comparison = compare(
                {name: lambda group=group: run(group) for name, group in groups.items()}, rounds
            )
            row = {"dtype": dtype, "bytes": size, "goal": goal, "ratio": comparison.speedup("ccl")}
            row |= {f"{name}_us": comparison.median(name) / CALLS[size] * 1e6 for name in groups}
            rows.append(row | {"ratios": comparison.speedups("ccl")})
    return {"library": place.library, "rounds": rounds, "rows": rows} | overhead()


def table(result: dict) -> str:
    lines = [f"{'dtype':>9}{'KB':>8}{'gloo us':>10}{'ccl us':>10}{'ratio':>8}{'goal':>6}"]
    for row in result["rows"]:
        lines.append(
            f"{row['dtype']:>9}{row['bytes'] // KB:>8}{row['gloo_us']:>10.0f}{row['ccl_us']:>10.0f}"
            f"{row['ratio']:>8.2f}{row['goal']:>6.1f}"
        )
    lines.append(
        f"one rank, one element: {result['call_us']:.1f} us a call, bare oneCCL "
        f"{result['bare_us']:.1f} us, overhead {result['overhead_us']:.1f} us (goal: under 20)"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--launcher", choices=("mpiexec", "torchrun"), default="mpiexec")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        result = measure(options.rounds)
        if int(os.environ["RANK"]) == 0:
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.write_text(json.dumps(result, indent=2))
            print(table(result), flush=True)
        return
    program = ["-m", "bench.collectives", "--rank", "--rounds", str(options.rounds)]
    command = {
        "mpiexec": [f"{sys.prefix}/bin/mpiexec", "-n", "2", sys.executable],
        "torchrun": [f"{sys.prefix}/bin/torchrun", "--standalone", "--nproc-per-node", "2"],
    }[options.launcher]
    environment = os.environ | {"I_MPI_PIN": "0", "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run(command + program, env=environment, timeout=900).returncode)


if __name__ == "__main__":
    main()
