"""The benchmark of the recipe: what it says about planted results."""

import json
import subprocess
import sys

import pytest

from bench import recipe
from helpers.recipe import FAST


def found(seconds: dict[str, float], flops: float = 70.0, data: str = "a folder") -> dict:
    return {
        name: {
            "seconds": [seconds.get(name, 10.0)] * 3,
            "FLOP/s": flops * 1e9,
            "peak FLOP/s": 100e9,
            "data": data,
            "precision": "bf16",
            "recipe": {"attention": "separate"},
            "changed": [],
            "samples": 20,
            "computed for each real token": 1.1,
            "peak memory": 2 * 10**9,
            "shares": {"matrix products": 0.75, "fused attention": 0.0},
        }
        for name in recipe.VARIANTS
    }


def metrics(of_the_recipe: list[float]) -> dict:
    same = [{"f1": 90.0, "seconds": 1.0}] * len(of_the_recipe)
    ours = [{"f1": f1, "seconds": 1.0} for f1 in of_the_recipe]
    return {name: ours if name == recipe.RECIPE else same for name in recipe.VARIANTS}


def answers(speed: dict, scores: list[float]) -> list[bool | None]:
    return [reached for reached, _ in recipe.verdict("squad", speed, metrics(scores))]


GOOD = {recipe.RECIPE: 1.0, recipe.CAPPED: 5.0}


@pytest.mark.parametrize(
    ("speed", "scores", "expected"),
    [
        (found(GOOD), [90.0, 90.2, 90.1], [True, True, True, True]),
        (found({recipe.RECIPE: 2.0, recipe.CAPPED: 5.0}), [90, 90, 90], [False, True, True, True]),
        (found(GOOD, flops=50.0), [90, 90, 90], [True, False, True, True]),
        (found(GOOD), [89.0, 89.1, 89.2], [True, True, False, True]),
        (found(GOOD), [91.0, 91.1, 91.2], [True, True, False, True]),
        (found(GOOD), [80.0, 90.0, 99.0], [True, True, None, True]),
        (found({recipe.RECIPE: 1.0, recipe.CAPPED: 11.0}), [90, 90, 90], [True, True, True, False]),
        (found(GOOD, data="a miniature set"), [90, 90, 90], [None, True, True, True]),
    ],
)
def test_each_goal_is_judged_alone(speed, scores, expected):
    assert answers(speed, scores) == expected


def test_the_table_sets_speed_and_metric_side_by_side():
    rows = {
        row["variant"]: row for row in recipe.table("squad", found(GOOD), metrics([89, 90, 91]))
    }
    ours = rows[recipe.RECIPE]
    assert ours["samples/s"] == 20
    assert ours["times faster"].startswith("10.00x")
    assert ours["of its peak"] == "70%"
    assert ours["f1"] == "90.0 (89.0-91.0)"


def test_the_pieces_end_with_the_recipe():
    names = list(recipe.PIECES)
    assert recipe.PIECES[names[-2]].recipe == FAST


def test_it_runs_from_the_shell():
    command = [sys.executable, "-m", "bench.recipe", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "COURSE_DATA" in said and "--seeds" in said


def test_too_few_rounds_or_seeds_are_refused_before_anything_runs():
    command = [sys.executable, "-m", "bench.recipe", "--seeds", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "3 rounds and 2 seeds, or more" in ran.stderr


def test_results_are_written_as_json_and_a_page(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "BUILD", tmp_path / "build")
    speed, scores = found(GOOD), metrics([89, 90, 91])
    pieces = {name: speed[recipe.RECIPE] for name in recipe.PIECES}
    results = {"squad": {"speed": speed, "pieces": pieces, "metrics": scores}}
    recipe.write(results, [("squad", recipe.table("squad", speed, scores))])
    assert json.loads((tmp_path / "build/recipe.json").read_text()) == results
    page = (tmp_path / "build/recipe.html").read_text()
    assert page.count("<table>") == 1 and page.count("data:image/png") == 2
