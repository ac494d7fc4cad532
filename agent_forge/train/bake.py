"""Bake: a copy of a network is trained to answer without a prompt as the network does with it.

The network, given the prompt, samples answers once (forward), or the copy samples its own, again
and again (reverse); either way the KL of prompt_baking.py is lowered on them. The result is an
ordinary network: baking another prompt into it stacks the two.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import nn

from agent_forge.errors import ConfigError, Diverged, NotFinite
from agent_forge.infer.generate import SamplingSettings
from agent_forge.model.loss import LossOutput, vocabulary_of
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.train.config import TrainSettings
from agent_forge.train.lora import add_branches, fold
from agent_forge.train.prompt_baking import (
    Answered,
    Direction,
    Ids,
    PromptBakingLoss,
    Question,
    answers_to,
    batch_of,
)
from agent_forge.train.trainer import Batch, Trainer

STRONGEST = 1.5
RATE, RATE_OF_ALL = 0.002, 0.0005  # of AdamW with LoRA; of Muon and AdamW for all weights
LOGITS_AT_ONCE = 1 << 26  # 256 MB in single precision
Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


def no_progress(what: str, done: int, total: int) -> None:
    """A progress callback that does nothing."""


@dataclass(frozen=True)
class BakeSettings:
    """How a prompt is baked."""

    direction: Direction = "forward"
    top_k: int = 0  # tokens that are compared, the likeliest ones; 0 = all
    lora_rank: int = 16  # 0 = all weights
    steps: int = 300
    rate: float = 0.0  # 0 = RATE, or RATE_OF_ALL without LoRA
    rows: int = 16  # answers of a step
    samples: int = 8  # answers to each question, if the teacher gives them
    renew_every: int = 20  # steps, if the student gives them
    answer_tokens: int = 48  # at most
    temperature: float = 1.0
    strength: float = 1.0  # of the change: 0.5 is half-baked
    seed: int = 0

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "reverse"):
            raise ConfigError(f"direction {self.direction!r} is neither forward nor reverse")
        if not 0 <= self.strength <= STRONGEST:
            raise ConfigError(f"strength {self.strength:g} is not from 0 to {STRONGEST}")
        if self.lora_rank < 0 or self.top_k < 0 or not self.rate >= 0:
            raise ConfigError("lora_rank, top_k and rate are at least 0")
        if min(self.steps, self.rows, self.samples, self.renew_every) < 1:
            raise ConfigError("steps, rows, samples and renew_every are at least 1")

    @property
    def learning_rate(self) -> float:
        return self.rate or (RATE if self.lora_rank else RATE_OF_ALL)

    def sampling(self, stop_tokens: frozenset[int], seed: int = 0) -> SamplingSettings:
        """How answers are drawn; another `seed` draws others."""
        return SamplingSettings(
            self.answer_tokens,
            self.temperature,
            seed=(self.seed + seed) % 2**63,
            stop_tokens=stop_tokens,
        )


def behind_prompt(prompt: Ids, questions: Sequence[Ids]) -> list[Question]:
    """Questions of which the teacher is given the same ones behind the prompt."""
    if not prompt:
        raise ConfigError("there is no prompt to bake")
    return [Question(question, [*prompt, *question]) for question in questions]


def bake(
    teacher: nn.Module,
    questions: Sequence[Question],
    settings: BakeSettings,
    *,
    stop_tokens: frozenset[int] = frozenset(),
    progress: Progress = no_progress,
) -> nn.Module:
    """A copy of the teacher that was trained to answer these questions, without the prompt, as the
    teacher does with it. The teacher stays as it is, but for gradients, which it no longer has."""
    if not questions:
        raise ConfigError("there are no questions to bake a prompt with")
    student = copy.deepcopy(teacher).eval().requires_grad_(True)
    rank, draws = settings.lora_rank, torch.Generator().manual_seed(settings.seed)
    branches = add_branches(student, rank, draws) if rank else None
    trained = branches or student
    trainer = _trainer(trained, student, teacher, questions, settings, draws)
    answers = _Answers(teacher, student, questions, settings, stop_tokens, progress)
    for step in range(1, settings.steps + 1):
        try:
            trainer.step(step, answers.next_batch())
        except Diverged as error:
            raise NotFinite(f"baking diverged: {error}", hint="bake at a lower rate") from error
        progress("training", step, settings.steps)
    if branches:
        fold(student, branches)
    with torch.no_grad():
        for weight, start in zip(student.parameters(), teacher.parameters(), strict=True):
            weight.copy_(start.lerp(weight, settings.strength))
    return student.eval().requires_grad_(False)


def _trainer(
    trained: nn.Module,
    student: nn.Module,
    teacher: nn.Module,
    questions: Sequence[Question],
    settings: BakeSettings,
    draws: torch.Generator,
) -> Trainer:
    """What trains the student, or the branches beside it, with few enough logits at once."""
    rate = settings.learning_rate
    optimizer = MuGrokConfig(
        muon_lr=rate, fallback_lr=rate, weight_decay=0.0, qk_clip_threshold=0.0
    )
    longest = max(len(question.told) for question in questions) + settings.answer_tokens
    pieces = -(-settings.rows * longest * vocabulary_of(teacher) // LOGITS_AT_ONCE)
    how = TrainSettings(
        accumulate=min(settings.rows, pieces),
        warmup_steps=min(10, settings.steps),
        warmdown_share=0.7,
        precision="fp32",
    )
    loss = PromptBakingLoss(teacher, None, settings.direction, settings.top_k)

    def of_student(_: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        return loss(student.eval(), batch, generator)  # without dropout, as the teacher

    optimizing = trained, MuonGrokfast(trained, optimizer), of_student, how
    return Trainer(*optimizing, total=settings.steps, generator=draws)


class _Answers:
    """Answers to learn from: the teacher's, again and again in another order, or new ones of the
    student whenever the last are used up."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        questions: Sequence[Question],
        settings: BakeSettings,
        stop_tokens: frozenset[int],
        progress: Progress,
    ) -> None:
        self._student, self._questions, self._settings = student, questions, settings
        self._stops, self._order, self._drawn = stop_tokens, Random(settings.seed), 0
        self._waiting: list[Answered] = []
        self._of_teacher: list[Answered] = []
        if settings.direction == "forward":
            self._of_teacher = answers_to(
                teacher,
                questions,
                settings.sampling(stop_tokens),
                prompted=True,
                samples=settings.samples,
                progress=lambda done, total: progress("sampling", done, total),
            )

    def next_batch(self) -> Batch:
        rows = self._settings.rows
        while len(self._waiting) < rows:
            self._waiting += self._more()
        batch, self._waiting = batch_of(self._waiting[:rows]), self._waiting[rows:]
        return batch

    def _more(self) -> list[Answered]:
        if self._of_teacher:
            return self._order.sample(self._of_teacher, len(self._of_teacher))
        self._drawn += 1
        count = self._settings.rows * self._settings.renew_every
        asked = self._order.sample(self._questions, min(count, len(self._questions)))
        sampling = self._settings.sampling(self._stops, self._drawn)
        several = -(-count // len(asked))
        found = answers_to(self._student, asked, sampling, prompted=False, samples=several)
        return self._order.sample(found, len(found))
