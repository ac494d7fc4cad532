"""Cuts, each followed by distillation from the input; kept, or taken back if it costs too much."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from agent_forge.contract.phase import PhaseContext
from agent_forge.errors import DamagedFile
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.phases.phase7_edge.config import EdgeSettings
from agent_forge.phases.phase7_edge.profiling import Profile, Profiler
from agent_forge.phases.phase7_edge.pruning import Cut, cuts_of, importance_of
from agent_forge.phases.skills import MEAN, Right, Skills, retention
from agent_forge.phases.training import LatentModel
from agent_forge.train.exchange_rows import PERSONA, TOOLS
from agent_forge.train.fit import DistillationLoss

INPUT = "input"
MET = "the target is met"


@dataclass(frozen=True)
class CutStep:
    """A cut: what was taken, what it cost before and after the distillation."""

    number: int
    kind: str
    rise: float  # nats a token by the cut alone
    shape: dict[str, int]
    retention: dict[str, float]  # of the input's accuracy; "mean" is of the mean over all
    profile: Profile
    taken_back: str  # the reason; empty if it is kept


class Chosen(NamedTuple):
    """A cut, and by how much the loss rises by it alone."""

    cut: Cut
    rise: float


class Profiles(NamedTuple):
    """What the input and a model take, measured in turns."""

    input: Profile
    model: Profile


@dataclass
class EdgeSearch:
    """A model that came in, what it is taught while it gets smaller, and what it must keep."""

    ctx: PhaseContext
    settings: EdgeSettings
    skills: Skills
    start: LatentModel
    profiler: Profiler
    steps: list[CutStep] = field(default_factory=list)

    def right(self, model: LatentModel, name: str) -> Right:
        """Which items for choices a model gets right; once."""
        return self.skills.right(model.opened().to(self.ctx.device), name)

    # -- cuts --------------------------------------------------------------------------------------

    def cut_down(self) -> tuple[LatentModel, Profiles, str]:
        """Cut until the target is met, or the next cut would cost too much; what is left, what it
        and the input take, and why it ended."""
        model, taken = self.start, self.profiles(self.start, INPUT)
        first = now = self.right(self.start, INPUT)
        for number in range(1, self.settings.cuts + 1):
            if not (missed := self.missed(taken)):
                break
            if (chosen := self._choose(model, number)) is None:
                return model, taken, f"nothing is left to cut: {missed}"
            child = self._distilled(chosen.cut.apply(model), number)
            after = self.right(child, f"cut_{number}")
            lost, own = self._lost(first, after), self.profiles(child, f"cut_{number}")
            self._note(number, chosen, child, retention(first, after), own.model, lost)
            if lost:
                self._take_back(model, number, lost, now)
                return model, taken, f"the next cut would break the retention gate: {lost}"
            model, now, taken = child, after, own
        missed = self.missed(taken)
        return model, taken, f"{self.settings.cuts} cuts are made: {missed}" if missed else MET

    def missed(self, taken: Profiles) -> str:
        """The limits of the device that are not met, in words."""
        return ", ".join(taken.model.missed(self.settings.limits, taken.input))

    def profiles(self, model: LatentModel, name: str) -> Profiles:
        """What the input and a model take, measured in turns; once, as it reads a clock."""
        models = {INPUT: self.start} if name == INPUT else {INPUT: self.start, name: model}
        found = self.ctx.once("profile", name, partial(self.profiler.measure, models))
        return Profiles(Profile(**found[INPUT]), Profile(**found[name]))

    def _choose(self, model: LatentModel, number: int) -> Chosen | None:
        """The cut that costs the least for what it saves, by calibration alone; None if there is
        none left."""
        records = self.ctx.once("cuts", str(number), partial(self._candidates, model))
        if not records:
            return None
        best = min(records, key=lambda own: (max(own["rise"], 0.0) / own["saved"], -own["saved"]))
        cut = Cut(best["kind"], tuple(map(tuple, best["kept"])))
        return Chosen(cut, best["rise"])

    def _candidates(self, model: LatentModel) -> list[dict[str, Any]]:
        """Every cut that could be made: by how much the loss rises without any training."""
        c, network = self.settings, model.opened().to(self.ctx.device)
        items = self.skills.calibration(c.calibration_items)
        cuts = cuts_of(model.settings, importance_of(network, items), c.kinds, c.channel_share)
        whole, found = measure(network, items, threshold=EVERY_STEP).nats_per_token, []
        for cut in cuts:
            smaller = cut.apply(model)
            saved = model.settings.parameters() - smaller.settings.parameters()
            own = measure(smaller.opened().to(self.ctx.device), items, threshold=EVERY_STEP)
            found.append({**cut._asdict(), "rise": own.nats_per_token - whole, "saved": saved})
        return found

    def _lost(self, first: Right, after: Right) -> str:
        """What has less of the input's accuracy than it must keep, in words; empty if all is."""
        least, kept = self.settings.least_retention, retention(first, after)
        judged = (MEAN, TOOLS, PERSONA)
        told = [f"{kind} {kept[kind]:.1%}" for kind in judged if kept.get(kind, 1.0) < least]
        return f"{', '.join(told)} of the input's accuracy, not {least:.0%}" if told else ""

    def _note(
        self,
        number: int,
        chosen: Chosen,
        child: LatentModel,
        kept: dict[str, float],
        own: Profile,
        lost: str,
    ) -> None:
        shape = child.settings.model_dump(include={"n_layers", "n_heads", "ffn_hidden"})
        self.steps.append(CutStep(number, chosen.cut.kind, chosen.rise, shape, kept, own, lost))
        values = {"weights": own.weights, "token_ms": own.token_ms}
        values |= {"retention": kept[MEAN]} if MEAN in kept else {}
        self.ctx.log(None, {f"cut_{number}/{name}": value for name, value in values.items()})

    def _take_back(self, model: LatentModel, number: int, lost: str, recorded: Right) -> None:
        """Drop a cut; the weights before it still have the score that was recorded."""
        if self.right(model, f"before cut_{number}, again") != recorded:
            raise DamagedFile(self.ctx.folder, "weights that a cut went back to score otherwise")
        event = {"phase": self.ctx.phase, "stage": f"cut_{number}", "reason": lost}
        record = partial(self.ctx.tracker.event, "rolled_back", **event)
        self.ctx.once("rolled back", f"cut_{number}", record)

    # -- distillation ------------------------------------------------------------------------------

    def _distilled(self, model: LatentModel, number: int) -> LatentModel:
        """What is left, trained to do what the input does, straight through the rounding."""
        c, teacher = self.settings, self.start.opened().to(self.ctx.device)
        seed = (self.ctx.seed + 1_000_003 * model.steps) % 2**62  # other batches after every cut
        return model.trained(
            self.ctx,
            **self.skills.training,
            stage=f"cut_{number}",
            steps=c.cut_steps,
            settings=c.train,
            seed=seed,
            loss=DistillationLoss(teacher, share=c.parent_share),
        )
