import unicodedata

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import models, questions


@pytest.fixture(scope="module", autouse=True)
def no_progress_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def tokenizer():
    return models.load("minilm", "question", say=lambda _: None)[1]


@pytest.fixture(scope="module")
def left_tokenizer():
    tokenizer = models.load("minilm", "question", say=lambda _: None)[1]
    tokenizer.padding_side = "left"
    return tokenizer


def squad(*rows):
    """A data set of (question, context, answer or None, occurrence of the answer)."""
    columns = {"id": [], "title": [], "context": [], "question": [], "answers": []}
    for number, (question, context, answer, occurrence) in enumerate(rows):
        answers = {"text": [], "answer_start": []}
        if answer is not None:
            start = -1
            for _ in range(occurrence + 1):
                start = context.index(answer, start + 1)
            answers = {"text": [answer], "answer_start": [start]}
        values = (f"q{number}", "", context, question, answers)
        for column, value in zip(columns.values(), values, strict=True):
            column.append(value)
    return datasets.Dataset.from_dict(columns)


def texts(tokenizer, rows, max_length=384, stride=128):
    """What the answer positions of each training window stand for; None for the CLS token."""
    train = questions.train_features(rows, tokenizer, max_length, stride)
    evaluation = questions.eval_features(rows, tokenizer, max_length, stride)
    assert train["input_ids"][:] == evaluation["input_ids"][:]
    contexts = dict(zip(rows["id"], rows["context"], strict=True))
    found = []
    for window, features in zip(train, evaluation, strict=True):
        start, end = window["start_positions"], window["end_positions"]
        if start == end == window["input_ids"].index(tokenizer.cls_token_id):
            found.append(None)
            continue
        offsets = features["offset_mapping"]
        context = contexts[features["example_id"]]
        found.append(context[offsets[start][0] : offsets[end][1]])
    return found


NFC, NFD = "Das Café Müller öffnet früh.", unicodedata.normalize("NFD", "Das Café Müller öffnet.")


@pytest.mark.parametrize(
    ("context", "answer", "occurrence"),
    [
        ("The cat sat on the mat.", "cat", 0),
        ("The cat sat on the mat.", "The", 0),
        ("The cat sat on the mat", "mat", 0),
        (NFC, "Café Müller", 0),
        (NFD, unicodedata.normalize("NFD", "Café"), 0),
        (NFD, unicodedata.normalize("NFD", "Café Müller"), 0),
        ("one\ttwo\t\tthree  four", "two\t\tthree", 0),
        ("a line\nand\u2028another", "and\u2028another", 0),
        ("Rain, then sun, then rain, then Rain.", "Rain", 1),
        ("go go go go go", "go", 3),
        ("Tom\u00a0& Jerry 🎉🎉 party", "Jerry 🎉🎉", 0),
        ("東京は日本の首都です", "日本", 0),
        ("He scored 6½ points", "6½", 0),
        ("It is a zero\u200b width", "zero\u200b", 0),
    ],
)
def test_answer_positions_stand_for_the_answer(tokenizer, context, answer, occurrence):
    rows = squad(("Which?", context, answer, occurrence))
    assert texts(tokenizer, rows) == [answer]
    position = questions.train_features(rows, tokenizer, 384, 128)[0]["start_positions"]
    offsets = questions.eval_features(rows, tokenizer, 384, 128)[0]["offset_mapping"]
    assert offsets[position][0] == rows[0]["answers"]["answer_start"][0]


def test_an_answer_inside_a_token_is_widened_to_the_token(tokenizer):
    assert texts(tokenizer, squad(("Who?", "The cats sat.", "cat", 0))) == ["cats"]


def test_white_space_around_an_answer_does_not_count(tokenizer):
    assert texts(tokenizer, squad(("Who?", "The  cat  sat.", " cat ", 0))) == ["cat"]


def test_a_question_without_answer_points_to_cls(tokenizer):
    assert texts(tokenizer, squad(("Who?", "The cat sat.", None, 0))) == [None]


@pytest.mark.parametrize("side", ["right", "left"])
def test_windows_overlap_by_the_stride_and_cover_the_context(tokenizer, left_tokenizer, side):
    tokenizer = tokenizer if side == "right" else left_tokenizer
    words = [chr(ord("a") + number) for number in range(20)]
    rows = squad(("x y ?", " ".join(words), "h", 0))
    # 3 special tokens and 3 of the question leave 6 for the context: steps of 6 - 2 = 4
    windows = questions.eval_features(rows, tokenizer, 12, 2)
    held = [
        "".join(rows[0]["context"][place[0] : place[1]] for place in window if place)
        for window in windows["offset_mapping"]
    ]
    assert held == ["abcdef", "efghij", "ijklmn", "mnopqr", "qrst"]
    assert texts(tokenizer, rows, 12, 2) == [None, "h", None, None, None]
    question = tokenizer("x y ?", add_special_tokens=False)["input_ids"]
    for ids in windows["input_ids"]:
        joined = ",".join(map(str, ids))
        assert ",".join(map(str, question)) in joined


def test_an_answer_in_the_overlap_is_learnt_from_both_windows(tokenizer):
    rows = squad(("x y ?", "a b c d e f g h i j", "e f", 0))
    assert texts(tokenizer, rows, 12, 2) == ["e f", "e f"]


def test_an_answer_cut_by_every_window_is_learnt_from_none(tokenizer):
    rows = squad(("x y ?", "a b c d e f g h i j", "d e f g", 0))
    assert texts(tokenizer, rows, 12, 2) == [None, None]


def test_padding_on_the_left_moves_positions_along(left_tokenizer):
    rows = squad(("Who sat?", "The cat sat.", "cat", 0), ("Who sat there?", "A dog sat.", "dog", 0))
    features = questions.train_features(rows, left_tokenizer, 20, 4)
    assert {len(ids) for ids in features["input_ids"]} == {20}
    for row, word in zip(features, ("cat", "dog"), strict=True):
        assert left_tokenizer.decode(row["input_ids"][row["start_positions"]]) == word


def test_white_space_before_a_question_is_dropped(tokenizer):
    rows = squad(("  \n Who?", "The cat.", "cat", 0), ("Who?", "The cat.", "cat", 0))
    first, second = questions.train_features(rows, tokenizer, 64, 8)
    assert first == second


@pytest.mark.parametrize(
    ("max_length", "stride", "message"),
    [
        (12, 6, "question q0 has 3 tokens.* 6 tokens of context.*stride of 6"),
        (4, 1, "0 tokens of context"),
        (1024, 8, "limit of 512 tokens"),
    ],
)
def test_a_question_is_never_truncated(tokenizer, max_length, stride, message):
    with pytest.raises(ValueError, match=message):
        questions.train_features(squad(("x y ?", "a b c", "b", 0)), tokenizer, max_length, stride)


WORDS = st.text(st.sampled_from("abcxyzABÄéñ7東" + "e\u0301"), min_size=1, max_size=6).map(
    lambda word: "w" + word
)
SPACES = st.sampled_from([" ", "  ", "\t", "\n", ", ", "\u00a0", " 🎉 "])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.tuples(WORDS, SPACES), min_size=1, max_size=40), st.booleans())
def test_every_window_that_holds_the_answer_decodes_to_it(
    tokenizer, left_tokenizer, data, pieces, right
):
    tokenizer = tokenizer if right else left_tokenizer
    context = "".join(word + space for word, space in pieces)
    ends = np.cumsum([len(word + space) for word, space in pieces])
    first = data.draw(st.integers(0, len(pieces) - 1))
    last = data.draw(st.integers(first, min(first + 3, len(pieces) - 1)))
    start = int(ends[first]) - len("".join(pieces[first]))
    answer = context[start : int(ends[last]) - len(pieces[last][1])]
    rows = datasets.Dataset.from_dict(
        {
            "id": ["only"],
            "context": [context],
            "question": ["Which?"],
            "answers": [{"text": [answer], "answer_start": [start]}],
        }
    )
    found = texts(tokenizer, rows, 24, 6)
    assert set(found) <= {answer, None}
    offsets = questions.eval_features(rows, tokenizer, 24, 6)["offset_mapping"]
    for text, places in zip(found, offsets, strict=True):
        places = [place for place in places if place]
        holds = places[0][0] <= start and places[-1][1] >= start + len(answer)
        assert (text == answer) == holds


def logits(features, *peaks):
    """Zeros, as wide as the longest window, with (window, token, value) set."""
    width = max(len(ids) for ids in features["input_ids"]) + 3
    values = np.zeros((len(features), width), dtype=np.float32)
    for window, token, value in peaks:
        values[window, token] = value
    return values


@pytest.fixture(scope="module")
def two_windows(tokenizer):
    # [CLS] x y ? [SEP] then a..f at 5..10, or e..j at 5..10, [SEP]
    rows = squad(("x y ?", "a b c d e f g h i j", "h", 0))
    return rows, questions.eval_features(rows, tokenizer, 12, 2)


@pytest.mark.parametrize(
    ("starts", "ends", "answer"),
    [
        ([(0, 6, 5)], [(0, 7, 5)], "b c"),
        ([(0, 6, 5), (1, 8, 6)], [(0, 7, 5), (1, 8, 6)], "h"),  # the best over the windows
        ([(0, 8, 9), (0, 6, 5)], [(0, 7, 9)], "b c"),  # an end before the start is skipped
        ([(0, 1, 9), (0, 6, 5)], [(0, 2, 9), (0, 7, 5)], "b c"),  # the question is no answer
        ([(0, 0, 9), (1, 5, 1)], [(0, 0, 9), (1, 5, 1)], "e"),  # nor is CLS, in SQuAD 1.1
        ([(0, 13, 9), (0, 6, 5)], [(0, 13, 9), (0, 7, 5)], "b c"),  # nor is padding
    ],
)
def test_the_best_valid_span_is_the_prediction(two_windows, starts, ends, answer):
    rows, features = two_windows
    assert len(features) == 2
    predicted = questions.predictions(
        rows, features, logits(features, *starts), logits(features, *ends)
    )
    assert predicted == {"q0": answer}


def test_an_answer_has_at_most_max_answer_length_tokens(two_windows):
    rows, features = two_windows
    start, end = logits(features, (0, 5, 5)), logits(features, (0, 8, 5), (0, 6, 3))
    for longest, answer in ((4, "a b c d"), (3, "a b")):
        predicted = questions.predictions(rows, features, start, end, max_answer_length=longest)
        assert predicted == {"q0": answer}


def test_only_the_n_best_starts_and_ends_are_tried(two_windows):
    rows, features = two_windows
    start = logits(features, *((window, 1, 9) for window in (0, 1)))
    end = logits(features, *((window, 2, 9) for window in (0, 1)))
    assert questions.predictions(rows, features, start, end, n_best=1) == {"q0": ""}
    assert questions.predictions(rows, features, start, end, n_best=20) != {"q0": ""}


@pytest.mark.parametrize(
    ("threshold", "answer"), [(None, "b c"), (0.0, ""), (3.0, "b c"), (1.9, "")]
)
def test_no_answer_wins_by_more_than_the_threshold(two_windows, threshold, answer):
    rows, features = two_windows
    # no-answer scores 14 and 12: the lowest counts; the best span scores 10
    start = logits(features, (0, 0, 7), (1, 0, 6), (0, 6, 5))
    end = logits(features, (0, 0, 7), (1, 0, 6), (0, 7, 5))
    predicted = questions.predictions(rows, features, start, end, no_answer_threshold=threshold)
    assert predicted == {"q0": answer}


def test_a_window_sure_of_its_answer_beats_the_other_windows_no_answer(two_windows):
    rows, features = two_windows
    start = logits(features, (0, 0, 9), (1, 0, -9), (1, 8, 5))
    end = logits(features, (0, 0, 9), (1, 0, -9), (1, 8, 5))
    assert questions.predictions(rows, features, start, end, no_answer_threshold=0.0) == {"q0": "h"}


def test_predictions_keep_accents_and_white_space(tokenizer):
    context = unicodedata.normalize("NFD", "Au  Café\tNoir, dit-il")
    rows = squad(("Où?", context, unicodedata.normalize("NFD", "Café"), 0))
    features = questions.eval_features(rows, tokenizer, 32, 4)
    tokens = tokenizer.convert_ids_to_tokens(features[0]["input_ids"])
    start = logits(features, (0, tokens.index("cafe"), 5))
    end = logits(features, (0, tokens.index("noir"), 5))
    answer = questions.predictions(rows, features, start, end)["q0"]
    assert answer == unicodedata.normalize("NFD", "Café\tNoir")


def test_logits_of_other_features_are_refused(two_windows):
    rows, features = two_windows
    with pytest.raises(ValueError, match="2 features, but 1 rows of start logits and 2 of end"):
        questions.predictions(rows, features, np.zeros((1, 12)), np.zeros((2, 12)))
