"""From a recipe and its parents to one TensorMerge for each output tensor."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from agent_forge.errors import ConfigError
from agent_forge.merge.methods import ADDS_BASE
from agent_forge.merge.recipe import LayerSlice, Recipe, SliceSource, check_filters, first_value
from agent_forge.merge.spectral import require_grams
from agent_forge.merge.tensor_inputs import Cache
from agent_forge.merge.vocabulary import Vocabulary, align
from agent_forge.model import weights
from agent_forge.model.folder import open_weights
from agent_forge.model.weights import HEAD, Weights, at_layer, layer_count
from agent_forge.store.tensors import TensorSpec

TensorPlace = tuple[str, str]  # a model and the name of a tensor in it


class Parents(dict[str, Weights]):
    """The models of one or many recipes, opened once, with what was measured on them."""

    def __init__(self, models: Mapping[str, nn.Module | Mapping[str, Tensor]] = {}) -> None:
        super().__init__({ref: weights.from_memory(model, ref) for ref, model in models.items()})
        self.cache: Cache = {}

    def open(self, references: Iterable[str]) -> None:
        """Open the models that are not open yet."""
        for ref in references:
            if ref not in self:
                self[ref] = open_weights(ref)


@dataclass(frozen=True)
class TensorMerge:
    """One output tensor: its inputs, base and parameters."""

    name: str
    spec: TensorSpec
    inputs: tuple[TensorPlace, ...]
    base: TensorPlace | None
    params: dict[str, Any] = field(hash=False)  # shared values, and a list for each per-input one

    @property
    def layer(self) -> str | None:
        layer = weights.layer_of(self.name)
        return None if layer is None else str(layer)


@dataclass(frozen=True)
class MergePlan:
    """All jobs of a recipe, in the order of the output file."""

    recipe: Recipe
    models: Mapping[str, Weights]  # with their vocabularies aligned
    jobs: dict[str, TensorMerge]
    vocabulary: Vocabulary | None
    layers: tuple[int, ...]  # of the first source, one for each layer of the result

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: job.spec for name, job in self.jobs.items()}


def make_plan(recipe: Recipe, parents: Parents) -> MergePlan:
    """The plan of a recipe; parents that do not fit together are an error."""
    require_grams(recipe.merge_method, parents.cache)
    parents.open(recipe.references())
    models: Mapping[str, Weights] = parents
    vocabulary = None
    if choice := recipe.vocabulary():
        models, vocabulary = align(recipe, choice, parents)
    parts = recipe.slices or [_whole(recipe, models)]
    jobs: dict[str, TensorMerge] = {}
    done: list[int] = []
    planners = [_Planner(recipe, models, part) for part in parts]
    jobs.update(planners[0].outside_layers(before=True))
    for planner in planners:
        start, stop = planner.part.sources[0].layer_range
        for i in range(stop - start):
            position = i / (stop - start - 1) if stop - start > 1 else 1.0
            jobs.update(planner.layer(i, len(done), position))
            done.append(start + i)
    jobs.update(planners[-1].outside_layers(before=False))
    if not jobs:
        raise ConfigError("there is nothing to merge: the models hold no tensors")
    sources = [name for job in jobs.values() for _, name in job.inputs]
    check_filters(recipe, [*jobs, *sources, "lm_head.weight"])  # a tied head has no tensor
    return MergePlan(recipe, models, jobs, vocabulary, tuple(done))


def _whole(recipe: Recipe, models: Mapping[str, Weights]) -> LayerSlice:
    """The models as one slice over all of their layers."""
    counts = {ref: layer_count(models[ref]) for ref in recipe.references()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{ref}: {n}" for ref, n in counts.items())
        hint = "use slices to say which layers go together"
        raise ConfigError(f"the models have different numbers of layers ({listed})", hint=hint)
    shared: dict[str, Any] = {"layer_range": [0, next(iter(counts.values()))]}
    sources = [SliceSource.model_construct(**dict(model), **shared) for model in recipe.models]
    return LayerSlice.model_construct(sources=sources, base_model=None, parameters={})


class _Planner:
    """The jobs of one slice."""

    def __init__(self, recipe: Recipe, models: Mapping[str, Weights], part: LayerSlice) -> None:
        self.recipe, self.models, self.part = recipe, models, part
        self.method = recipe.method()
        base = part.base_model or recipe.base_model
        first = {s.model: s.layer_range[0] for s in part.sources}
        if base and not recipe.slices:
            first.setdefault(base, 0)
        self.inputs = recipe.inputs(part)
        self.base = base if self.method.base not in ADDS_BASE and base in first else None
        named = [*self.inputs, *([self.base] if self.base else [])]
        self.first = {ref: first[ref] for ref in named}
        self.own = {s.model: s.parameters for s in part.sources}
        low, high = part.sources[0].layer_range
        for ref, start in self.first.items():
            if (end := start + high - low) > (count := layer_count(models[ref])):
                raise ConfigError(f"{ref} has {count} layers, not {end}")

    def layer(self, i: int, out: int, position: float) -> Iterator[tuple[str, TensorMerge]]:
        """Layer `out` of the result, from layer i of the slice."""
        here = {ref: start + i for ref, start in self.first.items()}
        named = (name for ref, n in here.items() for name in self.models[ref].by_layer.get(n, ()))
        for name in dict.fromkeys(at_layer(name, 0) for name in named):
            sources = {ref: at_layer(name, n) for ref, n in here.items()}
            yield at_layer(name, out), self._job(at_layer(name, out), sources, position)

    def outside_layers(self, *, before: bool) -> Iterator[tuple[str, TensorMerge]]:
        names = [name for ref in self.first for name in self.models[ref].by_layer.get(None, ())]
        models = [self.models[ref] for ref in self.recipe.references()]
        tied = all(map(weights.is_tied, models))
        if not tied:  # the last slice may be of a tied model, but the result has a head
            names += [name for model in models for name in model if HEAD.search(name)]
        for name in dict.fromkeys(names):
            if bool(weights.BEFORE_LAYERS.search(name)) != before or (tied and HEAD.search(name)):
                continue
            yield name, self._job(name, dict.fromkeys(self.first, name), 0.0)

    def _job(self, name: str, sources: dict[str, str], position: float) -> TensorMerge:
        """An output tensor from the tensor of each model that `sources` names."""
        found = {ref: (ref, self.models[ref].used_as(own)) for ref, own in sources.items()}
        if lacking := [ref for ref, (_, source) in found.items() if not source]:
            having = ", ".join(ref for ref in found if ref not in lacking)
            problem = f"tensor {name!r} is in {having} but missing in {', '.join(lacking)}"
            raise ConfigError(problem, hint="only models of the same architecture can be merged")
        specs = {ref: self.models[ref].specs[source] for ref, (_, source) in found.items()}
        if len({spec.shape for spec in specs.values()}) > 1:
            shapes = ", ".join(f"{ref}: {list(spec.shape)}" for ref, spec in specs.items())
            hint = "only models of the same architecture and size can be merged"
            if weights.is_vocabulary(name):
                hint = "tokenizer: union (or base) in the recipe makes the vocabularies equal"
            raise ConfigError(f"{name} has different shapes ({shapes})", hint=hint)
        spec = TensorSpec(self._type(specs), next(iter(specs.values())).shape)
        inputs, base = (found[ref] for ref in self.inputs), found[self.base] if self.base else None
        return TensorMerge(name, spec, tuple(inputs), base, self._params(name, sources, position))

    def _type(self, specs: Mapping[str, TensorSpec]) -> torch.dtype:
        types = [spec.dtype for spec in specs.values()]
        wanted = self.recipe.out_dtype or self.recipe.dtype
        if wanted and all(dtype.is_floating_point for dtype in types):
            return getattr(torch, wanted)  # type: ignore[no-any-return]
        for ref, spec in specs.items():
            if spec.is_floating and spec.dtype.itemsize == 1:
                hint = "set out_dtype: bfloat16 in the recipe, or convert the model first"
                problem = f"{ref} has weights of 8 bits ({spec.dtype})"
                raise ConfigError(f"{problem}, in which nothing can be merged", hint=hint)
        try:
            return reduce(torch.promote_types, types)
        except RuntimeError as error:  # 8-bit floats have no common type with others
            raise ConfigError(f"weights of types {types} cannot be merged ({error})") from error

    def _params(self, name: str, sources: dict[str, str], position: float) -> dict[str, Any]:
        common: list[dict[str, Any]] = [self.part.parameters, self.recipe.parameters]
        params: dict[str, Any] = {}
        for key, default in self.method.shared.items():
            params[key] = first_value(common, key, name, position, default)
        for key, default in self.method.per_input.items():
            scopes = [(sources[ref], [self.own.get(ref, {}), *common]) for ref in self.inputs]
            params[key] = [first_value(s, key, source, position, default) for source, s in scopes]
        return params
