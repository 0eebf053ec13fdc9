"""What makes a fine-tuning step faster and leaves the training what it is, piece by piece.

``FineTuning(..., recipe=FAST)`` uses it; ``python -m bench.recipe`` measures it. The notebook that
teaches each piece and measures it alone: ``04_where_does_the_time_go``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import Sampler

from helpers.timing import compare

BYTES = 256  # values of a random byte
POOL = 50
TRIALS = 5


@dataclass(frozen=True)
class Recipe:
    """Which pieces a training uses.

    ``padding`` is "fixed" (all to the longest that is allowed, as in the reference scripts),
    "batch" (to the longest of the batch) or "grouped" (the same, and a batch holds samples of
    about the same length). ``attention`` is PyTorch's "fused" kernel, "separate" products, or the
    "faster" of the two in a trial (``faster_attention``); ``attention_dropout`` is the dropout of
    attention weights, which the fused kernel does not know. ``fast_dropout`` draws dropout's random
    numbers a byte each. ``fused_optimizer`` updates all weights in one pass over memory.
    ``bf16_weights`` computes with weights that are bf16 already, instead of rounding them in each
    step (``MasterWeights``). ``tuned_process`` is ``helpers.runtime.tune``. ``compiled`` hands the
    model to ``torch.compile``, which takes a minute.
    """

    padding: str = "batch"
    attention: str = "fused"
    attention_dropout: bool = True
    fast_dropout: bool = False
    fused_optimizer: bool = False
    bf16_weights: bool = False
    tuned_process: bool = False
    compiled: bool = False

    def __post_init__(self):
        if self.padding not in ("fixed", "batch", "grouped"):
            raise ValueError(f"padding {self.padding!r}: there are 'fixed', 'batch' and 'grouped'")
        if self.attention not in ("fused", "separate", "faster"):
            raise ValueError(
                f"attention {self.attention!r}: there are 'fused', 'separate' and 'faster'"
            )


PLAIN = Recipe()
PUBLISHED = Recipe(padding="fixed")
FAST = Recipe(
    "grouped",
    attention="faster",
    attention_dropout=False,
    fast_dropout=True,
    fused_optimizer=True,
    bf16_weights=True,
    tuned_process=True,
)

RECIPES = {"published": PUBLISHED, "plain": PLAIN, "fast": FAST}


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped):
        count = x.numel()
        # 64 random bits cost little more than one: eight elements share a number
        bits = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None)
        kept = (bits.view(torch.uint8)[:count] >= dropped).view(x.shape)
        ctx.save_for_backward(kept)
        ctx.scale = BYTES / (BYTES - dropped)
        return torch.where(kept, x, 0).mul_(ctx.scale)

    @staticmethod
    def backward(ctx, gradient):
        (kept,) = ctx.saved_tensors
        return torch.where(kept, gradient, 0).mul_(ctx.scale), None


class FastDropout(torch.nn.Module):
    """Dropout whose probability is rounded to a multiple of 1/256: 0.1 becomes 26/256 = 0.1016.

    PyTorch's own draws 32 random bits or more for each element. What is kept is scaled by the
    rounded probability, so the mean is right. Raises ValueError for a
    probability outside of [0, 1).
    """

    def __init__(self, p: float):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout {p}: a probability from 0, and below 1")
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of any shape and floating type; the same in evaluation mode."""
        dropped = min(round(self.p * BYTES), BYTES - 1)
        return _Dropout.apply(x, dropped) if self.training and dropped else x


def use_fast_dropout(model: torch.nn.Module) -> int:
    """Replaces a model's ``torch.nn.Dropout`` modules; returns how many there were."""
    replaced = 0
    for module in model.modules():
        for name, child in module.named_children():
            if type(child) is torch.nn.Dropout and child.p < 1:
                setattr(module, name, FastDropout(child.p).train(child.training))
                replaced += 1
    return replaced


def without_attention_dropout(model: torch.nn.Module) -> None:
    """Switches off the dropout of attention weights, in BERT and DistilBERT."""
    for module in model.modules():
        if hasattr(module, "query") or hasattr(module, "q_lin"):
            module.dropout.p = 0.0
            module.dropout_prob = 0.0  # the fused variant reads this


def faster_attention(config, batch_size: int, length: int, dtype: torch.dtype) -> str:
    """Tries both kinds of attention without dropout, forward and backward: "fused" or "separate".

    ``config`` is the model's; ``length`` is in tokens. Which one is faster depends on length, type
    and CPU: for bf16, PyTorch 2.8's fused kernel needs AMX to be fast.
    """
    heads = config.num_attention_heads
    shape = batch_size, length, heads, config.hidden_size // heads
    q, k, v = (torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))

    def separate():
        weights = torch.softmax(q @ k.mT / shape[-1] ** 0.5, -1)
        return weights @ v

    kinds = {"fused": lambda: scaled_dot_product_attention(q, k, v), "separate": separate}
    times = compare({kind: lambda f=f: f().sum().backward() for kind, f in kinds.items()}, TRIALS)
    return min(kinds, key=times.median)


class MasterWeights:
    """Rounds a model's weights to bf16 and keeps them in fp32, for the optimizer.

    Autocast rounds all weights in every forward pass, and keeps what lies between two matrix
    products in fp32. With bf16 weights nothing is left to round, and all of that is half as large.
    ``exact`` are the fp32 weights, in the order of the model's parameters. Small updates add up in
    them that a bf16 weight would lose (``02_bf16_and_amx``, section 4). Source: Micikevicius et al.
    2018, "Mixed Precision Training", section 3.1.
    """

    def __init__(self, model: torch.nn.Module):
        self.exact = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
        self._names = [name for name, _ in model.named_parameters()]
        self._model = model.to(torch.bfloat16)

    def take_gradients(self) -> None:
        """Moves the gradients from the model to the fp32 weights."""
        for exact, rounded in zip(self.exact, self._model.parameters(), strict=True):
            exact.grad = None if rounded.grad is None else rounded.grad.float()
            rounded.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Writes the fp32 weights into the model, rounded."""
        torch._foreach_copy_(list(self._model.parameters()), self.exact)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's, with its weights in fp32."""
        exact = zip(self._names, self.exact, strict=True)
        return self._model.state_dict() | {name: weight.detach() for name, weight in exact}


def compile_error() -> str | None:
    """Why ``torch.compile`` does not work here; None where it does. Takes some seconds."""
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except RuntimeError as error:
        return " ".join(str(error).split())[:200]
    return None


class GroupedBatches(Sampler):
    """Batches of samples of about the same length, in random order.

    Each epoch shuffles all samples, sorts them by length within pools of 50 batches, cuts each
    pool into batches, and shuffles the batches. Only the last batch may be smaller; its samples
    are random. ``lengths`` are in tokens. The idea: ``group_by_length`` in transformers.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, generator: torch.Generator):
        self.sampler = torch.as_tensor(lengths)
        self.batch_size, self.generator = batch_size, generator

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.sampler), generator=self.generator)
        full = len(order) // self.batch_size * self.batch_size
        batches = []
        for pool in order[:full].split(POOL * self.batch_size):
            ranked = pool[self.sampler[pool].argsort(stable=True)]
            batches += ranked.view(-1, self.batch_size).tolist()
        for number in torch.randperm(len(batches), generator=self.generator).tolist():
            yield batches[number]
        if full < len(order):
            yield order[full:].tolist()


def question_loss(outputs, starts: torch.Tensor, ends: torch.Tensor, mask: torch.Tensor):
    """Mean cross entropy of an answer's first and last position, among real tokens only.

    ``outputs`` has ``start_logits`` and ``end_logits`` of (batch, length), ``mask`` is 1 for real
    tokens. transformers' own loss counts padding as possible answers: it then depends on how much
    of it there is.
    """
    parts = [
        torch.nn.functional.cross_entropy(
            logits.float().masked_fill(mask == 0, -torch.inf), positions
        )
        for logits, positions in ((outputs.start_logits, starts), (outputs.end_logits, ends))
    ]
    return sum(parts) / 2
