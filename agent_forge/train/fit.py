"""The training loop: batches in, updates out, with evaluation, early stop and divergence handled.

The steps of a phase context bring checkpoints, exact resume and the clean stop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.contract.phase import PhaseContext, Stateful
from agent_forge.data.loader import IGNORE, BatchLoader, Schedule
from agent_forge.errors import ConfigError, Diverged
from agent_forge.model import loss as losses
from agent_forge.model.loss import LossOutput, head_of, language_loss, vocabulary_of
from agent_forge.optim.muon import MuonGrokfast, divergence
from agent_forge.train.config import TrainSettings
from agent_forge.train.corpus import Corpus
from agent_forge.train.trainer import Batch, LossFunction, Trainer

EVALUATIONS = 10  # of a stage


class Evaluation(Stateful, Protocol):
    """What looks at a model now and then while it is trained, and may end that."""

    every_steps: int

    @property
    def ended(self) -> bool: ...
    def update(self) -> float: ...


@dataclass
class EarlyStop:
    """Evaluates the model now and then; training stops after `patience` times without a gain."""

    evaluate: Callable[[], float]  # returns a loss: lower is better
    every_steps: int
    patience: int = 0
    min_gain: float = 0.0
    best: float | None = None
    without_gain: int = 0

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ValueError(f"an evaluation every {self.every_steps} steps")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "without_gain": self.without_gain}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.without_gain = state["best"], state["without_gain"]

    def update(self) -> float:
        """Evaluate, and remember whether it is better than before; returns the loss."""
        value = self.evaluate()
        if self.best is None or value < self.best - self.min_gain:
            self.best, self.without_gain = value, 0
        else:
            self.without_gain += 1
        return value

    @property
    def ended(self) -> bool:
        return 0 < self.patience <= self.without_gain


def fit(
    ctx: PhaseContext,
    trainer: Trainer,
    next_batch: Callable[[int], Batch],
    *,
    stage: str = "main",
    parts: dict[str, Stateful] | None = None,
    evaluation: Evaluation | None = None,
) -> None:
    """Train for `trainer.total` steps, or until the evaluation ends it."""
    # What `next_batch(step)` depends on is in `parts` or in a generator of the context.
    state = {**trainer.parts, **(parts or {})}
    if evaluation:
        state["evaluations"] = evaluation
    for step in ctx.steps(trainer.total, state, stage, rolls_back=True):
        try:
            values = trainer.step(step, next_batch(step))
        except Diverged as error:
            factor = trainer.factor
            ctx.roll_back(str(error))
            trainer.halve_rate(factor)
            continue
        ctx.log(step, {f"{stage}/train/{name}": value for name, value in values.items()})
        if evaluation and step % evaluation.every_steps == 0:
            ctx.log(step, {f"{stage}/train/evaluation_loss": evaluation.update()})
            if evaluation.ended:
                break


def fit_corpus(
    ctx: PhaseContext,
    model: nn.Module,
    corpus: Corpus,
    curriculum: Schedule,
    *,
    stage: str,
    steps: int,
    settings: TrainSettings,
    seed: int,
    loss: LossFunction = language_loss,
    evaluate: Callable[[], float] | None = None,  # returns a loss on unseen items
    evaluation: Evaluation | None = None,  # looks at the model instead of that
) -> None:
    """Train a model on a corpus, mixed as the curriculum says, in the order that `seed` gives."""
    size = {"batch": corpus.settings.rows, "length": corpus.settings.row_tokens}
    size["vocab_size"] = vocabulary_of(model)
    loader = BatchLoader(corpus.sources, curriculum.stages[0].mix, seed=seed, **size)
    optimizer, draws = MuonGrokfast(model, settings.optimizer), ctx.generator(f"loss_{stage}")
    of_stage: dict[str, Any] = {"device": ctx.device, "decisions": ctx.decisions.of(stage)}
    trainer = Trainer(model, optimizer, loss, settings, total=steps, generator=draws, **of_stage)

    def next_batch(step: int) -> Batch:
        now = curriculum.at(step - 1, steps)
        if step > 1 and now is not curriculum.at(step - 2, steps):
            trainer.expect_other_losses()
        loader.use(now.mix, now.length)
        return loader.next_batch()

    if evaluate and not evaluation:
        every = max(1, steps // EVALUATIONS)
        evaluation = EarlyStop(evaluate, every, settings.patience, settings.min_gain)
    parts: dict[str, Stateful] = {"loader": loader}
    fit(ctx, trainer, next_batch, stage=stage, parts=parts, evaluation=evaluation)


class DistillationLoss:
    """(1 - share) * language loss + share * temperature^2 * KL(teacher || student)."""

    def __init__(self, teacher: nn.Module, *, share: float = 0.5, temperature: float = 1.0) -> None:
        if not 0 <= share <= 1 or temperature <= 0:
            raise ValueError("share is from 0 to 1, temperature above 0")
        self.teacher, self.share, self.temperature = teacher.eval(), share, temperature
        teacher.requires_grad_(False)

    def __call__(self, model: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        teacher_size, size = map(vocabulary_of, (self.teacher, model))
        if teacher_size != size:
            raise ConfigError(f"the teacher has {teacher_size} tokens, the student {size}")
        tokens, targets = batch
        self.teacher.to(tokens.device)
        loss = language_loss(model, batch, generator)
        assert loss.states is not None
        with torch.no_grad():
            states = losses.states_of(self.teacher, tokens).flatten(0, 1)
        taught = states[(targets != IGNORE).flatten()]
        cut = (torch.split(states, losses.CHUNK) for states in (loss.states, taught))
        pairs = zip(*cut, strict=True)
        parts = [checkpoint(self._divergence, model, *pair, use_reentrant=False) for pair in pairs]
        distance = torch.cat(parts).sum() / max(1, loss.count)
        loss.total = (1 - self.share) * loss.total + self.share * distance
        loss.values["divergence"] = float(distance.detach())
        return loss

    def _divergence(self, model: nn.Module, student: Tensor, teacher: Tensor) -> Tensor:
        own, taught = head_of(model)(student), head_of(self.teacher)(teacher)
        return self.temperature**2 * divergence(own / self.temperature, taught / self.temperature)
