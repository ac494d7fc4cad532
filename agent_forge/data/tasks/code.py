"""Small Python functions: a chain of operations in words, its source, and assertions.

An operation is a phrase, a line of source and the function that it means. The tests come from the
functions, so nothing is ever executed to make an item. A wrong answer has one operation changed,
and its result differs on at least one of the inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from agent_forge.data.tasks.base import Family, Operands, Question, scaled

INPUTS = 6
WORDINGS = {
    "train": (
        "Write a Python function solve({variable}). It is given {noun}: {steps}. Return {result}.",
        "Define solve({variable}) in Python for {noun}. It should {steps}, and return {result}.",
    ),
    "selection": (
        "In Python, solve({variable}) receives {noun}. Make it {steps}, and give back {result}.",
    ),
    "verdict": (
        "A function solve({variable}) in Python shall take {noun}, {steps}, and hand back "
        "{result}. Write it.",
    ),
}


@dataclass(frozen=True)
class Operation:
    """One step of a chain; {0} and {1} in phrase and source are its parameters."""

    phrase: str
    source: str
    apply: Callable[..., Any]
    parameters: Callable[[Random], tuple[Any, ...]] = lambda rng: ()


@dataclass(frozen=True)
class Kind:
    """What a function works on, the steps it may take, and what it may return."""

    variable: str
    noun: str
    steps: dict[str, Operation]
    results: dict[str, Operation]
    input: Callable[[Random], Any]
    probes: list[Any]  # inputs on which a function worth asking for gives different results


def between(low: int, high: int) -> Callable[[Random], tuple[int]]:
    """One whole number as parameter."""
    return lambda rng: (rng.randint(low, high),)


def characters(count: int) -> Callable[[Random], tuple[str, ...]]:
    """Different letters as parameters."""
    return lambda rng: tuple(rng.sample("aeilnorst", count))


NOUNS = ("tall", "stone", "river", "garden", "lantern", "oil", "street", "iron", "salt", "nation")
LISTS = Kind(
    "xs",
    "a list of whole numbers",
    {
        "above": Operation(
            "keep only the numbers greater than {0}",
            "xs = [x for x in xs if x > {0}]",
            lambda xs, k: [x for x in xs if x > k],
            between(-9, 30),
        ),
        "below": Operation(
            "keep only the numbers less than {0}",
            "xs = [x for x in xs if x < {0}]",
            lambda xs, k: [x for x in xs if x < k],
            between(-9, 30),
        ),
        "multiples": Operation(
            "keep only the numbers that {0} divides",
            "xs = [x for x in xs if x % {0} == 0]",
            lambda xs, k: [x for x in xs if x % k == 0],
            between(2, 6),
        ),
        "others": Operation(
            "drop the numbers that {0} divides",
            "xs = [x for x in xs if x % {0} != 0]",
            lambda xs, k: [x for x in xs if x % k],
            between(2, 6),
        ),
        "add": Operation(
            "add {0} to each number",
            "xs = [x + {0} for x in xs]",
            lambda xs, k: [x + k for x in xs],
            between(1, 40),
        ),
        "times": Operation(
            "multiply each number by {0}",
            "xs = [x * {0} for x in xs]",
            lambda xs, k: [x * k for x in xs],
            between(2, 20),
        ),
        "from": Operation(
            "subtract each number from {0}",
            "xs = [{0} - x for x in xs]",
            lambda xs, k: [k - x for x in xs],
            between(1, 40),
        ),
        "square": Operation(
            "square each number",
            "xs = [x * x for x in xs]",
            lambda xs: [x * x for x in xs],
        ),
        "absolute": Operation(
            "take the absolute value of each number",
            "xs = [abs(x) for x in xs]",
            lambda xs: [abs(x) for x in xs],
        ),
        "sort": Operation("sort the numbers in rising order", "xs = sorted(xs)", sorted),
        "turn": Operation("reverse the list", "xs = xs[::-1]", lambda xs: xs[::-1]),
        "unique": Operation(
            "keep only the first of equal numbers",
            "xs = list(dict.fromkeys(xs))",
            lambda xs: list(dict.fromkeys(xs)),
        ),
        "skip": Operation(
            "leave out the first {0} of the list",
            "xs = xs[{0}:]",
            lambda xs, k: xs[k:],
            between(1, 4),
        ),
    },
    {
        "list": Operation("the resulting list", "return xs", lambda xs: xs),
        "sum": Operation("the sum of the result", "return sum(xs)", sum),
        "count": Operation("how many numbers there are in the end", "return len(xs)", len),
        "largest": Operation(
            "the largest number of the result, or 0 if it is empty",
            "return max(xs, default=0)",
            lambda xs: max(xs, default=0),
        ),
    },
    lambda rng: rng.choices(range(-25, 46), k=rng.randint(3, 6)) + rng.choices(range(9), k=3),
    [[-25, 12, 7, 7, 30, 40, -8], [5, -11, 3, 18, 36, 44, 5, 60], [], [-6, 24, -18, 20, 9, 1, 2]],
)

STRINGS = Kind(
    "s",
    "a string of lower-case words",
    {
        "turn": Operation("reverse the string", "s = s[::-1]", lambda s: s[::-1]),
        "without": Operation(
            'remove every letter "{0}"',
            's = s.replace("{0}", "")',
            lambda s, c: s.replace(c, ""),
            characters(1),
        ),
        "swap": Operation(
            'replace every letter "{0}" by "{1}"',
            's = s.replace("{0}", "{1}")',
            lambda s, c, d: s.replace(c, d),
            characters(2),
        ),
        "first": Operation(
            "keep only the first {0} characters", "s = s[:{0}]", lambda s, k: s[:k], between(3, 12)
        ),
        "last": Operation(
            "keep only the last {0} characters", "s = s[-{0}:]", lambda s, k: s[-k:], between(3, 12)
        ),
        "skip": Operation(
            "leave out the first {0} characters", "s = s[{0}:]", lambda s, k: s[k:], between(1, 6)
        ),
        "repeat": Operation(
            "repeat the string {0} times", "s = s * {0}", lambda s, k: s * k, between(2, 5)
        ),
        "vowels": Operation(
            "remove the vowels a, e, i, o and u",
            's = "".join(c for c in s if c not in "aeiou")',
            lambda s: "".join(c for c in s if c not in "aeiou"),
        ),
        "append": Operation(
            'append the letter "{0}"', 's = s + "{0}"', lambda s, c: s + c, characters(1)
        ),
        "prepend": Operation(
            'put the letter "{0}" in front', 's = "{0}" + s', lambda s, c: c + s, characters(1)
        ),
        "second": Operation(
            "keep every second character, from the first on", "s = s[::2]", lambda s: s[::2]
        ),
        "words": Operation(
            "reverse the order of the words",
            's = " ".join(s.split()[::-1])',
            lambda s: " ".join(s.split()[::-1]),
        ),
    },
    {
        "string": Operation("the resulting string", "return s", lambda s: s),
        "upper": Operation("the result in upper case", "return s.upper()", str.upper),
        "length": Operation("the length of the result", "return len(s)", len),
        "count": Operation(
            'how often "{0}" occurs in the result',
            'return s.count("{0}")',
            lambda s, c: s.count(c),
            characters(1),
        ),
    },
    lambda rng: " ".join(rng.sample(NOUNS, rng.randint(2, 4))),
    ["stone river", "tall oil lantern salt", "garden iron nation", "street"],
)

NUMBERS = Kind(
    "n",
    "a whole number",
    {
        "add": Operation("add {0}", "n = n + {0}", lambda n, k: n + k, between(1, 60)),
        "minus": Operation("subtract {0}", "n = n - {0}", lambda n, k: n - k, between(1, 60)),
        "times": Operation("multiply by {0}", "n = n * {0}", lambda n, k: n * k, between(2, 30)),
        "modulo": Operation(
            "take the remainder of division by {0}",
            "n = n % {0}",
            lambda n, k: n % k,
            between(5, 60),
        ),
        "halve": Operation(
            "divide by {0}, rounding down", "n = n // {0}", lambda n, k: n // k, between(2, 9)
        ),
        "square": Operation("square it", "n = n * n", lambda n: n * n),
        "absolute": Operation("take its absolute value", "n = abs(n)", abs),
        "floor": Operation(
            "replace it by {0} if it is less than {0}",
            "n = max(n, {0})",
            max,
            between(1, 30),
        ),
        "digits": Operation(
            "take the sum of its digits, without the sign",
            "n = sum(int(d) for d in str(abs(n)))",
            lambda n: sum(int(d) for d in str(abs(n))),
        ),
    },
    {
        "number": Operation("the result", "return n", lambda n: n),
        "text": Operation("the result as a string", "return str(n)", str),
        "divides": Operation(
            "whether {0} divides the result",
            "return n % {0} == 0",
            lambda n, k: n % k == 0,
            between(2, 5),
        ),
    },
    lambda rng: rng.randint(-40, 160),
    [-37, 0, 1, 12, 30, 59, 123, 160],
)

Chain = Sequence[tuple[Any, ...]]  # (operation, parameters...); the last names the result


def draw(kind: Kind, level: int, rng: Random) -> Operands:
    """Some steps, no two of a sort in a row, and the result; never one that is always the same."""
    while True:
        names = rng.choices(tuple(kind.steps), k=scaled(level, 1, 6))
        if any(a == b for a, b in itertools.pairwise(names)):
            continue
        result = rng.choice(tuple(kind.results))
        chain = [(name, *kind.steps[name].parameters(rng)) for name in names]
        chain.append((result, *kind.results[result].parameters(rng)))
        first = run(kind, chain, kind.probes[0])
        if any(run(kind, chain, probe) != first for probe in kind.probes[1:]):
            return tuple(chain)


def build(kind: Kind, operands: Chain, split: str, rng: Random) -> Question:
    """The chain in words, as source, and as assertions on inputs that tell it from others."""
    *steps, result = operands
    phrases = [kind.steps[name].phrase.format(*values) for name, *values in steps]
    question = rng.choice(WORDINGS[split]).format(
        variable=kind.variable,
        noun=kind.noun,
        steps=", then ".join(phrases),
        result=kind.results[result[0]].phrase.format(*result[1:]),
    )
    inputs = [kind.input(rng) for _ in range(INPUTS)]
    expected = [run(kind, operands, given) for given in inputs]
    if all(value == expected[0] for value in expected):
        inputs += kind.probes
        expected += [run(kind, operands, given) for given in kind.probes]
    tests = tuple(
        f"assert solve({given!r}) == {value!r}"
        for given, value in zip(inputs, expected, strict=True)
    )
    bad: dict[str, None] = {}
    for _ in range(8):
        other = _changed(kind, operands, rng)
        if len(bad) < 2 and [run(kind, other, given) for given in inputs] != expected:
            bad[source(kind, other)] = None
    return Question(question, source(kind, operands), "", tuple(bad), tests)


def source(kind: Kind, chain: Chain) -> str:
    """A function of one line a step."""
    *steps, result = chain
    lines = [kind.steps[name].source.format(*values) for name, *values in steps]
    lines.append(kind.results[result[0]].source.format(*result[1:]))
    return "\n".join([f"def solve({kind.variable}):", *(f"    {line}" for line in lines)])


def run(kind: Kind, chain: Chain, given: Any) -> Any:
    """What the function of a chain returns."""
    *steps, result = chain
    for name, *values in steps:
        given = kind.steps[name].apply(given, *values)
    return kind.results[result[0]].apply(given, *result[1:])


def _changed(kind: Kind, chain: Chain, rng: Random) -> Chain:
    """The chain with one operation replaced by another, or by itself with other parameters."""
    place = int(rng.random() * len(chain))
    table = kind.results if place == len(chain) - 1 else kind.steps
    name = rng.choice(list(table))
    return (*chain[:place], (name, *table[name].parameters(rng)), *chain[place + 1 :])


def _family(name: str, summary: str, kind: Kind) -> Family:
    return Family(
        name,
        "code",
        "code",
        summary,
        lambda level, rng: draw(kind, level, rng),
        lambda operands, level, split, rng: build(kind, operands, split, rng),
        None,
        wordings=WORDINGS,
    )


FAMILIES = (
    _family("code_list", "a function over a list of numbers", LISTS),
    _family("code_string", "a function over a string", STRINGS),
    _family("code_number", "a function over a number", NUMBERS),
)
