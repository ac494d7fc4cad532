"""Long-range memory: a low-rank moving average with a surprise-gated write, and its gate (MAG).

This is a linear memory, not the test-time-trained network of the Titans paper. Half-lives of its
channels are spread from 16 tokens to `capacity`. What is written is weighted by how much the token
differs from the recent past (surprise) and the distant past (novelty). No setting changes a shape.

Shapes: B batch, T tokens, M memory channels, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.model.attention import RMSNorm

SHORTEST_HALF_LIFE = 16.0
CHUNK = 64
MemoryState = dict[str, Tensor]  # what the memory carries from one call to the next
FLOOR = 0.05  # the least weight of a write: an expected token leaves a trace too


def decaying_sum(u_BTC: Tensor, decay_C: Tensor, carry_BC: Tensor) -> tuple[Tensor, Tensor]:
    """s_t = decay * s_(t-1) + u_t for all t at once; also the last s, to go on from."""
    # Within a chunk it is a product with a triangle of powers; the carry between them is a loop.
    b, t, c = u_BTC.shape
    pad = -t % CHUNK if t > CHUNK else 0
    size = min(t, CHUNK)
    u = F.pad(u_BTC, (0, 0, 0, pad)).view(b, -1, size, c)
    steps = torch.arange(size, device=u.device)
    age = (steps[:, None] - steps[None, :]).clamp(min=0)
    powers_CLL = (decay_C[:, None, None] ** age).tril()
    inside = torch.einsum("clk,bnkc->bnlc", powers_CLL, u)
    fading_LC = decay_C ** (steps[:, None] + 1)
    chunks, carry = [], carry_BC
    for n in range(u.shape[1]):
        chunk = inside[:, n] + fading_LC * carry[:, None]
        chunks.append(chunk)
        carry = chunk[:, -1]
    s = torch.stack(chunks, dim=1).reshape(b, -1, c)[:, :t]
    return s, s[:, -1]


class NeuralMemory(nn.Module):
    """Reads what earlier tokens left; every token sees only itself and its past."""

    def __init__(
        self, width: int, channels: int, capacity: int, surprise_weight: float, novelty: float
    ) -> None:
        super().__init__()
        self.down = nn.Linear(width, channels, bias=False)
        self.up = nn.Linear(channels, width, bias=False)
        self.norm = RMSNorm(width)
        self.surprise_weight, self.novelty_weight = surprise_weight, novelty
        nn.init.normal_(self.down.weight, std=width**-0.5)
        nn.init.normal_(self.up.weight, std=channels**-0.5)
        ratio = max(float(capacity), SHORTEST_HALF_LIFE) / SHORTEST_HALF_LIFE
        steps = [i / max(1, channels - 1) for i in range(channels)]
        # Plain numbers, not buffers: loaders that build a network without memory lose buffers.
        self.half_lives = [SHORTEST_HALF_LIFE * ratio**step for step in steps]

    def forward(
        self,
        x_BTD: Tensor,
        state: MemoryState | None = None,
        history: MemoryState | None = None,
    ) -> Tensor:
        """What is read at every token; `history` is filled with the state after each, B x T x M."""
        v = self.down(x_BTD)
        with torch.autocast(v.device.type, enabled=False):  # bf16 has no number between 0.996 and 1
            read = self._read(v.float(), {} if state is None else state, history).to(v.dtype)
        return self.norm(self.up(read))  # type: ignore[no-any-return]

    def _read(self, v: Tensor, state: MemoryState, history: MemoryState | None) -> Tensor:
        """What the memory holds at each token."""
        decay = self.decays(v)

        def summed(name: str, u: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
            """The decaying sums of u, going on from the state, and the one before them."""
            before = state.get(name, torch.zeros_like(u[:, 0]))
            sums, state[name] = decaying_sum(u, decay, before)
            if history is not None:
                history[name] = sums
            return sums, before

        def difference(name: str, decay_M: Tensor) -> Tensor:
            """How far a token is from the mean of those before it: 0 alike, 1 opposed or new."""
            own = v.detach()
            sums, before = summed(name, own, decay_M.expand_as(decay))
            past = torch.cat([before[:, None], sums[:, :-1]], dim=1)
            return ((1 - F.cosine_similarity(own, past, dim=-1, eps=1e-6)) / 2).unsqueeze(-1)

        surprise = self.surprise_weight * difference("recent", decay[:1])
        novelty = self.novelty_weight * difference("distant", decay[-1:])
        total = self.surprise_weight + self.novelty_weight
        weight = FLOOR + (1 - FLOOR) * (surprise + novelty) / total
        written, _ = summed("written", weight * v, decay)
        return written / summed("total", weight.expand_as(v), decay)[0]

    def decays(self, like: Tensor) -> Tensor:
        """What is left of each channel after one token, from the quickest to the slowest."""
        half_lives = torch.tensor(self.half_lives, device=like.device)
        return torch.exp2(-1 / half_lives).to(like.dtype)


class MemoryGate(nn.Module):
    """MAG: a learned convex blend of the backbone's output and the memory, channel by channel."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.inner = nn.Linear(2 * width, hidden)
        self.outer = nn.Linear(hidden, width)
        nn.init.normal_(self.inner.weight, std=(2 * width) ** -0.5)
        nn.init.zeros_(self.inner.bias)
        nn.init.zeros_(self.outer.weight)
        nn.init.constant_(self.outer.bias, 2.0)  # begins at 0.88 of the backbone

    def forward(self, y: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """The blend, and the entropy of the gate at each position, in nats (at most ln 2)."""
        y = self.norm(y)
        logit = self.outer(F.silu(self.inner(torch.cat([y, m], dim=-1))))
        g = torch.sigmoid(logit)
        entropy = (F.softplus(logit) - logit * g).mean(-1)  # its gradient stays finite at 0 and 1
        return g * y + (1 - g) * m, entropy
