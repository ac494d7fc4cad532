"""Our own network at the size of the preset smoke, with no weight at its initial value."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from agent_forge.config.settings import ModelSettings
from agent_forge.model.network import ForgeNetwork
from agent_forge.pipeline.config import load_config


def settings(**changes: object) -> ModelSettings:
    sets = tuple(f"model.{key}={value}" for key, value in changes.items())
    return load_config(preset="smoke", sets=sets).model


def shake(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every weight away from its initial value, so that no part is silent."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def network(**changes: object) -> ForgeNetwork:
    torch.manual_seed(0)
    model = shake(ForgeNetwork(settings(**changes))).eval()
    assert isinstance(model, ForgeNetwork)
    return model


def tokens(count: int, rows: int = 2) -> Tensor:
    return torch.randint(0, 512, (rows, count), generator=torch.Generator().manual_seed(1))


def shaken(seed: int, *sets: str) -> ForgeNetwork:
    """A network of this seed and of these settings, ready to be trained."""
    torch.manual_seed(seed)
    model = ForgeNetwork(load_config(preset="smoke", sets=sets).model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
