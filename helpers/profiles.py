"""Reads the size switch of the course: env/profiles/*.toml, chosen by ``COURSE_PROFILE``."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).resolve().parent.parent / "env" / "profiles"
VARIABLE = "COURSE_PROFILE"
DEFAULT = "laptop"
TASKS = ("mrpc", "qqp", "squad")


class ProfileError(ValueError):
    """A profile that does not exist, or that holds an unknown key or value."""


@dataclass(frozen=True)
class Task:
    """One experiment of a profile.

    ``data`` is where the samples come from (``helpers.data``). ``max_length`` and ``stride`` are
    in tokens, ``batch_size`` in samples a rank, ``minutes`` the expected time of one run.
    ``train_samples`` and ``eval_samples`` count examples; None is all.
    """

    model: str
    data: str
    train_samples: int | None
    eval_samples: int | None
    max_length: int
    batch_size: int
    epochs: int
    learning_rate: float
    ranks: int
    minutes: float
    stride: int | None = None


@dataclass(frozen=True)
class Profile:
    """A named size of the course, with one ``Task`` for each data set."""

    name: str
    mrpc: Task
    qqp: Task
    squad: Task


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _is_data(value) -> bool:
    # A folder has a slash in its name, so that a misspelt "buitin" is not taken for one.
    return isinstance(value, str) and (value in ("auto", "hub", "builtin") or "/" in value)


COUNT = (_is_count, "a whole number from 1")
SAMPLES = (lambda value: value == "all" or _is_count(value), 'a whole number from 1, or "all"')
POSITIVE = (_is_positive, "a number above 0")
RULES = {
    "model": (lambda value: isinstance(value, str) and value != "", "a name or a folder, as text"),
    "data": (_is_data, '"auto", "hub", "builtin", or a folder with a slash in its name'),
    "train_samples": SAMPLES,
    "eval_samples": SAMPLES,
    "max_length": COUNT,
    "batch_size": COUNT,
    "epochs": COUNT,
    "learning_rate": POSITIVE,
    "ranks": COUNT,
    "minutes": POSITIVE,
}
SQUAD_RULES = RULES | {"stride": COUNT}


def _check_keys(where: str, found: dict, allowed) -> None:
    for unknown in found.keys() - set(allowed):
        raise ProfileError(f"{where}: unknown key {unknown!r}; allowed are {', '.join(allowed)}")
    for missing in set(allowed) - found.keys():
        raise ProfileError(f"{where}: key {missing!r} is missing; needed are {', '.join(allowed)}")


def _read_task(where: str, table) -> Task:
    rules = SQUAD_RULES if where.endswith("[squad]") else RULES
    if not isinstance(table, dict):
        raise ProfileError(f"{where}: expected a table, got {table!r}")
    _check_keys(where, table, rules)
    for key, (accepts, allowed) in rules.items():
        if not accepts(table[key]):
            raise ProfileError(f"{where}: {key} = {table[key]!r} is refused; allowed is {allowed}")
    task = Task(**{key: None if value == "all" else value for key, value in table.items()})
    if task.stride is not None and task.stride >= task.max_length:
        raise ProfileError(
            f"{where}: stride = {task.stride} is refused; allowed is less than "
            f"max_length = {task.max_length}"
        )
    return task


def load(name: str | None = None, folder: Path = FOLDER) -> Profile:
    """Reads a profile: ``name``, else the one that ``COURSE_PROFILE`` names, else "laptop".

    Raises ProfileError, naming the file, the key and the allowed values.
    """
    name = name or os.environ.get(VARIABLE) or DEFAULT
    names = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in names:
        raise ProfileError(
            f"no profile {name!r} in {folder}; {VARIABLE} may be {', '.join(names) or 'nothing'}"
        )
    file = folder / f"{name}.toml"
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{file}: not valid TOML: {error}") from error
    _check_keys(str(file), tables, TASKS)
    return Profile(name, **{task: _read_task(f"{file} [{task}]", tables[task]) for task in TASKS})
