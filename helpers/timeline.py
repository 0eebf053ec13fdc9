"""What each rank does when, in a step of a training: from PyTorch's profiler.

The notebook that teaches it: ``10_scaling``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from helpers.scaling import Step

OPTIMIZER = "Optimizer.step"
PARTS = ("input", "forward", "backward", OPTIMIZER)
SUM = "all_reduce"


@dataclass(frozen=True)
class Span:
    """A part of a step: one of ``PARTS``, or "all_reduce". Seconds since the trace began."""

    name: str
    start: float
    end: float


def trace(run, steps: int) -> list[Span]:
    """Takes so many steps of a ``FineTuning`` under the profiler: this rank's spans, in order.

    Every rank of the training has to call it. They begin together, after a barrier, so that their
    clocks can be compared, to within a message's time. The profiler makes steps a little longer.
    """
    from helpers.profiling import record

    run.ranks.barrier()
    spans = [
        Span(name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in record(run, steps)
        if (name := event.name.rpartition(":")[2]) in (*PARTS, SUM)
    ]
    spans.sort(key=lambda span: span.start)
    began = spans[0].start
    return [Span(span.name, span.start - began, span.end - began) for span in spans]


def _steps(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """The spans of one step after the other; a step ends with the optimizer's."""
    step, end = [], float("inf")
    for span in spans:
        if span.start >= end:
            yield step
            step, end = [], float("inf")
        step.append(span)
        if span.name == OPTIMIZER:
            end = span.end
    yield step


def _last_sum(step: Sequence[Span]) -> tuple[float, float] | None:
    """When the last gradients were ready to be summed, and when the backward pass had them."""
    for backward in (span for span in step if span.name == "backward"):
        sums = [s.start for s in step if s.name == SUM and backward.start <= s.start < backward.end]
        if sums:
            return max(sums), backward.end
    return None


def split(ranks: Sequence[Sequence[Span]]) -> list[list[Step]]:
    """Each step of each rank (``trace``), by what its seconds went into.

    Once the last gradients are ready, the backward pass waits: for the slowest rank to get there
    (``waiting``), and for the sums (``exposed``). An average of weights is exposed as a whole. All
    other time but the input's is ``compute``, that of sums which run beside it included.
    """
    found: list[list[Step]] = [[] for _ in ranks]
    for together in zip(*(list(_steps(spans)) for spans in ranks), strict=True):
        lasts = [_last_sum(step) for step in together]
        slowest = max((last[0] for last in lasts if last), default=0.0)
        for steps, step, last in zip(found, together, lasts, strict=True):
            whole = max(span.end for span in step if span.name in PARTS) - step[0].start
            given = sum(span.end - span.start for span in step if span.name == "input")
            waiting = exposed = 0.0
            if last:
                ready, end = last
                waiting = min(slowest, end) - ready
                exposed = end - ready - waiting
            (update,) = (span for span in step if span.name == OPTIMIZER)
            averages = [s for s in step if s.name == SUM and s.start >= update.start]
            exposed += sum(span.end - span.start for span in averages)
            steps.append(Step(given, whole - given - waiting - exposed, waiting, exposed))
    return found


def mean(steps: Sequence[Step]) -> Step:
    """The mean of each part."""
    parts = zip(*((s.input, s.compute, s.waiting, s.exposed) for s in steps), strict=True)
    return Step(*(sum(part) / len(steps) for part in parts))
