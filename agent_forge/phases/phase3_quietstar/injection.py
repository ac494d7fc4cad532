"""ThoughtInjectionSystem: several thoughts fused into the states of a network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

OPEN = -2.0  # the gate's bias at first: sigmoid(-2) = 0.12, so that thoughts count from the start


class ThoughtInjectionSystem(nn.Module):
    """Attention from the states to the thoughts, a gate that says how much of it, and a norm."""

    def __init__(self, hidden_size: int, num_heads: int, coherence_threshold: float = 0.7) -> None:
        super().__init__()
        self.coherence_threshold = coherence_threshold
        self.thought_attention = nn.MultiheadAttention(hidden_size, num_heads, batch_first=True)
        self.gate = nn.Linear(2 * hidden_size, 1)
        self.layer_norm = nn.LayerNorm(hidden_size)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, OPEN)

    def inject_thoughts(
        self, base_BTD: Tensor, thoughts: Sequence[Tensor], coherence_scores: Sequence[float]
    ) -> Tensor:
        """The states with what they find in the coherent thoughts (each B x K x D); without any
        such thought the states as they are."""
        pairs = zip(thoughts, coherence_scores, strict=True)
        valid = [thought for thought, score in pairs if score > self.coherence_threshold]
        if not valid:
            return base_BTD
        memory = torch.cat(valid, dim=1)
        attended, _ = self.thought_attention(base_BTD, memory, memory, need_weights=False)
        share = torch.sigmoid(self.gate(torch.cat([base_BTD, attended], dim=-1)))
        fused: Tensor = self.layer_norm(share * attended + (1 - share) * base_BTD)
        return fused
