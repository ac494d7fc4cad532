"""EvoMerge from models and data to a champion and a verdict: measured, resumed, replayed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agent_forge.contract.phase import ModelRef
from agent_forge.errors import ConfigError, ForgeError, Interrupted, NotFound, PhaseFailed
from agent_forge.evals.domains import from_files, from_tasks, part
from agent_forge.evals.fitness import (
    CommandFitness,
    DomainFitness,
    FunctionFitness,
)
from agent_forge.evals.model_under_test import open_model_under_test
from agent_forge.model.card import read_head
from agent_forge.model.locate import locate_parents
from agent_forge.phases.phase1_cognate.phase import CognatePhase
from agent_forge.phases.phase2_evomerge import phase
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights
from agent_forge.phases.phase2_evomerge.config import BEGUN, WEIGHTS, EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import EvolutionResult, replay, run_evolution
from agent_forge.phases.phase2_evomerge.inputs import (
    PRESETS,
    load_settings,
    locate_inputs,
    resume_inputs,
)
from agent_forge.phases.phase2_evomerge.journal import CACHE, JOURNAL
from agent_forge.phases.phase2_evomerge.phase import EvoMergePhase
from agent_forge.pipeline.environment import request_stop
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.store.models import ModelStorage, load_directory
from agent_forge.track.journal import read_lines
from tests.support.cognate_settings import FEW as FEW_FAMILIES
from tests.support.cognate_settings import NAMES, QUICK, config
from tests.support.command_line import Forge
from tests.support.evo_models import (
    FASTEST,
    FEW,
    PARENTS,
    WEIGHTS_FILE,
    family,
    files_of,
    job,
    journal,
    outcome,
    three,
)
from tests.support.merge_models import make_models
from tests.support.toy_runs import exit_code, forked, metrics
from tests.support.toy_runs import folder as folder_of

pytestmark = pytest.mark.slow

Made = Callable[..., EvolutionResult]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> EvolutionResult:
    return run_evolution(job(tmp_path_factory.mktemp("reference") / "x"))


# -- what comes out -------------------------------------------------------------------------------


def test_three_llamas_and_three_files_give_a_champion_a_card_and_a_verdict(
    reference: EvolutionResult,
) -> None:
    folder = reference.loop.folder
    assert len(reference.loop.curve) == 3 and reference.loop.reason == "generations"
    assert reference.loop.curve == sorted(reference.loop.curve)
    best_parent = max(r["score"]["fitness"] for r in journal(folder)[:3])
    assert reference.loop.curve[-1] > best_parent
    card = (reference.model.path / "README.md").read_text()
    assert "On items that the search never saw" in card and "no significant gain" in card
    head = read_head(reference.model.path)
    assert head is not None and head["base_model"] == [*PARENTS, "base"]
    assert head["base_model_relation"] == "merge" and head["library_name"] == "transformers"
    conclusion = reference.report
    assert conclusion is not None
    others = ("plain average", "best combo of generation 0", "base")
    assert list(conclusion.baselines) == [*PARENTS, *others]
    assert all(s in card for s in conclusion.sentences())
    assert conclusion.sentences()[0].startswith(f"best parent, {conclusion.best_parent}: ")
    assert set(conclusion.retention) == set(PARENTS)
    assert {p.name for p in folder.glob("gen_*")} == {"gen_1_best_model", "gen_2_best_model"}
    files.verify(folder / "gen_2_best_model")
    state = files.read_checked(folder / "evolution_checkpoint_gen_2.json")
    assert state["generation"] == 2 and len(state["history"]) == 3


def test_the_champion_is_a_model_that_opens(reference: EvolutionResult) -> None:
    subject = open_model_under_test(reference.model.path)
    record = next(
        r
        for r in journal(reference.loop.folder)
        if r["score"]["fitness"] == reference.loop.curve[-1]
    )
    domains = [part(d, "selection", 24) for d in from_files(list(map(Path, files_of(family()))))]
    measured = DomainFitness(subject, domains, WEIGHTS, {}).score()
    assert measured.fitness == pytest.approx(reference.loop.curve[-1], abs=1e-6)
    assert measured.raw == pytest.approx(record["score"]["raw"], abs=1e-5)


def test_generation_zero_has_all_combos_and_the_reference_points(
    reference: EvolutionResult,
) -> None:
    first = [r for r in journal(reference.loop.folder) if r["generation"] == 0]
    origins = [r["origin"] for r in first]
    assert origins[:4] == ["parent 0", "parent 1", "parent 2", "average"]
    assert {f"combo {n:03b}" for n in range(8)} <= set(origins)
    distances = journal(reference.loop.folder, "distances")[0]
    n = len(distances["keys"])
    matrix = distances["matrix"]
    assert n == 8 and all(matrix[i][j] == matrix[j][i] for i in range(n) for j in range(n))
    assert all(matrix[i][i] == 0 for i in range(n))


def test_the_three_splits_share_no_item(tmp_path: Path) -> None:
    splits = job(tmp_path / "x").splits
    seen: set[tuple[str, str]] = set()
    for domains in splits.values():
        for domain in domains:
            items = {(e.prompt, e.completion) for e in domain.examples}
            assert items and not items & seen
            seen |= items


def test_the_same_seed_gives_the_same_and_another_does_not(
    reference: EvolutionResult, tmp_path: Path
) -> None:
    assert outcome(run_evolution(job(tmp_path / "x")).loop.folder) == outcome(reference.loop.folder)
    other = run_evolution(job(tmp_path / "y", seed=2))
    assert outcome(other.loop.folder)["journal"] != outcome(reference.loop.folder)["journal"]


def test_few_models_are_on_disk_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parents, champion and eight: 12, the files of a moment included."""
    most = 0
    real = CandidateWeights._write

    def write(self: CandidateWeights, key: str) -> Path:
        nonlocal most
        path = real(self, key)
        most = max(most, len(list(self.folder.glob("*.safetensors"))))
        return path

    monkeypatch.setattr(CandidateWeights, "_write", write)
    done = run_evolution(job(tmp_path / "x", generations=5, verdict_items=1, recipe_mutation=0.5))
    assert 4 <= most <= 12 - 3
    assert len(list((done.loop.folder / "weights").iterdir())) == 1  # the champion
    assert len(list(done.loop.folder.glob("gen_*"))) == 2


def test_without_a_base_and_with_two_parents(tmp_path: Path) -> None:
    root = family()
    wanted = EvoMergeSettings.model_validate({**FEW, "data": files_of(root), "generations": 1})
    two = locate_inputs(wanted, [str(root / n) for n in PARENTS[:2]], None, 1, tmp_path / "x")
    done = run_evolution(two)
    assert done.report is not None and "base" not in done.report.baselines
    history = files.read_json(done.loop.folder / "evolution_log.json")["history"]
    # Linear equals its own base here, so DARE after it cannot change anything: twins are replaced.
    assert history[0]["variants"] > 0
    hashes = [r["sha256"] for r in journal(done.loop.folder) if r["generation"] == 0]
    assert len(set(hashes)) < len(hashes)
    last = {r["origin"]: r["sha256"] for r in journal(done.loop.folder)}
    assert any(origin.startswith("variant of combo") for origin in last)


def test_adapters_on_a_base_are_parents(tmp_path: Path) -> None:
    root = family()
    refs = []
    for number, name in enumerate(PARENTS):
        folder = tmp_path / f"lora-{name}"
        folder.mkdir()
        own = torch.Generator().manual_seed(number)
        where = "base_model.model.model.layers.0.self_attn.q_proj"
        pair = {f"{where}.lora_{m}.weight": torch.randn(s, generator=own) for m, s in AB.items()}
        save_file(pair, folder / "adapter_model.safetensors")
        targets = ["layers.0.self_attn.q_proj"]
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": targets}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        refs.append(f"{root / 'base'}+{folder}")
    wanted = EvoMergeSettings.model_validate({**FEW, "data": files_of(root), "generations": 1})
    done = run_evolution(locate_inputs(wanted, refs, str(root / "base"), 1, tmp_path / "x"))
    assert done.report is not None
    assert set(PARENTS) <= {name.removeprefix("lora-") for name in done.report.baselines}
    state, base = (load_file(p / WEIGHTS_FILE) for p in (done.model.path, root / "base"))
    changed = [name for name in state if not torch.equal(state[name], base[name])]
    assert "model.layers.0.self_attn.q_proj.weight" in changed


AB = {"A": (2, 16), "B": (16, 2)}


# -- fitness --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def domain_fitness() -> Callable[..., DomainFitness]:
    root = family()
    text = root / "text.txt"
    text.write_text("\n\n".join(f"{p}{c} and so on" for p, c in evo_rows()))
    paths = [root / "add.jsonl", root / "twice.jsonl", text]
    domains = [part(d, "selection", 20) for d in from_files(paths)]
    subject = open_model_under_test(root / "add")

    def make(weights: dict[str, float] = WEIGHTS, **floors: float) -> DomainFitness:
        by_name = {name.replace("__", "/"): value for name, value in floors.items()}
        return DomainFitness(subject, domains, weights, by_name)

    return make


def evo_rows() -> list[tuple[str, str]]:
    from tests.support.evo_models import rows

    return rows("next")


def test_parts_are_between_zero_and_one_and_add_up(
    domain_fitness: Callable[..., DomainFitness],
) -> None:
    score = domain_fitness().score()
    assert set(score.parts) == set(WEIGHTS)
    assert all(0 <= value <= 1 for value in score.parts.values())
    assert score.parts["speed"] == score.parts["memory"] == 0.5
    assert score.fitness == pytest.approx(sum(WEIGHTS[n] * score.parts[n] for n in WEIGHTS))
    assert set(score.raw) == {
        *("add/bits_per_byte", "add/accuracy", "twice/bits_per_byte", "twice/accuracy"),
        "text/bits_per_byte",  # text has no answers
    }
    accuracy = (score.raw["add/accuracy"] + score.raw["twice/accuracy"]) / 2
    assert score.parts["accuracy"] == pytest.approx(accuracy)  # no choices: nothing is chance
    alone = domain_fitness({"accuracy": 2.0}).score()
    assert alone.fitness == pytest.approx(accuracy)
    assert alone.quality == pytest.approx((accuracy + score.parts["perplexity"]) / 2)


def test_a_floor_that_is_missed_leaves_nothing(
    domain_fitness: Callable[..., DomainFitness],
) -> None:
    raw = domain_fitness().score().raw
    accuracy, bits = raw["add/accuracy"], raw["add/bits_per_byte"]
    assert 0 < accuracy < 1
    assert domain_fitness(add__accuracy=accuracy).score().fitness > 0
    assert domain_fitness(add__accuracy=accuracy + 0.01).score().fitness == 0
    assert domain_fitness(add__bits_per_byte=bits).score().fitness > 0
    assert domain_fitness(add__bits_per_byte=bits - 0.01).score().fitness == 0
    names = {domain_fitness().name, domain_fitness(add__accuracy=0.5).name}
    assert len(names) == 2  # the cache tells them apart


def test_a_function_of_ones_own(own: Path) -> None:
    model = torch.nn.Linear(2, 2)
    size = sum(float(p.detach().abs().sum()) for p in model.parameters())
    assert FunctionFitness("own_fitness:size", model, 1).score().fitness == size
    assert FunctionFitness("own_fitness:size", model, -1).score().fitness == -size
    for name, told in (
        ("never", "AttributeError: no such thing"),
        ("nan", "gave nan"),
        ("words", "'many', which is no number"),
    ):
        with pytest.raises(PhaseFailed, match=told):
            FunctionFitness(f"own_fitness:{name}", model, 1).score()
    for place in ("own_fitness:missing", "no_such_module:f", ":", "own_fitness:number"):
        with pytest.raises(ConfigError, match=r"there is no fitness|is not a function"):
            FunctionFitness(place, model, 1)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("print('the number is'); print(2.5)", None),
        ("pass", "nothing was printed"),
        ("print('nan')", "gave nan"),
        ("print('x')", "'x', which is no number"),
        ("print(1); raise SystemExit('it broke')", "ended with 1: it broke"),
    ],
)
def test_a_command_of_ones_own(tmp_path: Path, code: str, told: str | None) -> None:
    script = tmp_path / "score.py"
    script.write_text(f"import sys\nassert sys.argv[1] == '{tmp_path}'\n{code}\n")
    fitness = CommandFitness(f"{sys.executable} {script}", lambda: nullcontext(tmp_path), -1)
    if told is None:
        assert fitness.score().fitness == -2.5
        return
    with pytest.raises(PhaseFailed, match=told):
        fitness.score()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PhaseFailed, match="no/such/program"):
        CommandFitness("no/such/program {model}", lambda: nullcontext(tmp_path), 1).score()
    with pytest.raises(ConfigError, match="empty"):
        CommandFitness(" ", lambda: nullcontext(tmp_path), 1)


def test_a_command_gets_the_model_of_each_candidate(tmp_path: Path) -> None:
    script = tmp_path / "score.py"
    script.write_text(
        "import sys\nfrom safetensors.numpy import load_file\n"
        "print(sum(float(abs(t).sum()) for t in load_file(sys.argv[1]).values()))\n"
    )
    command = f"{sys.executable} {script} {{model}}/model.safetensors"
    done = run_evolution(
        job(tmp_path / "x", fitness=command, generations=0, fitness_direction="minimize")
    )
    weights = load_file(done.model.path / WEIGHTS_FILE)
    size = sum(float(t.abs().double().sum()) for t in weights.values())
    assert done.loop.curve[-1] == pytest.approx(-size, rel=1e-4) and done.report is None
    assert "There are no unseen items" in (done.model.path / "README.md").read_text()
    assert not list((tmp_path / "x").rglob("*candidate*"))  # what the command gets does not stay


def test_a_failed_candidate_costs_itself_only(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run_evolution(job(own / "x", fitness="own_fitness:sometimes"))
    records = journal(done.loop.folder)
    failed = [r for r in records if r["score"] is None]
    assert 1 < len(failed) < len(records) / 2
    assert all("KeyError: 'a bad moment'" in r["problem"] for r in failed)
    assert "a bad moment" in caplog.text
    history = files.read_json(done.loop.folder / "evolution_log.json")["history"]
    assert sum(entry["failed"] for entry in history) == len(failed) > 0
    assert done.loop.curve[-1] == max(r["score"]["fitness"] for r in records if r["score"])


def test_own_fitness_with_data_has_a_verdict(own: Path) -> None:
    data = files_of(family())
    done = run_evolution(job(own / "x", fitness="own_fitness:size", data=data, generations=0))
    assert done.report is not None and done.report.champion.raw["add/accuracy"] >= 0


def test_the_cache_remembers_across_folders(reference: EvolutionResult, tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    again = job(tmp_path / "x")
    again.folder.mkdir()
    shutil.copy(reference.loop.folder / CACHE, again.folder / CACHE)
    run_evolution(again, listen=told.append)
    hits = [r["cache_hits"] for r in told if r["event"] == "generation"]
    assert hits[-1] == len(journal(again.folder)) > 20
    assert outcome(again.folder) == outcome(reference.loop.folder)
    cold = run_evolution(job(tmp_path / "y", enable_caching=False))
    assert not (cold.loop.folder / CACHE).exists()
    assert outcome(cold.loop.folder)["journal"][1:] == outcome(reference.loop.folder)["journal"][1:]


# -- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut", [1, 6, 21, 36, *(pytest.param(n, marks=pytest.mark.soak) for n in (11, 16, 26, 31))]
)
def test_interrupted_after_any_line_it_ends_in_the_same_bytes(
    reference: EvolutionResult, tmp_path: Path, cut: int
) -> None:
    lines = (reference.loop.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    assert 32 <= len(lines) <= 37 + 5
    folder = tmp_path / "x"
    shutil.copytree(reference.loop.folder, folder, ignore=shutil.ignore_patterns("champion"))
    torn = lines[cut][:40] if cut % 2 and cut < len(lines) else b""
    (folder / JOURNAL).write_bytes(b"".join(lines[:cut]) + torn)
    if cut % 3 == 0:
        shutil.rmtree(folder / "weights")
        (folder / CACHE).unlink()
    assert outcome(run_evolution(resume_inputs(folder, None, None)).loop.folder) == outcome(
        reference.loop.folder
    )


def test_a_stop_between_two_candidates_is_an_interruption(tmp_path: Path) -> None:
    seen = 0

    def stop() -> bool:
        nonlocal seen
        seen += 1
        return seen > 6

    with pytest.raises(ForgeError) as stopped:
        run_evolution(job(tmp_path / "x"), should_stop=stop)
    assert stopped.value.exit_code == 130
    assert len(journal(tmp_path / "x")) == 6


def test_more_generations_go_on_where_it_ended(reference: EvolutionResult, tmp_path: Path) -> None:
    short = run_evolution(job(tmp_path / "x", generations=1))
    assert len(short.loop.curve) == 2
    checkpoint = short.loop.folder / "evolution_checkpoint_gen_1.json"
    longer = run_evolution(resume_inputs(checkpoint, 2, None))
    assert outcome(longer.loop.folder) == outcome(reference.loop.folder)
    assert (
        len(run_evolution(resume_inputs(short.loop.folder, None, None)).loop.curve) == 3
    )  # as it was run last


def test_what_is_not_this_evolution_is_refused(reference: EvolutionResult, tmp_path: Path) -> None:
    mine = run_evolution(job(tmp_path / "x", seed=2, generations=0))
    before = (mine.loop.folder / JOURNAL).read_bytes()
    with pytest.raises(ConfigError, match="other models, data or settings"):
        run_evolution(job(mine.loop.folder, seed=3))
    with pytest.raises(ConfigError, match="other models, data or settings"):
        run_evolution(job(mine.loop.folder, seed=2, base=False))
    foreign = mine.loop.folder / "evolution_checkpoint_gen_1.json"
    shutil.copy(reference.loop.folder / foreign.name, foreign)
    with pytest.raises(ConfigError, match="of another evolution"):
        resume_inputs(foreign, None, None)
    foreign.write_text(foreign.read_text().replace('"generation": 1', '"generation": 9'))
    with pytest.raises(ForgeError, match="checksum"):
        resume_inputs(foreign, None, None)
    for place in ("generation_30.pt", "nothing", "."):
        with pytest.raises(NotFound):
            resume_inputs(tmp_path / place, None, None)
    with pytest.raises(NotFound, match="there is no checkpoints/phase2/generation_30"):
        resume_inputs(Path("checkpoints/phase2/generation_30.pt"), None, None)
    assert (mine.loop.folder / JOURNAL).read_bytes() == before


def test_the_time_budget_is_written_down(reference: EvolutionResult, tmp_path: Path) -> None:
    begun = job(tmp_path / "x")
    with pytest.raises(Interrupted):  # it was begun without a plan: then the clock alone counts
        run_evolution(begun, should_stop=lambda: (begun.folder / BEGUN).exists())
    done = run_evolution(resume_inputs(begun.folder, None, 1e-6))
    assert (done.loop.reason, len(done.loop.curve)) == ("time budget", 1)
    assert journal(done.loop.folder, "stopped")[0]["evaluations"] == len(PARENTS) + 1
    again = run_evolution(resume_inputs(done.loop.folder, None, None))
    assert outcome(again.loop.folder)["lineage.json"] == files.sha256_of(
        done.model.path / "lineage.json"
    )
    assert (again.loop.reason, len(again.loop.curve)) == ("time budget", 1)
    more = run_evolution(resume_inputs(done.loop.folder, None, 1000.0))  # more time: it goes on
    assert more.loop.reason == "generations"
    assert (
        outcome(more.loop.folder)["lineage.json"] == outcome(reference.loop.folder)["lineage.json"]
    )


def test_the_clock_does_not_ask_again_about_the_past(
    reference: EvolutionResult, tmp_path: Path
) -> None:
    """Killed in generation 2 with the time over, it must not end in generation 0 instead."""
    folder = tmp_path / "x"
    shutil.copytree(reference.loop.folder, folder)
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if b'"generation":2' in line)
    (folder / JOURNAL).write_bytes(b"".join(lines[: last + 1]))
    done = run_evolution(resume_inputs(folder, 5, 1e-6))
    assert (done.loop.reason, len(done.loop.curve)) == ("time budget", 3)


def test_it_stops_early_by_the_holdout(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"generations": 9, "convergence_patience": 2}
    done = run_evolution(
        job(tmp_path / "x", **settings, convergence_threshold=0.9, verdict_items=1)
    )
    assert (done.loop.reason, len(done.loop.curve)) == ("converged", 3)
    history = files.read_json(done.loop.folder / "evolution_log.json")["history"]
    assert all(entry["holdout"] is not None for entry in history)
    assert journal(done.loop.folder, "holdout")[0]["fitness"] == history[0]["holdout"]


def test_replay_makes_the_champion_again(reference: EvolutionResult, tmp_path: Path) -> None:
    lineage = reference.model.path / "lineage.json"
    wanted = files.sha256_of(reference.model.path / WEIGHTS_FILE)
    assert replay(lineage, tmp_path / "again") == wanted
    assert files.sha256_of(tmp_path / "again" / WEIGHTS_FILE) == wanted
    record = json.loads(lineage.read_text())
    record["models"][1]["sha256"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="not the model that the lineage names"):
        replay(tmp_path / "other.json", tmp_path / "y")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


# -- bad input ------------------------------------------------------------------------------------


def _bad(line: str, forge: Forge, code: int, told: str) -> None:
    result = forge(f"evo {line}")
    assert result.code == code and told in result.err, result.err
    assert "Traceback" not in result.err and result.out == ""


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("--base-models {r}/add --data {r}/add.jsonl", 2, "1 model is nothing to merge"),
        ("--base-models {r}/add,{r}/next,{r}/add --data {r}/add.jsonl", 2, "given twice"),
        ("--base-models {r}/add,{t}/copy --data {r}/add.jsonl", 2, "same weights as"),
        ("--base-models {r}/add,{t}/nan --data {r}/add.jsonl", 4, "holds NaN or infinity"),
        ("--base-models {r}/add,{t}/other/a --data {r}/add.jsonl", 2, "different architectures"),
        ("--base-models {three} --data {t}/empty.jsonl", 4, "it is empty"),
        ("--base-models {three} --data {t}/few.jsonl", 2, "give more data"),
        ("--base-models {three} --data {t}/missing.jsonl", 2, "missing.jsonl"),
        ("--base-models {three} --set fitness=own_fitness:never", 1, "no such thing"),
        ("--base-models {three} --set fitness=own_fitness:nan", 1, "gave nan"),
        ("--base-models {three} --set fitness=no_module:f", 2, "no_module"),
        ("--base-models {three} --set 'fitness=false {{model}}'", 1, "ended with 1"),
        ("--base-models {three} --config fast --set population_size=3", 2, "is below 4"),
        ("--base-models {three} --set population_size=5 --set strategy=spec", 2, "allowed sizes"),
        ("--base-models {three} --set strategy=grad --set min_diversity=0.1", 2, "acts in spec"),
        (
            "--base-models {three} --set strategy=spec --set min_diversity=0.1",
            2,
            "reseed_threshold",
        ),
        ("--base-models {three} --data {r}/add.jsonl --gens 2 --time-budget 1e-6", 2, "too few"),
        ("--base-models {three} --data {r}/add.jsonl --set tasks=[add]", 2, "exclude each other"),
        ("--base-models {three} --set 'fitness_weights={{speed: 1}}'", 2, "tell no two merges"),
        ("--base-models {three} --set 'fitness_floors={{x/accuracy: 1}}'", 2, "fitness_floors"),
        ("--base-models {three} --set tasks=[nothing]", 2, "no tasks are called"),
        ("--base-models {three} --config fastest", 2, "did you mean 'fast'"),
        ("--base-models {three} --set generation=3", 2, "did you mean 'generations'"),
        ("--base-models {three} --set plateau_patienc=3", 2, "did you mean 'plateau_patience'"),
        ("--base-models {three} --set plateau_patience=0", 2, "plateau_patience: Input should"),
        ("--set base_models=[]", 2, "base_models names no models"),
        ("--config models.yaml", 2, "base_models names no models"),
        ("--base-models {r}/nothing,{r}/add", 2, "nothing is not a folder"),
        ("--base-models {r}/add,./x/y", 2, "./x/y is not a folder"),
        ("--resume checkpoints/generation_30.pt", 2, "evolution_checkpoint_gen_N.json"),
        ("--resume {t} --base-models {three}", 2, "what it was begun with"),
        ("--dry-run", 2, "there are no models yet"),
    ],
)
def test_bad_input_stops_before_the_first_evaluation(
    own: Path, forge: Forge, line: str, code: int, told: str
) -> None:
    root = family()
    Path("models.yaml").write_text("base_models: null\n")
    if "{t}/copy" in line or "{t}/nan" in line:
        name = "copy" if "{t}/copy" in line else "nan"
        shutil.copytree(root / "add", own / name)
        if name == "nan":
            state = load_file(own / name / WEIGHTS_FILE)
            state["model.norm.weight"][3] = math.nan
            save_file(state, own / name / WEIGHTS_FILE)
    if "other" in line:
        make_models(own / "other", "qwen2")
    (own / "empty.jsonl").write_text("")
    (own / "few.jsonl").write_text("\n".join((root / "add.jsonl").read_text().splitlines()[:60]))
    places = {"r": str(root), "t": str(own), "three": three(root)}
    _bad(line.format(**places), forge, code, told)
    assert not (own / "evomerge" / "champion").exists()
    assert not journal(own / "evomerge")


def test_too_little_data_says_what_could_be_seen(tmp_path: Path) -> None:
    notes = job(tmp_path / "x").notes
    assert any("90 answers for the verdict: gains from about" in note for note in notes)


def test_large_parents_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agent_forge.phases.phase2_evomerge import inputs

    monkeypatch.setattr(inputs, "LARGE_BYTES", 1000)
    assert any("GB of disk" in note for note in job(tmp_path / "x").notes)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    settings, _ = load_settings(name, ["generations=3"], {})
    assert settings.generations == 3
    assert settings != EvoMergeSettings(generations=3)


# -- the command line -----------------------------------------------------------------------------


def quick(root: Path) -> str:
    data = " ".join(f"--data {path}" for path in files_of(root))
    sets = " ".join(f"--set {k}={v}" for k, v in FEW.items() if k != "generations")
    return f"--base-models {three(root)} --base {root}/base {data} {sets} --seed 1 --gens 2"


def test_dry_run(forge: Forge, tmp_path: Path) -> None:
    result = forge(f"evo {quick(family())} --dry-run --json")
    assert result.code == 0
    document = result.document
    assert document["candidates"] == 3 * 8 + 4 and document["seed"] == 1
    assert document["items"]["selection"] == dict.fromkeys(PARENTS, 24)
    assert document["disk_bytes"] > 10 * (family() / "add" / WEIGHTS_FILE).stat().st_size
    assert not (tmp_path / "evomerge").exists()
    assert "candidates: 28" in forge(f"evo {quick(family())} --dry-run").out
    fewer = forge(f"evo {quick(family())} --dry-run --set max_evaluations=9 --json")
    assert fewer.document["candidates"] == 9
    line = (
        quick(family()).replace("--gens 2", "--time-budget 20").replace("strategy=spec", "seed=1")
    )
    planned = forge(f"evo {line.replace('--set seed=1', '')} --dry-run --json").document
    assert planned["minutes"]["all"] == 20 and planned["tokens_per_s"] > 0
    assert planned["max_evaluations"] == planned["repeat"]["max_evaluations"] >= 20
    assert planned["strategy"] == "auto" and not (tmp_path / "evomerge").exists()


def test_forge_evo(forge: Forge, tmp_path: Path, reference: EvolutionResult) -> None:
    result = forge(f"evo {quick(family())} --json")
    assert result.code == 0, result.err
    document = result.document
    assert document["reason"] == "generations" and document["generations"] == 2
    assert set(document["verdict"]) >= {"champion", "rivals", "sentences", "retention"}
    assert outcome(tmp_path / "evomerge") == outcome(reference.loop.folder)
    told = forge("evo --resume evomerge")
    assert told.code == 0 and "best parent" in told.out and "fitness over generations" in told.out
    assert told.err.count("combo") >= 1 and "ETA" in told.err
    again = forge("evo replay evomerge/champion/lineage.json again --json")
    assert again.code == 0
    assert again.document["sha256"] == files.sha256_of(reference.model.path / WEIGHTS_FILE)


def test_the_clock_and_the_device(forge: Forge, tmp_path: Path) -> None:
    line = quick(family()).replace("verdict_items=30", "verdict_items=1")
    result = forge(f"evo {line} --json --time-budget 30 --device cpu")
    assert (result.document["reason"], result.document["generations"]) == ("generations", 2)
    assert files.read_checked(tmp_path / "evomerge" / BEGUN)["plan"]["minutes"] == 30
    _bad("--resume evomerge --device cuda", forge, 2, "'cuda' is not there")
    assert (
        forge("evo --resume evomerge --gens 3 --time-budget 90 --json").document["generations"] == 3
    )


def test_gens_zero_is_zero(forge: Forge, tmp_path: Path) -> None:
    line = quick(family()).replace("--gens 2", "--gens 0 --set verdict_items=1")
    result = forge(f"evo {line} --json --output-dir here")
    assert result.document["generations"] == 0 and (tmp_path / "here/champion").is_dir()


def test_where_models_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = str(family() / "add")
    assert locate_parents([folder, f"{folder}+{folder}"], tmp_path)[0] == [
        folder,
        f"{folder}+{folder}",
    ]
    with pytest.raises(NotFound, match="deepseek"):
        locate_parents(["deepsek"], tmp_path)


# -- in the pipeline ------------------------------------------------------------------------------

EVO = (
    *("generations=1", "fitness_subset_size=6", "verdict_items=6", "tasks=[copy]", "max_level=3"),
    *("gate_policy=warn", "convergence_threshold=1e-9"),
)


def run_both(root: Path, *sets: str, listener: Any = None) -> dict[str, Any]:
    ours = [f"phases.evomerge.{item}" for item in EVO]
    both: Any = {"cognate": CognatePhase, "evomerge": EvoMergePhase}
    return PipelineOrchestrator(
        config=config(f"storage.root={root}", *QUICK, FEW_FAMILIES, *ours, *sets),
        session_id="r",
        resume=(folder_of(root) / "session.json").exists(),
        controllers=both,
        listeners=[listener] if listener else [],
        sets=sets,
    ).run()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pipeline")
    result = run_both(root)
    assert result["success"], result
    return root


def test_a_champion_that_does_not_score_what_was_measured_is_not_stored(
    tmp_path: Path, storage: ModelStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the run nor in the registry; what was confirmed before stays there."""
    done = run_evolution(job(tmp_path / "x", **FASTEST))

    def save_model(name: str, weights: Any, metadata: Any, **options: Any) -> Any:
        made = storage.save_model(weights, "s1", "evomerge", name, metadata, **options)
        return ModelRef(name, storage.find(made), metadata)

    def refuse(folder: Path, *_: Any) -> None:
        assert open_model_under_test(folder), "it is whole when it is confirmed"
        raise PhaseFailed("does not score what was measured")

    context: Any = SimpleNamespace(save_model=save_model)
    with monkeypatch.context() as patch:
        patch.setattr(phase.reporting, "confirm_champion", refuse)
        with pytest.raises(PhaseFailed):
            phase._save(context, done.loop, done.report)  # type: ignore[arg-type]
    place = storage.base_path / "sessions" / "s1"
    assert storage.registry.search_models() == [] and not list(place.rglob("*champion*"))
    phase._save(context, done.loop, done.report)  # type: ignore[arg-type]
    assert load_directory(storage.find("evomerge.champion.s1"))


def test_phase_two_hands_over_what_the_specification_says(pipeline: Path) -> None:
    place = folder_of(pipeline) / "phase2_evomerge" / "champion"
    files.verify(place)
    metadata = files.read_json(place / "metadata.json")
    assert {"fitness", "merge_technique", "lineage", "verdict"} <= set(metadata)
    logged = {name for _, _, m in metrics(pipeline) for name in m}
    assert {"generation/best_fitness", "generation/fitness_std", "combo/7/usage"} <= logged
    assert {"phase/initial_fitness", "phase/final_fitness", "phase/final_accuracy"} <= logged
    replay(place / "metadata.json", pipeline / "again")
    first, again = (load_file(p / WEIGHTS_FILE) for p in (place, pipeline / "again"))
    assert all(torch.equal(first[name], again[name]) for name in {*first, *again})
    subject = open_model_under_test(place)
    assert subject.model.settings.n_layers == 2  # type: ignore[union-attr]


def test_the_champion_of_a_run_tells_what_that_of_forge_evo_tells(pipeline: Path) -> None:
    place = folder_of(pipeline) / "phase2_evomerge" / "champion"
    metadata = files.read_json(place / "metadata.json")
    assert files.read_json(place / "lineage.json") == metadata["lineage"]
    again = replay(place / "lineage.json", pipeline / "from_lineage")
    assert files.sha256_of(pipeline / "from_lineage" / WEIGHTS_FILE) == again
    verdict = files.read_json(place / "verdict.json")
    assert verdict["sentences"] == metadata["verdict"]
    head = read_head(place)
    assert head is not None and head["library_name"] == "agent-forge"
    assert head["base_model"][-1] == "trunk" and head["base_model_relation"] == "merge"
    card = (place / "README.md").read_text()
    assert all(f"\n- {sentence}\n" in card for sentence in metadata["verdict"])
    assert "| model | fitness | copy/bits_per_byte | copy/accuracy |" in card
    assert f"| sha256 | `{metadata['sha256']}` |" in card and "forge evo replay" in card
    assert "| lineage |" not in card and "{'" not in card and "['" not in card
    measured = files.read_json(place / "metrics.json")
    score = verdict["champion"]["parts"]["perplexity"]
    assert measured["final_perplexity_score"] == score
    tasks = from_tasks(["copy"], count=6, levels=(1, 3))
    subject = open_model_under_test(place)
    nats = subject.measure(subject.prepare(tasks[0])).nats_per_token
    assert measured["final_perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    assert metadata["perplexity"] == verdict["perplexity"] == measured["final_perplexity"] > 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("count", [1, 2])
def test_phase_two_killed_ends_in_the_same_bytes(
    pipeline: Path, tmp_path: Path, count: int
) -> None:
    shutil.copytree(pipeline, tmp_path / "x")
    again = tmp_path / "x"
    shutil.rmtree(folder_of(again) / "phase2_evomerge")

    def at_generation(record: dict[str, Any]) -> None:
        if record.get("stage") == "generation" and record["step"] == count - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code(forked(lambda: run_both(again, listener=at_generation))) == -signal.SIGKILL
    assert run_both(again)["success"]
    place = Path("phase2_evomerge", "champion", WEIGHTS_FILE)
    assert files.sha256_of(folder_of(again) / place) == files.sha256_of(folder_of(pipeline) / place)


def test_the_specialists_of_a_run_are_parents(
    pipeline: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGE_STORAGE", str(pipeline))
    sets = " ".join(f"--set {item}" for item in EVO if "gate" not in item)
    for line in (f"evo --base-models r {sets} --json", f"evo {sets} --json --dry-run"):
        result = forge(line)
        assert result.code == 0, result.err
    assert [Path(p).name for p in result.document["parents"]] == NAMES
    assert Path(result.document["base"]).name == "trunk"


def test_the_phase_takes_a_fitness_of_ones_own(own: Path) -> None:
    named = "phases.evomerge.fitness=own_fitness:size"

    def stop(record: dict[str, Any]) -> None:
        if record.get("stage") == "generation":
            request_stop(folder_of(own / "x"))

    assert run_both(own / "x", named, listener=stop)["exit_code"] == 130
    source = (own / "own_fitness.py").read_text()
    (own / "own_fitness.py").write_text(f"{source}\n# edited")
    result = run_both(own / "x", named)
    assert result["exit_code"] == 2 and "was changed since" in result["error"], result
    (own / "own_fitness.py").write_text(source)
    result = run_both(own / "x", named)
    assert result["success"], result
    lines = [r for _, r in read_lines(folder_of(own / "x") / "phase2_evomerge/evolution" / JOURNAL)]
    assert all("own" in r["score"]["raw"] for r in lines if r["record"] == "candidate")
