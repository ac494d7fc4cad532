"""Distillation: learn the distribution of a teacher, token by token, besides the text itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.errors import ConfigError
from agent_forge.model import loss as losses
from agent_forge.model.loss import CHUNK, IGNORE, LossOutput, head_of
from agent_forge.optim.muon import divergence


class DistillationLoss:
    """(1 - share) * language loss + share * temperature^2 * KL(teacher || student)."""

    def __init__(self, teacher: nn.Module, *, share: float = 0.5, temperature: float = 1.0) -> None:
        if not 0 <= share <= 1 or temperature <= 0:
            raise ValueError("share is from 0 to 1, temperature above 0")
        self.teacher, self.share, self.temperature = teacher.eval(), share, temperature
        teacher.requires_grad_(False)

    def __call__(
        self, model: nn.Module, batch: Sequence[Tensor], generator: torch.Generator
    ) -> LossOutput:
        teacher_size, size = map(losses.vocabulary_of, (self.teacher, model))
        if teacher_size != size:
            raise ConfigError(f"the teacher has {teacher_size} tokens, the student {size}")
        tokens, targets = batch
        self.teacher.to(tokens.device)
        loss = losses.language_loss(model, batch, generator)
        assert loss.states is not None
        with torch.no_grad():
            states = losses.states_of(self.teacher, tokens).flatten(0, 1)
        taught = states[(targets != IGNORE).flatten()]
        pairs = zip(torch.split(loss.states, CHUNK), torch.split(taught, CHUNK), strict=True)
        parts = [checkpoint(self._divergence, model, *pair, use_reentrant=False) for pair in pairs]
        distance = torch.cat(parts).sum() / max(1, loss.count)
        loss.total = (1 - self.share) * loss.total + self.share * distance
        loss.values["divergence"] = float(distance.detach())
        return loss

    def _divergence(self, model: nn.Module, student: Tensor, teacher: Tensor) -> Tensor:
        own, taught = head_of(model)(student), head_of(self.teacher)(teacher)
        return self.temperature**2 * divergence(own / self.temperature, taught / self.temperature)
