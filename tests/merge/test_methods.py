"""The mathematics of merging: properties that every method and stage has to keep."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_forge.errors import ConfigError
from agent_forge.merge import combos
from agent_forge.merge.combos import ALL, METHODS, combo_name, parse_combo
from agent_forge.merge.engine import Parents, merge
from agent_forge.merge.recipe import Recipe
from agent_forge.merge.spectral import SPECTRAL
from agent_forge.merge.tensor_inputs import RUN, TensorInputs, dare_mask, kept_share, select

SPARSE = ("ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties")
SPARSE += ("della", "della_linear")
SYMMETRIC = ("linear", "task_arithmetic", "ties", "breadcrumbs", "model_stock", "multislerp")
SYMMETRIC += ("karcher", "ram", "ramplus_tl", "sce")
SUMMING = ("task_arithmetic", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties")
SUMMING += ("della_linear",)


def noise(number: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (40, 30)), generator=torch.Generator().manual_seed(number))


def merged(
    method: str, models: dict[str, Tensor], base: Tensor | None = None, **rest: Any
) -> Tensor:
    """One tensor by a method."""
    own = rest.pop("own", {})
    listed = [{"model": name, "parameters": own.get(name, {})} for name in models]
    fields: dict[str, Any] = {"merge_method": method, "models": listed, **rest}
    if base is not None:
        fields["base_model"] = "base"
        models = {**models, "base": base}
    parents = Parents({name: {"w": t} for name, t in models.items()})
    return merge(Recipe.model_validate(fields), parents)["w"]


@pytest.mark.parametrize("t", [0.0, 0.25, 1.0])
def test_linear_ends(t: float) -> None:
    a, b = noise(1), noise(2)
    own = {"a": {"weight": 1 - t}, "b": {"weight": t}}
    result = merged("linear", {"a": a, "b": b}, own=own)
    torch.testing.assert_close(result, torch.lerp(a, b, t))


@given(t=st.floats(0, 1), angle=st.floats(0.1, 3.0))
@settings(max_examples=30, deadline=None)
def test_slerp_keeps_norms_and_divides_the_angle(t: float, angle: float) -> None:
    a = torch.zeros(64)
    b = torch.zeros(64)
    a[0], b[0], b[1] = 1.0, math.cos(angle), math.sin(angle)
    result = merged("slerp", {"a": a, "b": b}, base=None, parameters={"t": t})
    assert float(result.norm()) == pytest.approx(1, abs=1e-5)
    assert math.acos(min(1.0, float(result @ a))) == pytest.approx(t * angle, abs=2e-3)


def test_slerp_of_the_stages_interpolates_norms() -> None:
    a, b = noise(1), 3 * noise(2)
    x = TensorInputs([a, b], centred=True)
    c = combos.interpolation(x.anchored(), [1.0, 1.0], curved=True)
    base = (a + b) / 2
    result = base + combos.difference(base, [a - base, b - base], c)
    assert float(result.norm()) == pytest.approx(float(a.norm() + b.norm()) / 2, rel=1e-5)


def test_slerp_of_the_stages_is_linear_for_nearly_equal_models() -> None:
    a = noise(1).double().float()
    x = TensorInputs([a, a + 1e-8 * noise(2)], a)
    curved, straight = (combos.interpolation(x.anchored(), [1.0, 1.0], c) for c in (True, False))
    assert np.allclose(curved, straight)


def test_small_angles_are_exact() -> None:
    """In fp32 the cosine of this angle is 1."""
    a = torch.zeros(1000)
    a[0] = 1
    b = a.clone()
    b[1] = 1e-4
    gram = TensorInputs([a, b]).gram()
    from agent_forge.merge.methods import angle

    assert angle(gram, np.array([1, 0]), np.array([0, 1])) == pytest.approx(1e-4, rel=1e-6)


PAIRS = [m for m in METHODS if m not in ("combo", *SPECTRAL) and METHODS[m].most != 1]


@pytest.mark.parametrize("method", PAIRS)
def test_a_model_merged_with_itself_is_itself(method: str) -> None:
    w, base = noise(1), noise(2)
    spec = METHODS[method]
    parameters: dict[str, Any] = {"density": 1.0} if method in SPARSE else {}
    if method in SUMMING:
        parameters["weight"] = 0.5  # they sum, so two halves
    with_base = base if spec.base == "required" else None
    result = merged(method, {"a": w, "b": w.clone()}, with_base, parameters=parameters)
    torch.testing.assert_close(result, w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", SYMMETRIC)
def test_the_order_of_the_models_does_not_matter(method: str) -> None:
    models = {"a": noise(1), "b": noise(2), "c": noise(3)}
    base = None if method in ("linear", "multislerp", "karcher") else noise(4)
    parameters = {"density": 0.4} if method in SPARSE else {}
    one = merged(method, models, base, parameters=parameters)
    other = merged(method, dict(reversed(models.items())), base, parameters=parameters)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_nearswap_moves_at_most_by_t() -> None:
    base, near = torch.zeros(4), torch.tensor([0.01, -0.2, 0.05, 0.0])
    result = merged("nearswap", {"a": near}, base, parameters={"t": 0.05})
    torch.testing.assert_close(result, torch.tensor([0.01, -0.05, 0.05, 0.0]))


def test_fusion_takes_what_stands_out_and_nothing_else() -> None:
    base, model = torch.zeros(8, 16), 0.001 * noise(1, 8, 16)
    model[3, 5] = 2.0
    result = merged("arcee_fusion", {"a": model}, base)
    assert result[3, 5] == 2.0
    assert set(result.flatten().tolist()) <= {0.0, *model[3].tolist(), *model.flatten().tolist()}
    assert int((result != 0).sum()) < 40


def test_ram_averages_what_is_shared_and_keeps_what_is_not() -> None:
    a, b = torch.tensor([1.0, 0.0, 2.0, 1e-7]), torch.tensor([3.0, 4.0, 0.0, 1e-7])
    models, base = {"a": a, "b": b}, torch.zeros(4)
    torch.testing.assert_close(merged("ram", models, base), torch.tensor([2.0, 4.0, 2.0, 0.0]))
    plus = merged("ramplus_tl", models, base, parameters={"r": 0.5, "alpha": 0.4})
    torch.testing.assert_close(plus, torch.tensor([2.0, 4.8, 2.4, 0.0]))  # 1 + 0.5 * min(1, 0.4)


def test_sce_weighs_models_by_their_energy_where_they_vary() -> None:
    a, b = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, -1.0])
    models, base = {"a": a, "b": b}, torch.zeros(3)
    shares = torch.tensor([10.0, 3.0]) / 13
    every = torch.tensor([float(3 * shares[0] + shares[1]), 1.0, -1.0])
    torch.testing.assert_close(merged("sce", models, base), every)
    most = merged("sce", models, base, parameters={"select_topk": 0.5})  # of two that vary
    torch.testing.assert_close(most, torch.tensor([2.8, 0.0, 0.0]))  # (9 * 3 + 1 * 1) / 10
    none = merged("sce", models, base, parameters={"select_topk": 0.0})
    torch.testing.assert_close(none, base)


def test_della_keeps_large_ones_more_often_and_restores_the_l1_norm() -> None:
    base, delta = torch.zeros(400, 64), noise(1, 400, 64).sign() * torch.arange(1.0, 65.0)
    parameters = {"density": 0.5, "epsilon": 0.3}
    result = merged("della_linear", {"a": delta}, base, parameters=parameters)
    kept = (result != 0).float().mean(0)
    expected = torch.linspace(0.2, 0.8, 64)
    assert float((kept - expected).abs().max()) < 5 * math.sqrt(0.25 / 400)
    assert float(result.abs().sum()) == pytest.approx(float(delta.abs().sum()), rel=1e-4)
    with pytest.raises(ConfigError, match="give or take epsilon"):
        merged("della", {"a": delta}, base, parameters={"density": 0.9})


def test_karcher_of_two_is_the_middle_of_the_arc_and_of_zeros_nothing() -> None:
    a = noise(1)
    b = noise(2) * a.norm() / noise(2).norm()
    middle = merged("karcher", {"a": a, "b": b})
    torch.testing.assert_close(middle, merged("nuslerp", {"a": a, "b": b}))
    zeros = merged("karcher", {"a": torch.zeros(3), "b": torch.zeros(3)})
    assert zeros.tolist() == [0.0] * 3


def test_ties_with_one_model_is_its_trimmed_task_vector() -> None:
    w, base = noise(1), noise(2)
    result = merged("ties", {"a": w}, base, parameters={"density": 0.3})
    delta = (w - base).flatten()
    kept = delta.abs() >= delta.abs().sort(descending=True).values[int(0.3 * delta.numel()) - 1]
    torch.testing.assert_close(result.flatten(), base.flatten() + delta * kept)
    assert int((result != base).sum()) == int(0.3 * delta.numel())


def test_ties_takes_the_mean_of_what_agrees() -> None:
    base = torch.zeros(4)
    models = {
        "a": torch.tensor([1.0, 1.0, -1.0, 0.0]),
        "b": torch.tensor([3.0, -2.0, -3.0, 0.0]),
        "c": torch.tensor([-1.0, 0.5, 5.0, 0.0]),
    }
    expected = torch.tensor([2.0, -2.0, 5.0, 0.0])
    torch.testing.assert_close(merged("ties", models, base), expected)
    halved = merged("ties", models, base, parameters={"lambda": 0.5})
    torch.testing.assert_close(halved, expected / 2)


def test_ties_with_negative_weights() -> None:
    base = torch.zeros(2)
    models = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([3.0, -4.0])}
    own = {"a": {"weight": 1.0}, "b": {"weight": -1.0}}
    result = merged("ties", models, base, own=own)
    # sums -2 and 5: b alone with weight -1, then both with weights that cancel (counted as 1)
    torch.testing.assert_close(result, torch.tensor([3.0, 5.0]))


def test_breadcrumbs_drops_both_ends() -> None:
    delta = torch.arange(1.0, 101.0)
    parameters = {"density": 0.5, "gamma": 0.1}
    result = merged("breadcrumbs", {"a": delta}, torch.zeros(100), parameters=parameters)
    assert result.nonzero().flatten().tolist() == list(range(40, 90))


def test_rescale_restores_the_l1_norm() -> None:
    w, base = noise(1), noise(2)
    parameters = {"density": 0.3, "rescale": True}
    result = merged("breadcrumbs", {"a": w}, base, parameters=parameters)
    assert float((result - base).abs().sum()) == pytest.approx(float((w - base).abs().sum()), 1e-4)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_expects_the_task_vector(method: str) -> None:
    w, base = torch.full((500_000,), 2.0), torch.full((500_000,), 1.0)
    result = merged(method, {"a": w}, base, parameters={"density": 0.1})
    delta = result - base
    assert float(delta.mean()) == pytest.approx(1, abs=0.02)
    share = kept_share(0.1)
    assert delta.unique().tolist() == pytest.approx([0.0, 1 / share], rel=1e-5)


def test_dare_masks_depend_on_seed_and_name_and_nothing_else() -> None:
    whole = dare_mask(7, "w", 0, 3 * RUN + 5, 0.5)
    parts = [
        dare_mask(7, "w", s, min(RUN, 3 * RUN + 5 - s), 0.5) for s in range(0, 3 * RUN + 5, RUN)
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(whole[37:99], dare_mask(7, "w", 37, 62, 0.5))
    for seed, name in ((8, "w"), (7, "v")):
        other = dare_mask(seed, name, 0, 10_000, 0.5)
        assert 0.45 < float((other == whole[:10_000]).float().mean()) < 0.55


def test_two_models_get_different_masks() -> None:
    ones = torch.ones(1000)
    models = {"a": ones, "b": ones.clone()}
    parameters = {"density": 0.5, "rescale": False}
    result = merged("dare_linear", models, torch.zeros(1000), parameters=parameters)
    assert set(result.tolist()) == {0.0, 1.0, 2.0}


@given(
    st.lists(
        st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=1, max_size=60
    ),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_selection_finds_the_exact_value(values: list[float], data: Any) -> None:
    x = torch.tensor(values)
    rank = data.draw(st.integers(0, len(values) - 1))
    expected = float(x.abs().sort().values[rank])
    assert select(lambda: iter(x.split(7)), (rank,)) == [expected]


def test_thresholds_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_forge.merge import tensor_inputs

    calls: list[int] = []
    real = tensor_inputs.select
    monkeypatch.setattr(tensor_inputs, "select", lambda *a: calls.append(1) or real(*a))
    parents = Parents({n: {"w": noise(i)} for i, n in enumerate("abc")})
    for weight in (0.2, 0.7):
        recipe = Recipe.model_validate(
            {
                "merge_method": "ties",
                "base_model": "a",
                "models": [{"model": "b"}, {"model": "c"}],
                "parameters": {"weight": weight, "density": 0.3},
            }
        )
        merge(recipe, parents)["w"]
    assert len(calls) == 2  # one for each model, not for each merge


def test_model_stock_by_rows_and_nuslerp_by_rows() -> None:
    base, a, b = noise(0), noise(1), noise(2)
    rows = merged("model_stock", {"a": a, "b": b}, base, parameters={"filter_wise": True})
    alone = [merged("model_stock", {"a": a[i], "b": b[i]}, base[i]) for i in range(3)]
    torch.testing.assert_close(rows[:3], torch.stack(alone))
    flags = {"nuslerp_flatten": False}
    by_row = merged("nuslerp", {"a": a, "b": b}, parameters=flags)
    torch.testing.assert_close(by_row[5], merged("nuslerp", {"a": a[5], "b": b[5]}))
    by_column = merged("nuslerp", {"a": a, "b": b}, parameters={**flags, "nuslerp_row_wise": True})
    torch.testing.assert_close(by_column[:, 5], merged("nuslerp", {"a": a[:, 5], "b": b[:, 5]}))


def test_multislerp_of_two_is_nuslerp() -> None:
    a = noise(1)
    b = noise(2) * a.norm() / noise(2).norm()
    torch.testing.assert_close(
        merged("multislerp", {"a": a, "b": b}), merged("nuslerp", {"a": a, "b": b})
    )


def test_weights_that_sum_to_zero_are_refused() -> None:
    own = {"a": {"weight": 1}, "b": {"weight": -1}}
    with pytest.raises(ConfigError, match="sum to zero"):
        merged("linear", {"a": noise(1), "b": noise(2)}, own=own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding(dtype: torch.dtype) -> None:
    models = {n: noise(i).to(dtype) for i, n in enumerate("abc")}
    exact = sum(t.double() for t in models.values()) / 3
    assert torch.equal(merged("linear", models), exact.float().to(dtype))


def test_threads_do_not_change_a_bit() -> None:
    models = {n: {"w": noise(i, 5 * RUN + 3)} for i, n in enumerate("abc")}
    recipe = Recipe.model_validate(
        {
            "merge_method": "dare_ties",
            "base_model": "a",
            "models": [{"model": "b"}, {"model": "c"}],
            "parameters": {"density": 0.3},
        }
    )
    one, four = (merge(recipe, Parents(models), threads=n)["w"] for n in (1, 4))
    assert torch.equal(one, four)


# -- stages ---------------------------------------------------------------------------------------


def stages(
    combo: int, models: list[Tensor], base: Tensor | None = None, **parameters: Any
) -> Tensor:
    named = {f"p{i}": t for i, t in enumerate(models)}
    return merged("combo", named, base, combo=combo, parameters=parameters)


@pytest.mark.parametrize(
    "given", [6, "6", "110", 110, "slerp-ties-frankenmerge", "SLERP+TIES+FrankenMerge"]
)
def test_a_combo_has_many_names(given: int | str) -> None:
    assert parse_combo(given) == 6
    assert combo_name(6) == "slerp-ties-frankenmerge"


def test_the_table_of_combos() -> None:
    assert [parse_combo(f"{n:03b}") for n in ALL] == list(ALL)
    assert [combo_name(n) for n in (0, 3, 4)] == [
        "linear-dare-frankenmerge",
        "linear-ties-dfs",
        "slerp-dare-frankenmerge",
    ]


@pytest.mark.parametrize("given", [8, 9, -1, "21", "0110", "ties-slerp-dfs", "linear-dare", ""])
def test_no_combo(given: int | str) -> None:
    with pytest.raises(ConfigError, match="unknown combo"):
        parse_combo(given)


@pytest.mark.parametrize("combo", ALL)
@pytest.mark.parametrize("literal", [False, True])
def test_a_combo_of_one_model_with_itself_is_itself(combo: int, literal: bool) -> None:
    w = noise(1)
    result = stages(combo, [w, w.clone(), w.clone()], keep=1.0, drop_rate=0.0, literal=literal)
    torch.testing.assert_close(result, w, rtol=1e-4, atol=1e-5)


def test_dare_stage_keeps_the_interpolation_on_average() -> None:
    base, models = torch.zeros(300_000), [torch.full((300_000,), float(i)) for i in (1, 2, 3)]
    result = stages(0, models, base)
    assert float(result.mean()) == pytest.approx(2, abs=0.05)
    assert float((result == 0).float().mean()) == pytest.approx(0.9, abs=0.01)


def test_ties_stage_elects_by_the_interpolation() -> None:
    base = torch.zeros(2)
    models = [torch.tensor([1.0, -1.0]), torch.tensor([2.0, -5.0]), torch.tensor([-1.5, 2.0])]
    result = stages(2, models, base, keep=1.0)
    torch.testing.assert_close(result, torch.tensor([1.5, -3.0]))
    # with all of the weight on the third model its signs are the elected ones
    own = {"p0": {"weight": 0.0}, "p1": {"weight": 0.0}, "p2": {"weight": 1.0}}
    named = {f"p{i}": t for i, t in enumerate(models)}
    result = merged("combo", named, base, combo=2, parameters={"keep": 1.0}, own=own)
    torch.testing.assert_close(result, torch.tensor([-1.5, 2.0]))


def test_ties_stage_about_the_mean_elects_by_the_sum() -> None:
    """Linear around the parents' mean: D is zero everywhere, so the trimmed deltas vote."""
    models = [torch.tensor([0.0, 3.0]), torch.tensor([0.0, 0.0]), torch.tensor([3.0, 0.0])]
    result = stages(2, models, keep=0.5)  # -1 and 2 are left of each parameter
    torch.testing.assert_close(result, torch.tensor([3.0, 3.0]))


def test_trimming_keeps_the_share() -> None:
    base, models = torch.zeros(1000), [noise(i, 1000) for i in (1, 2, 3)]
    x = TensorInputs(models, base)
    p = {"weight": [1.0] * 3, "keep": 0.2, "drop_rate": 0.9, "amplification": 0.0, "dfs_ratio": 1.0}
    p |= {"literal": False, "whole_model": False}
    run = combos.second_stage(x, p, [("linear", "ties")])
    parts, start = x.run(0)
    assert start is not None
    moved = run(parts, start, 0)["linear", "ties"] != 0
    union = torch.zeros(1000, dtype=torch.bool)
    for m in models:
        union |= m.abs() >= m.abs().sort().values[800]
    assert bool((moved <= union).all()) and int(moved.sum()) > 300


def test_literal_ties_follows_the_specification() -> None:
    models = [noise(i, 200) for i in (1, 2, 3)]
    m1 = sum(models) / 3
    deltas = torch.stack([m1 - m for m in models])
    size = deltas.abs().mean(0)
    important = size > torch.quantile(size, 0.8, interpolation="higher")
    elected = torch.sign(torch.sign(deltas).mean(0))
    agreeing = (deltas * (torch.sign(deltas) == elected)).sum(0) / 3
    expected = m1 + agreeing * important
    torch.testing.assert_close(stages(2, models, literal=True), expected, rtol=1e-4, atol=1e-5)
    mean = (expected + sum(models)) / 4  # its inverse-variance weights cancel
    torch.testing.assert_close(stages(3, models, literal=True), mean, rtol=1e-4, atol=1e-5)


def test_dfs_trusts_what_is_near_the_consensus() -> None:
    parents = [torch.tensor([0.0]), torch.tensor([0.1]), torch.tensor([5.0])]
    share = combos.parents_share(parents)
    fused = float(combos.dfs(torch.tensor([0.05]), share))
    plain = float(sum([*parents, torch.tensor([0.05])]) / 4)
    assert 0 < fused < plain
    scaled = combos.parents_share([100 * p for p in parents])
    assert float(combos.dfs(torch.tensor([5.0]), scaled)) == pytest.approx(100 * fused, rel=1e-5)


def test_agreement_finds_the_most_central() -> None:
    vectors = np.array([[1.0, 0, 0], [0, 1, 0], [0.6, 0.6, 0.1], [0, 0, 1]])
    assert combos.agreement(vectors @ vectors.T) == 2
    assert combos.agreement(np.zeros((3, 3))) == 0
