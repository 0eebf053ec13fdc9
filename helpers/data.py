"""MRPC, QQP and SQuAD: from a local folder, from the hub, or built in as miniature sets.

The notebook that uses them first: ``03_finetune_one_node``.
"""

import os
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import datasets
from datasets.fingerprint import Hasher, get_temporary_cache_files_directory

from helpers import hub, miniature, official
from helpers.official import DataError

VARIABLE = "COURSE_DATA"
HUB = {
    "mrpc": ("nyu-mll/glue", "mrpc"),
    "qqp": ("nyu-mll/glue", "qqp"),
    "squad": ("rajpurkar/squad", "plain_text"),
}
LABELS = {
    "mrpc": ["not_equivalent", "equivalent"],
    "qqp": ["not_duplicate", "duplicate"],
}


@dataclass(frozen=True)
class Data:
    """Training and evaluation set, and a sentence that says where they come from."""

    train: datasets.Dataset
    evaluation: datasets.Dataset
    source: str


def _features(task: str) -> datasets.Features:
    text, number = datasets.Value("string"), datasets.Value("int32")
    if task == "squad":
        answers = datasets.Sequence({"text": text, "answer_start": number})
        return datasets.Features(
            {"id": text, "title": text, "context": text, "question": text, "answers": answers}
        )
    first, second = miniature.PAIRS[task][0]
    label = datasets.ClassLabel(names=LABELS[task])
    return datasets.Features({first: text, second: text, "label": label, "idx": number})


def _from_hub(task: str) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    repository, subset = HUB[task]
    advice = (
        f'set {VARIABLE}=builtin for the miniature set, "auto" for the hub only where it can be '
        "reached, or a folder with the official files"
    )

    def fetch():
        once = datasets.DownloadConfig(max_retries=0)
        return datasets.load_dataset(repository, subset, download_config=once)

    try:
        hub.check(repository, "dataset")
        parts = fetch()
    except hub.HubError as unreachable:
        try:
            with hub.offline():
                parts = fetch()
        except Exception as error:  # the cache has it not, or only in part
            raise DataError(f"{unreachable}; {advice}") from error
    except Exception as error:  # whatever the libraries below make of a broken line or disk
        raise DataError(
            f"{repository} could not be loaded from the hub: {type(error).__name__}: {error}; "
            f"{advice}"
        ) from error
    return parts["train"], parts["validation"], f"{repository} ({subset}) from the hub"


def _built_in(task: str) -> tuple[list[dict], list[dict], str]:
    make = miniature.questions if task == "squad" else lambda part: miniature.pairs(task, part)
    return make(False), make(True), "a miniature set made by the course's code, not the real one"


def _key(task: str, file: Path, part: int) -> str:
    """Stands for all that decides a set's rows: the file's content, and the code that reads it."""
    reader = Path(official.__file__).read_bytes()
    with file.open("rb") as content:
        return Hasher.hash_bytes(chain([reader, f"{_features(task)} {part}".encode()], content))


def _mapped(task: str, files: list[Path], keys: list[str], cache: str) -> list[datasets.Dataset]:
    """Training and evaluation set, each in a file that is mapped into memory, not read into it.

    A set whose file stands in the folder ``cache`` already is not read again. Where several
    processes want the same one, the first of them writes it, and the others wait. What is half
    written has another name.
    """
    datasets.disable_progress_bars()
    try:
        return [
            datasets.Dataset.from_generator(
                partial(official.rows, task, files, part),
                features=_features(task),
                cache_dir=cache,
                fingerprint=key,
            )
            for part, key in enumerate(keys)
        ]
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ from None


def _from_folder(task: str, name: str) -> tuple[datasets.Dataset, datasets.Dataset, str]:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"there is no data folder {name!r}; {VARIABLE} and a profile's `data` may be "
            '"builtin", "hub", "auto" or a folder with the official files'
        )
    try:
        files, said = official.find(task, folder)
        keys = [_key(task, file, part) for part, file in enumerate(files)]
    except OSError as error:
        raise DataError(f"{error.filename} can't be read: {error.strerror}") from error
    cache = str(datasets.config.HF_DATASETS_CACHE)
    try:
        return *_mapped(task, files, keys, cache), said
    except OSError as error:
        said += f", copied to a temporary folder: {cache} can't be written ({error.strerror})"
        return *_mapped(task, files, keys, get_temporary_cache_files_directory()), said


def _read(task: str, source: str):
    if source == "builtin":
        return _built_in(task)
    if source == "hub":
        return _from_hub(task)
    if source != "auto":
        return _from_folder(task, source)
    try:
        return _from_hub(task)
    except DataError as error:
        train, evaluation, said = _built_in(task)
        return train, evaluation, f"{said} (why not the hub's: {str(error).partition(';')[0]})"


def _take(rows, samples: int | None, seed: int, kind: str) -> tuple[datasets.Dataset, str]:
    if samples is None or samples == len(rows):
        return rows, f"all {len(rows)} {kind} samples"
    if samples > len(rows):
        return rows, f"all {len(rows)} {kind} samples ({samples} were asked for)"
    return rows.shuffle(seed=seed).select(
        range(samples)
    ), f"{samples} of {len(rows)} {kind} samples"


def load(
    task: str,
    source: str = "auto",
    train_samples: int | None = None,
    eval_samples: int | None = None,
    seed: int = 0,
) -> Data:
    """Loads a data set, with the columns it has on the hub (GLUE's and SQuAD's).

    ``task`` is "mrpc", "qqp" or "squad". ``source`` is "builtin", "hub", "auto" (the hub if it
    answers within 3 s, else the built-in set) or a folder with the official files; the
    environment variable ``COURSE_DATA`` overrides it. ``train_samples`` and ``eval_samples``
    limit the sets to a random part that ``seed`` decides; None, or more than there are, is all.

    Raises DataError: an unknown task, a folder that is missing, a broken file (with its line), a
    hub that can't be used.
    """
    if task not in HUB:
        raise DataError(f"unknown task {task!r}; known are {', '.join(HUB)}")
    train, evaluation, said = _read(task, os.environ.get(VARIABLE) or source)
    if isinstance(train, list):
        train, evaluation = (
            datasets.Dataset.from_list(rows, features=_features(task))
            for rows in (train, evaluation)
        )
    train, train_said = _take(train, train_samples, seed, "training")
    evaluation, evaluation_said = _take(evaluation, eval_samples, seed, "evaluation")
    source = f"{task.upper()}: {said}; {train_said}, {evaluation_said}."
    return Data(train, evaluation, source)
