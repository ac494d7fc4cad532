"""Selection, holdout and verdict share no prompt, and evolutions begun before that keep theirs.

tests/compat/evolution is an evolution that was made when prompt and answer decided together: its
models, data, record and journal, and in outcome.json what came out.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_forge.data.dataset_rows import Example
from agent_forge.data.near_copies import SplitBy
from agent_forge.errors import ConfigError
from agent_forge.evals.benchmarks import from_benchmarks
from agent_forge.evals.domains import (
    SHARES,
    Domain,
    evaluation_hash,
    folded,
    from_files,
    from_tasks,
    part,
)
from agent_forge.evals.model_under_test import variants
from agent_forge.phases.phase2_evomerge import parallel
from agent_forge.phases.phase2_evomerge.config import BEGUN, EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import run_evolution
from agent_forge.phases.phase2_evomerge.inputs import (
    EvolutionInputs,
    locate_inputs,
    resume_inputs,
    split_items,
)
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.phases.phase2_evomerge.phase import EvoMergePhase
from agent_forge.pipeline.config import load_config
from agent_forge.pipeline.orchestrator import saved_config
from agent_forge.pipeline.phase_run import fingerprint_of
from agent_forge.store import files
from agent_forge.store.sessions import SessionStore
from tests.support.command_line import Forge
from tests.support.data_files import put
from tests.support.tokenizers import byte_tokenizer

pytestmark = pytest.mark.slow

OLD = Path(__file__).parents[2] / "compat" / "evolution"
WIDE = {ord(digit): ord(digit) + 0xFEE0 for digit in "0123456789"}  # full-width forms
NEAR = 180  # of the 240 rows of fruit.jsonl: 60 prompts, each in four forms
FEW = {"fitness_subset_size": 24, "verdict_items": 30, "generations": 0, "workers": 1}


# -- which part -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is 2 + 3?", "what  IS 2 + 3", True),
        ("Stra\u00dfe \u2013 \u201cwo\u201d?", "STRASSE wo", True),
        ("Item \uff11\uff12", "item 12", True),
        ("2 + 3", "2 - 3", False),  # a plus is no punctuation
        ("2 + 3", "2 + 4", False),
        ("...", " ... ", True),
        ("...", "!!!", False),  # without it nothing would be left
    ],
)
def test_what_near_copies_differ_in(one: str, other: str, same: bool) -> None:
    assert (folded(one) == folded(other)) == same


def prompts_of(path: Path, split_by: SplitBy) -> dict[str, set[str]]:
    (domain,) = from_files([path], split_by)
    parts = {split: part(domain, split) for split in SHARES}
    assert sum(len(p.examples) for p in parts.values()) == len(domain.examples)
    return {split: {folded(e.prompt) for e in p.examples} for split, p in parts.items()}


def test_no_prompt_is_in_two_parts() -> None:
    by_content = prompts_of(OLD / "fruit.jsonl", "content")
    for split_by in ("asked", "question", "prompt"):
        found = prompts_of(OLD / "fruit.jsonl", split_by)
        assert all(len(prompts) > 5 for prompts in found.values())
        assert not any(a & b for a, b in combinations(found.values(), 2))
    assert len(by_content["selection"] & by_content["verdict"]) > 20  # which is why


def test_an_evolution_that_was_split_by_the_prompt_keeps_its_items() -> None:
    (domain,) = from_files([OLD / "fruit.jsonl"], "prompt")
    assert {split: evaluation_hash([part(domain, split)])[:8] for split in SHARES} == {
        **{"selection": "0c9528be", "holdout": "6de41947", "verdict": "7d893244"},
    }


def test_near_copies_are_together_in_whatever_file_and_form(tmp_path: Path) -> None:
    """As a prompt, as a conversation, with other answers, in several files."""
    asked = [f"Which colour has fruit {i}?" for i in range(60)]
    rows = [{"prompt": text, "completion": "red"} for text in asked]
    before = ("Which colour", "HAS", "fruit")
    chats = [[*before, f"{i}", "blue"] for i in range(60)]
    roles = ("user", "user", "assistant", "user", "assistant")
    talks = [
        {"messages": [{"role": r, "content": c} for r, c in zip(roles, chat, strict=True)]}
        for chat in chats
    ]
    places = [put(tmp_path / "rows.jsonl", *rows), put(tmp_path / "chats.jsonl", *talks)]
    one, other = from_files(places)
    assert one.parts == other.parts and set(one.parts) == set(SHARES)


def test_all_of_a_text_decides(tmp_path: Path) -> None:
    """The first word, which is given, is the same in every row; near-copies stay together."""
    texts = [f"Once upon a time there were {i} bears." for i in range(60)]
    rows = [{"text": form} for text in texts for form in (text, text.upper().rstrip("."))]
    (domain,) = from_files([put(tmp_path / "texts.jsonl", *rows)])
    assert not domain.exact and domain.near_copies == 60
    assert domain.parts[::2] == domain.parts[1::2] and set(domain.parts) == set(SHARES)


def test_what_is_chosen_does_not_depend_on_the_order(tmp_path: Path) -> None:
    lines = (OLD / "fruit.jsonl").read_text().splitlines()
    random.Random(1).shuffle(lines)
    (tmp_path / "fruit.jsonl").write_text("\n".join(lines))
    chosen = [
        {part(domain, split, 7).examples for split in SHARES}
        for path in (OLD / "fruit.jsonl", tmp_path / "fruit.jsonl")
        for domain in from_files([path])
    ]
    first, again = ({frozenset(examples) for examples in found} for found in chosen)
    assert first == again and {len(examples) for examples in first} == {7}


def test_exact_copies_are_left_out_and_near_ones_counted(tmp_path: Path) -> None:
    prompts = ("a b", "a  b", "A b!", "c")
    rows = [{"prompt": prompt, "completion": "x"} for prompt in prompts]
    (domain,) = from_files([put(tmp_path / "x.jsonl", *rows, {**rows[0], "completion": "y"})])
    assert [e.prompt for e in domain.examples] == ["a b", "a  b", "A b!", "c", "a b"]
    assert domain.near_copies == 3
    assert from_files([OLD / "fruit.jsonl"])[0].near_copies == NEAR


def test_one_prompt_for_all_is_too_little_and_says_why(tmp_path: Path) -> None:
    rows = [{"prompt": "Write a poem.", "completion": f"poem {i}"} for i in range(300)]
    path = put(tmp_path / "poems.jsonl", *rows)
    with pytest.raises(ConfigError) as refused:
        split_items(EvoMergeSettings(data=[str(path)]))
    assert "299 of its rows are near-copies, which stay together" in refused.value.hint
    with pytest.raises(ConfigError) as refused:
        for split in SHARES:
            part(from_files([path])[0], split)
    assert "299 of its rows are near-copies" in refused.value.hint


def test_generated_items_are_what_they_were() -> None:
    """Their splits have sources of their own."""
    assert {split: evaluation_hash(from_tasks(split=split, count=50))[:8] for split in SHARES} == {
        **{"selection": "106d18ac", "holdout": "44583a24", "verdict": "8e37b819"},
    }


def test_a_published_set_without_parts_is_split_by_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "flores").mkdir()
    english = [f"Sentence {i}" for i in range(40) for _ in range(2)]  # each has two translations
    (tmp_path / "flores/eng_Latn.dev").write_text("\n".join(english))
    german = [f"Satz {i}" for i in range(80)]
    (tmp_path / "flores/deu_Latn.dev").write_text("\n".join(german))
    rows = [{"question": f"{i}+1?{'!' * n}", "answer": "2"} for i in range(2000) for n in (0, 1)]
    put(tmp_path / "gsm8k/train.jsonl", *rows)
    put(tmp_path / "gsm8k/test.jsonl", *rows[:2])

    def prompts(pack: str, split: str, by: SplitBy) -> set[str]:
        where: dict[str, Any] = {"split": split, "split_by": by, "shots": 0, "folder": tmp_path}
        return {folded(e.prompt) for e in from_benchmarks([pack], **where)[0].examples}

    for pack, unseen in (("flores", "verdict"), ("gsm8k", "holdout")):
        for by in ("asked", "question", "prompt"):
            assert not prompts(pack, "selection", by) & prompts(pack, unseen, by)
        assert prompts(pack, "selection", "content") & prompts(pack, unseen, "content")


# -- choices --------------------------------------------------------------------------------------


def test_a_choice_that_is_listed_twice_counts_once() -> None:
    twice = Example("p", "a", choices=("a", "b", "b", "a"))
    once = Example("p", "a", choices=("a", "b"))
    assert Domain("d", (twice,)).chance == Domain("d", (once,)).chance == 0.5
    assert [e.completion for e in variants(twice)] == ["a", "b"]
    assert evaluation_hash([Domain("d", (twice,))]) == evaluation_hash([Domain("d", (once,))])


# -- what is told ---------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with the models and the data of the old evolution."""
    root = tmp_path / "old"
    shutil.copytree(OLD, root)
    for name in "ab":
        byte_tokenizer().save_pretrained(root / name)
    return root


def line(root: Path) -> str:
    sets = " ".join(f"--set {name}={value}" for name, value in FEW.items())
    return f"evo --base-models {root}/a,{root}/b --data {root}/fruit.jsonl --seed 7 {sets}"


def test_near_copies_are_told(models: Path, forge: Forge, tmp_path: Path) -> None:
    told = f"punctuation): fruit {NEAR}; each is in the part of the first"
    plan = forge(f"{line(models)} --dry-run --json").document
    assert plan["near_copies"] == {"fruit": NEAR}
    assert any(told in note for note in plan["notes"])
    assert f'near_copies: {{"fruit": {NEAR}}}' in forge(f"{line(models)} --dry-run").out
    run = forge(line(models))
    assert run.code == 0 and told in run.err
    story = card(tmp_path / "evomerge")
    assert "\nThere are near-copies (" in story and told in story
    rows = ({"prompt": f"{i}+", "completion": "x"} for i in range(300))
    plain = put(tmp_path / "fruit.jsonl", *rows)
    clean = line(models).replace(f"{models}/fruit.jsonl", str(plain)) + " --output-dir clean"
    plan = forge(f"{clean} --dry-run --json").document
    assert plan["near_copies"] == {} and "near-copies" not in str(plan["notes"])
    assert forge(clean).code == 0 and "near-copies" not in card(tmp_path / "clean")


def card(folder: Path) -> str:
    return (folder / "champion" / "README.md").read_text()


def test_the_plan_of_a_phase_tells_them_too() -> None:
    config = load_config(sets=(f"phases.evomerge.data=[{OLD / 'fruit.jsonl'}]",))
    notes = EvoMergePhase(config.phases.evomerge, config).plan(()).notes
    assert f"fruit {NEAR}; each is in the part of the first" in notes[-1]


def test_eval_asks_what_the_verdict_of_an_evolution_asks(models: Path, forge: Forge) -> None:
    forge(f"{line(models)} --set verdict_items=1000")
    verdict = files.read_json(Path("evomerge/champion/verdict.json"))["rivals"]["a"]["score"]["raw"]
    asked = f"eval {models}/a --data {models}/fruit.jsonl --split verdict --json"
    (row,) = forge(asked).document["domains"]
    # Batches of another shape sum in another order: on some processors the last bits differ.
    assert row["bits_per_byte"] == pytest.approx(verdict["fruit/bits_per_byte"], rel=1e-7)
    splits = split_items(EvoMergeSettings(data=[f"{models}/fruit.jsonl"]))
    assert row["items"] == len(splits["verdict"][0].examples) < 240


# -- evolutions and runs that were begun before ---------------------------------------------------


@pytest.fixture
def old(models: Path) -> Path:
    """The folder of the old evolution, as if it had been begun here."""
    record = files.read_checked(models / BEGUN)
    assert "split_by" not in record["settings"]
    record["settings"]["data"] = [str(models / "fruit.jsonl")]
    record["parents"] = [str(models / name) for name in "ab"]
    folder = models / "evomerge"
    folder.mkdir()
    (folder / BEGUN).write_bytes(files.with_checksum(record))
    (models / JOURNAL).replace(folder / JOURNAL)
    return folder


def test_an_old_evolution_goes_on_with_its_own_items(old: Path) -> None:
    before = (old / JOURNAL).read_bytes()
    known = files.read_json(OLD / "outcome.json")
    job = resume_inputs(old, None, None)
    items = {
        split: {"hash": evaluation_hash(domains), "count": len(domains[0].examples)}
        for split, domains in job.splits.items()
    }
    assert items == known["items"]
    assert any("the verdict may ask what the search saw" in note for note in job.notes)
    done = run_evolution(job)
    assert (old / JOURNAL).read_bytes() == before
    assert files.read_json(done.model.path / "lineage.json")["key"] == known["champion"]
    title, verdict = (known["card"].index(line) for line in ("# Evolved merge", "## Verdict"))
    # Its head and how it was made are told as today, and the verdict is told by loss too.
    head, _, body = card(old).partition("# Evolved merge\n")
    now, then = body.splitlines()[: verdict - title - 1], known["card"][title + 1 : verdict]
    assert head and [line.partition(" made by: ")[0] for line in now] == [
        line.partition(" made by: ")[0] for line in then
    ]
    again = files.read_checked(old / BEGUN)
    assert again["settings"]["split_by"] == "content"
    assert again["fingerprint"] == files.read_checked(OLD / BEGUN)["fingerprint"]


def test_an_old_folder_that_is_named_again_goes_on_too(old: Path) -> None:
    record = files.read_checked(old / BEGUN)
    given = {k: record["settings"][k] for k in ("data", *FEW, "checkpoint_every", "strategy")}

    def job(**more: Any) -> EvolutionInputs:
        settings = EvoMergeSettings(**given, **more)
        return locate_inputs(settings, record["parents"], None, record["seed"], old)

    assert len(run_evolution(job()).loop.curve) == 2
    with pytest.raises(ConfigError, match="items for the verdict were changed"):
        run_evolution(job(split_by="prompt"))
    (old / BEGUN).write_text("{")  # then only the journal can tell
    with pytest.raises(ConfigError, match="other models, data or settings"):
        run_evolution(job())
    assert len(run_evolution(job(split_by="content")).loop.curve) == 2


def test_a_new_evolution_records_its_split_and_keeps_it(models: Path, forge: Forge) -> None:
    assert forge(line(models)).code == 0
    place = Path("evomerge").resolve()
    assert files.read_checked(place / BEGUN)["settings"]["split_by"] == "overlap"
    assert resume_inputs(place, None, None).settings.split_by == "overlap"


def test_workers_get_the_split(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(parallel, "open_pool", lambda *given, **more: asked.append(given[3]))
    job = resume_inputs(old, None, None)
    settings = job.settings.model_copy(update={"workers": 2})
    workers = parallel.ParallelEvaluator.of(dataclasses.replace(job, settings=settings), "cpu")
    assert workers is not None
    workers.start()
    (arguments,) = asked
    items = split_items(EvoMergeSettings.model_validate(arguments["settings"]))["selection"]
    known = files.read_json(OLD / "outcome.json")["items"]["selection"]["hash"]
    assert evaluation_hash(items) == known


def test_an_old_run_goes_on_with_its_split_and_its_fingerprint(tmp_path: Path) -> None:
    """A record without the settings, in both files; the fingerprint is one from then."""
    sessions = SessionStore(tmp_path)
    config = load_config(preset="tiny", sets=(f"storage.root={tmp_path}",))
    record = config.model_dump(mode="json")
    sessions.create(record, json.dumps(record), session_id="new")
    for phase in ("cognate", "evomerge"):
        for name in getattr(config.phases, phase).BEFORE:
            del record["phases"][phase][name]
    sessions.create(record, json.dumps(record), session_id="old")
    read = {name: saved_config(sessions, name) for name in ("new", "old")}
    for phase in ("cognate", "evomerge"):
        found = {name: getattr(c.phases, phase).split_by for name, c in read.items()}
        now = {"cognate": "asked", "evomerge": "overlap"}[phase]
        assert found == {"new": now, "old": "content"}
    named = {
        name: fingerprint_of(
            SimpleNamespace(config=c, threads=1, device="cpu"),  # type: ignore[arg-type]
            EvoMergePhase(c.phases.evomerge, c),
            [],
        )
        for name, c in read.items()
    }
    assert named["old"] == "648a2541e5d5babe880385734f2aafee05155b8707e63a64e252012b56fc70c3"
    assert named["new"] != named["old"]
