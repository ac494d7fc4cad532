"""Small Python functions: a chain of operations in words, its source, and assertions.

An operation is a phrase and a line of source (code.json), which also computes the tests; nothing
but these lines is evaluated. A wrong answer has one operation changed, and gives other results.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from agent_forge.data.tasks.base import Operands, TaskContent, family, load, scaled

_data = load("code")
WORDINGS = _data["wordings"]

RANDOM_INPUT: dict[str, Callable[[Random], Any]] = {
    "list": lambda r: r.choices(range(-25, 46), k=r.randint(3, 6)) + r.choices(range(9), k=3),
    "string": lambda r: " ".join(r.sample(_data["nouns"], r.randint(2, 4))),
    "number": lambda r: r.randint(-40, 160),
}
Chain = Sequence[tuple[Any, ...]]  # (operation, parameters...); the last names the result


@dataclass(frozen=True)
class ChainStep:
    """One step of a chain; {0} and {1} in phrase and source are its parameters."""

    phrase: str
    source: str
    between: Sequence[int] = ()  # the parameter is a whole number from this range
    letters: int = 0  # the parameters are so many different letters

    def parameters(self, rng: Random) -> tuple[Any, ...]:
        """Random parameters for the operation, as many as it takes."""
        if self.between:
            return (rng.randint(*self.between),)
        return tuple(rng.sample("aeilnorst", self.letters))

    def meaning(self, variable: str) -> Callable[..., Any]:
        """The function of the variable and the parameters that the line of source computes."""
        line = self.source.removeprefix("return ").removeprefix(f"{variable} = ")
        expression = re.sub(r'"?\{(\d)\}"?', r"_\1", line)
        function: Callable[..., Any] = eval(f"lambda {variable}, _0=None, _1=None: {expression}")
        return function


class FunctionKind:
    """What a function works on, the steps it may take, and what it may return."""

    def __init__(self, name: str) -> None:
        texts = _data["kinds"][name]
        self.variable, self.noun, self.input = texts["variable"], texts["noun"], RANDOM_INPUT[name]
        self.probes = texts["probes"]  # a function worth asking for differs on some of them
        self.steps, self.results = tuple(texts["steps"]), tuple(texts["results"])
        both = texts["steps"] | texts["results"]
        self.operations = {name: ChainStep(**text) for name, text in both.items()}
        self.meanings = {n: o.meaning(self.variable) for n, o in self.operations.items()}

    def run(self, chain: Chain, given: Any) -> Any:
        """What the function of a chain returns."""
        for name, *values in chain:
            given = self.meanings[name](given, *values)
        return given

    def source(self, chain: Chain) -> str:
        """A function of one line a step."""
        lines = (self.operations[name].source.format(*values) for name, *values in chain)
        return "\n".join([f"def solve({self.variable}):", *(f"    {line}" for line in lines)])


def draw(kind: FunctionKind, level: int, rng: Random) -> Operands:
    """Some steps, no two of a sort in a row, and the result; never one that is always the same."""
    while True:
        names = rng.choices(kind.steps, k=scaled(level, 1, 6))
        if any(a == b for a, b in itertools.pairwise(names)):
            continue
        names.append(rng.choice(kind.results))
        chain = tuple((name, *kind.operations[name].parameters(rng)) for name in names)
        first = kind.run(chain, kind.probes[0])
        if any(kind.run(chain, probe) != first for probe in kind.probes[1:]):
            return chain


def build(kind: FunctionKind, operands: Chain, level: int, split: str, rng: Random) -> TaskContent:
    """The chain in words, as source, and as assertions on inputs that tell it from others."""
    *steps, result = (kind.operations[name].phrase.format(*values) for name, *values in operands)
    gaps = {"variable": kind.variable, "noun": kind.noun, "result": result}
    question = rng.choice(WORDINGS[split]).format(steps=", then ".join(steps), **gaps)
    inputs = [kind.input(rng) for _ in range(6)]
    expected = [kind.run(operands, given) for given in inputs]
    if all(value == expected[0] for value in expected):
        inputs += kind.probes
        expected += [kind.run(operands, given) for given in kind.probes]
    pairs = zip(inputs, expected, strict=True)
    tests = tuple(f"assert solve({given!r}) == {value!r}" for given, value in pairs)
    bad: dict[str, None] = {}
    for _ in range(8):
        other = _changed(kind, operands, rng)
        if len(bad) < 2 and [kind.run(other, given) for given in inputs] != expected:
            bad[kind.source(other)] = None
    return TaskContent(question, kind.source(operands), tuple(bad), tests=tests)


def _changed(kind: FunctionKind, chain: Chain, rng: Random) -> Chain:
    """The chain with one operation replaced by another, or by itself with other parameters."""
    place = int(rng.random() * len(chain))
    name = rng.choice(kind.results if place == len(chain) - 1 else kind.steps)
    return (*chain[:place], (name, *kind.operations[name].parameters(rng)), *chain[place + 1 :])


FAMILIES = tuple(
    family(f"code_{name}", partial(draw, kind), partial(build, kind), None, WORDINGS)
    for name, kind in ((name, FunctionKind(name)) for name in RANDOM_INPUT)
)
