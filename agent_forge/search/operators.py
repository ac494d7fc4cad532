"""How new candidates are made: merges of given ones, and mutations of one. Pure functions."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
from numpy.random import Generator

from agent_forge.search.candidate import SHORT, Candidate
from agent_forge.search.settings import EvolutionSettings

INTERPOLATION, ARITHMETIC, SELECTION = BITS = 4, 2, 1  # of a combo, read from the left
# Of the first four each technique is in two, and each two techniques meet once.
COMBOS = (0b000, 0b011, 0b101, 0b110, 0b001, 0b010, 0b100, 0b111)
ODDS = 1.0  # step of a drop rate or kept share, in log-odds
STRETCH = 0.35  # step of the logarithm of a scale
MORE_STEPS = 0.5  # the chance of another change of a path, after each of them
T = TypeVar("T")
Rows = Mapping[str, Sequence[float]]  # one number a parent for every group
Operation = Mapping[str, Any]
DIGITS = 6  # of every number that is drawn, so that a recipe stays readable


def generator(*label: int | str) -> Generator:
    """The random numbers of one decision; no other decision shares or moves them."""
    digest = hashlib.sha256("/".join(map(str, label)).encode()).digest()
    return Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw_seed(rng: Generator) -> int:
    return int(rng.integers(2**32))


def mask_seed(seed: int) -> int:
    """The seed of DARE's masks that all first combos share, so that one pass makes them all."""
    return draw_seed(generator(seed, "masks"))


@dataclass(frozen=True)
class SearchSpace:
    """What can vary: the parents' keys, the groups of weights and the layers."""

    parents: tuple[str, ...]
    groups: tuple[str, ...]
    layers: tuple[str, ...]
    settings: EvolutionSettings


def combo_of(
    space: SearchSpace, combo: int, inputs: Sequence[str], seed: int, origin: str
) -> Candidate:
    """One of the eight combos; all inputs weigh the same, unless the settings weigh the parents."""
    s, first = space.settings, tuple(inputs) == space.parents
    layers: dict[str, int] = {}
    if first and s.layer_parents and not combo & SELECTION:
        turns = zip(space.layers, cycle(s.layer_parents), strict=False)
        layers = {layer: number + 1 for layer, number in turns}  # 0 is the merged one
    operation = {
        "kind": "merge",
        "combo": combo,
        "weights": dict.fromkeys(space.groups, _row(s, combo, len(inputs), first)),
        "drop_rate": s.drop_rate,
        "keep": s.keep,
        "scale": 1.0,
        "layers": layers,
        "seed": seed,
        **({"amplification": s.amplification} if s.amplification else {}),
        **({"dfs_ratio": s.dfs_ratio} if s.dfs_ratio != 1 else {}),
    }
    return Candidate(operation, tuple(inputs), f"{origin} {combo:03b}")


def random_combo(
    space: SearchSpace, inputs: Sequence[str], rng: Generator, origin: str
) -> Candidate:
    combo = pick(range(len(COMBOS)), rng)
    return combo_of(space, combo, inputs, draw_seed(rng), origin)


def _row(s: EvolutionSettings, combo: int, inputs: int, first: bool) -> list[float]:
    """The weights of a combo's inputs; `first`: these are the parents."""
    if first and s.parent_weights:
        return s.parent_weights
    others = [1.0] * (inputs - 2)
    if first and combo & INTERPOLATION and s.slerp_t:
        return [2 * (1 - s.slerp_t), 2 * s.slerp_t, *others]
    if first and not combo & INTERPOLATION and s.linear_weight:
        rest = (1 - s.linear_weight) / (inputs - 1)
        return [s.linear_weight, *[rest] * (inputs - 1)]
    return [1.0, 1.0, *others]


def variant(space: SearchSpace, merge: Candidate, rng: Generator) -> Candidate:
    """The same combo of the same inputs, with other weights, drop rate and kept share."""
    step = space.settings.shift_sigma * len(merge.inputs)
    recipe = merge.operation
    changed = {
        **recipe,
        "weights": {g: _scaled(w, rng, step) for g, w in recipe["weights"].items()},
        "drop_rate": _odds(recipe["drop_rate"], rng, ODDS),
        "keep": _odds(recipe["keep"], rng, ODDS),
    }
    return Candidate(changed, merge.inputs, f"variant of {merge.origin}")


def blend(
    space: SearchSpace,
    method: str,
    coefficients: Rows,
    density: Mapping[str, float] | None = None,
    scale: float = 1.0,
    seed: int = 0,
    origin: str = "blend",
) -> Candidate:
    """base + scale * the sum of the parents' task vectors, each with its own coefficients."""
    operation = {
        "kind": "blend",
        "method": method,
        "coefficients": _rounded_rows(coefficients),
        "density": {g: rounded(d) for g, d in (density or {}).items()},
        "scale": rounded(scale),
        "seed": seed if method.startswith("dare") else 0,
    }
    return Candidate(operation, space.parents, origin)


def shifted(of: str, coefficients: Rows, origin: str) -> Candidate:
    """A candidate moved along the parents' task vectors."""
    operation = {"kind": "shift", "coefficients": _rounded_rows(coefficients)}
    return Candidate(operation, (of,), origin)


def by_method(space: SearchSpace, method: str, seed: int) -> Candidate:
    """What a merge method makes of the parents."""
    masks = seed if method.startswith("della") else 0
    operation = {"kind": "method", "method": method, "seed": masks}
    return Candidate(operation, space.parents, f"method {method}")


def stretched(of: str, scale: float, rng: Generator) -> Candidate:
    """A candidate farther from the base or nearer to it, around a scale that was good."""
    scale = min(max(rounded(scale * math.exp(STRETCH * rng.standard_normal())), 0.05), 5.0)
    return Candidate({"kind": "stretch", "scale": scale}, (of,), f"stretch of {of[:SHORT]}")


def mutate(
    space: SearchSpace, elite: Candidate, rng: Generator, strength: float, *, again: bool = False
) -> tuple[str, Candidate]:
    """A mutant, and the name of what was done to it. Mutants of a path are paths. What is made from
    others than parents is shifted, which needs only its own weights: the others may be gone.
    `again` leaves out what has few outcomes, after one that was not new."""
    settings, paths = space.settings, space.settings.layer_paths if space.layers else 0.0
    if elite.kind == "path" or (paths and rng.random() < paths):
        return "path", path(space, elite, rng)
    operation: dict[str, Any]
    inputs: tuple[str, ...] = (elite.key,)
    menu = ["shift"]
    if elite.kind == "merge" and set(elite.inputs) <= set(space.parents):
        menu += _recipe_menu(space, elite.operation, again)
    if rng.random() >= settings.recipe_mutation:
        menu = ["noise"]
    name = pick(menu, rng)
    if name == "noise":
        return name, noisy(space, elite, rng, strength)
    if name == "shift":  # in one group: the smaller the part, the likelier it is an improvement
        steps = rng.standard_normal(len(space.parents)) * settings.shift_sigma * strength
        rows = {group: [0.0] * len(space.parents) for group in space.groups}
        rows[pick(space.groups, rng)] = [rounded(step) for step in steps]
        operation = {"kind": "shift", "coefficients": rows}
    else:
        changed = _mutated_fields(name, space, elite.operation, rng, strength)
        operation, inputs = {**elite.operation, **changed}, elite.inputs
    return name, Candidate(operation, inputs, f"{name} mutation of {elite.key[:SHORT]}")


def noisy(space: SearchSpace, of: Candidate, rng: Generator, strength: float) -> Candidate:
    """A candidate with noise on some of its weights."""
    sigma, rate = space.settings.mutation_sigma * strength, space.settings.mutation_rate
    operation = {"kind": "noise", "sigma": sigma, "rate": rate, "seed": draw_seed(rng)}
    return Candidate(operation, (of.key,), f"noise mutation of {of.key[:SHORT]}")


def path(space: SearchSpace, of: Candidate, rng: Generator) -> Candidate:
    """Another path: a layer is skipped, repeated or taken from another input, perhaps several."""
    inputs = (of.key, *(key for key in space.parents if key != of.key))
    layers = [[0, layer] for layer in range(len(space.layers))]
    if of.kind == "path":
        inputs, layers = of.inputs, list(of.operation["layers"])
    while True:
        menu = ["swap"]
        menu += ["skip"] if len(layers) > 1 else []
        menu += ["repeat"] if len(layers) < len(space.layers) * 3 // 2 else []
        name, at = pick(menu, rng), int(rng.integers(len(layers)))
        if name == "skip":
            del layers[at]
        elif name == "repeat":
            layers.insert(at, layers[at])
        else:
            source, layer = layers[at]
            layers[at] = [pick([i for i in range(len(inputs)) if i != source], rng), layer]
        if rng.random() >= MORE_STEPS:
            operation = {"kind": "path", "layers": layers}
            return Candidate(operation, inputs, f"path mutation of {of.key[:SHORT]}")


def mutated_recipe(
    space: SearchSpace,
    recipe: Operation,
    rng: Generator,
    combos: Sequence[int],
    strength: float,
    *,
    again: bool,
) -> dict[str, Any]:
    """A recipe of the parents with one mutation, among these combos."""
    menu = _recipe_menu(space, recipe, again)
    if "combo" in menu and not {recipe["combo"] ^ bit for bit in BITS} & {*combos}:
        menu.remove("combo")
    name = pick(menu, rng)
    while True:
        made = {**recipe, **_mutated_fields(name, space, recipe, rng, strength)}
        if name != "combo" or made["combo"] in combos:
            return made


def _recipe_menu(space: SearchSpace, operation: Operation, again: bool) -> list[str]:
    """The mutations that this combo would notice."""
    menu = ["weights", "scale", "keep" if operation["combo"] & ARITHMETIC else "drop_rate"]
    if not again:
        menu.append("combo")
        if space.layers and not operation["combo"] & SELECTION:
            menu.append("layers")
    return menu


def _mutated_fields(
    name: str, space: SearchSpace, operation: Operation, rng: Generator, strength: float
) -> dict[str, Any]:
    """What a mutation changes. Steps of sums are n times a shift, since n inputs share them."""
    step = space.settings.shift_sigma * len(space.parents) * strength
    if name == "weights":
        group = pick(space.groups, rng)
        return {name: {**operation[name], group: _scaled(operation[name][group], rng, step)}}
    if name == "scale":
        return {name: _scaled([operation[name]], rng, step)[0]}
    if name in ("drop_rate", "keep"):
        return {name: _odds(operation[name], rng, ODDS * strength)}
    if name == "combo":  # a choice of layers goes with FrankenMerge alone
        combo = operation[name] ^ pick(BITS, rng)
        return {name: combo, "layers": {} if combo & SELECTION else operation["layers"]}
    layer, layers = pick(space.layers, rng), operation["layers"]  # 0 is the merged one
    choices = [n for n in range(len(space.parents) + 1) if n != layers.get(layer)]
    return {"layers": {**layers, layer: pick(choices, rng)}}


def pick(items: Sequence[T], rng: Generator) -> T:
    return items[int(rng.integers(len(items)))]


def rounded(value: float) -> float:
    return round(float(value), DIGITS) + 0.0  # no negative zero


def _rounded_rows(rows: Rows) -> dict[str, list[float]]:
    return {group: [rounded(value) for value in row] for group, row in rows.items()}


def _scaled(values: Sequence[float], rng: Generator, step: float) -> list[float]:
    """Each value times a random factor around 1; nothing positive becomes zero or boundless."""
    factors = (math.exp(min(step * rng.standard_normal(), 9)) for _ in values)
    return [min(max(rounded(v * f), 1e-6), 1e6) for v, f in zip(values, factors, strict=True)]


def _odds(share: float, rng: Generator, step: float) -> float:
    """A share moved by a random step in its log-odds, within 0.001 to 0.999."""
    share = min(max(share, 0.001), 0.999)
    odds = math.log(share / (1 - share)) + step * rng.standard_normal()
    return min(max(rounded((1 + math.tanh(odds / 2)) / 2), 0.001), 0.999)
