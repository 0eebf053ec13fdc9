import pytest

from helpers import plots
from helpers.cost import Option
from helpers.timeline import Span

matplotlib = pytest.importorskip("matplotlib", reason="figures need matplotlib")
matplotlib.use("Agg")


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].get_lines()}


def test_a_roof_bends_where_bandwidth_meets_the_peak():
    fig = plots.roofline({"fp32": [(1, 9), (100, 180)]}, bandwidth=10, peaks={"fp32": 200})
    roof = fig.axes[0].get_lines()[0]
    corner = list(roof.get_xdata()).index(20)
    assert roof.get_ydata()[corner] == 200
    assert roof.get_ydata()[-1] == 200
    assert roof.get_ydata()[0] == pytest.approx(10 * roof.get_xdata()[0])
    assert list(lines(fig)["fp32"].get_ydata()) == [9, 180]


def test_a_roof_beyond_the_points_stays_inside_the_picture():
    fig = plots.roofline({"fp32": [(1, 9), (2, 18)]}, bandwidth=10, peaks={"fp32": 200})
    roof = fig.axes[0].get_lines()[0]
    assert max(roof.get_xdata()) == 3
    assert max(roof.get_ydata()) == 30


def test_predictions_stand_beside_the_median_and_the_range():
    fig = plots.prediction({"bf16": 3.0}, {"bf16": [1.5, 2.0, 4.0]}, "speed-up")
    assert list(lines(fig)["predicted by you"].get_xdata()) == [3.0]
    (bar,) = fig.axes[0].patches
    assert bar.get_width() == 2.0
    (whisker,) = fig.axes[0].collections[0].get_segments()
    assert [x for x, _ in whisker] == [1.5, 4.0]


def test_a_missing_prediction_is_an_error():
    with pytest.raises(KeyError, match="bf16"):
        plots.prediction({}, {"bf16": [1.0]}, "speed-up")


def test_a_core_is_shared_between_the_colours_of_its_owners():
    fig = plots.cores({"socket 0": [0, 1, 2]}, {"rank 0": [0, 1], "rank 1": [1]})
    areas = [patch for patch in fig.axes[0].patches if patch.get_fill()]
    assert [patch.get_x() for patch in areas] == [0, 1, 1.45, 2]
    assert [patch.get_width() for patch in areas] == [0.9, 0.45, 0.45, 0.9]
    faces = [matplotlib.colors.to_hex(patch.get_facecolor()) for patch in areas]
    assert faces == [*(plots.COLORS[i].lower() for i in (0, 0, 1)), "#ffffff"]


def test_a_timeline_has_a_row_for_each_rank_and_the_network_below_it():
    spans = [Span("forward", 0, 0.02), Span("all_reduce", 0.01, 0.04)]
    fig = plots.timeline({"rank 0": spans, "rank 1": spans[:1]})
    (forward,), (sums,), (other,) = (area.get_paths() for area in fig.axes[0].collections)
    boxes = [path.get_extents() for path in (forward, sums, other)]
    assert [[box.x0, box.x1] for box in boxes] == [[0, 20], [pytest.approx(10), 40], [0, 20]]  # ms
    assert boxes[0].y1 <= boxes[1].y0 < boxes[1].y1 <= 1 <= boxes[2].y0
    assert [text.get_text() for text in fig.axes[0].get_legend().get_texts()] == [
        "all_reduce",
        "forward",
    ]


def test_figures_are_closed_and_leave_the_readers_style_alone():
    import matplotlib.pyplot as plt

    before = plt.rcParams["axes.grid"]
    plots.curves([1, 2], {"a": [1, 2]}, "x", "y", log=True)
    assert plt.get_fignums() == []
    assert plt.rcParams["axes.grid"] == before


def test_stacked_bars_end_where_their_parts_add_up():
    rows = {"one": {"a": 1.0, "b": 2.0}, "two": {"a": 0.5, "b": 0.0}}
    (axes,) = plots.stacked(rows, "s").axes
    ends = [
        max(bar.get_x() + bar.get_width() for bar in bars)
        for bars in zip(*axes.containers, strict=True)
    ]
    assert ends == [3.0, 0.5]


def test_a_waterfall_ends_with_what_remains():
    (axes,) = plots.waterfall({"base": 8.0, "better": 3.0, "worse": 4.0}, "s").axes
    bars = [(bar.get_y(), bar.get_height()) for bar in axes.patches]
    assert bars == [(0, 8.0), (8.0, -5.0), (3.0, 1.0), (0, 4.0)]
    assert [text.get_text() for text in axes.texts] == ["2.7x", "2.0x"]


def test_a_frontier_goes_through_the_best_and_says_their_nodes():
    a, b, c = (
        Option("big", 4, "on demand", 1.0, 9.0),
        Option("big", 1, "spot", 3.0, 2.0),
        Option("small", 1, "on demand", 4.0, 5.0),
    )
    fig = plots.frontier([a, b, c], [a, b])
    found = lines(fig)
    assert list(found) == ["frontier", "big, on demand", "big, spot", "small, on demand"]
    assert list(zip(*found["frontier"].get_data(), strict=True)) == [(1.0, 9.0), (3.0, 2.0)]
    assert found["big, spot"].get_color() == found["big, on demand"].get_color()
    assert found["big, spot"].get_markerfacecolor() == "white"
    assert found["small, on demand"].get_color() != found["big, on demand"].get_color()
    assert [text.get_text() for text in fig.axes[0].texts] == ["4", "1"]
    assert (fig.axes[0].get_xscale(), fig.axes[0].get_yscale()) == ("log", "log")


def test_more_instances_than_colours_are_all_drawn():
    options = [Option(f"i{n}", 1, "spot", n, n) for n in range(1, 9)]
    assert len(lines(plots.frontier(options, options[:1]))) == 9


def test_simulated_runs_stand_on_the_expected_curve_with_their_band():
    hundred = list(range(101))
    fig = plots.interruptions({1.0: 50.0, 2.0: 60.0}, {1.0: hundred, 2.0: hundred}, {"Young": 1.5})
    found = lines(fig)
    assert list(found["expected mean"].get_ydata()) == [50.0, 60.0]
    assert list(found["simulated"].get_ydata()) == [50.0, 50.0]
    assert set(found["Young"].get_xdata()) == {1.5}
    corners = fig.axes[0].collections[0].get_paths()[0].vertices
    assert {y for _, y in corners} == {5.0, 95.0}
