"""What an evolution refuses or says before it harms, wastes or hides anything."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from agent_forge.errors import (
    AlreadyExists,
    ConfigError,
    DamagedFile,
    ForgeError,
    NotFound,
    PhaseFailed,
)
from agent_forge.evals.comparison import (
    ACCURACY,
    BITS,
    Comparison,
    DomainGains,
    Gain,
    PairedScores,
    compare_scores,
)
from agent_forge.evals.domains import from_files
from agent_forge.evals.fitness import FunctionFitness
from agent_forge.evals.model_under_test import ItemScores
from agent_forge.phases.phase2_evomerge import EvoMerge, EvoMergeConfig
from agent_forge.phases.phase2_evomerge.config import EvoMergeSettings
from agent_forge.phases.phase2_evomerge.evolution import EvolutionResult, replay, run_evolution
from agent_forge.phases.phase2_evomerge.inputs import find_evolution, locate_inputs, resume_inputs
from agent_forge.phases.phase2_evomerge.journal import JOURNAL
from agent_forge.store import files
from agent_forge.store.models import ModelStorage, load_directory
from tests.support.command_line import Forge
from tests.support.eval_models import own_model
from tests.support.evo_models import FEW, WEIGHTS_FILE, begin, family, files_of, job, journal, three

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> EvolutionResult:
    return run_evolution(job(tmp_path_factory.mktemp("done") / "x", generations=1, verdict_items=1))


def everything(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# -- the folder -----------------------------------------------------------------------------------


def test_fewer_generations_than_there_are(done: EvolutionResult) -> None:
    before = everything(done.loop.folder)
    told = r"holds 1 generations, 0 are asked for"
    with pytest.raises(ConfigError, match=told):
        job(done.loop.folder, generations=0, verdict_items=1)
    with pytest.raises(ConfigError, match=told):
        resume_inputs(done.loop.folder, 0, None)
    assert everything(done.loop.folder) == before
    assert resume_inputs(done.loop.folder, 1, None).settings.generations == 1


def test_fewer_scores_than_there_are(done: EvolutionResult, tmp_path: Path) -> None:
    before = everything(done.loop.folder)
    with pytest.raises(ConfigError, match="scores, 4 are asked for"):
        job(done.loop.folder, generations=1, verdict_items=1, max_evaluations=4)
    assert everything(done.loop.folder) == before
    for _ in range(2):
        few = {"generations": 1, "fitness_subset_size": 8, "verdict_items": 1}
        run_evolution(job(tmp_path / "x", max_evaluations=4, **few))


def test_a_generation_that_was_only_begun_does_not_count(
    done: EvolutionResult, tmp_path: Path
) -> None:
    shutil.copytree(done.loop.folder, tmp_path / "x")
    lines = (done.loop.folder / JOURNAL).read_bytes().splitlines(keepends=True)
    begun = next(i for i, line in enumerate(lines) if b'"generation":1' in line)
    (tmp_path / "x" / JOURNAL).write_bytes(b"".join(lines[: begun + 1]))
    assert resume_inputs(tmp_path / "x", 0, None).settings.generations == 0


def to_a_parent(root: Path) -> Path:
    return root / "a"


def to_within_a_parent(root: Path) -> Path:
    return root / "a" / "evolved"


def to_what_holds_a_parent(root: Path) -> Path:
    return root


def to_the_base(root: Path) -> Path:
    return root / "base"


def to_a_foreign_folder(root: Path) -> Path:
    (root / "mine").mkdir()
    (root / "mine" / "thesis.txt").write_text("years of work")
    return root / "mine"


def to_a_file(root: Path) -> Path:
    (root / "file").write_text("x")
    return root / "file"


def to_below_a_file(root: Path) -> Path:
    return to_a_file(root) / "x" / "y"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (to_a_parent, "is the model"),
        (to_within_a_parent, "lies in the model"),
        (to_what_holds_a_parent, "holds the model"),
        (to_the_base, "is the model"),
        (to_a_foreign_folder, r"is no evolution and holds thesis\.txt"),
        (to_a_file, "cannot be a folder"),
        (to_below_a_file, "cannot be a folder"),
    ],
)
def test_a_folder_that_holds_something_else(
    tmp_path: Path, place: Callable[[Path], Path], told: str
) -> None:
    for name, source in (("a", "add"), ("b", "next"), ("base", "base")):
        shutil.copytree(family() / source, tmp_path / name)
    target = place(tmp_path)
    before = everything(tmp_path)
    refs = [str(tmp_path / "a"), str(tmp_path / "b")]
    wanted = EvoMergeSettings.model_validate({**FEW, "data": files_of(family())})
    with pytest.raises(ConfigError, match=told):
        locate_inputs(wanted, refs, str(tmp_path / "base"), 1, target)
    assert everything(tmp_path) == before


def test_from_python_nothing_is_written_either(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    config = EvoMergeConfig(output_dir=tmp_path, tokenizer=str(family() / "add"))
    with pytest.raises(ConfigError, match="is no evolution"):
        EvoMerge(config).run([torch.nn.Linear(2, 2)] * 2)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_nothing_is_trained_for_what_is_refused(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "evomerge").mkdir()
    (tmp_path / "evomerge" / "thesis.txt").write_text("years of work")
    for line, told in (
        ("evo", "is no evolution and holds thesis.txt"),
        ("evo --output-dir x --set 'domain_weights={x: 1}'", "domain_weights: no 'x'"),
        ("evo --output-dir x --set parent_weights=[1]", "1 parent_weights, 3 parents"),
        ("evo --output-dir x --data no.txt", "no.txt"),
    ):
        result = forge(line)
        assert result.code and told in result.err, result.err
    assert [p.name for p in tmp_path.iterdir()] == ["evomerge"]


# -- settings -------------------------------------------------------------------------------------


def alike(root: Path) -> str:
    return f"--base-models {three(root)} " + " ".join(f"--data {p}" for p in files_of(root))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{m} --gens 5 --set generations=7", "generations is 7 by --set and 5 by its own option"),
        ("{m} --set data=[x.jsonl]", "data is ['x.jsonl'] by --set"),
        ("{m} --time-budget 1 --set time_budget_minutes=2", "time_budget_minutes is 2 by --set"),
        ("{m} --set 'fitness_floors={{x/accuracy: 1}}'", "fitness_floors: no 'x/accuracy'"),
        ("{m} --set 'fitness_floors={{add: 1}}'", "fitness_floors: no 'add'"),
        ("{m} --set 'domain_weights={{x: 1}}'", "domain_weights: no 'x'"),
        ("{m} --set parent_weights=[1,2]", "2 parent_weights, 3 parents"),
        ("{m} --data {r}/../{n}/add.jsonl", "add.jsonl is given twice: it is the same file as"),
        ("{m} --data {t}/link.jsonl", "link.jsonl is given twice: it is the same file as"),
        ("--base-models {three} --data {t}/few.jsonl", "--set use_holdout_validation=false"),
        ("{m} --output-dir {r}/add", "is the model"),
        ("--base-models {three} --data {t}/number.jsonl", "line 2: field 'text' is int"),
        ("{m} --set 'domain_weights={{add: 0, twice: 0, next: 0}}'", "no domain counts"),
        (
            "--base-models {three} --data {t}/plain.jsonl --set 'fitness_weights={{accuracy: 1}}'",
            "there are no answers to be right",
        ),
        ("{m} --device cuda", "'cuda' is not there"),
        ("{m} --device tpu", "--device"),
        ("--base-models {three},,x", "has nothing between two commas"),
        ("--base-models {three} --set fitness=no_such:f", "there is no fitness 'no_such:f'"),
        ("{m} --set executor=ray", "Ray is not installed"),
        ("{m} --set strategy=nsga2", "needs the library pymoo"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    forge: Forge, tmp_path: Path, line: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, find = family(), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "ray" else find(n, *a)
    )
    monkeypatch.setitem(sys.modules, "pymoo", None)
    rows = (json.dumps({"text": f"line {n} of a text"}) for n in range(200))
    (tmp_path / "plain.jsonl").write_text("\n".join(rows))
    (tmp_path / "link.jsonl").symlink_to(root / "add.jsonl")
    (tmp_path / "few.jsonl").write_text(_short_of_holdout(root))
    (tmp_path / "number.jsonl").write_text('{"text": "a b c"}\n{"text": 5}\n')
    places = {"r": root, "n": root.name, "t": tmp_path, "three": three(root), "m": alike(root)}
    for more in (" --dry-run", ""):
        result = forge(f"evo {line.format(**places)}{more}")
        assert result.code in (2, 4) and told in result.err, result.err
    assert not (tmp_path / "evomerge").exists()


def test_a_combo_that_was_not_measured_is_no_rival(tmp_path: Path) -> None:
    few = run_evolution(job(tmp_path / "x", generations=1, verdict_items=30, max_evaluations=3))
    assert few.report is not None
    assert {*few.report.baselines} == {"add", "twice", "next", "plain average", "base"}


def _short_of_holdout(root: Path) -> str:
    """Enough rows for the other two parts."""
    rows = (root / "add.jsonl").read_text().splitlines()
    return "\n".join(rows[:100])


def test_the_way_out_that_the_hint_names(forge: Forge, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text(_short_of_holdout(family()))
    line = f"evo --base-models {three(family())} --data few.jsonl --dry-run --json"
    assert forge(line).code == 2
    assert forge(f"{line} --set use_holdout_validation=false").code == 0


def test_the_same_value_twice_is_no_contradiction(forge: Forge) -> None:
    result = forge(f"evo {alike(family())} --gens 5 --set generations=5 --dry-run --json")
    assert result.document["generations"] == 5


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ("domain_weights={x: 1}", "domain_weights: no 'x'"),
        ("fitness_floors={x/accuracy: 1}", "fitness_floors: no 'x/accuracy'"),
        ("parent_weights=[1]", "1 parent_weights, 3 parents"),
        ("data=[no.txt]", "no.txt"),
    ],
)
def test_the_pipeline_refuses_before_phase_one(
    forge: Forge, tmp_path: Path, item: str, told: str
) -> None:
    for more in ("--dry-run", "--progress none"):
        result = forge(f"run --preset smoke --set 'phases.evomerge.{item}' {more}")
        assert result.code and told in result.err, result.err
    assert not list(tmp_path.glob("storage/sessions/*"))


# -- what is measured -----------------------------------------------------------------------------


def test_a_fitness_that_leaves_is_a_failed_candidate(own: Path) -> None:
    module = (own / "own_fitness.py").read_text()
    leaves = "def leaves(model): raise SystemExit(0)\ndef asked(model): raise KeyboardInterrupt\n"
    (own / "own_fitness.py").write_text(
        module.replace('raise KeyError("a bad moment")', "raise SystemExit(0)") + leaves
    )
    done = run_evolution(job(own / "x", fitness="own_fitness:sometimes", generations=0))
    failed = [r for r in journal(done.loop.folder) if r["score"] is None]
    assert failed and all("SystemExit: 0" in r["problem"] for r in failed)
    with pytest.raises(PhaseFailed, match="SystemExit"):  # the first parent: nothing to go on with
        run_evolution(job(own / "y", fitness="own_fitness:leaves"))
    assert not journal(own / "y")
    with pytest.raises(KeyboardInterrupt):
        run_evolution(job(own / "z", fitness="own_fitness:asked"))
    (own / "left_fitness.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match="there is no fitness 'left_fitness:f': SystemExit"):
        FunctionFitness("left_fitness:f", torch.nn.Linear(1, 1), 1)


def test_floors_that_nobody_meets_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = "no model of generation 0 meets fitness_floors (add/accuracy 1)"
    with caplog.at_level(logging.WARNING):
        run_evolution(job(tmp_path / "x", generations=0, fitness_floors={"add/accuracy": 0.01}))
        assert told not in caplog.text
        run_evolution(job(tmp_path / "y", generations=0, fitness_floors={"add/accuracy": 1}))
    assert caplog.text.count(told) == 1


def test_answers_and_texts_are_both_told(tmp_path: Path) -> None:
    better = Gain(0.5, 0.6, 0.1, 0.05, 0.15, 0.001, 90)
    worse = Gain(2.0, 2.1, -0.1, -0.2, -0.05, 0.001, 120)
    both = DomainGains("all domains", {ACCURACY: better, BITS: worse}).sentence("it")
    assert both == (
        "better than it by 10.0 points (95 % interval 5.0..15.0, p = 0.001, n = 90);"
        " worse than it by 0.1000 bits per byte"
        " (95 % interval -0.2000..-0.0500, p = 0.001, n = 120)"
    )
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"{n} and one is {n + 1}" for n in range(40)))
    data = [files_of(family())[0], str(text)]
    found = run_evolution(job(tmp_path / "x", data=data, generations=0)).report
    assert found is not None
    assert all(" bits per byte (" in sentence for sentence in found.sentences())
    told = (" points (" in s or "accuracy cannot tell" in s for s in found.sentences())
    assert all(told)


def test_one_file_by_two_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(f"of {folder} there are many words")
    pair = [Path("one/a.txt"), Path("two/a.txt")]
    assert [d.name for d in from_files(pair)] == ["a", "two/a.txt"]
    for again in (pair[0], tmp_path / "one" / "a.txt", Path("one/../one/a.txt")):
        with pytest.raises(ConfigError, match="is given twice"):
            from_files([*pair, again])


# -- damaged models -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_nan_is_damage_everywhere(
    forge: Forge, tmp_path: Path, storage: ModelStorage, kind: str
) -> None:
    root = family()
    if kind == "foreign":
        bad = Path(shutil.copytree(root / "add", tmp_path / "bad"))
        state = load_file(bad / WEIGHTS_FILE)
        state["model.norm.weight"][3] = math.nan
        save_file(state, bad / WEIGHTS_FILE, {"format": "pt"})
    else:
        bad = own_model(storage, "bad", 0)
        state = load_directory(bad)[0]
        next(iter(state.values())).view(-1)[3] = math.inf
        tokens = [p for p in bad.iterdir() if "token" in p.name]
        kept = {p.name: p.read_bytes() for p in tokens}
        config = files.read_json(bad / "config.json")
        storage.save_model(state, "s1", "cognate", "b2", {}, config=config, tokenizer_files=kept)
        bad = storage.find("cognate.b2.s1")
    lines = [
        *(f"generate {bad} abc", f"generate {bad} abc --temperature 1"),
        *(f"eval {bad} --data {root}/add.jsonl", f"compare {root}/add {bad} --data {root}/a.txt"),
    ]
    (root / "a.txt").write_text("some words of a text")
    if kind == "foreign":
        lines.append(f"evo --base-models {root}/next,{bad} --data {root}/add.jsonl")
    for line in lines:
        result = forge(line)
        assert result.code == 4 and "holds NaN or infinity" in result.err, (line, result.err)
        assert "unexpected" not in result.err and result.out == ""


# -- replay ---------------------------------------------------------------------------------------


def test_replay_of_what_is_no_lineage(done: EvolutionResult, tmp_path: Path) -> None:
    lineage = done.model.path / "lineage.json"
    whole: dict[str, Any] = json.loads(lineage.read_text())
    wrong: list[Any] = [[], {}, {"a": 1}, 3, {"lineage": None}, {**whole, "key": "0" * 64}]
    wrong += [{k: v for k, v in whole.items() if k != name} for name in whole if name != "seed"]
    wrong.append({**whole, "candidates": [{**whole["candidates"][0], "key": "0" * 64}]})
    wrong += [{**whole, "models": whole["models"][-1:]}]  # fewer than it was made from
    wrong += [{**whole, "candidates": whole["candidates"][-1:]}]
    for number, record in enumerate(wrong):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(record))
        error = ConfigError if number < 5 else DamagedFile  # another file, or a damaged lineage
        with pytest.raises(error, match="not the lineage of a champion"):
            replay(path, tmp_path / "again")
    with pytest.raises(ConfigError, match="not the lineage of a champion"):
        replay(done.model.path / "README.md", tmp_path / "again")
    (tmp_path / "lineage.json").write_text('{"key": ')
    with pytest.raises(DamagedFile):
        replay(tmp_path / "lineage.json", tmp_path / "again")
    with pytest.raises(NotFound, match="there is no file"):
        replay(tmp_path / "nothing.json", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_resuming_from_another_file_than_a_checkpoint(done: EvolutionResult) -> None:
    folder = done.loop.folder
    for other in (folder / "evolution_log.json", folder / "journal.jsonl"):
        with pytest.raises(ConfigError, match="is no checkpoint of an evolution"):
            find_evolution(other)
    (folder / "evolution_checkpoint_gen_9.json").write_text("{}")
    with pytest.raises(DamagedFile):
        find_evolution(folder / "evolution_checkpoint_gen_9.json")
    (folder / "evolution_checkpoint_gen_9.json").unlink()


def test_replay_onto_something(done: EvolutionResult, tmp_path: Path) -> None:
    with pytest.raises(AlreadyExists) as error:
        replay(done.model.path / "lineage.json", tmp_path)
    assert "--force" not in error.value.hint and "name a folder" in error.value.hint


def test_a_fitness_that_prints_leaves_stdout_to_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loud_score.py").write_text(
        "def loud(model):\n    print('HELLO')\n    return 1.0\n"
    )
    assert FunctionFitness("loud_score:loud", nn.Linear(1, 1), 1).score().fitness == 1.0
    said = capsys.readouterr()
    assert "HELLO" not in said.out and "HELLO" in said.err


def test_a_sentence_names_the_domains_that_lost() -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(5.0, 0.1, (2, 60))

    def outcome(loss: list[float]) -> ItemScores:
        return ItemScores([False] * 60, loss, [3] * 60, [1.0] * 60)

    before = [outcome(row.tolist()) for row in losses]
    after = [outcome((losses[0] - 2).tolist()), outcome((losses[1] + 1).tolist())]
    named = zip(("won", "lost"), before, after, strict=True)
    found = compare_scores([PairedScores(name, a, b, [4] * 60, False) for name, a, b in named])
    worse = found.worse_domains()
    assert "; on lost worse than it by" in worse and "on won" not in worse
    assert Comparison(found.domains[1:], found.overall).worse_domains() == ""


def test_every_model_needs_a_tokenizer_before_any_work(tmp_path: Path) -> None:
    """The verdict opens each by itself, after hours perhaps."""
    models = tmp_path / "models"
    shutil.copytree(family(), models)
    for path in models.glob("add/token*"):
        path.unlink()
    with pytest.raises(ForgeError, match="it has no tokenizer"):
        begin(models, tmp_path / "x")


def test_rows_without_a_chat_form_are_told(tmp_path: Path) -> None:
    """A model that chats may know the answer, but not to a text that nobody asks it for."""
    models = tmp_path / "models"
    shutil.copytree(family(), models)
    assert not any("plain text" in note for note in begin(models, tmp_path / "x").notes)
    for name in ("twice", "add", "next", "base"):
        (models / name / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (note,) = (note for note in begin(models, tmp_path / "x").notes if "plain text" in note)
    assert note.startswith("twice, add, next: ") and "messages" in note
