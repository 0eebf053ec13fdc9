"""Question answering on long contexts: overlapping windows in, answer texts out.

The scheme is that of BERT's SQuAD experiments (Devlin et al. 2018, arXiv:1810.04805, section
4.2 and 4.3), as in the reference script ``run_qa.py`` of transformers. The notebook that uses
it: ``03_finetune_one_node``.
"""

import unicodedata

import numpy as np
from datasets import Dataset


def _is_dropped(character: str) -> bool:
    """Is this an accent, control or format character, for which a tokenizer may have no token?"""
    return not character.isspace() and unicodedata.category(character)[0] in "MC"


def _with_marks(offsets: list, context: str) -> list:
    """Offsets in which a token's end includes the characters behind it that have no token.

    Tokenizers drop accents: "e" + U+0301 is one token that ends before its own accent.
    """
    starts = {place[0] for place in offsets if place}
    longer = []
    for place in offsets:
        if place:
            start, end = place
            while end < len(context) and end not in starts and _is_dropped(context[end]):
                end += 1
            place = (start, end)
        longer.append(place)
    return longer


def _windows(examples: dict[str, list], tokenizer, max_length: int, stride: int):
    """The encoded windows of a batch, with the example of each, and offsets in the context.

    Offsets are None outside the context.
    """
    right = tokenizer.padding_side == "right"
    if max_length > tokenizer.model_max_length:
        raise ValueError(
            f"max_length {max_length} is more than the model's limit of "
            f"{tokenizer.model_max_length} tokens"
        )
    questions = [question.lstrip() for question in examples["question"]]
    special = tokenizer.num_special_tokens_to_add(pair=True)
    lengths = [len(ids) for ids in tokenizer(questions, add_special_tokens=False)["input_ids"]]
    for identity, length in zip(examples["id"], lengths, strict=True):
        if max_length - special - length <= stride:
            raise ValueError(
                f"question {identity} has {length} tokens: with max_length {max_length} a window "
                f"holds {max(0, max_length - special - length)} tokens of context, and more than "
                f"the stride of {stride} are needed; take a larger max_length or a smaller stride"
            )
    encoded = tokenizer(
        *((questions, examples["context"]) if right else (examples["context"], questions)),
        truncation="only_second" if right else "only_first",
        max_length=max_length,
        stride=stride,
        # Padding on the left moves the answer: it can't be left to the collator.
        padding=False if right else "max_length",
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    owners = encoded.pop("overflow_to_sample_mapping")
    offsets = []
    for window, (owner, places) in enumerate(
        zip(owners, encoded.pop("offset_mapping"), strict=True)
    ):
        parts = encoded.sequence_ids(window)
        inside = [
            place if part == int(right) else None for place, part in zip(places, parts, strict=True)
        ]
        offsets.append(_with_marks(inside, examples["context"][owner]))
    return encoded, owners, offsets


def _cls_position(ids: list[int], tokenizer) -> int:
    """Where "no answer" points to: the CLS token, else the begin-of-text token, else the first."""
    for token in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        if token in ids:
            return ids.index(token)
    return 0


def _answer_tokens(answers: dict, context: str, offsets: list) -> tuple[int, int] | None:
    """First and last token of the first answer; None where it is not all in this window."""
    if not answers["text"]:
        return None
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    while start < end and (context[start].isspace() or _is_dropped(context[start])):
        start += 1
    while start < end and context[end - 1].isspace():
        end -= 1
    inside = [index for index, place in enumerate(offsets) if place]
    if not inside or offsets[inside[0]][0] > start or offsets[inside[-1]][1] < end:
        return None
    touched = [index for index in inside if offsets[index][1] > start and offsets[index][0] < end]
    return (touched[0], touched[-1]) if touched else None


def train_features(examples: Dataset, tokenizer, max_length: int, stride: int) -> Dataset:
    """Windows to train on, with the tokens at which the answer starts and ends.

    Each row of ``examples`` (SQuAD's columns) gives one or more windows of at most
    ``max_length`` tokens: the question in full, then a piece of the context; neighbours share
    ``stride`` tokens. ``start_positions`` and ``end_positions`` (inclusive) are those of the
    first answer; windows that do not hold all of it point to the CLS token. White space before
    a question is dropped. Windows are not padded, but for tokenizers that pad on the left.

    Raises ValueError where a question leaves no room for context, or the model for max_length.
    """

    def encode(batch):
        encoded, owners, offsets = _windows(batch, tokenizer, max_length, stride)
        encoded["start_positions"], encoded["end_positions"] = [], []
        for ids, owner, places in zip(encoded["input_ids"], owners, offsets, strict=True):
            answer = _answer_tokens(batch["answers"][owner], batch["context"][owner], places)
            start, end = answer or (_cls_position(ids, tokenizer),) * 2
            encoded["start_positions"].append(start)
            encoded["end_positions"].append(end)
        return encoded

    return examples.map(encode, batched=True, remove_columns=examples.column_names)


def eval_features(examples: Dataset, tokenizer, max_length: int, stride: int) -> Dataset:
    """Windows as in ``train_features``, with what ``predictions`` needs to map back to text.

    ``example_id`` names the example, ``offset_mapping`` has each token's first and last (not
    inclusive) character in the context, None outside it; ``cls_position`` is a token.
    """

    def encode(batch):
        encoded, owners, offsets = _windows(batch, tokenizer, max_length, stride)
        return encoded | {
            "example_id": [batch["id"][owner] for owner in owners],
            "offset_mapping": offsets,
            "cls_position": [_cls_position(ids, tokenizer) for ids in encoded["input_ids"]],
        }

    return examples.map(encode, batched=True, remove_columns=examples.column_names)


def _best_span(start, end, offsets, n_best: int, max_answer_length: int):
    """Score, first and last character of a window's best span; None where it has no valid one."""
    inside = np.array([place is not None for place in offsets])
    starts = np.argsort(-start[: len(offsets)], kind="stable")[:n_best, None]
    ends = np.argsort(-end[: len(offsets)], kind="stable")[None, :n_best]
    length = ends - starts + 1
    valid = inside[starts] & inside[ends] & (length >= 1) & (length <= max_answer_length)
    if not valid.any():
        return None
    scores = np.where(valid, start[starts] + end[ends], -np.inf)
    row, column = np.unravel_index(scores.argmax(), scores.shape)
    first, last = starts[row, 0], ends[0, column]
    return scores[row, column], offsets[first][0], offsets[last][1]


def predictions(
    examples: Dataset,
    features: Dataset,
    start_logits: np.ndarray,
    end_logits: np.ndarray,
    n_best: int = 20,
    max_answer_length: int = 30,
    no_answer_threshold: float | None = None,
) -> dict[str, str]:
    """The best answer text of each example, by its id.

    ``features`` come from ``eval_features(examples, ...)``; the logits have the shape (features,
    tokens), what is behind a window's own tokens is padding. Of a window, the ``n_best`` starts
    and ends are tried; an answer has at most ``max_answer_length`` tokens and lies in the
    context. Over an example's windows the highest sum of start and end logit wins.

    With a ``no_answer_threshold`` (SQuAD 2.0; 0.0 is usual), the answer is "" where the lowest
    sum at the CLS token of all windows exceeds the best span's by more than it. Without one
    (SQuAD 1.1), it is "" only where no span is valid.

    Raises ValueError where the logits are not those of the features.
    """
    if not len(features) == len(start_logits) == len(end_logits):
        raise ValueError(
            f"{len(features)} features, but {len(start_logits)} rows of start logits and "
            f"{len(end_logits)} of end logits"
        )
    best = dict.fromkeys(examples["id"])
    null_scores = dict.fromkeys(examples["id"], np.inf)
    columns = (features[name] for name in ("example_id", "offset_mapping", "cls_position"))
    for identity, offsets, cls, start, end in zip(*columns, start_logits, end_logits, strict=True):
        null_scores[identity] = min(null_scores[identity], start[cls] + end[cls])
        span = _best_span(start, end, offsets, n_best, max_answer_length)
        if span and (best[identity] is None or span[0] > best[identity][0]):
            best[identity] = span
    answers = {}
    for identity, context in zip(examples["id"], examples["context"], strict=True):
        score, first, last = best[identity] or (-np.inf, 0, 0)
        is_null = (
            no_answer_threshold is not None and null_scores[identity] - score > no_answer_threshold
        )
        answers[identity] = "" if is_null else context[first:last]
    return answers
