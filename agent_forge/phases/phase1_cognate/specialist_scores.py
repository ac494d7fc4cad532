"""How good and how different the models of Phase 1 are, on items that nobody trained on.

Diversity is the mean of four spreads, each from 0 (alike) to 1: of the mean recursion steps (range
over T_max - 1), of the use of the memory (range over the largest), of the cost of a token (range
over the largest, in multiplications), and of the accuracies (mean over domains of the range).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from agent_forge.config.settings import ModelSettings
from agent_forge.data.loader import TokenizedItem
from agent_forge.evals.likelihood import padded
from agent_forge.evals.model_under_test import EVERY_STEP, TOKENS_A_BATCH, measure
from agent_forge.infer.generate import batches
from agent_forge.model.network import ForgeNetwork
from agent_forge.train.config import DOMAINS

# The adaptive domain is judged at 1.3 recursion steps on average: the threshold is chosen for these
# on the selection items, so that the unseen ones stay below.
AIMED_STEPS = 1.25
TokensAndAsked = tuple[Tensor, Tensor]
Items = Mapping[str, Sequence[TokenizedItem]]  # by domain


@dataclass(frozen=True)
class SpecialistScores:
    """One model, measured."""

    accuracy: dict[str, float]  # by domain, exact match, with all recursion steps
    nats: dict[str, float]  # by domain, a token of the answer
    quick_accuracy: float  # of the adaptive domain, at few recursion steps
    quick_steps: float
    mean_steps: float  # with the model's own threshold, over all domains
    memory_use: float  # mean share of the memory in the gate's blend
    cost: float  # multiplications a token, with its own threshold

    @property
    def mean_accuracy(self) -> float:
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def by_domain(self) -> dict[str, float]:
        """What each domain is compared by: accuracy, of the adaptive one at few steps."""
        return {**self.accuracy, "adaptive": self.quick_accuracy}

    @property
    def mean_nats(self) -> float:
        return sum(self.nats.values()) / len(self.nats)

    def flat(self) -> dict[str, float]:
        """All values as one level of names."""
        values = asdict(self)
        nested = {f"{k}_{d}": v for k in ("accuracy", "nats") for d, v in values.pop(k).items()}
        return nested | values

    def metrics(self, name: str) -> dict[str, float]:
        """What is logged of the model of this name."""
        values = {f"{name}/accuracy/{d}": v for d, v in self.accuracy.items()}
        values |= {f"{name}/nats/{d}": v for d, v in self.nats.items()}
        return values | {
            f"{name}/accuracy/adaptive_quick": self.quick_accuracy,
            f"{name}/act/quick_steps": self.quick_steps,
            f"{name}/act/mean_steps": self.mean_steps,
            f"{name}/gate/memory_use": self.memory_use,
        }


def assess(model: ForgeNetwork, verdict: Items, selection: Items) -> SpecialistScores:
    """Measure a model on the unseen items of every domain."""
    scores = {d: measure(model, verdict[d], threshold=EVERY_STEP) for d in DOMAINS}
    threshold = _quick_threshold(model, selection["adaptive"])
    quick = measure(model, verdict["adaptive"], threshold=threshold)
    own = [measure(model, selection[domain]).mean_steps for domain in DOMAINS]
    steps = sum(own) / len(own)
    return SpecialistScores(
        accuracy={d: score.accuracy for d, score in scores.items()},
        nats={d: score.nats_per_token for d, score in scores.items()},
        quick_accuracy=quick.accuracy,
        quick_steps=quick.mean_steps,
        mean_steps=steps,
        memory_use=_memory_use(model, [item for d in DOMAINS for item in selection[d][:50]]),
        cost=multiplications(model.settings, steps),
    )


def multiplications(settings: ModelSettings, steps: float) -> float:
    """How many a token takes: every matrix once, the recursion as often as it runs."""
    weights = settings.weights()
    further = (settings.micro_steps - 1) * 4 * settings.d_model * settings.trm_hidden
    step = weights["recursion"] + further
    return sum(weights.values()) - weights["recursion"] + steps * step


def diversity(scores: Sequence[SpecialistScores], t_max: int) -> float:
    """How different models are, from 0 to 1; the formula is at the top of this file."""
    steps = np.ptp([s.mean_steps for s in scores]) / max(1, t_max - 1)
    memory = np.ptp([s.memory_use for s in scores]) / max(s.memory_use for s in scores)
    cost = np.ptp([s.cost for s in scores]) / max(s.cost for s in scores)
    accuracy = sum(np.ptp([s.accuracy[d] for s in scores]) for d in DOMAINS) / len(DOMAINS)
    return float(steps + memory + cost + accuracy) / 4


def barriers(models: Sequence[ForgeNetwork], selection: Items) -> dict[str, float]:
    """For each pair: loss halfway between them, above the mean of their own losses, in nats."""
    everything = [item for domain in DOMAINS for item in selection[domain]]
    ends = [measure(model, everything, threshold=EVERY_STEP).nats_per_token for model in models]
    heights = {}
    for a, b in combinations(range(len(models)), 2):
        middle = average([models[a], models[b]])
        loss = measure(middle, everything, threshold=EVERY_STEP).nats_per_token
        heights[f"{a + 1}_{b + 1}"] = loss - (ends[a] + ends[b]) / 2
    return heights


def average(models: Sequence[ForgeNetwork]) -> ForgeNetwork:
    """The plain mean of the weights, in a network with the settings of the first."""
    states = [model.state_dict() for model in models]
    merged = ForgeNetwork(models[0].settings)
    mean = {name: torch.stack([s[name] for s in states]).mean(0) for name in states[0]}
    merged.load_state_dict(mean)
    return merged.to(next(models[0].parameters()).device)


@torch.no_grad()
def _quick_threshold(model: ForgeNetwork, items: Sequence[TokenizedItem]) -> float:
    """The highest halting threshold at which these items take few enough steps."""
    model.eval()
    rows = []
    for tokens, asked in _batched(model, items):
        x = model.features(tokens[:, :-1]).x[asked[:, 1:]]
        y, z = model.recursion.start(x)
        steps = []
        for step in range(model.settings.t_max):
            y, z = model.recursion(x, y, z)
            steps.append(model.halting.probability(z, step))
        rows.append(torch.stack(steps, 1))
    halting = torch.cat(rows)  # the probability after each step at each asked token: N x T_max
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        going_on = (halting <= middle).cumprod(1)
        mean_steps = 1 + float(going_on[:, :-1].float().sum(1).mean())
        low, high = (middle, high) if mean_steps <= AIMED_STEPS else (low, middle)
    return low


def _batched(model: ForgeNetwork, items: Sequence[TokenizedItem]) -> Iterator[TokensAndAsked]:
    device = next(model.parameters()).device
    for rows in batches([len(item.ids) for item in items], TOKENS_A_BATCH):
        yield padded([items[row] for row in rows], device)


@torch.no_grad()
def _memory_use(model: ForgeNetwork, items: Sequence[TokenizedItem]) -> float:
    """How much of the gate's blend is memory, on average."""
    shares: list[float] = []

    def observe(_: object, __: object, out: Tensor) -> None:
        shares.append(1 - float(torch.sigmoid(out).mean()))

    handle = model.gate.outer.register_forward_hook(observe)
    for tokens, _ in _batched(model, items):
        model.features(tokens)
    handle.remove()
    return sum(shares) / len(shares)
