"""The same recipe gives what mergekit gives: golden tensors, made by tests/golden/merge/make.py.

One bf16 ulp, on every element. Two exceptions, each counted:
- Among differences of exactly equal size at a trim threshold any choice is right; mergekit's sort
  is not stable, so it takes some of them. Such elements may differ.
- `dtype: bfloat16` makes mergekit round each step of most methods to bf16. We compute in fp32 and
  round once: the result is that of the recipe with `dtype: float32, out_dtype: bfloat16`, and
  mergekit's own is near it as measured by the largest input.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from agent_forge.merge.engine import merge
from agent_forge.merge.plan import Parents
from agent_forge.merge.recipe import Recipe, read_recipe
from tests.golden.merge import make

FOLDER = Path(__file__).parents[1] / "golden" / "merge"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
NAMES = sorted(p.stem for p in (FOLDER / "expected").iterdir())
PARENTS = ("base", "a", "b", "c")
TRIMMING = ("ties", "breadcrumbs", "breadcrumbs_ties", "sce")
NARROW_STEPS = ("task_arithmetic_narrow", "ties_narrow")  # mergekit rounds between the steps
FP32_NOISE = 2.0**-21  # of the largest input, where a result cancels to almost nothing
AT_MOST_AT_A_THRESHOLD = 0.04  # of all elements; the parents are bf16, so equal sizes are common
Tensors = Mapping[str, torch.Tensor]


def merged(name: str, folder: Path = FOLDER) -> dict[str, torch.Tensor]:
    return dict(merge(read_recipe(folder / "recipes" / f"{name}.yml")))


def expected(name: str, folder: Path = FOLDER) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "expected" / f"{name}.safetensors"))


def body(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    loaded = yaml.safe_load((folder / "recipes" / f"{name}.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


@functools.cache
def parent(name: str, folder: Path = FOLDER) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / "parents" / name / "model.safetensors"))


def ulps(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """How many bf16 numbers lie between."""

    def place(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (place(ours) - place(theirs)).abs()


def largest_input(folder: Path = FOLDER) -> float:
    return max(float(t.abs().max()) for name in PARENTS for t in parent(name, folder).values())


def ulp_of_largest(name: str, folder: Path) -> torch.Tensor:
    """The bf16 spacing at the largest of the inputs, element by element."""
    sizes = torch.stack([parent(model, folder)[name].float().abs() for model in PARENTS]).amax(0)
    return torch.exp2(torch.floor(torch.log2(sizes)) - 7)


def setting(value: Any, tensor: str, layers: int) -> float:
    """A number, or a gradient over the layers."""
    if not isinstance(value, list):
        return float(value)
    place = int(tensor.split(".")[2]) / (layers - 1) if ".layers." in tensor else 0.0
    scaled = place * (len(value) - 1)
    first = int(scaled)
    share = scaled - first
    return float((1 - share) * value[first] + share * value[min(first + 1, len(value) - 1)])


def cuts(method: str, count: int, density: float, gamma: float) -> tuple[int, ...]:
    """Between which places of the ascending sizes mergekit cuts."""
    if density >= 1:
        return ()
    if method == "ties":
        return (count - max(1, int(density * count)),)
    kept = int(density * count)
    bottom = max(0, count - kept - int(gamma * count))
    return (bottom, bottom + kept)


def undecided(name: str, tensor: str, folder: Path = FOLDER) -> torch.Tensor:
    """Elements of a difference that has the same size on both sides of a cut."""
    recipe = body(name, folder)
    base = parent("base", folder)
    layers = 1 + max(int(key.split(".")[2]) for key in base if ".layers." in key)
    result = torch.zeros_like(base[tensor], dtype=torch.bool)
    work = getattr(torch, recipe["dtype"])
    if recipe["merge_method"] == "sce":  # cuts by the variance over the models
        models = [parent(Path(source["model"]).name, folder) for source in recipe["models"]]
        size = torch.stack([m[tensor].to(work) - base[tensor].to(work) for m in models]).var(
            0, correction=0
        )
        share = setting(recipe.get("parameters", {}).get("select_topk", 1.0), tensor, layers)
        ordered = size.flatten().sort().values
        cut = size.numel() - int(int(size.count_nonzero()) * share)
        tied = 0 < cut < size.numel() and bool(ordered[cut - 1] == ordered[cut])
        return size == ordered[cut] if tied else result
    for source in recipe["models"]:
        model = parent(Path(source["model"]).name, folder)
        size = (model[tensor].to(work) - base[tensor].to(work)).abs()
        values = source["parameters"]
        density = setting(values["density"], tensor, layers)
        ordered = size.flatten().sort().values
        for cut in cuts(recipe["merge_method"], size.numel(), density, values.get("gamma", 0.01)):
            if 0 < cut < size.numel() and ordered[cut - 1] == ordered[cut]:
                result |= size == ordered[cut]
    return result


def far(ours: torch.Tensor, theirs: torch.Tensor, noise: float) -> torch.Tensor:
    """More than one bf16 ulp, and more than fp32 itself leaves when a sum cancels."""
    return (ulps(ours, theirs) > 1) & ((ours.float() - theirs.float()).abs() > noise)


def disagreements(
    name: str, ours: Tensors, theirs: Tensors, folder: Path = FOLDER
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of each tensor: which elements are far from mergekit's, and which of them may be."""
    noise = FP32_NOISE * largest_input(folder)
    trims = body(name, folder)["merge_method"] in TRIMMING
    for key in theirs:
        assert ours[key].dtype == theirs[key].dtype and ours[key].shape == theirs[key].shape, key
        apart = far(ours[key], theirs[key], noise)
        excused = undecided(name, key, folder) if trims else torch.zeros_like(apart)
        yield key, apart, excused


@pytest.fixture(autouse=True)
def _at_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)  # recipes name parents from here


def test_the_goldens_are_as_mergekit_left_them() -> None:
    assert MANIFEST["made_with"]["mergekit"] == "0.1.5"
    listed = MANIFEST["sha256"]
    assert {f"expected/{name}.safetensors" for name in NAMES} < set(listed)
    for path, digest in listed.items():
        assert hashlib.sha256((FOLDER / path).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NARROW_STEPS])
def test_agrees_with_mergekit(name: str, record_property: Callable[[str, object], None]) -> None:
    ours, theirs = merged(name), expected(name)
    if name.startswith("vocabulary"):  # of these only the embedding and the head were kept
        ours = {key: ours[key] for key in theirs}
    assert set(ours) == set(theirs)
    at_threshold = total = 0
    for key, apart, excused in disagreements(name, ours, theirs):
        assert not (apart & ~excused).any(), f"{key}: {int((apart & ~excused).sum())} elements"
        at_threshold += int((apart & excused).sum())
        total += apart.numel()
    record_property("differ_at_a_threshold", at_threshold)
    assert at_threshold <= AT_MOST_AT_A_THRESHOLD * total


@pytest.mark.parametrize("name", NARROW_STEPS)
def test_storage_in_bf16_does_not_change_the_arithmetic(name: str) -> None:
    wide = name.removesuffix("_narrow")
    for key, apart, excused in disagreements(wide, merged(name), expected(wide)):
        assert not (apart & ~excused).any(), key


@pytest.mark.parametrize("name", sorted(make.DELLA))
def test_della_has_mergekits_mean_and_variance(name: str) -> None:
    """The masks are random: each moment agrees within what its samples can tell."""
    seeds = 600
    theirs = load_file(FOLDER / "della.safetensors")
    rows = [
        {key: values[i] for key, values in make.DELLA_INPUTS.items()}
        for i in range(len(make.DELLA_INPUTS["weight"]))
    ]
    models = {n: {"w": parent(n)[make.DELLA_TENSOR].float()} for n in PARENTS}
    recipe: dict[str, Any] = {
        "merge_method": name.removesuffix("_plain"),
        "models": [{"model": n, "parameters": row} for n, row in zip("abc", rows, strict=True)],
        "base_model": "base",
        "parameters": make.DELLA[name],
    }
    parents = Parents(models)
    made = [
        merge(Recipe.model_validate({**recipe, "seed": seed}), parents)["w"]
        for seed in range(seeds)
    ]
    ours = torch.stack(made)
    variance = theirs[f"{name}.variance"]
    error = (variance * (1 / seeds + 1 / make.SEEDS)).sqrt()
    apart = (ours.mean(0) - theirs[f"{name}.mean"]) / error
    assert apart.abs().max() < 5
    assert apart.square().mean() == pytest.approx(1, abs=0.4)
    assert float((ours.var(0) / variance).mean()) == pytest.approx(1, abs=0.02)


def test_where_mergekit_rounds_each_step_it_stays_near() -> None:
    name = "task_arithmetic_narrow"
    ours, theirs = merged(name), expected(name)
    steps = torch.cat(
        [
            ((ours[key].float() - theirs[key].float()) / ulp_of_largest(key, FOLDER)).flatten()
            for key in theirs
        ]
    ).abs()
    assert steps.max() <= 2
    assert (steps > 1).float().mean() < 0.01
