"""Small real runs of Phase 3, and what its settings change, for test_settings_matter.py."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_forge.contract.phase import ModelRef
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.data.traces import local_rows
from agent_forge.evals import thoughts
from agent_forge.evals.comparison import Comparison, DomainGains, Gain
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.hf import config_dict
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase3_quietstar import phase, reward_step
from agent_forge.phases.phase3_quietstar.phase import QuietStarPhase, old_skills
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.store.models import ModelStorage
from agent_forge.store.records import read_metadata
from agent_forge.store.sessions import SessionStore
from agent_forge.train.corpus import build_corpus
from agent_forge.train.lessons import write_lessons
from tests.support import cognate_settings
from tests.support.toy_runs import SMALL, folder

PHASE = "phases.quietstar"
REWARD = f"{PHASE}.reward"
TRAIN = f"{PHASE}.train"
SHAPE = (
    *("model.vocab_size=300", "model.embed_rank=8", "model.d_model=16", "model.n_layers=1"),
    *("model.n_heads=2", "model.ffn_hidden=16", "model.d_mem=8", "model.gate_hidden=8"),
    *("model.trm_hidden=8", "runtime.threads=1", f"{PHASE}.checkpoint_every_steps=3"),
)
FEW = (
    *(f"{PHASE}.steps=7", f"{PHASE}.examples=40", f"{PHASE}.thought_items=5", f"{PHASE}.rows=2"),
    *(f"{PHASE}.row_tokens=160", f"{PHASE}.items_per_family=12", f"{PHASE}.evaluation_items=6"),
    f"{PHASE}.families=[digit_max, copy, rotate]",
)
ROOM = 8  # tokens of a thought
ALL_TEN = f"{PHASE}.strategies=[step, mece, bayesian, doubt, orthogonal, expert, falsify, "
ALL_TEN += "multidomain, correct, uncertain]"


def config(*sets: str) -> PipelineConfig:
    return load_config(preset="smoke", sets=(*SHAPE, *FEW, *sets))


def champion(root: Path) -> ModelRef:
    """A model of another session, as Phase 2 would hand it over."""
    SessionStore(root).create({}, "", session_id="before")
    settings = config()
    torch.manual_seed(1)
    model = ForgeNetwork(settings.model)
    tokenizer = build_corpus(settings.phases.quietstar, model.settings).tokenizer
    storage = ModelStorage(root)
    said = {"fitness": 0.7, "merge_technique": "none"}
    shape = config_dict(model.settings)
    names = ("before", "evomerge", "champion")
    storage.save_model(model, *names, said, config=shape, tokenizer_files=tokenizer.files())
    path = storage.find("evomerge.champion.before")
    return ModelRef("champion", path, read_metadata(path).model_dump())


@contextlib.contextmanager
def brief_thoughts() -> Iterator[None]:
    """Thoughts and answers of few tokens: models that have learned nothing never end one, and use
    all that they may have. How much that is by itself is tested in tests/evals/test_thoughts.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Thinker, "room", lambda self, items: ROOM)
        patch.setattr(thoughts, "ANSWER_TOKENS", 4)
        yield


def run(root: Path, *sets: str, listener: Any = None) -> dict[str, Any]:
    """Run or resume the session `r` below `root`, Phase 3 alone."""
    begun = (folder(root) / "session.json").exists()
    orchestrator = PipelineOrchestrator(
        config=load_config(
            preset="smoke", sets=(f"storage.root={root}", *SMALL, *SHAPE, *FEW, *sets)
        ),
        session_id="r",
        resume=begun,
        listeners=[listener] if listener else [],
    )
    given = None if begun else [champion(root)]
    with brief_thoughts():
        outcome = orchestrator.run(only="quietstar", input_models=given)
    assert outcome["success"], outcome
    return outcome


def made(root: Path) -> str:
    place = folder(root) / "phase3_quietstar" / "reasoning" / "model.safetensors"
    return files.sha256_of(place)


# -- what each setting changes ---------------------------------------------------------------------


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(*((ALL_TEN,) if "confidence" in setting else ()), setting)
    return QuietStarPhase(settings.phases.quietstar, settings).plan([])


def planned_control(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(f"{REWARD}.kind=verified", f"{REWARD}.control=true", setting)
    return QuietStarPhase(settings.phases.quietstar, settings).plan([])


def learned_from(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What there is to learn, and how it is mixed."""
    patch.chdir(root)
    for name, seed in (("a", 5), ("b", 6)):
        rows = local_rows(["chain"], ["step"], 8, seed)
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(setting).phases.quietstar
    corpus = build_corpus(settings, config().model, known_tokenizer())
    lessons = write_lessons(settings, corpus.tokenizer, 0)
    if "easy_share" in setting:  # a hard one is among them then
        settings = config(ALL_TEN, setting).phases.quietstar
        lessons = write_lessons(settings, corpus.tokenizer, 0)
    stages = lessons.curriculum(corpus, list(lessons.traces)).stages
    prints = [source.fingerprint() for source in (*corpus.sources, *lessons.sources())]
    return prints, [(s.share, s.mix) for s in stages], len(corpus.verdict["memory"])


def known_tokenizer() -> Tokenizer:
    return build_corpus(config().phases.quietstar, config().model).tokenizer


def finished(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """A whole run: the model, what was told of it, and how often it was saved and looked at."""
    told: list[dict[str, Any]] = []
    stopping = (f"{TRAIN}.patience=1",) if "min_gain" in setting else (f"{TRAIN}.min_gain=100",)
    sets = (*stopping, f"{PHASE}.strategies=[step]", setting)
    if (known := config(*sets).model_dump_json()) not in FINISHED:  # two begin with the same
        result = run(root, *sets, listener=told.append)["results"]["quietstar"]
        saves = sum(record["event"] == "checkpoint" for record in told)
        verdict = result.artifacts["headline"]["verdict"]
        FINISHED[known] = made(root), saves, verdict.rpartition("; ")[2]
    return FINISHED[known]


FINISHED: dict[str, Any] = {}


def confident(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The rates at which the stages of baking are trained."""
    rates: dict[str, Any] = {}

    def train(*given: Any, stage: str, settings: Any, **_: Any) -> None:
        rates[stage] = settings.optimizer.muon_lr, settings.optimizer.fallback_lr

    patch.setattr(phase, "train_network", train)
    settings = config(ALL_TEN, setting)
    c = settings.phases.quietstar
    sure = [(name, n, 5) for name, (low, high) in c.ranges.items() for n in range(low, high + 1)]
    ctx: Any = SimpleNamespace(seed=0, once=lambda *given: sure)
    corpus = build_corpus(c, settings.model, known_tokenizer())
    QuietStarPhase(c, settings)._bake(ctx, corpus, ForgeNetwork(settings.model))
    return rates


# Settings of the corpus and of the trainer are those of Phase 1, and so are their checks.
SHARED = (cognate_settings.trained, cognate_settings.regulated, cognate_settings.learned_from)


def told(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What is said of old tasks of which a tenth was lost."""
    gain = Gain(0.8, 0.7, -0.1, -0.12, -0.08, 0.0, 1000, 120)
    lost = Comparison((), DomainGains("all domains", {"accuracy": gain}))
    return old_skills(lost, config(setting).phases.quietstar.kept_skills)


def optimized(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """The weights after a few steps, and what holds tries near the baked model."""
    reward = config(f"{REWARD}.optimizer.grokfast_lambda=1", setting).phases.quietstar.reward
    known, trained = reward.train.model_dump_json(), cognate_settings.TRAINED
    if known not in trained:
        trained[known] = cognate_settings.train(reward.train)
    return trained[known], rewarded(setting, root, patch)[-1] if "kl_" in setting else None


def rewarded(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What is tried, of which questions, and how it is guarded."""
    kind = "likelihood" if ".places" in setting or ".ahead" in setting else "verified"
    levels = f"{PHASE}.levels={{chain: [1, 2], tot4: [4, 5], odds: [4, 5]}}"
    settings = config(levels, f"{REWARD}.kind={kind}", setting)
    c = settings.phases.quietstar
    torch.manual_seed(0)
    thinker = Thinker(ForgeNetwork(settings.model), known_tokenizer())
    items = reward_step._questions(c, 0)
    loss: Any = reward_step._verified(c, thinker, items[:9])
    if c.reward.kind == "likelihood":
        loss = reward_step._likelihood(c, thinker.network)
    ctx: Any = SimpleNamespace(seed=0, once=lambda record, key, compute: {"accuracy": 1.0})
    counts: list[int] = []
    patch.setattr(reward_step, "unseen_items", lambda c, s, count, levels: counts.append(count))
    guard = reward_step._guard(ctx, c, SimpleNamespace(model=thinker.network, loss=loss), thinker)
    told = [getattr(loss, name, None) for name in ("kl", "samples", "places", "ahead")]
    families = sorted({item.family for item in items})
    gain = Gain(0.7, 0.8, 0.1, 0.08, 0.12, 0.0, 1000, 120)
    is_kept = reward_step.is_kept(c.reward, gain, -0.1)
    watched = guard.every_steps, guard.most_lost, counts
    return type(loss), c.reward.questions, families, watched, is_kept, c.reward.train, told


CHECKS: dict[str, Any] = {
    f"{REWARD}.kind": (rewarded, "verified", "likelihood"),
    f"{REWARD}.answers_only": (rewarded, "{}", "{swap4: [1, 2]}"),
    f"{REWARD}.steps": (planned_control, "10", "20"),
    f"{REWARD}.questions": (rewarded, "10", "20"),
    f"{REWARD}.samples": (rewarded, "2", "4"),
    f"{REWARD}.places": (rewarded, "1", "2"),
    f"{REWARD}.ahead": (rewarded, "1", "2"),
    f"{REWARD}.warmup_steps": (rewarded, "0", "5"),
    f"{REWARD}.check_every": (rewarded, "1", "5"),
    f"{REWARD}.check_items": (rewarded, "1", "5"),
    f"{REWARD}.most_lost": (rewarded, "0.01", "0.5"),
    f"{REWARD}.kept_skills": (rewarded, "0.01", "0.5"),
    f"{REWARD}.control": (planned_control, "true", "false"),
    f"{REWARD}.control_steps": (planned_control, "10", "20"),
    **{
        key.replace(f"{cognate_settings.PHASE}.train", REWARD): (optimized, *check[1:])
        for key, check in cognate_settings.CHECKS.items()
        if key.startswith(f"{cognate_settings.PHASE}.train.optimizer.")
    },
    f"{PHASE}.steps": (planned, "10", "20"),
    f"{PHASE}.rows": (planned, "4", "8"),
    f"{PHASE}.row_tokens": (planned, "128", "192"),
    f"{PHASE}.controls": (planned, "true", "false"),
    f"{PHASE}.thought_items": (planned, "5", "50"),
    f"{PHASE}.confidence_share": (planned, "0.1", "0.5"),
    f"{PHASE}.confidence_rate": (confident, "0.1", "0.5"),
    f"{PHASE}.strategies": (learned_from, "[step]", "[step, doubt]"),
    f"{PHASE}.levels": (
        learned_from,
        "{chain: [1, 2], tot4: [4, 5], swap4: [1, 2], odds: [2, 3]}",
        "{chain: [2, 3], tot4: [4, 5], swap4: [1, 2], odds: [2, 3]}",
    ),
    f"{PHASE}.turns": (learned_from, "{}", "{chain: 3}"),
    f"{PHASE}.examples": (learned_from, "40", "60"),
    f"{PHASE}.traces": (learned_from, "[a.jsonl]", "[b.jsonl]"),
    f"{PHASE}.easy_share": (learned_from, "0.2", "0.5"),
    f"{PHASE}.replay_share": (learned_from, "0.2", "0.5"),
    f"{PHASE}.direct_share": (learned_from, "0.1", "0.5"),
    f"{PHASE}.step_share": (learned_from, "0.1", "0.5"),
    f"{PHASE}.checkpoint_every_steps": (finished, "1", "50"),
    f"{PHASE}.kept_skills": (told, "0.01", "0.5"),
    f"{TRAIN}.patience": (finished, "0", "1"),
    f"{TRAIN}.min_gain": (finished, "0", "100"),
    **{
        key.replace(cognate_settings.PHASE, PHASE): check
        for key, check in cognate_settings.CHECKS.items()
        if check[0] in SHARED and not key.endswith(".own_share")
    },
}
