"""The weights of candidates: each kind against its formula, whatever files are there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from agent_forge.errors import NotFinite
from agent_forge.merge.engine import merge
from agent_forge.model.folder import open_weights
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.search.candidate import Candidate
from agent_forge.store import files
from tests.support.merge_models import make_models, recipe

State = dict[str, Tensor]
PARENTS = [Candidate({"kind": "parent", "index": i}) for i in range(3)]
GROUPS = ("embeddings", "layer 0", "layer 1", "rest")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(root: Path, tmp_path: Path) -> Callable[..., CandidateWeights]:
    def nursery(*candidates: Candidate, base: bool = True) -> CandidateWeights:
        known = {c.key: c for c in (*PARENTS, *candidates)}
        models = [open_weights(root / name) for name in "abc"]
        below = open_weights(root / "base") if base else None
        return CandidateWeights(models, below, known, tmp_path / "weights")

    return nursery


def state(root: Path, name: str) -> State:
    return dict(open_weights(root / name).items())


def keys(*candidates: Candidate) -> tuple[str, ...]:
    return tuple(c.key for c in candidates)


def combo(inputs: tuple[str, ...], **changes: Any) -> Candidate:
    plain = {"kind": "merge", "combo": 0b011, "drop_rate": 0.5, "keep": 0.4, "scale": 1.0}
    weights = {group: [1.0, 2.0, 0.5] for group in GROUPS}
    return Candidate({**plain, "weights": weights, "layers": {}, "seed": 3, **changes}, inputs)


def shift(input_key: str, coefficients: Mapping[str, list[float]]) -> Candidate:
    rows = {group: coefficients.get(group, [0.0, 0.0, 0.0]) for group in GROUPS}
    return Candidate({"kind": "shift", "coefficients": rows}, (input_key,))


def noise(input_key: str, seed: int = 5, rate: float = 0.25, sigma: float = 0.1) -> Candidate:
    return Candidate({"kind": "noise", "sigma": sigma, "rate": rate, "seed": seed}, (input_key,))


def group_of(name: str) -> str:
    if "layers." in name:
        return f"layer {name.split('.')[2]}"
    return "rest" if "norm" in name else "embeddings"


def test_the_groups_of_a_llama(make: Callable[..., CandidateWeights]) -> None:
    nursery = make()
    assert sorted(nursery.groups.names) == sorted(GROUPS)
    assert {group_of(name) for name in nursery.specs} == set(GROUPS)


def test_an_average(root: Path, make: Callable[..., CandidateWeights]) -> None:
    average = Candidate({"kind": "average"}, keys(*PARENTS))
    a, b, c = (state(root, name) for name in "abc")
    for name, tensor in make(average).tensors(average.key):
        assert_close(tensor, (a[name] + b[name] + c[name]) / 3)


@pytest.mark.parametrize("base", [True, False], ids=["base", "no base"])
@pytest.mark.parametrize("scale", [1.0, 1.4, 0.3])
def test_a_merge_with_a_scale(
    root: Path, make: Callable[..., CandidateWeights], base: bool, scale: float
) -> None:
    one = combo(keys(*PARENTS), scale=scale)
    models = [
        {"model": str(root / name), "parameters": {"weight": weight}}
        for name, weight in zip("abc", (1.0, 2.0, 0.5), strict=True)
    ]
    wanted = recipe(
        root,
        "combo",
        combo=0b011,
        models=models,
        seed=3,
        parameters={"drop_rate": 0.5, "keep": 0.4},
        base_model=str(root / "base") if base else None,
    )
    plain = dict(merge(wanted).items())
    a, b, c = (state(root, name) for name in "abc")
    below = state(root, "base")
    for name, tensor in make(one, base=base).tensors(one.key):
        start = below[name] if base else (a[name] + b[name] + c[name]) / 3
        assert_close(tensor, start + scale * (plain[name] - start), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", [True, False], ids=["base", "no base"])
@pytest.mark.parametrize("on", ["parent", "average"])
def test_a_shift(root: Path, make: Callable[..., CandidateWeights], base: bool, on: str) -> None:
    average = Candidate({"kind": "average"}, keys(*PARENTS))
    start = PARENTS[1] if on == "parent" else average
    rows = {"layer 1": [0.3, -0.2, 0.1], "embeddings": [0.0, 0.0, 0.5]}
    moved = shift(start.key, rows)
    states = [state(root, name) for name in "abc"]
    below = state(root, "base")
    for name, tensor in make(average, moved, base=base).tensors(moved.key):
        mean = sum(s[name] for s in states) / 3
        origin = below[name] if base else mean
        first = states[1][name] if on == "parent" else mean
        steps = rows.get(group_of(name), [0.0, 0.0, 0.0])
        wanted = first + sum(c * (s[name] - origin) for c, s in zip(steps, states, strict=True))
        assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", [True, False], ids=["base", "no base"])
@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "dare_ties"])
def test_a_blend(
    root: Path, make: Callable[..., CandidateWeights], base: bool, method: str
) -> None:
    rows = {group: [0.5 + 0.1 * n, -0.2, 0.3] for n, group in enumerate(GROUPS)}
    density = {} if method == "linear" else dict(zip(GROUPS, (0.3, 0.5, 0.7, 1.0), strict=True))
    operation = {"kind": "blend", "method": method, "coefficients": rows, "density": density}
    one = Candidate({**operation, "scale": 0.8, "seed": 11}, keys(*PARENTS))
    other = Candidate({**operation, "scale": 0.8, "seed": 12}, keys(*PARENTS))
    states = [state(root, name) for name in "abc"]
    below = state(root, "base")
    nursery = make(one, other, base=base)
    differs = dict(nursery.tensors(other.key))
    for name, tensor in nursery.tensors(one.key):
        start = below[name] if base else sum(s[name] for s in states) / 3
        share = density.get(group_of(name), 1.0)
        deltas = [s[name] - start for s in states]
        if method == "ties":
            deltas = [_largest(d, share) for d in deltas]
        if method.startswith("dare") and share < 1:
            assert not torch.equal(tensor, differs[name]) or tensor.numel() < 20
            continue  # which mask it is tells the next test
        moves = [c * d for c, d in zip(rows[group_of(name)], deltas, strict=True)]
        total = sum(moves)
        if method.endswith("ties"):
            sign = torch.where(total >= 0, 1.0, -1.0)
            total = sum(torch.where(m * sign > 0, m, 0.0) for m in moves)
        assert_close(tensor, start + 0.8 * total, rtol=1e-5, atol=1e-6)


def _largest(delta: Tensor, share: float) -> Tensor:
    kept = max(1, int(share * delta.numel()))
    least = delta.abs().flatten().sort().values[-kept]
    return torch.where(delta.abs() >= least, delta, 0.0)


def test_a_blend_by_dare_keeps_and_rescales(
    root: Path, make: Callable[..., CandidateWeights]
) -> None:
    rows = {group: [1.0, 0.0, 0.0] for group in GROUPS}
    operation = {"kind": "blend", "method": "dare_linear", "coefficients": rows, "scale": 1.0}
    one = Candidate(
        {**operation, "density": dict.fromkeys(GROUPS, 0.25), "seed": 1}, keys(*PARENTS)
    )
    a, below = state(root, "a"), state(root, "base")
    made, kept, numel = dict(make(one).tensors(one.key)), 0, 0
    for name, tensor in made.items():
        moved, delta = tensor - below[name], a[name] - below[name]
        there = moved.abs() > 1e-7
        kept, numel = kept + int(there.sum()), numel + tensor.numel()
        assert_close(moved[there], 4 * delta[there], rtol=1e-3, atol=1e-5)
    assert 0.22 < kept / numel < 0.28


def test_noise_is_sparse_and_seeded(root: Path, make: Callable[..., CandidateWeights]) -> None:
    one, same, other = (noise(PARENTS[0].key, seed) for seed in (5, 5, 6))
    assert one == same
    nursery = make(one, other)
    before, after = state(root, "a"), dict(nursery.tensors(one.key))
    changed = []
    for name, tensor in after.items():
        difference = tensor - before[name]
        if tensor.ndim == 1:
            assert not difference.any()
            continue
        changed.append(difference[difference != 0])
        assert 0.15 < (difference != 0).float().mean() < 0.35
    assert 0.09 < torch.cat(changed).std() < 0.11
    again, another = dict(nursery.tensors(one.key)), dict(nursery.tensors(other.key))
    assert all(torch.equal(after[name], again[name]) for name in after)
    assert not torch.equal(after["model.embed_tokens.weight"], another["model.embed_tokens.weight"])


def descendants() -> list[Candidate]:
    """Three generations: combos, mutants of them, and a merge of those mutants."""
    first = combo(keys(*PARENTS))
    second = combo(keys(*PARENTS), combo=0b100, scale=1.2)
    moved, noisy = shift(first.key, {"layer 0": [0.1, 0.2, -0.1]}), noise(second.key)
    child = combo((moved.key, noisy.key, first.key), combo=0b110)
    return [first, second, moved, noisy, child, noise(child.key, 9)]


def test_files_save_time_and_decide_nothing(make: Callable[..., CandidateWeights]) -> None:
    """Whatever is kept, and whenever the folder is emptied, every byte is the same."""
    line = descendants()
    network = _network()
    nursery = make(*line)
    wanted = {c.key: nursery.fill(network, c.key) for c in line}
    assert len(set(wanted.values())) == len(line)
    for kept in (line[:1], line[2:5], line[4:], []):
        nursery.keep(keys(*kept))
        there = {path.stem for path in nursery.folder.glob("*")}
        assert there == {c.key[:24] for c in kept}
        assert {c.key: nursery.fill(network, c.key) for c in line} == wanted
        assert {path.stem for path in nursery.folder.glob("*")} == there  # nothing is left over
        for path in nursery.folder.glob("*"):
            files.remove(path)
        assert {c.key: nursery.fill(network, c.key) for c in line} == wanted


def test_a_sample_is_the_same_from_files_and_networks(
    make: Callable[..., CandidateWeights],
) -> None:
    line = descendants()
    nursery, network = make(*line), _network()
    nursery.fill(network, line[-1].key)
    assert (nursery.sample(line[-1].key) == nursery.sample(network)).all()


def test_what_is_not_finite_is_refused(make: Callable[..., CandidateWeights]) -> None:
    wild = noise(PARENTS[0].key, sigma=1e38, rate=1.0)
    wilder = noise(wild.key, sigma=3e38, rate=1.0)
    with pytest.warns(RuntimeWarning), pytest.raises(NotFinite, match="holds NaN or infinity"):
        make(wild, wilder).fill(_network(), wilder.key)


def _network() -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.merge_models import family

    config = dict(family("llama")[1])
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
