"""Training through the rounding: in the stages of a ladder, and what costs too much is put back."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from agent_forge.contract.phase import PhaseContext
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase4_bitnet.calibration import Sensitivity
from agent_forge.phases.phase4_bitnet.config import LADDERS, BitNetSettings
from agent_forge.phases.training import LatentModel, train_network
from agent_forge.quant.codecs import find_codec
from agent_forge.quant.packed import Packing, kinds_of
from agent_forge.train.corpus import Corpus
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.lessons import Lessons, unseen_items

PUT_BACK = "int8"  # the codec of a kind of matrix that costs too much as ternary
HELD_OUT = 60  # thoughts that evaluations during training look at
CHOICE_ITEMS = 40  # of each family, that are thought about before something is put back


@dataclass(frozen=True)
class RoundedTraining:
    """A parent, and what its children learn from: old tasks, and thoughts if it has learned any."""

    ctx: PhaseContext
    settings: BitNetSettings
    corpus: Corpus
    lessons: Lessons | None
    parent: ForgeNetwork

    def train(self, packing: Packing, costs: Sequence[Sensitivity]) -> LatentModel:
        """Round in the stages of the ladder and train on, then put back what costs too much."""
        c, ladder = self.settings, LADDERS[self.settings.ladder]
        kinds, order = kinds_of(packing.matrices), [cost.kind for cost in costs]
        model = LatentModel(self.parent.settings, self.parent.state_dict(), packing)
        for stage in range(1, ladder.stages + 1):
            now = order[: math.ceil(stage * len(order) / ladder.stages)]
            part = {name: packing.matrices[name] for kind in now for name in kinds[kind]}
            steps = c.steps * stage // ladder.stages - c.steps * (stage - 1) // ladder.stages
            if steps:
                part_of = replace(packing, matrices=part)
                model = self._go_on(model, part_of, f"round_{stage}", steps)
        model = replace(model, packing=packing)
        left = [k for k in order if packing.matrices[kinds[k][0]].codec.name != PUT_BACK]
        for number in range(1, c.most_reverts + 1):
            if not left or self._lost(model, number) <= ladder.most_lost:
                break
            names, other = kinds[left.pop()], find_codec(PUT_BACK)  # of the most sensitive kind
            changed = {name: replace(packing.matrices[name], codec=other) for name in names}
            packing = replace(packing, matrices={**packing.matrices, **changed})
            model = self._go_on(model, packing, f"put_back_{number}", c.revert_steps)
        return model

    def control(self, steps: int) -> ForgeNetwork:
        """The parent trained for as many steps by the same optimizer, without rounding."""
        model = copy.deepcopy(self.parent).requires_grad_(True)
        how = {"stage": "control", "steps": steps, **self._how(self.ctx.seed)}
        return train_network(self.ctx, self.taught, model, **how).eval()

    def _go_on(self, before: LatentModel, packing: Packing, stage: str, steps: int) -> LatentModel:
        """Train on from weights, computing as a packed model does."""
        teacher = copy.deepcopy(self.parent)
        distillation = DistillationLoss(teacher, share=self.settings.parent_share)
        # Later stages see other batches: their seed goes by the steps that were taken.
        seed = self.ctx.seed + 1_000_003 * before.steps
        how = {"stage": stage, "steps": steps, "loss": distillation, **self._how(seed)}
        return replace(before, packing=packing).trained(self.ctx, corpus=self.taught, **how)

    def _how(self, seed: int) -> dict[str, Any]:
        """What every training has in common."""
        held_out = self.lessons.held_out(HELD_OUT) if self.lessons else ()
        curriculum = self.taught.constant(self._mix)
        common = {"curriculum": curriculum, "held_out": held_out}
        return {**common, "settings": self.settings.train, "seed": seed % 2**62}

    @cached_property
    def taught(self) -> Corpus:
        """The corpus with the lessons; those that do not fit its rows are refused."""
        further = self.lessons.sources() if self.lessons else []
        return replace(self.corpus, sources=[*self.corpus.sources, *further])

    @property
    def _mix(self) -> dict[str, float]:
        if not self.lessons:
            return self.corpus.mix()
        return self.lessons.mix(self.corpus, list(self.lessons.traces))

    def _lost(self, model: LatentModel, number: int) -> float:
        """The share of the parent's accuracy that is lost, on items for such choices."""
        before = self.ctx.once("selection", "parent", lambda: self._accuracy(self.parent))

        def measured() -> float:
            return self._accuracy(model.opened().to(self.ctx.device))

        after = self.ctx.once("selection", f"{number}", measured)
        return 1 - after / before if before else 0.0

    def _accuracy(self, model: ForgeNetwork) -> float:
        """Of old tasks and, in equal shares, of tasks with thoughts."""
        items = [item for own in self.corpus.selection.values() for item in own]
        old = measure(model, items, threshold=EVERY_STEP).accuracy
        if not self.lessons:
            return old
        tasks = unseen_items(self.lessons.settings, "selection", CHOICE_ITEMS)
        thinker = Thinker(model, self.corpus.tokenizer)
        right = thinker.right(tasks, thinker.think(tasks))
        return (old + sum(right) / len(right)) / 2
