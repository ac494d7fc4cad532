"""Arithmetic with worked steps, as one writes it on paper."""

from itertools import zip_longest
from random import Random

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import Operands, TaskContent, family, scaled, wording


def two_sorted(level: int, rng: Random) -> Operands:
    """Two numbers, the smaller first: the order of a sum does not make another item."""
    size = 10 ** scaled(level, 2, 14)
    return tuple(sorted((rng.randrange(size), rng.randrange(size))))


def factors(level: int, rng: Random) -> Operands:
    """Two factors, the smaller first."""
    a = rng.randrange(2, 10 ** scaled(level, 2, 8))
    b = rng.randrange(2, 10 ** scaled(level, 1, 5) + 10)
    return (a, b) if a < b else (b, a)


def addition(operands: tuple[int, int], level: int, split: str, rng: Random) -> TaskContent:
    """A sum, column by column from the right."""
    a, b = operands if rng.random() < 0.5 else operands[::-1]
    lines, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        carried = f" + {carry}" if carry else ""
        carry = total // 10
        then = f", carry {carry}" if carry else ""
        lines.append(f"{x} + {y}{carried} = {total}, write {total % 10}{then}")
    if carry:
        lines.append(f"write {carry}")
    return number_question(wording("addition", split, rng, a=a, b=b), a + b, lines, rng)


def subtraction(operands: tuple[int, int], level: int, split: str, rng: Random) -> TaskContent:
    """A difference that is not negative, column by column from the right."""
    a, b = operands
    lines, borrow = [], 0
    for x, y in _columns(a, b):
        taken = f" - {borrow}" if borrow else ""
        lent = x - y - borrow < 0
        digit = (x - y - borrow) % 10
        then = ", borrow 1" if lent else ""
        lines.append(f"{x + 10 * lent} - {y}{taken} = {digit}, write {digit}{then}")
        borrow = int(lent)
    return number_question(wording("subtraction", split, rng, a=a, b=b), a - b, lines, rng)


def multiplication(operands: tuple[int, int], level: int, split: str, rng: Random) -> TaskContent:
    """A product, as the sum of one partial product for each digit."""
    small, large = operands
    a, b = operands if rng.random() < 0.5 else operands[::-1]
    lines, total = [], 0
    for place, digit in enumerate(reversed(str(small))):
        part = int(digit) * 10**place
        if part == 0:
            continue
        lines.append(f"{large} * {part} = {large * part}")
        if total:
            lines.append(f"{total} + {large * part} = {total + large * part}")
        total += large * part
    return number_question(wording("multiplication", split, rng, a=a, b=b), a * b, lines, rng)


def expression(level: int, rng: Random) -> Operands:
    """The first number, then operators with their numbers, applied from left to right."""
    size = 10 + level
    steps = []
    for _ in range(scaled(level, 2, 8)):
        operator = rng.choice("++--*")
        steps.append((operator, rng.randint(2, 9) if operator == "*" else rng.randint(1, size)))
    return rng.randint(1, size), *steps


def evaluate(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    """The value of an expression with brackets, one operation a line."""
    value, *steps = operands
    text, lines, is_sum = str(value), [], False
    for operator, number in steps:
        if operator == "*" and is_sum:
            text = f"({text})"
        text = f"{text} {operator} {number}"
        is_sum = operator != "*"
        after = {"+": value + number, "-": value - number, "*": value * number}[operator]
        lines.append(f"{value} {operator} {number} = {after}")
        value = after
    return number_question(wording("expression", split, rng, text=text), value, lines, rng)


def number_question(question: str, answer: int, lines: list[str], rng: Random) -> TaskContent:
    """A question; wrong are results of a slip: one off, a carry lost or gained, a digit missing."""
    place = 10 ** rng.randrange(1, max(2, len(str(abs(answer)))))
    candidates = [answer + 1, answer - 1, answer + place, answer - place, answer // 10, -answer]
    keep = [c for c in dict.fromkeys(candidates) if c != answer and (c >= 0 or answer < 0)]
    near = tuple(map(str, rng.sample(keep, min(3, len(keep)))))
    return TaskContent(question, str(answer), near, "\n".join(lines))


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of two numbers, from the right, as far as the longer one goes."""
    pairs = zip_longest(reversed(str(a)), reversed(str(b)), fillvalue="0")
    return [(int(x), int(y)) for x, y in pairs]


FAMILIES = (
    family("addition", two_sorted, addition, verifiers.number),
    family("subtraction", lambda *args: two_sorted(*args)[::-1], subtraction, verifiers.number),
    family("multiplication", factors, multiplication, verifiers.number),
    family("expression", expression, evaluate, verifiers.number),
)
