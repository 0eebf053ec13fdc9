import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import cost, prices
from helpers.cost import CostError, InterruptedRun, Option, dollars, frontier, option

INSTANCE = next(iter(prices.load().instances.values()))
RUN = InterruptedRun(hours=12.0, nodes=2, rate=1 / 8, checkpoint=0.02, restart=0.1)  # M = 4 h


def test_dollars_by_hand():
    assert dollars(4, 0.5, 3.0) == 6.0
    assert dollars(1, 0.0, 3.0) == 0.0


def test_an_option_has_the_price_of_its_market():
    spot = option(INSTANCE, 4, 0.5, "spot")
    assert (spot.instance, spot.nodes, spot.market) == (INSTANCE.name, 4, "spot")
    assert spot.dollars == pytest.approx(2 * INSTANCE.spot)
    assert option(INSTANCE, 4, 0.5).dollars == pytest.approx(2 * INSTANCE.on_demand)


def an_option(hours, cost):
    return Option("x", 1, "spot", hours, cost)


def test_a_frontier_by_hand():
    fast, slow, middle = an_option(1, 9), an_option(4, 2), an_option(2, 5)
    beaten = [an_option(2, 6), an_option(3, 5), an_option(4, 3), an_option(1, 10)]
    assert frontier([*beaten, slow, fast, middle]) == [fast, middle, slow]
    assert frontier([]) == []


@given(st.lists(st.builds(an_option, st.integers(1, 6), st.integers(0, 6)), max_size=20))
def test_a_frontier_is_what_comparing_all_pairs_finds(options):
    def beaten(one):
        return any(
            other.hours <= one.hours
            and other.dollars <= one.dollars
            and (other.hours < one.hours or other.dollars < one.dollars)
            for other in options
        )

    def place(its):
        return its.hours, its.dollars

    best = [its for its in options if not beaten(its)]
    assert [place(its) for its in frontier(options)] == sorted(map(place, best))


def test_a_run_without_interruptions_pays_for_its_checkpoints_only():
    calm = replace(RUN, rate=0.0)
    assert calm.between == math.inf
    assert calm.expected(3.0) == pytest.approx(12.0 + 4 * 0.02)
    assert calm.simulate(3.0, runs=2) == pytest.approx([12.08, 12.08])
    assert calm.young() == calm.daly() == math.inf
    # one checkpoint, at the end
    assert calm.expected(math.inf) == pytest.approx(12.02)


def test_young_and_the_mean_by_hand():
    assert RUN.between == 4.0
    assert RUN.young() == pytest.approx(math.sqrt(2 * 0.02 * 4))
    segment = math.exp((3 + 0.02) / 4) - 1
    assert RUN.expected(3.0) == pytest.approx(4 * math.exp(0.1 / 4) * segment * 4)


def best_interval(run):
    """By brute force: of many intervals, the one with the smallest mean."""
    intervals = np.geomspace(run.checkpoint / 10, 10 * run.between, 4001)
    return intervals[np.argmin([run.expected(interval) for interval in intervals])]


@settings(max_examples=10)
@given(st.floats(0.001, 0.5), st.floats(1, 50))
def test_daly_is_near_the_numeric_minimum(checkpoint, between):
    run = InterruptedRun(1000.0, 1, 1 / between, checkpoint, 0.1)
    best = best_interval(run)
    assert run.daly() == pytest.approx(best, rel=0.01)
    assert run.expected(run.daly()) <= run.expected(run.young()) * (1 + 1e-9)


def test_where_saving_takes_longer_than_nodes_last_daly_saves_once_between_interruptions():
    run = replace(RUN, checkpoint=10.0)
    assert run.daly() == run.between


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    st.integers(1, 8), st.floats(0.1, 3), st.integers(1, 12), st.floats(0, 0.5), st.floats(0, 0.5)
)
def test_simulated_runs_take_the_expected_time(nodes, often, parts, checkpoint, restart):
    run = InterruptedRun(10.0, nodes, often / 10 / nodes, checkpoint, restart)
    hours = run.simulate(run.hours / parts, runs=2000)
    error = hours.std() / math.sqrt(hours.size)
    assert hours.mean() == pytest.approx(run.expected(run.hours / parts), abs=5 * error + 1e-9)
    assert hours.min() >= 10 + parts * checkpoint - 1e-9


def test_what_is_left_over_is_a_segment_of_its_own():
    # 12 h in segments of 5, 5 and 2 h, worked out one by one
    lengths = [5.02, 5.02, 2.02]
    mean = 4 * math.exp(0.1 / 4) * sum(math.exp(length / 4) - 1 for length in lengths)
    hours = RUN.simulate(5.0, runs=20_000)
    assert hours.mean() == pytest.approx(mean, abs=4 * hours.std() / math.sqrt(hours.size))


def test_a_seed_gives_the_same_runs():
    assert list(RUN.simulate(1.0, 5, seed=3)) == list(RUN.simulate(1.0, 5, seed=3))
    assert list(RUN.simulate(1.0, 5, seed=3)) != list(RUN.simulate(1.0, 5, seed=4))


@given(st.integers(1, 20), st.floats(1e-3, 0.1))
def test_more_nodes_are_interrupted_more_often(nodes, rate):
    run = replace(RUN, nodes=nodes, rate=rate)
    assume(run.expected(1.0) < math.inf)
    assert run.between == pytest.approx(1 / (nodes * rate))
    assert replace(run, nodes=nodes + 1).expected(1.0) > run.expected(1.0)


def test_a_run_that_hardly_ever_ends_is_refused():
    hopeless = replace(RUN, nodes=1000)
    assert hopeless.expected(12.0) == math.inf
    with pytest.raises(CostError, match="an interruption each 0.008 h.* Choose a shorter interval"):
        hopeless.simulate(12.0)
    assert RUN.expected(12.0) / RUN.between < cost.MOST_INTERRUPTIONS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hours": 0.0}, "hours = 0.0: expected a number above 0"),
        ({"hours": math.inf}, "hours"),
        ({"nodes": 0}, "nodes = 0: expected a whole number from 1"),
        ({"nodes": 1.5}, "nodes"),
        ({"nodes": True}, "nodes"),
        ({"rate": -0.1}, "rate = -0.1: expected a number from 0"),
        ({"checkpoint": math.nan}, "checkpoint"),
        ({"restart": math.inf}, "restart"),
    ],
)
def test_a_run_of_nonsense_is_refused(change, said):
    with pytest.raises(CostError, match=said):
        replace(RUN, **change)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dollars(0, 1.0, 1.0), "nodes = 0"),
        (lambda: dollars(1, -1.0, 1.0), "hours = -1.0"),
        (lambda: dollars(1, 1.0, math.nan), "price = nan"),
        (lambda: option(INSTANCE, 1, 1.0, "auction"), "market = 'auction'.*on demand or spot"),
        (lambda: Option("x", 1, "auction", 1.0, 1.0), "market"),
        (lambda: Option("x", 1, "spot", 0.0, 1.0), "hours = 0.0"),
        (lambda: Option("x", 1, "spot", 1.0, -1.0), "dollars = -1.0"),
        (lambda: RUN.expected(0.0), "interval = 0.0"),
        (lambda: RUN.simulate(math.nan), "interval = nan"),
        (lambda: RUN.simulate(1.0, runs=0), "runs = 0"),
    ],
)
def test_nonsense_is_refused(call, said):
    with pytest.raises(CostError, match=said):
        call()
