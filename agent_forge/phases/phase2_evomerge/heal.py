"""Healing: after the search the champion is taught, each domain by the parent that is best in it.

In: the champion, the selection items, and texts of the user's own (`heal_data`). Out: its weights
with a low-rank change folded in, which no coefficients of the parents reach. A step takes items of
one domain and lowers KL(expert || student) at the tokens that are asked for. The domain is drawn by
its gap: the loss of the student less that of the expert on its last batches.

Each step is one of the Trainer; `fit` around it needs the context of a run (tracker, storage), which
an evolution in a folder of its own has not. What looked at a clock (the number of steps) or at the
machine (threads) is in the journal, all else follows from settings, seed and journal: killed at any
moment it ends in the same bytes.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.errors import ConfigError, Diverged, Interrupted, NotFinite, NotFound
from agent_forge.evals import model_under_test as measuring
from agent_forge.evals.domains import Domain
from agent_forge.model.loss import LossOutput
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.weights import Weights
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast, divergence
from agent_forge.phases.phase2_evomerge.candidate_weights import OUTSIDE
from agent_forge.phases.phase2_evomerge.checks import CHAMPION, HEAL, HEALED
from agent_forge.phases.phase2_evomerge.evaluator import recursed_logits
from agent_forge.phases.phase2_evomerge.lessons import (
    Lesson,
    Lessons,
    experts_of,
    lessons_hash,
    right_answers,
)
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.search.operators import generator
from agent_forge.store import files
from agent_forge.store.checkpoint import Checkpoint, CheckpointManager
from agent_forge.store.tensors import first_not_finite
from agent_forge.train.config import TrainSettings
from agent_forge.train.trainer import Batch, Trainer
from agent_forge.train.weight_transforms import LowRankBranches

log = logging.getLogger(__name__)
CHECKPOINT_EVERY = 20  # steps
WARMUP_STEPS, FINAL_RATE = 5, 0.1
TIMED_STEPS = 3  # to plan by; the first is slower and does not count
EXPERT_ITEMS = 16  # of a file of texts, to find the parent that knows it best
ROOM = 3  # times its size that has to be free for one more network


@dataclass(frozen=True)
class HealedChampion:
    """A champion that was taught, and the fitness of both on the items that decide between them."""

    weights: Weights
    record: dict[str, Any]  # what stands in healing.json
    losses: list[float]  # on a few items: its file has to score the same
    fitness: float
    champion_fitness: float

    def sentence(self, folder: Path) -> str:
        """Which of the two to take, in words."""
        better = HEALED if self.fitness > self.champion_fitness else CHAMPION
        both = f"healed {self.fitness:.4f}, champion {self.champion_fitness:.4f}"
        return f"fitness on the holdout items: {both}; take {folder / better}"

    def files(self, lineage: Mapping[str, Any]) -> dict[str, bytes]:
        """What stands beside its weights: how it was taught, the champion's lineage, the card."""
        steps, by = self.record["steps"], ", ".join(self.record["experts"].values())
        card = f"""---\nlibrary_name: transformers\ntags:\n- merge\n- evolution\n---
# Evolved merge, healed\n
The champion of an evolution, taught for {steps} steps by the parent that is best in each domain
({by}); healing.json says how. Fitness on items that decided nothing but which of the two
to take: {self.fitness:.4f}, of the champion {self.champion_fitness:.4f}. The champion's card has
the verdict on both.\n"""
        taught = {**lineage, "taught": f"for {steps} steps, as healing.json says"}
        record = files.to_json(files.finite(self.record))
        beside = {"healing.json": record, "lineage.json": files.to_json(taught)}
        return {**beside, "README.md": card.encode()}


class ExpertNetworks:
    """The networks of the experts; where memory is short, fewer of them are filled in turn."""

    def __init__(self, loop: EvolutionLoop, lessons: Sequence[Lesson]) -> None:
        self._keys, self._weights = parent_keys(loop), loop.weights
        loop.evaluator.fill(self._keys[0])
        model, self._spare = loop.evaluator.model, list[nn.Module]()
        size = sum(parameter.nbytes for parameter in model.parameters())
        for _ in {lesson.expert for lesson in lessons}:
            if not self._spare or psutil.virtual_memory().available > ROOM * size:
                self._spare.append(copy.deepcopy(model).requires_grad_(False).eval())
        self._filled: dict[int, nn.Module] = {}

    def of(self, number: int) -> nn.Module:
        if number not in self._filled:
            oldest = next(iter(self._filled), number)
            network = self._spare.pop() if self._spare else self._filled.pop(oldest)
            self._weights.fill(network, self._keys[number])
            self._filled[number] = network
        return self._filled[number]


def parent_keys(loop: EvolutionLoop) -> list[str]:
    return [c.key for c in loop.search.candidates.values() if c.kind == "parent"]


def asked_logits(model: nn.Module, tokens: Tensor, asked: Tensor) -> Tensor:
    """The logits at the asked tokens; the head is spared the columns in which no row asks."""
    wanted = asked[:, 1:]
    if isinstance(model, ForgeNetwork):
        return recursed_logits(model, tokens[:, :-1], wanted)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return model(tokens[:, :-1]).logits[wanted].float()  # type: ignore[no-any-return]
    columns = wanted.any(0).nonzero().squeeze(-1)
    logits: Tensor = model(tokens[:, :-1], logits_to_keep=columns).logits
    return logits[wanted[:, columns]].float()


class Healing:
    """The student with its optimizer, lessons and experts; `parts` is what a checkpoint holds."""

    def __init__(
        self, loop: EvolutionLoop, lessons: Lessons, experts: ExpertNetworks, total: int
    ) -> None:
        s, self.student = loop.settings, loop.evaluator.model.requires_grad_(False).eval()
        self.lessons, self.experts, self.expert = lessons, experts, self.student
        seed = int(generator(loop.inputs.seed, HEAL, "start").integers(2**62))
        draws = torch.Generator().manual_seed(seed)
        self.branches = LowRankBranches(linear_layers(loop), s.heal_rank, draws)
        config = MuGrokConfig(fallback_lr=s.heal_rate, qk_clip_threshold=0.0)
        how = TrainSettings(
            precision="bf16" if s.mixed_precision else "fp32",
            warmup_steps=min(WARMUP_STEPS, total),
            warmdown_share=1.0,
            final_rate=FINAL_RATE,
        )
        student = self.branches, MuonGrokfast(self.branches, config), self._loss, how
        device = str(next(self.student.parameters()).device)
        self.trainer = Trainer(*student, total=total, generator=draws, device=device)
        self.parts: dict[str, Any] = {**self.trainer.parts, "lessons": lessons}

    def step(self, step: int) -> str:
        """One update; returns what was taught and how far away it was."""
        began, lesson = time.perf_counter(), self.lessons.draw(step)
        batch = measuring.padded(self.lessons.next_items(lesson), torch.device("cpu"))
        self.expert = self.experts.of(lesson.expert)
        values = self.trainer.step(step, batch)
        self.lessons.learned(lesson, values["gap"], time.perf_counter() - began)
        return f"{lesson.name}, KL {values['loss']:.3f}"

    def _loss(self, _: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        tokens, asked = batch
        own, targets = asked_logits(self.student, tokens, asked), tokens[:, 1:][asked[:, 1:]]
        with torch.no_grad():
            taught = asked_logits(self.expert, tokens, asked)
            gap = F.cross_entropy(own, targets) - F.cross_entropy(taught, targets)
        total = divergence(own, taught).mean()
        values = {"loss": float(total.detach()), "gap": float(gap)}
        return LossOutput(total, len(targets), values)

    def load(self, checkpoint: Checkpoint) -> int:
        for name, part in self.parts.items():
            part.load_state_dict(checkpoint.state["parts"][name])
        return checkpoint.step


def linear_layers(loop: EvolutionLoop) -> dict[str, nn.Module]:
    """The linear layers between embeddings and head of the network in use, by name."""
    modules = dict(loop.evaluator.model.named_modules())
    outside = loop.weights.groups.of.get(OUTSIDE, [])
    found = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if not any(text in f"{name}.weight" for text in outside)
    }
    if not found:
        raise ConfigError("heal: the network has no linear layers", hint="do without: --heal 0")
    return found


def heal(loop: EvolutionLoop) -> HealedChampion:
    """Teach the champion, or go on with that, and measure it on the holdout items."""
    began, threads, s = time.monotonic(), torch.get_num_threads(), loop.settings
    lessons = _lessons(loop)
    how = s.heal_rate, s.heal_rank, s.mixed_precision, loop.inputs.seed
    of = lessons_hash(lessons, loop.fingerprint, loop.champion.key, how)
    experts = ExpertNetworks(loop, lessons)
    loop.evaluator.fill(loop.champion.key)
    minutes = 0.0 if s.heal_steps else s.heal * s.time_budget_minutes

    def plan() -> dict[str, Any]:
        if s.heal_steps:
            return {"steps": s.heal_steps, "threads": threads}
        a_step = _seconds_a_step(Healing(loop, Lessons(lessons, 0), experts, TIMED_STEPS))
        left = 60 * minutes - (time.monotonic() - began)
        return {"steps": max(1, int(left / a_step)), "threads": threads, "a_step": a_step}

    planned = loop.journal.once("heal plan", plan, of=of, minutes=minutes)
    healing = Healing(loop, Lessons(lessons, loop.inputs.seed), experts, planned["steps"])
    of = f"{of} {planned['steps']} {planned['threads']}"
    try:
        torch.set_num_threads(planned["threads"])
        _teach(loop, healing, of)
    finally:
        torch.set_num_threads(threads)
        healing.branches.remove()
    return _measured(loop, healing, of)


def _lessons(loop: EvolutionLoop) -> list[Lesson]:
    """What is taught: the right answers of the selection items, then the user's own texts."""
    splits, weights = loop.inputs.splits, loop.settings.domain_weights
    experts = experts_of(loop.journal.records, [d.name for d in splits["selection"]])

    def items_of(domain: Domain) -> Any:
        prepared = loop.evaluator.model_under_test.prepare(replace(domain, writing=None))
        return right_answers(prepared)

    lessons = [
        Lesson(d.name, experts[d.name], items_of(d), weights.get(d.name, 1.0))
        for d in splits["selection"]
    ]
    for texts in splits.get(HEAL, ()):
        own = Lesson(f"{HEAL} {texts.name}", -1, items_of(texts))
        lessons.append(replace(own, expert=_expert_on(loop, own)))
    return lessons


def _expert_on(loop: EvolutionLoop, lesson: Lesson) -> int:
    """The parent with the least loss on some of the items."""

    def measure() -> dict[str, Any]:
        losses = []
        for key in parent_keys(loop):
            loop.proceed("before healing")
            loop.evaluator.fill(key)
            some = lesson.items[:: -(-len(lesson.items) // EXPERT_ITEMS)]
            losses.append(measuring.measure(loop.evaluator.model, some).nats_per_token)
        return {"losses": losses}

    record = loop.journal.once("heal expert", measure, of=lessons_hash([lesson]))
    return int(np.argmin(record["losses"]))


def _seconds_a_step(healing: Healing) -> float:
    """What a step takes, by a few that are not kept."""
    seconds = []
    try:
        for step in range(1, TIMED_STEPS + 1):
            healing.step(step)
            seconds.append(healing.lessons.seconds)
    finally:
        healing.branches.remove()
    return (seconds[-1] - seconds[0]) / (TIMED_STEPS - 1)


def _teach(loop: EvolutionLoop, healing: Healing, of: str) -> None:
    """All steps from the newest checkpoint on. Who diverges goes back, and on at half the rate."""
    trainer, manager = healing.trainer, CheckpointManager(loop.folder / HEAL, keep_last=2)
    step, save = 0, _saving(healing, manager, of)
    try:
        newest = manager.load_checkpoint()
        if newest.state["of"] != of:
            raise NotFound(f"{newest.path} is of another healing")
        step = healing.load(newest)
    except NotFound:
        manager.remove(manager.steps())
        save(0, True)
    loop.listen({"event": "loop", "name": HEAL, "first": step, "total": trainer.total})
    while step < trainer.total:
        try:
            loop.proceed("between two steps of healing")
        except Interrupted:
            save(step, False)  # a roll-back never goes to it, so it changes nothing
            raise
        try:
            stage = healing.step(step + 1)
        except Diverged as error:
            factor, anchor = trainer.factor, manager.load_anchor()
            if anchor is None:
                raise NotFinite(f"{error}; there is no checkpoint to go back to") from error
            log.warning("healing goes back to step %d, to half the rate: %s", anchor.step, error)
            step = healing.load(anchor)
            trainer.halve_rate(factor)
            continue
        step += 1
        told = {"phase": HEAL, "stage": stage, "step": step, "total": trainer.total}
        loop.listen({"event": "step", **told})
        if (regular := step % CHECKPOINT_EVERY == 0) or step == trainer.total:
            save(step, regular)


def _saving(healing: Healing, manager: CheckpointManager, of: str) -> Callable[[int, bool], None]:
    def save(step: int, anchor: bool) -> None:
        parts = {name: part.state_dict() for name, part in healing.parts.items()}
        manager.save({"of": of, "parts": parts}, step=step, anchor=anchor)

    return save


def _measured(loop: EvolutionLoop, healing: Healing, of: str) -> HealedChampion:
    """Fold the change in, in single precision, and measure what is then stored."""
    key, model, holdout = loop.champion.key, loop.evaluator.model, loop.evaluator.holdout
    assert holdout is not None  # the settings were checked
    tensors = dict(loop.weights.tensors(key))
    for name, change in healing.branches.changes().items():
        old = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = (old.float() + change.cpu().float()).to(old.dtype)
    if bad := first_not_finite(tensors):
        raise NotFinite(f"{bad} became NaN or infinity by healing", hint="try a lower heal_rate")
    state = model.state_dict()
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
    losses = few_losses(loop, replace(loop.evaluator.model_under_test, model=model))
    holdout.use(model, *loop.weights.size(key))
    after = loop.journal.once("healed", lambda: {"fitness": holdout.score().fitness}, of=of)
    before, candidate = (loop.journal.find(r, key=key) or {} for r in ("holdout", "candidate"))
    lessons, settings = healing.lessons, loop.settings.model_dump(mode="json")
    names = loop.inputs.names
    record = {
        "experts": {lesson.name: names[lesson.expert] for lesson in lessons.all},
        "steps": healing.trainer.total,
        "steps_of_domains": lessons.steps,
        "first_gaps": lessons.first_gaps,  # in nats a token
        "last_gaps": lessons.gaps,
        "seconds": round(lessons.seconds, 1),
        "settings": {n: v for n, v in settings.items() if n.startswith((HEAL, "mixed"))},
        "champion": {"key": key, "sha256": candidate["sha256"]},
        "holdout_fitness": {HEALED: after["fitness"], CHAMPION: before["fitness"]},
    }
    weights = loop.weights.weights(key).derived(tensors.__getitem__)
    return HealedChampion(weights, record, losses, after["fitness"], before["fitness"])


def few_losses(loop: EvolutionLoop, model: measuring.ModelUnderTest) -> list[float]:
    """The losses of a model on the first holdout items."""
    few = [
        d.select(range(len(d.examples[: measuring.CONFIRMED])))
        for d in loop.inputs.splits["holdout"]
    ]
    parts = [model.prepare(replace(domain, writing=None)) for domain in few]
    return [loss for part in parts for loss in model.measure(part).loss]
