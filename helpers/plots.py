"""The course's figures, in one style. Each function returns a matplotlib Figure.

A notebook shows the figure that is its cell's last value.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from statistics import median

# Okabe and Ito's palette, told apart by colour-blind readers too (jfly.uni-koeln.de/color).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PREDICTION = "#666666"
STYLE = {
    "figure.figsize": (7, 4),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": "small",
}


@contextmanager
def figure():
    """Gives ``(figure, axes)`` in the course's style.

    The figure is closed for pyplot when the block ends, so that a notebook shows it once: where
    it is a cell's value.
    """
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        fig, ax = plt.subplots()
        try:
            yield fig, ax
        finally:
            plt.close(fig)


def roofline(
    points: Mapping[str, Sequence[tuple[float, float]]],
    bandwidth: float,
    peaks: Mapping[str, float],
    predicted: Mapping[str, float] | None = None,
    title: str = "",
):
    """Speed over arithmetic intensity, below the roof min(peak, bandwidth x intensity).

    ``points`` maps a variant to pairs of FLOP/byte and GFLOP/s; ``bandwidth`` is in GB/s, ``peaks``
    in GFLOP/s by variant, ``predicted`` the reader's guess of some peaks. Source: Williams,
    Waterman and Patterson 2009, "Roofline", CACM 52(4). The notebook that teaches it:
    ``02_bf16_and_amx``.
    """
    intensities = [intensity for series in points.values() for intensity, _ in series]
    left, right = min(intensities) / 1.5, max(intensities) * 1.5
    with figure() as (fig, ax):
        for color, (name, series) in zip(COLORS, points.items(), strict=False):
            corner = min(max(peaks[name] / bandwidth, left), right)
            roof = [min(peaks[name], bandwidth * x) for x in (left, corner, right)]
            ax.plot((left, corner, right), roof, color=color, alpha=0.5)
            ax.plot(*zip(*series, strict=True), "o--", linewidth=0.8, color=color, label=name)
            if predicted and name in predicted:
                ax.axhline(
                    predicted[name],
                    color=color,
                    linestyle=":",
                    label=f"{name},\npeak that you predicted",
                )
        ax.set(xscale="log", yscale="log", title=title)
        ax.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="GFLOP/s")
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        fig.set_figwidth(9)
    return fig


def prediction(predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]], label: str):
    """The reader's predictions beside the measurements: median as a bar, range as a whisker.

    Both map a name to values in the unit that ``label`` names; ``measured`` has one value a round,
    as ``helpers.timing.Comparison.speedups`` gives them.
    """
    with figure() as (fig, ax):
        rows = range(len(measured))
        middles = [median(values) for values in measured.values()]
        below = [
            middle - min(values) for middle, values in zip(middles, measured.values(), strict=True)
        ]
        above = [
            max(values) - middle for middle, values in zip(middles, measured.values(), strict=True)
        ]
        ax.barh(rows, middles, xerr=(below, above), color=COLORS[0], height=0.5, label="measured")
        ax.plot(
            [predicted[name] for name in measured],
            rows,
            "D",
            color=PREDICTION,
            markerfacecolor="white",
            label="predicted by you",
        )
        ax.set_yticks(rows, list(measured))
        ax.invert_yaxis()
        ax.set_xlim(left=0)
        ax.set_xlabel(label)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        fig.set_figheight(1.2 + 0.6 * len(measured))
    return fig


def curves(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    log: bool = False,
):
    """Lines over a common x; ``log`` makes both axes logarithmic (x to base 2)."""
    with figure() as (fig, ax):
        for color, (name, values) in zip(COLORS, series.items(), strict=False):
            ax.plot(x, values, "o-", color=color, label=name)
        if log:
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
        ax.set(xlabel=xlabel, ylabel=ylabel)
        ax.legend()
    return fig


def stacked(rows: Mapping[str, Mapping[str, float]], xlabel: str):
    """A bar for each row, made of its parts; all rows name the same parts.

    The notebook that uses it: ``04_where_does_the_time_go``.
    """
    with figure() as (fig, ax):
        left = dict.fromkeys(rows, 0.0)
        for color, part in zip(COLORS, next(iter(rows.values())), strict=False):
            widths = [parts[part] for parts in rows.values()]
            ax.barh(list(rows), widths, 0.6, list(left.values()), color=color, label=part)
            left = {name: left[name] + parts[part] for name, parts in rows.items()}
        ax.invert_yaxis()
        ax.set_xlabel(xlabel)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        fig.set_figheight(1.6 + 0.4 * len(rows))
    return fig


def waterfall(seconds: Mapping[str, float], ylabel: str):
    """What each change takes away from the time, or adds: the first bar is the baseline.

    ``seconds`` maps a change's name to the time with it and all changes before. The last bar is
    what remains. The notebook that uses it: ``04_where_does_the_time_go``.
    """
    (first, baseline), *changes = seconds.items()
    with figure() as (fig, ax):
        ax.bar(first, baseline, color=PREDICTION)
        before = baseline
        for name, after in changes:
            color = COLORS[2] if after <= before else COLORS[1]
            ax.bar(name, after - before, bottom=before, color=color)
            label = f"{baseline / after:.1f}x"
            ax.annotate(
                label, (name, max(before, after)), (0, 3), textcoords="offset points", ha="center"
            )
            before = after
        ax.bar("what remains", before, color=COLORS[0])
        ax.set_ylim(0, 1.1 * max(seconds.values()))
        ax.tick_params(axis="x", rotation=30)
        for tick in ax.get_xticklabels():
            tick.set_horizontalalignment("right")
        ax.grid(axis="x", visible=False)
        ax.set(ylabel=ylabel, title="above each bar: times faster than the baseline so far")
        fig.set_figwidth(2 + 0.9 * len(seconds))
    return fig


def timeline(ranks: Mapping[str, Sequence], title: str = ""):
    """What each rank computes, and below it what it has given to the network, over time.

    ``ranks`` maps a rank's name to its spans (``helpers.timeline.trace``). The notebook that
    teaches it: ``10_scaling``.
    """
    from matplotlib.patches import Patch

    names = list(dict.fromkeys(span.name for spans in ranks.values() for span in spans))
    colors = dict(zip(sorted(names), COLORS, strict=False))
    with figure() as (fig, ax):
        for row, spans in enumerate(ranks.values()):
            for span in spans:
                network = span.name == "all_reduce"
                place = (row + 0.45, 0.3) if network else (row, 0.45)
                width = 1e3 * (span.end - span.start)
                color = colors[span.name]
                ax.broken_barh([(1e3 * span.start, width)], place, color=color, alpha=0.8)
        ax.set_yticks([row + 0.4 for row in range(len(ranks))], list(ranks))
        ax.invert_yaxis()
        ax.set(xlabel="ms", title=title)
        ax.grid(axis="y", visible=False)
        ax.legend(
            handles=[Patch(color=color, label=name) for name, color in colors.items()],
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
        fig.set_size_inches(9, 1 + 0.8 * len(ranks))
    return fig


def cores(
    rows: Mapping[str, Sequence[int]], owners: Mapping[str, Collection[int]], title: str = ""
):
    """A map of cores: a square each, in the colours of those who compute there.

    ``rows`` maps a row's name (a socket) to the numbers of its cores, ``owners`` a name (a rank) to
    the cores that it was given. A square with several owners is shared between their colours; one
    without is white. The notebook that teaches it: ``05_threads_affinity_memory``.
    """
    from matplotlib.patches import Patch, Rectangle

    colors = dict(zip(owners, COLORS, strict=False))
    width = max(map(len, rows.values()))
    with figure() as (fig, ax):
        for y, numbers in enumerate(rows.values()):
            for x, number in enumerate(numbers):
                here = [colors[name] for name, its in owners.items() if number in its] or ["white"]
                for part, color in enumerate(here):
                    place = x + 0.9 * part / len(here), y
                    ax.add_patch(Rectangle(place, 0.9 / len(here), 0.9, color=color))
                ax.add_patch(Rectangle((x, y), 0.9, 0.9, fill=False, edgecolor="black"))
                ax.text(x + 0.45, y + 0.45, str(number), ha="center", va="center", fontsize=8)
        ax.set(xlim=(-0.1, width), ylim=(len(rows), -0.1), aspect="equal", title=title)
        ax.set_yticks([y + 0.45 for y in range(len(rows))], list(rows))
        ax.set_xticks([])
        ax.tick_params(length=0)
        ax.grid(False)
        for spine in ax.spines.values():
            spine.set_visible(False)
        ax.legend(
            handles=[Patch(color=color, label=name) for name, color in colors.items()],
            loc="center left",
            bbox_to_anchor=(1, 0.5),
        )
        fig.set_size_inches(3 + 0.4 * width, 0.6 + 0.5 * max(len(rows), len(owners) / 2))
    return fig


def frontier(options: Sequence, best: Sequence, title: str = ""):
    """Dollars over hours: a colour for each instance, hollow for spot, a line through the best.

    ``options`` are of ``helpers.cost.Option``; ``best`` are those that none beats
    (``helpers.cost.frontier``), labelled with their nodes. The notebook that teaches it:
    ``11_cost``.
    """
    colors = dict(zip(dict.fromkeys(its.instance for its in options), cycle(COLORS), strict=False))
    with figure() as (fig, ax):
        ax.plot(
            [its.hours for its in best],
            [its.dollars for its in best],
            color=PREDICTION,
            linewidth=5,
            alpha=0.3,
            label="frontier",
        )
        for instance, market in dict.fromkeys((its.instance, its.market) for its in options):
            points = [its for its in options if (its.instance, its.market) == (instance, market)]
            ax.plot(
                [its.hours for its in points],
                [its.dollars for its in points],
                "o",
                color=colors[instance],
                markerfacecolor="white" if market == "spot" else None,
                label=f"{instance}, {market}",
            )
        for its in best:
            ax.annotate(
                str(its.nodes),
                (its.hours, its.dollars),
                (0, -12),
                textcoords="offset points",
                ha="center",
                fontsize="small",
            )
        ax.set(xscale="log", yscale="log", xlabel="hours", ylabel="dollars", title=title)
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        fig.set_figwidth(9)
    return fig


def interruptions(
    expected: Mapping[float, float],
    simulated: Mapping[float, Sequence[float]],
    marks: Mapping[str, float],
):
    """Hours of a run over the hours between its checkpoints: a formula's mean, and simulated runs.

    Both map an interval to hours; of the simulated ones, the mean is a point and 5 to 95 % of the
    runs a band. ``marks`` maps a name to an interval. The notebook that teaches it: ``11_cost``.
    """
    import numpy as np

    with figure() as (fig, ax):
        ax.plot(*zip(*expected.items(), strict=True), color=COLORS[0], label="expected mean")
        hours = list(simulated.values())
        low, high = np.percentile(hours, [5, 95], axis=1)
        ax.fill_between(
            list(simulated), low, high, color=COLORS[0], alpha=0.15, label="5 to 95 % of the runs"
        )
        ax.plot(list(simulated), np.mean(hours, axis=1), "o", color=COLORS[0], label="simulated")
        for color, style, (name, interval) in zip(
            COLORS[1:], cycle(("--", ":")), marks.items(), strict=False
        ):
            ax.axvline(interval, color=color, linestyle=style, label=name)
        ax.set(xscale="log", yscale="log")
        ax.set(xlabel="hours between checkpoints", ylabel="hours of the run")
        ax.legend()
    return fig
