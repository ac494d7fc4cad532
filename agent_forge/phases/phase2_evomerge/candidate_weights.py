"""The weights of candidates: each made from its inputs, tensor by tensor, whenever needed.

A candidate is a recipe over other candidates, so its weights can always be made again. Those that
are made from others than the parents are kept in files while they are needed, which saves time and
decides nothing: with the folder emptied every byte comes out the same.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agent_forge.errors import ConfigError, NotFinite
from agent_forge.merge.combos import METHODS
from agent_forge.merge.engine import merge
from agent_forge.merge.methods import ADDS_BASE
from agent_forge.merge.plan import Parents, make_plan
from agent_forge.merge.recipe import LayerSlice, ModelInput, Recipe, SliceSource
from agent_forge.merge.tensor_inputs import Cache
from agent_forge.model import weights as layout
from agent_forge.model.folder import open_weights
from agent_forge.model.weights import Weights, at_layer, layer_of
from agent_forge.search.candidate import Candidate
from agent_forge.search.operators import Rows, generator
from agent_forge.store import files
from agent_forge.store.tensors import TensorSpec, first_not_finite, write_tensors

BASE, MEAN = "base", "mean"  # where task vectors start; the mean where no base is given
OUTSIDE, REST = "embeddings", "rest"
DENSITY, THINNING = 0.5, ("della", "breadcrumbs")  # the share that these keep
SUMMING = ("breadcrumbs", "breadcrumbs_ties", "della_linear")  # to whom an average needs weights
SAMPLED = 200_000  # weights that distances are measured on
_OF_COMBO = ("drop_rate", "keep", "amplification", "dfs_ratio")  # parameters of the merge engine
KEPT_NAME = 24  # digits of a key in the name of a file
OWN_NAME = re.compile(rf"[0-9a-f]{{{KEPT_NAME}}}\.safetensors")


class TensorGroups:
    """Which tensors share a merge coefficient: the embeddings, each layer, and the rest."""

    def __init__(self, names: Iterable[str]) -> None:
        self.of: dict[str, list[str]] = {}  # group -> texts, one of which is in each of its names
        for name in names:
            if match := layout.LAYER.match(name):
                group, text = f"layer {match.group(3)}", match.group(0)
            else:
                outside = layout.HEAD.search(name) or layout.BEFORE_LAYERS.search(name)
                group, text = OUTSIDE if outside else REST, name
            if text not in self.of.setdefault(group, []):
                self.of[group].append(text)

    @property
    def names(self) -> list[str]:
        return list(self.of)

    def group_of(self, name: str) -> str:
        """The group of a tensor, by the filters of a recipe."""
        return next(g for g, texts in self.of.items() if any(text in name for text in texts))

    def conditional(self, values: Mapping[str, float]) -> list[dict[str, object]]:
        """One number a group, as a parameter of a recipe."""
        return [{"filter": text, "value": values[g]} for g in self.of for text in self.of[g]]


def distance_matrix(samples: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """The distance between every two samples of weights, and the mean over pairs."""
    n = len(samples)
    matrix = np.zeros((n, n))
    for i, j in combinations(range(n), 2):
        length = np.linalg.norm(samples[i] - samples[j])
        if not np.isfinite(length):  # too large for single precision
            length = np.linalg.norm(samples[i].astype(np.float64) - samples[j])
        matrix[i, j] = matrix[j, i] = length
    return matrix, float(matrix.sum() / (n * (n - 1))) if n > 1 else 0.0


class CandidateWeights:
    """The weights of every candidate. `known` has those that a recipe may refer to."""

    def __init__(
        self,
        parents: Sequence[Weights],
        base: Weights | None,
        known: dict[str, Candidate],
        folder: Path,
        shared: Path | None = None,
    ) -> None:
        """`shared` is the folder of another process whose files may be read."""
        self.parents, self.base, self.known, self.folder = list(parents), base, known, folder
        self._shared = shared
        self._names = [f"parent{i}" for i in range(len(self.parents))]
        self._originals = Parents()
        self._originals.update(zip(self._names, self.parents, strict=True))
        mean = _mean(self._names)
        plan = make_plan(mean, self._originals)
        self.origin = MEAN if base is None else BASE
        self._originals[self.origin] = merge(mean, self._originals) if base is None else base
        self.specs, self.groups = plan.specs, TensorGroups(plan.specs)
        layers = (job.layer for job in plan.jobs.values() if job.layer is not None)
        self.layers = list(dict.fromkeys(layers))
        self._kept = set[str]()
        self._made = set[str]()  # files of methods, which take long
        self.input_grams: Callable[[], Cache] | None = None  # what RegMean needs

    def tensors(self, key: str) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a candidate, one at a time, finite, in the type of stored models."""
        path, specs, candidate = self._file(key), self.specs_of(key), self.known[key]
        source: Iterable[tuple[str, Tensor]]
        if path.is_file():
            source = open_weights(path).items()
        elif candidate.kind == "noise":
            source = self._noisy(candidate)
        elif candidate.kind == "stretch" or (
            candidate.kind == "merge" and candidate.operation["scale"] != 1.0
        ):
            source = self._scaled(candidate)
        else:
            source = self._merged(candidate).items()
        for name, tensor in source:
            if name not in specs:
                continue
            stored = tensor.to(specs[name].dtype)  # a base of another type does not change that
            if first_not_finite({name: stored}):
                raise NotFinite(f"{name} of candidate {key[:8]} holds NaN or infinity")
            yield name, stored

    def fill(self, network: nn.Module, key: str) -> str:
        """Overwrite the weights of a network with a candidate's; returns their sha256."""
        made = self._file(key).is_file()
        for source in () if made else (*self.known[key].inputs, key):
            kind = self.known[source].kind
            if kind == "method" or (kind != "parent" and source != key):
                self._write(source)
        targets = dict(network.state_dict())
        hashes: dict[str, str] = {}
        for name, tensor in self.tensors(key):
            if name not in targets:
                raise ConfigError(f"the network has no {name}")
            targets[name].copy_(tensor)
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            hashes[name] = hashlib.sha256(flat.numpy().data).hexdigest()
        # A tied head has no tensor of its own.
        written = {targets[name].data_ptr() for name in hashes}
        if left := [name for name, target in targets.items() if target.data_ptr() not in written]:
            raise ConfigError(f"candidate {key[:8]} has no {left[0]}, which its network needs")
        self._remove_others(self._kept)
        lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
        return hashlib.sha256(lines.encode()).hexdigest()

    def keep(self, keys: Iterable[str], methods: bool = False) -> None:
        """Have files of these candidates alone, and of the methods used so far if they are to be
        stretched on; what they are made from has files meanwhile."""
        self._made = self._made if methods else set()
        wanted = [key for key in keys if self.known[key].kind != "parent"]
        names = {self._file(key).name for key in wanted}
        for key in wanted:
            self._write(key)
            self._remove_others(self._kept | names)
        self._kept = names
        self._remove_others(names)

    def sample(self, of: str | nn.Module) -> np.ndarray:
        """Some weights of a candidate or in a network, always the same ones, for distances."""
        held = of.state_dict().items() if isinstance(of, nn.Module) else self.tensors(of)
        matrices = {name for name, spec in self.specs.items() if len(spec.shape) > 1}
        every = max(1, sum(self.specs[name].numel for name in matrices) // SAMPLED)
        chosen = ((name, t.detach().reshape(-1)[::every]) for name, t in held if name in matrices)
        parts = {name: part.to("cpu", torch.float32, copy=True) for name, part in chosen}
        return torch.cat([parts[name] for name in sorted(parts)]).numpy()

    def task_vectors(self, name: str) -> list[Tensor]:
        """One tensor of every parent, less that of the base."""
        start = self._originals[self.origin][name].float()
        return [parent[name].float() - start for parent in self.parents]

    def weights(self, key: str) -> Weights:
        """A candidate as weights that can be written; all of it is in memory."""
        tensors = dict(self.tensors(key))
        first, layers = self.parents[0], self.layers_of(key)
        config = first.config if layers is None else layout.with_layers(first.config, layers)
        return Weights(self.specs_of(key), tensors.__getitem__, config=config, folder=first.folder)

    def layers_of(self, key: str) -> list[int] | None:
        """Which layer each layer of a path was; None for all that have the parents' shape."""
        known = self.known[key]
        return [int(n) for _, n in known.operation["layers"]] if known.kind == "path" else None

    def specs_of(self, key: str) -> dict[str, TensorSpec]:
        layers = self.layers_of(key)
        if layers is None:
            return self.specs
        specs = {name: spec for name, spec in self.specs.items() if layer_of(name) is None}
        for place, layer in enumerate(layers):
            specs |= {at_layer(n, place): s for n, s in self.specs.items() if layer_of(n) == layer}
        return specs

    def size(self, key: str) -> tuple[float, float]:
        """The weights in the layers, and the bytes of all, as multiples of the parents'."""
        if self.layers_of(key) is None:
            return 1.0, 1.0
        both = self.specs_of(key), self.specs
        inside = [sum(s.numel for n, s in x.items() if layer_of(n) is not None) for x in both]
        nbytes = [sum(spec.nbytes for spec in specs.values()) for specs in both]
        return inside[0] / inside[1], nbytes[0] / nbytes[1]

    def _merged(self, candidate: Candidate) -> Mapping[str, Tensor]:
        if candidate.kind == "parent":
            return self.parents[int(candidate.operation["index"])]
        refs, models = self._inputs(candidate)
        if candidate.kind == "average":
            return merge(_mean(refs), models)
        if candidate.kind == "method":
            return self._by_method(refs, candidate.operation, models)
        make = {"blend": self._blend, "shift": self._shift, "path": self._path}
        return merge(make.get(candidate.kind, self._combo)(refs, candidate.operation), models)

    def _combo(self, refs: Sequence[str], operation: Mapping[str, Any]) -> Recipe:
        return Recipe(
            combo=operation["combo"],
            models=self._weighted(refs, operation["weights"]),
            base_model=BASE if self.base is not None else None,
            parameters={name: operation[name] for name in _OF_COMBO if name in operation},
            layers=operation["layers"],
            seed=operation["seed"],
        )

    def _by_method(
        self, refs: Sequence[str], operation: Mapping[str, Any], models: Parents
    ) -> Mapping[str, Tensor]:
        method = operation["method"]
        parameters = {"density": DENSITY} if method.startswith(THINNING) else {}
        parameters |= {"weight": 1 / len(refs)} if method in SUMMING else {}
        if method == "regmean":
            if self.input_grams is None:
                hint = "evolve again on the same data"
                raise ConfigError("regmean cannot be made without the items it read", hint=hint)
            models = Parents()
            models.update(self._originals)
            models.cache = self.input_grams()
        name = "task_arithmetic" if method == "svc" else method
        recipe = Recipe(
            merge_method=name,
            models=[ModelInput(model=ref) for ref in refs],
            base_model=None if METHODS[name].base in ADDS_BASE else self.origin,
            parameters=parameters,
            post_pass="svc" if method == "svc" else None,
            seed=operation["seed"],
        )
        return merge(recipe, models)

    def _blend(self, refs: Sequence[str], operation: Mapping[str, Any]) -> Recipe:
        """base + scale * sum c (parent - base), by a method of the merge engine."""
        parameters, method = {"normalize": False, "lambda": operation["scale"]}, operation["method"]
        if density := operation["density"]:
            parameters["density"] = self.groups.conditional(density)
        return Recipe(
            merge_method="task_arithmetic" if method == "linear" else method,
            models=self._weighted(refs, operation["coefficients"]),
            base_model=self.origin,
            parameters=parameters,
            seed=operation["seed"],
        )

    def _shift(self, refs: Sequence[str], operation: Mapping[str, Any]) -> Recipe:
        """input + sum c (parent - base); the base is the parents' mean where there is none."""
        ref, n = refs[0], len(self._names)
        rows = {group: list(row) for group, row in operation["coefficients"].items()}
        sums = {group: sum(row) for group, row in rows.items()}
        if self.base is None:
            rows = {group: [c - sums[group] / n for c in row] for group, row in rows.items()}
        inputs = []
        if ref in self._names:  # a parent: its own coefficient is what is left of it
            own = self._names.index(ref)
            for row in rows.values():
                row[own] += 1.0
        else:
            inputs.append(ModelInput(model=ref, parameters={"weight": 1.0}))
        inputs += self._weighted(self._names, rows)
        if self.base is not None:
            back = self.groups.conditional({group: -total for group, total in sums.items()})
            inputs.append(ModelInput(model=BASE, parameters={"weight": back}))
        return Recipe(merge_method="linear", models=inputs, parameters={"normalize": False})

    def _path(self, refs: Sequence[str], operation: Mapping[str, Any]) -> Recipe:
        """Each layer of one input alone, and outside the layers the first input alone."""

        def source(i: int, chosen: int, layer: int) -> SliceSource:
            texts = self.groups.of[f"layer {layer}"]
            weight = [{"filter": text, "value": float(i == chosen)} for text in texts]
            parameters = {"weight": [*weight, {"value": float(i == 0)}]}
            return SliceSource(model=refs[i], layer_range=[layer, layer + 1], parameters=parameters)

        rows = [[source(i, *place) for i in range(len(refs))] for place in operation["layers"]]
        return Recipe(merge_method="linear", slices=[LayerSlice(sources=row) for row in rows])

    def _scaled(self, candidate: Candidate) -> Iterator[tuple[str, Tensor]]:
        """base + scale * (merge or input - base)."""
        base: Mapping[str, Tensor] = self._originals[self.origin]
        if candidate.kind == "stretch":
            source: Iterable[tuple[str, Tensor]] = self.tensors(candidate.inputs[0])
        else:
            plain = Candidate({**candidate.operation, "scale": 1.0}, candidate.inputs)
            refs, models = self._inputs(candidate)
            base = base if self.base is not None else merge(_mean(refs), models)
            source = self._merged(plain).items()
        for name, tensor in source:
            if tensor.is_floating_point():
                moved = base[name].float().lerp(tensor.float(), candidate.operation["scale"])
                tensor = moved.to(tensor.dtype)
            yield name, tensor

    def _noisy(self, candidate: Candidate) -> Iterator[tuple[str, Tensor]]:
        """Gaussian noise on a share of the weights of every matrix."""
        operation = candidate.operation
        for name, tensor in self.tensors(candidate.inputs[0]):
            if tensor.is_floating_point() and tensor.ndim > 1:
                rng = generator(operation["seed"], name)
                noise = rng.standard_normal(tensor.numel(), dtype=np.float32)
                noise *= rng.random(tensor.numel(), dtype=np.float32) < operation["rate"]
                noise *= np.float32(operation["sigma"])
                moved = tensor.float() + torch.from_numpy(noise).view(tensor.shape)
                tensor = moved.to(tensor.dtype)
            yield name, tensor

    def _inputs(self, candidate: Candidate) -> tuple[list[str], Parents]:
        """What a recipe calls the inputs of a candidate, and the models behind the names."""
        refs, models = [], self._originals
        for key in candidate.inputs:
            source = self.known[key]
            if source.kind == "parent":
                refs.append(self._names[source.operation["index"]])
                continue
            if models is self._originals:  # what is measured on passing candidates is not kept
                models = Parents()
                models.update(self._originals)
            models[key] = open_weights(self._write(key))
            refs.append(key)
        return refs, models

    def _write(self, key: str) -> Path:
        path = self._file(key)
        if self.known[key].kind == "method":
            self._made.add(path.name)
        if not path.exists():
            tensors = dict(self.tensors(key))
            with files.writing(path) as writer:
                write_tensors(writer, tensors)
        return path

    def _remove_others(self, names: set[str]) -> None:
        for path in self._files():
            if path.name not in names | self._made:
                files.remove(path)

    def _files(self) -> list[Path]:
        """The files of candidates that are there; whatever else is in the folder is not ours."""
        named = (p for p in sorted(self.folder.glob("*")) if OWN_NAME.fullmatch(p.name))
        return [path for path in map(files.refuse_link, named) if path.is_file()]

    def _file(self, key: str) -> Path:
        """A shared one is linked here, since its owner may remove it at any moment."""
        path = self.folder / f"{key[:KEPT_NAME]}.safetensors"
        if self._shared is not None and not path.exists():
            with suppress(OSError):  # not there, or no links here: it is made from its inputs
                os.link(self._shared / path.name, path)
        return path

    def _weighted(self, refs: Sequence[str], rows: Rows) -> list[ModelInput]:
        """Models with a weight for every group; a row has one number a model."""
        columns = [{group: row[i] for group, row in rows.items()} for i in range(len(refs))]
        weights = [{"weight": self.groups.conditional(column)} for column in columns]
        return [ModelInput(model=r, parameters=w) for r, w in zip(refs, weights, strict=True)]


def _mean(refs: Sequence[str]) -> Recipe:
    return Recipe(merge_method="linear", models=[ModelInput(model=ref) for ref in refs])
