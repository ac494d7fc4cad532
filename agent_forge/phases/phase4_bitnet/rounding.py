"""Training through the rounding: in the stages of a ladder, and what costs too much is put back."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor

from agent_forge.contract.phase import PhaseContext
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.evals.thoughts import Thinker
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase4_bitnet.calibration import Sensitivity, by_kind
from agent_forge.phases.phase4_bitnet.config import LADDERS, BitNetSettings
from agent_forge.phases.training import train_network
from agent_forge.quant.codecs import find_codec
from agent_forge.quant.layers import compute_rounded, round_inputs, rounded_once, trained_state
from agent_forge.quant.packed import Packing
from agent_forge.train.corpus import Corpus
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.lessons import Lessons, unseen_items

PUT_BACK = "int8"  # the codec of a kind of matrix that costs too much as ternary
HELD_OUT = 60  # thoughts that evaluations during training look at
CHOICE_ITEMS = 40  # of each family, that are thought about before something is put back
State = Mapping[str, Tensor]


class RoundedModel(NamedTuple):
    """Weights that are not rounded yet, how they are to be packed, and the steps they took."""

    state: State
    packing: Packing
    steps: int


@dataclass(frozen=True)
class RoundedTraining:
    """A parent, and what its children learn from: old tasks, and thoughts if it has learned any."""

    ctx: PhaseContext
    settings: BitNetSettings
    corpus: Corpus
    lessons: Lessons | None
    parent: ForgeNetwork

    def train(self, packing: Packing, costs: Sequence[Sensitivity]) -> RoundedModel:
        """Round in the stages of the ladder and train on, then put back what costs too much."""
        c, ladder = self.settings, LADDERS[self.settings.ladder]
        kinds, order = by_kind(packing.matrices), [cost.kind for cost in costs]
        model = RoundedModel(self.parent.state_dict(), packing, 0)
        for stage in range(1, ladder.stages + 1):
            now = order[: math.ceil(stage * len(order) / ladder.stages)]
            part = {name: packing.matrices[name] for kind in now for name in kinds[kind]}
            steps = c.steps * stage // ladder.stages - c.steps * (stage - 1) // ladder.stages
            if steps:
                part_of = replace(packing, matrices=part)
                model = self._go_on(model, part_of, f"round_{stage}", steps)
        model = model._replace(packing=packing)
        left = [k for k in order if packing.matrices[kinds[k][0]].codec.name != PUT_BACK]
        for number in range(1, c.most_reverts + 1):
            if not left or self._lost(model, number) <= ladder.most_lost:
                break
            names, other = kinds[left.pop()], find_codec(PUT_BACK)  # of the most sensitive kind
            changed = {name: replace(model.packing.matrices[name], codec=other) for name in names}
            packing = replace(model.packing, matrices={**model.packing.matrices, **changed})
            model = self._go_on(model, packing, f"put_back_{number}", c.revert_steps)
        return model

    def control(self, steps: int) -> ForgeNetwork:
        """The parent trained for as many steps by the same optimizer, without rounding."""
        model = copy.deepcopy(self.parent)
        self._fit(model, "control", steps, self.ctx.seed)
        return model.eval()

    def as_opened(self, model: RoundedModel) -> ForgeNetwork:
        """A network that computes as the packed file of these weights does once it is opened."""
        network = self.whole(model)
        round_inputs(network, model.packing.with_rounded_inputs)
        network.packing = model.packing
        return network

    def whole(self, model: RoundedModel) -> ForgeNetwork:
        """The same weights in an ordinary network, which rounds nothing that it is given."""
        network = ForgeNetwork(self.parent.settings)
        network.load_state_dict(model.packing.rounded(model.state))
        return network.to(self.ctx.device).eval()

    def _go_on(
        self, before: RoundedModel, packing: Packing, stage: str, steps: int
    ) -> RoundedModel:
        """Train on from weights, computing as a packed model does."""
        model = copy.deepcopy(self.parent)
        model.load_state_dict(dict(before.state))
        compute_rounded(model, packing)
        teacher = copy.deepcopy(self.parent)
        distillation = DistillationLoss(teacher, share=self.settings.parent_share)
        # Later stages see other batches: their seed goes by the steps that were taken.
        seed = self.ctx.seed + 1_000_003 * before.steps
        self._fit(model, stage, steps, seed, loss=rounded_once(distillation))
        state = {name: tensor.detach().clone() for name, tensor in trained_state(model).items()}
        return RoundedModel(state, packing, before.steps + steps)

    def _fit(self, model: ForgeNetwork, stage: str, steps: int, seed: int, **options: Any) -> None:
        model.requires_grad_(True)
        options |= {"settings": self.settings.train, "seed": seed % 2**62, "steps": steps}
        held_out = self.lessons.held_out(HELD_OUT) if self.lessons else ()
        curriculum = self.taught.constant(self._mix)
        train_network(self.ctx, self.taught, model, curriculum, held_out, stage=stage, **options)

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

    def _lost(self, model: RoundedModel, number: int) -> float:
        """The share of the parent's accuracy that is lost, on items for such choices."""
        before = self.ctx.once("selection", "parent", lambda: self._accuracy(self.parent))
        opened = partial(self.as_opened, model)
        after = self.ctx.once("selection", f"{number}", lambda: self._accuracy(opened()))
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
