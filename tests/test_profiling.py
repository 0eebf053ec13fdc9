"""Where a step's time goes: operators by kind, FLOP by hand and by PyTorch's own counter."""

import dataclasses

import pytest
from torch.utils.flop_counter import FlopCounterMode

from helpers import profiles
from helpers.finetune import FineTuning
from helpers.profiling import KINDS, OTHER, Profile, kind, peak_flops, product_flop, profile


def run_of(task: str) -> FineTuning:
    settings = dataclasses.replace(
        getattr(profiles.load("laptop"), task), train_samples=16, eval_samples=8, batch_size=8
    )
    return FineTuning(task, settings)


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("aten::mm", "matrix products"),
        ("aten::addmm", "matrix products"),
        ("torch_ipex::ipex_linear", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "fused attention"),
        ("aten::bernoulli_", "random numbers"),
        ("aten::random_", "random numbers"),
        ("aten::copy_", "copies"),
        ("aten::fill_", "copies"),
        ("torch_ipex::linear_backward", "matrix products"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("Optimizer.step: aten::mul_", "optimizer"),
        ("aten::linalg_vector_norm", "optimizer"),
        ("aten::gelu_backward", OTHER),
        ("AddmmBackward0", OTHER),
        ("aten::native_layer_norm", OTHER),
    ],
)
def test_operators_have_a_kind(operator, expected):
    assert kind(operator) == expected


def test_kinds_add_up_to_the_step():
    found = Profile({"aten::mm": 0.5, "aten::bmm": 0.25, "aten::gelu": 0.125})
    assert found.seconds == 0.875
    assert found.kinds() == dict.fromkeys((*KINDS, OTHER), 0) | {
        "matrix products": 0.75,
        OTHER: 0.125,
    }


def test_a_profile_is_of_real_steps():
    run = run_of("mrpc")
    found = profile(run, 2)
    assert len(run.losses) == 2
    assert found.kinds()["matrix products"] > 0
    assert all(seconds >= 0 for seconds in found.operators.values())
    # multiplications of the optimizer are told from those of the model
    assert found.operators["Optimizer.step: aten::addcdiv_"] > 0
    assert "aten::addcdiv_" not in found.operators


@pytest.mark.parametrize("task", ["mrpc", "squad"])
def test_flop_are_those_that_pytorch_counts(task):
    run = run_of(task)
    batch = next(iter(run.batches))
    with FlopCounterMode(display=False) as counter:
        run.model(**batch).loss.backward()
    # a classifier's head sees one token of each sequence only, and no gradient reaches token ids
    counted = product_flop(run.model, *batch["input_ids"].shape)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_the_peak_is_a_speed():
    assert peak_flops("fp32") > 1e8
    assert peak_flops("bf16") > 1e7
