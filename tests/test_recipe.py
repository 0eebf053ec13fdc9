"""Each piece of the recipe does what stock PyTorch does, faster or not."""

import copy
import dataclasses
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from helpers import finetune, isa, models, profiles
from helpers.finetune import FineTuning, settle
from helpers.recipe import (
    FAST,
    PLAIN,
    PUBLISHED,
    FastDropout,
    GroupedBatches,
    MasterWeights,
    Recipe,
    compile_error,
    faster_attention,
    question_loss,
    use_fast_dropout,
    without_attention_dropout,
)
from helpers.workers import Worker


def test_an_unknown_padding_or_attention_is_refused():
    with pytest.raises(ValueError, match="'longest': there are 'fixed', 'batch' and 'grouped'"):
        Recipe(padding="longest")
    with pytest.raises(ValueError, match="'flash': there are 'fused', 'separate' and 'faster'"):
        Recipe(attention="flash")


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(dtype, p):
    torch.manual_seed(0)
    x = torch.ones(1000, 999, dtype=dtype, requires_grad=True)
    y = FastDropout(p)(x)
    share = (y == 0).float().mean().item()
    assert share == pytest.approx(round(256 * p) / 256, abs=0.002)  # four sigmas and more
    assert y.float().mean().item() == pytest.approx(1, abs=0.005)
    kept = y[y != 0]
    assert kept.min() == kept.max()
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, y)  # of ones: the same zeros, the same scale


def test_neighbours_rows_and_calls_are_independent():
    torch.manual_seed(0)
    drop = FastDropout(0.5)
    first, second = (drop(torch.ones(512, 512)) != 0 for _ in range(2))
    pairs = (
        (first, second),
        (first[:, 1:], first[:, :-1]),  # two bytes of one number
        (first[:, 8:], first[:, :-8]),  # the same byte of two numbers
        (first[1:], first[:-1]),
    )
    for one, other in pairs:
        assert (one == other).float().mean().item() == pytest.approx(0.5, abs=0.005)


@given(st.integers(0, 20), st.integers(1, 5), st.floats(0, 0.999))
def test_dropout_of_any_shape_only_zeroes_and_scales(rows, columns, p):
    x = torch.arange(1.0, rows * columns + 1).view(columns, rows).T  # not contiguous
    y = FastDropout(p)(x)
    scale = 256 / (256 - min(round(256 * p), 255))
    assert y.shape == x.shape
    torch.testing.assert_close(y, torch.where(y == 0, 0, x * scale))


def test_dropout_is_repeatable_and_absent_in_evaluation():
    x, drop = torch.randn(100), FastDropout(0.3)
    results = []
    for _ in range(2):
        torch.manual_seed(7)
        results.append(drop(x))
    assert torch.equal(*results)
    assert drop.eval()(x) is x


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_an_impossible_probability_is_refused(p):
    with pytest.raises(ValueError, match="from 0, and below 1"):
        FastDropout(p)


def test_all_dropouts_of_a_model_are_replaced():
    model = torch.nn.Sequential(
        torch.nn.Dropout(0.2), torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
    ).eval()
    assert use_fast_dropout(model) == 2
    assert [m.p for m in model.modules() if isinstance(m, FastDropout)] == [0.2, 0.1]
    assert not any(module.training for module in model.modules())


# ---------------------------------------------------------------- batches


@given(st.lists(st.integers(1, 384), min_size=1, max_size=500), st.integers(1, 9))
def test_grouped_batches_hold_each_sample_once(lengths, size):
    batches = GroupedBatches(lengths, size, torch.Generator().manual_seed(1))
    for _ in range(2):
        epoch = list(batches)
        assert sorted(index for batch in epoch for index in batch) == list(range(len(lengths)))
        assert len(epoch) == len(batches)
        assert {len(batch) for batch in epoch[:-1]} <= {size}


def test_grouped_batches_are_of_like_length_in_random_order():
    torch.manual_seed(0)
    lengths = torch.randint(20, 384, (2000,))
    batches = list(GroupedBatches(lengths, 16, torch.Generator().manual_seed(1)))
    padded = sum(len(batch) * lengths[batch].max().item() for batch in batches)
    assert padded < 1.1 * lengths.sum().item()
    longest = torch.tensor([lengths[batch].max().item() for batch in batches])
    assert (longest.diff() > 0).float().mean().item() == pytest.approx(0.5, abs=0.15)


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig(
            hidden_size=32,
            num_attention_heads=2,
            num_hidden_layers=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.5,
        ),
        transformers.DistilBertConfig(
            dim=32, n_heads=2, n_layers=1, dropout=0.0, attention_dropout=0.5
        ),
    ],
    ids=["BERT", "DistilBERT"],
)
def test_attention_dropout_is_off_in_both_kinds_of_attention(config, implementation):
    kind = transformers.AutoModel
    model = kind.from_config(config, attn_implementation=implementation).train()
    ids = torch.arange(20).view(2, 10)

    def outputs():
        return [model(ids).last_hidden_state for _ in range(2)]

    assert not torch.equal(*outputs())
    without_attention_dropout(model)
    assert torch.equal(*outputs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_chooses_a_kind_of_attention(dtype):
    config = transformers.BertConfig(hidden_size=32, num_attention_heads=2)
    assert faster_attention(config, 2, 16, dtype) in ("fused", "separate")


# ---------------------------------------------------------------- question answering


def question_outputs(batch, length):
    torch.manual_seed(0)
    return torch.randn(batch, length), torch.randn(batch, length)


def test_the_loss_is_that_of_transformers_where_nothing_is_padded():
    start, end = question_outputs(4, 10)
    outputs = SimpleNamespace(start_logits=start, end_logits=end)
    positions = torch.tensor([0, 3, 9, 5]), torch.tensor([0, 4, 9, 8])
    expected = sum(
        torch.nn.functional.cross_entropy(logits, its)
        for logits, its in zip((start, end), positions, strict=True)
    )
    found = question_loss(outputs, *positions, torch.ones(4, 10))
    torch.testing.assert_close(found, expected / 2)


def test_the_loss_does_not_depend_on_padding():
    start, end = question_outputs(2, 12)
    mask = torch.tensor([[1] * 8 + [0] * 4, [1] * 6 + [0] * 6])
    positions = torch.tensor([2, 5]), torch.tensor([7, 5])
    losses = [
        question_loss(
            SimpleNamespace(start_logits=start[:, :n], end_logits=end[:, :n]),
            *positions,
            mask[:, :n],
        )
        for n in (8, 12)
    ]
    torch.testing.assert_close(*losses)


# ---------------------------------------------------------------- bf16 weights


def test_updates_that_bf16_would_lose_add_up():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    torch.nn.init.ones_(model[0].weight)
    master = MasterWeights(model)
    optimizer = torch.optim.SGD(master.exact, lr=0.001)
    for _ in range(100):
        model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
        master.take_gradients()
        optimizer.step()
        master.round()
    assert model[0].weight.dtype == torch.bfloat16  # 1 - 0.001 would be 1 in bf16
    assert model[0].weight.item() == pytest.approx(0.9, rel=0.004)
    assert master.exact_model()[0].weight.item() == pytest.approx(0.9, rel=1e-5)


def test_gradients_move_and_are_not_summed_over_steps():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1))
    master = MasterWeights(model)
    for _ in range(2):
        model(torch.tensor([[2.0, 3.0]], dtype=torch.bfloat16)).sum().backward()
        master.take_gradients()
        assert [weight.grad.tolist() for weight in master.exact] == [[[2.0, 3.0]], [1.0]]
        assert all(weight.grad is None for weight in model.parameters())


def test_sums_over_many_tokens_are_not_lost():
    torch.manual_seed(0)
    ids, slopes = torch.randint(0, 2, (8192,)), torch.randn(8192, 16) / 1000 + 0.0002
    exact = torch.nn.Sequential(torch.nn.Embedding(2, 16), torch.nn.LayerNorm(16)).double()
    rounded = copy.deepcopy(exact).float()
    weights = MasterWeights(rounded).exact
    exact(ids).backward(slopes.double())
    rounded(ids).backward(slopes.bfloat16())
    for weight, right in zip(weights, exact.parameters(), strict=True):
        # all in bf16, it would be wrong by a third
        torch.testing.assert_close(weight.grad.double(), right.grad, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("task", ["mrpc", "squad"])
def test_gradients_are_as_exact_as_those_of_autocast(task):
    def gradients(precision, recipe):
        run = FineTuning(task, small(task), precision, dropout=False, recipe=recipe)
        inputs = next(iter(run.batches))
        with finetune.autocast(precision):
            run.model(**inputs).loss.backward()
        if run.master:
            run.master.take_gradients()
        return [weight.grad for weight in run.weights]

    exact = gradients("fp32", PLAIN)
    stock = gradients("bf16", PLAIN)
    ours = gradients("bf16", dataclasses.replace(PLAIN, bf16_weights=True))
    largest = max(weight.norm() for weight in exact)
    for right, autocast, rounded in zip(exact, stock, ours, strict=True):
        noise = (autocast - right).norm() + 0.001 * largest
        assert (rounded - right).norm() < 3 * noise


# ---------------------------------------------------------------- whole trainings


def small(task: str):
    settings = getattr(profiles.load("laptop"), task)
    return dataclasses.replace(settings, train_samples=32, eval_samples=8, batch_size=8)


def trained(task: str, recipe: Recipe, precision: str = "fp32", dropout: bool = False):
    run = FineTuning(task, small(task), precision, dropout=dropout, recipe=recipe)
    run.train(4)
    return run


def losses(task: str, recipe: Recipe, precision: str = "fp32", dropout: bool = False):
    return trained(task, recipe, precision, dropout).losses


def test_pieces_without_random_parts_give_the_same_losses():
    fused = dataclasses.replace(PLAIN, fused_optimizer=True, attention_dropout=False)
    assert losses("mrpc", fused) == pytest.approx(losses("mrpc", PLAIN), rel=1e-3)


@pytest.mark.parametrize("task", ["mrpc", "squad"])
def test_both_kinds_of_attention_give_the_same_losses(task):
    separate = dataclasses.replace(PLAIN, attention="separate")
    assert losses(task, separate) == pytest.approx(losses(task, PLAIN), rel=1e-3)


def test_the_result_says_which_attention_a_trial_chose():
    run = trained("mrpc", dataclasses.replace(PLAIN, attention="faster"))
    assert run.ran()["recipe"]["attention"] in ("fused", "separate")


def test_padding_changes_nothing_but_the_speed_for_pairs():
    assert losses("mrpc", PUBLISHED) == pytest.approx(losses("mrpc", PLAIN), rel=1e-3)


def test_the_whole_recipe_takes_the_steps_of_a_plain_one_to_bf16_rounding():
    alike = dataclasses.replace(FAST, padding="batch")
    assert losses("mrpc", alike, "bf16") == pytest.approx(losses("mrpc", PLAIN), rel=0.05)


def test_bf16_weights_take_the_steps_of_autocast_to_bf16_rounding():
    rounded = dataclasses.replace(PLAIN, bf16_weights=True)
    for task in ("mrpc", "squad"):
        expected = losses(task, PLAIN, "bf16")
        assert losses(task, rounded, "bf16") == pytest.approx(expected, rel=0.02)


def test_a_model_with_bf16_weights_is_saved_in_fp32(tmp_path):
    run = trained("mrpc", FAST, "bf16")
    run.save(str(tmp_path))
    loaded, _ = models.load(str(tmp_path), "pair")
    for saved, exact in zip(loaded.parameters(), run.weights, strict=True):
        assert torch.equal(saved, exact)
    assert any(not torch.equal(exact, exact.bfloat16().float()) for exact in run.weights)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_the_whole_recipe_trains_with_dropout():
    found = losses("squad", FAST, "auto", dropout=True)
    assert found[-1] < found[0]


# ---------------------------------------------------------------- what can't run here


def test_auto_is_bf16_where_it_is_native_and_says_so_where_not(monkeypatch):
    monkeypatch.setattr(isa, "native_bf16", lambda: True)
    assert settle("auto", FAST) == ("bf16", FAST, [])
    monkeypatch.setattr(isa, "native_bf16", lambda: False)
    precision, recipe, said = settle("auto", FAST)
    assert (precision, recipe.bf16_weights) == ("fp32", False)
    assert said == ["fp32: no bf16 instructions here, and emulated ones would be slower"]


@pytest.mark.parametrize(
    ("dropout", "fast", "expected"),
    [(True, True, "separate"), (True, False, "fused"), (False, True, "tried")],
)
def test_attention_with_dropout_is_never_fused_where_dropout_is_fast(
    monkeypatch, dropout, fast, expected
):
    monkeypatch.setattr(finetune, "faster_attention", lambda *arguments: "tried")
    monkeypatch.setattr(finetune, "fast_dropout_pays", lambda *arguments: True)
    monkeypatch.setattr(Recipe, "__post_init__", lambda recipe: None)
    wanted = Recipe(attention="faster", attention_dropout=dropout, fast_dropout=fast)
    assert FineTuning("mrpc", small("mrpc"), recipe=wanted).recipe.attention == expected


def test_where_a_fast_dropout_is_not_faster_the_stock_one_runs(monkeypatch):
    monkeypatch.setattr(finetune, "fast_dropout_pays", lambda *arguments: False)
    run = FineTuning("mrpc", small("mrpc"), recipe=Recipe(fast_dropout=True))
    assert not any(isinstance(module, FastDropout) for module in run.model.modules())
    assert run.changed == ["stock dropout: a byte each is not faster here"]


def test_a_capped_process_trains_in_fp32():
    with Worker("capped", Settled, variables={"ONEDNN_MAX_CPU_ISA": isa.ICE_LAKE}) as worker:
        assert worker.call("settle", "auto", PLAIN)[0] == "fp32"


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="'fp8': there are auto, fp32, bf16, ipex-bf16"):
        settle("fp8", PLAIN)


class Settled:
    """``settle`` in a process with variables of its own."""

    def settle(self, precision, recipe):
        return settle(precision, recipe)


def test_torch_can_not_compile_under_a_path_with_a_space(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/tmp/my course/.venv")
    assert "unlike /tmp/my course/.venv" in compile_error.__wrapped__()


@pytest.mark.skipif(" " in sys.prefix, reason="the space is the first obstacle")
def test_without_a_compiler_nothing_is_compiled():
    compiled = dataclasses.replace(FAST, compiled=True)
    variables = {"CXX": "/no/such/compiler", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    with Worker("no compiler", Settled, variables=variables) as worker:
        precision, recipe, said = worker.call("settle", "bf16", compiled)
    assert (precision, recipe) == ("bf16", FAST)
    assert len(said) == 1
    assert said[0].startswith("not compiled: ") and "compiler" in said[0] and "\n" not in said[0]


def test_without_ipex_stock_pytorch_runs_and_the_result_says_so(monkeypatch):
    monkeypatch.setattr(finetune, "available_precisions", lambda: ("fp32", "bf16"))
    monkeypatch.setattr(isa, "native_bf16", lambda: True)
    run = trained("mrpc", PLAIN, "ipex-bf16")
    assert run.ran()["precision"] == "bf16"
    assert run.ran()["changed"] == ["IPEX is not installed: stock PyTorch instead"]


@pytest.mark.parametrize(("native", "precision"), [(True, "bf16"), (False, "fp32")])
def test_where_ipex_refuses_the_whole_recipe_runs_without_it(monkeypatch, native, precision):
    def refuse(*arguments, **options):
        raise AssertionError("BF16 weight prepack needs avx512bw")

    monkeypatch.setattr(finetune, "available_precisions", lambda: finetune.PRECISIONS)
    monkeypatch.setattr(finetune, "import_ipex", lambda: SimpleNamespace(optimize=refuse))
    monkeypatch.setattr(isa, "native_bf16", lambda: native)
    run = trained("mrpc", FAST, "ipex-bf16")
    ran = run.ran()
    assert ran["precision"] == precision
    assert "prepack needs avx512bw" in ran["changed"][0]
    assert ran["recipe"]["fused_optimizer"] and ran["recipe"]["bf16_weights"] is native


def test_where_the_optimizer_is_not_fused_the_stock_one_runs(monkeypatch):
    class Stock(torch.optim.AdamW):
        def __init__(self, weights, fused=False, **options):
            if fused:
                raise RuntimeError("`fused=True` is not supported here")
            super().__init__(weights, **options)

    monkeypatch.setattr(torch.optim, "AdamW", Stock)
    run = trained("mrpc", dataclasses.replace(PLAIN, fused_optimizer=True))
    assert not run.ran()["recipe"]["fused_optimizer"]
    assert run.ran()["changed"] == ["optimizer not fused: `fused=True` is not supported here"]


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which(os.environ.get("CXX", "g++"))
    or not Path(sysconfig.get_path("include"), "Python.h").exists()
    or " " in sys.prefix,
    reason="torch.compile needs a C++ compiler, Python's headers, and a path without a space",
)
def test_a_compiled_training_takes_the_steps_of_an_eager_one():
    assert compile_error() is None
    compiled = dataclasses.replace(PLAIN, compiled=True)
    run = trained("mrpc", compiled)
    assert run.ran()["recipe"]["compiled"]
    assert run.losses == pytest.approx(losses("mrpc", PLAIN), rel=1e-3)
