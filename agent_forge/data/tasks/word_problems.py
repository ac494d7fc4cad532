"""Word problems: a few plots, each with its own wordings in every split, and worked steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from agent_forge.data.tasks import checks
from agent_forge.data.tasks.arithmetic import near_numbers
from agent_forge.data.tasks.base import SPLITS, Family, Operands, Question
from agent_forge.data.tasks.memory import PEOPLE

THINGS = ("apples", "marbles", "stickers", "books", "shells", "cards", "pencils", "stamps", "nuts")

Step = tuple[str, int]  # what is computed, and its value
Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Plot:
    """One kind of problem. The templates know the numbers as {a}, {b}, ... in their order."""

    first_level: int
    numbers: Callable[[int, Random], Numbers]  # (largest, rng)
    solve: Callable[..., list[Step]]
    train: tuple[str, ...]
    selection: tuple[str, ...]
    verdict: tuple[str, ...]


def some(count: int) -> Callable[[int, Random], Numbers]:
    """So many numbers from 2 on."""
    return lambda largest, rng: tuple(rng.randint(2, largest) for _ in range(count))


def gained(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} + {b}", a + b), (f"{a + b} - {c}", a + b - c)]


def gain_numbers(largest: int, rng: Random) -> Numbers:
    a, b = rng.randint(2, largest), rng.randint(2, largest)
    return a, b, rng.randint(2, a + b - 1)


def groups(a: int, b: int) -> list[Step]:
    return [(f"{a} * {b}", a * b)]


def together(a: int, b: int) -> list[Step]:
    return [(f"{a} + {b}", a + b), (f"{a} + {a + b}", 2 * a + b)]


def sharing_numbers(largest: int, rng: Random) -> Numbers:
    each, children = rng.randint(3, largest), rng.randint(2, 12)
    return each * children, children, rng.randint(2, each - 1)


def shared(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} / {b}", a // b), (f"{a // b} - {c}", a // b - c)]


def travelled(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} * {b}", a * b), (f"{a * b} + {c}", a * b + c)]


def travel_numbers(largest: int, rng: Random) -> Numbers:
    return rng.randint(3, 20 + largest // 4), rng.randint(2, 9), rng.randint(2, largest)


def shopping_numbers(largest: int, rng: Random) -> Numbers:
    count, price = rng.randint(2, 12), rng.randint(2, largest)
    return count, price, count * price + rng.randint(2, largest)


def change(a: int, b: int, c: int) -> list[Step]:
    return [(f"{a} * {b}", a * b), (f"{c} - {a * b}", c - a * b)]


def packing_numbers(largest: int, rng: Random) -> Numbers:
    box = rng.randint(3, 12)
    return box * rng.randint(2, largest) + rng.randint(1, box - 1), box


def left_over(a: int, b: int) -> list[Step]:
    full = a // b
    return [(f"{a} // {b}", full), (f"{full} * {b}", full * b), (f"{a} - {full * b}", a % b)]


def box_numbers(largest: int, rng: Random) -> Numbers:
    a, b, c, d = (rng.randint(2, largest) for _ in range(4))
    return a, b, c, d, rng.randint(2, a * b + c * d - 1)


def boxes(a: int, b: int, c: int, d: int, e: int) -> list[Step]:
    first, second = a * b, c * d
    both = first + second
    return [
        (f"{a} * {b}", first),
        (f"{c} * {d}", second),
        (f"{first} + {second}", both),
        (f"{both} - {e}", both - e),
    ]


PLOTS = {
    "gain": Plot(
        1,
        gain_numbers,
        gained,
        (
            "{x} has {a} {things}. {x} finds {b} more and then gives {c} away. "
            "How many {things} does {x} have now?",
            "There are {a} {things} in a basket. {x} puts in {b} more. Later {y} takes out {c}. "
            "How many {things} are in the basket?",
        ),
        (
            "{x} owned {a} {things}, got {b} for a birthday and lost {c} on the way home. "
            "How many {things} are left?",
        ),
        (
            "On Monday {x} collected {a} {things}, on Tuesday {b} more, and on Wednesday {y} was "
            "given {c} of them. How many did {x} keep?",
        ),
    ),
    "groups": Plot(
        1,
        some(2),
        groups,
        (
            "{x} has {a} bags with {b} {things} in each. How many {things} is that in all?",
            "There are {a} tables. On every table lie {b} {things}. How many {things} are there?",
        ),
        ("Each of {a} children brings {b} {things}. How many {things} do they bring together?",),
        ("{x} fills {a} rows with {b} {things} a row. What is the number of {things}?",),
    ),
    "together": Plot(
        10,
        some(2),
        together,
        (
            "{x} has {a} {things}. {y} has {b} more than {x}. How many do they have together?",
            "{x} counts {a} {things} and {y} counts {b} more {things} than {x}. "
            "How many {things} do both count in total?",
        ),
        ("{y} owns {b} {things} more than {x}, who owns {a}. How many do the two own?",),
        ("A box holds {a} {things}, a crate {b} more than the box. How many are in both?",),
    ),
    "sharing": Plot(
        10,
        sharing_numbers,
        shared,
        (
            "{a} {things} are shared equally by {b} friends. Each of them gives {c} back. "
            "How many {things} does each friend keep?",
            "{x} deals {a} {things} to {b} children in equal parts. {y}, one of them, loses {c}. "
            "How many {things} has {y} left?",
        ),
        (
            "{b} cousins, {x} among them, divide {a} {things} evenly. Then {x} sells {c}. "
            "How many has {x} still?",
        ),
        (
            "A teacher splits {a} {things} into {b} equal heaps and takes {c} from one heap. "
            "How many {things} remain in that heap?",
        ),
    ),
    "travel": Plot(
        20,
        travel_numbers,
        travelled,
        (
            "{x} rides {a} km an hour for {b} hours and then walks {c} km. "
            "How many km is that altogether?",
            "A bus goes {a} km every hour. After {b} hours it has {c} km left to go. "
            "How many km long is the whole way?",
        ),
        (
            "A boat makes {a} km an hour. It sails {b} hours, then drifts {c} km. "
            "How many km is that?",
        ),
        (
            "At {a} km an hour, {x} drives {b} hours, and {y} the last {c} km. "
            "How many km are driven?",
        ),
    ),
    "shopping": Plot(
        30,
        shopping_numbers,
        change,
        (
            "{x} buys {a} {things} for {b} coins each and pays with {c} coins. "
            "How many coins does {x} get back?",
            "One of the {things} costs {b} coins. {x} takes {a} of them and has {c} coins. "
            "How many coins remain?",
        ),
        (
            "With {c} coins in the purse, {x} pays for {a} {things} at {b} coins each. "
            "How many coins stay in the purse?",
        ),
        (
            "The price is {b} coins apiece. {x} hands over {c} coins for {a} {things}. "
            "What is the change, in coins?",
        ),
    ),
    "packing": Plot(
        30,
        packing_numbers,
        left_over,
        (
            "{x} packs {a} {things} into boxes of {b}. How many {things} do not fill a box?",
            "{b} {things} fit into a bag. {x} has {a} and fills as many bags as possible. "
            "How many {things} are left over?",
        ),
        ("{a} {things} are tied into bundles of {b}. How many stay without a bundle?",),
        ("From {a} {things}, {x} makes full sets of {b}. How many are not part of any set?",),
    ),
    "boxes": Plot(
        50,
        box_numbers,
        boxes,
        (
            "A shop gets {a} boxes with {b} {things} each and {c} boxes with {d} {things} each. "
            "It sells {e}. How many {things} are left?",
            "{x} has {a} bags of {b} {things}, {y} has {c} bags of {d}. Together they give {e} "
            "away. How many {things} do they still have?",
        ),
        (
            "{a} shelves carry {b} {things} each, {c} more carry {d} each; {e} are taken off. "
            "How many {things} stay on the shelves?",
        ),
        (
            "In one week {x} made {b} {things} on each of {a} days, in the next {d} on each of "
            "{c} days, and used up {e}. How many {things} remain?",
        ),
    ),
}


def draw(level: int, rng: Random) -> Operands:
    """A plot and its numbers; names and things are wording."""
    names = [name for name, plot in PLOTS.items() if plot.first_level <= level]
    name = rng.choice(names)
    return name, *PLOTS[name].numbers(12 + level, rng)


def build(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """A problem in words, one computation a line in its steps."""
    name, *numbers = operands
    plot = PLOTS[name]
    x, y = rng.sample(PEOPLE, 2)
    given = dict(zip("abcde", numbers, strict=False))
    text = rng.choice(getattr(plot, split)).format(x=x, y=y, things=rng.choice(THINGS), **given)
    steps = plot.solve(*numbers)
    answer = steps[-1][1]
    lines = "\n".join(f"{what} = {value}" for what, value in steps)
    return Question(text, str(answer), lines, near_numbers(answer, rng))


FAMILIES = (
    Family(
        "word_problem",
        "reasoning",
        "math",
        "a short text that asks for a number",
        draw,
        build,
        checks.number,
        wordings={s: tuple(t for plot in PLOTS.values() for t in getattr(plot, s)) for s in SPLITS},
    ),
)
