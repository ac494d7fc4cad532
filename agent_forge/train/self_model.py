"""Self-modelling: a network that also predicts its own activations (arXiv 2407.10188).

A linear head predicts, from the last state of a position, what the middle block gave there. The
gradient goes into both, so that the network becomes easier to predict. The head belongs to the
network while it is trained, is saved with it in checkpoints, and is taken off at the end.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.data.loader import IGNORE
from agent_forge.model.loss import LossOutput
from agent_forge.model.network import ForgeNetwork
from agent_forge.train.trainer import Batch, LossFunction

HEAD = "self_model"


class SelfModelLoss:
    """A loss, and `weight` times the error of predicting the middle block's activations."""

    def __init__(self, loss: LossFunction, network: ForgeNetwork, weight: float) -> None:
        self.loss, self.weight = loss, weight
        width = network.settings.d_model
        head = nn.Linear(width, width).to(next(network.parameters()).device)
        for parameter in head.parameters():  # not drawn: a resumed run has drawn other numbers
            nn.init.zeros_(parameter)
        network.add_module(HEAD, head)
        self._seen: list[Tensor] = []
        middle = network.blocks[len(network.blocks) // 2]
        self._hook = middle.register_forward_hook(self._keep)

    def _keep(self, block: nn.Module, given: Any, activations: Tensor) -> None:
        if block.training:
            self._seen.append(activations)

    def __call__(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        self._seen.clear()
        loss = self.loss(model, batch, generator)
        assert loss.states is not None
        own = self._seen[0].flatten(0, 1)[(batch[1] != IGNORE).flatten()]
        own = F.rms_norm(own, own.shape[-1:])
        error = F.mse_loss(model.get_submodule(HEAD)(loss.states), own)
        loss.total = loss.total + self.weight * error
        loss.values["self_model_error"] = float(error.detach())
        return loss

    def take_off(self, network: ForgeNetwork) -> None:
        """Leave the network as it was without the head."""
        self._hook.remove()
        delattr(network, HEAD)
