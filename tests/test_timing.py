import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.timing import Comparison, Stopwatch, Throughput, compare


def test_variants_take_turns_and_warm_up_does_not_count():
    calls = []
    result = compare({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert {name: len(times) for name, times in result.seconds.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize("names, repeats", [("ab", 2), ("a", 3), ("", 3)])
def test_too_few_repeats_or_variants_are_refused_before_anything_runs(names, repeats):
    calls = []
    with pytest.raises(ValueError, match="too few|two variants or more"):
        compare({name: lambda: calls.append(1) for name in names}, repeats=repeats)
    assert calls == []


@pytest.mark.parametrize(
    ("seconds", "beside", "message"),
    [
        ({"a": [1, 2, 3]}, {}, "two variants"),
        ({"a": [1, 2, 3], "b": [1, 2]}, {}, "same number of repeats"),
        ({"a": [1, 2], "b": [1, 2]}, {}, "too few"),
        ({"a": [1, 2, 3], "b": [1, 2, 3]}, {"F1": {"a": 0.9}}, "'F1' needs a value for each"),
    ],
)
def test_lopsided_comparisons_are_refused(seconds, beside, message):
    with pytest.raises(ValueError, match=message):
        Comparison(seconds, beside)


def test_hand_worked_ratios_and_verdicts():
    result = Comparison(
        {"base": [2, 4, 6], "fast": [1, 2, 2], "noisy": [1, 8, 6], "slow": [3, 5, 9]},
        beside={"F1": {"base": 0.9, "fast": 0.8, "noisy": 0.7, "slow": 0.6}},
    )
    assert result.median("base") == 4
    assert result.spread("base") == 1
    assert result.speedup("fast") == 2
    rows = {row["variant"]: row for row in result.rows()}
    assert rows["base"]["verdict"] == "baseline"
    assert rows["fast"]["verdict"] == "faster"
    assert rows["fast"]["speed-up"] == "2.00x (2.00-3.00)"
    assert rows["fast"]["F1"] == 0.8
    assert rows["slow"]["verdict"] == "slower"
    assert "spread is larger than the difference" in rows["noisy"]["verdict"]


def test_the_html_table_shows_each_variant_and_escapes_names():
    page = Comparison({"a": [1, 1, 1], "<b>": [2, 2, 2]})._repr_html_()
    assert "&lt;b&gt;" in page and "0.50x" in page and "3 rounds" in page


@given(st.lists(st.floats(1e-6, 1e3), min_size=3), st.floats(0.1, 10))
def test_speedup_of_a_scaled_baseline_is_the_scale(times, scale):
    result = Comparison({"base": times, "other": [t / scale for t in times]})
    assert result.speedup("other") == pytest.approx(scale)


def test_stopwatch_measures_wall_time_even_when_the_block_raises():
    watch = Stopwatch()
    with pytest.raises(KeyError), watch:
        time.sleep(0.05)
        raise KeyError
    assert watch.seconds >= 0.05


def test_throughput_is_samples_over_wall_time():
    with Throughput(total=100) as meter:
        for _ in range(5):
            time.sleep(0.01)
            meter.update(20)
    assert meter.samples == 100
    assert meter.samples_per_second == pytest.approx(100 / meter.seconds)
    assert meter.samples_per_second <= 100 / 0.05
