"""Small real runs of Phase 6, and what each of its settings changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_forge.data import exchanges
from agent_forge.data.exchanges import TOOLS, Card
from agent_forge.phases.phase6_baking import cycles, phase
from agent_forge.phases.phase6_baking.cycles import BakingTraining, Right
from agent_forge.phases.phase6_baking.persona import load_persona
from agent_forge.phases.phase6_baking.phase import BakingPhase
from agent_forge.phases.training import LatentModel
from agent_forge.pipeline.config import PipelineConfig, load_config
from agent_forge.pipeline.orchestrator import PipelineOrchestrator
from agent_forge.store import files
from agent_forge.train.corpus import build_corpus
from agent_forge.train.lessons import lessons_of_record
from tests.support import cognate_settings, forge_runs, quietstar_runs
from tests.support.toy_runs import SMALL, folder

PHASE = "phases.baking"
TRAIN = f"{PHASE}.train"
FEW = (
    *(f"{PHASE}.rounds=2", f"{PHASE}.round_steps=4", f"{PHASE}.examples=30", f"{PHASE}.rows=2"),
    *(f"{PHASE}.row_tokens=160", f"{PHASE}.items_per_family=12", f"{PHASE}.evaluation_items=6"),
    *(f"{PHASE}.families=[digit_max, copy, rotate]", f"{PHASE}.tools=[calc, clock]"),
    *(f"{PHASE}.choice_items=6", f"{PHASE}.tool_items=6", f"{PHASE}.checkpoint_every_steps=2"),
    *(f"{PHASE}.samples=6", f"{PHASE}.prompts=2"),
)
KL = (f"{PHASE}.follow_steps=3", f"{PHASE}.method=forward")


def config(*sets: str) -> PipelineConfig:
    return load_config(preset="smoke", sets=(*forge_runs.SHAPE, *FEW, *sets))


def run(root: Path, *sets: str, listener: Any = None) -> dict[str, Any]:
    """Run or resume the session `r` below `root`, Phase 6 alone."""
    begun = (folder(root) / "session.json").exists()
    of_run = (f"storage.root={root}", *SMALL, *forge_runs.SHAPE, *FEW, *sets)
    orchestrator = PipelineOrchestrator(
        config=load_config(preset="smoke", sets=of_run),
        session_id="r",
        resume=begun,
        listeners=[listener] if listener else [],
    )
    given = None if begun else [forge_runs.ternary_model(root, phase="forge")]
    with brief_replies(), quietstar_runs.brief_thoughts():
        outcome = orchestrator.run(only="baking", input_models=given)
    assert outcome["success"], outcome
    return outcome


@contextlib.contextmanager
def brief_replies() -> Iterator[None]:
    """Few questions, and few tokens for what a model that was never trained has to say."""
    every = exchanges.every_about
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cycles, "GREEDY", replace(cycles.GREEDY, max_new_tokens=4))
        patch.setattr(cycles, "SAMPLED", replace(cycles.SAMPLED, max_new_tokens=4))
        patch.setattr(cycles, "THOUGHT_ITEMS", 2)
        patch.setattr(phase, "THOUGHT_ITEMS", 2)
        patch.setattr(phase, "OTHER_ITEMS", 4)
        patch.setattr(phase, "OLD_ITEMS", 4)
        patch.setattr(exchanges, "every_about", lambda card, split: every(card, split)[::12])
        yield


def made(root: Path) -> tuple[str, ...]:
    place = folder(root) / "phase6_baking"
    names = [name for name in ("packed", "dequantised") if (place / name).exists()]
    return tuple(files.sha256_of(place / name / "model.safetensors") for name in names)


def as_if_learning(patch: pytest.MonkeyPatch, **right: list[int]) -> None:
    """Let models that learn nothing pass for ones of which, of a hundred items of a kind, so many
    are right at each look: at the start, and after every round."""
    looks = {"tools": [0, 10, 20], "persona": [0, 10, 20], cycles.OLD: [50], **right}
    found: list[Right] = []
    number = iter(range(100))

    def look(own: BakingTraining, model: Any, name: str) -> Right:
        if "again" in name:  # the last round is taken back
            found.pop()
            return found[-1]
        at = next(number)
        now = {kind: counts[min(at, len(counts) - 1)] for kind, counts in looks.items()}
        found.append({kind: [i < count for i in range(100)] for kind, count in now.items()})
        return found[-1]

    patch.setattr(BakingTraining, "right", look)


# -- what each setting changes ---------------------------------------------------------------------


def planned(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    settings = config(setting)
    return BakingPhase(settings.phases.baking, settings).plan([])


def finished(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """A whole run: its models, the stages it took, and what was told of its rounds."""
    small = [0, 1, 1, 2, 2]
    as_if_learning(patch, tools=small, persona=small, **{cycles.OLD: [50, 42]})
    told: list[dict[str, Any]] = []
    stopping = (f"{TRAIN}.patience=1",) if "min_gain" in setting else (f"{TRAIN}.min_gain=100",)
    stopping += (f"{PHASE}.most_lost=1",)
    stopping += KL if setting.partition("=")[0].rpartition(".")[2] in BY_PROMPT else ()
    sets = (*stopping, setting)
    if (known := config(*sets).model_dump_json()) not in FINISHED:
        result = run(root, *sets, listener=told.append)["results"]["baking"]
        steps = [r["stage"] for r in told if r["event"] == "step"]
        saves = sum(record["event"] == "checkpoint" for record in told)
        FINISHED[known] = made(root), steps, saves, result.artifacts["rounds"]
    return FINISHED[known]


FINISHED: dict[str, Any] = {}
BY_PROMPT = ("samples", "cards_share", "method", "follow_steps")


def decided(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """When a kind is baked no more, whether a round is taken back, and which prompts compete."""
    ctx: Any = SimpleNamespace(once=lambda record, key, compute: compute(), device="cpu")
    corpus: Any = None
    c = config(setting).phases.baking
    training = BakingTraining(ctx, c, corpus, None, Card(load_persona("zoe"), TOOLS))
    for number, gain in enumerate((0.2, 0.005, 0.005)):
        rise = {"tools": 0.0}, {"tools": gain}
        training.rounds.append(cycles.Round(number, "tools", "", *rise, ""))
    right = [[i < count for i in range(100)] for count in (50, 42)]
    lost = training._lost("tools", *({cycles.OLD: own} for own in right))
    forms: list[str] = []

    def ask(own: Any, network: Any, asked: Any, split: str, form: str) -> Any:
        forms.append(form)
        return SimpleNamespace(share=lambda: 0.0)

    patch.setattr(BakingTraining, "ask", ask)
    opened: Any = SimpleNamespace(opened=lambda: SimpleNamespace(to=lambda device: None))
    training._best_prompt(opened, "persona", 1)
    return training._plateaued("tools"), lost, forms


def taught(setting: str, root: Path, patch: pytest.MonkeyPatch) -> Any:
    """What is taught, with which weights, and what is asked."""
    settings = config(setting)
    c = settings.phases.baking
    given = forge_runs.ternary_model(root, phase="forge")
    opened = given.open()
    ctx: Any = SimpleNamespace(seed=0, device="cpu")
    lessons = lessons_of_record(c, given.metadata, opened.tokenizer, 0)
    corpus = build_corpus(c, opened.network.settings, opened.tokenizer)
    card = Card(load_persona(c.persona), tuple(c.tools))
    training = BakingTraining(ctx, c, corpus, lessons, card)
    mixes: list[Any] = []
    patch.setattr(cycles, "train_network", lambda *given, **_: mixes.append(given[3].stages[0].mix))
    model = LatentModel(opened.network.settings, opened.network.state_dict(), None)
    training._baked(model, "tools", 1)
    counts = {source.name: len(source.lengths) for source in training.taught.sources}
    asked = {kind: [own.question for own in items] for kind, items in training.choices.items()}
    return mixes, counts, asked, card.text()


CHECKS: dict[str, Any] = {
    f"{PHASE}.persona": (taught, "zoe", "otto"),
    f"{PHASE}.tools": (taught, "[calc]", "[calc, read]"),
    f"{PHASE}.method": (finished, "forward", "samples"),
    f"{PHASE}.follow_steps": (finished, "2", "3"),
    f"{PHASE}.rounds": (planned, "1", "2"),
    f"{PHASE}.round_steps": (planned, "4", "5"),
    f"{PHASE}.examples": (taught, "30", "60"),
    f"{PHASE}.strength": (finished, "0.5", "1.0"),
    f"{PHASE}.prompts": (decided, "1", "4"),
    f"{PHASE}.plateau_rounds": (decided, "1", "3"),
    f"{PHASE}.min_gain": (decided, "0.001", "0.5"),
    f"{PHASE}.samples": (finished, "4", "6"),
    f"{PHASE}.replay_share": (taught, "0.2", "0.5"),
    f"{PHASE}.thoughts_share": (taught, "0.2", "0.5"),
    f"{PHASE}.cards_share": (finished, "0.1", "0.5"),
    f"{PHASE}.other_share": (taught, "0.2", "0.5"),
    f"{PHASE}.most_lost": (decided, "0.02", "0.1"),
    f"{PHASE}.choice_items": (taught, "6", "12"),
    f"{PHASE}.tool_items": (planned, "60", "6000"),
    f"{PHASE}.rows": (planned, "4", "8"),
    f"{PHASE}.row_tokens": (planned, "128", "192"),
    f"{PHASE}.checkpoint_every_steps": (finished, "1", "50"),
    f"{TRAIN}.patience": (finished, "0", "1"),
    f"{TRAIN}.min_gain": (finished, "0", "100"),
    **{
        key.replace(cognate_settings.PHASE, PHASE): check
        for key, check in cognate_settings.CHECKS.items()
        if check[0] in quietstar_runs.SHARED and not key.endswith(".own_share")
    },
}
