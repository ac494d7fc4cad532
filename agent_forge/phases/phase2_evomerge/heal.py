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

import copy
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import Diverged, Interrupted, NotFinite, NotFound
from agent_forge.evals import likelihood
from agent_forge.evals import model_under_test as measuring
from agent_forge.evals.domains import Domain
from agent_forge.model.loss import LossOutput
from agent_forge.model.weights import Weights
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast, divergence
from agent_forge.phases.phase2_evomerge.checks import CHAMPION, HEAL, HEALED
from agent_forge.phases.phase2_evomerge.evaluator import asked_logits
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.phases.phase2_evomerge.planning import computing_threads
from agent_forge.search.candidate import SHORT
from agent_forge.search.operators import generator
from agent_forge.store import files
from agent_forge.store.checkpoint import Checkpoint, CheckpointManager
from agent_forge.store.tensors import first_not_finite
from agent_forge.train.config import TrainSettings
from agent_forge.train.lora import linear_layers
from agent_forge.train.trainer import Batch, Trainer
from agent_forge.train.weight_transforms import LowRankBranches

log = logging.getLogger(__name__)
CHECKPOINT_EVERY = 20  # steps
TIMED_STEPS = 3  # to plan by; the first is slower and does not count
EXPERT_ITEMS = 8  # of a file of texts, to find the parent that knows it best
STEP_TOKENS = 512  # of a step at most; a longer item is cut into pieces of so many
LEAST_ASKED = STEP_TOKENS // 8  # of a further piece: a whole step for two tokens teaches nothing
FLOOR = 0.2  # share of the steps that is spread evenly, so that no domain starves
INERTIA = 0.7  # of a gap's mean when a batch brings a new value
WARMUP_STEPS, FINAL_RATE = 5, 0.1
ROOM = 3  # times its size that has to be free for one more network


@dataclass(frozen=True)
class Lesson:
    """What one expert teaches: the items of a domain."""

    name: str
    expert: int  # the number of a parent
    items: list[TokenizedItem]
    weight: float = 1.0  # of its gap


@dataclass
class Lessons:
    """Which items come next; its state is all that this depends on beside seed and step."""

    all: Sequence[Lesson]
    seed: int
    gaps: dict[str, float] = field(default_factory=dict)  # means over the last batches
    first_gaps: dict[str, float] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)  # that were taken of each
    steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {k: copy.copy(v) for k, v in vars(self).items() if k not in ("all", "seed")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(state)))

    def draw(self, step: int) -> Lesson:
        """Each lesson once, then by the gaps."""
        for lesson in self.all:
            if lesson.name not in self.gaps:
                return lesson
        p = chances([lesson.weight * self.gaps[lesson.name] for lesson in self.all])
        return self.all[int(generator(self.seed, HEAL, step).choice(len(p), p=p))]

    def next_items(self, lesson: Lesson) -> list[TokenizedItem]:
        """As many of the next items as a step has room for; every round has another order."""
        chosen: list[TokenizedItem] = []
        while len(chosen) < len(lesson.items):
            place = self.items.get(lesson.name, 0)
            turn, number = divmod(place, len(lesson.items))
            order = generator(self.seed, HEAL, lesson.name, turn).permutation(len(lesson.items))
            more = [*chosen, lesson.items[order[number]]]
            if chosen and len(more) * max(len(item.ids) for item in more) > STEP_TOKENS:
                break
            chosen = more
            self.items[lesson.name] = place + 1
        return chosen

    def learned(self, lesson: Lesson, gap: float, seconds: float) -> None:
        """Remember what a step has shown."""
        name = lesson.name
        self.gaps[name] = INERTIA * self.gaps.get(name, gap) + (1 - INERTIA) * gap
        self.first_gaps.setdefault(name, gap)
        self.steps[name] = self.steps.get(name, 0) + 1
        self.seconds += seconds


def chances(gaps: Sequence[float]) -> list[float]:
    """How likely each is drawn: by what is left of its gap, and a floor for all."""
    positive = [max(0.0, gap) for gap in gaps]
    total, even = sum(positive), 1 / len(gaps)
    return [FLOOR * even + (1 - FLOOR) * (gap / total if total else even) for gap in positive]


def right_answers(prepared: measuring.TokenizedDomain) -> list[TokenizedItem]:
    """The right answer of every example, in pieces that a step has room for."""
    right = (prepared.items[n] for n in prepared.right_items())
    begun = ((item.ids, list(item.asked).index(True)) for item in right)
    cut = (measuring.windows(ids, start, STEP_TOKENS) for ids, start in begun)
    numbered = (numbered for pieces in cut for numbered in enumerate(pieces))
    return [piece for n, piece in numbered if n == 0 or sum(piece.asked) >= LEAST_ASKED]


def lessons_hash(lessons: Sequence[Lesson], *others: Any) -> str:
    """sha256 of all that is taught and of what else a healing depends on."""
    digest = hashlib.sha256(json.dumps(others).encode())
    for lesson in lessons:
        digest.update(json.dumps([lesson.name, lesson.expert, lesson.weight]).encode())
        for item in lesson.items:
            digest.update(np.array([item.ids, item.asked], np.int64).tobytes() + b"/")
    return digest.hexdigest()


class ExpertNetworks:
    """The networks of the experts; where memory is short, fewer of them are filled in turn."""

    def __init__(self, loop: EvolutionLoop, lessons: Sequence[Lesson]) -> None:
        self._keys, self._weights = loop.search.space.parents, loop.weights
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


class Teaching:
    """The student with its optimizer, lessons and experts; `state` is what a checkpoint holds."""

    def __init__(
        self, loop: EvolutionLoop, lessons: Lessons, experts: ExpertNetworks, total: int
    ) -> None:
        s, self.student = loop.settings, loop.evaluator.model.requires_grad_(False).eval()
        self.lessons, self.experts, self.expert = lessons, experts, self.student
        self._reading = loop.evaluator.model_under_test.reading or likelihood.PLAIN
        seed = int(generator(loop.inputs.seed, HEAL, "start").integers(2**62))
        draws = torch.Generator().manual_seed(seed)
        self.branches = LowRankBranches(linear_layers(self.student), s.heal_rank, draws)
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
        self._parts: dict[str, Any] = {**self.trainer.parts, "lessons": lessons}

    def step(self, step: int) -> str:
        """One update; returns what was taught and how far away it was."""
        began, lesson = time.perf_counter(), self.lessons.draw(step)
        batch = likelihood.padded(self.lessons.next_items(lesson), torch.device("cpu"))
        self.expert = self.experts.of(lesson.expert)
        values = self.trainer.step(step, batch)
        self.lessons.learned(lesson, values["gap"], time.perf_counter() - began)
        return f"{lesson.name}, KL {values['loss']:.3f}"

    def _loss(self, _: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        tokens, asked = batch
        targets = tokens[:, 1:][asked[:, 1:]]
        own = self._logits(self.student, tokens, asked)
        with torch.no_grad():
            taught = self._logits(self.expert, tokens, asked)
            gap = F.cross_entropy(own, targets) - F.cross_entropy(taught, targets)
        total = divergence(own, taught).mean()
        values = {"loss": float(total.detach()), "gap": float(gap)}
        return LossOutput(total, len(targets), values)

    def _logits(self, model: nn.Module, tokens: Tensor, asked: Tensor) -> Tensor:
        with likelihood.selecting(model, self._reading):
            return asked_logits(model, tokens, asked, self._reading)

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load(self, checkpoint: Checkpoint) -> int:
        """Go back to a checkpoint; returns its step."""
        for name, part in self._parts.items():
            part.load_state_dict(checkpoint.state["parts"][name])
        return checkpoint.step


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
        with computing_threads(planned["threads"]):
            _teach(loop, teaching, of)
    finally:
        teaching.branches.remove()
    return _measured(loop, teaching, of)


def _lessons(loop: EvolutionLoop) -> list[Lesson]:
    """What is taught: the right answers of the selection items, then the user's own texts."""
    splits, weights = loop.inputs.splits, loop.settings.domain_weights
    experts = loop.journal.best_parents([d.name for d in splits["selection"]])

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
        for key in loop.search.space.parents:
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
        with computing_threads(loop.settings.worker_threads):  # as the champion was
            return {"fitness": holdout.score().fitness}

    after = loop.journal.once("healed", measure, of=of)
    put(exact=True)
    stored = replace(evaluator.model_under_test, model=evaluator.model)
    losses = stored.first_losses(loop.inputs.splits["holdout"])
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
