"""QQP's size: tokenised once, in files that are mapped into memory, which an epoch doesn't fill."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from helpers import data, finetune, models, profiles
from tests.test_data import qqp_folder

WORDS = ["how", "what", "why", "is", "the", "best", "way", "to", "learn", "python", "money"]
PAIRS = 363_846  # training pairs: GLUE
GROWTH = 30e6  # bytes that an epoch may add: its order, and what allocators keep
EPOCH = """
import json, re, sys
from dataclasses import replace
from helpers import profiles
from helpers.finetune import FineTuning
from helpers.recipe import PLAIN

def anonymous():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", status.read())[1])

folder, held = sys.argv[1], []
paper = profiles.load("paper").qqp
settings = replace(profiles.load("laptop").qqp, data=folder, train_samples=None,
                   eval_samples=None, batch_size=256, max_length=paper.max_length)
# a tuned process keeps what it freed, and would hide what it holds
run = FineTuning("qqp", settings, recipe=replace(PLAIN, padding="grouped"))
sizes, samples = [], 0
for number, batch in enumerate(run.batches):
    if number % 50 == 10:
        sizes.append(anonymous())
    samples += len(batch["labels"])
    if "--hold" in sys.argv:
        held.append(batch)
print(json.dumps({"samples": samples, "growth": max(sizes) - sizes[0]}))
"""


def write(folder, train=60, dev=20):
    """A folder with QQP's files, of so many pairs."""
    draw = random.Random(0)

    def pairs(count):
        for row in range(count):
            first, second = (" ".join(draw.choices(WORDS, k=10)) for _ in range(2))
            yield f"{row}\t{2 * row}\t{2 * row + 1}\t{first}\t{second}\t{row % 2}\n"

    qqp_folder(folder, "".join(pairs(train)), "".join(pairs(dev)))
    return folder


def process(cache, code, *arguments):
    """A fresh Python whose data sets' files go to the folder ``cache``."""
    environment = os.environ | {"HF_DATASETS_CACHE": str(cache), data.VARIABLE: ""}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        cwd=Path(data.__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )


def result(started):
    said, _ = started.communicate(timeout=280)
    assert started.returncode == 0
    return json.loads(said.splitlines()[-1])


def files(cache):
    return {file: file.stat().st_mtime_ns for file in Path(cache).rglob("*.arrow")}


@pytest.mark.slow
def test_memory_stays_flat_over_an_epoch_of_qqp(tmp_path):
    """A second run reads no text: the files are there. One that holds its batches is noticed."""
    folder, cache = write(tmp_path, PAIRS), tmp_path / "cache"
    flat = result(process(cache, EPOCH, folder))
    assert flat["samples"] == PAIRS
    assert flat["growth"] < GROWTH
    made = files(cache)
    assert result(process(cache, EPOCH, folder, "--hold"))["growth"] > 3 * GROWTH
    assert files(cache) == made


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv(data.VARIABLE, raising=False)
    return tmp_path / "cache"


def encoded(folder, **changes):
    """What ``encode`` makes of the folder: the ids of its training set."""
    settings = replace(profiles.load("laptop").qqp, **changes)
    _, tokenizer = models.load(settings.model, "pair", say=lambda line: None)
    train, _ = finetune.encode(data.load("qqp", str(folder)), "qqp", tokenizer, settings)
    assert train.cache_files  # mapped
    return train["input_ids"][:]


def test_a_set_is_tokenised_once_for_each_content_and_length(tmp_path, cache):
    folder = write(tmp_path)
    ids = encoded(folder, max_length=64)
    made = files(cache)
    assert len(made) == 4  # text and ids, of two parts
    assert encoded(folder, max_length=64, epochs=7) == ids
    assert files(cache) == made

    shorter = encoded(folder, max_length=8)
    assert {len(row) for row in shorter} == {8}
    assert len(files(cache)) == 6

    text = (folder / "train.tsv").read_text()
    changed = text.replace("python", "england")
    times = (folder / "train.tsv").stat()
    (folder / "train.tsv").write_text(changed)
    os.utime(folder / "train.tsv", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert encoded(folder, max_length=64) != ids
    assert len(files(cache)) == 8
    assert made.items() <= files(cache).items()


def test_two_processes_make_one_set(tmp_path):
    folder, cache = write(tmp_path, 5000), tmp_path / "cache"
    code = (
        "import json, sys; from helpers import data; found = data.load('qqp', sys.argv[1])\n"
        "print(json.dumps([len(found.train), found.train[4999]['question1']]))"
    )
    both = [process(cache, code, folder) for _ in range(2)]
    first, second = map(result, both)
    assert first == second
    assert first[0] == 5000
    assert len(files(cache)) == 2
    assert not [file for file in cache.rglob("*incomplete*") if file.suffix != ".lock"]


def test_where_the_cache_cannot_be_written_another_folder_is_used_and_named(tmp_path, monkeypatch):
    monkeypatch.delenv(data.VARIABLE, raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    found = data.load("qqp", str(write(tmp_path)))
    assert len(found.train) == 60
    assert f"copied to a temporary folder: {tmp_path}/file/cache can't be written" in found.source
    used = {Path(file["filename"]) for file in found.train.cache_files}
    assert used and all(file.exists() for file in used)
