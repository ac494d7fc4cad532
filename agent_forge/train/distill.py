"""Distillation: learn the distribution of a teacher, token by token, besides the text itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.errors import ConfigError
from agent_forge.model.loss import CHUNK, IGNORE, LossOutput, language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.optim.muon import divergence


class DistillationLoss:
    """(1 - share) * language loss + share * temperature^2 * KL(teacher || student)."""

    def __init__(
        self, teacher: ForgeNetwork, *, share: float = 0.5, temperature: float = 1.0
    ) -> None:
        if not 0 <= share <= 1 or temperature <= 0:
            raise ValueError("share is from 0 to 1, temperature above 0")
        self.vocab_size = teacher.settings.vocab_size
        self.teacher, self.share, self.temperature = teacher.eval(), share, temperature
        teacher.requires_grad_(False)

    def __call__(
        self, model: nn.Module, batch: Sequence[Tensor], generator: torch.Generator
    ) -> LossOutput:
        assert isinstance(model, ForgeNetwork)
        if model.settings.vocab_size != self.vocab_size:
            raise ConfigError(
                f"the teacher has {self.vocab_size} tokens, the student {model.settings.vocab_size}"
            )
        self.teacher.to(batch[0].device)
        loss = language_loss(model, batch, generator)
        tokens, targets = batch
        kept = (targets != IGNORE).flatten()
        with torch.no_grad():
            wise = self.teacher.answers(tokens).flatten(0, 1)[kept]
        parts = [
            checkpoint(self._divergence, model, y, t, use_reentrant=False)
            for y, t in zip(torch.split(loss.answers, CHUNK), torch.split(wise, CHUNK), strict=True)
        ]
        away = torch.cat(parts).sum() / max(1, loss.count)
        loss.total = (1 - self.share) * loss.total + self.share * away
        loss.divergence = float(away.detach())
        return loss

    def _divergence(self, model: ForgeNetwork, own: Tensor, wise: Tensor) -> Tensor:
        student = model.logits(model.hidden(own)) / self.temperature
        teacher = self.teacher.logits(self.teacher.hidden(wise)) / self.temperature
        return self.temperature**2 * divergence(student, teacher)
