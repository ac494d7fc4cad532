"""Healing: experts teach the champion; killed at any step it ends in the same bytes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError, Diverged, Interrupted
from agent_forge.evals.likelihood import PLAIN, Reading, padded, selecting
from agent_forge.evals.model_under_test import TokenizedDomain, open_model_under_test
from agent_forge.model.card import read_head
from agent_forge.phases.phase2_evomerge import heal as healing
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evaluator import asked_logits
from agent_forge.phases.phase2_evomerge.evolution import EvolutionResult, replay, run_evolution
from agent_forge.phases.phase2_evomerge.heal import (
    STEP_TOKENS,
    Lesson,
    Lessons,
    Teaching,
    chances,
    right_answers,
)
from agent_forge.phases.phase2_evomerge.inputs import locate_inputs, resume_inputs
from agent_forge.phases.phase2_evomerge.journal import EvolutionJournal
from agent_forge.store import files
from agent_forge.train.lora import linear_layers
from agent_forge.train.weight_transforms import LowRankBranches
from tests.support.command_line import Forge
from tests.support.eval_models import own_model
from tests.support.evo_models import (
    FASTEST,
    PARENTS,
    WEIGHTS_FILE,
    evo_line,
    family,
    job,
    journal,
    rows,
)
from tests.support.networks import network
from tests.support.toy_runs import exit_code, forked

STEPS = 24
SEARCH: dict[str, Any] = {**FASTEST, "fitness_subset_size": 24}
HEAL: dict[str, Any] = {**SEARCH, "heal": 0.2, "heal_steps": STEPS, "heal_rate": 3e-3}


# -- what is taught -------------------------------------------------------------------------------


def parent(index: int, **bits: float) -> dict[str, Any]:
    raw = {f"{name}/bits_per_byte": value for name, value in bits.items()}
    operation = {"kind": "parent", "index": index}
    return {"record": "candidate", "operation": operation, "score": {"raw": raw}}


def test_the_expert_of_a_domain_is_the_parent_with_the_fewest_bits() -> None:
    other = {**parent(9, a=0.0, b=0.0), "operation": {"kind": "average"}}
    records = [{"record": "begun"}, parent(0, a=2.0, b=1.0), other, parent(1, a=1.5, b=1.0)]
    journal = EvolutionJournal(Path(), [], "")
    journal.records = records
    assert journal.best_parents(["a", "b"]) == {"a": 1, "b": 0}  # of two alike the first
    assert journal.best_parents(["a", "c"]) == {}


def test_steps_go_where_the_gap_is_and_nobody_starves() -> None:
    assert chances([3.0, 1.0, -2.0]) == pytest.approx([0.2 / 3 + 0.6, 0.2 / 3 + 0.2, 0.2 / 3])
    assert chances([-1.0, 0.0]) == [0.5, 0.5]
    lessons = Lessons([Lesson(n, 0, items(1)) for n in "abc"], seed=1)
    assert [lessons.draw(step).name for step in (1, 1)] == ["a", "a"]  # the first, until it had it
    for name, gap in (("a", 0.9), ("b", 0.1), ("c", -0.5)):
        lessons.learned(next(x for x in lessons.all if x.name == name), gap, 1.0)
    drawn = Counter(lessons.draw(step).name for step in range(1000))
    assert drawn["a"] > 4 * drawn["b"] > 4 * drawn["c"] > 4 * 30
    lessons.learned(lessons.all[0], 0.0, 1.0)
    assert lessons.gaps["a"] == pytest.approx(0.63) and lessons.first_gaps["a"] == 0.9
    lessons.all = [Lesson("a", 0, [], 0.0), *lessons.all[1:]]  # a domain that counts for nothing
    assert Counter(lessons.draw(step).name for step in range(1000))["b"] > 700


def items(count: int, length: int = 4) -> list[TokenizedItem]:
    return [TokenizedItem([n] * length, [False] + [True] * (length - 1)) for n in range(count)]


def test_every_round_has_every_item_once_in_another_order() -> None:
    lessons = Lessons([lesson := Lesson("a", 0, items(10, STEP_TOKENS // 3))], seed=1)
    steps = [lessons.next_items(lesson) for _ in range(8)]
    assert [len(step) for step in steps[:3]] == [3, 3, 3]
    seen = [item.ids[0] for step in steps for item in step][:20]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]
    again = Lessons(lessons.all, seed=1)
    [again.next_items(lesson) for _ in range(3)]
    other = Lessons(lessons.all, seed=1)
    other.load_state_dict(again.state_dict())
    assert other.next_items(lesson) == steps[3] == again.next_items(lesson)
    assert Lessons(lessons.all, seed=2).next_items(lesson) != steps[0]
    few = Lessons([lesson := Lesson("b", 0, items(3))], seed=1)
    assert len(few.next_items(lesson)) == 3  # no item twice in a step


def test_right_answers_alone_are_taught_in_pieces_that_fit() -> None:
    long = TokenizedItem(list(range(1200)), [n >= 100 for n in range(1200)])
    short, wrong = items(2)
    at = np.array([0, 1, 2]), np.array([0, 0, 1])  # the second answer is a wrong choice
    found = right_answers(TokenizedDomain([short, wrong, long], *at, np.array([1, 1, 1]), []))
    assert found[0] == short and wrong not in found
    assert max(len(piece.ids) for piece in found) <= STEP_TOKENS
    asked = [i for p in found[1:] for i, a in zip(p.ids, p.asked, strict=True) if a]
    assert asked == list(range(100, 1200))


@pytest.mark.parametrize(("length", "start", "taught"), [(514, 100, [412]), (1002, 1000, [2])])
def test_a_rest_of_two_tokens_takes_no_step_unless_it_is_all_there_is(
    length: int, start: int, taught: list[int]
) -> None:
    item = TokenizedItem(list(range(length)), [n >= start for n in range(length)])
    alone = TokenizedDomain([item], np.array([0]), np.array([0]), np.array([1]), [])
    assert [sum(piece.asked) for piece in right_answers(alone)] == taught


# -- the student ----------------------------------------------------------------------------------


def test_branches_beside_layers_are_what_is_folded_in() -> None:
    draws = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), Conv1D(4, 5))
    x, before = torch.randn(3, 6, generator=draws), dict(model.state_dict())
    alone = model(x)
    branches = LowRankBranches(dict(model.named_children()), 2, draws)
    assert torch.equal(model(x), alone)  # B begins at zero
    for parameter in branches.parameters():
        nn.init.normal_(parameter, generator=draws)
    taught = model(x)
    assert not torch.allclose(taught, alone) and {*model.state_dict()} == {*before}
    branches.remove()
    assert torch.equal(model(x), alone)
    for name, change in branches.changes().items():
        before[f"{name}.weight"] += change
    assert torch.allclose(model(x), taught, atol=1e-5)


def test_logits_at_asked_tokens_of_any_network() -> None:
    tokens, asked = padded(items(3, 5), torch.device("cpu"))
    asked[:, 1] = asked[0, 2] = False  # no row asks for the first column, one not for the next
    ours, theirs = network().eval(), open_model_under_test(family() / "add").model
    for model, every in ((ours, ours(tokens)), (theirs, theirs(tokens).logits)):
        wanted = every[:, :-1][asked[:, 1:]]
        for reading in (PLAIN, Reading(selects=model is theirs, caches=False)):
            with selecting(model, reading):
                found = asked_logits(model, tokens, asked, reading)
            assert torch.allclose(found, wanted, atol=1e-5)


def test_the_change_is_beside_all_layers_but_embeddings_and_head() -> None:
    size = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    for tied in (True, False):  # a tied head is no tensor of a file
        shape = LlamaConfig(**size, num_attention_heads=2, tie_word_embeddings=tied)
        found = linear_layers(LlamaForCausalLM(shape))
        assert len(found) == 7 and all(n.startswith("model.layers.0.") for n in found)
    ours = linear_layers(network())
    assert {"blocks.0.attention.q", "blocks.1.mlp.down"} <= {*ours} and "projection" not in ours
    with pytest.raises(ConfigError, match="no linear layer"):
        linear_layers(nn.Embedding(3, 3))


# -- from a search to a healed champion ------------------------------------------------------------


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evolution that can be gone on with, healed or not; not to be changed."""
    return run_evolution(job(tmp_path_factory.mktemp("searched") / "x", **SEARCH)).loop.folder


@pytest.fixture
def folder(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(healing, "CHECKPOINT_EVERY", 3)
    return Path(shutil.copytree(searched, tmp_path / "x"))


@pytest.fixture(scope="module")
def reference(
    searched: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EvolutionResult, str]:
    place = tmp_path_factory.mktemp("healed") / "x"
    done = run_evolution(job(Path(shutil.copytree(searched, place)), **HEAL))
    return done, weights_of(place)


def weights_of(folder: Path) -> str:
    files.verify(folder / "healed")
    return files.sha256_of(folder / "healed" / WEIGHTS_FILE)


@pytest.mark.slow
def test_a_healed_champion_is_nearer_to_its_experts(
    reference: tuple[EvolutionResult, str], searched: Path
) -> None:
    done, _ = reference
    assert done.healed and done.report
    record = files.read_json(done.loop.folder / "healed" / "healing.json")
    assert record == json.loads(json.dumps(done.healed.record))
    assert record["experts"] == {name: name for name in PARENTS}  # each was taught its own file
    assert sum(record["steps_of_domains"].values()) == record["steps"] == STEPS
    assert sum(record["last_gaps"].values()) < sum(record["first_gaps"].values())
    assert done.healed.fitness > done.healed.champion_fitness
    assert done.healed.sentence(Path("x")).endswith(f"take {Path('x') / 'healed'}")
    scores = done.report.scores()
    assert scores["healed champion"].quality > scores["champion"].quality
    assert any(text.startswith("healed champion: ") for text in done.report.sentences())
    champion = done.loop.folder / "champion"
    assert read_head(done.loop.folder / "healed") == read_head(champion)
    for name in ("lineage.json", WEIGHTS_FILE):  # the search is as it was without healing
        assert files.sha256_of(champion / name) == files.sha256_of(searched / "champion" / name)
    opened = open_model_under_test(done.loop.folder / "healed")
    holdout = done.loop.inputs.splits["holdout"]
    assert opened.first_losses(holdout) == pytest.approx(done.healed.losses, rel=1e-5)
    with pytest.raises(ConfigError, match=f"was taught for {STEPS} steps") as refused:
        replay(done.loop.folder / "healed" / "lineage.json", done.loop.folder / "again")
    assert "champion" in (refused.value.hint or "")


def die_at_step(number: int) -> Any:
    def listen(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return listen


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("steps", [(1,), (4, 16), (STEPS,)])
def test_killed_at_any_step_it_ends_in_the_same_bytes(
    reference: tuple[EvolutionResult, str], folder: Path, steps: tuple[int, ...]
) -> None:
    for step in steps:
        pid = forked(lambda: run_evolution(job(folder, **HEAL), listen=die_at_step(step)))  # noqa: B023
        assert exit_code(pid) == -signal.SIGKILL
        assert not (folder / "healed").exists()
    told: list[dict[str, Any]] = []
    again = run_evolution(resume_inputs(folder, None, None), listen=told.append)
    assert weights_of(folder) == reference[1] and again.healed and reference[0].healed
    same = [{**h.record, "seconds": 0} for h in (again.healed, reference[0].healed)]
    assert same[0] == same[1] and again.healed.losses == reference[0].healed.losses
    first = next(r["first"] for r in told if r["event"] == "loop")
    assert first == (steps[-1] - 1) // 3 * 3  # no more than the last steps were done again


@pytest.mark.slow
def test_an_interrupt_keeps_every_step(
    reference: tuple[EvolutionResult, str], folder: Path
) -> None:
    told: list[dict[str, Any]] = []
    with pytest.raises(Interrupted, match="between two steps of healing"):
        run_evolution(
            job(folder, **HEAL), listen=told.append, should_stop=lambda: told[-1].get("step") == 5
        )
    assert [p.name for p in sorted((folder / "heal").iterdir())] == [
        "step_00000003",
        "step_00000005",
    ]
    run_evolution(resume_inputs(folder, None, None), listen=told.append)
    assert [r["step"] for r in told if r["event"] == "step"] == list(range(1, STEPS + 1))
    assert weights_of(folder) == reference[1]
    again = run_evolution(resume_inputs(folder, None, None), listen=told.append)
    # A finished one is only written again.
    assert [r["event"] for r in told][-2:] == ["verdict", "result"] and again.healed
    assert len([r for r in told if r["event"] == "step"]) == STEPS
    assert weights_of(folder) == reference[1]


@pytest.mark.slow
def test_another_number_of_steps_is_taught_from_the_champion_on(folder: Path) -> None:
    for steps in (2, 1):
        done = run_evolution(job(folder, **{**HEAL, "heal_steps": steps}))
        assert done.healed and done.healed.record["steps"] == steps
        assert sum(done.healed.record["steps_of_domains"].values()) == steps


@pytest.mark.slow
def test_with_little_memory_one_network_serves_all_experts(
    reference: tuple[EvolutionResult, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=0))
    monkeypatch.setattr(healing, "psutil", none)
    run_evolution(job(folder, **HEAL))
    assert weights_of(folder) == reference[1]


@pytest.mark.slow
def test_who_diverges_goes_back_to_half_the_rate(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, factors = Teaching.step, dict[int, list[float]]()

    def step(self: Teaching, number: int) -> str:
        factors.setdefault(number, []).append(self.trainer.factor)
        if number == 5 and self.trainer.factor > 0.3:
            raise Diverged("it ran away")
        return real(self, number)

    monkeypatch.setattr(Teaching, "step", step)
    run_evolution(job(folder, **HEAL))
    assert factors[4] == factors[5] == [1.0, 0.5, 0.25] and factors[3] == [1.0]
    assert factors[STEPS] == [0.25] and "goes back to step 3" in caplog.text


@pytest.mark.slow
def test_the_steps_are_planned_by_the_time_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "_seconds_a_step", lambda probe: probe.branches.remove() or 30.0)
    timed = {**HEAL, "heal_steps": 0, "heal": 0.5, "time_budget_minutes": 10.0}
    done = run_evolution(job(folder, **timed))
    plan = journal(folder, "heal plan")
    assert done.healed and done.healed.record["steps"] == plan[0]["steps"] == 9 and len(plan) == 1
    monkeypatch.setattr(healing, "_seconds_a_step", lambda probe: pytest.fail("planned twice"))
    first = weights_of(folder)
    run_evolution(resume_inputs(folder, None, None))
    assert weights_of(folder) == first and len(journal(folder, "heal plan")) == 1
    monkeypatch.setattr(healing, "_seconds_a_step", lambda probe: probe.branches.remove() or 30.0)
    done = run_evolution(resume_inputs(folder, None, 12.0))  # more time: another plan, from anew
    assert done.healed and done.healed.record["steps"] == 11 and weights_of(folder) != first


@pytest.mark.slow
def test_a_step_is_timed_without_being_kept(folder: Path) -> None:
    done = run_evolution(job(folder, **{**HEAL, "heal_steps": 0, "time_budget_minutes": 0.01}))
    assert done.healed and journal(folder, "heal plan")[0]["a_step"] > 0
    assert sum(done.healed.record["steps_of_domains"].values()) == done.healed.record["steps"] >= 1


@pytest.mark.slow
def test_own_texts_are_taught_by_who_knows_them_and_never_what_is_asked(
    folder: Path, tmp_path: Path
) -> None:
    inputs = job(folder, **HEAL)
    asked = {e.prompt for s in ("holdout", "verdict") for d in inputs.splits[s] for e in d.examples}
    lines = [json.dumps({"prompt": p, "completion": c}) for p, c in rows("next")]
    (tmp_path / "more.jsonl").write_text("\n".join(lines))
    texts = inputs.settings.model_copy(update={"heal_data": [str(tmp_path / "more.jsonl")]})
    parents = [str(family() / name) for name in PARENTS]
    taught = locate_inputs(texts, parents, str(family() / "base"), 1, folder)
    prompts = {e.prompt for e in taught.splits["heal"][0].examples}
    assert prompts and not prompts & asked and len(prompts) < len(lines)
    done = run_evolution(taught)
    assert done.healed and done.healed.record["experts"]["heal more"] == "next"
    losses = journal(folder, "heal expert")[0]["losses"]
    assert np.argmin(losses) == PARENTS.index("next") and len(losses) == 3
    only = [line for line, (p, _) in zip(lines, rows("next"), strict=True) if p in asked]
    (tmp_path / "more.jsonl").write_text("\n".join(only))
    with pytest.raises(ConfigError, match="holdout and verdict ask all that is in it"):
        locate_inputs(texts, parents, str(family() / "base"), 1, folder)


@pytest.mark.slow
def test_networks_of_ours_are_healed_too(storage: Any, tmp_path: Path) -> None:
    folders = [str(own_model(storage, f"m{n}", n)) for n in range(3)]
    more = {"tasks": ["copy"], "max_level": 2, "mixed_precision": True}
    settings = EvoMergeSettings.model_validate({**HEAL, "heal_steps": 2, **more})
    done = run_evolution(locate_inputs(settings, folders, None, 1, tmp_path / "x"))
    assert done.healed and done.healed.record["steps_of_domains"] == {"copy": 2}
    assert weights_of(tmp_path / "x") != files.sha256_of(done.model.path / WEIGHTS_FILE)


# -- what is refused, and the command --------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"heal": 0.95, "heal_steps": 9}, "less than or equal to 0.9"),
        ({"heal_steps": 9}, "no meaning without heal"),
        ({"heal": 0.2, "heal_steps": 9, "use_holdout_validation": False}, "holdout items"),
        ({"heal": 0.2, "heal_steps": 9, "fitness": "a:b"}, "your own fitness has not"),
    ],
)
def test_what_cannot_be_healed_is_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EvoMergeSettings.model_validate(settings)


def test_a_pipeline_does_not_heal(forge: Forge) -> None:
    sets = "--set phases.evomerge.heal=0.2 --set phases.evomerge.heal_steps=5"
    result = forge(f"run --preset smoke {sets} --dry-run")
    assert result.code == 2 and "forge evo --base-models RUN --heal" in result.err, result.err


@pytest.mark.slow
def test_the_command_ends_with_the_folder_to_take(
    forge: Forge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = " ".join(evo_line("--set", "fitness_subset_size=8"))
    assert "--time-budget" in forge(f"{line} --heal 0.5").err
    missing = forge(f"{line} --heal 0.5 --set heal_steps=2 --heal-data no.txt")
    assert missing.code and "no.txt" in missing.err
    result = forge(f"{line} --heal 0.5 --set heal_steps=2 --heal-data {family() / 'add.jsonl'}")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1].startswith("fitness on the holdout items: healed ")
    assert "healed champion" in result.out and "; take x/" in result.out
    again = forge("evo --resume x --heal 0.5 --json").document
    assert again["healing"]["steps"] == 2 and again["champion"] == "x/champion"
    refused = forge("evo replay x/healed/lineage.json y")
    assert refused.code == 2 and "no merge alone makes it again" in refused.err


@pytest.mark.slow
def test_only_the_champion_of_the_first_search_is_healed(folder: Path) -> None:
    done = run_evolution(job(folder, **{**HEAL, "heal_steps": 2, "replicates": 2}))
    assert done.healed and done.report and len(done.report.replicates) == 2
    assert (folder / "healed").is_dir() and not (folder / "replicate_2" / "healed").exists()
