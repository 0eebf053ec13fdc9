import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from helpers import profiles
from helpers.checkpoint import Checkpoint, CheckpointError
from helpers.distributed import Exchange, Ranks, Shares, Shuffled
from helpers.finetune import FineTuning
from helpers.recipe import FAST, PLAIN

SETTINGS = replace(
    profiles.load("laptop").mrpc, train_samples=48, eval_samples=8, batch_size=8, epochs=2
)


def run(folder, **keywords):
    return FineTuning("mrpc", SETTINGS, checkpoint=folder, **keywords)


@pytest.mark.parametrize("recipe", [PLAIN, FAST], ids=["plain", "fast"])
@pytest.mark.parametrize("after", [2, 7])  # in the first epoch, in the second one
def test_an_interrupted_run_goes_on_to_the_last_bit(tmp_path, after, recipe):
    whole = run(tmp_path, recipe=recipe)
    whole.train(after)
    whole.save_checkpoint()
    whole.train(9 - after)
    resumed = run(tmp_path, recipe=recipe)
    assert f"step {after} of 12" in resumed.remarks[-1]
    resumed.train(9 - after)
    assert resumed.losses == whole.losses
    assert resumed.check_weights() == whole.check_weights()


def test_other_random_numbers_would_be_noticed(tmp_path):
    whole = run(tmp_path)
    whole.train(2)
    whole.save_checkpoint()
    whole.train(2)
    resumed = run(tmp_path)
    torch.manual_seed(5)
    resumed.train(2)
    assert resumed.losses != whole.losses


def test_a_finished_run_has_nothing_left(tmp_path):
    finished = run(tmp_path)
    finished.train(finished.remaining_steps())
    finished.save_checkpoint()
    again = run(tmp_path)
    assert again.remaining_steps() == 0
    assert again.check_weights() == finished.check_weights()


def test_another_training_is_refused_with_what_differs(tmp_path):
    first = run(tmp_path)
    first.save_checkpoint()
    with pytest.raises(CheckpointError, match="seed is 0 there and 1 here"):
        run(tmp_path, seed=1)


def test_local_steps_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="local steps"):
        run(tmp_path, exchange=Exchange(local_steps=2))


@pytest.mark.parametrize("fault", ["truncated", "flipped"])
def test_a_broken_file_is_refused(tmp_path, fault):
    checkpoint = Checkpoint(tmp_path)
    checkpoint.write({"weights": torch.arange(10_000)})
    content = bytearray(checkpoint.file.read_bytes())
    if fault == "truncated":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    checkpoint.file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is broken.*remove it"):
        checkpoint.read()


def test_an_interrupted_write_leaves_the_last_state(tmp_path):
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read() is None
    checkpoint.write({"step": 1})
    checkpoint.file.with_suffix(".partial").write_bytes(b"half")
    assert Checkpoint(tmp_path).read() == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match="no checkpoint can be written"):
        Checkpoint(file)


def test_the_command_line_says_in_one_line_what_is_broken(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    command = [sys.executable, "-m", "helpers.finetune", "--task", "mrpc", "--steps", "1"]
    ran = subprocess.run(
        [*command, "--checkpoint", tmp_path], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode != 0
    assert "is broken" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("skipped", [0, 3, 5])
def test_each_sample_is_in_one_share_and_skipped_batches_are_left_out(skipped):
    def epoch(rank, skip=0):
        order = torch.Generator().manual_seed(3)
        batches = torch.utils.data.BatchSampler(Shuffled(41, order), 8, drop_last=False)
        shares = Shares(batches, Ranks(rank, 2))
        shares.skip(skip)
        return list(shares)

    whole = [epoch(rank) for rank in range(2)]
    # the last batch has one sample, which rank 1 computes too, with weight 0
    taken = [index for share in whole for batch in share[:5] for index in batch]
    assert sorted(taken + whole[0][5]) == list(range(41))
    assert [epoch(rank, skipped) for rank in range(2)] == [share[skipped:] for share in whole]


def test_each_epoch_has_another_order():
    shuffled = Shuffled(100, torch.Generator().manual_seed(0))
    first, second = list(shuffled), list(shuffled)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
