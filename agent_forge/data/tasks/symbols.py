"""Bare symbols: digits place by place, copies, positions, known facts, sequences to continue.

Every symbol is one token: digits always are, other symbols are parted by blanks. The splits share
the form of a question and differ in the operands. `facts` is closed book: every fact of its table
occurs in training, only the combinations that are asked for differ between the splits.
"""

from collections.abc import Callable
from itertools import accumulate
from random import Random

from agent_forge.data.tasks import verifiers
from agent_forge.data.tasks.base import Operands, TaskContent, TaskFamily, family, scaled, wording

DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
QUESTIONS = tuple(letter + digit for letter in LETTERS for digit in DIGITS)
# "b3" -> a letter: what the model has to know by heart
FACTS = dict(zip(QUESTIONS, Random(260).choices(LETTERS, k=len(QUESTIONS)), strict=True))
Change = Callable[[str], str]
SEQUENCES = {"steps": 1, "cycle": 1, "powers": 15, "zigzag": 30, "growing": 45}  # from which level


def spaced(symbols: str) -> str:
    """The symbols with blanks between them; digits stay without."""
    return symbols if symbols.isdigit() else " ".join(symbols)


def symbol_question(question: str, answer: str, alphabet: str, rng: Random) -> TaskContent:
    """A question whose wrong answers have one wrong symbol, each at another place."""
    size, letters = len(answer), len(alphabet)
    first = int(rng.random() * size)
    turn = 1 + int(rng.random() * (letters - 1))
    bad = []
    for i in sorted({(first + i) % size for i in range(min(3, size))}):
        other = alphabet[(alphabet.index(answer[i]) + turn) % letters]
        bad.append(spaced(answer[:i] + other + answer[i + 1 :]))
    return TaskContent(question, spaced(answer), tuple(bad))


def change_string(
    name: str, command: str, change: Change, shortest: int = 4, longest: int = 26, of: str = LETTERS
) -> TaskFamily:
    """`command` and a string of some symbols, longer at higher levels; the answer is its change."""

    def draw(level: int, rng: Random) -> Operands:
        return ("".join(rng.choices(of, k=scaled(level, shortest, longest))),)

    def build(operands: tuple[str], level: int, split: str, rng: Random) -> TaskContent:
        text = operands[0]
        return symbol_question(f"{command} {spaced(text)}", change(text), of, rng)

    return family(name, draw, build, verifiers.symbols)


def two_numbers(level: int, rng: Random) -> Operands:
    """Two numbers of the same length."""
    size = scaled(level, 3, 22)
    both = "".join(rng.choices(DIGITS, k=2 * size))
    return both[:size], both[size:]


def maximum(operands: tuple[str, str], level: int, split: str, rng: Random) -> TaskContent:
    """max 314:271 -> 374"""
    a, b = operands if rng.random() < 0.5 else operands[::-1]
    return symbol_question(f"max {a}:{b}", "".join(map(max, a, b)), DIGITS, rng)


def compare(operands: tuple[str, str], level: int, split: str, rng: Random) -> TaskContent:
    """cmp 314:217 -> > = <"""
    a, b = operands
    answer = "".join("<" if x < y else ">" if x > y else "=" for x, y in zip(a, b, strict=True))
    return symbol_question(f"cmp {a}:{b}", answer, "<=>", rng)


def shift_and_number(level: int, rng: Random) -> Operands:
    """What to add (1 to 4), and a number."""
    return rng.randrange(1, 5), "".join(rng.choices(DIGITS, k=scaled(level, 3, 24)))


def shift(operands: tuple[int, str], level: int, split: str, rng: Random) -> TaskContent:
    """add 3:481 -> 714, each digit on its own, modulo 10"""
    k, digits = operands
    answer = "".join(DIGITS[(int(d) + k) % 10] for d in digits)
    return symbol_question(f"add {k}:{digits}", answer, DIGITS, rng)


def letters_and_places(level: int, rng: Random) -> Operands:
    """A string of letters, and places in it (from 1)."""
    size = scaled(level, 4, 24)
    places = rng.choices(range(1, size + 1), k=scaled(level, 3, 9))
    return ("".join(rng.choices(LETTERS, k=size)), *places)


def letter_at(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    """at 3 1 3 : a b c d -> c a c"""
    text, *places = operands
    question = f"at {' '.join(map(str, places))} : {spaced(text)}"
    return symbol_question(question, "".join(text[i - 1] for i in places), LETTERS, rng)


def some_facts(level: int, rng: Random) -> Operands:
    return tuple(rng.choices(QUESTIONS, k=scaled(level, 2, 12)))


def facts(operands: tuple[str, ...], level: int, split: str, rng: Random) -> TaskContent:
    """fact b 3 , q 7 -> two letters of the table"""
    question = "fact " + " , ".join(map(spaced, operands))
    return symbol_question(question, "".join(map(FACTS.__getitem__, operands)), LETTERS, rng)


def sequence(level: int, rng: Random) -> Operands:
    """A kind of sequence, and its terms; the last of them is asked for."""
    kind = rng.choice([kind for kind, first in SEQUENCES.items() if level >= first])
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
        steps = (other if i % 2 else step for i in range(size + 1))
        return kind, *accumulate(steps, initial=start)
    bend = rng.randint(1, 3 + level // 10) if kind == "growing" else 0
    return kind, *(start + i * step + bend * i * (i - 1) // 2 for i in range(size))


def continue_pattern(operands: Operands, level: int, split: str, rng: Random) -> TaskContent:
    """The next term of a sequence: even steps, cycles, powers, two steps in turn, growing steps."""
    kind, *terms, answer = operands
    question = wording("continue_pattern", split, rng, terms=", ".join(map(str, terms)))
    if kind == "cycle":
        others = [letter for letter in dict.fromkeys(terms) if letter != answer]
        spare = rng.choice([letter for letter in LETTERS if letter not in terms])
        return TaskContent(question, answer, (*rng.sample(others, len(others)), spare))
    steps = [b - a for a, b in zip(terms, operands[2:], strict=True)]
    rule = f"the steps are {', '.join(f'{step:+d}' for step in steps[:-1])}; "
    candidates = (answer + 1, answer - 1, terms[-1] + steps[0], answer + 10, terms[-1])
    near = rng.sample([str(c) for c in dict.fromkeys(candidates) if c != answer], 3)
    sign, last = "-" if steps[-1] < 0 else "+", abs(steps[-1])
    worked = f"{rule}the next is {sign}{last}: {terms[-1]} {sign} {last} = {answer}"
    return TaskContent(question, str(answer), tuple(near), worked)


FAMILIES = (
    family("digit_max", lambda *a: tuple(sorted(two_numbers(*a))), maximum, verifiers.symbols),
    family("digit_compare", two_numbers, compare, verifiers.symbols),
    family("digit_shift", shift_and_number, shift, verifiers.symbols),
    family("letter_at", letters_and_places, letter_at, verifiers.symbols),
    family("facts", some_facts, facts, verifiers.symbols),
    change_string("copy", "copy", lambda text: text),
    change_string("reverse", "rev", lambda text: text[::-1]),
    change_string("rotate", "rot", lambda text: text[1:] + text[0], 5),
    change_string("every_second", "skip", lambda text: text[::2], 5),
    change_string("sort_digits", "sort", lambda text: "".join(sorted(text)), 4, 22, DIGITS),
    family("continue_pattern", sequence, continue_pattern, verifiers.value),
)
