"""Many short continuations of texts at once: each sees its text up to a place, and itself.

The texts (trunks) are read once. A branch begins behind a token of its trunk; it attends to what
stands up to that place and to its own tokens, and goes on from the memory as it was there. So all
branches of all places of all texts are one batch: each is a row with the keys of its text, masked
behind its place (Quiet-STaR's diagonal mask, a row a diagonal), and no text is computed twice.

Shapes: B texts, T their tokens, N branches of each, R = B * N, L tokens of a branch, D width.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agent_forge.model.attention import KeyValues, TransformerBlock
from agent_forge.model.memory import MemoryState
from agent_forge.model.network import ForgeNetwork


@dataclass
class Trunk:
    """Texts that were read: their features, and what a branch needs of them."""

    x_BTD: Tensor
    layers: list[KeyValues]
    memory: MemoryState  # after every token

    @classmethod
    def read(cls, network: ForgeNetwork, tokens_BT: Tensor) -> "Trunk":
        layers, history = [KeyValues() for _ in network.blocks], MemoryState()
        x = network.embedded(tokens_BT)
        for block, past in zip(network.blocks, layers, strict=True):
            x = block(x, past, 0)
        remembered = network.memory(x, None, history)
        return cls(network.gate(x, remembered)[0], layers, history)


@dataclass
class Branches:
    """Continuations behind the places `at_BN` of a trunk; `read` takes their next tokens."""

    network: ForgeNetwork
    trunk: Trunk
    at_BN: Tensor
    _own: list[KeyValues] = field(init=False)
    _length: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        b, n = self.at_BN.shape
        rows = torch.arange(b, device=self.at_BN.device).repeat_interleave(n)
        at = self.at_BN.flatten()
        self._rows, self._at = rows, at
        self._own = [KeyValues() for _ in self.network.blocks]
        self._state = {name: sums[rows, at] for name, sums in self.trunk.memory.items()}
        places = torch.arange(self.trunk.x_BTD.shape[1], device=at.device)
        self._seen_RT = places <= at[:, None]

    def read(self, tokens_RL: Tensor) -> Tensor:
        """The features of the next tokens of every branch, R x L x D."""
        network, (r, length) = self.network, tokens_RL.shape
        longest = self.trunk.x_BTD.shape[1] + self._length + length
        if longest > (window := network.settings.sw_window):
            raise ValueError(f"texts and branches of {longest} tokens, attention sees {window}")
        new = torch.arange(self._length, self._length + length, device=tokens_RL.device)
        positions = self._at[:, None, None] + 1 + new
        own = torch.arange(self._length + length, device=new.device) <= new[:, None]
        trunk = self._seen_RT[:, None].expand(-1, length, -1)
        mask = torch.cat([trunk, own.expand(r, -1, -1)], dim=2)[:, None]
        x = network.embedded(tokens_RL)
        layers = zip(network.blocks, self._own, self.trunk.layers, strict=True)
        for block, own_past, past in layers:
            assert isinstance(block, TransformerBlock)
            assert past.k is not None and past.v is not None
            q, k, v = block.attention.heads_of(block.norm_attention(x), positions)
            k, v = own_past.extend(k, v, network.settings.sw_window)
            k, v = torch.cat([past.k[self._rows], k], 2), torch.cat([past.v[self._rows], v], 2)
            x = x + block.attention.mix(q, k, v, mask)
            x = x + block.mlp(block.norm_mlp(x))
        self._length += length
        remembered = network.memory(x, self._state)
        return network.gate(x, remembered)[0]  # type: ignore[no-any-return]
