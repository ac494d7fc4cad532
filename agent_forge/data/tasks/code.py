"""Small Python functions: a chain of operations in words, its source, and assertions.

An operation is a phrase, a line of source and the function that it means. The tests come from the
functions, so nothing is ever executed to make an item. A wrong answer has one operation changed,
and its result differs on at least one of the inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from agent_forge.data.tasks.base import Operands, Question, TaskFamily, family, load, scaled

INPUTS = 6
_data = load("code")
WORDINGS = _data["wordings"]

Chain = Sequence[tuple[Any, ...]]  # (operation, parameters...); the last names the result


@dataclass(frozen=True)
class ChainStep:
    """One step of a chain; {0} and {1} in phrase and source are its parameters."""

    phrase: str
    source: str
    apply: Callable[..., Any]
    between: tuple[int, int] | None = None  # the parameter is a whole number from this range
    letters: int = 0  # the parameters are so many different letters

    def parameters(self, rng: Random) -> tuple[Any, ...]:
        """Random parameters for the operation, as many as it takes."""
        if self.between is not None:
            return (rng.randint(*self.between),)
        return tuple(rng.sample("aeilnorst", self.letters)) if self.letters else ()


@dataclass(frozen=True)
class ValueType:
    """What a function works on, the steps it may take, and what it may return."""

    variable: str
    noun: str
    steps: dict[str, ChainStep]
    results: dict[str, ChainStep]
    input: Callable[[Random], Any]
    probes: list[Any]  # inputs on which a function worth asking for gives different results


# What each operation of code.json does.
MEANINGS: dict[str, dict[str, Callable[..., Any]]] = {
    "list": {
        "above": lambda xs, k: [x for x in xs if x > k],
        "below": lambda xs, k: [x for x in xs if x < k],
        "multiples": lambda xs, k: [x for x in xs if x % k == 0],
        "others": lambda xs, k: [x for x in xs if x % k],
        "add": lambda xs, k: [x + k for x in xs],
        "times": lambda xs, k: [x * k for x in xs],
        "from": lambda xs, k: [k - x for x in xs],
        "square": lambda xs: [x * x for x in xs],
        "absolute": lambda xs: [abs(x) for x in xs],
        "sort": sorted,
        "turn": lambda xs: xs[::-1],
        "unique": lambda xs: list(dict.fromkeys(xs)),
        "skip": lambda xs, k: xs[k:],
        "list": lambda xs: xs,
        "sum": sum,
        "count": len,
        "largest": lambda xs: max(xs, default=0),
    },
    "string": {
        "turn": lambda s: s[::-1],
        "without": lambda s, c: s.replace(c, ""),
        "swap": lambda s, c, d: s.replace(c, d),
        "first": lambda s, k: s[:k],
        "last": lambda s, k: s[-k:],
        "skip": lambda s, k: s[k:],
        "repeat": lambda s, k: s * k,
        "vowels": lambda s: "".join(c for c in s if c not in "aeiou"),
        "append": lambda s, c: s + c,
        "prepend": lambda s, c: c + s,
        "second": lambda s: s[::2],
        "words": lambda s: " ".join(s.split()[::-1]),
        "string": lambda s: s,
        "upper": str.upper,
        "length": len,
        "count": lambda s, c: s.count(c),
    },
    "number": {
        "add": lambda n, k: n + k,
        "minus": lambda n, k: n - k,
        "times": lambda n, k: n * k,
        "modulo": lambda n, k: n % k,
        "halve": lambda n, k: n // k,
        "square": lambda n: n * n,
        "absolute": abs,
        "floor": max,
        "digits": lambda n: sum(int(d) for d in str(abs(n))),
        "number": lambda n: n,
        "text": str,
        "divides": lambda n, k: n % k == 0,
    },
}


def _kind(name: str, random_input: Callable[[Random], Any]) -> ValueType:
    """The kind of function that code.json has under this name."""
    texts, meanings = _data["kinds"][name], MEANINGS[name]
    steps, results = (
        {key: ChainStep(apply=meanings[key], **text) for key, text in texts[part].items()}
        for part in ("steps", "results")
    )
    return ValueType(
        texts["variable"], texts["noun"], steps, results, random_input, texts["probes"]
    )


def random_list(rng: Random) -> list[int]:
    return rng.choices(range(-25, 46), k=rng.randint(3, 6)) + rng.choices(range(9), k=3)


def random_string(rng: Random) -> str:
    return " ".join(rng.sample(_data["nouns"], rng.randint(2, 4)))


def random_number(rng: Random) -> int:
    return rng.randint(-40, 160)


def draw(kind: ValueType, level: int, rng: Random) -> Operands:
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


def build(kind: ValueType, operands: Chain, level: int, split: str, rng: Random) -> Question:
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


def source(kind: ValueType, chain: Chain) -> str:
    """A function of one line a step."""
    *steps, result = chain
    lines = [kind.steps[name].source.format(*values) for name, *values in steps]
    lines.append(kind.results[result[0]].source.format(*result[1:]))
    return "\n".join([f"def solve({kind.variable}):", *(f"    {line}" for line in lines)])


def run(kind: ValueType, chain: Chain, given: Any) -> Any:
    """What the function of a chain returns."""
    *steps, result = chain
    for name, *values in steps:
        given = kind.steps[name].apply(given, *values)
    return kind.results[result[0]].apply(given, *result[1:])


def _changed(kind: ValueType, chain: Chain, rng: Random) -> Chain:
    """The chain with one operation replaced by another, or by itself with other parameters."""
    place = int(rng.random() * len(chain))
    table = kind.results if place == len(chain) - 1 else kind.steps
    name = rng.choice(list(table))
    return (*chain[:place], (name, *table[name].parameters(rng)), *chain[place + 1 :])


def _family(name: str, random_input: Callable[[Random], Any]) -> TaskFamily:
    kind = _kind(name, random_input)
    return family(f"code_{name}", partial(draw, kind), partial(build, kind), None, WORDINGS)


FAMILIES = (
    _family("list", random_list),
    _family("string", random_string),
    _family("number", random_number),
)
