import json

import pytest

from helpers import published
from helpers.isa import FLAGS, bf16_tier


def test_every_number_has_a_source():
    data = json.loads(published.FILE.read_text())
    assert data["generations"]["source"]
    groups = (data["workloads"], data["parameters"], data["networks"])
    entries = [entry for group in groups for entry in group.values()]
    for entry in data["instances"] + data["runs"] + entries:
        assert entry["source"].startswith("https://")


def test_generations_use_the_names_of_the_flags():
    data = json.loads(published.FILE.read_text())["generations"]
    del data["source"]
    for present in data.values():
        assert set(present) <= set(FLAGS.values())
    generations = published.cpu_generations()
    assert bf16_tier(generations["Sapphire Rapids"]).startswith("AMX")
    assert "no native bf16" in bf16_tier(generations["Ice Lake"])
    assert "without AMX" in bf16_tier(generations["Genoa"])


def test_a_family_on_several_generations_depends():
    amx = {row["family"]: row["AMX bf16"] for row in published.cloud_instances()}
    assert amx["Dsv5"] == "depends"
    assert amx["C4"] == "yes"
    assert amx["N2"] == "-"


def test_the_published_speed_up_is_about_eight():
    times = {(run["cpu"], run["nodes"]): run["seconds"] for run in published.runs("squad")}
    ratio = times["Ice Lake", 1] / times["Sapphire Rapids", 1]
    assert ratio == pytest.approx(8, abs=0.1)


def test_a_task_without_runs_is_refused():
    with pytest.raises(KeyError, match="squad, mrpc and qqp"):
        published.runs("mnli")


def test_rows_with_notes_stay_aligned():
    html = published.runs("mrpc")._repr_html_()
    assert html.count("<td>") == len(published.runs("mrpc")) * html.count("<th>")
