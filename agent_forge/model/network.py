"""The assembled network: embedding, backbone, memory and gate, recursion, halting, head.

The embedding is factorised (vocabulary x rank, rank x width) and tied to the head, to stay small.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.config.settings import ModelSettings
from agent_forge.model.attention import KeyValues, RMSNorm, TransformerBlock
from agent_forge.model.memory import MemoryGate, MemoryState, NeuralMemory
from agent_forge.model.recursion import HaltingHead, Recursion
from agent_forge.quant.packed import Packing


@dataclass
class GenerationCache:
    """All that a next token needs of the past: keys and values, the memory, the position."""

    layers: list[KeyValues]
    memory: MemoryState = field(default_factory=dict)
    position: int = 0


class BackboneOutput(NamedTuple):
    """What the backbone makes of the tokens, before the recursion."""

    x: Tensor
    gate_entropy: Tensor


class ForgeNetwork(nn.Module):
    """A causal language model. `forward` gives the logits of the last recursion step."""

    folder: Path | None = None  # where it was loaded from, with its tokenizer
    packing: Packing | None = None  # how its weights were written in few bits, if they were

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = s = settings
        self.checkpointing = False  # whether training computes the blocks twice to save memory
        self.embedding = nn.Embedding(s.vocab_size, s.embed_rank)
        self.projection = nn.Linear(s.embed_rank, s.d_model, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.projection.weight, std=s.d_model**-0.5)
        block = (s.d_model, s.n_heads, s.ffn_hidden, s.sw_window, s.head_width)
        self.blocks = nn.ModuleList(TransformerBlock(*block) for _ in range(s.n_layers))
        memory = (s.d_mem, s.memory_capacity, s.surprise_weight, s.novelty_weight)
        self.memory = NeuralMemory(s.d_model, *memory)
        self.gate = MemoryGate(s.d_model, s.gate_hidden)
        self.recursion = Recursion(s.d_model, s.trm_hidden, s.micro_steps, s.t_max)
        self.halting = HaltingHead(s.d_model, s.t_max, s.halt_ema)
        self.norm = RMSNorm(s.d_model)

    def new_cache(self) -> GenerationCache:
        return GenerationCache([KeyValues() for _ in self.blocks])

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        x = self.projection(self.embedding(tokens_BT))
        return F.rms_norm(x, x.shape[-1:], eps=1e-6)  # else the blocks drown the small embedding

    def features(self, tokens_BT: Tensor, cache: GenerationCache | None = None) -> BackboneOutput:
        """Backbone, memory and gate: computed once, whatever the depth of the recursion."""
        x = self.embedded(tokens_BT)
        start = cache.position if cache else 0
        twice = self.checkpointing and self.training and torch.is_grad_enabled()
        for i, block in enumerate(self.blocks):
            if twice and cache is None:
                x = checkpoint(block, x, None, start, use_reentrant=False)
            else:
                x = block(x, cache.layers[i] if cache else None, start)
        remembered = self.memory(x, cache.memory if cache else None)
        if cache:
            cache.position += tokens_BT.shape[1]
        return BackboneOutput(*self.gate(x, remembered))

    def hidden(self, y: Tensor) -> Tensor:
        """An answer in the rank of the embedding; `logits` is one product away."""
        return F.linear(self.norm(y), self.projection.weight.t())

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight)

    def answers(self, x: Tensor) -> Tensor:
        """Answers for features, after all recursion steps."""
        y, z = self.recursion.start(x)
        for _ in range(self.settings.t_max):
            y, z = self.recursion(x, y, z)
        return y

    def forward(self, tokens_BT: Tensor, cache: GenerationCache | None = None) -> Tensor:
        """Logits for every position, after all recursion steps."""
        return self.logits(self.hidden(self.answers(self.features(tokens_BT, cache).x)))

    @torch.no_grad()
    def decide(self, x_ND: Tensor, *, threshold: float | None = None) -> tuple[Tensor, Tensor]:
        """Answers for features, and the steps each took: a position halts when it is sure."""
        bound = self.settings.halt_threshold if threshold is None else threshold
        y, z = self.recursion.start(x_ND)
        steps = torch.zeros(x_ND.shape[0], dtype=torch.long, device=x_ND.device)
        active = torch.ones(x_ND.shape[0], dtype=torch.bool, device=x_ND.device)
        for step in range(self.settings.t_max):
            new_y, new_z = self.recursion(x_ND, y, z)
            y = torch.where(active[:, None], new_y, y)
            z = torch.where(active[:, None], new_z, z)
            steps += active
            active = active & (self.halting.probability(z, step) <= bound)
            if not active.any():
                break
        return y, steps

    @torch.no_grad()
    def predict(
        self, tokens_BT: Tensor, cache: GenerationCache | None = None, **options: float | None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the last position, and the steps that each row took; options of `decide`."""
        y, steps = self.decide(self.features(tokens_BT, cache).x[:, -1], **options)
        return self.logits(self.hidden(y)), steps
