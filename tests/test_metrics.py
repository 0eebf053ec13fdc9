import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.metrics import (
    Paraphrase,
    QuestionAnswering,
    exact_match,
    token_f1,
)


@pytest.mark.parametrize(
    ("prediction", "gold", "match", "f1"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1, 1),
        ("a  cat", "the cat", 1, 1),
        ("Denver", "Denver Broncos", 0, 2 / 3),
        ("in the city of Paris", "Paris", 0, 2 / 5),  # tokens: in, city, of, Paris
        ("cat cat", "cat", 0, 2 / 3),
        ("anthem", "them", 0, 0),
        ("", "", 1, 1),
        ("", "cat", 0, 0),
        ("the", "", 1, 1),
        ("U.S.", "US", 1, 1),
        ("caf\u00e9", "cafe", 0, 0),
    ],
)
def test_hand_worked_answers(prediction, gold, match, f1):
    assert exact_match(prediction, gold) == match
    assert token_f1(prediction, gold) == pytest.approx(f1)


def test_best_gold_answer_counts_and_no_answer_is_an_empty_list():
    scores = QuestionAnswering().compute(
        predictions=["Broncos", "", "something", "Paris"],
        references=[["Denver Broncos", "The Broncos"], [], [], ["London"]],
    )
    assert scores == {"exact_match": 50, "f1": 50}


def test_glue_scores_by_hand():
    scores = Paraphrase().compute(predictions=[1, 1, 0, 0, 1], references=[1, 0, 0, 1, 1])
    assert scores["accuracy"] == pytest.approx(3 / 5)
    assert scores["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))


def test_glue_f1_without_any_positive_is_zero():
    assert Paraphrase().compute(predictions=[0, 0], references=[0, 0]) == {"accuracy": 1, "f1": 0}


@given(st.text(), st.text())
def test_f1_is_symmetric_bounded_and_one_for_equal_answers(left, right):
    assert token_f1(left, right) == token_f1(right, left)
    assert exact_match(left, right) <= token_f1(left, right) <= 1
    assert token_f1(left, left) == 1
