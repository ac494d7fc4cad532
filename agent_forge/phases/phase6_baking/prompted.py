"""Learning to answer without a prompt as the model does with it, beside what it knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from agent_forge.infer.tool_use import ToolReply
from agent_forge.model.loss import LossOutput, language_loss
from agent_forge.train.prompt_baking import PromptBakingLoss, mean_kl, padded
from agent_forge.train.trainer import Batch

LOOKED_AT = 32  # samples, now and then
Sample = list[Any]  # token ids of a question and a reply, and which of them the model said


@dataclass
class Samples:
    """Replies to learn from: a prompted teacher's, or the student's own, which are then drawn anew
    on the way. As what looks at a model in training, it is kept with the checkpoints."""

    draw: Callable[[nn.Module], list[ToolReply]]
    teacher: nn.Module
    student: nn.Module
    told: list[int]  # the prompt, which only the teacher is given
    own: bool  # the student's
    every_steps: int
    items: list[Sample] = field(default_factory=list)
    ended: bool = False

    def drawn(self, network: nn.Module) -> list[Sample]:
        """Replies of a network, without the prompt."""
        before = 0 if self.own else len(self.told)
        return [[reply.ids[before:], reply.own[before:]] for reply in self.draw(network)]

    def update(self) -> float:
        """Draw anew, if they are the student's; returns the KL to the teacher on some of them."""
        if self.own:
            self.items = self.drawn(self.student)
        rows = padded([(ids, said) for ids, said in self.items[:LOOKED_AT]])
        value = mean_kl(self.teacher, self.student.eval(), [rows], self.told)
        self.student.train()
        return value

    def state_dict(self) -> dict[str, Any]:
        return {"items": self.items}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.items = state["items"]


@dataclass(frozen=True)
class BesideReplay:
    """A share of the language loss on what was known, and the KL to the prompted teacher on some of
    the samples."""

    baking: PromptBakingLoss
    samples: Samples
    rows: int
    replay_share: float

    def __call__(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        loss, items = language_loss(model, batch, generator), self.samples.items
        chosen = torch.randint(len(items), (self.rows,), generator=generator).tolist()
        rows = padded([(items[i][0], items[i][1]) for i in chosen])
        baked = self.baking(model, [t.to(batch[0].device) for t in rows], generator)
        loss.total = self.replay_share * loss.total + (1 - self.replay_share) * baked.total
        loss.values["divergence"] = baked.values["divergence"]
        return loss
