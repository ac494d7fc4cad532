"""Training through the rounding: in the stages of a ladder, and what costs too much is put back."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from agent_forge.contract.phase import PhaseContext
from agent_forge.evals.model_under_test import EVERY_STEP, measure
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase4_bitnet.calibration import Sensitivity, by_kind
from agent_forge.phases.phase4_bitnet.config import LADDERS, BitNetSettings
from agent_forge.phases.training import train_network
from agent_forge.quant.codecs import find_codec
from agent_forge.quant.layers import compute_rounded, round_inputs, rounded_once, trained_state
from agent_forge.quant.packed import Packing
from agent_forge.train.corpus import Corpus
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.lessons import Lessons

PUT_BACK = "int8"  # the codec of a kind of matrix that costs too much as ternary
HELD_OUT = 60  # thoughts that evaluations during training look at
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class RoundedTraining:
    """A parent, and what its children learn from: old tasks, and thoughts if it has learned any."""

    ctx: PhaseContext
    settings: BitNetSettings
    corpus: Corpus
    lessons: Lessons | None
    parent: ForgeNetwork

    def train(self, packing: Packing, costs: Sequence[Sensitivity]) -> tuple[State, Packing]:
        """The trained weights, not rounded yet, and how they are to be packed."""
        c, ladder = self.settings, LADDERS[self.settings.ladder]
        kinds, order = by_kind(packing.matrices), [cost.kind for cost in costs]
        state: State = self.parent.state_dict()
        for stage in range(1, ladder.stages + 1):
            now = order[: math.ceil(stage * len(order) / ladder.stages)]
            part = {name: packing.matrices[name] for kind in now for name in kinds[kind]}
            steps = max(1, c.steps // ladder.stages)
            state = self._go_on(state, replace(packing, matrices=part), f"round_{stage}", steps)
        for number in range(1, c.most_reverts + 1):
            if not order or self._lost(packing, state, number) <= ladder.most_lost:
                break
            names = kinds[order.pop()]  # the most sensitive kind
            other = find_codec(PUT_BACK)
            changed = {name: replace(packing.matrices[name], codec=other) for name in names}
            packing = replace(packing, matrices={**packing.matrices, **changed})
            state = self._go_on(state, packing, f"put_back_{number}", c.revert_steps)
        return state, packing

    def control(self) -> ForgeNetwork:
        """The parent trained on as many tokens by the same optimizer, without rounding."""
        model = copy.deepcopy(self.parent)
        self._fit(model, "control", self.settings.steps)
        return model.eval()

    def packed(self, packing: Packing, state: State) -> ForgeNetwork:
        """A network that computes as the packed file of these weights does once it is opened."""
        network = self.whole(packing, state)
        round_inputs(network, packing.with_rounded_inputs)
        network.packing = packing
        return network

    def whole(self, packing: Packing, state: State) -> ForgeNetwork:
        """The same weights in an ordinary network, which rounds nothing that it is given."""
        network = ForgeNetwork(self.parent.settings)
        network.load_state_dict(packing.rounded(state))
        return network.to(self.ctx.device).eval()

    def _go_on(self, state: State, packing: Packing, stage: str, steps: int) -> State:
        """Train on from these weights, computing as a packed model does."""
        model = copy.deepcopy(self.parent)
        model.load_state_dict(dict(state))
        compute_rounded(model, packing)
        teacher = copy.deepcopy(self.parent)
        distillation = DistillationLoss(teacher, share=self.settings.parent_share)
        self._fit(model, stage, steps, loss=rounded_once(distillation))
        return {name: tensor.detach().clone() for name, tensor in trained_state(model).items()}

    def _fit(self, model: ForgeNetwork, stage: str, steps: int, **options: Any) -> None:
        model.requires_grad_(True)
        options |= {"settings": self.settings.train, "seed": self.ctx.seed, "steps": steps}
        held_out = self.lessons.held_out(HELD_OUT) if self.lessons else ()
        curriculum = self._taught.constant(self._mix)
        train_network(self.ctx, self._taught, model, curriculum, held_out, stage=stage, **options)

    @cached_property
    def _taught(self) -> Corpus:
        further = self.lessons.sources() if self.lessons else []
        return replace(self.corpus, sources=[*self.corpus.sources, *further])

    @property
    def _mix(self) -> dict[str, float]:
        if not self.lessons:
            return self.corpus.mix()
        return self.lessons.mix(self.corpus, list(self.lessons.traces))

    def _lost(self, packing: Packing, state: State, number: int) -> float:
        """The share of the parent's accuracy that is lost, on items for such choices."""
        items = [item for own in self.corpus.selection.values() for item in own]
        right = partial(_accuracy, items=items)
        before = self.ctx.once("selection", "parent", lambda: right(self.parent))
        after = self.ctx.once("selection", f"{number}", lambda: right(self.packed(packing, state)))
        return 1 - after / before if before else 0.0


def _accuracy(model: ForgeNetwork, items: Sequence[Any]) -> float:
    return measure(model, items, threshold=EVERY_STEP).accuracy
