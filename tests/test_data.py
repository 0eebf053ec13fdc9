import json
import os
import re
import time
from pathlib import Path

import pytest
from stand_in_hub import REPOSITORY, run_elsewhere, stand_in_hub, use_hub

from helpers import data, finetune, hub, miniature, models, profiles
from helpers.data import DataError, load

REAL = Path(os.environ.get(data.VARIABLE) or REPOSITORY.parent / "shared" / "data")
needs_real = pytest.mark.skipif(
    not (REAL / "msr_paraphrase_train.txt").is_file(),
    reason=f"no real data: neither {data.VARIABLE} nor ../shared/data holds MRPC",
)

MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(data.VARIABLE, raising=False)


def mrpc_folder(folder, train, test="1\t1\t2\ta\tb\n"):
    for name, rows in (("train", train), ("test", test)):
        content = rows if isinstance(rows, bytes) else (MRPC + rows).encode()
        (folder / f"msr_paraphrase_{name}.txt").write_bytes(content)
    return str(folder)


def qqp_folder(folder, train, dev="9\t1\t2\ta?\tb?\t0\n"):
    (folder / "train.tsv").write_text(QQP + train, newline="")
    (folder / "dev.tsv").write_text(QQP + dev, newline="")
    return str(folder)


def question(identity="q1", text="the cat", start=4, **more):
    answers = [{"text": text, "answer_start": start}]
    return {"id": identity, "question": "Who sat?", "answers": answers} | more


def squad_document(*questions, context="See the cat.\tIt sat."):
    paragraph = {"context": context, "qas": list(questions)}
    return {"version": "1.1", "data": [{"title": "Cats", "paragraphs": [paragraph]}]}


def squad_folder(folder, train, version="1.1"):
    train = train if isinstance(train, bytes) else json.dumps(train, indent=1).encode()
    (folder / f"train-v{version}.json").write_bytes(train)
    (folder / f"dev-v{version}.json").write_text(json.dumps(squad_document(question("dev"))))
    return str(folder)


# official files


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last_end", [True, False])
def test_mrpc_in_every_official_dress(tmp_path, mark, end, last_end):
    rows = f'{MRPC}1\t10\t11\tHe said "café".\tHe "said\u2028it.\n0\t12\t13\ta\tb\n'
    rows = rows if last_end else rows.removesuffix("\n")
    found = load("mrpc", mrpc_folder(tmp_path, mark + rows.replace("\n", end).encode())).train
    assert found[:] == {
        "sentence1": ['He said "café".', "a"],
        "sentence2": ['He "said\u2028it.', "b"],
        "label": [1, 0],
        "idx": [0, 1],
    }
    assert found.features["label"].names == ["not_equivalent", "equivalent"]


def test_qqp_and_its_quoted_fields(tmp_path):
    train = (
        '1\t1\t2\t"What is ""bf16""?"\tA "plain" quote?\t1\n'
        '2\t3\t4\t"A question with\na line end\n"\tAnother?\t0\r\n'
        '3\t5\t6\t"quoted" at first?\t"Only opened?\t1\n'
    )
    found = load("qqp", qqp_folder(tmp_path, train)).train
    assert found[:] == {
        "question1": ['What is "bf16"?', "A question with\na line end\n", '"quoted" at first?'],
        "question2": ['A "plain" quote?', "Another?", '"Only opened?'],
        "label": [1, 0, 1],
        "idx": [0, 1, 2],
    }


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_squad_1_and_2(tmp_path, mark):
    none = {"is_impossible": True, "answers": [], "plausible_answers": [{"text": "sat"}]}
    document = squad_document(question(is_impossible=False), question("q2", **none))
    content = mark + json.dumps(document, indent=1).replace("\n", "\r\n").encode()
    found = load("squad", squad_folder(tmp_path, content, version="2.0"))
    assert found.train[0] == {
        "id": "q1",
        "title": "Cats",
        "context": "See the cat.\tIt sat.",
        "question": "Who sat?",
        "answers": {"text": ["the cat"], "answer_start": [4]},
    }
    assert found.train[1]["answers"] == {"text": [], "answer_start": []}
    assert found.evaluation["id"][:] == ["dev"]
    assert "train-v2.0.json" in found.source


def test_files_may_lie_in_a_folder_of_the_tasks_name(tmp_path):
    (tmp_path / "QQP").mkdir()
    qqp_folder(tmp_path / "QQP", "1\t1\t2\ta?\tb?\t1\n")
    assert len(load("qqp", str(tmp_path)).train) == 1


@pytest.mark.parametrize(
    ("train", "line", "message"),
    [
        (b"Quality\t#1 ID\t#1 String\n1\t1\ta\n", 1, "column '#2 String' is missing"),
        (b"", 1, "column '#1 String' is missing"),
        ("1\t1\t2\ta\tb\n1\t1\t2\ta\tb\tc\n", 3, "6 fields instead of 5"),
        ("1\t1\t2\ta\tb\n\n1\t1\t2\ta\tb\n", 3, "1 fields instead of 5"),
        ("1\t1\t2\ta\tb\n1\t1\t2\ta\n", 3, "4 fields instead of 5"),
        ("2\t1\t2\ta\tb\n", 2, "label '2' is neither 0 nor 1"),
        ("\t1\t2\ta\tb\n", 2, "label '' is neither 0 nor 1"),
        (MRPC.encode() + b"1\t1\t2\ta\tb\n1\t1\t2\tcaf\xe9\tb\n", 3, "byte 0xe9 is not UTF-8"),
        (MRPC.encode("utf-16"), 1, "byte 0xff is not UTF-8"),
    ],
)
def test_a_broken_mrpc_file_is_refused_with_its_line(tmp_path, train, line, message):
    with pytest.raises(DataError, match=f"msr_paraphrase_train.txt, line {line}: {message}"):
        load("mrpc", mrpc_folder(tmp_path, train))


def test_an_empty_split_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"msr_paraphrase_test.txt: a header, but no rows"):
        load("mrpc", mrpc_folder(tmp_path, "1\t1\t2\ta\tb\n", test=""))
    with pytest.raises(DataError, match=r"train-v1.1.json: no questions"):
        load("squad", squad_folder(tmp_path, squad_document()))


@pytest.mark.parametrize(
    ("train", "line"),
    [
        ('1\t1\t2\ta?\tb?\t0\n2\t1\t2\t"open?\tb?\n3\t1\t2\ta?\tb?\t0\n', 3),
        ('1\t1\t2\t"open to the end?\tb?\n', 2),
        ('1\t1\t2\t"two\nlines"\tb?\t0\n2\t1\t2\ta?\tb?\t0\textra\n', 4),
    ],
)
def test_a_broken_qqp_file_is_refused_with_its_line(tmp_path, train, line):
    with pytest.raises(DataError, match=f"train.tsv, line {line}: . fields instead of 6"):
        load("qqp", qqp_folder(tmp_path, train))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (question("q2", start=5), "answer 'the cat' is not at answer_start 5; .*'he cat.'"),
        (question("q2", start=-8), "answer 'the cat' is not at answer_start -8"),
        (question("q2", text=""), "answer '' is not"),
        (question("q2", start="4"), "'answer_start' is missing or not a whole number"),
        (question("q2", answers=[]), "no answer, and not marked is_impossible"),
        (question("q2", answers=None), "'answers' is missing or not a list"),
        (question("q2", question=None), "'question' is missing or not a text"),
        (question("q1"), "the id stands there twice"),
    ],
)
def test_a_broken_question_is_refused_with_its_line_and_id(tmp_path, broken, message):
    folder = squad_folder(tmp_path, squad_document(question("q1"), broken))
    lines = (tmp_path / "train-v1.1.json").read_text().splitlines()
    identity = broken["id"]
    line = next(n for n, text in enumerate(lines, 1) if f'"id": "{identity}"' in text)
    with pytest.raises(
        DataError, match=f"train-v1.1.json, line {line}, question {identity}: {message}"
    ):
        load("squad", folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"data": [\n}', "line 2: not valid JSON"),
        (b"[]", "'data' is missing or not a list"),
        (b'{"data": [{}]}', r"data\[0\]: 'paragraphs' is missing or not a list"),
        (b'{"data": [{"paragraphs": [{}]}]}', r"data\[0\].paragraphs\[0\]: 'context' is missing"),
        (b'{\n"data": "\xe9"}', "line 2: byte 0xe9 is not UTF-8"),
    ],
)
def test_a_broken_squad_file_is_refused_with_the_place(tmp_path, content, message):
    with pytest.raises(DataError, match=f"train-v1.1.json, {message}|train-v1.1.json: {message}"):
        load("squad", squad_folder(tmp_path, content))


def test_a_folder_that_lacks_the_files_says_which(tmp_path):
    with pytest.raises(DataError, match="no QQP in it; its files are train.tsv and dev.tsv"):
        load("qqp", str(tmp_path))
    qqp_folder(tmp_path, "1\t1\t2\ta?\tb?\t1\n")
    (tmp_path / "dev.tsv").unlink()
    with pytest.raises(DataError, match="dev.tsv: not there"):
        load("qqp", str(tmp_path))


def test_the_variable_overrides_and_a_missing_folder_names_it(tmp_path, monkeypatch):
    monkeypatch.setenv(data.VARIABLE, mrpc_folder(tmp_path, "1\t1\t2\ta\tb\n"))
    assert len(load("mrpc", "builtin").train) == 1
    monkeypatch.setenv(data.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="no data folder '.*nowhere'; COURSE_DATA"):
        load("mrpc", "builtin")


@needs_real
def test_the_real_mrpc_loads_whole(tmp_path):
    found = load("mrpc", str(REAL))
    assert [len(found.train), len(found.evaluation)] == [4076, 1725]
    # counts of paraphrases in the corpus's own description
    assert [sum(found.train["label"]), sum(found.evaluation["label"])] == [2753, 1147]
    assert not any("\r" in text or "\ufeff" in text for text in found.train["sentence2"])
    assert str(REAL) in found.source


@needs_real
def test_the_real_xquad_is_split_by_paragraph():
    found = load("squad", str(REAL))
    assert len(found.train) + len(found.evaluation) == 1190
    assert not set(found.train["context"]) & set(found.evaluation["context"])
    assert "every fourth paragraph kept for evaluation" in found.source


# sizes


def test_the_source_says_how_many_samples_are_used():
    part = load("mrpc", "builtin", train_samples=10, eval_samples=10_000)
    assert (len(part.train), len(part.evaluation)) == (10, miniature.EVALUATION_ROWS)
    assert "10 of 2000 training samples" in part.source
    assert "all 400 evaluation samples (10000 were asked for)" in part.source
    assert "miniature" in part.source


def test_the_seed_decides_which_samples():
    ids = [load("squad", "builtin", 20, 5, seed).train["id"][:] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2]
    assert len(set(ids[0])) == 20


def test_an_unknown_task_is_refused():
    with pytest.raises(DataError, match="unknown task 'mnli'; known are mrpc, qqp, squad"):
        load("mnli")


# the hub


def on_hub(folder, task="mrpc"):
    """A copy of a built-in set, laid out like the data set's repository on the hub."""
    small = load(task, "builtin", 40, 20)
    subset = data.HUB[task][1]
    (folder / subset).mkdir(parents=True)
    splits = {"train": small.train, "validation": small.evaluation}
    lines = ["---", "configs:", f"- config_name: {subset}", "  data_files:"]
    for split, rows in splits.items():
        rows.to_parquet(folder / subset / f"{split}-00000-of-00001.parquet")
        lines += [f"  - split: {split}", f"    path: {subset}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return {data.HUB[task][0]: folder}


def load_elsewhere(endpoint, home, source, **variables):
    code = (
        "from helpers import data\n"
        f"try: print(data.load('mrpc', {source!r}, 10).source)\n"
        "except data.DataError as error: print('DataError:', error)\n"
    )
    return run_elsewhere(code, endpoint, home, **variables)


def test_a_hub_that_answers_is_used_and_then_its_cache(tmp_path):
    home = tmp_path / "home"
    with stand_in_hub(repositories=on_hub(tmp_path / "glue")) as (endpoint, asked):
        said = load_elsewhere(endpoint, home, "auto")
        assert "MRPC: nyu-mll/glue (mrpc) from the hub; 10 of 40 training samples" in said
        assert any(request.endswith("mrpc/train-00000-of-00001.parquet") for request in asked)
    with stand_in_hub("refusing") as (endpoint, _):  # the hub is gone, the cache is there
        said = load_elsewhere(endpoint, home, "hub")
    assert "from the hub; 10 of 40 training samples" in said
    said = load_elsewhere(endpoint, home, "hub", HF_HUB_OFFLINE="1")
    assert "from the hub; 10 of 40 training samples" in said


def test_a_home_that_cannot_be_written_is_said(tmp_path):
    home = tmp_path / "home"
    home.write_text("a file where a folder is needed")
    with stand_in_hub(repositories=on_hub(tmp_path / "glue")) as (endpoint, _):
        said = load_elsewhere(endpoint, home, "hub")
    assert said.startswith("DataError: ")
    assert str(home) in said


def test_without_a_hub_auto_takes_the_built_in_set_and_says_why(tmp_path):
    with stand_in_hub("refusing") as (endpoint, _):
        said = load_elsewhere(endpoint, tmp_path, "auto")
    assert "a miniature set" in said
    assert f"the hub at {endpoint} can't be used: no connection" in said


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("refusing", "no connection"),
        ("hanging", "no answer in 3 s"),
        ("stalling", "no answer in 3 s"),
        ("broken", "it answers with HTTP status 500"),
        ("serving", "it has no dataset 'nyu-mll/glue' that you may read"),
    ],
)
def test_a_hub_that_is_of_no_use_is_found_out_in_seconds(monkeypatch, mode, reason):
    with stand_in_hub(mode) as (endpoint, _):
        use_hub(monkeypatch, endpoint)
        begin = time.monotonic()
        with pytest.raises(DataError, match=f"{endpoint} can't be used: {reason}.*COURSE_DATA=bu"):
            load("mrpc", "hub")
        assert time.monotonic() - begin < 2 * hub.LIMIT


def test_a_name_look_up_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: time.sleep(2))
    use_hub(monkeypatch, "http://nowhere.invalid")
    begin = time.monotonic()
    with pytest.raises(hub.HubError, match=r"no answer in 0.2 s"):
        hub.check("nyu-mll/glue", "dataset", limit=0.2)
    assert time.monotonic() - begin < 1.5


# the built-in sets


def sides(table):
    """The training and the evaluation words of a table in helpers/miniature.py."""
    halves = [line.rpartition(":")[2].split("|") for line in table.strip().splitlines()]
    return [
        {word for line in halves for word in line[side].replace(",", " ").split()}
        for side in (0, 1)
    ]


@pytest.mark.parametrize("task", ["mrpc", "qqp", "squad"])
def test_no_deciding_word_is_in_both_halves_of_a_built_in_set(task):
    train_words, evaluation_words = sides(
        miniature.KINDS if task == "squad" else miniature.SYNONYMS
    )
    assert not train_words & evaluation_words
    found = load(task, "builtin")
    for part, own, other in (
        (found.train, train_words, evaluation_words),
        (found.evaluation, evaluation_words, train_words),
    ):
        columns = ["context"] if task == "squad" else part.column_names[:2]
        used = {
            word for column in columns for text in part[column] for word in re.findall(r"\w+", text)
        }
        assert used >= own
        assert not used & other


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_built_in_pairs_are_balanced(task):
    found = load(task, "builtin")
    for part in (found.train, found.evaluation):
        assert sum(part["label"]) == len(part) / 2
    assert not set(found.train[found.train.column_names[0]]) & set(
        found.evaluation[found.evaluation.column_names[0]]
    )


def test_built_in_answers_are_where_they_should_be():
    found = load("squad", "builtin")
    for row in [*found.train, *found.evaluation]:
        text, start = row["answers"]["text"][0], row["answers"]["answer_start"][0]
        assert re.findall(rf"\b{text}\b", row["context"]) == [text]
        assert re.match(rf"{text}\b", row["context"][start:])


def untrained(name, kind, say):
    model, tokenizer = pretrained(name, kind, say)
    return type(model)(model.config), tokenizer


pretrained = models.load


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "metric", "full", "chance"),
    [("mrpc", "accuracy", 1, 1 / 2), ("qqp", "accuracy", 1, 1 / 2), ("squad", "f1", 100, 1 / 3)],
)
def test_a_pretrained_encoder_learns_the_built_in_set_and_an_untrained_one_cannot(
    monkeypatch, task, metric, full, chance
):
    """Chance is 1/2 for pairs, and 1/3 for questions once the reader picks one of three words."""
    settings = getattr(profiles.load("laptop"), task)
    scores = {}
    for load_model in (pretrained, untrained):
        monkeypatch.setattr(models, "load", load_model)
        run = finetune.FineTuning(task, settings)
        before = run.evaluate()[metric] / full
        run.train(run.remaining_steps())
        scores[load_model] = (before, run.evaluate()[metric] / full)
    assert scores[pretrained][0] < chance + 0.12
    assert scores[pretrained][1] > 0.9
    assert max(scores[untrained]) < chance + 0.12
