"""One step of healing: the student with a low-rank change, the experts' networks, and the loss."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.errors import ConfigError
from agent_forge.evals import likelihood
from agent_forge.evals.likelihood import Reading, padded
from agent_forge.model.loss import LossOutput
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.weights import BEFORE_LAYERS, HEAD
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast, divergence
from agent_forge.phases.phase2_evomerge.checks import HEAL
from agent_forge.phases.phase2_evomerge.evaluator import PLAIN, recursed_logits
from agent_forge.phases.phase2_evomerge.lessons import Lesson, Lessons
from agent_forge.phases.phase2_evomerge.loop import EvolutionLoop
from agent_forge.search.operators import generator
from agent_forge.store.checkpoint import Checkpoint
from agent_forge.train.config import TrainSettings
from agent_forge.train.trainer import Batch, Trainer
from agent_forge.train.weight_transforms import LowRankBranches

WARMUP_STEPS, FINAL_RATE = 5, 0.1
ROOM = 3  # times its size that has to be free for one more network


class ExpertNetworks:
    """The networks of the experts; where memory is short, fewer of them are filled in turn."""

    def __init__(self, loop: EvolutionLoop, lessons: Sequence[Lesson]) -> None:
        self._keys, self._weights = parent_keys(loop), loop.weights
        loop.evaluator.fill(self._keys[0])
        model, self._spare = loop.evaluator.model, list[nn.Module]()
        size = sum(parameter.nbytes for parameter in model.parameters())
        for _ in {lesson.expert for lesson in lessons}:
            if not self._spare or psutil.virtual_memory().available > ROOM * size:
                self._spare.append(copy.deepcopy(model).requires_grad_(False).eval())
        self._filled: dict[int, nn.Module] = {}

    def of(self, number: int) -> nn.Module:
        if number not in self._filled:
            oldest = next(iter(self._filled), number)
            network = self._spare.pop() if self._spare else self._filled.pop(oldest)
            self._weights.fill(network, self._keys[number])
            self._filled[number] = network
        return self._filled[number]


def parent_keys(loop: EvolutionLoop) -> list[str]:
    return [c.key for c in loop.search.candidates.values() if c.kind == "parent"]


def asked_logits(model: nn.Module, tokens: Tensor, asked: Tensor, reading: Reading) -> Tensor:
    """The logits from which the asked tokens are predicted."""
    wanted = asked[:, 1:]
    if isinstance(model, ForgeNetwork):
        return recursed_logits(model, tokens[:, :-1], wanted)
    with likelihood.selecting(model, reading):
        return likelihood.asked_logits(model, tokens[:, :-1], wanted, reading).float()


class Teaching:
    """The student with its optimizer, lessons and experts; `state` is what a checkpoint holds."""

    def __init__(
        self, loop: EvolutionLoop, lessons: Lessons, experts: ExpertNetworks, total: int
    ) -> None:
        s, self.student = loop.settings, loop.evaluator.model.requires_grad_(False).eval()
        self.lessons, self.experts, self.expert = lessons, experts, self.student
        self._reading = loop.evaluator.model_under_test.reading or PLAIN
        seed = int(generator(loop.inputs.seed, HEAL, "start").integers(2**62))
        draws = torch.Generator().manual_seed(seed)
        self.branches = LowRankBranches(linear_layers(self.student), s.heal_rank, draws)
        config = MuGrokConfig(fallback_lr=s.heal_rate, qk_clip_threshold=0.0)
        how = TrainSettings(
            precision="bf16" if s.mixed_precision else "fp32",
            warmup_steps=min(WARMUP_STEPS, total),
            warmdown_share=1.0,
            final_rate=FINAL_RATE,
        )
        student = self.branches, MuonGrokfast(self.branches, config), self._loss, how
        device = str(next(self.student.parameters()).device)
        self.trainer = Trainer(*student, total=total, generator=draws, device=device)
        self._parts: dict[str, Any] = {**self.trainer.parts, "lessons": lessons}

    def step(self, step: int) -> str:
        """One update; returns what was taught and how far away it was."""
        began, lesson = time.perf_counter(), self.lessons.draw(step)
        batch = padded(self.lessons.next_items(lesson), torch.device("cpu"))
        self.expert = self.experts.of(lesson.expert)
        values = self.trainer.step(step, batch)
        self.lessons.learned(lesson, values["gap"], time.perf_counter() - began)
        return f"{lesson.name}, KL {values['loss']:.3f}"

    def _loss(self, _: nn.Module, batch: Batch, generator: torch.Generator) -> LossOutput:
        tokens, asked = batch
        targets = tokens[:, 1:][asked[:, 1:]]
        own = asked_logits(self.student, tokens, asked, self._reading)
        with torch.no_grad():
            taught = asked_logits(self.expert, tokens, asked, self._reading)
            gap = F.cross_entropy(own, targets) - F.cross_entropy(taught, targets)
        total = divergence(own, taught).mean()
        values = {"loss": float(total.detach()), "gap": float(gap)}
        return LossOutput(total, len(targets), values)

    def state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load(self, checkpoint: Checkpoint) -> int:
        """Go back to a checkpoint; returns its step."""
        for name, part in self._parts.items():
            part.load_state_dict(checkpoint.state["parts"][name])
        return checkpoint.step


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a network between embeddings and head, by name."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if not HEAD.search(f"{name}.weight") and not BEFORE_LAYERS.search(f"{name}.weight")
    }
    if not found:
        raise ConfigError("heal: the network has no linear layers", hint="do without: --heal 0")
    return found
