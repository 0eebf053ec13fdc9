"""Reads MRPC, QQP and SQuAD in the file formats in which they are published, and checks them.

Files may be UTF-8 with or without a byte order mark, with LF or CRLF line ends. Every fault is
a ``DataError`` that names file and line. MRPC and QQP are read line by line: a file of any size
takes as little memory.
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
XQUAD_EVALUATION = 4  # XQuAD is one file: every fourth paragraph is for evaluation


class DataError(ValueError):
    """Data that is missing, broken or can't be reached."""


def _text(content: bytes, file: Path, first: int = 1) -> str:
    """``content`` begins at line ``first`` of the file."""
    try:
        return content.decode("utf-8-sig" if first == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first + content.count(b"\n", 0, error.start)
        raise DataError(
            f"{file}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8; "
            "save the file in UTF-8"
        ) from error


def _numbered(file: Path) -> Iterator[tuple[int, str]]:
    with file.open("rb") as content:
        for number, line in enumerate(content, 1):
            yield number, _text(line, file, number).removesuffix("\n").removesuffix("\r")


def _is_open(field: str) -> bool:
    return field.startswith('"') and field.count('"') % 2 == 1


def _unquoted(field: str) -> str:
    inner = field[1:-1]
    if len(field) < 2 or field != f'"{inner}"' or '"' in inner.replace('""', ""):
        return field
    return inner.replace('""', '"')


def _lines(file: Path, needed, quoted: bool) -> Iterator[tuple[int, dict[str, str]]]:
    """Line numbers and fields by column; ``quoted`` fields may hold line ends, as in QQP."""
    numbered = _numbered(file)
    header = next(numbered, (1, ""))[1].split("\t")
    for column in needed:
        if column not in header:
            raise DataError(
                f"{file}, line 1: column {column!r} is missing; found are {', '.join(header)}"
            )
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


def read_pairs(file: Path, task: str) -> Iterator[dict]:
    """Rows of an MRPC or QQP file, one after the other, in the schema of GLUE on the hub.

    MRPC's quotes are plain characters, QQP's quote a field as in CSV. Raises DataError.
    """
    columns = COLUMNS[task]
    index = -1
    for index, (number, fields) in enumerate(_lines(file, columns, quoted=task == "qqp")):
        row = {name: fields[column] for column, name in columns.items()}
        if row["label"] not in ("0", "1"):
            raise DataError(f"{file}, line {number}: label {row['label']!r} is neither 0 nor 1")
        yield row | {"label": int(row["label"]), "idx": index}
    if index < 0:
        raise DataError(f"{file}: a header, but no rows")


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
    text = _text(file.read_bytes(), file)
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


def find(task: str, folder: Path) -> tuple[list[Path], str]:
    """The files of the training and of the evaluation set, and what they are, in words.

    They stand in ``folder`` or in a folder MRPC, QQP or SQUAD inside it. XQuAD is one file, twice.
    Raises DataError.
    """
    for place in (folder, folder / task.upper()):
        for names in FILES[task]:
            files = [place / name for name in names]
            missing = [file for file in files if not file.is_file()]
            if not missing:
                said = f"the official files {' and '.join(names)} in {place}"
                if len(files) == 1:
                    said = f"{names[0]} in {place}, every fourth paragraph kept for evaluation"
                return [files[0], files[-1]], said
            if len(missing) < len(files):
                raise DataError(f"{missing[0]}: not there, though {files[0].parent} has the other")
    wanted = "; or ".join(" and ".join(names) for names in FILES[task])
    raise DataError(f"{folder}: no {task.upper()} in it; its files are {wanted}")


def rows(task: str, files: list[Path], part: int) -> Iterator[dict]:
    """Rows of the training set (``part`` 0) or of the evaluation set (1), one after the other.

    ``files`` are those that ``find`` found. Raises DataError.
    """
    if task != "squad":
        yield from read_pairs(files[part], task)
        return
    paragraphs = read_paragraphs(files[part])
    if files[0] == files[1]:
        numbered = enumerate(paragraphs, 1)
        paragraphs = [those for i, those in numbered if (i % XQUAD_EVALUATION == 0) == part]
        if not any(paragraphs):
            raise DataError(f"{files[0]}: too few paragraphs to keep every fourth for evaluation")
    for paragraph in paragraphs:
        yield from paragraph
