"""Lineages of champions that lie, and whole command lines that would harm their own input."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import locate_inputs
from agent_forge.search.candidate import Candidate
from agent_forge.store import files
from tests.faults.hostile_goods import (
    EITHER,
    REFUSED,
    RIGHT,
    TOO_LARGE,
    Case,
    copied,
    goods,
    read,
)


@cache
def champion() -> Path:
    """The lineage.json of a real champion of the two Llamas."""
    root = goods()
    few = {"generations": 0, "fitness_subset_size": 4, "verdict_items": 4, "workers": 1}
    few |= {"use_holdout_validation": False, "max_evaluations": 3, "strategy": "auto"}
    settings = EvoMergeSettings.model_validate({**few, "data": [str(root / "rows.jsonl")]})
    parents = [str(root / "llama" / name) for name in "ab"]
    return (
        run_evolution(locate_inputs(settings, parents, None, 1, root / "evolved")).model.path
        / "lineage.json"
    )


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


EVEN = {key: [0.5, 0.5] for key in ("embeddings", "layer 0", "layer 1", "rest")}


def merged(**values: Any) -> dict[str, Any]:
    plain = {"combo": 0, "weights": EVEN, "drop_rate": 0.5, "keep": 0.5, "scale": 1.0, "seed": 0}
    return {"kind": "merge", "layers": {}, **plain, **values}


def blend(**values: Any) -> dict[str, Any]:
    plain = {"method": "linear", "coefficients": EVEN, "scale": 1.0, "seed": 0}
    return {"kind": "blend", "density": dict.fromkeys(EVEN, 0.5), **plain, **values}


LINEAGES = (
    lineage("nothing is wrong", lambda record: None, RIGHT),
    lineage("a parent alone", made(), RIGHT),
    lineage("a merge", crossed(merged()), RIGHT),
    lineage("a blend", crossed(blend()), RIGHT),
    lineage("a shift and noise", made(shifted(EVEN), noise(0.1)), RIGHT),
    lineage("an average", crossed({"kind": "average"}), RIGHT),
    lineage("a path", crossed({"kind": "path", "layers": [[0, 0], [1, 1]]}), RIGHT),
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
    lineage(
        "a model that is another", lambda r: r["models"][0].update(model=r["models"][1]["model"])
    ),
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
    lineage("noise below 0", made(noise(-1.0)), EITHER),
    lineage("noise that is text", made(noise("x"))),
    lineage("noise that overflows", made(noise(1e308))),
    lineage("noise on more than all", made(noise(0.1, 7.0)), EITHER),
    lineage("noise by a seed that is text", made(noise(0.1, 1.0, "x")), EITHER),
    lineage("a shift that is text", made(shifted("x"))),
    lineage("a shift of groups that are not there", made(shifted({"evil": [1, 2]})), EITHER),
    lineage("a shift by text", made(shifted({key: ["x", "y"] for key in EVEN}))),
    lineage("a shift that overflows", made(shifted({key: [1e300, 1e300] for key in EVEN})), EITHER),
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
        run = folder.parent / "run"  # no input: it is written to
        run.mkdir()
        (run / "evolution.json").write_bytes(content())
        return ["evo", "--resume", run]

    return build


def _begun(**values: Any) -> Callable[[], bytes]:
    """What a real evolution began with, with other values, and sealed again."""

    def content() -> bytes:
        record = read(champion().parent.parent / "evolution.json")
        return files.with_checksum(
            {**{k: v for k, v in record.items() if k != "checksum"}, **values}
        )

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


def _replayed_inside(folder: Path, a: Path) -> list[Any]:
    record = read(champion())
    for source_, name in zip(record["models"], "ab", strict=True):
        source_["model"] = str(folder / name)
    (folder / "lineage.json").write_text(json.dumps(record))
    return ["evo", "replay", folder / "lineage.json", a / "sub"]


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
    line("a replay into a parent", _replayed_inside),
    line("going on with no JSON", resuming(lambda: b"{")),
    line("going on with a list", resuming(lambda: b"[]")),
    line("going on with a record that is not sealed", resuming(lambda: b'{"parents": []}')),
    line("going on with nothing", resuming(lambda: files.with_checksum({}))),
    line("going on with no parents", resuming(_begun(parents=[]))),
    line("going on with parents that are numbers", resuming(_begun(parents=[1, 2]))),
    line("going on with names that are numbers", resuming(_begun(names=7))),
    line("going on with a seed that is text", resuming(_begun(seed="x"))),
    line("going on with settings that are text", resuming(_begun(settings="x"))),
    line("going on with a base that is a list", resuming(_begun(base=[1]))),
)

CASES: tuple[Case, ...] = (*LINEAGES, *LINES)
