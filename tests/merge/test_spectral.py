"""Spectral methods: what their formulas say, beside a plain SVD, and what must not matter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_forge.errors import ConfigError, DamagedFile, NotEnough
from agent_forge.merge import spectral
from agent_forge.merge.engine import Parents, merge
from agent_forge.merge.output import write
from agent_forge.merge.preflight import preflight
from agent_forge.merge.recipe import Recipe, to_mergekit, to_yaml
from agent_forge.merge.spectral import GRAM, thin_svd

NAME = "model.layers.0.mlp.up_proj.weight"
DECOMPOSED = ("tsv_m", "iso_c", "swudi")
SHAPES = ((12, 20), (20, 12), (16, 16))


def noise(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def recipe(method: str, models: str = "abc", **rest: Any) -> Recipe:
    fields = {"merge_method": method, "models": [{"model": name} for name in models], **rest}
    return Recipe.model_validate({"base_model": "base", **fields})


def merged(method: str, deltas: list[Tensor], name: str = NAME, **rest: Any) -> Tensor:
    """What a method adds to a base."""
    base = noise(99, *deltas[0].shape).double()
    letters = "abcdefgh"[: len(deltas)]
    models = {letter: {name: base + d} for letter, d in zip(letters, deltas, strict=True)}
    parents = Parents({"base": {name: base}, **models})
    return merge(recipe(method, letters, **rest), parents)[name] - base


def near(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    assert float((a - b).norm()) <= tolerance * max(1e-3, float(b.norm()))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_decomposition_is_that_of_a_plain_svd(shape: tuple[int, int]) -> None:
    a = noise(1, *shape).double()
    u, s, v = thin_svd(a)
    near(u * s @ v.T, a, 1e-10)
    near(s, torch.linalg.svdvals(a), 1e-10)
    near(u.T @ u, torch.eye(len(s), dtype=torch.float64), 1e-8)
    low = noise(2, shape[0], 3).double() @ noise(3, 3, shape[1]).double()
    assert len(thin_svd(low)[1]) == 3
    assert len(thin_svd(torch.zeros(shape, dtype=torch.float64))[1]) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_tsv_m_follows_its_formula(shape: tuple[int, int]) -> None:
    deltas = [noise(i, *shape) for i in (1, 2, 3)]
    kept = min(shape) // 3
    parts = [torch.linalg.svd(d.double(), full_matrices=False) for d in deltas]

    def polar(a: Tensor) -> Tensor:
        p, _, q = torch.linalg.svd(a, full_matrices=False)
        return p @ q

    u = polar(torch.cat([u[:, :kept] for u, _, _ in parts], 1))
    v = polar(torch.cat([vt[:kept].T for _, _, vt in parts], 1))
    s = torch.cat([s[:kept] for _, s, _ in parts])
    near(merged("tsv_m", deltas), u * s @ v.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_iso_c_follows_its_formula(shape: tuple[int, int]) -> None:
    deltas = [noise(i, *shape) for i in (1, 2, 3)]
    u, s, vt = torch.linalg.svd(sum(deltas).double(), full_matrices=False)
    near(merged("iso_c", deltas), s.mean() * u @ vt)
    values = torch.linalg.svdvals(merged("iso_c", deltas, parameters={"lambda": 1.3}))
    assert values.min() == pytest.approx(1.3 * float(s.mean()), rel=1e-3)
    assert values.max() == pytest.approx(1.3 * float(s.mean()), rel=1e-3)


def test_swudi_takes_steps_of_the_flow_that_it_solves() -> None:
    """The closed form is the limit of many small steps down sum |(D - D_i) D_i^T|^2 / |D_i|^2."""
    deltas = [noise(i, 8, 6).double() for i in (1, 2, 3)]
    found, steps = sum(deltas), 4_000
    for _ in range(steps):
        slope = sum((found - d) @ d.T @ d / d.square().sum() for d in deltas)
        found = found - 2.0 / steps * slope
    near(merged("swudi", deltas, parameters={"steps": 2.0, "rho": 1.0}), found, 1e-3)
    still = merged("swudi", deltas, parameters={"steps": 0.0})
    near(still, sum(deltas))


def test_swudi_leaves_the_weak_directions_alone() -> None:
    deltas = [noise(i, 8, 10).double() for i in (1, 2)]
    change = merged("swudi", deltas, parameters={"rho": 0.3}) - sum(deltas)
    assert int(torch.linalg.matrix_rank(change, rtol=1e-4)) == 3


@pytest.mark.parametrize("method", ["tsv_m", "swudi"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_model_comes_back(method: str, shape: tuple[int, int]) -> None:
    near(merged(method, [noise(1, *shape)]), noise(1, *shape).double())


@pytest.mark.parametrize("method", DECOMPOSED)
def test_order_and_size_of_the_models(method: str) -> None:
    deltas = [noise(i, 16, 12) for i in (1, 2, 3)]
    plain = merged(method, deltas)
    near(merged(method, deltas[::-1]), plain)
    near(merged(method, [3 * d for d in deltas]), 3 * plain)
    near(merged(method, deltas, parameters={"lambda": 0.4}), 0.4 * plain)
    near(merged(method, deltas, parameters={"weight": 2.0}), 2 * plain)


@pytest.mark.parametrize("method", DECOMPOSED)
def test_signs_of_singular_vectors_do_not_matter(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = [noise(i, 16, 12) for i in (1, 2)]
    plain = merged(method, deltas, post_pass="svc")
    real = torch.linalg.eigh

    def flipped(a: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = real(a)
        signs = torch.ones(len(values), dtype=a.dtype)
        signs[::2] = -1
        return values, vectors * signs

    monkeypatch.setattr(torch.linalg, "eigh", flipped)
    near(merged(method, deltas, post_pass="svc"), plain, 1e-9)


@pytest.mark.parametrize("method", DECOMPOSED)
def test_models_that_equal_the_base_and_each_other(method: str) -> None:
    """Directions without strength are no directions: nothing arbitrary comes in."""
    low = noise(1, 12, 2) @ noise(2, 2, 12)
    zeros = torch.zeros(12, 12)
    near(merged(method, [zeros, zeros]), zeros.double())
    assert int(torch.linalg.matrix_rank(merged(method, [low, zeros]), rtol=1e-4)) <= 2
    twice = merged(method, [low, low])
    assert int(torch.linalg.matrix_rank(twice, rtol=1e-4)) <= 2


@pytest.mark.parametrize("method", DECOMPOSED)
def test_embeddings_head_and_vectors_take_the_mean(method: str) -> None:
    deltas = [noise(i, 6, 4) for i in (1, 2, 3)]
    mean = sum(deltas) / 3
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        near(merged(method, deltas, name), mean.double())
        assert not spectral.is_treated(name, (6, 4))
    assert spectral.is_treated("model.layers.1.self_attn.q_proj.weight", (6, 4))
    assert not spectral.is_treated("model.layers.1.self_attn.q_norm.weight", (4,))
    vectors = [d[0] for d in deltas]
    near(merged(method, vectors, "model.norm.weight"), mean[0].double())


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "sce", "tsv_m", "swudi"])
def test_the_correction_of_one_model_changes_nothing(method: str) -> None:
    delta = noise(1, 16, 12)
    near(merged(method, [delta], post_pass="svc"), delta.double())


def test_the_correction_follows_its_formula() -> None:
    deltas = [noise(i, 16, 12).double() for i in (1, 2, 3)]
    whole = sum(deltas)
    u, s, vt = torch.linalg.svd(whole, full_matrices=False)
    for r in range(len(s)):
        shares = []
        for delta in deltas:
            own = u[:, r] @ delta
            shares.append(max(0.1, float((u[:, r] @ whole) @ own / (own @ own))))
        s[r] *= 3 / sum(shares)
    found = merged("task_arithmetic", [d.float() for d in deltas], post_pass="svc")
    near(found, u * s @ vt)


def test_threads_and_rounding() -> None:
    models = {n: {NAME: noise(i, 96, 64).bfloat16()} for i, n in enumerate(("base", *"abc"))}
    one, two = (
        merge(recipe("tsv_m", post_pass="svc"), Parents(models), threads=n)[NAME] for n in (1, 2)
    )
    assert one.dtype == torch.bfloat16 and torch.equal(one, two)


def test_nan_in_a_parent_is_that_parents_fault() -> None:
    models = {n: {NAME: noise(i, 8, 8)} for i, n in enumerate(("base", *"abc"))}
    models["b"][NAME][1, 1] = math.nan
    for settings in ({}, {"post_pass": "svc"}):
        with pytest.raises(DamagedFile, match="holds NaN"):
            merge(recipe("iso_c", **settings), Parents(models))[NAME]


def gram_parents(models: dict[str, Tensor], inputs: dict[str, Tensor]) -> Parents:
    parents = Parents({name: {NAME: tensor} for name, tensor in models.items()})
    for name, x in inputs.items():
        parents.cache[GRAM, name, NAME] = x.T @ x
    return parents


def regmean(parents: Parents, **parameters: float) -> Tensor:
    fields = {"merge_method": "regmean", "models": [{"model": name} for name in parents]}
    return merge(Recipe.model_validate({**fields, "parameters": parameters}), parents)[NAME]


def test_regmean_solves_the_least_squares() -> None:
    models = {name: noise(i, 5, 4) for i, name in enumerate("ab")}
    inputs = {name: noise(10 + i, 50, 4) for i, name in enumerate("ab")}
    wanted = torch.linalg.lstsq(
        torch.cat(list(inputs.values())), torch.cat([inputs[n] @ models[n].T for n in "ab"])
    ).solution.T
    near(regmean(gram_parents(models, inputs), off_diagonal=1.0), wanted, 1e-3)
    near(regmean(gram_parents({"a": models["a"]}, {"a": inputs["a"]})), models["a"], 1e-5)


def test_regmean_takes_the_mean_where_inputs_are_always_zero() -> None:
    models = {name: noise(i, 5, 4) for i, name in enumerate("ab")}
    inputs = {name: noise(10 + i, 50, 4) for i, name in enumerate("ab")}
    for x in inputs.values():
        x[:, 2] = 0
    found = regmean(gram_parents(models, inputs))
    near(found[:, 2], (models["a"] + models["b"])[:, 2] / 2, 1e-5)


def test_regmean_without_inputs_is_refused_before_any_work(tmp_path: Path) -> None:
    parents = Parents({name: {NAME: noise(1, 4, 4)} for name in "ab"})
    wanted = Recipe.model_validate(
        {"merge_method": "regmean", "models": [{"model": "a"}, {"model": "b"}]}
    )
    report = preflight(wanted, tmp_path / "out", parents)
    with pytest.raises(ConfigError, match="inputs of every layer") as error:
        report.require()
    assert "forge evo" in error.value.hint


def test_what_is_ours_is_not_mergekits() -> None:
    for text in (recipe("tsv_m"), recipe("ties", post_pass="svc")):
        with pytest.raises(ConfigError, match="cannot be said in mergekit's YAML"):
            to_mergekit(text)
    assert "post_pass: svc" in to_yaml(recipe("ties", post_pass="svc"))
    with pytest.raises(ValueError, match="post_pass corrects task vectors"):
        Recipe.model_validate(
            {"merge_method": "linear", "models": [{"model": "a"}], "post_pass": "svc"}
        )


def test_memory_for_whole_matrices_is_counted(tmp_path: Path) -> None:
    models = {n: {NAME: noise(i, 800, 800)} for i, n in enumerate(("base", *"abc"))}
    from agent_forge.merge.output import anonymous_bytes

    room = anonymous_bytes() + 40_000_000
    write(merge(recipe("ties"), Parents(models)), tmp_path / "ties", max_ram=room)
    with pytest.raises(NotEnough, match="MB of memory"):
        write(merge(recipe("iso_c"), Parents(models)), tmp_path / "iso", max_ram=room)
