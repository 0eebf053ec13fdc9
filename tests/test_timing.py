import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.timing import Comparison, Stopwatch, compare


def test_variants_take_turns_and_warm_up_does_not_count():
    calls = []
    result = compare({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert {name: len(times) for name, times in result.seconds.items()} == {"a": 3, "b": 3}


def test_too_few_repeats_are_refused_before_anything_runs():
    calls = []
    with pytest.raises(ValueError, match="2 repeats are too few"):
        compare({"a": lambda: calls.append(1), "b": lambda: calls.append(1)}, repeats=2)
    assert calls == []


@pytest.mark.parametrize("seconds", [{"a": [1, 2, 3]}, {"a": [1, 2, 3], "b": [1, 2]}])
def test_lopsided_comparisons_are_refused(seconds):
    with pytest.raises(ValueError):
        Comparison(seconds)


def test_hand_worked_ratio_and_verdicts():
    result = Comparison(
        {"base": [2, 4, 6], "fast": [1, 2, 2], "noisy": [1, 8, 6], "slow": [3, 5, 9]}
    )
    assert result.median("base") == 4
    assert result.spread("base") == 1
    assert result.speedup("fast") == 2
    verdicts = {row["variant"]: row["verdict"] for row in result.rows()}
    assert verdicts["fast"] == "faster"
    assert verdicts["slow"] == "slower"
    assert "no clear difference" in verdicts["noisy"]
    assert "2.00x" in result._repr_html_()


@given(st.lists(st.floats(1e-6, 1e3), min_size=3), st.floats(0.1, 10))
def test_speedup_of_a_scaled_baseline_is_the_scale(times, scale):
    result = Comparison({"base": times, "other": [t / scale for t in times]})
    assert result.speedup("other") == pytest.approx(scale)


def test_stopwatch_measures_wall_time():
    with Stopwatch() as watch:
        time.sleep(0.05)
    assert watch.seconds >= 0.05
