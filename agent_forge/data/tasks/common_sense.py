"""Common sense: what belongs together, what is bigger, what floats, what does not fit.

Its facts (common_sense.json) occur in every split; a subject with its choices and a wording do not.
Nobody would dispute them: kinds share no word, sizes that are compared are far apart, and a partner
in a relation fits its own subject and no other of the same table.
"""

from random import Random

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import SPLITS, Operands, TaskContent, family, load, scaled, wording

_facts = load("common_sense")
KINDS: dict[str, list[str]] = _facts["kinds"]
SIZES: dict[str, float] = _facts["centimetres"]  # the longest side of a usual one
FLOATS, SINKS = _facts["floats"], _facts["sinks"]
# A relation has pairs (subject: the one partner that fits), and questions for each split.
RELATIONS = _facts["relations"]


def odd_operands(level: int, rng: Random) -> Operands:
    """The word that does not fit, then words of one kind in alphabetical order."""
    kind, other = rng.sample(list(KINDS), 2)
    return (rng.choice(KINDS[other]), *sorted(rng.sample(KINDS[kind], scaled(level, 3, 7))))


def odd_one_out(operands: tuple[str, ...], level: int, split: str, rng: Random) -> TaskContent:
    odd, *others = operands
    return _choice(wording("odd_one_out", split, rng, items="{items}"), odd, others, rng)


def size_operands(level: int, rng: Random) -> Operands:
    """What is asked for (biggest or smallest), it, and others of half or twice its size."""
    most = rng.choice(("biggest", "smallest"))
    while True:
        things = rng.sample(list(SIZES), scaled(level, 3, 8))
        things.sort(key=SIZES.__getitem__, reverse=most == "biggest")
        first, second = sorted(SIZES[thing] for thing in things[:2])
        if second >= 2 * first:
            return (most, things[0], *sorted(things[1:]))


def size_order(operands: tuple[str, ...], level: int, split: str, rng: Random) -> TaskContent:
    most, *rest = operands
    article = {"sun": "the ", "moon": "the ", "planet Earth": ""}
    things = [article.get(t, "an " if t[0] in "aeio" else "a ") + t for t in rest]
    question = wording("size_order", split, rng, items=_listed(things, rng), most=most)
    return TaskContent(question, things[0], _some(things[1:], rng))


def float_operands(level: int, rng: Random) -> Operands:
    """Whether floating or sinking is asked for, the thing that does, and things that do not."""
    does = rng.choice(("floats", "sinks"))
    right, others = (FLOATS, SINKS) if does == "floats" else (SINKS, FLOATS)
    return (does, rng.choice(right), *sorted(rng.sample(others, scaled(level, 2, 7))))


def what_floats(operands: tuple[str, ...], level: int, split: str, rng: Random) -> TaskContent:
    does, answer, *others = operands
    template = wording("what_floats", split, rng, items="{items}", does=does)
    return _choice(template, answer, others, rng)


def relation_operands(level: int, rng: Random) -> Operands:
    """A relation, a subject, and partners of other subjects to choose among."""
    name = rng.choice(list(RELATIONS))
    pairs = RELATIONS[name]["pairs"]
    subject, *others = rng.sample(list(pairs), 1 + scaled(level, 2, 9))
    return (name, subject, *sorted(pairs[other] for other in others))


def multiple_choice(operands: tuple[str, ...], level: int, split: str, rng: Random) -> TaskContent:
    """A question with lettered choices; the answer is the letter."""
    name, subject, *others = operands
    right = RELATIONS[name]["pairs"][subject]
    options = rng.sample([right, *others], len(others) + 1)
    letters = [chr(65 + i) for i in range(len(options))]
    lines = (f"\n{letter}) {option}" for letter, option in zip(letters, options, strict=True))
    question = rng.choice(RELATIONS[name][split]).format(subject=subject) + "".join(lines)
    bad = tuple(rng.sample(letters, len(letters)))
    return TaskContent(question, letters[options.index(right)], bad)


def relation(operands: tuple[str, ...], level: int, split: str, rng: Random) -> TaskContent:
    """The same questions, with the choices in the text; the answer is in words."""
    name, subject, *others = operands
    question = rng.choice(RELATIONS[name][split]).format(subject=subject)
    return _choice(question + " ({items})", RELATIONS[name]["pairs"][subject], others, rng)


def _choice(template: str, answer: str, others: list[str], rng: Random) -> TaskContent:
    """A question that lists the choices; those that are wrong are its wrong answers."""
    items = _listed([answer, *others], rng)
    return TaskContent(template.format(items=items), answer, _some(others, rng))


def _listed(items: list[str], rng: Random) -> str:
    """The items in a random order: a, b or c."""
    mixed = rng.sample(items, len(items))
    return f"{', '.join(mixed[:-1])} or {mixed[-1]}"


def _some(items: list[str], rng: Random) -> tuple[str, ...]:
    """Three of the items, or all if there are fewer."""
    return tuple(rng.sample(items, min(3, len(items))))


def _relation_wordings(choices: str) -> dict[str, list[str]]:
    """The questions of all relations, each with the gap for its choices."""
    return {s: [text + choices for r in RELATIONS.values() for text in r[s]] for s in SPLITS}


_ITEMS, _OPTIONS = _relation_wordings(" ({items})"), _relation_wordings("\n{options}")
FAMILIES = (
    family("odd_one_out", odd_operands, odd_one_out, verifiers.words),
    family("size_order", size_operands, size_order, verifiers.words),
    family("what_floats", float_operands, what_floats, verifiers.words),
    family("relation", relation_operands, relation, verifiers.words, _ITEMS),
    family("multiple_choice", relation_operands, multiple_choice, verifiers.letter, _OPTIONS),
)
