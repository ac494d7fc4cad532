"""Memory: copies, positions, facts of a fixed table, and what stood in a text.

The first four are bare symbols, as in `digits`. `facts` is closed book: every fact of its table
occurs in training, and only the combinations that are asked for differ between the splits.
"""

from __future__ import annotations

from random import Random

from agent_forge.data.tasks import checks
from agent_forge.data.tasks.base import Build, Draw, Family, Operands, Question, scaled, wrong
from agent_forge.data.tasks.digits import DIGITS, spaced, symbol_item

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_table = Random(260).choices(LETTERS, k=len(LETTERS) * len(DIGITS))
FACTS = {  # "b3" -> a letter: what the model has to know by heart
    letter + digit: _table[i * len(DIGITS) + j]
    for i, letter in enumerate(LETTERS)
    for j, digit in enumerate(DIGITS)
}
QUESTIONS = tuple(FACTS)
COUNT = tuple(range(1, 25))
KEYS = (
    *("red", "blue", "green", "black", "white", "brown", "pink", "grey", "apple", "pear", "plum"),
    *("lemon", "cat", "dog", "fox", "owl", "hen", "cow", "pig", "bee", "cup", "jar", "box", "bag"),
    *("pen", "key", "hat", "shoe", "sun", "moon", "star", "rain", "snow", "wind", "oak", "rose"),
    *("fern", "lake", "hill", "road", "bridge", "tower", "boat", "train", "lamp", "clock", "bell"),
)
SUBJECTS = (
    *("The grey cat", "An old man", "The baker", "A tall girl", "The postman", "A young farmer"),
    *("The teacher", "A small bird", "The gardener", "Our neighbour", "The painter", "A sailor"),
    *("The brown dog", "A quiet boy", "The miller", "Her aunt", "The tailor", "A doctor"),
)
VERBS = (
    *("waited near", "walked past", "looked at", "sat beside", "slept behind", "sang beside"),
    *("stood in front of", "came back to", "thought about", "drew a picture of", "ran around"),
)
PLACES = (
    *("the old wall", "the wooden gate", "the market", "the tall tree", "the stone bridge"),
    *("the white house", "the river", "the empty barn", "the school", "the little shop"),
    *("the green hill", "the church", "the well", "the station", "the garden", "the harbour"),
)
PEOPLE = (
    *("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack"),
    *("Karla", "Leo", "Maria", "Noah", "Olga", "Paul", "Rosa", "Simon", "Tessa", "Victor"),
)
KEY_VALUE_WORDINGS = {
    "train": (
        "Remember these pairs: {pairs}. Which number belongs to {key}?",
        "A list says {pairs}. What does it say for {key}?",
        "Here are some numbers: {pairs}. What is the number of {key}?",
    ),
    "selection": (
        "In a table stand {pairs}. Find the entry for {key}.",
        "Read the notes ({pairs}) and give the note on {key}.",
    ),
    "verdict": (
        "We stored {pairs}. Now look up {key}.",
        "Labels and their values: {pairs}. The value of {key} is what?",
    ),
}
# What is hidden in the long text, and the question about it.
NEEDLES = {
    "train": (
        ("The secret code of {name} is {value}.", "What is the secret code of {name}?"),
        ("{name} lives in room {value}.", "In which room does {name} live?"),
    ),
    "selection": (
        ("{name} has ticket number {value}.", "Which number is on the ticket of {name}?"),
    ),
    "verdict": (
        ("The locker of {name} opens with {value}.", "What opens the locker of {name}?"),
        ("{name} won {value} points.", "How many points did {name} win?"),
    ),
}


def letters(level: int, rng: Random) -> Operands:
    """A string of letters."""
    return ("".join(rng.choices(LETTERS, k=scaled(level, 4, 26))),)


def letters_and_places(level: int, rng: Random) -> Operands:
    """A string of letters, and places in it (from 1)."""
    size = scaled(level, 4, 24)
    places = rng.choices(COUNT[:size], k=scaled(level, 3, 9))
    return ("".join(rng.choices(LETTERS, k=size)), *places)


def lookups(level: int, rng: Random) -> Operands:
    """Facts to look up: a letter and a digit each."""
    return tuple(rng.choices(QUESTIONS, k=scaled(level, 2, 12)))


def copy(operands: tuple[str], level: int, split: str, rng: Random) -> Question:
    """copy a b c -> a b c"""
    return symbol_item(f"copy {spaced(operands[0])}", operands[0], LETTERS, rng)


def reverse(operands: tuple[str], level: int, split: str, rng: Random) -> Question:
    """rev a b c -> c b a"""
    return symbol_item(f"rev {spaced(operands[0])}", operands[0][::-1], LETTERS, rng)


def letter_at(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """at 3 1 3 : a b c d -> c a c"""
    text, *places = operands
    question = f"at {' '.join(map(str, places))} : {spaced(text)}"
    return symbol_item(question, "".join(text[i - 1] for i in places), LETTERS, rng)


def facts(operands: tuple[str, ...], level: int, split: str, rng: Random) -> Question:
    """fact b 3 , q 7 -> two letters of the table"""
    question = "fact " + " , ".join(map(spaced, operands))
    return symbol_item(question, "".join(map(FACTS.__getitem__, operands)), LETTERS, rng)


def pairs(level: int, rng: Random) -> Operands:
    """The key asked for, then keys with their numbers; every number occurs once."""
    size = scaled(level, 3, 30)
    keys = rng.sample(KEYS, size)
    values = rng.sample(range(10, 100), size)
    return (keys[int(rng.random() * size)], *zip(keys, values, strict=True))


def key_value(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """The number beside a key in a list of pairs."""
    key, *entries = operands
    listed = ", ".join(f"{k} = {v}" for k, v in entries)
    question = rng.choice(KEY_VALUE_WORDINGS[split]).format(pairs=listed, key=key)
    values = dict(entries)
    others = [str(v) for k, v in rng.sample(entries, min(4, len(entries))) if k != key]
    return Question(question, str(values[key]), "", wrong(str(values[key]), *others))


def needle_operands(level: int, rng: Random) -> Operands:
    """A person, and the number that the text gives for that person."""
    return rng.choice(PEOPLE), rng.randrange(1000, 10_000)


def needle(operands: tuple[str, int], level: int, split: str, rng: Random) -> Question:
    """One sentence of a long text answers the question; a few others look like it."""
    name, value = operands
    sentence, question = rng.choice(NEEDLES[split])
    names = [name, *rng.sample([p for p in PEOPLE if p != name], scaled(level, 1, 6))]
    values = [value, *(v for v in rng.sample(range(1000, 10_000), len(names)) if v != value)]
    size = scaled(level, 3, 120)
    filler = zip(*(rng.choices(words, k=size) for words in (SUBJECTS, VERBS, PLACES)), strict=True)
    text = [f"{subject} {verb} {place}." for subject, verb, place in filler]
    for person, number in zip(names, values, strict=False):
        hidden = sentence.format(name=person, value=number)
        text.insert(int(rng.random() * (len(text) + 1)), hidden)
    others = (str(v) for v in values[1 : len(names)])
    return Question(
        f"{' '.join(text)}\n{question.format(name=name)}",
        str(value),
        "",
        wrong(str(value), *others, str(value + 1)),
    )


def _symbols(name: str, category: str, summary: str, draw: Draw, build: Build) -> Family:
    return Family(name, "memory", category, summary, draw, build, checks.symbols, learnable=True)


FAMILIES = (
    _symbols("copy", "lang", "repeat a string", letters, copy),
    _symbols(
        "letter_at", "qa", "the letters at given places of a string", letters_and_places, letter_at
    ),
    _symbols("reverse", "lang", "a string backwards", letters, reverse),
    _symbols("facts", "qa", "facts of a fixed table, known by heart", lookups, facts),
    Family(
        "key_value",
        "memory",
        "qa",
        "the number beside a key, in a list of pairs",
        pairs,
        key_value,
        checks.number,
        wordings=KEY_VALUE_WORDINGS,
    ),
    Family(
        "needle",
        "memory",
        "qa",
        "a number that one sentence of a long text gives",
        needle_operands,
        needle,
        checks.number,
        wordings={
            split: tuple(f"{{before}}{hidden}{{after}}\n{asked}" for hidden, asked in entries)
            for split, entries in NEEDLES.items()
        },
    ),
)
