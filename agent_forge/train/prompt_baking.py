"""Baking a prompt into weights: the model answers without it as it did with it.

After Prompt Baking (arXiv 2409.13697): the frozen model, given the prompt, is the teacher of its
own copy without it; they are compared token by token over answers that one of them has sampled.
`forward` KL(teacher || student) is for the teacher's samples, `reverse` KL(student || teacher) for
the student's. A row holds one question with its answer, so that the prompt stands before each.

The prompt is a beginning that all rows share, or, where a chat template weaves it into the
conversation, each row says what the teacher is given (`Question`, `batch_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.data.loader import IGNORE
from agent_forge.errors import ConfigError
from agent_forge.infer.generate import ProgressCallback, SamplingSettings, generate, no_progress
from agent_forge.model.loss import CHUNK, LossOutput, head_of, states_of, vocabulary_of
from agent_forge.train.trainer import Batch

Direction = Literal["forward", "reverse"]
Ids = Sequence[int]


class Question(NamedTuple):
    """A question as the student is given it, and as the teacher is: with the prompt."""

    asked: Ids
    told: Ids


class PromptBakingLoss:
    """The KL between the prompted teacher and the student, a mean over the tokens of the answers.
    `prompt` stands before every row; None: the rows, of `batch_of`, say what the teacher is given.
    `top_k` looks at so many tokens alone, the likeliest for the one that sampled; 0: all."""

    def __init__(
        self,
        teacher: nn.Module,
        prompt: Ids | None,
        direction: Direction = "forward",
        top_k: int = 0,
    ) -> None:
        if prompt is not None and not prompt:
            raise ConfigError("there is no prompt to bake")
        self.teacher, self.direction, self.top_k = teacher.eval(), direction, top_k
        self.prompt = torch.tensor(list(prompt or ()), dtype=torch.long)
        teacher.requires_grad_(False)

    def __call__(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        if vocabulary_of(self.teacher) != vocabulary_of(model):
            raise ConfigError("teacher and student have different vocabularies")
        tokens, targets, *told = batch
        asked = targets != IGNORE
        given, wanted = told or self._prompted(tokens, targets)
        self.teacher.to(tokens.device)
        with torch.no_grad():
            taught = states_of(self.teacher, given)[wanted != IGNORE]
        states = states_of(model, tokens)[asked], taught
        pairs = zip(*(torch.split(s, CHUNK) for s in states), strict=True)
        parts = [checkpoint(self._distance, model, *pair, use_reentrant=False) for pair in pairs]
        count = int(asked.sum())
        total = torch.cat(parts).sum() / max(1, count)
        value = float(total.detach())
        return LossOutput(total, count, {"loss": value, "divergence": value}, states[0])

    def _prompted(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        prompts = self.prompt.to(tokens.device).expand(len(tokens), -1)
        nothing = torch.full_like(prompts, IGNORE)
        return torch.cat([prompts, tokens], 1), torch.cat([nothing, targets], 1)

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


Answered = tuple[Question, list[int]]  # with the end of the answer, if it has one


def answers_to(
    network: nn.Module,
    questions: Sequence[Question],
    sampling: SamplingSettings,
    *,
    prompted: bool,
    samples: int = 1,
    progress: ProgressCallback = no_progress,
) -> list[Answered]:
    """What a network samples, `samples` answers to each question, with or without the prompt."""
    given = [question.told if prompted else question.asked for question in questions]
    found = generate(network, given, sampling, samples=samples, progress=progress)
    if not any(text.tokens for text in found):
        raise ConfigError("no answer was sampled: every one was empty")
    # That an answer ends is a part of it; which token ends it is not compared.
    ends = [sorted(sampling.stop_tokens)[:1] if t.stopped_by == "token" else [] for t in found]
    of = [question for question in questions for _ in range(samples)]
    rows = zip(of, found, ends, strict=True)
    return [(question, [*text.tokens, *end]) for question, text, end in rows]


def batch_of(rows: Sequence[Answered]) -> Batch:
    """Tokens and targets of the student, then those of the teacher, whose rows are longer."""
    student = _padded([(question.asked, answer) for question, answer in rows])
    return *student, *_padded([(question.told, answer) for question, answer in rows])


def _padded(pairs: Sequence[tuple[Ids, list[int]]]) -> tuple[Tensor, Tensor]:
    """Rows of a question with its answer, which is asked for."""
    return padded([([*q, *a], [False] * len(q) + [True] * len(a)) for q, a in pairs])


def padded(rows: Sequence[tuple[Ids, Sequence[bool]]]) -> tuple[Tensor, Tensor]:
    """Rows of tokens, filled up, and the next tokens as far as they are asked for."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    targets = torch.full_like(tokens, IGNORE)
    for row, (ids, asked) in enumerate(rows):
        all_of_it = torch.tensor(ids)
        tokens[row, : len(ids)] = all_of_it
        targets[row, : len(ids) - 1] = all_of_it[1:].where(torch.tensor(asked[1:]), IGNORE)
    return tokens, targets


@torch.no_grad()
def mean_kl(
    teacher: nn.Module, student: nn.Module, batches: Sequence[Batch], prompt: Ids | None = None
) -> float:
    """The KL to the prompted teacher in nats a token of the answers."""
    loss = PromptBakingLoss(teacher, prompt)
    outputs = [loss(student, batch, torch.Generator()) for batch in batches]
    count = sum(output.count for output in outputs)
    return sum(float(output.total) * output.count for output in outputs) / max(1, count)
