"""Ways of sharing gradients or weights: what each leaves the same, seen on two ranks."""

import json
from pathlib import Path

import pytest

from helpers.ccl import mpi
from helpers.distributed import Exchange

PROGRAM = str(Path(__file__).with_name("exchange_ranks.py"))
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def found():
    if not mpi.MPIEXEC.exists():
        pytest.skip("Intel MPI is not installed")
    said = mpi.run([PROGRAM, "ccl"], 2, variables={"PYTHONPATH": str(ROOT)})
    line = next(line for line in said.splitlines() if '{"' in line)
    return json.loads(line[line.index('{"') :])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["small buckets", "two batches of half", "touched rows", "touched rows of two batches"],
)
def test_buckets_rows_and_accumulation_change_no_step(found, name):
    usual = found["every step"]
    assert found[name]["losses"] == pytest.approx(usual["losses"], rel=1e-3)
    assert found[name]["norm"] == pytest.approx(usual["norm"], rel=1e-6)
    assert found[name]["samples"] == usual["samples"] == 32
    assert found[name]["agreed"] == [True, True]


@pytest.mark.slow
def test_rows_that_some_rank_touched_are_averaged(found):
    assert found["averaged"] == [3, [[0, 0], [1, 1], [2, 2], [0, 0], [3, 3]]]


@pytest.mark.slow
def test_bf16_gradients_round(found):
    usual, rounded = found["every step"], found["bf16"]
    assert rounded["losses"] == pytest.approx(usual["losses"], rel=0.05)
    assert rounded["norm"] != usual["norm"]
    assert rounded["agreed"] == [True, True]


@pytest.mark.slow
def test_local_steps_drift_apart_and_meet_again(found):
    assert found["local"]["agreed"] == [False, True]
    assert found["local"]["losses"][0] == pytest.approx(found["every step"]["losses"][0])
    assert found["local"]["losses"] == pytest.approx(found["every step"]["losses"], rel=0.2)


@pytest.mark.slow
def test_the_profiler_sees_what_ranks_compute_and_send(found):
    names, ranks = found["traced"]
    assert names == ["Optimizer.step", "all_reduce", "backward", "forward", "input"]
    assert [len(steps) for steps in ranks] == [2, 2]
    for step in (step for steps in ranks for step in steps):
        assert step["compute"] > step["input"] > 0
        assert step["exposed"] > 0
        assert step["waiting"] >= 0
    # in each step one of the ranks is the slowest
    assert [min(steps[i]["waiting"] for steps in ranks) for i in range(2)] == [0, 0]
    _, ranks = found["traced local"]
    # after the warm-up step, the first of the two averages, the second does not
    assert all(first["exposed"] > 0 == second["exposed"] for first, second in ranks)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket_mb": 0},
        {"accumulate": 0},
        {"local_steps": 0},
        {"local_steps": 2, "bf16": True},
        {"local_steps": 2, "touched_rows": True},
        {"accumulate": 2, "static_graph": True},
    ],
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Exchange(**wrong)
