"""Miniature MRPC, QQP and SQuAD sets, made by code: real fine-tuning without a download.

No word that decides an answer stands in both training and evaluation set, and the words around
it are the same for right and wrong. So only an encoder that knows the deciding words from its
pretraining can do well in evaluation. One with random weights stays at chance, however well it
learns the training set: half of the pairs, about a third of the questions.

The notebook that uses them: ``03_finetune_one_node``.
"""

import re
from random import Random

TRAIN_ROWS, EVALUATION_ROWS = 2000, 400
SEED = 2022

# Each line of a word table has a training half and, behind the bar, an evaluation half.
SYNONYMS = """
car automobile, child kid, ship boat, film movie, stone rock | doctor physician, shop store
present gift, road street, rabbit bunny, picture photo, path trail | lawyer attorney, hat cap
sofa couch, garbage trash, thief robber, carpet rug, dinner meal | house home, forest woods
cash money, disease illness, author writer, error mistake, gem jewel | prison jail, taxi cab
plane aircraft, mother mom, answer reply, pig hog, visitor guest | bike bicycle, infant baby
monarch king, coast shore, pistol gun, sack bag, devil demon | teacher instructor, mug cup
"""
KINDS = """
animal: dog horse sheep rabbit bear mouse goat pig fox deer | cat tiger cow elephant lion wolf
fruit: apple cherry plum grape peach fig lime | lemon banana pear mango strawberry coconut
instrument: piano trumpet cello flute harp banjo oboe | violin guitar drum saxophone clarinet
vehicle: car train tractor ship taxi van ferry wagon | truck bus bicycle boat motorcycle tram
garment: shirt hat jacket sock dress scarf robe vest | coat shoe skirt glove sweater trousers
drink: tea beer juice brandy whiskey soda rum gin | coffee wine milk water vodka champagne
tool: hammer axe drill wrench ladder spade chisel | saw knife scissors shovel broom rake
metal: iron silver lead nickel zinc steel mercury | gold copper bronze aluminum brass uranium
color: red yellow white purple pink brown scarlet crimson | blue green black gray violet turquoise
city: Paris Berlin Madrid Chicago Moscow Sydney Prague | London Rome Tokyo Boston Vienna Dublin
"""
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Julia", "Leo")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")

PAIRS = {
    "mrpc": (
        ("sentence1", "sentence2"),
        (
            (
                "{name} saw the {0}, the {1} and the {2} on {day}.",
                "On {day}, {name} saw the {0}, the {1} and the {2}.",
            ),
            (
                "The {0} was near the {1} and the {2}, {name} said.",
                "{name} said that the {0} was near the {1} and the {2}.",
            ),
            (
                "{name} remembers a {0}, a {1} and a {2}.",
                "A {0}, a {1} and a {2} are what {name} remembers.",
            ),
        ),
    ),
    "qqp": (
        ("question1", "question2"),
        (
            (
                "What do the {0}, the {1} and the {2} have in common?",
                "How are the {0}, the {1} and the {2} related?",
            ),
            (
                "Where can I see a {0}, a {1} and a {2}?",
                "Which place has a {0}, a {1} and a {2} to see?",
            ),
            (
                "Why did {name} draw a {0}, a {1} and a {2}?",
                "Why were a {0}, a {1} and a {2} drawn by {name}?",
            ),
        ),
    ),
}
CONTEXTS = (
    "{name} wrote {}, {} and {} on a list.",
    "On {day}, {name} heard of {}, then of {}, then of {}.",
    "{} was the first word, {} the second, {} the third, {name} said on {day}.",
)
QUESTIONS = ("Which {kind} is mentioned?", "What {kind} does the text name?", "What is the {kind}?")


def _halves(table: str) -> tuple[list[str], list[str]]:
    lines = [line.split("|") for line in table.strip().splitlines()]
    return [line[0].strip() for line in lines], [line[1].strip() for line in lines]


def _synonyms(evaluation: bool) -> list[list[str]]:
    return [pair.split() for line in _halves(SYNONYMS)[evaluation] for pair in line.split(",")]


def _kinds(evaluation: bool) -> dict[str, list[str]]:
    names = [line.partition(":")[0] for line in KINDS.strip().splitlines()]
    members = [half.rpartition(":")[2].split() for half in _halves(KINDS)[evaluation]]
    return dict(zip(names, members, strict=True))


def pairs(task: str, evaluation: bool = False) -> list[dict]:
    """Rows of the miniature MRPC or QQP: half of the pairs say the same in other words.

    In the other half, all three deciding words are swapped for unrelated ones.
    """
    random = Random(f"{SEED} {task} {evaluation}")
    columns, patterns = PAIRS[task]
    synonyms = _synonyms(evaluation)
    rows = []
    for index in range(EVALUATION_ROWS if evaluation else TRAIN_ROWS):
        label = index % 2
        words = [random.sample(pair, 2) for pair in random.sample(synonyms, 6)]
        first = [word for word, _ in words[:3]]
        second = [other for _, other in (words[:3] if label else words[3:])]
        frame = {"name": random.choice(NAMES), "day": random.choice(DAYS)}
        texts = [
            pattern.format(*chosen, **frame)
            for pattern, chosen in zip(random.choice(patterns), (first, second), strict=True)
        ]
        rows.append(dict(zip(columns, texts, strict=True)) | {"label": label, "idx": index})
    return rows


def questions(evaluation: bool = False) -> list[dict]:
    """Rows of the miniature SQuAD: three things are mentioned, the question asks for one kind."""
    random = Random(f"{SEED} squad {evaluation}")
    kinds = _kinds(evaluation)
    rows = []
    for index in range(EVALUATION_ROWS if evaluation else TRAIN_ROWS):
        mentioned = random.sample(sorted(kinds), 3)
        words = [random.choice(kinds[kind]) for kind in mentioned]
        context = random.choice(CONTEXTS).format(
            *words, name=random.choice(NAMES), day=random.choice(DAYS)
        )
        asked = random.randrange(3)
        answer = re.search(rf"\b{words[asked]}\b", context)
        rows.append(
            {
                "id": f"miniature-{'evaluation' if evaluation else 'train'}-{index}",
                "title": "Miniature",
                "context": context,
                "question": random.choice(QUESTIONS).format(kind=mentioned[asked]),
                "answers": {"text": [answer.group()], "answer_start": [answer.start()]},
            }
        )
    return rows
