"""Word problems of eight kinds, each with its own wordings in every split, and worked steps.

The templates (word_problems.json) know the numbers as {a}, {b}, ... in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.arithmetic import near_numbers
from agent_forge.data.tasks.base import SPLITS, Operands, Question, family, load
from agent_forge.data.tasks.memory import PEOPLE

_data = load("word_problems")
TEMPLATES = _data["problems"]  # kind -> first_level, and the texts of each split

Step = tuple[str, int]  # what is computed, and its value
Numbers = tuple[int, ...]


def some(count: int) -> Callable[[int, Random], Numbers]:
    """Draws so many numbers from 2 on."""
    return lambda largest, rng: tuple(rng.randint(2, largest) for _ in range(count))


def gain_numbers(largest: int, rng: Random) -> Numbers:
    a, b = rng.randint(2, largest), rng.randint(2, largest)
    return a, b, rng.randint(2, a + b - 1)


def sharing_numbers(largest: int, rng: Random) -> Numbers:
    each, children = rng.randint(3, largest), rng.randint(2, 12)
    return each * children, children, rng.randint(2, each - 1)


def travel_numbers(largest: int, rng: Random) -> Numbers:
    return rng.randint(3, 20 + largest // 4), rng.randint(2, 9), rng.randint(2, largest)


def shopping_numbers(largest: int, rng: Random) -> Numbers:
    count, price = rng.randint(2, 12), rng.randint(2, largest)
    return count, price, count * price + rng.randint(2, largest)


def packing_numbers(largest: int, rng: Random) -> Numbers:
    box = rng.randint(3, 12)
    return box * rng.randint(2, largest) + rng.randint(1, box - 1), box


def box_numbers(largest: int, rng: Random) -> Numbers:
    a, b, c, d = (rng.randint(2, largest) for _ in range(4))
    return a, b, c, d, rng.randint(2, a * b + c * d - 1)


def gained(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} + {b}", a + b), (f"{a + b} - {c}", a + b - c)]


def grouped(a: int, b: int) -> list[Step]:
    return [(f"{a} * {b}", a * b)]


def together(a: int, b: int) -> list[Step]:
    return [(f"{a} + {b}", a + b), (f"{a} + {a + b}", 2 * a + b)]


def shared(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} / {b}", a // b), (f"{a // b} - {c}", a // b - c)]


def travelled(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} * {b}", a * b), (f"{a * b} + {c}", a * b + c)]


def change(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} * {b}", a * b), (f"{c} - {a * b}", c - a * b)]


def left_over(a: int, b: int) -> list[Step]:
    full = a // b
    return [(f"{a} // {b}", full), (f"{full} * {b}", full * b), (f"{a} - {full * b}", a % b)]


def boxes(a: int, b: int, c: int, d: int, e: int) -> list[Step]:
    first, second = a * b, c * d
    products = [(f"{a} * {b}", first), (f"{c} * {d}", second)]
    both = first + second
    return [*products, (f"{first} + {second}", both), (f"{both} - {e}", both - e)]


# Each kind: how its numbers are drawn (largest, rng), and the steps of its solution.
PROBLEMS: dict[str, tuple[Callable[[int, Random], Numbers], Callable[..., list[Step]]]] = {
    "gain": (gain_numbers, gained),
    "groups": (some(2), grouped),
    "together": (some(2), together),
    "sharing": (sharing_numbers, shared),
    "travel": (travel_numbers, travelled),
    "shopping": (shopping_numbers, change),
    "packing": (packing_numbers, left_over),
    "boxes": (box_numbers, boxes),
}


def draw(level: int, rng: Random) -> Operands:
    """A kind of problem and its numbers; names and things are wording."""
    name = rng.choice([name for name, t in TEMPLATES.items() if t["first_level"] <= level])
    return name, *PROBLEMS[name][0](12 + level, rng)


def build(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """A problem in words, one computation a line in its steps."""
    name, *numbers = operands
    x, y = rng.sample(PEOPLE, 2)
    given = dict(zip("abcde", numbers, strict=False))
    template = rng.choice(TEMPLATES[name][split])
    text = template.format(x=x, y=y, things=rng.choice(_data["things"]), **given)
    steps = PROBLEMS[name][1](*numbers)
    answer = steps[-1][1]
    lines = "\n".join(f"{what} = {value}" for what, value in steps)
    return Question(text, str(answer), lines, near_numbers(answer, rng))


WORDINGS = {s: [text for t in TEMPLATES.values() for text in t[s]] for s in SPLITS}
FAMILIES = (family("word_problem", draw, build, verifiers.number, WORDINGS),)
