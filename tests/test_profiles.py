import pytest

from helpers import profiles, published

LAPTOP = (profiles.FOLDER / "laptop.toml").read_text()


@pytest.mark.parametrize("name", ["laptop", "workshop", "paper"])
def test_the_courses_profiles_load(name):
    assert profiles.load(name).name == name


def test_paper_is_the_published_experiment():
    paper = profiles.load("paper")
    assert paper.squad.model == "distilbert-base-uncased"
    assert paper.mrpc.model == paper.qqp.model == "bert-base-cased"
    assert [task.max_length for task in (paper.mrpc, paper.qqp, paper.squad)] == [128, 128, 384]
    assert [task.epochs for task in (paper.mrpc, paper.qqp, paper.squad)] == [3, 3, 1]
    assert {task.batch_size for task in (paper.mrpc, paper.qqp, paper.squad)} == {32}
    assert paper.squad.train_samples is None
    for task in profiles.TASKS:
        published_runs = published.runs(task)
        assert getattr(paper, task).ranks == max(run["ranks"] for run in published_runs)


def test_data_may_be_a_folder(tmp_path):
    (tmp_path / "mine.toml").write_text(LAPTOP.replace('"builtin"', '"~/data"', 1))
    assert profiles.load("mine", folder=tmp_path).mrpc.data == "~/data"


def test_only_laptop_needs_no_hub():
    sources = {name: profiles.load(name).squad.data for name in ("laptop", "workshop", "paper")}
    assert sources == {"laptop": "builtin", "workshop": "hub", "paper": "hub"}


def test_the_variable_chooses_and_laptop_is_the_default(monkeypatch):
    monkeypatch.delenv(profiles.VARIABLE, raising=False)
    assert profiles.load().name == "laptop"
    monkeypatch.setenv(profiles.VARIABLE, "paper")
    assert profiles.load().name == "paper"


def test_an_unknown_profile_names_the_allowed_ones(monkeypatch):
    monkeypatch.setenv(profiles.VARIABLE, "huge")
    with pytest.raises(profiles.ProfileError, match="COURSE_PROFILE may be laptop, paper, works"):
        profiles.load()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs = 1", "epochs = 0", r"\[mrpc\]: epochs = 0 is refused; allowed is a whole"),
        ("epochs = 1", "epochs = true", "epochs = True is refused"),
        ("epochs = 1", "epoch = 1", r"unknown key 'epoch'; allowed are .*epochs"),
        ("epochs = 1\n", "", "key 'epochs' is missing"),
        ("learning_rate = 2e-4", "learning_rate = nan", "learning_rate = nan is refused"),
        ("train_samples = 640", 'train_samples = "some"', '"all"'),
        ('data = "builtin"', 'data = "buitin"', '"auto", "hub", "builtin", or a folder'),
        ('data = "builtin"', "data = 1", "data = 1 is refused"),
        ("ranks = 2", 'ranks = "2"', "ranks = '2' is refused"),
        ("stride = 16", "stride = 64", "less than max_length = 64"),
        ("max_length = 128", "max_length = 128\nstride = 3", "unknown key 'stride'"),
        ("[mrpc]", "[mnli]", "unknown key 'mnli'; allowed are mrpc, qqp, squad"),
        ("epochs = 1", "epochs == 1", "not valid TOML"),
    ],
)
def test_a_broken_profile_is_refused_with_file_and_allowed_values(tmp_path, old, new, message):
    file = tmp_path / "mine.toml"
    assert old in LAPTOP
    file.write_text(LAPTOP.replace(old, new, 1))
    with pytest.raises(profiles.ProfileError, match=message) as refusal:
        profiles.load("mine", folder=tmp_path)
    assert str(file) in str(refusal.value)
