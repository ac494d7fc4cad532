"""Word problems of eight kinds, each with its own wordings in every split, and worked steps.

In word_problems.json a, b, ... are the numbers, and v, w and x what the first steps give.
"""

from operator import add, floordiv, mul, sub
from random import Random

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.arithmetic import number_question
from agent_forge.data.tasks.base import SPLITS, Operands, TaskContent, family, load
from agent_forge.data.tasks.memory import PEOPLE

_data = load("word_problems")
TEMPLATES = _data["problems"]  # kind -> first_level, steps, and the texts of each split
OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv, "//": floordiv}


def numbers_of(kind: str, largest: int, rng: Random) -> tuple[int, ...]:
    """Random numbers for a kind of problem, such that every step gives a whole number above 0."""

    def number(low: int = 2, high: int = largest) -> int:
        return rng.randint(low, high)

    match kind:
        case "gain":
            a, b = number(), number()
            return a, b, number(high=a + b - 1)
        case "sharing":
            each, children = number(3), number(high=12)
            return each * children, children, number(high=each - 1)
        case "travel":
            return number(3, 20 + largest // 4), number(high=9), number()
        case "shopping":
            count, price = number(high=12), number()
            return count, price, count * price + number()
        case "packing":
            box = number(3, 12)
            return box * number() + number(1, box - 1), box
        case "boxes":
            a, b, c, d = number(), number(), number(), number()
            return a, b, c, d, number(high=a * b + c * d - 1)
    return number(), number()


def draw(level: int, rng: Random) -> Operands:
    """A kind of problem and its numbers; names and things are wording."""
    kind = rng.choice([kind for kind, t in TEMPLATES.items() if t["first_level"] <= level])
    return kind, *numbers_of(kind, 12 + level, rng)


def build(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    """A problem in words, one computation a line in its steps."""
    kind, *numbers = operands
    x, y = rng.sample(PEOPLE, 2)
    values = dict(zip("abcde", numbers, strict=False))
    template = rng.choice(TEMPLATES[kind][split])
    text = template.format(x=x, y=y, things=rng.choice(_data["things"]), **values)
    lines, answer = [], 0
    for name, step in zip("vwxy", TEMPLATES[kind]["steps"], strict=False):
        left, sign, right = step.split()
        values[name] = answer = OPERATORS[sign](values[left], values[right])
        lines.append(f"{values[left]} {sign} {values[right]} = {answer}")
    return number_question(text, answer, lines, rng)


WORDINGS = {s: [text for t in TEMPLATES.values() for text in t[s]] for s in SPLITS}
FAMILIES = (family("word_problem", draw, build, verifiers.number, WORDINGS),)
