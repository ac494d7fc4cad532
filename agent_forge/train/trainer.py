"""Trainer: one optimizer step at a time, in pieces that fit into memory, with the rate's schedule.

A step is all or nothing: a loss or gradient that is not finite, or a loss that has run away, raises
`Diverged` before any weight changes. Out of memory cuts the batch into more pieces, and at last
moves to the CPU; either is recorded under its step before it takes effect, so that a resumed run
does the same. Pieces are weighed by the tokens that they teach: the cut only changes the rounding.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from agent_forge.contract.replay import DecisionLog
from agent_forge.errors import Diverged, NotEnough, NotFinite
from agent_forge.model.loss import LossOutput
from agent_forge.train.config import TrainSettings, rate_factor

log = logging.getLogger(__name__)
Batch = Sequence[Tensor]  # tensors of equal length along the first dimension
RECENT = 100  # steps whose losses are remembered
SMALLEST_FACTOR = 1 / 32
NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
LossFunction = Callable[[Any, Batch, torch.Generator], LossOutput]


def bf16_is_faster(device: str) -> bool:
    """True if this hardware multiplies bf16 matrices faster than fp32 ones."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_capability()[0] >= 8
    return device == "cpu" and bool(torch.cpu._is_amx_tile_supported())


@dataclass(eq=False, repr=False)
class Trainer:
    """A network, its optimizer and a loss. `parts` is all that a checkpoint must hold."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    settings: TrainSettings
    _: KW_ONLY
    total: int
    generator: torch.Generator
    device: str = "cpu"
    decisions: DecisionLog = field(default_factory=DecisionLog)
    factor: float = field(init=False, default=1.0)  # of the rate; halved at each divergence
    recent: list[float] = field(init=False, default_factory=list)  # losses of the last steps
    steps_seen: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.total < 1:
            raise ValueError(f"training of {self.total} steps")
        if (rising := self.settings.warmup_steps) > self.total:
            log.warning("the rate rises for %d steps, of %d", rising, self.total)
        for group in self.optimizer.param_groups:
            group.setdefault("full_lr", group["lr"])
        for module in self.model.modules() if self.settings.gradient_checkpointing else ():
            if hasattr(module, "checkpointing"):
                setattr(module, "checkpointing", True)  # noqa: B010 - not of every module

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "trainer": self}

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "recent": [*self.recent], "steps_seen": self.steps_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.recent = state["factor"], list(state["recent"])
        self.steps_seen = state["steps_seen"]

    def step(self, step: int, batch: Batch) -> dict[str, float]:
        """One update (steps count from 1); returns what was measured."""
        if len({len(tensor) for tensor in batch}) != 1 or not len(batch[0]):
            raise ValueError(f"a batch of lengths {[len(t) for t in batch]}: one length, not 0")
        self.model.train()
        begin = self.generator.get_state()
        while True:
            try:
                values = self._gradients(batch, self._apply_decisions(step))
                break
            except (RuntimeError, MemoryError) as error:
                by_type = isinstance(error, torch.OutOfMemoryError | MemoryError)
                if not by_type and not any(sign in str(error).lower() for sign in NO_MEMORY):
                    raise
                self._use_less(step, len(batch[0]))
                self.generator.set_state(begin)
        if not math.isfinite(loss := values["loss"]):
            raise Diverged(f"the loss became {loss} at step {step}")
        if self.steps_seen >= 20 and loss > 2 * (mean := self.mean_loss) + 1:
            rise = f"{loss:.3g} after a mean of {mean:.3g}"
            raise Diverged(f"the loss ran away at step {step}: {rise}")
        rate = self.factor * rate_factor(step, self.total, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = group["full_lr"] * rate
        try:
            if any(p.grad is not None for p in self.model.parameters()):  # else nothing was learned
                self.optimizer.step()
        except NotFinite as error:
            raise Diverged(f"step {step}: {error}") from error
        self._notify_modules("end_step")
        self.steps_seen += 1
        self.recent = [*self.recent[1 - RECENT :], loss]
        metrics = getattr(self.optimizer, "metrics", {})
        return {**values, "loss_avg_100": self.mean_loss, "rate": rate, **metrics}

    @property
    def mean_loss(self) -> float:
        return sum(self.recent) / max(1, len(self.recent))

    def expect_other_losses(self) -> None:
        """Forget past losses: the data changes, and they no longer tell what is a divergence."""
        self.recent, self.steps_seen = [], 0

    def halve_rate(self, factor: float) -> None:
        """Set the rate's factor to half of `factor`, which it was when training diverged."""
        if factor <= SMALLEST_FACTOR:
            hint = "the last good checkpoint is kept; a new run needs a lower rate"
            raise NotFinite(f"training diverges even at {factor:.3g} of the rate", hint=hint)
        self.factor = factor / 2

    def _gradients(self, batch: Batch, pieces: int) -> dict[str, float]:
        """Leave the mean gradient of the batch in the parameters; returns the mean values."""
        self.optimizer.zero_grad(set_to_none=True)
        self._notify_modules("begin_step")
        pieces, precision = min(pieces, len(batch[0])), self.settings.precision
        narrow = precision == "bf16" or (precision == "auto" and bf16_is_faster(self.device))
        sums: dict[str, float] = {}
        count = 0
        for piece in zip(*(t.to(self.device).tensor_split(pieces) for t in batch), strict=True):
            with torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16, enabled=narrow):
                loss = self.loss(self.model, piece, self.generator)
            (loss.total * loss.count).backward()  # type: ignore[no-untyped-call]
            count += loss.count
            for name, value in loss.values.items():
                sums[name] = sums.get(name, 0.0) + value * loss.count
        if not count:
            raise ValueError("the batch has nothing to learn: every target is left out")
        if gradients := [p.grad for p in self.model.parameters() if p.grad is not None]:
            torch._foreach_mul_(gradients, 1 / count)
        return {name: value / count for name, value in sums.items()}

    def _notify_modules(self, method: str) -> None:
        """Call `begin_step` or `end_step` of the modules that count over a step."""
        for module in self.model.modules():
            if hasattr(module, method):
                getattr(module, method)()

    def _apply_decisions(self, step: int) -> int:
        """Move to the CPU if that was decided by this step; returns the pieces of its batch."""
        if self.decisions.at(step).get("cpu") and self.device != "cpu":
            self.device = "cpu"
            self.model.to("cpu")
            for state in self.optimizer.state.values():
                state.update({k: v.to("cpu") for k, v in state.items() if torch.is_tensor(v)})
        return int(self.decisions.at(step).get("pieces") or self.settings.accumulate)

    def _use_less(self, step: int, rows: int) -> None:
        """Decide, for good, to compute smaller pieces from this step on, or on the CPU."""
        self.optimizer.zero_grad(set_to_none=True)
        pieces = self._apply_decisions(step)
        if pieces < rows:
            self.decisions.record("pieces", step, min(2 * pieces, rows))
        elif self.device != "cpu":
            self.decisions.record("cpu", step, True)
            torch.cuda.empty_cache()
        else:
            hint = "free some memory and resume, or start anew with shorter rows"
            raise NotEnough(f"not enough memory for one row of the batch at step {step}", hint=hint)
        log.warning("out of memory at step %d: %s", step, self.decisions.at(step))
