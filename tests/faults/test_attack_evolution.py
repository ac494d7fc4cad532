"""What an attack on evolutions found: files, configs, edited models and rows that were trusted."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from agent_forge.errors import (
    AlreadyExists,
    ConfigError,
    DamagedFile,
    ForgeError,
    HostileInput,
    PhaseFailed,
)
from agent_forge.evals import lm_eval_harness
from agent_forge.evals.domains import from_files
from agent_forge.merge.output import write
from agent_forge.model.folder import open_weights
from agent_forge.model.opened import open_model
from agent_forge.phases.phase2_evomerge import EvoMerge, EvoMergeConfig, evolution
from agent_forge.phases.phase2_evomerge.evolution import replay, run_evolution
from agent_forge.phases.phase2_evomerge.inputs import resume_inputs
from agent_forge.store import files
from agent_forge.store.cleanup import refuse_foreign
from agent_forge.store.sessions import SessionStore
from tests.support.command_line import Forge
from tests.support.evo_models import FASTEST as FAST
from tests.support.evo_models import PARENTS, POOLS, begin, family, job, use_pool

LM_EVAL = ("simple_evaluate", "utils", "HFLM", "TaskManager")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A copy of the small Llamas that may be edited."""
    shutil.copytree(family(), tmp_path / "models")
    return tmp_path / "models"


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["evolution.json", "journal.jsonl"])
def test_a_name_alone_makes_no_evolution(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "mine.safetensors").write_text("mine")
    (folder / name).write_text("dear diary")
    with pytest.raises(ForgeError):
        job(folder, **FAST)
    assert (folder / name).read_text() == "dear diary"
    assert (folder / "weights" / "mine.safetensors").read_text() == "mine"


def test_links_in_an_evolution_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    run_evolution(job(folder, **FAST))
    store = tmp_path / "store"
    store.mkdir()
    (store / "important.safetensors").write_text("mine")
    files.remove_tree(folder / "weights", folder)
    (folder / "weights").symlink_to(store)
    with pytest.raises(ForgeError, match="is a link"):
        resume_inputs(folder, 1, None)
    assert (store / "important.safetensors").read_text() == "mine"


def test_what_a_person_put_beside_stays(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    settings = {**FAST, "checkpoint_every": 1, "keep_best_models": 1}
    run_evolution(job(folder, **settings))
    (folder / "gen_0_best_model" / "NOTES.md").write_text("mine")
    shutil.copytree(folder / "gen_0_best_model", folder / "gen_0_published_best_model")
    (folder / "evolution_checkpoint_gen_backup.json").write_text("{}")
    run_evolution(resume_inputs(folder, 2, None))
    kept = ("gen_0_best_model/NOTES.md", "gen_0_published_best_model/NOTES.md")
    assert all((folder / name).is_file() for name in kept)
    assert (folder / "evolution_checkpoint_gen_backup.json").is_file()


def test_a_champion_stays_until_the_next_one_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    run_evolution(job(folder, **FAST))
    before = files.sha256_of(folder / "champion" / "model.safetensors")

    def refuse(*arguments: Any, **named: Any) -> None:
        raise PhaseFailed("does not score what was measured")

    monkeypatch.setattr(evolution.reporting, "confirm_champion", refuse)
    with pytest.raises(PhaseFailed):
        run_evolution(resume_inputs(folder, 1, None))
    assert files.sha256_of(folder / "champion" / "model.safetensors") == before
    assert not list(folder.glob(".tmp-*"))


def test_names_of_a_person_in_an_evolution_stay(tmp_path: Path, forge: Forge) -> None:
    folder = tmp_path / "x"
    run_evolution(job(folder, **FAST))
    mine = {
        name: f"mine: {name}"
        for name in (
            "weights/mine.safetensors",
            "weights/workers/notes.txt",
            "evolution_checkpoint_gen_01.json",
            "evolution_checkpoint_gen_1.json/notes.txt",
            "evolution_checkpoint_gen_2.json",
        )
    }
    (folder / "evolution_log.json").unlink()
    mine["evolution_log.json"] = "dear diary"
    for name, text in mine.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "stop").write_bytes(b"caf\xe9")
    result = forge(f"evo --resume {folder} --gens 3")
    assert result.code == 0, result
    there = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert {*map(str.encode, mine.values()), b"caf\xe9"} <= set(there)
    assert (folder / "stop").exists() and (folder / "weights" / "mine.safetensors").exists()
    assert files.read_checked(folder / "evolution_checkpoint_gen_3.json")["generation"] == 3


@pytest.mark.parametrize("kind", ["link", "rows"])
def test_a_cache_that_is_not_ours_is_not_appended_to(kind: str, tmp_path: Path) -> None:
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "x"
    folder.mkdir()
    rows.write_text('{"place": 1, "score": 1}\n' if kind == "link" else '{"mine": 1}\n')
    before = rows.read_text()
    os.link(rows, folder / "fitness_cache.jsonl")
    if kind == "rows":
        rows.unlink()
        rows = folder / "fitness_cache.jsonl"
    with pytest.raises(ForgeError, match="fitness_cache") as caught:
        run_evolution(job(folder, **FAST))
    assert caught.value.exit_code == 4 and caught.value.hint and rows.read_text() == before


def test_a_lock_of_a_person_is_no_place_for_an_evolution(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "run.lock").write_text("my notes on locks")
    with pytest.raises(ForgeError, match=r"run\.lock"):
        run_evolution(job(folder, **FAST))
    assert (folder / "run.lock").read_text() == "my notes on locks"


def test_notes_on_a_champion_that_appear_meanwhile_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "x"
    run_evolution(job(folder, **FAST))
    confirm = evolution.reporting.confirm_champion

    def meanwhile(*arguments: Any, **named: Any) -> None:
        (folder / "champion" / "notes.txt").write_text("mine")
        confirm(*arguments, **named)

    monkeypatch.setattr(evolution.reporting, "confirm_champion", meanwhile)
    run_evolution(resume_inputs(folder, 1, None))
    assert [path.read_text() for path in folder.rglob("notes.txt")] == ["mine"]
    assert not files.foreign(folder / "champion")


@POOLS
def test_an_evolution_of_a_session_is_cleaned_unless_it_holds_more(
    sessions: SessionStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    use_pool(kind, monkeypatch)
    folder = sessions.path("s1") / "phase2_evomerge" / "evolution"
    run_evolution(job(folder, **{**FAST, "checkpoint_every": 1, "workers": 2}))
    refuse_foreign(sessions.path("s1"))
    (folder / "champion" / "notes.txt").write_text("mine")
    with pytest.raises(ForgeError, match=r"champion/notes\.txt"):
        refuse_foreign(sessions.path("s1"))


def test_a_replay_does_not_write_into_a_parent(models: Path, tmp_path: Path) -> None:
    run_evolution(begin(models, tmp_path / "x"))
    with pytest.raises(ConfigError, match="lies in"):
        replay(tmp_path / "x" / "champion" / "lineage.json", models / "add" / "sub")
    assert not (models / "add" / "sub").exists()


# -- edited models and items ----------------------------------------------------------------------


def edit(path: Path, key: str, value: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


def test_an_edited_config_is_noticed(models: Path, tmp_path: Path) -> None:
    run_evolution(begin(models, tmp_path / "x"))
    for name in ("base", *PARENTS):
        edit(models / name / "config.json", "rms_norm_eps", 0.5)
    with pytest.raises(ConfigError, match="were changed since"):
        resume_inputs(tmp_path / "x", 1, None)
    shutil.copytree(models, tmp_path / "moved")
    with pytest.raises(ConfigError, match="were changed since"):
        begin(tmp_path / "moved", tmp_path / "x")
    with pytest.raises(ConfigError, match="not those of the lineage"):
        replay(tmp_path / "x" / "champion" / "lineage.json", tmp_path / "again")


def test_edited_items_of_the_verdict_are_noticed(models: Path, tmp_path: Path) -> None:
    inputs = begin(models, tmp_path / "x")
    run_evolution(inputs)
    asked = {e.prompt for d in inputs.splits["verdict"] for e in d.examples}
    path = models / "add.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["completion"] = "7" if row["prompt"] in asked else row["completion"]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match="items for the verdict were changed"):
        resume_inputs(tmp_path / "x", 1, None)


def test_models_that_compute_differently_are_refused(models: Path, tmp_path: Path) -> None:
    edit(models / PARENTS[1] / "config.json", "rms_norm_eps", 1.0)
    with pytest.raises(ConfigError, match=r"rms_norm_eps is 1\.0"):
        begin(models, tmp_path / "x")


def test_every_model_is_measured_as_its_own_files_have_it(
    models: Path, tmp_path: Path, forge: Forge
) -> None:
    """A tokenizer that begins every text with another token."""
    place = models / PARENTS[1]
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.backend_tokenizer.post_processor = _with_start()
    tokenizer.save_pretrained(place)
    result = run_evolution(begin(models, tmp_path / "x"))
    assert result.report is not None
    told = result.report.baselines[PARENTS[1]].score.raw["add/bits_per_byte"]
    options = f"--data {models / 'add.jsonl'} --split verdict --items 20 --json"
    measured = forge(f"eval {place} {options}").document["domains"][0]["bits_per_byte"]
    assert told == pytest.approx(measured, rel=1e-6)


@pytest.mark.parametrize("kind", ["other weights", "damaged"])
def test_kept_weights_are_those_that_were_measured(kind: str, tmp_path: Path) -> None:
    """They save time on resume; a file that was replaced would become the champion."""
    folder = tmp_path / "x"
    run_evolution(job(folder, **FAST))
    before = {p: files.sha256_of(p) for p in (folder / "champion").iterdir()}
    (kept,) = (folder / "weights").glob("*.safetensors")
    tensors = load_file(kept)
    save_file({name: tensor * 0 for name, tensor in tensors.items()}, kept)
    if kind == "damaged":
        kept.write_bytes(kept.read_bytes()[:-100])
    run_evolution(resume_inputs(folder, 0, None))
    assert {p: files.sha256_of(p) for p in before} == before
    measured = files.sha256_of(kept)
    kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostileInput):
        run_evolution(resume_inputs(folder, 0, None))
    assert files.sha256_of(tmp_path / "elsewhere") == measured


def _with_start() -> Any:
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="[X] $A", special_tokens=[("[X]", 0)])


# -- code -----------------------------------------------------------------------------------------


def test_no_file_names_code_to_run(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(f"open({str(canary)!r}, 'w')\ndef score(m): return 1.0\n")
    (tmp_path / "evo.json").write_text(json.dumps({"fitness": "evil:score", "generations": 0}))
    config = {"phases": {"evomerge": {"fitness": "evil:score"}}}
    (tmp_path / "run.json").write_text(json.dumps(config))
    parents = ",".join(str(family() / name) for name in PARENTS)
    for line in (
        f"evo --base-models {parents} --config evo.json --dry-run",
        f"evo --base-models {parents} --config evo.json",
        f"evo --base-models {parents} --set fitness=evil:score --dry-run",
        "run --preset smoke --config run.json --dry-run",
        "run --preset smoke --config run.json",
    ):
        result = forge(line)
        assert result.code == (0 if "--set" in line else 2), (line, result)
        assert not canary.exists(), line


def test_a_session_alone_runs_no_fitness(tmp_path: Path, forge: Forge) -> None:
    line = "run --preset smoke --only cognate --session s --set phases.evomerge.fitness=evil:score"
    (tmp_path / "evil.py").write_text("def score(m): return 1.0\n")
    quick = "--set phases.cognate.trunk_steps=1 --set phases.cognate.branch_steps=1"
    quick += " --set phases.cognate.items_per_family=12 --set phases.cognate.control=false"
    quick += " --set phases.cognate.families=[digit_max,copy,rotate] --set runtime.threads=1"
    assert forge(f"{line} {quick} --set phases.cognate.evaluation_items=2").code == 0
    result = forge("resume s --from evomerge")
    assert result.code == 2 and "names code to be run" in result.err
    assert forge("resume s --set runtime.seed=1").code == 2


def test_no_file_names_a_cluster(tmp_path: Path, forge: Forge) -> None:
    """Ray would send code and data to whatever address a received file names."""
    address = "ray://203.0.113.6:10001"
    (tmp_path / "theirs.yaml").write_text(f"executor: ray\ncluster: {address}\n")
    begun = job(tmp_path / "out", **FAST)
    run_evolution(begun)
    line = f"evo --base-models {','.join(map(str, begun.parent_refs))} --config theirs.yaml"
    result = forge(f"{line} --output-dir other --dry-run")
    assert result.code == 2 and "names a Ray cluster" in result.err
    record = files.read_checked(tmp_path / "out" / "evolution.json")
    record["settings"] |= {"executor": "ray", "cluster": address}
    files.write_bytes(tmp_path / "out" / "evolution.json", files.with_checksum(record))
    result = forge("evo --resume out --gens 3")
    assert result.code == 2 and "names a Ray cluster" in result.err


def test_a_fitness_that_was_edited_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "edited_fitness.py"
    source.write_text("def score(model): return 1.0\n")
    own = {**FAST, "fitness": "edited_fitness:score", "data": []}
    run_evolution(job(tmp_path / "out", **own))
    again = tmp_path / "out", 3, None, ["fitness=edited_fitness:score"]
    assert resume_inputs(*again).settings.generations == 3
    source.write_text("def score(model): return 2.0\n")
    with pytest.raises(ConfigError, match="was changed since"):
        resume_inputs(*again)


def test_files_of_one_name_are_told_apart_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker and --resume name them by whole paths; weights of domains go by their names."""
    paths = [Path(folder) / "maths.jsonl" for folder in ("p", "q", "r")]
    monkeypatch.chdir(tmp_path)
    for path in paths:
        path.parent.mkdir()
        path.write_text(json.dumps({"prompt": f"{path}?", "completion": "x"}))
    names = [domain.name for domain in from_files(paths)]
    assert names == ["maths", "q/maths.jsonl", "r/maths.jsonl"]
    assert names == [domain.name for domain in from_files([path.resolve() for path in paths])]


def test_a_received_session_cleans_no_others(tmp_path: Path, forge: Forge) -> None:
    one = "--set cleanup_policy.max_sessions_total=1"
    assert forge(f"run --preset toy --session theirs --storage sender {one}").code == 0
    for name in ("mine1", "mine2"):
        assert forge(f"run --preset toy --session {name} --storage store").code == 0
    shutil.copytree(tmp_path / "sender/sessions/theirs", tmp_path / "store/sessions/theirs")
    assert forge("resume theirs --storage store").code == 0
    assert {"mine1", "mine2"} <= {path.name for path in (tmp_path / "store/sessions").iterdir()}


def test_networks_of_an_evolution_are_not_replaced(models: Path, tmp_path: Path) -> None:
    """What a finished evolution was made of is needed to replay and to resume it."""
    config = EvoMergeConfig(
        output_dir=str(tmp_path / "out"), tokenizer=str(models / "base"), **FAST
    )
    network = {name: open_model(models / name).network for name in (*PARENTS, "base")}
    first, second, third = (network[name] for name in PARENTS)
    EvoMerge(config).run([first, second])
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("parent_*/*")}
    with pytest.raises(ConfigError, match="holds another network"):
        EvoMerge(config).run([third, network["base"]])
    assert before and all(path.read_bytes() == data for path, data in before.items())
    EvoMerge(config).run([first, second])


def test_a_model_that_is_no_champion_is_not_replaced_by_one(tmp_path: Path) -> None:
    run_evolution(job(tmp_path / "out", **FAST))
    shutil.rmtree(tmp_path / "out/champion")
    write(open_weights(str(family() / "add")), tmp_path / "out/champion")
    before = files.sha256_of(tmp_path / "out/champion/model.safetensors")
    with pytest.raises(AlreadyExists, match="was not written here"):
        run_evolution(resume_inputs(tmp_path / "out", FAST["generations"] + 1, None))
    assert files.sha256_of(tmp_path / "out/champion/model.safetensors") == before


def test_a_model_that_somebody_merged_into_an_evolution_stays(models: Path, tmp_path: Path) -> None:
    """Where a command as fitness got its candidates, and where networks in memory go."""
    own, out = f"{sys.executable} -c print(1)", tmp_path / "out"
    run_evolution(begin(models, out, fitness=own))
    for name in ("candidate", "parent_1"):
        write(open_weights(str(models / "add")), out / name)
    before = {
        path: path.read_bytes()
        for name in ("candidate", "parent_1")
        for path in (out / name).iterdir()
    }
    run_evolution(resume_inputs(out, 1, None, [f"fitness={own}"]))
    files.remove(out / "evolution.json")
    config = EvoMergeConfig(output_dir=str(out), tokenizer=str(models / "base"), **FAST)
    with pytest.raises(ConfigError, match="holds another network"):
        EvoMerge(config).run([open_model(models / name).network for name in ("base", "twice")])
    assert before == {path: path.read_bytes() for path in before}


def test_a_folder_that_is_only_called_control_is_none(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "add", models / "control")
    assert begin(models, tmp_path / "out").control_ref is None


def test_a_finished_run_is_not_done_again_on_other_cores(
    tmp_path: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert forge("run --preset toy --session s --set runtime.threads=0").code == 0
    done = tmp_path / "storage/sessions/s/toy/linear/model.safetensors"
    before = done.stat().st_mtime_ns
    cores = os.cpu_count() or 1
    monkeypatch.setattr(os, "cpu_count", lambda: cores + 3)
    assert forge("resume s").code == 0 and done.stat().st_mtime_ns == before


def test_tasks_of_somebody_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval runs the file beside a task that names a function."""
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**dict.fromkeys(LM_EVAL)))
    (tmp_path / "lm-eval").mkdir()
    for line in (
        "doc_to_text: !function utils.f",
        "doc_to_text: !%66unction utils.f",
        "include: ../theirs.yaml",
        "include: theirs.yaml",
        "class: !function a.B",
        "doc_to_text: '{{ cycler.__init__.__globals__.os.getcwd() }}'",
        "doc_to_choice: ['{{a}}', '{{{a}}{% import x %}']",
        "metric_list: [{metric: ./theirs}]",
        "metric_list: [{metric: my_perplexity}]",
        "metric_list: [{metric: acc, hf_evaluate: true}]",
        'dataset_kwargs: {"trust\\x5fremote_code": true}',
        "dataset_path: pandas",
        "dataset_path: somebody/rows",
        "dataset_kwargs: {data_files: {test: 'http://127.0.0.1/x.jsonl'}}",
        "dataset_kwargs: {data_files: ['hf://datasets/x/y.jsonl']}",
        "dataset_kwargs: {data_files: '/x.zip::https://127.0.0.1/x.zip'}",
        "dataset_kwargs: {data_files: x.jsonl}",
        "dataset_kwargs: {data_dir: 's3://x'}",
        "use_prompt: 'x.yaml:all'",
        "x: &x [*x]",
    ):
        for coding in ("utf-8", "utf-16"):
            text = f"task: piqa\n{line}\n"
            (tmp_path / "lm-eval/piqa.yaml").write_text(text, encoding=coding)
            with pytest.raises(HostileInput, match="runs code"):
                lm_eval_harness.measure(tmp_path, ["piqa"], folder=tmp_path)


def test_lm_eval_is_started_where_nothing_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs git and pip, and looks for metrics and datasets, in the folder it is started in."""
    seen: list[list[str]] = []

    def evaluate(**_: Any) -> dict[str, Any]:
        seen.append([path.name for path in Path().iterdir()])
        return {"results": {"piqa": {"acc,none": 0.5}}, "n-samples": {"piqa": {"effective": 2}}}

    def manager(include_path: str | None = None, include_defaults: bool = True) -> Any:
        own = ["mine"] if include_path else []
        return SimpleNamespace(all_tasks=own + (["piqa", "arc"] if include_defaults else []))

    library = {"simple_evaluate": evaluate, "HFLM": dict, "TaskManager": manager}
    for name in ("lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**library))
    monkeypatch.setattr(lm_eval_harness, "_as_transformers", lambda model: (None, None))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text("raise SystemExit")
    (tmp_path / "lm-eval").mkdir()
    assert lm_eval_harness.measure(tmp_path, ["piqa"], folder=tmp_path)[0]["accuracy"] == 0.5
    assert seen == [[]] and Path.cwd() == tmp_path
    library["TaskManager"] = lambda **_: SimpleNamespace(all_tasks=["piqa"])
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", SimpleNamespace(**library))
    with pytest.raises(ConfigError, match="a task called piqa"):
        lm_eval_harness.measure(tmp_path, ["piqa"], folder=tmp_path)


@pytest.mark.parametrize("how", ["renamed", "in place", "config"])
def test_a_parent_that_changes_under_an_evolution_stops_it(
    how: str, models: Path, tmp_path: Path
) -> None:
    """The verdict would be about a model that the card does not name."""
    name = "config.json" if how == "config" else "model.safetensors"
    place, other = models / "twice" / name, tmp_path / "other"
    other.write_bytes((models / "add" / name).read_bytes() + b"\n" * (how == "config"))
    whole, told = place.read_bytes(), list[str]()

    def listen(record: dict[str, Any]) -> None:
        told.append(record["event"])
        if told.count("candidate") == 6 and told[-1] == "candidate":
            if how == "in place":
                place.write_bytes(other.read_bytes())
            else:
                other.replace(place)

    with pytest.raises(ConfigError, match="was changed under the evolution"):
        run_evolution(begin(models, tmp_path / "x"), listen=listen)
    assert told.count("candidate") == 6 and not (tmp_path / "x/champion").exists()
    place.write_bytes(whole)
    assert run_evolution(begin(models, tmp_path / "x")).model.path.is_dir()


@pytest.mark.parametrize("names", [["a", "b", "b"], ["a", "b"], ["a", "b", "champion"]])
def test_names_that_hide_a_parent_are_refused(names: list[str], tmp_path: Path) -> None:
    run_evolution(job(tmp_path / "x", **FAST))
    record = files.read_checked(tmp_path / "x/evolution.json")
    del record["schema_version"]
    content = files.with_checksum({**record, "names": names})
    (tmp_path / "x/evolution.json").write_bytes(content)
    with pytest.raises(DamagedFile, match="do not tell its models apart"):
        resume_inputs(tmp_path / "x", None, None)
