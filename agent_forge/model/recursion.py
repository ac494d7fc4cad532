"""TRM: refine a latent z and an answer y a few times from the same features; ACT: when to halt.

Each step runs `micro_steps` refinements of z and one update of y, and is supervised. Between steps
y and z are detached, so memory does not grow with the depth. Halting is used at inference only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.model.attention import RMSNorm


class RecursionMLP(nn.Module):
    """A two-layer network on the concatenation of its inputs."""

    def __init__(self, inputs: int, width: int, hidden: int, *, starts_at_zero: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs * width, hidden)
        self.outer = nn.Linear(hidden, width)
        nn.init.normal_(self.inner.weight, std=(inputs * width) ** -0.5)
        nn.init.zeros_(self.inner.bias)
        nn.init.normal_(self.outer.weight, std=0.0 if starts_at_zero else hidden**-0.5)
        nn.init.zeros_(self.outer.bias)

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.outer(F.silu(self.inner(torch.cat(inputs, dim=-1))))
        return out


class Recursion(nn.Module):
    """One step of TRM, to be repeated; at initialisation it leaves the features as they are."""

    def __init__(self, width: int, hidden: int, micro_steps: int, steps: int) -> None:
        super().__init__()
        self.micro_steps, self.steps = micro_steps, steps
        self.refine = RecursionMLP(3, width, hidden, starts_at_zero=False)
        self.norm = RMSNorm(width)
        self.update = RecursionMLP(2, width, hidden, starts_at_zero=True)
        self.y_start = nn.Parameter(torch.zeros(width))
        self.z_start = nn.Parameter(torch.zeros(width))

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.y_start, self.z_start.expand_as(x)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(self.micro_steps):
            z = self.norm(z + self.refine(x, y, z))
        return y + self.update(y, z) / self.steps, z  # all steps together move y as one would


class HaltingHead(nn.Module):
    """The probability that further steps would not help, with a running calibration."""

    # These two let inference correct a head that is too eager or too shy as a whole.
    mean_target: Tensor
    mean_probability: Tensor

    def __init__(self, width: int, steps: int, ema: float) -> None:
        super().__init__()
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, -3.0)  # 0 would make it halt at once and never recover
        self.ema = ema
        self.register_buffer("mean_target", torch.full((steps,), 0.5))
        self.register_buffer("mean_probability", torch.full((steps,), 0.5))
        self._seen: dict[int, list[Tensor]] = {}  # step -> sums of target, probability, count

    def loss(self, z: Tensor, target: Tensor, step: int) -> Tensor:
        """Binary cross-entropy against whether halting here was right."""
        logit = self.head(z).squeeze(-1)
        if self.training:
            sums = torch.stack([target, torch.sigmoid(logit.detach().float())]).sum(1)
            self._seen.setdefault(step, []).append(torch.cat([sums, sums.new_tensor([len(z)])]))
        return F.binary_cross_entropy_with_logits(logit, target)

    def begin_step(self) -> None:
        """Forget what a step has seen that was not finished."""
        self._seen.clear()

    @torch.no_grad()
    def end_step(self) -> None:
        """Move the running means once, by all that the step has seen, in however many pieces."""
        for step, parts in self._seen.items():
            target, probability, count = torch.stack(parts).sum(0)
            self.mean_target[step].lerp_(target / count, 1 - self.ema)
            self.mean_probability[step].lerp_(probability / count, 1 - self.ema)
        self._seen.clear()

    def probability(self, z: Tensor, step: int) -> Tensor:
        """The calibrated probability that it is right to halt after this step."""
        shift = torch.logit(self.mean_target[step], eps=1e-4)
        shift = shift - torch.logit(self.mean_probability[step], eps=1e-4)
        return torch.sigmoid(self.head(z).squeeze(-1) + shift)
