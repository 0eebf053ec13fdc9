import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from helpers import finetune, models, profiles
from helpers.finetune import FineTuning, Variant, prepare, race
from helpers.workers import Worker, WorkerError

TINY = dataclasses.replace(
    profiles.load("laptop").mrpc, train_samples=32, eval_samples=32, batch_size=8, epochs=1
)
needs_ipex = pytest.mark.skipif(
    "ipex-bf16" not in finetune.available_precisions(), reason="IPEX is not installed"
)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    losses = []
    for seed in (0, 0, 1):
        run = FineTuning("mrpc", TINY, seed=seed)
        run.train(2)
        losses.append(run.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0] != pytest.approx(losses[2], rel=1e-4)


def test_a_run_counts_its_steps_and_its_learning_rate_ends_at_zero():
    run = FineTuning("mrpc", TINY)
    assert run.remaining_steps() == 4
    run.warm_up()
    assert run.remaining_steps() == 4
    run.train(run.remaining_steps())
    assert run.remaining_steps() == 0
    assert run.samples == 32
    assert run.schedule.get_last_lr() == [0]


def test_warming_up_teaches_nothing():
    run = FineTuning("mrpc", TINY)
    before = [parameter.clone() for parameter in run.model.parameters()]
    run.warm_up()
    for parameter, old in zip(run.model.parameters(), before, strict=True):
        assert parameter.grad is None
        torch.testing.assert_close(parameter, old, rtol=0, atol=0)


def test_bf16_starts_from_the_same_loss_to_rounding():
    fp32, bf16 = (FineTuning("mrpc", TINY, precision) for precision in ("fp32", "bf16"))
    for run in (fp32, bf16):
        run.model.eval()
    logits = [run.outputs()[0] for run in (fp32, bf16)]
    assert not torch.equal(*logits)
    torch.testing.assert_close(*logits, rtol=0.02, atol=0.02)


def test_question_answering_runs_and_scores_in_percent():
    settings = dataclasses.replace(
        profiles.load("laptop").squad, train_samples=16, eval_samples=16, batch_size=8, epochs=1
    )
    run = FineTuning("squad", settings)
    run.train(1)
    scores = run.evaluate()
    assert 0 <= scores["exact_match"] <= scores["f1"] <= 100


def test_without_ipex_the_other_precisions_remain(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert finetune.available_precisions() == ("fp32", "bf16")
    with pytest.raises(ValueError, match="'ipex-bf16' is not available.*fp32, bf16"):
        prepare(None, None, "ipex-bf16")


class IpexBesideStock:
    """The same model and batch through stock bf16 and through IPEX, in a process of its own."""

    def __init__(self):
        run = FineTuning("mrpc", TINY, dropout=False)
        self.stock, self.batch = run.model, next(iter(run.batches))
        self.ipex, self.optimizer = prepare(run.model, run.optimizer, "ipex-bf16")

    def gradient_error(self):
        """Largest relative difference of the layer norms' gradients."""
        gradients = []
        for model in (self.stock, self.ipex):
            model.zero_grad()
            with finetune.autocast("bf16"):
                model(**self.batch).loss.backward()
            named = dict(model.named_parameters())
            gradients.append({n: p.grad.float() for n, p in named.items() if "LayerNorm" in n})
        errors = [(gradients[1][n] - g).norm() / g.norm() for n, g in gradients[0].items()]
        return len(errors), max(errors).item()

    def saved_and_loaded(self, folder):
        """Logits of the IPEX model after two steps, and of a stock model that loads its weights."""
        for _ in range(2):
            with finetune.autocast("bf16"):
                self.ipex(**self.batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.stock.save_pretrained(folder, state_dict=self.ipex.state_dict())
        FineTuning("mrpc", TINY).tokenizer.save_pretrained(folder)
        loaded, _ = models.load(folder, "pair")
        with torch.no_grad(), finetune.autocast("bf16"):
            return [
                model.eval()(**self.batch).logits.float().tolist() for model in (self.ipex, loaded)
            ]


@needs_ipex
def test_ipex_gives_the_gradients_of_stock_bf16_and_its_weights_load_into_a_stock_model(tmp_path):
    # IPEX 2.8 makes torch warn that layer_norm's gradient may be wrong: it is not.
    with Worker("ipex", IpexBesideStock) as worker:
        count, error = worker.call("gradient_error")
        ipex, stock = worker.call("saved_and_loaded", str(tmp_path))
    assert count > 20
    assert error < 0.1
    torch.testing.assert_close(torch.tensor(ipex), torch.tensor(stock), rtol=0.02, atol=0.02)


def test_a_race_sets_time_loss_and_metric_side_by_side():
    result = race("mrpc", TINY, {name: Variant(name) for name in ("fp32", "bf16")}, rounds=4)
    assert [len(times) for times in result.comparison.seconds.values()] == [4, 4]
    assert [len(losses) for losses in result.losses.values()] == [4, 4]
    assert result.losses["fp32"] == pytest.approx(result.losses["bf16"], rel=0.1)
    for row in result.comparison.rows():
        assert 0 <= row["accuracy"] <= 1


def test_a_race_needs_a_step_a_round():
    with pytest.raises(ValueError, match="4 optimizer steps can't be shared among 5 rounds"):
        race("mrpc", TINY, {"fp32": Variant("fp32")}, rounds=5)


def test_a_race_names_the_precision_that_failed():
    broken = dataclasses.replace(TINY, model="/nowhere/at/all")
    with pytest.raises(WorkerError, match=r"'fp32' failed in 'start'(?s:.*)/nowhere/at/all"):
        race("mrpc", broken, {"fp32": Variant("fp32")})


def test_the_command_line_prints_a_result():
    command = [sys.executable, "-m", "helpers.finetune", "--task", "mrpc", "--steps", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(ran.stdout.splitlines()[-1])
    assert len(result["losses"]) == 1
    assert result["samples/s"] > 0
