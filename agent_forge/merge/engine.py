"""The engine: `merge(recipe)` gives weights that are computed tensor by tensor when asked for.

    weights = merge(parse_recipe(text))       # nothing is computed yet
    weights["model.norm.weight"]              # one tensor
    write(weights, Path("out"))               # the whole model, streamed

Arithmetic is in fp32 and rounds once, to the type of the result. A combo with NaN, infinity or no
variance is replaced by the plain mean and noted; NaN or infinity from another method is an error.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from agent_forge.errors import ConfigError, DamagedFile, NotFinite
from agent_forge.merge.combos import ALL, COMBO, Pair, agreement, combo_stages, fuse, second_stage
from agent_forge.merge.methods import RowKernel
from agent_forge.merge.plan import MergePlan, Parents, TensorMerge, make_plan
from agent_forge.merge.recipe import Recipe
from agent_forge.merge.spectral import is_treated, svc
from agent_forge.merge.tensor_inputs import RUN, Cache, TensorInputs, mean
from agent_forge.model.weights import HEAD, Weights, with_layers
from agent_forge.store.tensors import first_not_finite

ComputeRun = Callable[[int], list[Tensor]]  # position -> the results of one run
Bounds = tuple[float, float]  # the least and the largest value of a tensor


class TensorProblem(NamedTuple):
    """A tensor of a combo that was not usable as computed."""

    name: str
    problem: str
    combo: int | None = None


class MergedWeights(Weights):
    """The result of a merge; each tensor is computed when it is asked for."""

    def __init__(self, plan: MergePlan, cache: Cache | None = None, threads: int = 1) -> None:
        super().__init__(plan.specs, self.compute, label="merge", config=output_config(plan))
        self.plan = plan
        self.recipe = plan.recipe
        self.notes: list[TensorProblem] = []
        self._cache: Cache = {} if cache is None else cache
        self._anchored: np.ndarray | None = None
        choice = plan.recipe.vocabulary()
        self._read = (plan.recipe.dtype, choice and choice.model_dump_json())  # how inputs look
        self._whole = plan.recipe.model_copy(update={"combo": None, "layers": {}}).canonical_hash()
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def compute(self, name: str) -> Tensor:
        job, build = self.plan.jobs[name], self.recipe.method().build
        if build is None:
            assert self.recipe.combo is not None
            return self.combos(name, [self.recipe.combo])[self.recipe.combo]
        result = torch.empty(job.spec.shape, dtype=job.spec.dtype)
        if not job.spec.is_floating or not job.inputs:  # whole numbers, or nothing but a base
            return result.copy_(self._agreed(job))
        inputs = self._inputs(job)
        corrected = self.recipe.post_pass == "svc" and is_treated(name, job.spec.shape)
        exact = result.float() if corrected else result
        try:
            kernel = build(inputs, job.params)
        except LinAlgError:  # whose fault that is will be found out below
            kernel = torch.full(job.spec.shape, torch.nan)
        if isinstance(kernel, Tensor):
            exact.copy_(kernel)
        elif isinstance(kernel, RowKernel):
            _by_rows(inputs, kernel, exact)
        else:
            by_run = kernel  # for mypy: it is no longer of either type
            (bounds,) = self._fill(inputs, lambda at: [by_run(*inputs.run(at), at)], [exact])
        if corrected and bool(exact.isfinite().all()):
            result.copy_(svc(exact, inputs, self.recipe.merge_method))
        if corrected or isinstance(kernel, RowKernel | Tensor):
            low, high = torch.aminmax(result)
            bounds = float(low), float(high)
        self._check(inputs, result, bounds, None)
        return result

    def combos(self, name: str, which: Sequence[int] = ALL) -> dict[int, Tensor]:
        """One tensor of several combos, in one pass over the parents."""
        job = self.plan.jobs[name]
        results = {n: torch.empty(job.spec.shape, dtype=job.spec.dtype) for n in which}
        if not job.spec.is_floating:
            return {n: result.copy_(self._agreed(job)) for n, result in results.items()}
        inputs = self._combo_inputs(job)
        kernel = fuse(inputs, job.params, which, self.layer_choices(job, which))

        def compute_run(start: int) -> list[Tensor]:
            parts, base = inputs.run(start)
            assert base is not None
            found = kernel(parts, base, start)
            return [found[n] for n in which]

        bounds = self._fill(inputs, compute_run, [results[n] for n in which])
        for n, found in zip(which, bounds, strict=True):
            self._check(inputs, results[n], found, n)
        return results

    def layer_choices(self, job: TensorMerge, which: Sequence[int]) -> dict[Pair, int]:
        """The candidate that FrankenMerge takes for a tensor's layer, after each stage 2."""
        pairs = [(i, t) for i, t, s in map(combo_stages, which) if s == "frankenmerge"]
        if job.layer is None or not pairs:
            return {}
        if self.recipe.layers:
            return {pair: self.recipe.layers.get(job.layer, 0) for pair in pairs}
        choices: dict[Pair, int] = self._cache.setdefault(("layer", job.layer, self._whole), {})
        if missing := [pair for pair in dict.fromkeys(pairs) if pair not in choices]:
            choices.update(self._score_layer(job.layer, missing))
        return choices

    def _score_layer(self, layer: str, pairs: Sequence[Pair]) -> dict[Pair, int]:
        """The candidate that agrees best with the others, on the first run of each tensor."""
        total = dict.fromkeys(pairs, np.zeros(()))
        for job in self.plan.jobs.values():
            if job.layer != layer or not job.spec.is_floating or not job.spec.numel:
                continue
            inputs = self._combo_inputs(job)
            stage2 = second_stage(inputs, job.params, pairs)
            parts, base = inputs.run(0)
            assert base is not None
            merged = stage2(parts, base, 0)
            deltas = [part.sub_(base) for part in parts]
            for pair in pairs:
                rows = torch.stack([merged[pair].sub_(base), *deltas])
                total[pair] = total[pair] + (rows @ rows.T).double().numpy()
        return {pair: agreement(gram) for pair, gram in total.items()}

    def chosen_layers(self, combo: int) -> dict[str, int]:
        """For each layer the candidate that a combo takes, as it goes into its recipe."""
        i, t, s = combo_stages(combo)
        if s != "frankenmerge":
            return {}
        layers = {job.layer: job for job in self.plan.jobs.values() if job.layer}
        return {n: self.layer_choices(job, [combo]).get((i, t), 0) for n, job in layers.items()}

    def _combo_inputs(self, job: TensorMerge) -> TensorInputs:
        """The inputs; with the whole model's products where SLERP is to turn it as a whole."""
        inputs = self._inputs(job)
        if job.params["whole_model"]:
            if self._anchored is None:
                jobs = [job for job in self.plan.jobs.values() if job.spec.is_floating]
                self._anchored = np.sum([self._inputs(job).anchored() for job in jobs], axis=0)
            inputs.whole_model = self._anchored
        return inputs

    def _inputs(self, job: TensorMerge) -> TensorInputs:
        models, recipe = self.plan.models, self.recipe
        inputs = [models[ref][name] for ref, name in job.inputs]
        base = None if job.base is None else models[job.base[0]][job.base[1]]
        centred = job.base is None and recipe.merge_method == COMBO
        read_as = getattr(torch, recipe.dtype) if recipe.dtype else None
        key = (job.inputs, job.base, centred, *self._read)
        return TensorInputs(inputs, base, centred, job.name, recipe.seed, read_as, self._cache, key)

    def _agreed(self, job: TensorMerge) -> Tensor:
        """A tensor that is not computed with: all models have to share it."""
        places = filter(None, (*job.inputs, job.base))
        first, *others = [self.plan.models[ref][name] for ref, name in places]
        if any(not torch.equal(first, other) for other in others):
            raise ConfigError(f"{job.name} holds whole numbers that differ between the models")
        return first

    def _fill(self, x: TensorInputs, run_at: ComputeRun, results: list[Tensor]) -> list[Bounds]:
        """Compute and round every run; return the bounds of each result."""
        flats = [result.view(-1) for result in results]

        def work(start: int) -> list[Bounds]:
            bounds = []
            with torch.no_grad():
                for flat, run in zip(flats, run_at(start), strict=True):
                    low, high = torch.aminmax(flat[start : start + RUN].copy_(run))
                    bounds.append((float(low), float(high)))
            return bounds

        starts = range(0, x.numel, RUN)
        found = list(self._pool.map(work, starts) if self._pool else map(work, starts))
        if not found:
            return [(0.0, 0.0)] * len(flats)
        table = np.array(found)  # run, result, bound
        return list(zip(table[:, :, 0].min(0), table[:, :, 1].max(0), strict=True))

    def _check(self, x: TensorInputs, result: Tensor, bounds: Bounds, combo: int | None) -> None:
        """Replace a combo that cannot be used by the mean of its parents, and note it."""
        # What any other method gives is what was asked for, as long as it is finite.
        job, (low, high) = self.plan.jobs[x.name], bounds
        finite = np.isfinite(low) and np.isfinite(high)
        if finite and (combo is None or low < high or x.numel < 2):
            return
        if not finite:  # the parent that holds NaN or infinity is to blame, if there is one
            for ref, name in filter(None, (*job.inputs, job.base)):
                model = self.plan.models[ref]
                if first_not_finite({name: model[name]}):
                    path = model.sources[0] if len(model.sources) == 1 else ref
                    raise DamagedFile(path, f"{name} holds NaN or infinity", hint="fetch it again")
        flat = result.view(-1)
        if combo is not None:
            with torch.no_grad():
                average = torch.cat([mean(parts) for parts, _ in x.runs()])
                if finite and bool((average == average[:1]).all()):  # constant in the parents too
                    return
                flat.copy_(average.to(job.spec.dtype))
        if not bool(flat.isfinite().all()):
            problem = f"{self.recipe.merge_method} gives NaN or infinity for {job.name}"
            hint = "the parents are finite: look at the parameters and at out_dtype"
            raise NotFinite(problem, hint=hint)
        note = TensorProblem(job.name, "no variance" if finite else "NaN or infinity", combo)
        if note not in self.notes:
            self.notes.append(note)


def _by_rows(inputs: TensorInputs, rows: RowKernel, target: Tensor) -> None:
    """Runs of whole vectors; vectors along the first axis are turned to the last."""
    shape = tuple(inputs.shape) if len(inputs.shape) > 1 else (1, inputs.numel)

    def view(flat: Tensor) -> Tensor:
        shaped = flat.view(shape).transpose(0, -1) if rows.axis == 0 else flat.view(shape)
        return shaped.flatten(0, -2)

    tensors = [view(t) for t in inputs.tensors]
    base = None if inputs.base is None else view(inputs.base)
    out = torch.empty(tensors[0].shape, dtype=target.dtype)
    step = max(1, RUN // max(1, out.shape[-1]))
    for start in range(0, out.shape[0], step):
        stop = start + step
        parts = [inputs.read(t, start, stop) for t in tensors]
        below = None if base is None else inputs.read(base, start, stop)
        out[start:stop] = rows.kernel(parts, below, start).to(target.dtype)
    if rows.axis == 0:
        out = out.view(shape[-1], *shape[1:-1], shape[0]).transpose(0, -1)
    target.copy_(out.reshape(target.shape))


def output_config(plan: MergePlan) -> dict[str, object]:
    """config.json of the result: that of the base, or of the first model, with what has changed."""
    config = dict(plan.models[plan.recipe.references()[0]].config)
    if plan.recipe.slices:
        config = with_layers(config, plan.layers)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    if config and (key in config or plan.recipe.out_dtype or plan.recipe.dtype):
        largest = max(plan.specs.values(), key=lambda spec: spec.nbytes)
        config[key] = str(largest.dtype).removeprefix("torch.")
    if plan.vocabulary is not None:
        config["vocab_size"] = plan.vocabulary.size
        own = next(m.config for m in plan.models.values() if m.folder == plan.vocabulary.folder)
        config |= {key: own.get(key) for key in (*config, *own) if key.endswith("_token_id")}
    if config and any(map(HEAD.search, plan.jobs)):
        config["tie_word_embeddings"] = False
    return config


def merge(recipe: Recipe, parents: Parents | None = None, *, threads: int = 1) -> MergedWeights:
    """The weights that a recipe gives. Parents that are not handed in are opened from disk."""
    opened = Parents() if parents is None else parents
    return MergedWeights(make_plan(recipe, opened), opened.cache, threads)
