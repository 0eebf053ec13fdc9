"""What tests/test_distributed.py runs on several ranks: prints one line of JSON from rank 0."""

import dataclasses
import hashlib
import json
import os
import sys

import torch

from helpers import ccl, profiles
from helpers.distributed import Ranks
from helpers.finetune import FineTuning
from helpers.recipe import FAST

TOGETHER = 6  # samples of a global batch; 19 samples leave one for the last
EVALUATION = 150  # three batches


def settings(task: str, ranks: int):
    return dataclasses.replace(
        getattr(profiles.load("laptop"), task),
        train_samples=19,
        eval_samples=EVALUATION if task == "mrpc" else 20,
        batch_size=TOGETHER // ranks,
        epochs=2,
    )


def train(run: FineTuning) -> dict:
    """Outputs before training, then the losses and weights of all steps."""
    found = hashlib.sha256()
    for column in run.outputs():
        found.update(column.numpy().tobytes())
    metric = run.evaluate()
    run.warm_up()
    run.train(run.remaining_steps())
    norms = [weight.detach().double().norm().item() for weight in run.model.parameters()]
    return {
        "outputs": found.hexdigest(),
        "metric": metric,
        "losses": run.mean_losses(),
        "norms": norms,
        "weights": run.check_weights(),
        "samples": run.samples,
    }


def noticed(run: FineTuning) -> list[str]:
    """The last rank changes a weight: what do all ranks say to that?"""
    if run.ranks.rank == run.ranks.size - 1:
        with torch.no_grad():
            next(run.model.parameters())[0, 0] += 1e-6
    said = []
    try:
        run.check_weights()
    except RuntimeError as error:
        said = [str(error)]
    return run.ranks.gather(said)


def refused(size, rank: int) -> list[str]:
    """One rank wants another precision than the others: what do all ranks say to that?"""
    said = []
    try:
        FineTuning("mrpc", size, "bf16" if rank else "fp32")
    except RuntimeError as error:
        said = [str(error)]
    return Ranks.of().gather(said)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # else the recipe takes all cores
    torch.set_num_threads(1)
    place = ccl.init(sys.argv[1]).place
    found = {}
    for task in ("mrpc", "squad"):
        run = FineTuning(task, settings(task, place.world_size), dropout=False)
        found[task] = train(run)
    found["noticed"] = noticed(run)
    size = settings("mrpc", place.world_size)
    found["refused"] = refused(size, place.rank)
    found["fast"] = train(FineTuning("mrpc", size, "bf16", dropout=False, recipe=FAST))
    if place.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
