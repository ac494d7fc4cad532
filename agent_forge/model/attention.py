"""The blocks of the backbone: RMSNorm, rotary positions, causal sliding-window attention, SwiGLU.

Shapes: B batch, T tokens, S tokens with the cached past, D width, H heads, K width of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6
ROPE_BASE = 100.0  # with the usual 10,000 a small model learns to copy and to sort far later


class RMSNorm(nn.Module):
    """x / rms(x) * gain, over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gain.shape, self.gain, EPSILON)


def rotate(x_BHTK: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair of channels by an angle that grows with the position (RoPE). Positions are of
    shape T, or B x 1 x T where rows have their own."""
    half = x_BHTK.shape[-1] // 2
    steps = torch.arange(half, device=x_BHTK.device, dtype=torch.float32)
    angles = positions[..., None].float() * ROPE_BASE ** (-steps / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x_BHTK[..., :half], x_BHTK[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


@dataclass(eq=False)
class KeyValues:
    """The keys and values of the past that attention may still see."""

    k: Tensor | None = None
    v: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Add new ones and return all that the newest tokens need."""
        if self.k is not None and self.v is not None:
            k, v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = k[:, :, -window:], v[:, :, -window:]
        return k, v


class Attention(nn.Module):
    """Causal attention over at most `window` past tokens, the token itself included."""

    def __init__(self, width: int, heads: int, window: int, head_width: int = 0) -> None:
        super().__init__()
        self.heads, self.window, inner = heads, window, heads * (head_width or width // heads)
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, width, bias=False)
        for linear in (self.q, self.k, self.v):
            nn.init.normal_(linear.weight, std=width**-0.5)
        nn.init.zeros_(self.out.weight)  # a block begins as the identity
        self.watched = 0  # rows of which to note the largest logit (for QK-clip); 0 = none
        self.largest_logit_H: Tensor | None = None

    def heads_of(self, x_BTD: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, B x H x T x K."""
        q, k, v = (
            linear(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        return rotate(q, positions), rotate(k, positions), v

    def forward(self, x_BTD: Tensor, past: KeyValues | None, start: int) -> Tensor:
        t = x_BTD.shape[1]
        positions = torch.arange(start, start + t, device=x_BTD.device)
        q, k, v = self.heads_of(x_BTD, positions)
        if past is not None:
            k, v = past.extend(k, v, self.window)
        mask = self._mask(t, k.shape[2], x_BTD.device)
        if self.watched and self.training:
            self._watch(q, k, mask)
        return self.mix(q, k, v, mask)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """What the queries find in the values; without a mask each sees all before it."""
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _mask(self, t: int, s: int, device: torch.device) -> Tensor | None:
        """Which of S keys each of T queries sees; None is the plain causal triangle."""
        if t == s <= self.window:
            return None
        query = torch.arange(s - t, s, device=device)[:, None]
        key = torch.arange(s, device=device)[None, :]
        return (key <= query) & (key > query - self.window)

    @torch.no_grad()
    def _watch(self, q: Tensor, k: Tensor, mask_TS: Tensor | None) -> None:
        """Note the largest logit of each head over evenly spaced rows."""
        t, s = q.shape[2], k.shape[2]
        rows = torch.linspace(0, t - 1, min(self.watched, t), device=q.device).long()
        logits = (q[:, :, rows] @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        seen = q.new_ones(t, s, dtype=torch.bool).tril(s - t) if mask_TS is None else mask_TS
        logits = logits.masked_fill(~seen[rows], float("-inf"))
        largest, before = logits.amax(dim=(0, 2, 3)), self.largest_logit_H
        self.largest_logit_H = largest if before is None else torch.maximum(largest, before)

    def begin_step(self) -> None:
        """Forget the logits of what came before."""
        self.largest_logit_H = None


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        for linear in (self.gate, self.up):
            nn.init.normal_(linear.weight, std=width**-0.5)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class TransformerBlock(nn.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int, window: int, head_width: int) -> None:
        super().__init__()
        self.norm_attention = RMSNorm(width)
        self.attention = Attention(width, heads, window, head_width)
        self.norm_mlp = RMSNorm(width)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Tensor, past: KeyValues | None, start: int) -> Tensor:
        x = x + self.attention(self.norm_attention(x), past, start)
        out: Tensor = x + self.mlp(self.norm_mlp(x))
        return out
