"""Baking a prompt into weights: the model answers without it as it did with it.

After Prompt Baking (arXiv 2409.13697): the frozen model, given the prompt, is the teacher of its
own copy without it; they are compared token by token over answers that one of them has sampled.
`forward` KL(teacher || student) is for the teacher's samples, `reverse` KL(student || teacher) for
the student's. `kl_left` is what is left of the distance, 1 before any baking. A row holds one
question with its answer, so that the prompt stands before each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.data.loader import IGNORE
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.model.loss import CHUNK, LossOutput, head_of, states_of, vocabulary_of
from agent_forge.train.trainer import Batch

Direction = Literal["forward", "reverse"]
Ids = Sequence[int]


class PromptBakingLoss:
    """The KL between the prompted teacher and the student, a mean over the tokens of the answers.
    `top_k` looks at so many tokens alone, the likeliest for the one that sampled; 0: all."""

    def __init__(
        self, teacher: nn.Module, prompt: Ids, direction: Direction = "forward", top_k: int = 0
    ) -> None:
        if not prompt:
            raise ConfigError("there is no prompt to bake")
        self.teacher, self.direction, self.top_k = teacher.eval(), direction, top_k
        self.prompt = torch.tensor(list(prompt))
        teacher.requires_grad_(False)

    def __call__(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        if vocabulary_of(self.teacher) != vocabulary_of(model):
            raise ConfigError("teacher and student have different vocabularies")
        tokens, targets = batch
        asked = (targets != IGNORE).flatten()
        prompts = self.prompt.to(tokens.device).expand(len(tokens), -1)
        self.teacher.to(tokens.device)
        with torch.no_grad():
            told = states_of(self.teacher, torch.cat([prompts, tokens], 1))[:, len(self.prompt) :]
        states = [s.flatten(0, 1)[asked] for s in (states_of(model, tokens), told)]
        pairs = zip(*(torch.split(s, CHUNK) for s in states), strict=True)
        parts = [checkpoint(self._distance, model, *pair, use_reentrant=False) for pair in pairs]
        count = int(asked.sum())
        total = torch.cat(parts).sum() / max(1, count)
        value = float(total.detach())
        return LossOutput(total, count, {"loss": value, "divergence": value}, states[0])

    def _distance(self, model: nn.Module, student: Tensor, teacher: Tensor) -> Tensor:
        """The KL of each position."""
        own = head_of(model)(student).float().log_softmax(-1)
        with torch.no_grad():
            wanted = head_of(self.teacher)(teacher).float().log_softmax(-1)
        leading, other = (wanted, own) if self.direction == "forward" else (own, wanted)
        if self.top_k and self.top_k < own.shape[-1]:
            chosen = leading.detach().topk(self.top_k, dim=-1).indices
            leading, other = (x.gather(-1, chosen).log_softmax(-1) for x in (leading, other))
        return (leading.exp() * (leading - other)).sum(-1)


def sampled_answers(
    network: nn.Module, questions: Sequence[Ids], prompt: Ids, sampling: SamplingSettings, rows: int
) -> list[Batch]:
    """Batches of `rows` questions with the answers that a network samples when the prompt stands
    before them: the teacher with it, the student with an empty one. The prompt is not in them."""
    found = generate(network, [[*prompt, *question] for question in questions], sampling)
    pairs = [(q, text.tokens) for q, text in zip(questions, found, strict=True) if text.tokens]
    if not pairs:
        raise ConfigError("no answer was sampled: every one was empty")
    batches: list[Batch] = []
    for first in range(0, len(pairs), rows):
        own = pairs[first : first + rows]
        longest = max(len(question) + len(answer) for question, answer in own)
        tokens = torch.zeros(len(own), longest, dtype=torch.long)
        targets = torch.full_like(tokens, IGNORE)
        for row, (question, answer) in enumerate(own):
            start, end = len(question), len(question) + len(answer)
            tokens[row, :end] = torch.tensor([*question, *answer])
            targets[row, start - 1 : end - 1] = torch.tensor(answer)
        batches.append((tokens, targets))
    return batches


@torch.no_grad()
def kl_left(teacher: nn.Module, student: nn.Module, prompt: Ids, batches: Sequence[Batch]) -> float:
    """The KL to the prompted teacher that is left, as a share of that of the teacher itself when it
    has no prompt."""
    loss = PromptBakingLoss(teacher, prompt)
    sums = []
    for model in (student, teacher):
        outputs = [loss(model, batch, torch.Generator()) for batch in batches]
        count = sum(output.count for output in outputs)
        sums.append(sum(float(output.total) * output.count for output in outputs) / max(1, count))
    return sums[0] / sums[1] if sums[1] else 0.0
