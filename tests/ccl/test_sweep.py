"""Sweeps of all-reduce, and the two numbers fitted to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.ccl import mpi
from helpers.ccl.sweep import KB, MB, bus_bandwidth, fit, sweep

SIZES = [KB << power for power in range(15)]


@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11))
def test_a_known_cost_is_found_again(latency, bandwidth):
    cost = fit(SIZES, [latency + size / bandwidth for size in SIZES])
    assert cost.latency == pytest.approx(latency, rel=1e-3, abs=1e-9)
    assert cost.seconds(64 * MB) == pytest.approx(latency + 64 * MB / bandwidth, rel=1e-3)


def test_relative_errors_count():
    # one slow big message hardly moves the latency, which a fit of absolute errors would ruin
    seconds = [1e-5 + size / 1e9 for size in SIZES]
    seconds[-1] *= 1.3
    assert fit(SIZES, seconds).latency == pytest.approx(1e-5, rel=0.1)


def test_one_size_is_not_enough():
    with pytest.raises(ValueError, match="two sizes"):
        fit([KB, KB], [1e-5, 2e-5])


@pytest.mark.parametrize(("ranks", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_is_what_each_rank_sends(ranks, factor):
    assert bus_bandwidth(1000, 2.0, ranks) == pytest.approx(500 * factor)


@pytest.mark.skipif(not mpi.MPIEXEC.exists(), reason="Intel MPI is not installed")
def test_a_sweep_times_gloo_beside_ccl():
    result = sweep((KB, 64 * KB), "bfloat16", rounds=3)
    assert result.ranks == 2
    assert list(result.seconds)[0] == "gloo"
    for by_size in result.seconds.values():
        assert list(by_size) == [KB, 64 * KB]
        assert all(len(times) == 3 and min(times) > 0 for times in by_size.values())
    assert len(result.median("gloo")) == 2
