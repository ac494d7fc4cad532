"""Common sense: what belongs together, what is bigger, what floats, what does not fit.

The facts of the ontology occur in every split, as they do in life; what an item asks (its subject
together with the choices) and the wording do not.
"""

from __future__ import annotations

from random import Random

from agent_forge.data.tasks import checks
from agent_forge.data.tasks.base import SPLITS, Family, Operands, Question, scaled, wrong
from agent_forge.data.tasks.ontology import FLOATS, KINDS, RELATIONS, SINKS, SIZES

ODD_WORDINGS = {
    "train": (
        "Which word does not belong: {items}?",
        "One of these is not like the others: {items}. Which one?",
        "Find the odd one out: {items}.",
    ),
    "selection": ("All but one are of a kind: {items}. Name the exception.",),
    "verdict": ("Which would you leave out: {items}?", "{items}: what is misplaced?"),
}
SIZE_WORDINGS = {
    "train": (
        "Which is the {most}: {items}?",
        "Name the {most} of these: {items}.",
    ),
    "selection": ("Side by side, which one is {most}: {items}?",),
    "verdict": ("What would you call the {most}: {items}?",),
}
FLOAT_WORDINGS = {
    "train": (
        "Which of these {does} in water: {items}?",
        "Put into a pond, only one of these {does}: {items}. Which?",
    ),
    "selection": ("A child drops one into a lake, and it {does}: {items}?",),
    "verdict": ("In a full bathtub only one {does}: {items}. Name it.",),
}


def odd_operands(level: int, rng: Random) -> Operands:
    """The word that does not fit, then words of one kind in alphabetical order."""
    kind, other = rng.sample(list(KINDS), 2)
    size = scaled(level, 3, 7)
    return (rng.choice(KINDS[other]), *sorted(rng.sample(KINDS[kind], size)))


def odd_one_out(operands: tuple[str, ...], level: int, split: str, rng: Random) -> Question:
    """The one word of another kind."""
    odd, *rest = operands
    return Question(
        rng.choice(ODD_WORDINGS[split]).format(items=_listed([odd, *rest], rng)),
        odd,
        "",
        tuple(rng.sample(rest, 3)),
    )


def size_operands(level: int, rng: Random) -> Operands:
    """What is asked for (biggest or smallest), it, and others of half or twice its size."""
    most = rng.choice(("biggest", "smallest"))
    while True:
        things = rng.sample(list(SIZES), scaled(level, 3, 8))
        things.sort(key=SIZES.__getitem__, reverse=most == "biggest")
        first, second = sorted(SIZES[thing] for thing in things[:2])
        if second >= 2 * first:
            return (most, things[0], *sorted(things[1:]))


def size_order(operands: tuple[str, ...], level: int, split: str, rng: Random) -> Question:
    """The biggest or the smallest of some things."""
    most, answer, *rest = operands
    items = _listed([_one(thing) for thing in (answer, *rest)], rng)
    text = rng.choice(SIZE_WORDINGS[split]).format(most=most, items=items)
    return Question(text, _one(answer), "", tuple(map(_one, rng.sample(rest, min(3, len(rest))))))


def float_operands(level: int, rng: Random) -> Operands:
    """Whether floating or sinking is asked for, the thing that does, and things that do not."""
    does = rng.choice(("floats", "sinks"))
    right, others = (FLOATS, SINKS) if does == "floats" else (SINKS, FLOATS)
    return (does, rng.choice(right), *sorted(rng.sample(others, scaled(level, 2, 7))))


def what_floats(operands: tuple[str, ...], level: int, split: str, rng: Random) -> Question:
    """The one thing that floats, or the one that sinks."""
    does, answer, *rest = operands
    text = rng.choice(FLOAT_WORDINGS[split]).format(does=does, items=_listed([answer, *rest], rng))
    return Question(text, answer, "", tuple(rng.sample(rest, min(3, len(rest)))))


def relation_operands(level: int, rng: Random) -> Operands:
    """A relation, a subject, and partners of other subjects to choose among."""
    name = rng.choice(list(RELATIONS))
    pairs = RELATIONS[name].pairs
    subject, *others = rng.sample(list(pairs), 1 + scaled(level, 2, 9))
    return (name, subject, *sorted(pairs[other] for other in others))


def multiple_choice(operands: tuple[str, ...], level: int, split: str, rng: Random) -> Question:
    """A question with lettered choices; the answer is the letter."""
    name, subject, *others = operands
    relation = RELATIONS[name]
    right = relation.pairs[subject]
    options = rng.sample([right, *others], len(others) + 1)
    lines = "\n".join(f"{chr(65 + i)}) {option}" for i, option in enumerate(options))
    answer = chr(65 + options.index(right))
    asked = rng.choice(getattr(relation, split)).format(subject=subject)
    letters = [chr(65 + i) for i in range(len(options))]
    return Question(
        f"{asked}\n{lines}", answer, "", wrong(answer, *rng.sample(letters, len(letters)))
    )


def relation(operands: tuple[str, ...], level: int, split: str, rng: Random) -> Question:
    """The same questions, with the choices in the text; the answer is in words."""
    name, subject, *others = operands
    table = RELATIONS[name]
    right = table.pairs[subject]
    asked = rng.choice(getattr(table, split)).format(subject=subject)
    text = f"{asked} ({_listed([right, *others], rng)})"
    return Question(text, right, "", tuple(rng.sample(others, min(3, len(others)))))


def _one(thing: str) -> str:
    """A thing with its article."""
    if thing in ("sun", "moon", "planet Earth"):
        return thing if thing == "planet Earth" else f"the {thing}"
    return f"{'an' if thing[0] in 'aeio' else 'a'} {thing}"


def _listed(items: list[str], rng: Random) -> str:
    """The items in a random order: a, b or c."""
    mixed = rng.sample(items, len(items))
    return f"{', '.join(mixed[:-1])} or {mixed[-1]}"


RELATION_WORDINGS = {
    split: tuple(text for table in RELATIONS.values() for text in getattr(table, split))
    for split in SPLITS
}


FAMILIES = (
    Family(
        "odd_one_out",
        "adaptive",
        "cs",
        "the word of another kind",
        odd_operands,
        odd_one_out,
        checks.words,
        wordings=ODD_WORDINGS,
    ),
    Family(
        "size_order",
        "adaptive",
        "cs",
        "the biggest or smallest of some things",
        size_operands,
        size_order,
        checks.words,
        wordings=SIZE_WORDINGS,
    ),
    Family(
        "what_floats",
        "adaptive",
        "cs",
        "the one thing that floats, or sinks",
        float_operands,
        what_floats,
        checks.words,
        wordings=FLOAT_WORDINGS,
    ),
    Family(
        "relation",
        "adaptive",
        "cs",
        "what belongs to a thing: its use, home, material, opposite",
        relation_operands,
        relation,
        checks.words,
        wordings={s: tuple(f"{t} ({{items}})" for t in RELATION_WORDINGS[s]) for s in SPLITS},
    ),
    Family(
        "multiple_choice",
        "adaptive",
        "cs",
        "the letter of the right choice",
        relation_operands,
        multiple_choice,
        checks.letter,
        wordings={s: tuple(f"{t}\n{{options}}" for t in RELATION_WORDINGS[s]) for s in SPLITS},
    ),
)
