"""What a training on several ranks needs besides ``DistributedDataParallel``.

Each rank takes its share of every batch, counts it at its true weight, and evaluates its share of
the evaluation set, with nothing counted twice. The notebook that teaches it:
``08_distributed_mrpc``.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, Sampler


@dataclass(frozen=True)
class Exchange:
    """How ranks share what they learnt. Raises ValueError for counts below 1, or what can't be.

    Gradients are summed in buckets of ``bucket_mb`` (2**20 bytes), rounded to bf16 where ``bf16``
    says so, while the backward pass computes the next ones; ``static_graph`` promises
    DistributedDataParallel that each step is alike. With ``touched_rows``, the gradient of the word
    embedding is left to ``average_rows``, with the same result. A step adds up the gradients of
    ``accumulate`` batches first. With ``local_steps``, each rank takes so many steps on weights of
    its own before all average their weights, and no gradients are summed: local SGD, Lin et al.
    2020, "Don't Use Large Mini-Batches, Use Local SGD". The notebook that teaches it:
    ``10_scaling``.
    """

    bucket_mb: float = 25
    bf16: bool = False
    static_graph: bool = False
    touched_rows: bool = False
    accumulate: int = 1
    local_steps: int = 1

    def __post_init__(self):
        if not self.bucket_mb > 0 or self.accumulate < 1 or self.local_steps < 1:
            raise ValueError(f"{self}: bucket_mb has to be above 0, the counts 1 or more")
        if self.local_steps > 1 and (self.bf16 or self.static_graph or self.touched_rows):
            raise ValueError(f"{self}: ranks that take local steps sum no gradients")
        if self.static_graph and self.accumulate > 1:
            raise ValueError(f"{self}: a step of several batches is no static graph")


EVERY_STEP = Exchange()


@dataclass(frozen=True)
class Ranks:
    """The ranks that train together: this one's number, their count, their process group.

    Its methods are collectives: every rank of the group has to call them, in the same order.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> "Ranks":
        """Those of a process group, by default of the whole world; without one, a single rank."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def gather(self, items: list) -> list:
        """All ranks' items in the order in which they were dealt out: rank 0, 1, ..., 0, 1, ..."""
        if self.size == 1:
            return items
        hands: list[list] = [[]] * self.size
        dist.all_gather_object(hands, items, group=self.group)
        count = sum(map(len, hands))
        return [hands[i % self.size][i // self.size] for i in range(count)]

    def mean(self, values: list[float]) -> list[float]:
        """The mean over all ranks, value by value."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return (total / self.size).tolist()

    def barrier(self) -> None:
        """Returns when all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def first(self, make: Callable):
        """What ``make()`` returns on rank 0, on all ranks; they all raise what it raises there."""
        box = [None, None]
        if self.rank == 0:
            try:
                box[0] = make()
            except Exception as error:
                box[1] = error
        if self.size > 1:
            dist.broadcast_object_list(box, group=self.group, group_src=0)
        if box[1] is not None:
            raise box[1]
        return box[0]

    def agree(self, text: str) -> bool:
        """Whether all ranks hold the same text."""
        return len(set(self.gather([text]))) == 1

    @contextmanager
    def one_after_the_first(self) -> Iterator[None]:
        """The block runs on rank 0 first, then on the others: what it downloads is there then."""
        if self.size > 1 and self.rank > 0:
            dist.barrier(group=self.group)
        try:
            yield
        finally:
            if self.size > 1 and self.rank == 0:
                dist.barrier(group=self.group)


def average_rows(gradient: torch.Tensor, rows: torch.Tensor, group=None) -> int:
    """Averages, in place, the rows that any rank's batch touched; returns how many they are.

    ``gradient`` is that of an embedding, (vocabulary, width), ``rows`` are the token ids of this
    rank's batch, of any shape: all other rows of its gradient are 0. A batch touches a few hundred
    rows of some 30,000, so that this sends about a hundredth of what DDP would. A collective of
    ``group``. The notebook that teaches it: ``10_scaling``.
    """
    touched = torch.zeros(len(gradient), dtype=torch.uint8)
    touched[rows.flatten()] = 1
    dist.all_reduce(touched, dist.ReduceOp.MAX, group=group)
    union = touched.nonzero().squeeze(1)
    mean = gradient[union] / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    gradient[union] = mean
    return len(union)


class Shuffled(Sampler):
    """The numbers below ``count`` in random order, another one in each epoch.

    The order is one tensor, of 8 bytes a sample; torch's ``RandomSampler`` makes a list of Python
    numbers. The notebook that uses it: ``10_scaling``.
    """

    def __init__(self, count: int, generator: torch.Generator):
        self.count, self.generator = count, generator

    def __iter__(self) -> Iterator[int]:
        return map(int, torch.randperm(self.count, generator=self.generator).numpy())

    def __len__(self) -> int:
        return self.count


class Shares(Sampler):
    """One rank's share of each global batch: every n-th sample, n being the number of ranks.

    N ranks with batches of b samples then take the steps of one rank with batches of N * b, in
    the same order. A last batch with fewer samples than ranks leaves some without: they get the
    first sample, at weight 0, since they have to take part in the step.
    """

    def __init__(self, batches: BatchSampler, ranks: Ranks):
        self.batches, self.ranks = batches, ranks
        self._skipped = 0

    def skip(self, batches: int) -> None:
        """Lets the next epoch begin behind so many of its batches, none of which is read."""
        self._skipped = batches

    def __iter__(self) -> Iterator[list[int]]:
        skipped, self._skipped = self._skipped, 0
        for batch in islice(self.batches, skipped, None):
            yield batch[self.ranks.rank :: self.ranks.size] or batch[:1]

    def __len__(self) -> int:
        return len(self.batches)

    def size(self, step: int) -> int:
        """Samples of the global batch of a step."""
        before = step % len(self) * self.batches.batch_size
        return min(self.batches.batch_size, len(self.batches.sampler) - before)

    def own(self, step: int) -> int:
        """How many of them are this rank's; may be 0."""
        return len(range(self.ranks.rank, self.size(step), self.ranks.size))

    def weight(self, step: int) -> float:
        """What this rank's mean loss counts in the ranks' mean, so that each sample counts alike.

        1 for a full batch. DDP averages over ranks, and a rank with fewer samples would
        otherwise weigh as much as one with more.
        """
        return self.own(step) * self.ranks.size / self.size(step)


def digest(weights: Iterable[torch.Tensor]) -> str:
    """SHA-256 of all weights: equal weights, equal text."""
    found = hashlib.sha256()
    for weight in weights:
        found.update(weight.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()
