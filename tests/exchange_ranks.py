"""What tests/test_exchange.py runs on several ranks: prints one line of JSON from rank 0."""

import json
import os
import sys
from dataclasses import asdict, replace

import torch
import torch.distributed as dist

from helpers import ccl, profiles
from helpers.distributed import Exchange, average_rows
from helpers.finetune import FineTuning
from helpers.timeline import split, trace

STEPS = 4


def trained(exchange: Exchange, batch_size: int = 4) -> dict:
    """Losses of some steps, a weight, and whether the ranks agree before and after the last one."""
    settings = replace(
        profiles.load("laptop").mrpc, train_samples=64, eval_samples=8, batch_size=batch_size
    )
    run = FineTuning("mrpc", settings, dropout=False, exchange=exchange)
    run.train(STEPS - 1)
    agreed = agrees(run)
    run.train(1)
    weight = next(run.model.parameters()).detach().double().norm().item()
    return {
        "losses": run.mean_losses(),
        "norm": weight,
        "samples": run.samples,
        "agreed": [agreed, agrees(run)],
    }


def averages(rank: int) -> tuple[int, torch.Tensor]:
    """Rank 0 touched rows 1 and 4 (twice), rank 1 rows 4 and 2; row 3 is nobody's."""
    gradient = torch.zeros(5, 2)
    rows = [torch.tensor([[1, 4], [4, 1]]), torch.tensor([4, 2])][rank]
    gradient[rows] = 2.0 * (rank + 1)
    return average_rows(gradient, rows), gradient


def agrees(run: FineTuning) -> bool:
    try:
        run.check_weights()
    except RuntimeError:
        return False
    return True


def traced(exchange: Exchange) -> list:
    settings = replace(profiles.load("laptop").mrpc, train_samples=64, eval_samples=8)
    run = FineTuning("mrpc", settings, exchange=exchange)
    run.train(1)
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, trace(run, 2))
    names = sorted({span.name for span in ranks[0]})
    return [names, [[asdict(step) for step in steps] for steps in split(ranks)]]


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    place = ccl.init(sys.argv[1]).place
    found = {
        "every step": trained(Exchange()),
        "small buckets": trained(Exchange(bucket_mb=1, static_graph=True)),
        "touched rows": trained(Exchange(touched_rows=True)),
        "touched rows of two batches": trained(
            Exchange(touched_rows=True, accumulate=2), batch_size=2
        ),
        "bf16": trained(Exchange(bf16=True)),
        "two batches of half": trained(Exchange(accumulate=2), batch_size=2),
        "local": trained(Exchange(local_steps=2)),
        "traced": traced(Exchange()),
        "traced local": traced(Exchange(local_steps=2)),
    }
    rows, averaged = averages(place.rank)
    found["averaged"] = rows, averaged.tolist()
    if place.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
