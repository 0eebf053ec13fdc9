"""Accuracy, exact match and F1 as ``evaluate`` metrics that load without the hub.

The notebook that uses them: ``03_finetune_one_node``.
"""

import re
import string
from collections import Counter

import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and repeated white space.

    Source: the official SQuAD evaluation (Rajpurkar et al. 2016, arXiv:1606.05250).
    """
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1.0 where the normalised answers are equal, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(gold))


def token_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of token precision and recall after normalisation, in 0..1.

    Where either side has no tokens (a no-answer), it is 1.0 if both have none, else 0.0: the
    SQuAD 2.0 rule (Rajpurkar et al. 2018, arXiv:1806.03822).
    """
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(gold).split()
    if not predicted or not expected:
        return float(predicted == expected)
    shared = (Counter(predicted) & Counter(expected)).total()
    return 2 * shared / (len(predicted) + len(expected))


class QuestionAnswering(evaluate.Metric):
    """Exact match and F1 in percent, each question scored by its best gold answer.

    Predictions and references are texts and lists of texts; an empty list is a no-answer.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="SQuAD exact match and F1",
            citation="arXiv:1606.05250, arXiv:1806.03822",
            inputs_description="predictions: text; references: list of gold texts",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    def _compute(self, predictions, references):
        def percent(score):
            best = (
                max(score(prediction, gold) for gold in golds or [""])
                for prediction, golds in zip(predictions, references, strict=True)
            )
            return 100 * sum(best) / len(predictions)

        return {"exact_match": percent(exact_match), "f1": percent(token_f1)}


class Paraphrase(evaluate.Metric):
    """Accuracy and F1 of class 1, in 0..1: the GLUE metric of MRPC and QQP.

    Source: Wang et al. 2018, arXiv:1804.07461.
    """

    def _info(self):
        return evaluate.MetricInfo(
            description="GLUE accuracy and F1",
            citation="arXiv:1804.07461",
            inputs_description="predictions, references: 0 or 1",
            features=datasets.Features(
                {name: datasets.Value("int64") for name in ("predictions", "references")}
            ),
        )

    def _compute(self, predictions, references):
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions, zero_division=0)),
        }
