import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import published
from helpers.network import Link
from helpers.scaling import (
    ScalingError,
    Training,
    expected_maximum,
    from_published,
    link_of,
    ring,
    tree,
    with_overlap,
)
from helpers.simulation import simulate

LINK = Link(bandwidth=1e9, latency=1e-3)
TRAINING = Training(
    samples=1000, epochs=3, batch_size=10, gradient_bytes=4e8, compute=1.0, link=LINK
)


def test_a_ring_by_hand():
    # 4 ranks: 3 rounds to sum and 3 to share, each a message of a quarter
    assert ring(8e8, 4, LINK) == pytest.approx(6 * (1e-3 + 0.2))
    assert ring(8e8, 1, LINK) == 0


def test_a_tree_by_hand():
    # 5 ranks: 3 levels up, 3 down, each a message of everything
    assert tree(8e8, 5, LINK) == pytest.approx(6 * (1e-3 + 0.8))
    assert tree(8e8, 1, LINK) == 0


def test_the_slowest_of_two_and_three():
    # known: 1 / sqrt(pi) and 3 / (2 sqrt(pi))
    assert expected_maximum(1) == pytest.approx(0, abs=1e-3)
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-3)
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-3)


@given(st.integers(2, 500))
def test_the_slowest_of_many_is_what_drawing_finds(count):
    drawn = np.random.default_rng(0).normal(size=(2000, count)).max(1).mean()
    assert expected_maximum(count) == pytest.approx(drawn, abs=0.08)


def test_a_step_by_hand():
    # 2 nodes: 2 messages of half of 4e8 bytes a bucket, 4 buckets
    training = replace(TRAINING, buckets=4, overlap=0.5, spread=0.1, input=0.01)
    communication = 4 * 2 * (1e-3 + 0.05)
    assert training.communication(2) == pytest.approx(communication)
    step = training.step(2)
    assert step.exposed == pytest.approx(communication - 0.5 * (2 / 3) * (3 / 4))
    assert step.waiting == pytest.approx(0.1 / math.sqrt(math.pi), abs=1e-3)
    assert step.seconds == pytest.approx(1.01 + step.exposed + step.waiting)
    assert training.steps(2) == 3 * 50
    assert training.seconds(2) == pytest.approx(150 * step.seconds)


def test_the_last_bucket_cannot_hide():
    training = replace(TRAINING, buckets=4, overlap=1.0, gradient_bytes=4e6)
    assert training.step(2).exposed == pytest.approx(training.communication(2) / 4)


def test_one_node_communicates_only_inside():
    assert TRAINING.step(1).exposed == 0
    pair = replace(TRAINING, ranks_per_node=2, inside=Link(4e9, 0))
    assert pair.step(1).exposed == pytest.approx(4e8 / 4e9)
    assert pair.communication(3) == pytest.approx(0.1 + ring(4e8, 3, LINK))


def test_summing_every_fourth_step_exposes_a_quarter():
    often, rarely = TRAINING.step(4).exposed, replace(TRAINING, sum_every=4).step(4).exposed
    assert rarely == pytest.approx(often / 4)


def test_the_knee_is_where_efficiency_falls_below():
    training = replace(TRAINING, samples=100_000, gradient_bytes=1e9, link=Link(1e9, 1e-3))
    knee = training.knee(least=0.4)
    assert training.efficiency(knee) >= 0.4 > training.efficiency(knee + 1)


@given(
    st.floats(0, 1), st.integers(2, 30), st.integers(2, 16), st.floats(1e6, 1e9), st.floats(0, 0.2)
)
def test_an_overlap_is_found_again(overlap, buckets, nodes, size, spread):
    training = replace(
        TRAINING, overlap=overlap, buckets=buckets, gradient_bytes=size, spread=spread
    )
    # only where it isn't the last bucket that decides
    if training.step(nodes).exposed > 1.01 * training.communication(nodes) / buckets:
        found = with_overlap(replace(training, overlap=0), nodes, training.seconds(nodes))
        assert found.overlap == pytest.approx(overlap, abs=1e-6)


def test_a_time_that_no_overlap_explains_is_refused():
    alone = TRAINING.seconds(2)
    with pytest.raises(ScalingError, match="state another link"):
        with_overlap(replace(TRAINING, buckets=8), 2, 2 * alone)
    with pytest.raises(ScalingError, match="can hide"):
        with_overlap(replace(TRAINING, buckets=8), 2, 0.5 * alone)


@given(st.integers(2, 8), st.floats(1e7, 1e10), st.floats(0, 1e-2))
def test_a_link_is_found_again(ranks, bandwidth, latency):
    link = Link(bandwidth, latency)
    sizes = [1e3, 1e5, 1e7]
    found = link_of(sizes, [ring(size, ranks, link) for size in sizes], ranks)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert found.latency == pytest.approx(latency, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(
    ("sizes", "seconds", "ranks", "said"),
    [
        ([1, 2], [1, 2], 2, "three sizes"),
        ([1, 1, 1], [1, 2, 3], 2, "three sizes"),
        ([1, 2, 3], [1, 2, 3], 1, "1 ranks"),
        ([1, 2, 3], [1, -2, 3], 2, "-2 s"),
        ([1, 2, 3], [3, 2, 1], 2, "don't grow"),
    ],
)
def test_a_fit_that_says_nothing_is_refused(sizes, seconds, ranks, said):
    with pytest.raises(ScalingError, match=said):
        link_of(sizes, seconds, ranks)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 0}, "samples = 0"),
        ({"sum_every": 0}, "sum_every"),
        ({"compute": -1.0}, "compute"),
        ({"compute": math.nan}, "compute"),
        ({"input": -1.0}, "input"),
        ({"spread": math.inf}, "spread"),
        ({"overlap": 1.5}, "overlap"),
        ({"algorithm": "star"}, "ring, tree"),
        ({"ranks_per_node": 2}, "inside"),
        ({"link": Link(1e9, -1e-6)}, "latency must be 0"),
        ({"link": Link(0, 0)}, "bandwidth above 0"),
        ({"gradient_bytes": -1}, "bytes"),
    ],
)
def test_nonsense_is_refused(change, said):
    with pytest.raises(ScalingError, match=said):
        replace(TRAINING, **change)


def test_more_nodes_than_samples_are_refused():
    with pytest.raises(ScalingError, match="1 to 1000 nodes"):
        TRAINING.step(1001)
    with pytest.raises(ScalingError, match="0 nodes"):
        TRAINING.step(0)


@given(
    st.sampled_from(["ring", "tree"]),
    st.integers(1, 64),
    st.integers(1, 12),
    st.floats(0, 1),
    st.floats(1e6, 2e9),
    st.sampled_from([1, 2]),
)
def test_the_simulation_of_equal_ranks_is_the_formula(
    algorithm, nodes, buckets, overlap, size, per_node
):
    training = replace(
        TRAINING,
        algorithm=algorithm,
        buckets=buckets,
        overlap=overlap,
        gradient_bytes=size,
        ranks_per_node=per_node,
        inside=Link(1e10, 0),
    )
    step, simulated = training.step(nodes), simulate(training, nodes, steps=2)
    # the formula lets all buckets but the last one hide at once; in the tree, not all wait for all
    assert simulated.mean() == pytest.approx(step.seconds, rel=0.12)
    if algorithm == "ring":
        assert simulated.mean() >= 0.999 * step.seconds


def test_stragglers_cost_what_the_formula_says():
    training = replace(TRAINING, spread=0.1, gradient_bytes=4e7)
    simulated = simulate(training, 16, steps=200).mean()
    assert simulated == pytest.approx(training.step(16).seconds, rel=0.03)


def test_traced_steps_are_replayed():
    simulated = simulate(replace(TRAINING, gradient_bytes=0, link=Link(1e9, 0)), 64, 5, 0, [1, 3])
    assert list(simulated) == [3] * 5  # among 64 ranks there is always a slow one


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 0}, "0 steps"),
        ({"traced": []}, "above 0"),
        ({"traced": [1.0, 0.0]}, "above 0"),
        ({"nodes": 2000}, "1 to 1000 nodes"),
    ],
)
def test_a_simulation_of_nonsense_is_refused(arguments, said):
    with pytest.raises(ScalingError, match=said):
        simulate(TRAINING, **({"nodes": 2} | arguments))


PLACED = Link(published.networks()["one TCP connection in a placement group"], 50e-6)


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_four_published_nodes_follow_from_one_and_two(task):
    one, two, four = published.runs(task)
    fitted = with_overlap(from_published(task, PLACED), 2, two["seconds"])
    assert fitted.seconds(1) == pytest.approx(one["seconds"])
    assert fitted.seconds(2) == pytest.approx(two["seconds"])
    assert fitted.seconds(4) == pytest.approx(four["seconds"], rel=0.05)


def test_the_published_squad_run_follows_from_one_node_and_the_overlap_of_qqp():
    *_, one, four = published.runs("squad")
    qqp = with_overlap(from_published("qqp", PLACED), 2, published.runs("qqp")[1]["seconds"])
    squad = from_published("squad", PLACED, inside=Link(10e9, 1e-6))
    assert squad.ranks_per_node == 2
    assert squad.steps(1) * squad.compute == pytest.approx(one["seconds"], rel=0.01)
    predicted = replace(squad, overlap=qqp.overlap).seconds(4)
    assert predicted == pytest.approx(four["seconds"], rel=0.05)
