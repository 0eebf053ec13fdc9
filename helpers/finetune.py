"""Fine-tuning, on one rank or on many: the training loop that ``03_finetune_one_node`` builds.

``python -m helpers.finetune --help`` runs one from the shell and prints its result as JSON; so does
``mpiexec -f hosts -n 8 -ppn 2 python -m helpers.finetune ...`` on several nodes
(``08_distributed_mrpc``).
"""

import argparse
import datetime
import hashlib
import importlib
import importlib.util
import json
import logging
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import pyarrow.compute
import torch
from datasets import Dataset, disable_progress_bars
from datasets.fingerprint import Hasher
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.profiler import record_function
from torch.utils.data import BatchSampler, DataLoader
from transformers import DataCollatorWithPadding, set_seed
from transformers.utils import logging as transformers_logging

from helpers import ccl, data, isa, models, profiles, questions, runtime
from helpers.ccl.hooks import bf16_compress
from helpers.ccl.launch import is_launched
from helpers.checkpoint import Checkpoint, CheckpointError
from helpers.distributed import (
    EVERY_STEP,
    Exchange,
    Ranks,
    Shares,
    Shuffled,
    average_rows,
    digest,
)
from helpers.metrics import Paraphrase, QuestionAnswering
from helpers.profiles import Task
from helpers.recipe import (
    PLAIN,
    RECIPES,
    GroupedBatches,
    MasterWeights,
    Recipe,
    compile_error,
    fast_dropout_pays,
    faster_attention,
    question_loss,
    use_fast_dropout,
    without_attention_dropout,
)
from helpers.timing import Comparison, Stopwatch, Throughput
from helpers.workers import Worker

PRECISIONS = ("fp32", "bf16", "ipex-bf16")
SENTENCES = {"mrpc": ("sentence1", "sentence2"), "qqp": ("question1", "question2")}
MAX_GRADIENT_NORM = 1.0
EVALUATION_BATCH = 64


def available_precisions() -> tuple[str, ...]:
    """Those of ``PRECISIONS`` that this installation can run: without IPEX, the first two."""
    has_ipex = importlib.util.find_spec("intel_extension_for_pytorch") is not None
    return PRECISIONS if has_ipex else PRECISIONS[:2]


def import_ipex():
    """The module ``intel_extension_for_pytorch``, or None where it is not installed.

    IPEX and torch remark on each other in the log, which frightens and changes nothing: that is
    kept quiet. One remark says that layer_norm's gradient may be wrong; a test of ours shows that
    it is right.
    """
    if "ipex-bf16" not in available_precisions():
        return None
    warnings.filterwarnings("ignore", "aten::layer_norm: an autograd kernel was not registered")
    for logger in ("IPEX", "torch.utils.cpp_extension"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return importlib.import_module("intel_extension_for_pytorch")


def prepare(model, optimizer, precision: str):
    """Returns model and optimizer for a precision: the one place where IPEX changes a training.

    Raises ValueError for an unknown precision, or IPEX where it is not installed.
    """
    if precision not in available_precisions():
        raise ValueError(
            f"precision {precision!r} is not available; this installation has "
            f"{', '.join(available_precisions())}"
        )
    if precision == "ipex-bf16":
        model, optimizer = import_ipex().optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
    return model, optimizer


def settle(precision: str, recipe: Recipe) -> tuple[str, Recipe, list[str]]:
    """What this machine can run of a precision and a recipe, and a line for each thing it can't.

    "auto" is bf16 where the CPU has instructions for it, else fp32; it stands in for IPEX where
    that is not installed. What has no meaning is left out without a line: bf16 weights in fp32 or
    beside those of IPEX, which brings its own optimizer, too; a fast dropout in a compiled model.
    Raises ValueError for an unknown precision.
    """
    if precision not in ("auto", *PRECISIONS):
        raise ValueError(f"precision {precision!r}: there are auto, {', '.join(PRECISIONS)}")
    remarks = []
    if precision not in ("auto", *available_precisions()):
        remarks.append("IPEX is not installed: stock PyTorch instead")
        precision = "auto"
    if precision == "auto":
        precision = "bf16" if isa.native_bf16() else "fp32"
        if precision == "fp32":
            remarks.append("fp32: no bf16 instructions here, and emulated ones would be slower")
    on_ipex = precision == "ipex-bf16"
    if recipe.compiled:
        if error := "IPEX brings kernels of its own" if on_ipex else compile_error():
            remarks.append(f"not compiled: {error}")
            recipe = replace(recipe, compiled=False)
        else:
            recipe = replace(recipe, fast_dropout=False)
    if on_ipex:
        recipe = replace(recipe, fused_optimizer=False)
    if precision != "bf16":
        recipe = replace(recipe, bf16_weights=False)
    return precision, recipe, remarks


def autocast(precision: str) -> torch.autocast:
    """The context in which a model of this precision computes: bf16 for all but fp32."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32")


def _known_by(module, rows: Dataset) -> Dataset:
    """The same rows; a cache of what ``module`` makes of them is not used once its code differs.

    The cache asks for the code of the function that is mapped, not of those which that one calls.
    """
    code = Path(module.__file__).read_bytes()
    key = Hasher.hash([rows._fingerprint, code])
    return rows.select(range(len(rows)), new_fingerprint=key)


def encode(dataset: data.Data, task: str, tokenizer, settings: Task):
    """Token ids of training and evaluation set, not yet padded; QA contexts cut into windows.

    Of a set in a file, the ids are in a file beside it, mapped into memory. It is made once, for
    each set, tokenizer, lengths, and code. The notebook that shows it: ``10_scaling``.
    """
    disable_progress_bars()
    if task == "squad":
        limits = (tokenizer, settings.max_length, settings.stride)
        return (
            questions.train_features(_known_by(questions, dataset.train), *limits),
            questions.eval_features(_known_by(questions, dataset.evaluation), *limits),
        )
    first, second = SENTENCES[task]
    max_length = settings.max_length  # alone: what else is in the settings decides no token

    def tokenize(rows):
        encoded = tokenizer(rows[first], rows[second], truncation=True, max_length=max_length)
        return encoded | {"labels": rows["label"]}

    return tuple(
        part.map(tokenize, batched=True, remove_columns=part.column_names)
        for part in (dataset.train, dataset.evaluation)
    )


def without_dropout(model: torch.nn.Module) -> None:
    """Switches a model's dropout off, so that runs can be compared number by number."""
    without_attention_dropout(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


class FineTuning:
    """One fine-tuning run, advanced a few steps at a time.

    ``task`` is "mrpc", "qqp" or "squad"; ``settings`` its size (``helpers.profiles``); the same
    ``seed`` gives the same head, batches, order and dropout in every precision; ``remarks`` says
    which data and model they are. What can't run here is left out (``settle``): ``precision`` and
    ``recipe`` are what really runs, and ``changed`` says why. Optimizer, schedule and clipping are
    those of the reference scripts: AdamW without weight decay, a learning rate that falls linearly
    to 0, gradients clipped at norm 1.

    Where ``torch.distributed`` is initialized, the ranks of ``group`` (default: all) train one
    model: each must make the run and call its methods. ``settings.batch_size`` are samples a
    rank. Without ``dropout``, N ranks with batches of b take the steps of one rank with N * b,
    unless ``recipe`` (``helpers.recipe``: what makes a step faster) groups samples by length.
    ``exchange`` is how they share what they learnt.

    ``checkpoint`` is a folder for ``save_checkpoint``. A run goes on from what it holds, to the
    last bit where machine and ranks are the same. Raises CheckpointError where that is broken or
    another training's, and for IPEX and local steps.
    """

    def __init__(
        self,
        task: str,
        settings: Task,
        precision: str = "fp32",
        seed: int = 0,
        dropout: bool = True,
        group=None,
        recipe: Recipe = PLAIN,
        exchange: Exchange = EVERY_STEP,
        checkpoint: str | Path | None = None,
    ):
        transformers_logging.set_verbosity_error()
        set_seed(seed)
        self.task, self.settings, self.exchange = task, settings, exchange
        self.precision, self.recipe, self.changed = settle(precision, recipe)
        self.ranks = Ranks.of(group)
        saved = self._open(checkpoint)
        kind = "question" if task == "squad" else "pair"
        self.remarks: list[str] = []
        with self.ranks.one_after_the_first():
            self.dataset = data.load(
                task, settings.data, settings.train_samples, settings.eval_samples, seed
            )
            self.remarks.append(self.dataset.source)
            model, self.tokenizer = models.load(settings.model, kind, self.remarks.append)
            train, self.evaluation_features = encode(self.dataset, task, self.tokenizer, settings)
        if self.recipe.tuned_process:
            self.remarks.append(f"this process: {runtime.tune()}")
        self._train = train
        self._try_kinds(model.config, saved and saved["run"])
        if self.recipe.attention == "separate":
            set_seed(seed)  # the same new head
            model, _ = models.load(settings.model, kind, lambda line: None, "eager")
        if not dropout:
            without_dropout(model)
        if not self.recipe.attention_dropout:
            without_attention_dropout(model)
        if self.recipe.fast_dropout:
            use_fast_dropout(model)
        to_the_batch = DataCollatorWithPadding(self.tokenizer)
        to_the_limit = DataCollatorWithPadding(self.tokenizer, "max_length", settings.max_length)
        self._collate = to_the_limit if self._pads_all() else to_the_batch
        # A question's logits are as long as its window: one length, so that they can be stacked.
        self._collate_evaluation = to_the_limit if task == "squad" else self._collate
        self._order = order = torch.Generator().manual_seed(seed)  # the same on all ranks
        together = settings.batch_size * self.ranks.size
        if self.recipe.padding == "grouped":
            batches = GroupedBatches(self._lengths, together, order)
        else:
            batches = BatchSampler(Shuffled(len(train), order), together, drop_last=False)
        self._shares = Shares(batches, self.ranks)
        self.batches = DataLoader(
            train, batch_sampler=self._shares, generator=order, collate_fn=self._collate
        )
        self._build(model.train(), recipe)
        if not self.ranks.agree(repr((self.precision, self.recipe))):
            raise RuntimeError(
                f"rank {self.ranks.rank} would train in {self.precision} with {self.recipe}, other "
                f"ranks otherwise: choose what runs on all of them. {' '.join(self.changed)}"
            )
        self._training_model = self.model
        if self.recipe.compiled:
            self._training_model = torch.compile(self.model)
        self._sums_gradients = self.ranks.size > 1 and exchange.local_steps == 1
        self._touched: list[torch.Tensor] = []
        if self._sums_gradients:
            if exchange.touched_rows:
                embedding = self.model.get_input_embeddings().weight
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                    self._training_model,
                    [n for n, p in self._training_model.named_parameters() if p is embedding],
                )
            # every rank has the same buffers: nothing to send before each step
            self._training_model = DistributedDataParallel(
                self._training_model,
                process_group=self.ranks.group,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                bucket_cap_mb=exchange.bucket_mb,
                static_graph=exchange.static_graph,
            )
            if exchange.bf16:
                self._training_model.register_comm_hook(self.ranks.group, bf16_compress)
        self.total_steps = max(1, settings.epochs * len(self.batches) // exchange.accumulate)
        self.schedule = LinearLR(self.optimizer, 1.0, 0.0, total_iters=self.total_steps)
        self.losses: list[float] = []
        self.samples = self.batches_seen = 0
        self._iterator, self._epoch = iter(()), (0, order.get_state())
        # dropout, too, starts the same whatever was drawn before, and differs between ranks
        set_seed(seed + self.ranks.rank)
        self._run = {"seed": seed, "dropout": dropout}
        if saved:
            self._restore(saved)

    def _pads_all(self) -> bool:
        return self.recipe.padding == "fixed"

    @cached_property
    def _lengths(self) -> torch.Tensor:
        """Tokens of each training sample, (samples,); no token is read for it."""
        ids = self._train.data["input_ids"]
        return torch.tensor(pyarrow.compute.list_value_length(ids).to_numpy())

    def _try_kinds(self, config, found: dict | None) -> None:
        """Settles by trial on rank 0 what a machine decides: the kind of attention, of dropout.

        A training that goes on takes what was ``found`` when it began.
        """
        recipe = self.recipe

        def size() -> tuple[int, int, torch.dtype]:
            length = (
                self.settings.max_length
                if self._pads_all()
                else round(self._lengths.double().mean().item())
            )
            dtype = torch.float32 if self.precision == "fp32" else torch.bfloat16
            return self.settings.batch_size, length, dtype

        attention, fast_dropout = recipe.attention, recipe.fast_dropout
        if attention == "faster" and recipe.attention_dropout:
            # the fused kernel knows no dropout
            attention = "separate" if fast_dropout else "fused"
        elif attention == "faster":
            attention = found["attention"] if found else faster_attention(config, *size())
        if fast_dropout:
            fast_dropout = found["fast_dropout"] if found else fast_dropout_pays(config, *size())
        attention, fast_dropout = self.ranks.gather([(attention, fast_dropout)])[0]
        if recipe.fast_dropout and not fast_dropout:
            self.changed.append("stock dropout: a byte each is not faster here")
        self.recipe = replace(recipe, attention=attention, fast_dropout=fast_dropout)

    def _build(self, model, wanted: Recipe) -> None:
        """Makes ``model`` ready for its precision, and its optimizer."""
        self.master = MasterWeights(model) if self.recipe.bf16_weights else None
        self.weights = self.master.exact if self.master else list(model.parameters())
        options = {"lr": self.settings.learning_rate, "weight_decay": 0.0}
        fused = self.recipe.fused_optimizer
        try:
            optimizer = torch.optim.AdamW(self.weights, fused=fused, **options)
        except RuntimeError as error:
            self.changed.append(f"optimizer not fused: {error}")
            self.recipe = replace(self.recipe, fused_optimizer=False)
            optimizer = torch.optim.AdamW(self.weights, **options)
        try:
            self.model, self.optimizer = prepare(model, optimizer, self.precision)
        except Exception as error:  # IPEX refuses in many ways
            if self.precision != "ipex-bf16":
                raise
            self.changed.append(f"IPEX refuses, stock PyTorch instead: {error}")
            tried = {name: getattr(self.recipe, name) for name in ("attention", "fast_dropout")}
            self.precision, self.recipe, also = settle("auto", replace(wanted, **tried))
            self.changed += also
            self._build(model, wanted)
        else:
            if self.precision == "ipex-bf16":
                self.weights = list(self.model.parameters())

    def _next_batch(self):
        batch = next(self._iterator, None)
        if batch is None:
            self._epoch = self.batches_seen, self._order.get_state()
            self._iterator = iter(self.batches)
            batch = next(self._iterator)
        return batch

    def _backward(self, batch, weight: float = 1.0) -> float:
        with record_function("forward"), autocast(self.precision):
            loss = self._loss(batch) * weight
        with record_function("backward"):
            loss.backward()
        return loss.item()

    def _loss(self, batch) -> torch.Tensor:
        if self.task != "squad" or self.recipe.padding == "fixed":
            return self._training_model(**batch).loss
        inputs = {name: column for name, column in batch.items() if "positions" not in name}
        outputs = self._training_model(**inputs)
        positions = batch["start_positions"], batch["end_positions"]
        return question_loss(outputs, *positions, batch["attention_mask"])

    def warm_up(self) -> None:
        """Computes the gradients of one batch and drops them, so that all kernels are chosen."""
        with torch.random.fork_rng(devices=[]):  # dropout's next numbers stay the same
            self._backward(self._collate([self.batches.dataset[0]] * self.settings.batch_size))
        self.model.zero_grad()

    def remaining_steps(self) -> int:
        """Optimizer steps until the last epoch is over."""
        return self.total_steps - len(self.losses)

    def train(self, steps: int) -> None:
        """Takes so many optimizer steps; the profiler sees each of their parts by its name."""
        self.model.train()
        for _ in range(steps):
            self.losses.append(sum(self._batch(last) for last in self._parts()))
            with record_function("Optimizer.step"):
                self._update()
            self.schedule.step()

    def _parts(self) -> list[bool]:
        """One entry for each batch of a step: whether it is the step's last."""
        return [False] * (self.exchange.accumulate - 1) + [True]

    def _batch(self, last: bool) -> float:
        """Adds the gradients of the next batch; the last one of a step sums over the ranks."""
        with record_function("input"):
            batch = self._next_batch()
        number, self.batches_seen = self.batches_seen, self.batches_seen + 1
        self.samples += self._shares.size(number)
        if self._sums_gradients and self.exchange.touched_rows:
            self._touched.append(batch["input_ids"].flatten())
        waits = self._sums_gradients and not last
        with self._training_model.no_sync() if waits else nullcontext():
            return self._backward(batch, self._shares.weight(number) / self.exchange.accumulate)

    def _update(self) -> None:
        if self._touched:
            gradient = self.model.get_input_embeddings().weight.grad
            average_rows(gradient, torch.cat(self._touched), self.ranks.group)
            self._touched.clear()
        if self.master:
            self.master.take_gradients()
        torch.nn.utils.clip_grad_norm_(self.weights, MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._averages_weights():
            average_parameters(iter(self.weights), self.ranks.group)
        if self.master:
            self.master.round()

    def _averages_weights(self) -> bool:
        """Whether the ranks, each on its own since they last did, average their weights now."""
        taken = len(self.losses)
        due = taken % self.exchange.local_steps == 0 or taken == self.total_steps
        return self.ranks.size > 1 and not self._sums_gradients and due

    def outputs(self) -> list[torch.Tensor]:
        """The model's outputs for all evaluation features, in fp32: logits, or start and end."""
        self.model.eval()
        keep = self.tokenizer.model_input_names
        columns = [name for name in self.evaluation_features.column_names if name in keep]
        features = self.evaluation_features.select_columns(columns)
        # the same batches however many ranks there are: so their numbers are the same, too
        batches = list(BatchSampler(range(len(features)), EVALUATION_BATCH, drop_last=False))
        loader = DataLoader(
            features,
            batch_sampler=batches[self.ranks.rank :: self.ranks.size],
            generator=torch.Generator(),  # else each evaluation would draw from dropout's numbers
            collate_fn=self._collate_evaluation,
        )
        with torch.inference_mode(), autocast(self.precision):
            parts = [self.model(**batch).to_tuple() for batch in loader]
        parts = self.ranks.gather(parts)
        return [torch.cat(column).float() for column in zip(*parts, strict=True)]

    def evaluate(self) -> dict[str, float]:
        """The task's official metric on the evaluation set (``helpers.metrics``)."""
        outputs = self.outputs()
        if self.task == "squad":
            examples = self.dataset.evaluation
            answers = questions.predictions(
                examples, self.evaluation_features, outputs[0].numpy(), outputs[1].numpy()
            )
            return QuestionAnswering().compute(
                predictions=[answers[row] for row in examples["id"]],
                references=[row["text"] for row in examples["answers"]],
            )
        return Paraphrase().compute(
            predictions=outputs[0].argmax(-1).tolist(), references=self.dataset.evaluation["label"]
        )

    def save(self, folder: str) -> None:
        """Writes model and tokenizer, to be loaded by ``from_pretrained`` or ``helpers.models``."""
        model = self.master.exact_model() if self.master else self.model
        # IPEX packs its weights: its state_dict unpacks them
        model.save_pretrained(folder, state_dict=model.state_dict())
        self.tokenizer.save_pretrained(folder)

    def _open(self, folder: str | Path | None) -> dict | None:
        """The state that a checkpoint's folder holds: rank 0 reads and writes it, for all."""
        self._checkpoint = None
        if folder is None:
            return None
        if self.exchange.local_steps > 1:
            raise CheckpointError("no checkpoint with local steps: each rank has its own weights")
        if self.precision == "ipex-bf16":
            raise CheckpointError("no checkpoint with IPEX, which hides exact weights: choose bf16")
        self._checkpoint = self.ranks.first(lambda: Checkpoint(folder))
        return self.ranks.first(self._checkpoint.read)

    @cached_property
    def _identity(self) -> dict:
        """What has to be the same where a training goes on."""
        tokens = hashlib.sha256(self._lengths.numpy())
        for ids in self._train.data["input_ids"].chunks:
            tokens.update(ids.flatten().to_numpy())
        return {
            "task": self.task,
            **asdict(self.settings),
            **self._run,
            "precision": self.precision,
            **asdict(self.recipe),
            **asdict(self.exchange),
            "world_size": self.ranks.size,
            "parameters": sum(weight.numel() for weight in self.weights),
            "training set": tokens.hexdigest()[:16],
        }

    def save_checkpoint(self) -> None:
        """Writes into the folder ``checkpoint`` all that the next steps depend on."""
        own = self.ranks.gather([(self.losses, torch.get_rng_state())])
        state = {
            "run": self._identity,
            "weights": [weight.detach() for weight in self.weights],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "samples": self.samples,
            "batches_seen": self.batches_seen,
            "epoch": self._epoch,
            "ranks": own,
        }
        self.ranks.first(lambda: self._checkpoint.write(state))

    @torch.no_grad()
    def _restore(self, saved: dict) -> None:
        self._checkpoint.check(saved["run"], self._identity)
        if self._sums_gradients:
            with torch.enable_grad():
                self.warm_up()  # DistributedDataParallel sorts its buckets after the first batch
        for weight, kept in zip(self.weights, saved["weights"], strict=True):
            weight.copy_(kept)
        if self.master:
            self.master.round()
        self.optimizer.load_state_dict(saved["optimizer"])
        self.schedule.load_state_dict(saved["schedule"])
        self.samples, self.batches_seen = saved["samples"], saved["batches_seen"]
        before, order = self._epoch = saved["epoch"]
        self._order.set_state(order)
        self._shares.skip(self.batches_seen - before)
        self._iterator = iter(self.batches)
        self.losses, random = saved["ranks"][self.ranks.rank]
        torch.set_rng_state(random)
        self.remarks.append(
            f"goes on from step {len(self.losses)} of {self.total_steps}: {self._checkpoint.file}"
        )

    def mean_losses(self) -> list[float]:
        """The loss of each step so far, over all ranks' samples."""
        return self.ranks.mean(self.losses)

    def check_weights(self) -> str:
        """A checksum of the weights. Raises RuntimeError where the ranks' weights differ."""
        own = digest(self.weights)
        if not self.ranks.agree(own):
            raise RuntimeError(
                f"rank {self.ranks.rank}: the ranks hold different weights ({own[:8]} here). Was "
                "a step taken on some of them only, or without DistributedDataParallel?"
            )
        return own

    def ran(self) -> dict:
        """What really runs: precision, recipe, and a line for each thing that was "changed"."""
        return {
            "precision": self.precision,
            "recipe": asdict(self.recipe),
            "changed": self.changed,
        }

    def result(self) -> dict:
        """Losses so far, metric, weights' checksum and what really ran, for another process."""
        return {
            **self.ran(),
            "losses": self.mean_losses(),
            "metric": self.evaluate(),
            "weights": self.check_weights(),
        }


@dataclass(frozen=True)
class Variant:
    """One way to run a training: ``variables`` are added to its process's environment."""

    precision: str
    recipe: Recipe = PLAIN
    variables: Mapping[str, str] = field(default_factory=dict)

    def worker(
        self,
        name: str,
        task: str,
        settings: Task,
        seed: int = 0,
        timeout: float = 300,
        kind: type[FineTuning] = FineTuning,
    ) -> Worker:
        """Starts the training, a ``kind`` of FineTuning, in a fresh process."""
        build = partial(kind, task, settings, self.precision, seed, recipe=self.recipe)
        return Worker(name, build, timeout=timeout, variables=self.variables)


@dataclass(frozen=True)
class Race:
    """What ``race`` measured: times side by side, and losses and metric of each variant.

    ``remarks`` are lines on what ran otherwise than asked for.
    """

    comparison: Comparison
    losses: dict[str, list[float]]
    metrics: dict[str, dict[str, float]]
    remarks: list[str]


def race(
    task: str,
    settings: Task,
    variants: Mapping[str, Variant],
    rounds: int = 4,
    seed: int = 0,
    timeout: float = 300,
) -> Race:
    """Fine-tunes once in each variant, each in a fresh process, taking turns in ``rounds``.

    A round is an equal share of the run's steps, so every variant trains on as many samples in
    the same round: on the same ones, unless a recipe groups them. Times are seconds a round.
    ``timeout`` limits each round, in seconds. Raises WorkerError where a process fails, ValueError
    for fewer steps than rounds.
    """
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(variant.worker(name, task, settings, seed, timeout))
            for name, variant in variants.items()
        }
        steps = min(worker.call("remaining_steps") for worker in runs.values())
        if steps < rounds:
            raise ValueError(f"{steps} optimizer steps can't be shared among {rounds} rounds")
        for worker in runs.values():
            worker.call("warm_up")
        seconds = {name: [] for name in runs}
        for turn in range(rounds):
            share = steps * (turn + 1) // rounds - steps * turn // rounds
            for name, worker in runs.items():
                with Stopwatch() as watch:
                    worker.call("train", share)
                seconds[name].append(watch.seconds)
        results = {name: worker.call("result") for name, worker in runs.items()}
    metrics = {name: result["metric"] for name, result in results.items()}
    beside = {
        metric: {name: round(values[metric], 3) for name, values in metrics.items()}
        for metric in next(iter(metrics.values()))
    }
    return Race(
        Comparison(seconds, beside),
        {name: result["losses"] for name, result in results.items()},
        metrics,
        [f"{name}: {remark}" for name, result in results.items() for remark in result["changed"]],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m helpers.finetune", description=__doc__)
    parser.add_argument("--task", choices=profiles.TASKS, required=True)
    parser.add_argument("--precision", choices=("auto", *PRECISIONS), default="auto")
    parser.add_argument("--profile", help=f"default: ${profiles.VARIABLE}, else laptop")
    parser.add_argument(
        "--steps", type=int, help="optimizer steps, without evaluation; default: the whole run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--backend",
        choices=("ccl", "gloo"),
        default="ccl",
        help="what the ranks communicate with, where mpiexec or torchrun starts several",
    )
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default="fast",
        help="published: all padded to the longest allowed; plain: to the longest of the batch; "
        "fast: what notebook 04 found",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="where the run saves its state; it goes on from the one that is there",
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=500, metavar="STEPS", help="default: 500"
    )
    parser.add_argument("--output", help="folder for the trained model, in the format of the hub")
    options = parser.parse_args()
    if options.checkpoint_every < 1:
        parser.error("--checkpoint-every: 1 step or more")
    settings = getattr(profiles.load(options.profile), options.task)
    if is_launched():
        ccl.init(options.backend, datetime.timedelta(minutes=10))  # a download may take long
        if not Ranks.of().agree(repr(options)):
            sys.exit(f"the ranks were started with different arguments; here: {options}")
    recipe = RECIPES[options.recipe]
    what = options.task, settings, options.precision, options.seed
    try:
        run = FineTuning(*what, recipe=recipe, checkpoint=options.checkpoint)
    except CheckpointError as error:
        sys.exit(str(error))
    first = run.ranks.rank == 0
    if first:
        print(*run.remarks, *run.changed, sep="\n")
        if run.ranks.size != settings.ranks:
            print(f"{run.ranks.size} ranks; the profile is made for {settings.ranks}")
    steps = run.remaining_steps() if options.steps is None else options.steps
    total = steps * settings.batch_size * run.ranks.size
    with Throughput(total, run.precision, first) as meter:
        for _ in range(steps):
            before = run.samples
            run.train(1)
            meter.update(run.samples - before)
            if options.checkpoint and len(run.losses) % options.checkpoint_every == 0:
                run.save_checkpoint()
    result = {
        "samples/s": meter.samples_per_second,
        "world_size": run.ranks.size,
        **run.ran(),
        **asdict(settings),
        "losses": run.mean_losses(),
        "weights": run.check_weights(),
    }
    if options.steps is None:
        result["metric"] = run.evaluate()
    if first:
        if options.output:
            run.save(options.output)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
