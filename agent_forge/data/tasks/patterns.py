"""Patterns: rearranged symbols, and sequences to continue."""

from __future__ import annotations

from random import Random

from agent_forge.data.tasks import checks
from agent_forge.data.tasks.base import Build, Draw, Family, Operands, Question, scaled, wrong
from agent_forge.data.tasks.digits import DIGITS, spaced, symbol_item
from agent_forge.data.tasks.memory import LETTERS

KINDS = ("steps", "cycle", "powers", "zigzag", "growing")
UNLOCKED = (1, 1, 15, 30, 45)  # the level from which a kind occurs
WORDINGS = {
    "train": (
        "What comes next: {terms}, ...?",
        "Continue the pattern: {terms}, ...",
        "Which term follows {terms}?",
    ),
    "selection": (
        "A sequence begins {terms}. Name its next member.",
        "Someone wrote {terms} and stopped. What should be written now?",
    ),
    "verdict": (
        "Find the rule and give one more term: {terms}",
        "After {terms} there is a gap. What fills it?",
    ),
}


def letters(level: int, rng: Random) -> Operands:
    """A string of letters."""
    return ("".join(rng.choices(LETTERS, k=scaled(level, 5, 26))),)


def digits(level: int, rng: Random) -> Operands:
    """A string of digits."""
    return ("".join(rng.choices(DIGITS, k=scaled(level, 4, 22))),)


def rotate(operands: tuple[str], level: int, split: str, rng: Random) -> Question:
    """rot a b c d -> b c d a"""
    text = operands[0]
    return symbol_item(f"rot {spaced(text)}", text[1:] + text[0], LETTERS, rng)


def every_second(operands: tuple[str], level: int, split: str, rng: Random) -> Question:
    """skip a b c d e -> a c e: the first, the third and so on"""
    return symbol_item(f"skip {spaced(operands[0])}", operands[0][::2], LETTERS, rng)


def sort_digits(operands: tuple[str], level: int, split: str, rng: Random) -> Question:
    """sort 312 -> 123"""
    return symbol_item(f"sort {spaced(operands[0])}", "".join(sorted(operands[0])), DIGITS, rng)


def sequence(level: int, rng: Random) -> Operands:
    """A kind of sequence, and its terms; the last of them is asked for."""
    kinds = [kind for kind, first in zip(KINDS, UNLOCKED, strict=True) if level >= first]
    kind = rng.choice(kinds)
    size = 6 + scaled(level, 0, 4)
    start, step = rng.randint(0, 20 + 4 * level), rng.randint(1, 4 + level) * rng.choice((-1, 1))
    if kind == "cycle":
        cycle = rng.sample(LETTERS, scaled(level, 2, 7))
        shown = 2 * len(cycle) + int(rng.random() * len(cycle))
        return kind, *(cycle[i % len(cycle)] for i in range(shown + 1))
    if kind == "powers":
        base = rng.choice((2, 3))
        return kind, *((start + 1) * base**i for i in range(6))
    if kind == "zigzag":
        other = step + rng.randint(1, 9)
        terms = [start]
        for i in range(size + 1):
            terms.append(terms[-1] + (other if i % 2 else step))
        return kind, *terms
    bend = rng.randint(1, 3 + level // 10) if kind == "growing" else 0
    return kind, *(start + i * step + bend * i * (i - 1) // 2 for i in range(size))


def continue_pattern(operands: Operands, level: int, split: str, rng: Random) -> Question:
    """The next term of a sequence: even steps, cycles, powers, two steps in turn, growing steps."""
    kind, *terms, answer = operands
    question = rng.choice(WORDINGS[split]).format(terms=", ".join(map(str, terms)))
    if kind == "cycle":
        others = [letter for letter in dict.fromkeys(terms) if letter != answer]
        spare = rng.choice([letter for letter in LETTERS if letter not in terms])
        return Question(
            question, answer, "", wrong(answer, *rng.sample(others, len(others)), spare)
        )
    steps = [b - a for a, b in zip(terms, operands[2:], strict=True)]
    rule = f"the steps are {', '.join(f'{step:+d}' for step in steps[:-1])}; "
    candidates = (answer + 1, answer - 1, terms[-1] + steps[0], answer + 10, terms[-1])
    near = rng.sample([str(c) for c in dict.fromkeys(candidates) if c != answer], 3)
    sign, last = "-" if steps[-1] < 0 else "+", abs(steps[-1])
    worked = f"{rule}the next is {sign}{last}: {terms[-1]} {sign} {last} = {answer}"
    return Question(question, str(answer), worked, wrong(str(answer), *near))


def _symbols(name: str, category: str, summary: str, draw: Draw, build: Build) -> Family:
    return Family(name, "adaptive", category, summary, draw, build, checks.symbols, learnable=True)


FAMILIES = (
    _symbols("rotate", "lang", "a string with its first symbol moved to the end", letters, rotate),
    _symbols("every_second", "lang", "the first, third, fifth symbol", letters, every_second),
    _symbols("sort_digits", "math", "digits in rising order", digits, sort_digits),
    Family(
        "continue_pattern",
        "adaptive",
        "math",
        "the next term of a sequence",
        sequence,
        continue_pattern,
        checks.value,
        wordings=WORDINGS,
    ),
)
