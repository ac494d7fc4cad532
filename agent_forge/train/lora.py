"""LoRA for any network: the layers that get it, and how it becomes part of their weights.

The change itself is `LowRankBranches` of weight_transforms.py: only A and B are trained, and no
gradient of the size of a weight is computed.
"""

from typing import Any

import torch
from torch import nn

from agent_forge.errors import ConfigError
from agent_forge.model.weights import BEFORE_LAYERS, HEAD
from agent_forge.train.weight_transforms import LowRankBranches


def linear_layers(network: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a network between embeddings and head, by name."""
    found = {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"  # of GPT-2
        if not HEAD.search(f"{name}.weight") and not BEFORE_LAYERS.search(f"{name}.weight")
    }
    if not found:
        raise ConfigError("the network has no linear layer between embeddings and head")
    return found


def add_branches(network: nn.Module, rank: int, generator: torch.Generator) -> LowRankBranches:
    """Freeze a network and put a change of this rank, 0 at first, beside its linear layers."""
    if rank < 1:
        raise ConfigError(f"LoRA of rank {rank} changes nothing")
    return LowRankBranches(linear_layers(network.requires_grad_(False)), rank, generator)


@torch.no_grad()
def fold(network: nn.Module, branches: LowRankBranches) -> None:
    """Add the change to the weights and take the branches away: the network is an ordinary one."""
    branches.remove()
    for name, change in branches.changes().items():
        layer: Any = network.get_submodule(name)
        layer.weight.add_(change.to(layer.weight))
