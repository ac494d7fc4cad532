"""A toy phase: learn a random linear map by gradient descent. It shows how a phase is written.

In: nothing. Out: one linear model. All durability comes from `ctx.steps`: kill it at any moment and
it resumes to the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from agent_forge.contract import phase
from agent_forge.contract.phase import ModelRef, PhaseContext
from agent_forge.phases.toy_config import ToySettings


class ToyPhase(phase.PhaseController):
    """The phase: plan, then run."""

    name = "toy"
    config: ToySettings

    def plan(self, models: Sequence[ModelRef]) -> phase.PhasePlan:
        steps, weights = self.config.steps, self.config.width**2 + self.config.width
        disk = 150 * steps + 100 * weights  # a line of metrics a step, checkpoints
        return phase.PhasePlan(steps, weights, disk_bytes=disk, memory_bytes=28 * weights + 10**7)

    def run(self, ctx: PhaseContext) -> phase.PhaseResult:
        width, data = self.config.width, ctx.generator("data")
        target = torch.randn(width, width, generator=ctx.generator("target"))
        model = nn.Linear(width, width)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.config.learning_rate)
        for step in ctx.steps(self.config.steps, {"model": model, "optimizer": optimizer}):
            x = torch.randn(32, width, generator=data)
            loss = (model(x) - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ctx.log(step, {"toy/loss": loss.item()})
        x = torch.randn(1024, width, generator=ctx.generator("test"))
        final = (model(x) - x @ target).square().mean().item()
        ctx.log(None, {"toy/final_loss": final})
        metrics = {"toy/final_loss": final}
        saved = ctx.save_model("linear", model, {"final_loss": final}, metrics=metrics)
        return phase.PhaseResult(True, model, self.name, metrics, {"models": [saved]}, ctx.seconds)
