"""Recipes of merges that are broken, run code, or never end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.faults.hostile_goods import (
    EITHER,
    REFUSED,
    RIGHT,
    TOO_LARGE,
    Case,
    Change,
    canary_of,
    directory,
    fifo,
    linked,
    pickled,
    singing,
    text,
)

TWO = "models:\n- model: A\n- model: B\n"
LINEAR = f"merge_method: linear\n{TWO}"
BASED = "merge_method: ties\nbase_model: A\nmodels:\n- model: B\n"
STACKED = "merge_method: passthrough\nslices:\n"


def recipe(name: str, written: str | bytes, allowed: frozenset[int] = REFUSED, **rest: Any) -> Case:
    """A recipe: A and B are good models, MAKE is the canary."""

    def make(folder: Path, good: Path) -> str:
        path = folder / rest.get("file", "recipe.yml")
        if isinstance(written, bytes):
            path.write_bytes(written)
            return str(path)
        named = written.replace("A\n", f"{good}\n").replace("B\n", f"{good.parent / 'b'}\n")
        path.write_text(named.replace("MAKE", repr(str(canary_of(folder)))))
        return str(path)

    kept = {k: v for k, v in rest.items() if k != "file"}
    return Case(f"recipe: {name}", "recipe", make, allowed, **kept)


def weighted(value: str) -> str:
    """A linear merge with this weight."""
    return LINEAR.replace("A\n", f"A\n  parameters: {{weight: {value}}}\n")


def sliced(first: str, model: str = "A\n") -> str:
    return f"{STACKED}- sources:\n  - layer_range: {first}\n    model: {model}"


def _laughs() -> str:
    """Nine lines of which each holds the one before nine times."""
    lines = ['a0: &a0 ["ha"]']
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(lines) + f"\n{LINEAR}"


def _many_slices() -> str:
    one = "- sources:\n  - layer_range: [0, 1]\n    model: A\n"
    return STACKED + one * 10_000


RECIPES = (
    recipe("nothing is wrong", LINEAR, RIGHT),
    recipe("nothing is wrong with slices", sliced("[0, 2]"), RIGHT),
    recipe("nothing is wrong with JSON", json.dumps({"merge_method": "linear"}), file="r.json"),
    recipe("empty", ""),
    recipe("only a comment", "# nothing\n"),
    recipe("a list", "- a\n- b\n"),
    recipe("a text", "merge these two\n"),
    recipe("no YAML", "{a: [b\n"),
    recipe("no UTF-8", b"merge_method: \xff\xfe\n"),
    recipe("UTF-16", LINEAR.encode("utf-16")),
    recipe("zeros", b"merge_method: linear\0\0"),
    recipe("a tab", "merge_method:\tlinear\n\tmodels: []\n"),
    recipe("code", f"{LINEAR}seed: !!python/object/apply:os.mkdir [MAKE]\n"),
    recipe("code by name", f"{LINEAR}seed: !!python/name:os.mkdir ''\n"),
    recipe("code by module", f"{LINEAR}seed: !!python/module:evil ''\n"),
    recipe("code by new", f"{LINEAR}seed: !!python/object/new:os.mkdir [MAKE]\n"),
    recipe("an unknown tag", f"{LINEAR}seed: !evil 1\n"),
    recipe("many laughs", _laughs()),
    recipe("an alias of itself", "models: &a [*a]\nmerge_method: linear\n"),
    recipe("a mapping of itself", "models: &a {x: *a}\nmerge_method: linear\n"),
    recipe("merged keys", "a: &a {merge_method: linear}\n<<: *a\n" + TWO, allowed=EITHER),
    recipe("deep", "models: " + "[" * 20_000 + "\n"),
    recipe("deep in JSON", '{"models": ' + "[" * 100_000, file="r.json"),
    recipe("NaN in JSON", '{"merge_method": "linear", "seed": NaN}', file="r.json"),
    recipe("2 MB", LINEAR + "# x\n" * 500_000),
    recipe("a repeated key", f"{LINEAR}merge_method: ties\n"),
    recipe("many digits", f"{LINEAR}seed: {'9' * 6000}\n"),
    recipe("an unknown method", LINEAR.replace("linear", "evil"), says="evil"),
    recipe("a method that is a list", LINEAR.replace("linear", "[linear]")),
    recipe("no method", TWO),
    recipe("an unknown key", f"{LINEAR}evil: 1\n", says="evil"),
    recipe("no models", "merge_method: linear\n"),
    recipe("models of nothing", "merge_method: linear\nmodels: []\n"),
    recipe("models that are a text", "merge_method: linear\nmodels: x\n"),
    recipe("models of numbers", "merge_method: linear\nmodels: [1, 2]\n"),
    recipe("a model that is nothing", "merge_method: linear\nmodels:\n- model: A\n- model:\n"),
    recipe(
        "a model that is not there", "merge_method: linear\nmodels:\n- model: A\n- model: /no\n"
    ),
    recipe("a model that is an address", LINEAR.replace("- model: B", "- model: https://x.org/y")),
    recipe("a model of the hub", LINEAR.replace("- model: B", "- model: someone/evil")),
    recipe("a model that is a device", LINEAR.replace("- model: B", "- model: /dev/zero")),
    recipe("a model with a zero", LINEAR.replace("- model: B", '- model: "a\\0b"')),
    recipe("a model twice", "merge_method: linear\nmodels:\n- model: A\n- model: A\n"),
    *(
        recipe(f"weight: {value}", weighted(value))
        for value in (".nan", ".inf", "-.inf", "x", "[x]", "[]", "{a: 1}", "1e400", "true", "[[1]]")
    ),
    recipe(
        "weights that end at 0",
        weighted("0").replace("B\n", "B\n  parameters: {weight: 0}\n"),
        EITHER,
    ),
    recipe("an unknown parameter", weighted("1").replace("weight", "evil")),
    recipe("a density of 7", f"{BASED}parameters: {{density: 7}}\n"),
    recipe("a density that is text", f"{BASED}parameters: {{density: x}}\n"),
    recipe("no base", f"merge_method: ties\n{TWO}"),
    recipe("a base that is not there", BASED.replace("base_model: A", "base_model: /no")),
    recipe("a base that is a list", BASED.replace("base_model: A", "base_model: [a]")),
    recipe("a tokenizer of nobody", f"{LINEAR}tokenizer_source: evil\n"),
    recipe("a tokenizer that is a list", f"{LINEAR}tokenizer_source: [a]\n"),
    recipe("a tokenizer that is a path", f"{LINEAR}tokenizer_source: /etc/passwd\n"),
    recipe(
        "rows for ever",
        f"{LINEAR}tokenizer: {{source: union, pad_to_multiple_of: {10**12}}}\n",
        TOO_LARGE,
    ),
    recipe("a type that does not exist", f"{LINEAR}dtype: float7\n"),
    recipe("a result of whole numbers", f"{LINEAR}out_dtype: int8\n"),
    recipe("a seed below 0", f"{LINEAR}seed: -1\n"),
    recipe("a seed of 2^64", f"{LINEAR}seed: {1 << 64}\n"),
    recipe("a hash that is wrong", LINEAR + "parents:\n  A\n".replace("A\n", "x: y\n"), EITHER),
    *(
        recipe(f"layers: {value}", sliced(value))
        for value in ("[0, 9]", "[-1, 1]", "[1, 1]", "[1, 0]", "[0]", "[0, 1, 2]", "x", "[a, b]")
    ),
    recipe("layers beyond 2^63", sliced(f"[0, {10**20}]"), TOO_LARGE),
    recipe("layers that are a billion", sliced(f"[0, {10**9}]"), TOO_LARGE),
    recipe("ten thousand slices", _many_slices(), EITHER | TOO_LARGE),
    recipe("slices and models", sliced("[0, 2]") + TWO),
    recipe(
        "slices of different lengths",
        sliced("[0, 1]") + "  - layer_range: [0, 2]\n    model: B\n",
    ),
    recipe("a combo that does not exist", f"combo: 99\n{TWO}"),
    recipe("a combo that is text", f"combo: evil\n{TWO}"),
    recipe("layers of a combo that are not there", f"combo: 1\nlayers: {{99: 1}}\n{TWO}"),
    recipe("a filter that is a pattern", weighted("{filter: '(a+)+$', value: 1}"), EITHER),
)


def _place(name: str, change: Change, allowed: frozenset[int] = REFUSED) -> Case:
    """Something else where the recipe should be."""

    def make(folder: Path, good: Path) -> str:
        change(folder)
        return str(folder / "recipe.yml")

    return Case(f"recipe: {name}", "recipe", make, allowed)


PLACES = (
    _place("not there", lambda folder: None),
    _place("a folder", directory("recipe.yml")),
    _place("a pipe", fifo("recipe.yml")),
    _place("a device", linked("recipe.yml", lambda folder: "/dev/zero")),
    _place("a pickle", lambda folder: text("recipe.yml", pickled(folder))(folder)),
    _place("Python", lambda folder: text("recipe.yml", singing(folder))(folder)),
)

CASES: tuple[Case, ...] = (*RECIPES, *PLACES)
