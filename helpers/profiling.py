"""Where the time of a training step goes, and how close its matrix products are to the peak.

The notebook that teaches it: ``04_where_does_the_time_go``.
"""

import os
import re
import time
from dataclasses import dataclass
from unittest.mock import patch

import torch

# What an operator does, by its name; the first that fits counts. IPEX has operators of its own.
KINDS = {
    "matrix products": r"\b(mm|addmm|bmm|baddbmm)\b|linear_backward|ipex_linear|mkldnn.*linear",
    "fused attention": r"flash_attention",
    "optimizer": r"^Optimizer\.step|linalg_vector_norm",
    "random numbers": r"bernoulli|random_",
    "copies": r"copy_|fill_|zero_|\bcat\b",
}
OTHER = "all other"
STEP = "Optimizer.step"
PEAK_SIZES = (512, 1024, 2048)
PEAK_SECONDS = 0.3


def kind(operator: str) -> str:
    """The name in ``KINDS`` of what an operator of PyTorch does, or "all other"."""
    return next((name for name, pattern in KINDS.items() if re.search(pattern, operator)), OTHER)


@dataclass(frozen=True)
class Profile:
    """Seconds a step, by operator: of each its own time, without the operators that it calls."""

    operators: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds a step in all operators."""
        return sum(self.operators.values())

    def kinds(self) -> dict[str, float]:
        """Seconds a step for each of ``KINDS``, and for all others."""
        sums = dict.fromkeys((*KINDS, OTHER), 0.0)
        for operator, seconds in self.operators.items():
            sums[kind(operator)] += seconds
        return sums


def record(run, steps: int) -> list:
    """Takes so many optimizer steps of a ``FineTuning`` under PyTorch's profiler: its events."""
    quiet = patch.dict(os.environ, {"KINETO_LOG_LEVEL": "5"})  # else it regrets having no GPU
    activities = [torch.profiler.ProfilerActivity.CPU]
    with quiet, torch.profiler.profile(activities=activities) as profiler:
        run.train(steps)
    return profiler.events()


def profile(run, steps: int) -> Profile:
    """Takes so many optimizer steps of a ``FineTuning``, and clocks each operator."""
    operators: dict[str, float] = {}
    for event in record(run, steps):
        name = f"{STEP}: {event.name}" if _is_in_optimizer(event) else event.name
        operators[name] = operators.get(name, 0) + event.self_cpu_time_total / 1e6 / steps
    return Profile(operators)


def _is_in_optimizer(event) -> bool:
    while event and not event.name.startswith(STEP):
        event = event.cpu_parent
    return event is not None


def product_flop(model: torch.nn.Module, batch_size: int, length: int) -> float:
    """Floating-point operations in the matrix products of a step, forward and backward.

    Of an encoder on ``batch_size`` sequences of ``length`` tokens, padding included. Each weight of
    a linear layer is multiplied and added once for each token forward, and twice backward: for the
    gradient of its input and for its own (Kaplan et al. 2020, "Scaling Laws for Neural Language
    Models", section 2.1). Attention adds two products a layer: of queries with keys, and of the
    result with values.
    """
    linear = [m for m in model.modules() if hasattr(m, "in_features")]  # IPEX's, too
    weights = sum(layer.in_features * layer.out_features for layer in linear)
    config = model.config
    attention = 2 * config.num_hidden_layers * config.hidden_size * length
    return 3 * 2 * (weights + attention) * batch_size * length


def peak_flops(precision: str) -> float:
    """The FLOP/s that this process reaches in its best square product, all threads together."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    best = 0.0
    for size in PEAK_SIZES:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        end = time.perf_counter() + PEAK_SECONDS
        while (start := time.perf_counter()) < end:
            a @ b
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
