"""Two ranks of one core each against one rank of one core: ``make bench``.

A model of DistilBERT's size with random weights, since speed doesn't depend on them, with the
course's recipe and what notebook 10 advises: only touched rows of the embedding are sent, and at
1 Gbit/s (two nodes of the lab, root only) batches are accumulated and gradients are bf16.

A round is an epoch. Two ranks train on each sample twice, so that each of them has the lengths,
and the padding, that one rank has: among few samples, a batch of twice the size would be padded
more. All sides take turns within one run. COURSE_DATA names a folder with real MRPC, else it is
the built-in set, whose texts are shorter. Writes build/scaling.json.
"""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench.recipe import random_model
from helpers import data, profiles
from helpers.cluster import Cluster
from helpers.lab import Lab, NoLab
from helpers.profiles import Task
from helpers.timeline import split
from helpers.timing import compare

RESULTS = Path(__file__).resolve().parent.parent / "build/scaling.json"
ROUNDS, BATCHES = 5, 4
GOALS = {(32, "unshaped"): 0.95, (8, "unshaped"): 0.90, (32, "1 Gbit/s"): 0.85}
INPUT_GOAL = 0.02
ADVICE = {"touched_rows": True}
SLOW_ADVICE = ADVICE | {"accumulate": 4, "bf16": True}
SET_UP = """
import os
from mpi4py import MPI

cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, {cores[MPI.COMM_WORLD.rank % len(cores)]})  # nodes of the lab share cores
import torch
import torch.distributed as dist

torch.set_num_threads(1)
from helpers import ccl
from helpers.data import VARIABLE
from helpers.distributed import Exchange
from helpers.finetune import FineTuning
from helpers.recipe import FAST
from helpers.timeline import trace

ccl.init()
os.environ.pop(VARIABLE, None)  # the folders below hold that data
solos = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
"""
BUILD = """
kinds = {"exchange": Exchange(**exchange), "recipe": FAST}
both = FineTuning("mrpc", twice, "auto", **kinds)
alone = FineTuning("mrpc", once, "auto", group=solos[dist.get_rank()], **kinds)
"""


def measure(cluster: Cluster, model: str, batch_size: int, exchange: dict) -> dict:
    """Efficiency of two ranks, round by round, and the input's share of a step, at most.

    ``ceiling`` is that of two ranks which exchange nothing: what their cores take from each other.
    """
    steps = BATCHES // exchange.get("accumulate", 1)

    def train(run: str, ranks: list[int]) -> None:
        cluster.client[ranks].execute(f"{run}.train({steps})", block=True)

    with TemporaryDirectory() as folder:
        once, twice = settings_of(model, batch_size, Path(folder))
        cluster.view.push({"once": once, "twice": twice, "exchange": exchange}, block=True)
        cluster.view.execute(BUILD, block=True)
        result = compare(
            {
                "one rank": lambda: train("alone", [0]),
                "two ranks": lambda: train("both", [0, 1]),
                "two apart": lambda: train("alone", [0, 1]),
            },
            ROUNDS,
        )
        cluster.view.execute("spans = trace(both, 2)", block=True)
    traced = [step for rank in split(cluster.view["spans"]) for step in rank]
    return {
        "efficiency": result.speedups("two ranks"),
        "ceiling": result.speedups("two apart"),
        "seconds": result.seconds,
        "input": max(step.input / step.seconds for step in traced),
    }


def settings_of(model: str, batch_size: int, folder: Path) -> tuple[Task, Task]:
    """Settings with one rank's samples of a round, and with each of them twice."""
    task = profiles.load("laptop").mrpc
    samples = data.load("mrpc", task.data, BATCHES * batch_size, batch_size).train
    rows = ["\t".join(("1", "1", "2", pair["sentence1"], pair["sentence2"])) for pair in samples]
    both = []
    for copies in (1, 2):
        its = folder / str(copies)
        its.mkdir()
        for name in ("train", "test"):
            lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", *rows * copies]
            file = its / f"msr_paraphrase_{name}.txt"
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        both.append(
            replace(
                task,
                model=model,
                data=str(its),
                batch_size=batch_size,
                train_samples=None,
                epochs=ROUNDS + 3,
            )
        )
    return both[0], both[1]


def report(batch_size: int, network: str, its: dict) -> None:
    """Prints one line, with the goals, and whether they were reached."""
    goal, ratios = GOALS[batch_size, network], its["efficiency"]
    reached = median(ratios) >= goal and its["input"] < INPUT_GOAL
    print(
        f"batch {batch_size} a rank, {network}: efficiency {median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}, {len(ratios)} rounds), goal {goal}, "
        f"{median(its['ceiling']):.2f} if they exchange nothing; "
        f"input at most {its['input']:.1%} of a step, goal under {INPUT_GOAL:.0%}: "
        f"{'reached' if reached else 'MISSED'}",
        flush=True,
    )


def main() -> None:
    found = {}
    with TemporaryDirectory() as folder:
        model = random_model(folder)

        def take(cluster: Cluster, batch_size: int, network: str, exchange: dict) -> None:
            its = measure(cluster, model, batch_size, exchange)
            report(batch_size, network, its)
            found[f"{batch_size}, {network}"] = its

        with Cluster(None, 2) as cluster:
            cluster.view.execute(SET_UP, block=True)
            for batch_size in (32, 8):
                take(cluster, batch_size, "unshaped", ADVICE)
        try:
            with Lab(2) as lab, Cluster(lab.hosts, 1, oversubscribe=True) as cluster:
                cluster.view.execute(SET_UP, block=True)
                with lab.rate("1gbit"):
                    take(cluster, 32, "1 Gbit/s", SLOW_ADVICE)
        except NoLab as reason:
            print(f"nothing at 1 Gbit/s: {reason}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
