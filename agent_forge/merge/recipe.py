"""Recipes: mergekit's YAML as it is, and what we add to it (combos, seed, lineage).

A recipe and its parents determine every byte of the result. Whatever a recipe says that has no
effect here is an error that names it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from agent_forge.config.load import did_you_mean, dump_yaml, parse_yaml, read_one, validate
from agent_forge.config.settings import Settings
from agent_forge.errors import ConfigError
from agent_forge.merge.combos import COMBO, METHODS, combo_stages, parse_combo
from agent_forge.merge.methods import ADDS_BASE, MergeMethod
from agent_forge.merge.spectral import SPECTRAL

TYPES = ("bfloat16", "float16", "float32", "float64")
RANGES = {"drop_rate": (0.0, 0.9999), "keep": (0.0001, 1.0), "dfs_ratio": (0.0, 1.0)}
RANGES["amplification"] = (0.0, 10_000.0)  # 0: what makes up for what is dropped
RANGES |= dict.fromkeys(("density", "gamma", "t", "select_topk", "rho", "off_diagonal"), (0.0, 1.0))
RANGES |= dict.fromkeys(("epsilon", "max_iter", "tol", "steps"), (0.0, math.inf))
LARGEST = 3.4e38  # what fp32 can hold
OURS = ("combo", "post_pass", "seed", "layers", "parents", "parents_settings")


def _reference(value: Any) -> Any:
    """`path`, `base+adapter`, or mergekit's mapping of the same."""
    if isinstance(value, Mapping) and set(value) <= {"model", "lora"}:
        parts = [value.get("model"), *([value["lora"]] if value.get("lora") else [])]
        paths = [p["path"] if isinstance(p, Mapping) and set(p) == {"path"} else p for p in parts]
        return "+".join(paths) if all(isinstance(path, str) for path in paths) else value
    return value


def _type_name(value: str) -> str:
    name = value.removeprefix("torch.")
    if name not in TYPES:
        raise ValueError(f"unknown type{did_you_mean(name, TYPES)}")
    return name


Reference = Annotated[str, BeforeValidator(_reference), Field(min_length=1)]
Combo = Annotated[int, BeforeValidator(parse_combo)]
TypeName = Annotated[str, AfterValidator(_type_name)]
Parameters = Annotated[dict[str, Any], BeforeValidator(lambda v: {} if v is None else v)]


class ModelInput(Settings):
    """One model of a merge, with parameters of its own."""

    model: Reference = Field(description="a folder or a file; base+adapter for a LoRA")
    parameters: Parameters = Field({}, description="parameters for this model alone")


class SliceSource(ModelInput):
    """Some layers of a model."""

    layer_range: list[Annotated[int, Field(ge=0)]] = Field(
        min_length=2, max_length=2, description="the first layer, and the last one + 1"
    )


class LayerSlice(Settings):
    """A run of output layers, merged from equally long runs of input layers."""

    sources: list[SliceSource] = Field(min_length=1, description="the layers that are merged")
    base_model: Reference | None = Field(None, description="the base for this slice")
    parameters: Parameters = Field({}, description="parameters for this slice")


class TokenizerChoice(Settings):
    """Whose vocabulary the result has."""

    source: Reference = Field("union", description="base, union or a model")
    pad_to_multiple_of: int | None = Field(None, ge=1, description="rows are added up to it")


Tokenizer = Annotated[
    TokenizerChoice, BeforeValidator(lambda v: {"source": v} if isinstance(v, str) else v)
]


class Recipe(Settings):
    """Everything that determines the result of a merge, beside the parents' bytes."""

    merge_method: str = Field(COMBO, description="the method by which tensors are merged")
    models: list[ModelInput] = Field([], description="the models that are merged")
    slices: list[LayerSlice] = Field([], max_length=1000, description="or the layers to stack")
    base_model: Reference | None = Field(None, description="task vectors are differences from it")
    parameters: Parameters = Field({}, description="parameters of the method")
    dtype: TypeName | None = Field(None, description="inputs are rounded to this type first")
    out_dtype: TypeName | None = Field(None, description="the type of the result")
    tokenizer_source: Reference | None = Field(None, description="whose vocabulary the result has")
    tokenizer: Tokenizer | None = Field(None, description="the same, and padding")
    post_pass: Literal["svc"] | None = Field(None, description="a correction of the result")
    combo: Combo | None = Field(None, description="one of the eight combinations")
    seed: int = Field(0, ge=0, lt=2**63, description="the seed of every random mask")
    layers: dict[str, int] = Field({}, description="layer -> 0: the merged one, n: of parent n")
    parents: dict[str, str] = Field({}, description="the sha256 that each parent must have")
    parents_settings: dict[str, str] = Field({}, description="and that of the files beside it")

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        if self.merge_method not in METHODS:
            known = did_you_mean(self.merge_method, list(METHODS))
            raise ValueError(f"unknown merge_method {self.merge_method!r}{known}")
        if self.combo is None and "merge_method" not in self.model_fields_set:
            raise ValueError(f"merge_method is missing; known: {', '.join(METHODS)}")
        if (self.merge_method == COMBO) != (self.combo is not None):
            raise ValueError("merge_method: combo and combo: NUMBER go together")
        if bool(self.models) == bool(self.slices):
            raise ValueError("exactly one of models and slices is needed")
        if self.tokenizer and self.tokenizer_source:
            raise ValueError("tokenizer and tokenizer_source say the same; name one of them")
        if self.post_pass and self.method().base != "required":
            raise ValueError(f"post_pass corrects task vectors, which {self.merge_method} has not")
        for where, settings, shared in _groups(self):
            for name, setting in settings.items():
                _check_parameter(self, where, name, setting, shared)
        for part in self.slices:
            lengths = {source.layer_range[1] - source.layer_range[0] for source in part.sources}
            if len(lengths) > 1 or min(lengths) < 1:
                raise ValueError("the sources of a slice need equally many layers, at least one")
        _check_count(self)
        if self.layers and (self.combo is None or combo_stages(self.combo)[2] != "frankenmerge"):
            raise ValueError("layers are chosen by FrankenMerge alone")
        if any(not 0 <= choice <= len(self.models) for choice in self.layers.values()):
            raise ValueError(f"layers: 0 is the merged one, 1 to {len(self.models)} are the models")
        return self

    def method(self) -> MergeMethod:
        return METHODS[self.merge_method]

    def is_spectral(self) -> bool:
        """True if matrices are decomposed."""
        return self.post_pass is not None or self.merge_method in SPECTRAL

    def vocabulary(self) -> TokenizerChoice | None:
        """Whose vocabulary the result has; None leaves the rows as they are."""
        source = self.tokenizer_source
        return TokenizerChoice(source=source) if source else self.tokenizer

    def inputs(self, part: LayerSlice) -> list[str]:
        """The models that are merged in a slice, in order; what is only a base is none."""
        names, method = [s.model for s in part.sources], self.method()
        base = part.base_model or self.base_model
        if base and base not in names and not self.slices and method.base in ADDS_BASE:
            names.append(base)
        if method.base in ("required", "optional") and base in names:
            names.remove(base)
        if method.base == "first" and base in names:
            names.insert(0, names.pop(names.index(base)))
        return names

    def references(self) -> list[str]:
        """Every model that is named, in order, the base first."""
        listed = [m.model for m in self.models]
        listed += [s.model for part in self.slices for s in part.sources]
        bases = [self.base_model, *(part.base_model for part in self.slices)]
        return list(dict.fromkeys([*(b for b in bases if b), *listed]))


def _groups(recipe: Recipe) -> Iterator[tuple[str, Parameters, bool]]:
    """Each place with parameters, and whether parameters of the whole merge may stand there."""
    yield "parameters", recipe.parameters, True
    for i, model in enumerate(recipe.models):
        yield f"models.{i}.parameters", model.parameters, False
    for i, part in enumerate(recipe.slices):
        yield f"slices.{i}.parameters", part.parameters, True
        for j, source in enumerate(part.sources):
            yield f"slices.{i}.sources.{j}.parameters", source.parameters, False


def _check_parameter(recipe: Recipe, where: str, name: str, setting: Any, shared: bool) -> None:
    method = recipe.method()
    defaults = {**method.shared, **method.per_input}
    if name == "int8_mask":  # a memory option of mergekit; masks are never stored here
        return
    if name not in defaults:
        near = did_you_mean(name, list(defaults))
        raise ValueError(f"{recipe.merge_method} has no parameter {name!r} ({where}){near}")
    if name in method.shared and not shared:
        raise ValueError(f"{name!r} is of the whole merge, so it cannot stand in {where}")
    low, high = RANGES.get(name, (-math.inf, math.inf))
    for value in _values(setting, f"{where}.{name}"):
        number = _typed(value, defaults[name], f"{where}.{name}")
        if number is not None and not low <= number <= high:
            raise ValueError(f"{where}.{name}: {number} is not between {low} and {high}")
        if name == "max_iter" and number is not None and number % 1:
            raise ValueError(f"{where}.{name}: {number} is no whole number")


def _values(setting: Any, where: str) -> Iterator[Any]:
    """All plain values of a setting: a value, a gradient, or either of them under filters."""
    if isinstance(setting, Mapping):
        if set(setting) - {"value", "filter"} or "value" not in setting:
            raise ValueError(f"{where}: a conditional value has `value` and perhaps `filter`")
        yield from _values(setting["value"], where)
    elif isinstance(setting, list):
        if not setting:
            raise ValueError(f"{where}: the list is empty")
        plain = [not isinstance(item, Mapping) for item in setting]
        nested = any(item is None or isinstance(item, list) for item in setting)
        if any(plain) and (nested or not all(plain)):
            raise ValueError(f"{where}: a list holds numbers, or conditional values, not both")
        for item in setting:
            yield from _values(item, where)
    else:
        yield setting


def _typed(value: Any, default: Any, where: str) -> Any:
    """A value in the type of the parameter's default; a parameter without one is a number."""
    if isinstance(default, bool):
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
    elif value is None and default is None:
        return None
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if abs(number := float(value)) <= LARGEST:
                return number
    kind = "true or false" if isinstance(default, bool) else "a finite number"
    raise ValueError(f"{where}: {value!r} is not {kind}")


def _check_count(recipe: Recipe) -> None:
    method, models = recipe.method(), list[Any](recipe.models)
    for part in recipe.slices or [LayerSlice.model_construct(sources=models)]:
        names = [s.model for s in part.sources]
        base = part.base_model or recipe.base_model
        if len(set(names)) != len(names):
            raise ValueError("a model is listed twice")
        if recipe.slices and base and method.base in ("required", "first") and base not in names:
            raise ValueError(f"the base {base!r} is not among the sources of a slice")
        if method.base == "required" and not base:
            raise ValueError(f"{recipe.merge_method} needs a base_model")
        n, least, most = len(recipe.inputs(part)), method.least, method.most
        if n < least or (most is not None and n > most):
            wanted = f"exactly {least}" if least == most else f"{least} to {most or 'any number'}"
            raise ValueError(f"{recipe.merge_method} takes {wanted} models beside a base, not {n}")


def resolve(setting: Any, name: str, position: float, default: Any) -> Any:
    """The value of a setting for a tensor at `position`, 0 to 1 in a slice; None if none fits."""
    options = [setting] if isinstance(setting, Mapping) else setting
    if not isinstance(options, list):
        return _typed(options, default, name)
    if not options or isinstance(options[0], Mapping):
        for option in options:
            wanted = option.get("filter")
            if wanted in (None, "*") or str(wanted) in name:
                return resolve(option["value"], name, position, default)
        return None
    values = [_typed(value, default, name) for value in options]
    place = position * (len(values) - 1)
    low = int(place)
    if isinstance(default, bool):
        return values[low]
    high = min(low + 1, len(values) - 1)
    return (1 - (place - low)) * values[low] + (place - low) * values[high]


def first_value(scopes: list[Parameters], key: str, name: str, at: float, default: Any) -> Any:
    """The value of the first scope that has one for this tensor, else the default."""
    values = (resolve(scope[key], name, at, default) for scope in scopes if key in scope)
    return next((value for value in values if value is not None), default)


def check_filters(recipe: Recipe, tensors: Sequence[str]) -> None:
    """Refuse a filter that matches none of these tensors: it is a slip."""
    for where, settings, _ in _groups(recipe):
        for name, setting in settings.items():
            for option in setting if isinstance(setting, list) else [setting]:
                part = option.get("filter") if isinstance(option, Mapping) else None
                if part not in (None, "*") and not any(str(part) in tensor for tensor in tensors):
                    problem = f"{where}.{name}: the filter {str(part)!r} matches no tensor"
                    hint = f"a filter is a part of a name, such as {tensors[0]}"
                    raise ConfigError(problem, hint=hint)


def read_recipe(path: Path) -> Recipe:
    """A recipe file: mergekit's YAML or ours. Models are named relative to the current folder."""
    return validate(Recipe, read_data(path), str(path))


def read_data(path: Path) -> dict[str, Any]:
    """What a recipe file says; keys that only carry an anchor for others are left out."""
    data = read_one(path, Recipe.model_fields)
    if not data:
        raise ConfigError(f"{path} is empty, so it is no recipe")
    return data


def parse_recipe(text: str) -> Recipe:
    return validate(Recipe, parse_yaml(text, "recipe", Recipe.model_fields), "recipe")


def to_yaml(recipe: Recipe) -> str:
    """The recipe with nothing that is a default."""
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    return dump_yaml({"merge_method": recipe.merge_method, **data})


def to_mergekit(recipe: Recipe) -> str:
    """The recipe as mergekit's YAML, with every weight spelled out; an error where it has none."""
    for name in (recipe.post_pass, recipe.merge_method):
        if name == COMBO or name == "svc" or name in SPECTRAL:
            raise ConfigError(f"{name} cannot be said in mergekit's YAML")
    if recipe.merge_method == "slerp" and len(recipe.models) > 2:
        raise ConfigError("mergekit's slerp takes two models")
    data = recipe.model_dump(mode="json", exclude_defaults=True, exclude=set(OURS))
    data = {"merge_method": recipe.merge_method, **data}
    method = recipe.method()
    needed = {"t": method.shared.get("t"), "weight": method.per_input.get("weight")}
    if parameters := {k: v for k, v in needed.items() if v is not None} | recipe.parameters:
        data["parameters"] = parameters
    if recipe.merge_method == "slerp" and not recipe.base_model:
        data["base_model"] = (recipe.models or recipe.slices[0].sources)[0].model
    return dump_yaml(data)
