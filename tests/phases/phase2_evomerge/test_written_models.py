"""A number belongs to the file it stands beside: parents of every kind, and what is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_forge.errors import ConfigError, DamagedFile, PhaseFailed
from agent_forge.evals.domains import from_files, part
from agent_forge.evals.model_under_test import confirm, open_model_under_test
from agent_forge.model.folder import open_weights
from agent_forge.model.opened import open_model
from agent_forge.phases.phase2_evomerge import evolution
from agent_forge.phases.phase2_evomerge.config import BEGUN, EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import EvolutionResult, replay, run_evolution
from agent_forge.phases.phase2_evomerge.inputs import locate_inputs, resume_inputs
from agent_forge.store import files
from tests.support.evo_models import FEW, family

pytestmark = pytest.mark.slow

FILE, HEAD, EMBEDDING = "model.safetensors", "lm_head.weight", "model.embed_tokens.weight"
BITS = "add/bits_per_byte"


def copied(name: str, folder: Path, change: Any, **config: Any) -> Path:
    """A model of the family with changed tensors and config."""
    shutil.copytree(family() / name, folder)
    save_file(change(load_file(folder / FILE)), folder / FILE, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def tied(folder: Path, keep: bool = False) -> Path:
    """A fine-tune without a head of its own; with `keep` the file repeats the embedding as one."""

    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rest = {n: t for n, t in state.items() if n != HEAD}
        return {**rest, HEAD: state[EMBEDDING].clone()} if keep else rest

    return copied("add", folder, change, tie_word_embeddings=True)


def evolved(
    parents: list[Path], folder: Path, base: Path | None = None, **more: Any
) -> EvolutionResult:
    data = [str(family() / "add.jsonl"), str(family() / "twice.jsonl")]
    changes = {**FEW, "generations": 1, "data": data, **more}
    settings = EvoMergeSettings.model_validate(changes)
    refs = [str(parent) for parent in parents]
    return run_evolution(locate_inputs(settings, refs, str(base) if base else None, 1, folder))


def bits(model: Path | str) -> float:
    """Bits a byte on the verdict items, by the model alone."""
    domain = part(from_files([family() / "add.jsonl"])[0], "verdict", int(FEW["verdict_items"]))
    subject = open_model_under_test(model)
    return subject.measure(subject.prepare(domain)).bits_per_byte(sum(domain.sizes))


@pytest.mark.parametrize("first", ["tied", "untied"])
@pytest.mark.parametrize(
    ("keep", "base", "generations"),
    [
        *((False, None, 0), (True, "base", 0)),
        *(
            pytest.param(keep, base, 1, marks=pytest.mark.soak)
            for keep in (False, True)
            for base in (None, "base")
        ),
    ],
)
def test_heads_of_both_kinds(
    first: str, base: str | None, keep: bool, generations: int, tmp_path: Path
) -> None:
    parents = [tied(tmp_path / "tied", keep), family() / "twice"]
    parents = parents if first == "tied" else parents[::-1]
    below = family() / base if base else None
    done = evolved(parents, tmp_path / "out", below, generations=generations)
    assert done.report is not None
    for parent in parents:
        score = done.report.baselines[parent.name].score
        assert score.raw[BITS] == pytest.approx(bits(parent), rel=1e-5)
    assert done.report.champion.raw[BITS] == pytest.approx(bits(done.model.path), rel=1e-5)
    if base:
        score = done.report.baselines["base"].score
        assert score.raw[BITS] == pytest.approx(bits(family() / base), rel=1e-5)
    config = json.loads((done.model.path / "config.json").read_text())
    assert not config["tie_word_embeddings"] and HEAD in open_weights(done.model.path)
    again = replay(done.model.path / "lineage.json", tmp_path / "again")
    assert again == open_weights(done.model.path).sha256()


def test_a_tied_base_of_untied_parents_and_the_reverse(tmp_path: Path) -> None:
    base = tied(tmp_path / "base")
    untied = [family() / "twice", family() / "next"]
    both = [tied(tmp_path / "t1"), copied("add", tmp_path / "t2", _moved, tie_word_embeddings=True)]
    for number, (parents, below) in enumerate(((untied, base), (both, family() / "base"))):
        done = evolved(parents, tmp_path / f"out{number}", below)
        assert done.report is not None
        for parent in parents:
            score = done.report.baselines[parent.name].score
            assert score.raw[BITS] == pytest.approx(bits(parent), rel=1e-5)


def _moved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t * 1.1 for n, t in state.items() if n != HEAD}


def test_a_base_of_another_type(tmp_path: Path) -> None:
    """Parents in bf16 on a base in fp32: the champion has the type of its parents."""
    half = [
        copied(n, tmp_path / n, lambda s: {k: t.bfloat16() for k, t in s.items()})
        for n in ("add", "twice")
    ]
    done = evolved(half, tmp_path / "out", family() / "base")
    assert {spec.dtype for spec in open_weights(done.model.path).specs.values()} == {torch.bfloat16}
    assert done.report is not None
    assert done.report.champion.raw[BITS] == pytest.approx(bits(done.model.path), rel=1e-5)


@pytest.mark.parametrize("fitness", ["", "tests.support.evo_models:largest"])
def test_a_champion_that_is_not_what_was_measured(
    fitness: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If what was written differs from what was measured, nothing is handed over."""
    write = evolution.write

    def wrong(weights: Any, folder: Path, **options: Any) -> None:
        name = "model.norm.weight"
        right = weights.tensor_of
        weights.tensor_of = lambda n: right(n) * 1.5 if n == name else right(n)
        write(weights, folder, **options)

    monkeypatch.setattr(evolution, "write", wrong)
    parents = [family() / "add", family() / "twice"]
    with pytest.raises(PhaseFailed, match=r"does not (score|hold) "):
        evolved(parents, tmp_path / "out", **({"data": [], "fitness": fitness} if fitness else {}))
    assert not (tmp_path / "out" / "champion").exists()


def test_confirm_compares_with_the_file() -> None:
    domain = part(from_files([family() / "add.jsonl"])[0], "verdict", 8)
    subject = open_model_under_test(family() / "add")
    losses = subject.measure(subject.prepare(domain)).loss
    confirm(family() / "add", lambda s: s.measure(s.prepare(domain)).loss, losses)
    with pytest.raises(PhaseFailed, match="were recorded"):
        confirm(family() / "twice", lambda s: s.measure(s.prepare(domain)).loss, losses)


@pytest.mark.parametrize("name", [HEAD, EMBEDDING, "model.norm.weight"])
def test_a_tensor_that_is_missing(name: str, tmp_path: Path) -> None:
    folder = copied("add", tmp_path / "m", lambda s: {n: t for n, t in s.items() if n != name})
    with pytest.raises(DamagedFile, match=f"missing: {name}"):
        open_model(folder)


def test_layers_that_the_file_has_and_the_config_has_not(tmp_path: Path) -> None:
    fewer = copied("add", tmp_path / "fewer", dict, num_hidden_layers=1)
    with pytest.raises(DamagedFile, match=r"not of this network: model\.layers\.1"):
        open_model(fewer)
    more = copied("add", tmp_path / "more", dict, num_hidden_layers=3)
    with pytest.raises(DamagedFile, match=r"missing: model\.layers\.2"):
        open_model(more)


def test_weights_of_a_written_model_that_changed_on_the_disk(tmp_path: Path) -> None:
    done = evolved([family() / "add", family() / "twice"], tmp_path / "out", generations=0)
    path = done.model.path / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match="sha256"):
        open_model(done.model.path)


def test_a_folder_alone_runs_no_fitness(tmp_path: Path) -> None:
    """Whoever goes on with an evolution names its command or function again."""
    canary = tmp_path / "canary"
    fitness = f"touch {canary}"
    place = "tests.support.evo_models:largest"
    evolved([family() / "add", family() / "twice"], tmp_path / "out", data=[], fitness=place)
    record = files.read_checked(tmp_path / "out" / BEGUN)
    record["settings"]["fitness"] = fitness
    del record["fitness"]  # as older versions wrote it
    files.write_bytes(tmp_path / "out" / BEGUN, files.with_checksum(record))
    with pytest.raises(ConfigError, match="names code to be run") as caught:
        resume_inputs(tmp_path / "out", 2, None)
    assert fitness in caught.value.hint and not canary.exists()
    with pytest.raises(ConfigError, match="names code to be run"):
        resume_inputs(tmp_path / "out", 2, None, ["fitness=another"])
    job = resume_inputs(tmp_path / "out", 2, None, [f"fitness={fitness}"])
    assert job.settings.fitness == fitness


def test_a_fitness_that_it_was_not_begun_with_is_refused(tmp_path: Path) -> None:
    evolved([family() / "add", family() / "twice"], tmp_path / "out", generations=0)
    with pytest.raises(ConfigError, match="begun without fitness=math:sqrt"):
        resume_inputs(tmp_path / "out", 1, None, ["fitness=math:sqrt"])
    assert not resume_inputs(tmp_path / "out", 1, None).settings.fitness


def test_a_parent_that_cannot_be_measured_ends_the_evolution(tmp_path: Path) -> None:
    parents = [family() / "add", family() / "twice"]
    with pytest.raises(PhaseFailed, match="parent 0 cannot be measured"):
        evolved(parents, tmp_path / "out", data=[], fitness="math:sqrt")


def test_what_stands_beside_is_left_alone(tmp_path: Path) -> None:
    """Neither a replay nor an evolution removes what it did not write."""
    notes = [tmp_path / ".again.weights", tmp_path / "out" / ".notes"]
    for folder in notes:
        folder.mkdir(parents=True)
        (folder / ".tmp-thesis.txt").write_text("mine")
    done = evolved([family() / "add", family() / "twice"], tmp_path / "out", generations=0)
    replay(done.model.path / "lineage.json", tmp_path / "again")
    assert all((folder / ".tmp-thesis.txt").is_file() for folder in notes)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".again.weights", "again", "out"]
