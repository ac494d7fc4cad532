"""Recipes, data, lineages and whole command lines that are broken or hostile."""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolve import Job, evolve
from agent_forge.search.candidate import Candidate
from agent_forge.store import files
from tests.faults.hostile_goods import (
    EITHER,
    REFUSED,
    RIGHT,
    TOO_LARGE,
    Case,
    Change,
    canary_of,
    copied,
    directory,
    fifo,
    goods,
    linked,
    pickled,
    read,
    singing,
    text,
)

# -- recipes --------------------------------------------------------------------------------------

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
    recipe("merged keys", "a: &a {merge_method: linear}\n<<: *a\n" + TWO),
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


RECIPE_PLACES = (
    _place("not there", lambda folder: None),
    _place("a folder", directory("recipe.yml")),
    _place("a pipe", fifo("recipe.yml")),
    _place("a device", linked("recipe.yml", lambda folder: "/dev/zero")),
    _place("a pickle", lambda folder: text("recipe.yml", pickled(folder))(folder)),
    _place("Python", lambda folder: text("recipe.yml", singing(folder))(folder)),
)


# -- data -----------------------------------------------------------------------------------------

ROWS: list[Any] = [{"prompt": f"{n}+{n}=", "completion": f" {n + n}"} for n in range(60)]
FEW = {"evo": EITHER, "evo-dry": EITHER}  # an evolution needs more of it


def lines(*rows: Any) -> bytes:
    return "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows).encode() + b"\n"


def data(
    name: str,
    content: bytes | Callable[[], bytes],
    allowed: frozenset[int] = REFUSED,
    *,
    file: str = "data.jsonl",
    **rest: Any,
) -> Case:
    def make(folder: Path, good: Path) -> str:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content())
        return str(folder / file)

    return Case(f"data: {name}", "data", make, allowed, **rest)


def after(name: str, row: Any, allowed: frozenset[int] = REFUSED, **rest: Any) -> Case:
    """Good rows and then this one."""
    return data(name, lines(*ROWS, row), allowed, **{"where": {"show": EITHER}, **rest})


def bomb(line: bytes, times: int = 3000) -> Callable[[], bytes]:
    """Gigabytes in some megabytes: gzip members may follow one another."""
    return lambda: gzip.compress(line * (10_000_000 // len(line)), 6) * times


def row(**values: Any) -> dict[str, Any]:
    return {"prompt": "a", "completion": "b", **values}


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


USER = {"role": "user", "content": "a"}
REPLY = {"role": "assistant", "content": "b"}
DATA = (
    data("nothing is wrong", lines(*ROWS), RIGHT),
    data(
        "nothing is wrong with gzip", lambda: gzip.compress(lines(*ROWS)), RIGHT, file="d.jsonl.gz"
    ),
    data(
        "a mark and odd line ends",
        b"\xef\xbb\xbf" + lines(*ROWS).replace(b"\n", b"\r\n\r\n"),
        RIGHT,
    ),
    data("empty", b""),
    data("only blanks", b" \n\t\n\n"),
    data("only blanks in a text", b" \n\t\n\n", file="data.txt"),
    data("one word", b"word", file="data.txt", where={"show": EITHER}),
    data(
        "no UTF-8",
        lines(*ROWS) + b'{"prompt": "\xff", "completion": "b"}\n',
        where={"show": EITHER},
    ),
    data("no UTF-8 at once", b"\xff\xff\xff\n"),
    data("UTF-16", lines(*ROWS).decode().encode("utf-16")),
    data("UTF-16 without a mark", lines(*ROWS).decode().encode("utf-16-le")),
    data("a zero", b'{"prompt": "a\0", "completion": "b"}\n'),
    data("a zero in a text", b"once upon a \0 time", file="data.txt"),
    data("a line of 70 MB", lambda: b'{"prompt": "' + b"a" * (70 << 20) + b'"}\n', TOO_LARGE),
    data("a text of one line of 70 MB", lambda: b"a" * (70 << 20), TOO_LARGE, file="data.txt"),
    data("deep", b"[" * 100_000 + b"\n"),
    data("no JSON", b"not json\n"),
    data("JSON over lines", b'{"prompt": "a",\n"completion": "b"}\n'),
    data("cut in a row", lines(*ROWS)[:-9], where={"show": EITHER}),
    after("many digits", '{"prompt": ' + "9" * 5000 + ', "completion": "b"}'),
    after("NaN", '{"prompt": NaN, "completion": "b"}'),
    after("infinity", '{"prompt": "a", "completion": 1e999}'),
    after("a number", 7),
    after("nothing", None),
    after("a list", ["a", "b"]),
    after("an object of nothing", {}),
    after("a text between rows", "a text"),
    after("other fields", {"input": "a", "output": "b"}),
    after("no completion", {"prompt": "a"}),
    after("an empty completion", row(completion="")),
    after("a completion that is a list", row(completion=["b"])),
    after("a completion that is an object", row(completion={"a": 1})),
    after("a prompt that is nothing", row(prompt=None)),
    after("a prompt that is empty", row(prompt="")),
    after("half a surrogate", '{"prompt": "a\\ud800", "completion": "b"}'),
    after("choices without the completion", row(choices=["x", "y"])),
    after("choices that are text", row(choices="b")),
    after("choices of numbers and nothing", row(choices=["b", None])),
    after("choices that are empty", row(choices=["b", ""])),
    after("choices twice", row(choices=["b", "b", "c"]), EITHER),
    after("one choice", row(choices=["b"]), EITHER),
    after("a repeated field", '{"prompt": "a", "prompt": "c", "completion": "b"}', EITHER),
    after("a million choices", row(choices=["b", *map(str, range(100_000))]), EITHER | TOO_LARGE),
    after("an answer that is only marks", row(completion="\u202e\u200b"), EITHER),
    after("messages that are text", {"messages": "a"}),
    after("messages of nothing", {"messages": []}),
    after("messages of numbers", said(1, 2)),
    after("messages without a role", said({"content": "a"})),
    after("messages of an unknown role", said({"role": "evil", "content": "a"}, REPLY)),
    after("messages without an answer", said(USER)),
    after("messages that begin with an answer", said(REPLY), EITHER),
    after("messages with odd fields", said({**USER, "evil": {"a": [1]}}, REPLY), EITHER),
    after("a message that is nothing", said(USER, {"role": "assistant", "content": None})),
    after("a message that is a list", said(USER, {"role": "assistant", "content": [1]})),
    after("calls that are text", said(USER, {"role": "assistant", "tool_calls": "x"}), EITHER),
    after("a text beside answers", {"text": "once upon a time"}),
    after("a text that is a number", {"text": 5}),
    data(
        "a text of marks", "\u202e\x1b[31m red \x07 \u2028".encode() * 40, EITHER, file="data.txt"
    ),
    data("an unknown kind", lines(*ROWS), file="data.evil"),
    data("no kind", lines(*ROWS), file="data"),
    data("a pickle", b"\x80\x04\x95.", file="data.pkl"),
    data("a table that is none", b'a,b\n"1', file="data.csv"),
    data("a table of other columns", b"a,b\n1,2\n", file="data.csv"),
    data("a table with more cells", b"prompt,completion\n1,2,3\n", EITHER, file="data.csv"),
    data("a list that is an object", b'{"a": {"prompt": 1}}', file="data.json"),
    data("a list that is a number", b"7", file="data.json"),
    data("a list that is deep", b"[" * 100_000, file="data.json"),
    data("parquet that is none", b"PAR1 no PAR1", file="data.parquet"),
    data("gzip that is none", b"not gzip", file="data.jsonl.gz"),
    data(
        "gzip that is cut",
        lambda: gzip.compress(lines(*ROWS))[:-30],
        file="data.jsonl.gz",
        where={"show": EITHER},
    ),
    data("a bomb of zeros", bomb(b"\0"), TOO_LARGE, file="data.jsonl.gz"),
    data("a bomb of spaces", bomb(b" "), TOO_LARGE, file="data.jsonl.gz"),
    data("a bomb of line ends", bomb(b"\n"), TOO_LARGE, file="data.jsonl.gz"),
    data(
        "a bomb of rows",
        bomb(lines(row())),
        TOO_LARGE,
        file="data.jsonl.gz",
        where={"show": EITHER},
    ),
)


def _data_place(
    name: str, change: Change, file: str = "data.jsonl", allowed: frozenset[int] = REFUSED
) -> Case:
    def make(folder: Path, good: Path) -> str:
        change(folder)
        return str(folder / file)

    return Case(f"data: {name}", "data", make, allowed)


DATA_PLACES = (
    _data_place("not there", lambda folder: None),
    _data_place("a pipe", fifo("data.jsonl")),
    _data_place("an empty folder", directory("data.jsonl")),
    _data_place("a device", linked("data.jsonl", lambda folder: "/dev/zero")),
    _data_place("a device of chance", linked("data.jsonl", lambda folder: "/dev/urandom")),
    _data_place(
        "a link to itself", linked("data.jsonl", lambda folder: "data.jsonl"), allowed=TOO_LARGE
    ),
    _data_place("a folder of pipes", lambda f: (directory("d")(f), fifo("d/data.jsonl")(f)), "d"),
    _data_place(
        "a folder of itself", lambda f: (directory("d")(f), linked("d/d", lambda x: ".")(f)), "d"
    ),
    _data_place("a long name", lambda folder: None, "a" * 5000 + ".jsonl", TOO_LARGE),
    _data_place("the root", lambda folder: None, "/"),
)


# -- lineages -------------------------------------------------------------------------------------


@cache
def champion() -> Path:
    """The lineage.json of a real champion of the two Llamas."""
    root = goods()
    few = {"generations": 0, "fitness_subset_size": 4, "verdict_items": 4, "workers": 1}
    few |= {"use_holdout_validation": False, "max_evaluations": 3, "strategy": "auto"}
    settings = EvoMergeSettings.model_validate({**few, "data": [str(root / "rows.jsonl")]})
    parents = [str(root / "llama" / name) for name in "ab"]
    return evolve(Job.of(settings, parents, None, 1, root / "evolved")).model_path / "lineage.json"


def lineage(
    name: str, edit: Callable[[dict[str, Any]], Any], allowed: frozenset[int] = REFUSED
) -> Case:
    """The record of a champion, edited in place or replaced."""

    def make(folder: Path, good: Path) -> str:
        record = read(champion())
        edited = edit(record)
        written = record if edited is None else edited
        path = folder / "lineage.json"
        path.write_text(written if isinstance(written, str) else json.dumps(written))
        return str(path)

    return Case(f"lineage: {name}", "lineage", make, allowed)


def made(*steps: dict[str, Any], twice: bool = False) -> Callable[[dict[str, Any]], None]:
    """A champion made by these steps from the first parent, each from the one before."""

    def edit(record: dict[str, Any]) -> None:
        chain = [Candidate({"kind": "parent", "index": 0})]
        for step in steps:
            chain.append(Candidate(step, (chain[-1].key,) * (2 if twice else 1)))
        record.update(candidates=[c.to_json() for c in chain], key=chain[-1].key)

    return edit


def crossed(operation: dict[str, Any], count: int = 2) -> Callable[[dict[str, Any]], None]:
    """A champion made by this step from parents."""

    def edit(record: dict[str, Any]) -> None:
        parents = [Candidate({"kind": "parent", "index": n}) for n in range(count)]
        last = Candidate(operation, tuple(p.key for p in parents))
        record.update(candidates=[c.to_json() for c in (*parents, last)], key=last.key)

    return edit


def source(model: str) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["models"][0].update(model=model)


def shifted(coefficients: Any) -> dict[str, Any]:
    return {"kind": "shift", "coefficients": coefficients}


def noise(sigma: Any, rate: Any = 1.0, seed: Any = 0) -> dict[str, Any]:
    return {"kind": "noise", "sigma": sigma, "rate": rate, "seed": seed}


def merged(**values: Any) -> dict[str, Any]:
    plain = {"combo": 0, "weights": {}, "drop_rate": 0.5, "keep": 0.5, "scale": 1.0, "seed": 0}
    return {"kind": "merge", "layers": {}, **plain, **values}


def blend(**values: Any) -> dict[str, Any]:
    plain = {"method": "linear", "coefficients": {}, "density": {}, "scale": 1.0, "seed": 0}
    return {"kind": "blend", **plain, **values}


LINEAGES = (
    lineage("nothing is wrong", lambda record: None, RIGHT),
    lineage("a parent alone", made(), RIGHT),
    lineage("no JSON", lambda record: "{"),
    lineage("empty", lambda record: ""),
    lineage("a list", lambda record: []),
    lineage("deep", lambda record: "[" * 100_000),
    lineage("no models", lambda record: record.update(models=[])),
    lineage("models that are text", lambda record: record.update(models="x")),
    lineage("models of numbers", lambda record: record.update(models=[1, 2])),
    lineage(
        "a hundred thousand models", lambda r: r.update(models=r["models"] * 50_000), TOO_LARGE
    ),
    lineage("a model that is a number", lambda record: record["models"][0].update(model=7)),
    lineage("a model that is not there", source("/nowhere")),
    lineage("a model that is a file", source("/etc/passwd")),
    lineage("a model that is a device", source("/dev/zero")),
    lineage("a model that is an address", source("https://example.org/x")),
    lineage("a model of the hub", source("someone/evil")),
    lineage("a model with a zero", source("a\0b")),
    lineage("a model of a long name", source("a" * 5000), TOO_LARGE),
    lineage("a model that is another", lambda record: record["models"].reverse()),
    lineage("a hash that is nothing", lambda record: record["models"][0].update(sha256=None)),
    lineage("a key that is a list", lambda record: record.update(key=[1])),
    lineage("a key of nobody", lambda record: record.update(key="0" * 64)),
    lineage("candidates that are text", lambda record: record.update(candidates="x")),
    lineage("a base that is text", lambda record: record.update(has_base="no")),
    lineage("a parent that is not there", crossed({"kind": "average"}, 99)),
    lineage("a parent below 0", lambda r: made()(r) or _parent(r, -1)),
    lineage("a parent that is text", lambda r: _parent(r, "x")),
    lineage("a parent that is a truth value", lambda r: _parent(r, True), EITHER),
    lineage("an unknown operation", lambda r: r["candidates"][-1]["operation"].update(kind="evil")),
    lineage("noise below 0", made(noise(-1.0))),
    lineage("noise that is text", made(noise("x"))),
    lineage("noise that overflows", made(noise(1e308))),
    lineage("noise on more than all", made(noise(0.1, 7.0)), EITHER),
    lineage("noise by a seed that is text", made(noise(0.1, 1.0, "x"))),
    lineage("a shift that is text", made(shifted("x"))),
    lineage("a shift of groups that are not there", made(shifted({"evil": [1, 2]})), EITHER),
    lineage("a shift by text", made(shifted({"layers": ["x", "y"]}))),
    lineage("a shift that overflows", made(shifted({"*": [1e308, 1e308]})), EITHER),
    lineage("a combo that does not exist", crossed(merged(combo=99))),
    lineage("a combo that is text", crossed(merged(combo="x"))),
    lineage("weights that are a list", crossed(merged(weights=[1]))),
    lineage("a drop rate of 2", crossed(merged(drop_rate=2))),
    lineage("layers that are not there", crossed(merged(layers={"99": 7})), EITHER),
    lineage("a method that does not exist", crossed(blend(method="evil"))),
    lineage("coefficients that are text", crossed(blend(coefficients="x"))),
    lineage("a path of layers that are not there", crossed({"kind": "path", "layers": [[0, 99]]})),
    lineage("a path of inputs that are not there", crossed({"kind": "path", "layers": [[9, 0]]})),
    lineage("a path of nothing", crossed({"kind": "path", "layers": []}), EITHER),
    lineage(
        "a path of a million layers",
        crossed({"kind": "path", "layers": [[0, 0]] * 10**5}),
        TOO_LARGE,
    ),
    lineage("a long chain", made(*[noise(0.0)] * 3000), EITHER | TOO_LARGE),
    lineage("a chain that doubles", made(*[{"kind": "average"}] * 60, twice=True), EITHER),
)


def _parent(record: dict[str, Any], index: Any) -> None:
    one = Candidate({"kind": "parent", "index": index})
    record.update(candidates=[one.to_json()], key=one.key)


# -- whole lines ----------------------------------------------------------------------------------


def line(
    name: str,
    build: Callable[[Path, Path], Sequence[str | Path]],
    allowed: frozenset[int] = REFUSED,
) -> Case:
    """Arguments of forge, from the folder of the case and a copy of two good models in it."""

    def make(folder: Path, good: Path) -> str:
        for name_ in "ab":
            copied(good.parent / name_, folder / name_)
        return shlex.join(map(str, build(folder, folder / "a")))

    return Case(f"line: {name}", "line", make, allowed)


def merging(
    target: Callable[[Path], Path | str], *options: str
) -> Callable[[Path, Path], list[Any]]:
    return lambda folder, a: ["merge", "--models", f"{a},{folder / 'b'}", target(folder), *options]


def evolving(target: Callable[[Path], Path | str]) -> Callable[[Path, Path], list[Any]]:
    def build(folder: Path, a: Path) -> list[Any]:
        given = ["--data", goods() / "rows.jsonl", "--gens", "0", "--output-dir", target(folder)]
        return ["evo", "--base-models", f"{a},{folder / 'b'}", *given]

    return build


def resuming(content: Callable[[], bytes]) -> Callable[[Path, Path], list[Any]]:
    def build(folder: Path, a: Path) -> list[Any]:
        (folder / "run").mkdir()
        (folder / "run" / "evolution.json").write_bytes(content())
        return ["evo", "--resume", folder / "run"]

    return build


def _begun(**values: Any) -> Callable[[], bytes]:
    """What a real evolution began with, with other values, and sealed again."""

    def content() -> bytes:
        record = read(champion().parent.parent / "evolution.json")
        return files.sealed({**{k: v for k, v in record.items() if k != "checksum"}, **values})

    return content


def _file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file"


def _link(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "a")
    return folder / "link"


def _adapter_out(folder: Path, a: Path) -> list[Any]:
    shutil.copy(a / "config.json", folder / "c.json")
    return ["merge", folder / "c.json", folder / "a"]


LINES = (
    line("a merge onto a parent", merging(lambda folder: folder / "a")),
    line("a merge onto a parent by force", merging(lambda folder: folder / "a", "--force")),
    line("a merge into a parent", merging(lambda folder: folder / "a" / "sub")),
    line("a merge onto what holds the parents", merging(lambda folder: folder, "--force")),
    line("a merge onto a file", merging(_file, "--force")),
    line("a merge onto a link to a parent", merging(_link, "--force")),
    line("a merge below a file", merging(lambda folder: _file(folder) / "x"), TOO_LARGE),
    line("a merge onto a device", merging(lambda folder: "/dev/null", "--force"), TOO_LARGE),
    line("a merge to a long name", merging(lambda folder: folder / ("a" * 300)), TOO_LARGE),
    line("a config for a recipe", _adapter_out),
    line("an evolution onto a parent", evolving(lambda folder: folder / "a")),
    line("an evolution into a parent", evolving(lambda folder: folder / "a" / "sub")),
    line("an evolution onto a link to a parent", evolving(_link)),
    line("an evolution onto a file", evolving(_file)),
    line("a replay onto a parent", lambda folder, a: ["evo", "replay", champion(), a]),
    line(
        "a replay into a parent",
        lambda folder, a: ["evo", "replay", champion(), folder / "a" / "x"],
        EITHER,
    ),
    line("going on with no JSON", resuming(lambda: b"{")),
    line("going on with a list", resuming(lambda: b"[]")),
    line("going on with a record that is not sealed", resuming(lambda: b'{"parents": []}')),
    line("going on with nothing", resuming(lambda: files.sealed({}))),
    line("going on with no parents", resuming(_begun(parents=[]))),
    line("going on with parents that are numbers", resuming(_begun(parents=[1, 2]))),
    line("going on with names that are numbers", resuming(_begun(names=7))),
    line("going on with a seed that is text", resuming(_begun(seed="x"))),
    line("going on with settings that are text", resuming(_begun(settings="x"))),
    line("going on with a base that is a list", resuming(_begun(base=[1]))),
)

CASES: tuple[Case, ...] = (
    *(*RECIPES, *RECIPE_PLACES, *DATA, *DATA_PLACES),
    *(*LINEAGES, *LINES),
)
