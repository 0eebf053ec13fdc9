"""Training on several ranks: right shares, right weights, the same steps and metrics as on one."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from helpers import models
from helpers.ccl import mpi
from helpers.distributed import Ranks, Shares, digest

PROGRAM = str(Path(__file__).with_name("training_ranks.py"))
ROOT = Path(__file__).parents[1]
needs_mpi = pytest.mark.skipif(not mpi.MPIEXEC.exists(), reason="Intel MPI is not installed")


def result(said: str) -> dict:
    """The JSON that rank 0 printed."""
    line = next(line for line in said.splitlines() if '{"' in line)
    return json.loads(line[line.index('{"') :])


def trained(ranks: int, backend: str) -> dict:
    return result(mpi.run([PROGRAM, backend], ranks, variables={"PYTHONPATH": str(ROOT)}))


# ---------------------------------------------------------------- shares


def shares_of(samples: int, batch: int, size: int) -> list[Shares]:
    def sampler():
        order = torch.Generator().manual_seed(3)
        return BatchSampler(RandomSampler(range(samples), generator=order), batch, drop_last=False)

    return [Shares(sampler(), Ranks(rank, size)) for rank in range(size)]


counts = st.integers(1, 60), st.integers(1, 12), st.integers(1, 5)


@given(*counts)
def test_each_sample_counts_once_in_an_epoch(samples, batch, size):
    shares = shares_of(samples, batch, size)
    counted = []
    for share in shares:
        for step, own in enumerate(share):
            counted += own[: share.own(step)]
            assert own, "a rank without a batch could not take part in the step"
    assert sorted(counted) == list(range(samples))
    assert {len(share) for share in shares} == {math.ceil(samples / batch)}


@given(*counts)
def test_the_weighted_mean_over_ranks_is_the_mean_over_samples(samples, batch, size):
    value = [float(7 * i % 11) for i in range(samples)]
    whole = list(shares_of(samples, batch, 1)[0])
    shares = shares_of(samples, batch, size)
    for step, own in enumerate(zip(*shares, strict=True)):
        means = [sum(value[i] for i in mine) / len(mine) for mine in own]
        weights = [share.weight(step) for share in shares]
        mean = sum(m * w for m, w in zip(means, weights, strict=True)) / size
        assert mean == pytest.approx(sum(value[i] for i in whole[step]) / len(whole[step]))
        assert sum(weights) == pytest.approx(size)


def test_a_second_epoch_counts_like_the_first():
    share = shares_of(7, 3, 2)[1]
    assert [share.size(step) for step in range(6)] == [3, 3, 1, 3, 3, 1]
    assert [share.own(step) for step in range(6)] == [1, 1, 0, 1, 1, 0]
    assert [share.weight(step) for step in range(3)] == [2 / 3, 2 / 3, 0]


def test_a_single_rank_needs_no_process_group():
    alone = Ranks.of()
    assert alone == Ranks(0, 1)
    assert alone.gather([1, 2]) == [1, 2]
    assert alone.mean([0.5]) == [0.5]
    assert alone.agree("anything")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_changes_with_the_smallest_change_of_a_weight(dtype):
    model = torch.nn.Linear(3, 2).to(dtype)
    before = digest(model.parameters())
    assert digest(model.parameters()) == before
    with torch.no_grad():
        bits = model.bias.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
        bits[0] ^= 1
    assert digest(model.parameters()) != before


# ---------------------------------------------------------------- trainings


@pytest.fixture(scope="module")
def alone():
    if not mpi.MPIEXEC.exists():
        pytest.skip("Intel MPI is not installed")
    return trained(1, "gloo")


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "backend"), [(2, "ccl"), (3, "gloo")])
def test_ranks_take_the_steps_of_one_and_score_the_same(alone, ranks, backend):
    together = trained(ranks, backend)
    for task in ("mrpc", "squad"):
        # the same weights give the same outputs, to the last bit, and each counts once
        assert together[task]["outputs"] == alone[task]["outputs"]
        assert together[task]["metric"] == alone[task]["metric"]
        assert together[task]["samples"] == alone[task]["samples"]
        # the order of the sums differs: fp32 rounds
        assert together[task]["losses"] == pytest.approx(alone[task]["losses"], rel=1e-3)
        assert together[task]["norms"] == pytest.approx(alone[task]["norms"], rel=1e-4, abs=1e-3)
    # bf16 weights and gradients round more
    assert together["fast"]["losses"] == pytest.approx(alone["fast"]["losses"], rel=0.05)
    assert together["fast"]["samples"] == alone["fast"]["samples"]
    assert alone["mrpc"]["samples"] == 38
    assert len(alone["mrpc"]["losses"]) == 8
    assert len(together["refused"]) == ranks
    assert "rank 0 would train in fp32" in together["refused"][0]
    assert "rank 1 would train in bf16" in together["refused"][1]
    assert len(together["noticed"]) == ranks
    for rank, message in enumerate(together["noticed"]):
        assert f"rank {rank}: the ranks hold different weights" in message


@needs_mpi
def test_the_command_line_trains_on_ranks_and_saves_one_model(tmp_path):
    folder = str(tmp_path / "model")
    arguments = ["-m", "helpers.finetune", "--task", "mrpc", "--steps", "2", "--output", folder]
    said = mpi.run(arguments, 2, variables={"PYTHONPATH": str(ROOT)})
    found = result(said)
    assert found["world_size"] == 2
    assert len(found["losses"]) == 2
    model, _ = models.load(folder, "pair")
    assert digest(model.parameters()) == found["weights"]
