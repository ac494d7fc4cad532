"""Scores of given text: exact match, loss and bits per byte, in a single pass.

An answer is right when every token of it, and the end of the turn, is the likeliest one. Items are
put into batches by length alone, so that a score does not depend on what else is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import ProgressCallback, batches, no_progress
from agent_forge.model.network import ForgeNetwork

TOKENS_A_BATCH = 4096
CHUNK = 1024  # positions whose logits exist at once


@dataclass
class ItemScores:
    """The scores of each item, in their order."""

    right: list[bool] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)  # nats, summed over the asked tokens
    tokens: list[int] = field(default_factory=list)  # asked
    steps: list[float] = field(default_factory=list)  # recursion steps, mean over those tokens
    # Of generated answers:
    truncated: list[bool] = field(default_factory=list)  # without an end where the limit was
    empty: list[bool] = field(default_factory=list)  # nothing but blanks
    cut: list[bool] = field(default_factory=list)  # to a prompt longer than the model can read

    @property
    def accuracy(self) -> float:
        return sum(self.right) / len(self.right)

    @property
    def nats_per_token(self) -> float:
        return sum(self.loss) / sum(self.tokens)

    @property
    def mean_steps(self) -> float:
        return sum(s * n for s, n in zip(self.steps, self.tokens, strict=True)) / sum(self.tokens)

    def bits_per_byte(self, size: int) -> float:
        """With the size of the asked text in bytes."""
        return sum(self.loss) / math.log(2) / size


@torch.no_grad()
def measure(
    model: nn.Module,
    items: Sequence[TokenizedItem],
    *,
    threshold: float | None = None,
    batch_tokens: int = TOKENS_A_BATCH,
    progress: ProgressCallback = no_progress,
) -> ItemScores:
    """Score every item. `threshold` is that of halting; 1 takes all recursion steps."""
    if not items:
        raise ConfigError("there is nothing to measure: no items")
    model.eval()
    device = next(model.parameters()).device
    results: dict[int, tuple[bool, float, int, float]] = {}
    lengths, done = [len(item.ids) for item in items], 0
    for rows in batches(lengths, batch_tokens):
        tokens, asked = padded([items[i] for i in rows], device)
        right, loss, steps = _score(model, tokens, asked, threshold)
        owner = asked[:, 1:].nonzero()[:, 0]
        for place, row in enumerate(rows):
            mine = owner == place
            numbers = float(loss[mine].sum()), int(mine.sum()), float(steps[mine].float().mean())
            results[row] = (bool(right[mine].all()), *numbers)
        done += sum(lengths[i] for i in rows)
        progress(done, sum(lengths))
    columns: Any = zip(*(results[i] for i in range(len(items))), strict=True)
    return ItemScores(*map(list, columns))


def padded(items: Sequence[TokenizedItem], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows filled up behind their end, where nothing that is asked for can see it."""
    longest = max(len(item.ids) for item in items)
    tokens = torch.zeros(len(items), longest, dtype=torch.long)
    asked = torch.zeros(len(items), longest, dtype=torch.bool)
    for row, item in enumerate(items):
        tokens[row, : len(item.ids)] = torch.as_tensor(item.ids)
        asked[row, : len(item.ids)] = torch.as_tensor(item.asked)
    asked[:, 0] = False  # nothing comes before the first token
    if not asked.any(1).all():
        raise ConfigError("an item asks for no token")
    return tokens.to(device), asked.to(device)


def _score(
    model: nn.Module, tokens: Tensor, asked: Tensor, threshold: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For every asked token: whether it is the likeliest, its loss, and its recursion steps."""
    wanted = asked[:, 1:]
    targets = tokens[:, 1:][wanted]
    if not isinstance(model, ForgeNetwork):
        logits = model(tokens[:, :-1]).logits[wanted].float()
        loss = F.cross_entropy(logits, targets, reduction="none")
        return logits.argmax(-1) == targets, loss, torch.ones_like(targets)
    features = model.features(tokens[:, :-1]).x[wanted]
    answers, steps = model.decide(features, threshold=threshold)
    right, losses = [], []
    for y, target in zip(torch.split(answers, CHUNK), torch.split(targets, CHUNK), strict=True):
        logits = model.logits(model.hidden(y)).float()
        losses.append(F.cross_entropy(logits, target, reduction="none"))
        right.append(logits.argmax(-1) == target)
    return torch.cat(right), torch.cat(losses), steps
