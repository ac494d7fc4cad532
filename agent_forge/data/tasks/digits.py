"""Reasoning over single digits, place by place: what the smallest models learn in a minute.

Every symbol is one token: digits always are, other symbols are parted by blanks. No wording: the
splits share the form of the question and differ in the operands.
"""

from __future__ import annotations

from random import Random

from agent_forge.data.tasks import checks
from agent_forge.data.tasks.base import Build, Draw, Family, Operands, Question, scaled

DIGITS = "0123456789"
RELATIONS = "<=>"


def two_numbers(level: int, rng: Random) -> Operands:
    """Two numbers of the same length."""
    size = scaled(level, 3, 22)
    both = "".join(rng.choices(DIGITS, k=2 * size))
    return both[:size], both[size:]


def unordered_numbers(level: int, rng: Random) -> Operands:
    """Two numbers of which the order does not matter: the smaller is named first."""
    return tuple(sorted(two_numbers(level, rng)))


def shift_and_number(level: int, rng: Random) -> Operands:
    """What to add (1 to 4), and a number."""
    return rng.randrange(1, 5), "".join(rng.choices(DIGITS, k=scaled(level, 3, 24)))


def maximum(operands: tuple[str, str], level: int, split: str, rng: Random) -> Question:
    """max 314:271 -> 374"""
    a, b = operands if rng.random() < 0.5 else operands[::-1]
    return symbol_item(f"max {a}:{b}", "".join(map(max, a, b)), DIGITS, rng)


def compare(operands: tuple[str, str], level: int, split: str, rng: Random) -> Question:
    """cmp 314:217 -> > = <"""
    a, b = operands
    answer = "".join("<" if x < y else ">" if x > y else "=" for x, y in zip(a, b, strict=True))
    return symbol_item(f"cmp {a}:{b}", answer, RELATIONS, rng)


def shift(operands: tuple[int, str], level: int, split: str, rng: Random) -> Question:
    """add 3:481 -> 714, each digit on its own, modulo 10"""
    k, digits = operands
    answer = "".join(DIGITS[(int(d) + k) % 10] for d in digits)
    return symbol_item(f"add {k}:{digits}", answer, DIGITS, rng)


def spaced(symbols: str) -> str:
    """Each symbol on its own; digits are without blanks."""
    return symbols if symbols.isdigit() else " ".join(symbols)


def symbol_item(question: str, answer: str, alphabet: str, rng: Random) -> Question:
    """An item whose wrong answers have one wrong symbol, each at another place where it fits."""
    size, letters = len(answer), len(alphabet)
    first = int(rng.random() * size)
    turn = 1 + int(rng.random() * (letters - 1))
    places = sorted({(first + i) % size for i in range(min(3, size))})
    bad = tuple(
        spaced(
            answer[:i] + alphabet[(alphabet.index(answer[i]) + turn) % letters] + answer[i + 1 :]
        )
        for i in places
    )
    return Question(question, spaced(answer), "", bad)


def _family(name: str, summary: str, draw: Draw, build: Build) -> Family:
    return Family(name, "reasoning", "math", summary, draw, build, checks.symbols, learnable=True)


FAMILIES = (
    _family(
        "digit_max", "the larger digit at each place of two numbers", unordered_numbers, maximum
    ),
    _family("digit_compare", "<, = or > at each place of two numbers", two_numbers, compare),
    _family("digit_shift", "add k to each digit, modulo 10", shift_and_number, shift),
)
