"""The gradient of the fitness by every merge coefficient, from one backward pass.

A candidate is W = ... + sum of c[group][i] * (parent_i - base), so the derivative by c[group][i] is
the sum over the group's tensors of <dF/dW, parent_i - base>. F is the fitness made smooth: bits a
byte as they are, and for the share of right answers the mean probability of a right one. All
recursion steps are taken, where a measurement would halt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent_forge.data.loader import TokenizedItem
from agent_forge.errors import NotFinite
from agent_forge.evals.fitness import DomainFitness
from agent_forge.evals.likelihood import padded
from agent_forge.evals.model_under_test import TokenizedDomain
from agent_forge.infer.generate import batches
from agent_forge.model.network import ForgeNetwork
from agent_forge.phases.phase2_evomerge.candidate_weights import CandidateWeights

BACKWARD = 3  # passes over the tokens: one forward, and a backward that costs two
Rows = dict[str, list[float]]


def gradient(
    fitness: DomainFitness, weights: CandidateWeights, turns: int, turn: int
) -> tuple[Rows, int]:
    """The gradient at the weights that the network has now, on the items of a turn; its tokens."""
    model = fitness.model_under_test.model
    model.eval()
    wanted = {name: p for name, p in model.named_parameters() if name in weights.specs}
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    tokens = 0
    try:
        model.requires_grad_(False)
        for parameter in wanted.values():
            parameter.requires_grad_(True)
        for i, (prepared, rates) in enumerate(zip(fitness.prepared, fitness.rates(), strict=True)):
            items = _part(prepared, turns, turn)
            tokens += BACKWARD * sum(len(prepared.items[n].ids) for n in items)
            _backward(fitness, i, items, *rates)
        return _by_coefficient(weights, wanted), tokens
    finally:
        model.zero_grad(set_to_none=True)
        for name, p in model.named_parameters():
            p.requires_grad_(before[name])


def _part(prepared: TokenizedDomain, turns: int, turn: int) -> list[int]:
    """The items of a turn: other examples at every turn, and of each its right answer alone."""
    count = int(prepared.example_of[-1]) + 1
    examples = {n for n in range(count) if n % turns == turn % turns} or {0}
    first: dict[int, int] = {}
    for answer, example in enumerate(prepared.example_of.tolist()):
        first.setdefault(example, answer)
    answers = {answer for example, answer in first.items() if example in examples}
    return [n for n, answer in enumerate(prepared.answer_of.tolist()) if answer in answers]


def _backward(
    fitness: DomainFitness, domain: int, chosen: Sequence[int], per_nat: float, per_answer: float
) -> None:
    """Add the derivatives of a domain's part of the fitness to the network.

    The chosen items stand for all of them: for all bytes, and for all examples.
    """
    model, prepared = fitness.model_under_test.model, fitness.prepared[domain]
    device = next(model.parameters()).device
    answers = sorted({int(prepared.answer_of[n]) for n in chosen})
    every = fitness.domains[domain]
    per_nat *= sum(every.sizes) / sum(int(prepared.sizes[answer]) for answer in answers)
    per_answer *= len(every.examples) / len(answers)
    items = [prepared.items[n] for n in chosen]
    for rows in batches([len(item.ids) for item in items], fitness.model_under_test.batch_tokens):
        losses = item_losses(model, [items[n] for n in rows], device)
        value = per_answer * torch.exp(-losses).sum() - per_nat * losses.sum()
        value.backward()  # type: ignore[no-untyped-call]


def item_losses(model: nn.Module, items: Sequence[TokenizedItem], device: torch.device) -> Tensor:
    """The loss of each item in nats, summed over its asked tokens."""
    tokens, asked = padded(items, device)
    wanted = asked[:, 1:]
    targets = tokens[:, 1:][wanted]
    if isinstance(model, ForgeNetwork):
        x = model.features(tokens[:, :-1]).x[wanted]
        y, z = model.recursion.start(x)
        for _ in range(model.settings.t_max):
            y, z = model.recursion(x, y, z)
        logits = model.logits(model.hidden(y)).float()
    else:
        logits = model(tokens[:, :-1]).logits[wanted].float()
    loss = F.cross_entropy(logits, targets, reduction="none")
    owner = wanted.nonzero()[:, 0]
    return loss.new_zeros(len(items)).index_add(0, owner, loss)


def _by_coefficient(weights: CandidateWeights, parameters: dict[str, nn.Parameter]) -> Rows:
    """Inner products with the parents' task vectors, summed by group."""
    found: Rows = {group: [0.0] * len(weights.parents) for group in weights.groups.names}
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        slope = parameter.grad.to("cpu", torch.float32).flatten()
        row = found[weights.groups.group_of(name)]
        for i, vector in enumerate(weights.task_vectors(name)):
            row[i] += float(slope @ vector.flatten())
    if not all(math.isfinite(value) for row in found.values() for value in row):
        raise NotFinite("the gradient is not finite")
    return found
