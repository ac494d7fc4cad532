"""Healing: after the search the champion is taught, each domain by the parent that is best in it.

In: the champion, the selection items, and texts of the user's own (`heal_data`). Out: its weights
with a low-rank change folded in, which no coefficients of the parents reach. A step takes items of
one domain and lowers KL(expert || student) at the tokens that are asked for. The domain is drawn by
its gap: the loss of the student less that of the expert on its last batches.

Each step is one of the Trainer; `fit` around it needs the context of a run (tracker, storage),
which an evolution in a folder of its own has not. What looked at a clock (the number of steps) or
at the machine (threads) is in the journal, all else follows from settings, seed and journal: killed
at any moment it ends in the same bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent_forge.errors import Diverged, Interrupted, NotFinite, NotFound
from agent_forge.evals import model_under_test as measuring
from agent_forge.evals.domains import Domain
from agent_forge.model.weights import Weights
from agent_forge.phases.phase2_evomerge.checks import CHAMPION, HEAL, HEALED
from agent_forge.phases.phase2_evomerge.decisions import computing_threads
from agent_forge.phases.phase2_evomerge.lessons import (
    Lesson,
    Lessons,
    experts_of,
    lessons_hash,
    right_answers,
)
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.phases.phase2_evomerge.teaching import ExpertNetworks, Teaching, parent_keys
from agent_forge.search.candidate import SHORT
from agent_forge.store import files
from agent_forge.store.checkpoint import CheckpointManager
from agent_forge.store.tensors import first_not_finite

log = logging.getLogger(__name__)
CHECKPOINT_EVERY = 20  # steps
TIMED_STEPS = 3  # to plan by; the first is slower and does not count
EXPERT_ITEMS = 8  # of a file of texts, to find the parent that knows it best


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

    def files(self, lineage: Mapping[str, Any], head: str) -> dict[str, bytes]:
        """What stands beside its weights: how it was taught, the champion's lineage, the card."""
        steps, by = self.record["steps"], ", ".join(self.record["experts"].values())
        champion = self.record["champion"]["key"][:SHORT]
        card = f"""{head}
# Evolved merge, healed\n
The champion {champion} of an evolution, taught for {steps} steps by the parent that is best in each
domain ({by}); healing.json says how. Fitness on the holdout items, which taught it nothing:
{self.fitness:.4f}, of that champion {self.champion_fitness:.4f}. Its card has the verdict on both;
a champion with another key in its lineage.json came later: this model was not made of it.\n"""
        taught = {**lineage, "taught": f"for {steps} steps, as healing.json says"}
        record = files.to_json(files.finite(self.record))
        beside = {"healing.json": record, "lineage.json": files.to_json(taught)}
        return {**beside, "README.md": card.encode()}


def heal(loop: EvolutionLoop) -> HealedChampion:
    """Teach the champion, or go on with that, and measure it on the holdout items."""
    began, threads, s = time.monotonic(), torch.get_num_threads(), loop.settings
    loop.pace.begin(HEAL, "healing: its experts and first steps")
    lessons = _lessons(loop)
    how = s.heal_rate, s.heal_rank, s.mixed_precision, loop.inputs.seed
    of = lessons_hash(lessons, loop.fingerprint, loop.champion.key, how)
    experts = ExpertNetworks(loop, lessons)
    loop.evaluator.fill(loop.champion.key)
    minutes = 0.0 if s.heal_steps else s.heal * s.minutes_each
    asked = {"minutes": minutes, "steps_asked": s.heal_steps}

    def plan() -> dict[str, Any]:
        if s.heal_steps:
            return {"steps": s.heal_steps, "threads": threads}
        a_step = _seconds_a_step(Teaching(loop, Lessons(lessons, 0), experts, TIMED_STEPS))
        left = 60 * minutes - (time.monotonic() - began)
        return {"steps": max(1, int(left / a_step)), "threads": threads, "a_step": a_step}

    planned = loop.journal.once("heal plan", plan, of=of, **asked)
    teaching = Teaching(loop, Lessons(lessons, loop.inputs.seed), experts, planned["steps"])
    of = f"{of} {planned['steps']} {planned['threads']}"
    try:
        torch.set_num_threads(planned["threads"])
        _teach(loop, teaching, of)
    finally:
        torch.set_num_threads(threads)
        teaching.branches.remove()
    return _measured(loop, teaching, of)


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


def _seconds_a_step(teaching: Teaching) -> float:
    """What a step takes, by a few that are not kept."""
    seconds = []
    for lesson in teaching.lessons.all:
        teaching.experts.of(lesson.expert)  # filled once, which belongs to no step
    try:
        for step in range(1, TIMED_STEPS + 1):
            teaching.step(step)
            seconds.append(teaching.lessons.seconds)
    finally:
        teaching.branches.remove()
    return (seconds[-1] - seconds[0]) / (TIMED_STEPS - 1)


def _teach(loop: EvolutionLoop, teaching: Teaching, of: str) -> None:
    """All steps from the newest checkpoint on. Who diverges goes back, and on at half the rate."""
    trainer, manager = teaching.trainer, CheckpointManager(loop.folder / HEAL, keep_last=2)
    step = 0

    def save(step: int, anchor: bool) -> None:
        manager.save({"of": of, "parts": teaching.state()}, step=step, anchor=anchor)

    try:
        newest = manager.load_checkpoint()
        if newest.state["of"] != of:
            raise NotFound(f"{newest.path} is of another healing")
        step = teaching.load(newest)
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
            stage = teaching.step(step + 1)
        except Diverged as error:
            factor, anchor = trainer.factor, manager.load_anchor()
            if anchor is None:
                raise NotFinite(f"{error}; there is no checkpoint to go back to") from error
            log.warning("healing goes back to step %d, to half the rate: %s", anchor.step, error)
            step = teaching.load(anchor)
            trainer.halve_rate(factor)
            continue
        step += 1
        told = {"phase": HEAL, "stage": stage, "step": step, "total": trainer.total}
        loop.listen({"event": "step", **told})
        if (regular := step % CHECKPOINT_EVERY == 0) or step == trainer.total:
            save(step, regular)


def _measured(loop: EvolutionLoop, teaching: Teaching, of: str) -> HealedChampion:
    """Fold the change in, in single precision, and measure what is then stored."""
    key, evaluator, holdout = loop.champion.key, loop.evaluator, loop.evaluator.holdout
    assert holdout is not None  # the settings were checked
    tensors = dict(loop.weights.tensors(key))
    for name, change in teaching.branches.changes().items():
        old = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = (old.float() + change.cpu().float()).to(old.dtype)
    if bad := first_not_finite(tensors):
        raise NotFinite(f"{bad} became NaN or infinity by healing", hint="try a lower heal_rate")

    def put(exact: bool) -> None:
        evaluator.fill(key, exact=exact)
        state = evaluator.model.state_dict()
        for name, tensor in tensors.items():
            state[name].copy_(tensor)

    def measure() -> dict[str, Any]:
        put(exact=False)
        with computing_threads(loop.settings):  # as the champion was
            return {"fitness": holdout.score().fitness}

    after = loop.journal.once("healed", measure, of=of)
    put(exact=True)
    losses = few_losses(loop, replace(evaluator.model_under_test, model=evaluator.model))
    before, candidate = (loop.journal.find(r, key=key) or {} for r in ("holdout", "candidate"))
    lessons, settings = teaching.lessons, loop.settings.model_dump(mode="json")
    names = loop.inputs.names
    record = {
        "experts": {lesson.name: names[lesson.expert] for lesson in lessons.all},
        "steps": teaching.trainer.total,
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
