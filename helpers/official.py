"""Reads MRPC, QQP and SQuAD in the file formats in which they are published, and checks them.

Files may be UTF-8 with or without a byte order mark, with LF or CRLF line ends. Every fault is
a ``DataError`` that names file and line.
"""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

FILES = {
    "mrpc": (("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"),),
    "qqp": (("train.tsv", "dev.tsv"),),
    "squad": (
        ("train-v1.1.json", "dev-v1.1.json"),
        ("train-v2.0.json", "dev-v2.0.json"),
        ("xquad.en.json",),
    ),
}
# names in the published files, and on the hub
COLUMNS = {
    "mrpc": {"#1 String": "sentence1", "#2 String": "sentence2", "Quality": "label"},
    "qqp": {"question1": "question1", "question2": "question2", "is_duplicate": "label"},
}
XQUAD_EVALUATION = 4


class DataError(ValueError):
    """Data that is missing, broken or can't be reached."""


def _text(file: Path) -> str:
    content = file.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; "
            "save the file in UTF-8"
        ) from error


def _is_open(field: str) -> bool:
    return field.startswith('"') and field.count('"') % 2 == 1


def _unquoted(field: str) -> str:
    inner = field[1:-1]
    if len(field) < 2 or field != f'"{inner}"' or '"' in inner.replace('""', ""):
        return field
    return inner.replace('""', '"')


def _lines(file: Path, needed, quoted: bool) -> Iterator[tuple[int, dict[str, str]]]:
    """Line numbers and fields by column; ``quoted`` fields may hold line ends, as in QQP."""
    lines = [line.removesuffix("\r") for line in _text(file).removesuffix("\n").split("\n")]
    header = lines[0].split("\t")
    for column in needed:
        if column not in header:
            raise DataError(
                f"{file}, line 1: column {column!r} is missing; found are {', '.join(header)}"
            )
    numbered = enumerate(lines[1:], 2)
    for number, line in numbered:
        fields = line.split("\t")
        while quoted and len(fields) < len(header) and _is_open(fields[-1]):
            _, line = next(numbered, (None, None))
            if line is None:
                break
            rest, *others = line.split("\t")
            fields = [*fields[:-1], f"{fields[-1]}\n{rest}", *others]
        if len(fields) != len(header):
            raise DataError(
                f"{file}, line {number}: {len(fields)} fields instead of {len(header)}; "
                "one tab stands between two fields, none inside"
            )
        if quoted:
            fields = [_unquoted(field) for field in fields]
        yield number, dict(zip(header, fields, strict=True))


def read_pairs(file: Path, task: str) -> list[dict]:
    """Rows of an MRPC or QQP file, in the schema of GLUE on the hub.

    MRPC's quotes are plain characters, QQP's quote a field as in CSV. Raises DataError.
    """
    columns = COLUMNS[task]
    rows = []
    for number, fields in _lines(file, columns, quoted=task == "qqp"):
        row = {name: fields[column] for column, name in columns.items()}
        if row["label"] not in ("0", "1"):
            raise DataError(f"{file}, line {number}: label {row['label']!r} is neither 0 nor 1")
        rows.append(row | {"label": int(row["label"]), "idx": len(rows)})
    if not rows:
        raise DataError(f"{file}: a header, but no rows")
    return rows


def _get(node, key: str, kind: type, where: str | Callable[[], str]):
    """``where`` may be a function, for a place that takes long to find."""
    value = node.get(key) if isinstance(node, dict) else None
    if not isinstance(value, kind):
        name = {list: "a list", str: "a text", int: "a whole number"}[kind]
        where = where() if callable(where) else where
        raise DataError(f"{where}: {key!r} is missing or not {name}")
    return value


def _answers(question: dict, context: str, where: Callable[[], str]) -> dict[str, list]:
    if question.get("is_impossible") is True:
        return {"text": [], "answer_start": []}
    answers = _get(question, "answers", list, where)
    if not answers:
        raise DataError(f"{where()}: no answer, and not marked is_impossible")
    texts = [_get(answer, "text", str, where) for answer in answers]
    starts = [_get(answer, "answer_start", int, where) for answer in answers]
    for text, start in zip(texts, starts, strict=True):
        found = context[start : start + len(text)] if start >= 0 else ""
        if not text or found != text:
            raise DataError(
                f"{where()}: answer {text!r} is not at answer_start {start}; there stands {found!r}"
            )
    return {"text": texts, "answer_start": starts}


def read_paragraphs(file: Path) -> list[list[dict]]:
    """Rows of a SQuAD file (1.1 or 2.0), a list for each paragraph, in the schema of the hub.

    A question marked ``is_impossible`` has empty answers. Raises DataError.
    """
    text = _text(file)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{file}, line {error.lineno}: not valid JSON: {error.msg}") from error

    def place(identity: str) -> str:
        entry = re.search(rf'"id"\s*:\s*{re.escape(json.dumps(identity))}', text)
        line = f", line {text.count(chr(10), 0, entry.start()) + 1}" if entry else ""
        return f"{file}{line}, question {identity}"

    paragraphs, seen = [], set()
    for i, article in enumerate(_get(document, "data", list, str(file))):
        where = f"{file}, data[{i}]"
        for j, paragraph in enumerate(_get(article, "paragraphs", list, where)):
            where = f"{file}, data[{i}].paragraphs[{j}]"
            context = _get(paragraph, "context", str, where)
            rows = []
            for k, question in enumerate(_get(paragraph, "qas", list, where)):
                identity = _get(question, "id", str, f"{where}.qas[{k}]")
                if identity in seen:
                    raise DataError(f"{place(identity)}: the id stands there twice")
                seen.add(identity)
                rows.append(
                    {
                        "id": identity,
                        "title": str(article.get("title", "")),
                        "context": context,
                        "question": _get(question, "question", str, partial(place, identity)),
                        "answers": _answers(question, context, partial(place, identity)),
                    }
                )
            paragraphs.append(rows)
    if not any(paragraphs):
        raise DataError(f"{file}: no questions")
    return paragraphs


def _find(folder: Path, task: str) -> list[Path]:
    for place in (folder, folder / task.upper()):
        for names in FILES[task]:
            files = [place / name for name in names]
            missing = [file for file in files if not file.is_file()]
            if not missing:
                return files
            if len(missing) < len(files):
                raise DataError(f"{missing[0]}: not there, though {files[0].parent} has the other")
    wanted = "; or ".join(" and ".join(names) for names in FILES[task])
    raise DataError(f"{folder}: no {task.upper()} in it; its files are {wanted}")


def read(task: str, folder: Path) -> tuple[list[dict], list[dict], str]:
    """Training rows, evaluation rows, and where they come from, in words.

    The files stand in ``folder`` or in a folder MRPC, QQP or SQUAD inside it. XQuAD is one file:
    every fourth paragraph is for evaluation. Raises DataError.
    """
    files = _find(folder, task)
    names = " and ".join(file.name for file in files)
    said = f"the official files {names} in {files[0].parent}"
    if task != "squad":
        return *(read_pairs(file, task) for file in files), said
    parts = [read_paragraphs(file) for file in files]
    if len(parts) == 1:
        said = f"{names} in {files[0].parent}, every fourth paragraph kept for evaluation"
        paragraphs = parts[0]
        evaluation = paragraphs[XQUAD_EVALUATION - 1 :: XQUAD_EVALUATION]
        train = [rows for i, rows in enumerate(paragraphs, 1) if i % XQUAD_EVALUATION]
        parts = [train, evaluation]
        if not all(map(any, parts)):
            raise DataError(f"{files[0]}: too few paragraphs to keep every fourth for evaluation")
    return *([row for rows in part for row in rows] for part in parts), said
