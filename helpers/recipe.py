"""What makes a fine-tuning step faster and leaves the training what it is, piece by piece.

``FineTuning(..., recipe=FAST)`` uses it; ``python -m bench.recipe`` measures it. The notebook that
teaches each piece and measures it alone: ``04_where_does_the_time_go``.
"""

import copy
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
PIECES = {
    "grouped batches": {"padding": "grouped"},
    "attention": {"attention": "faster", "attention_dropout": False},
    "fast dropout": {"fast_dropout": True},
    "fused optimizer": {"fused_optimizer": True},
    "bf16 weights": {"bf16_weights": True},
    "tuned process": {"tuned_process": True},
}


def one_by_one() -> dict[str, Recipe]:
    """``PUBLISHED`` with one more of ``PIECES`` each time; the last one is ``FAST``."""
    recipes, recipe = {}, PUBLISHED
    for name, change in PIECES.items():
        recipes[name] = recipe = replace(recipe, **change)
    return recipes


*_, FAST = one_by_one().values()
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

    PyTorch's own draws a random number for each element. What is kept is scaled by the rounded
    probability, so the mean is right. Raises ValueError for a probability outside of [0, 1).
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

    ``config`` is the model's; ``length`` is in tokens, a tenth of which are padding here. Which
    kind is faster depends on length, type and CPU.
    """
    heads = config.num_attention_heads
    shape = batch_size, length, heads, config.hidden_size // heads
    q, k, v = (torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    mask = torch.zeros(batch_size, 1, length, length, dtype=dtype)
    mask[..., length - length // 10 :] = torch.finfo(dtype).min

    def separate():
        weights = torch.softmax(q @ k.mT / shape[-1] ** 0.5 + mask, -1)
        return weights @ v

    kinds = {"fused": lambda: scaled_dot_product_attention(q, k, v, mask), "separate": separate}
    return _fastest({kind: lambda f=f: f().sum().backward() for kind, f in kinds.items()})


def fast_dropout_pays(config, batch_size: int, length: int, dtype: torch.dtype) -> bool:
    """Tries both dropouts on a layer's values: whether a byte each is faster than PyTorch's own.

    On Intel CPUs, PyTorch draws on all cores at once, with MKL. A byte each is drawn on one core.
    """
    values = torch.randn(batch_size, length, config.hidden_size, dtype=dtype)
    kinds = {"stock": torch.nn.Dropout(0.1), "byte": FastDropout(0.1)}
    return _fastest({name: lambda f=f: f(values) for name, f in kinds.items()}) == "byte"


def _fastest(kinds) -> str:
    return min(kinds, key=compare(kinds, TRIALS).median)


class MasterWeights:
    """Rounds a model's linear layers to bf16, and keeps their weights in fp32 for the optimizer.

    Autocast rounds the weights in every forward pass, and keeps the sum that runs from layer to
    layer in fp32, to be rounded for each product. With bf16 layers the weights are rounded once a
    step, and that sum is bf16. Embeddings and normalisations still compute in fp32: their gradients
    are sums over all tokens, which PyTorch would add up in bf16 (``02_bf16_and_amx``, section 4).

    ``exact`` are the weights for the optimizer, all in fp32, in the order of the model's
    parameters. Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        named = list(model.named_parameters())
        before = {name: weight.detach().clone() for name, weight in named}
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(torch.bfloat16)
            elif isinstance(module, torch.nn.LayerNorm):
                module.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
            if isinstance(module, torch.nn.LayerNorm | torch.nn.Embedding):
                module.register_forward_hook(lambda module, inputs, output: output.bfloat16())
        self._rounded = {name: w for name, w in named if w.dtype == torch.bfloat16}
        self._exact = {name: before[name].requires_grad_() for name in self._rounded}
        self.exact = [self._exact.get(name, weight) for name, weight in named]

    def take_gradients(self) -> None:
        """Moves the gradients of bf16 weights to the fp32 ones."""
        for name, rounded in self._rounded.items():
            self._exact[name].grad = None if rounded.grad is None else rounded.grad.float()
            rounded.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Writes the fp32 weights into the model, rounded."""
        torch._foreach_copy_(list(self._rounded.values()), list(self._exact.values()))

    def exact_model(self) -> torch.nn.Module:
        """A copy of the model in fp32, with the exact weights."""
        model = copy.deepcopy(self._model).float()
        exact = {name: weight.detach() for name, weight in self._exact.items()}
        model.load_state_dict(exact, strict=False)
        return model


@functools.cache
def compile_error() -> str | None:
    """Why ``torch.compile`` does not work here; None where it does. Takes some seconds."""
    if " " in sys.prefix:
        return f"torch.compile needs a path without a space, unlike {sys.prefix}"
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
        for pool in order[:full].split(POOL * self.batch_size):
            pool.copy_(pool[self.sampler[pool].argsort(stable=True)])
        batches = order[:full].view(-1, self.batch_size)
        for number in torch.randperm(len(batches), generator=self.generator):
            yield batches[number].tolist()
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
