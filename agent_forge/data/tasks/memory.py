"""Memory: a number beside a key in a list of pairs, and one sentence of a long text."""

from random import Random

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import Operands, TaskContent, family, load, scaled, wording

_words = load("memory")
KEYS, PEOPLE = _words["keys"], _words["people"]
NEEDLES = _words["needles"]  # split -> pairs of the hidden sentence and the question about it


def pairs(level: int, rng: Random) -> Operands:
    """The key asked for, then keys with their numbers; every number occurs once."""
    size = scaled(level, 3, 30)
    keys = rng.sample(KEYS, size)
    values = rng.sample(range(10, 100), size)
    return (keys[int(rng.random() * size)], *zip(keys, values, strict=True))


def key_value(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    key, *entries = operands
    listed = ", ".join(f"{k} = {v}" for k, v in entries)
    question = wording("key_value", split, rng, pairs=listed, key=key)
    others = tuple(str(v) for _, v in rng.sample(entries, min(4, len(entries))))
    return TaskContent(question, str(dict(entries)[key]), others)


def needle_operands(level: int, rng: Random) -> Operands:
    """A person, and the number that the text gives for that person."""
    return rng.choice(PEOPLE), rng.randrange(1000, 10_000)


def needle(operands: tuple[str, int], level: int, split: str, rng: Random) -> TaskContent:
    """One sentence of a long text answers the question; a few others look like it."""
    name, value = operands
    sentence, question = rng.choice(NEEDLES[split])
    names = [name, *rng.sample([p for p in PEOPLE if p != name], scaled(level, 1, 6))]
    values = [value, *(v for v in rng.sample(range(1000, 10_000), len(names)) if v != value)]
    size = scaled(level, 3, 120)
    parts = (rng.choices(_words[part], k=size) for part in ("subjects", "verbs", "places"))
    text = [f"{subject} {verb} {place}." for subject, verb, place in zip(*parts, strict=True)]
    for person, number in zip(names, values, strict=False):
        hidden = sentence.format(name=person, value=number)
        text.insert(int(rng.random() * (len(text) + 1)), hidden)
    asked = f"{' '.join(text)}\n{question.format(name=name)}"
    return TaskContent(asked, str(value), (*map(str, values[1 : len(names)]), str(value + 1)))


NEEDLE_WORDINGS = {
    split: [f"{{before}}{hidden}{{after}}\n{asked}" for hidden, asked in entries]
    for split, entries in NEEDLES.items()
}
FAMILIES = (
    family("key_value", pairs, key_value, verifiers.number),
    family("needle", needle_operands, needle, verifiers.number, NEEDLE_WORDINGS),
)
