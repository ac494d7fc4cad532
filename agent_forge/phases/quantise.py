"""`forge quantize`: any causal language model in few bits, trained on a person's texts or not.

What `forge compress` shares with it: what is refused, the parts of the texts, and the training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from agent_forge.data.loader import IGNORE, TokenizedItem
from agent_forge.errors import ConfigError
from agent_forge.evals import likelihood
from agent_forge.evals.comparison import Comparison, compare
from agent_forge.evals.domains import Domain, from_files, kept_apart, part
from agent_forge.evals.model_under_test import (
    ModelUnderTest,
    model_under_test,
    open_model_under_test,
)
from agent_forge.merge.output import clear_leftovers, refuse_existing, write
from agent_forge.model.card import card_head
from agent_forge.model.folder import MODEL_TYPE, home_of, open_weights, read_config
from agent_forge.model.load import check_tensors
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import open_model
from agent_forge.model.weights import Weights
from agent_forge.optim.config import MuGrokConfig
from agent_forge.optim.muon import MuonGrokfast
from agent_forge.quant.layers import compute_rounded, plan_packing, rounded_once, trained_state
from agent_forge.quant.packed import KEY, Packing, packing_of
from agent_forge.store import files
from agent_forge.store.tensors import spec_of, split_tied
from agent_forge.train.config import TrainSettings
from agent_forge.train.fit import DistillationLoss
from agent_forge.train.trainer import Batch, Trainer

OPTIMIZER = MuGrokConfig.through_rounding(2e-3, 1e-3)
ROWS = 8  # items of a step
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """Which model is written where, and how it is trained before. `rate` is that of Muon."""

    model: str
    out: Path
    data: Sequence[Path] = ()
    steps: int = 0
    rate: float = OPTIMIZER.muon_lr
    seed: int = 0

    def weights(self) -> Weights:
        """The weights of the model; what cannot be written smaller is refused."""
        config = read_config(self.model)
        if packing_of(config, self.model):
            raise ConfigError(
                f"{self.model} is packed already", hint="name the model it was made of"
            )
        weights = open_weights(self.model)
        check_tensors(weights)
        if self.steps and not self.data:
            raise ConfigError("--steps need something to learn from", hint="--data FILE")
        return weights


@dataclass(frozen=True)
class QuantiseRequest(Request):
    """What is to be made of a model. `embedding` may be fp16."""

    codec: str = "ternary"
    embedding: str = "int4g32"
    activation_bits: int = 8

    def packing(self, network: nn.Module) -> Packing:
        embedding = "" if self.embedding == "fp16" else self.embedding
        bits = self.activation_bits if self.codec.startswith("ternary") else 0
        return with_tied(plan_packing(network, self.codec, embedding, bits), network)


@dataclass(frozen=True)
class Quantised:
    """What was written, and how it compares with its parent on items that it did not learn from."""

    folder: Path
    original_bytes: int
    packed_bytes: int
    coded_share: float  # of the weights, that a codec wrote
    comparison: Comparison | None

    @property
    def sentence(self) -> str:
        if self.comparison is None:
            return "nothing was measured: with --data FILE it is compared with its parent"
        return self.comparison.overall.sentence("its parent")


def check(request: QuantiseRequest, force: bool, *, look: bool = True) -> Weights:
    """Refuse what cannot be done before any work; returns the weights of the model."""
    weights = request.weights()
    refuse_existing(request.out, weights, force, look=look)
    return weights


def quantise(request: QuantiseRequest, *, force: bool, progress: Progress) -> Quantised:
    """Round a model, train it straight through the rounding if asked for, write and measure it."""
    weights = check(request, force, look=False)
    learned, asked = parts_of(request.data)
    opened = open_model(request.model)
    network: Any = opened.network
    tested = model_under_test(opened)
    for domain in asked:
        tested.prepare(domain)  # texts that it cannot read are refused before anything is written
    packing = request.packing(network)
    state = network.state_dict()
    if request.steps:
        state = trained(request, tested, packing, right_items(tested, learned), progress)
    kept = split_tied(state)[0]
    own = {name: matrix for name, matrix in packing.matrices.items() if name in kept}
    packing = Packing(own, packing.activation_bits)
    packed = packing.pack(kept).tensors
    config = {**read_config(request.model), KEY: packing.to_json()}
    result = Weights(
        {name: spec_of(tensor) for name, tensor in packed.items()},
        lambda name: packed[name],
        label=str(request.out),
        config=config,
        folder=home_of(request.model),
        sources=weights.sources,
    )
    card = _card(request, weights, result)
    clear_leftovers(request.out)
    compared = None
    with files.building(request.out) as built:  # in its place once it is measured
        write(result, built, beside={"README.md": card.encode()})
        if asked:
            scores = []
            for ref in (request.model, str(built)):
                tested = open_model_under_test(ref)
                prepared = [tested.prepare(domain) for domain in asked]
                scores.append(
                    tested.measure_all(prepared, lambda d, n: progress("measuring", d, n))
                )
            compared = compare(scores[0], scores[1], asked, request.seed)
        refuse_existing(request.out, weights, force)
        files.publish(built, request.out, replace=force)
    coded = sum(math.prod(matrix.shape) for matrix in packing.matrices.values())
    share = coded / sum(tensor.numel() for tensor in kept.values())
    return Quantised(request.out, weights.nbytes, result.nbytes, share, compared)


def with_tied(packing: Packing, network: nn.Module) -> Packing:
    """A packing in which what is tied to a matrix is written as that."""
    aliases, matrices = split_tied(network.state_dict())[1], packing.matrices
    tied = {name: matrices[of] for name, of in aliases.items() if of in matrices}
    return Packing({**matrices, **tied}, packing.activation_bits)


def parts_of(data: Sequence[Path]) -> tuple[list[Domain], list[Domain]]:
    """What is learned from, and what the verdict asks; they share no text."""
    if not data:
        return [], []
    domains = from_files(list(data), "overlap")
    splits = {name: [part(d, name) for d in domains] for name in ("selection", "verdict")}
    apart = kept_apart(splits, "overlap")
    return apart["selection"], apart["verdict"]


def right_items(tested: ModelUnderTest, domains: Sequence[Domain]) -> list[TokenizedItem]:
    """The texts and right answers of domains."""
    parts = [tested.prepare(domain) for domain in domains]
    return [own.items[i] for own in parts for i in own.right_items()]


def trained(
    request: Request,
    tested: ModelUnderTest,
    packing: Packing,
    items: Sequence[TokenizedItem],
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Train through the rounding on these items, half of it to say what the model said before."""
    network = tested.model
    student = copy.deepcopy(network).requires_grad_(True)
    compute_rounded(student, packing)
    distil = rounded_once(DistillationLoss(network))
    rates = {"muon_lr": request.rate, "fallback_lr": request.rate / 2}
    optimizer = MuonGrokfast(student, OPTIMIZER.model_copy(update=rates))
    settings = TrainSettings(warmup_steps=min(10, request.steps))
    draws = torch.Generator().manual_seed(request.seed)

    def loss(model: nn.Module, batch: Batch, generator: torch.Generator) -> Any:
        if not isinstance(model, ForgeNetwork):
            model.eval()  # dropout would draw without the seed
        return distil(model, batch, generator)

    trainer = Trainer(student, optimizer, loss, settings, total=request.steps, generator=draws)
    order = Random(request.seed)
    for step in range(1, request.steps + 1):
        rows = [order.choice(items) for _ in range(ROWS)]
        longest = max(len(item.ids) for item in rows)
        batch = _batch(rows[: max(1, tested.batch_tokens // longest)])  # all logits exist at once
        trainer.step(step, batch)
        progress("training", step, request.steps)
    return trained_state(student)


def _batch(items: Sequence[TokenizedItem]) -> Batch:
    """Rows of tokens, and the next ones that are asked for."""
    tokens, asked = likelihood.padded(items, torch.device("cpu"))
    targets = torch.where(asked[:, 1:], tokens[:, 1:], IGNORE)
    return tokens[:, :-1], targets


def _card(request: QuantiseRequest, weights: Weights, result: Weights) -> str:
    tags = ("quantized", request.codec)
    head = card_head([request.model], {"model_type": MODEL_TYPE}, tags, relation="quantized")
    ratio = f"{weights.nbytes:,} bytes of weights became {result.nbytes:,}"
    how = f"{request.codec} weights, {request.embedding} embedding"
    taught = f", trained {request.steps} steps through the rounding" if request.steps else ""
    return f"{head}\n# {request.out.name}\n\n{how}{taught}. {ratio}.\n\nOpened by Agent Forge.\n"
