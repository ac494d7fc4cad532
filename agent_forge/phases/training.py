"""What training phases share: train a network of ours, measure, compare, sample and save it."""

from __future__ import annotations

import timeit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agent_forge.config.settings import ModelSettings
from agent_forge.contract.phase import (
    ModelRef,
    PhaseContext,
    PhaseReport,
    PhaseResult,
    Table,
    as_markdown,
)
from agent_forge.data.loader import Schedule, TokenizedItem
from agent_forge.data.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL
from agent_forge.errors import ConfigError
from agent_forge.evals.comparison import Comparison, PairedScores, compare_scores
from agent_forge.evals.model_under_test import CONFIRMED, EVERY_STEP, ItemScores, confirm, measure
from agent_forge.infer.chat import ChatModel
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.model.hf import config_dict
from agent_forge.model.loss import language_loss
from agent_forge.model.network import ForgeNetwork
from agent_forge.model.opened import OpenedModel
from agent_forge.quant.layers import compute_rounded, round_inputs, rounded_once, trained_state
from agent_forge.quant.packed import KEY, PackedState, Packing
from agent_forge.store.files import to_json
from agent_forge.store.models import METADATA
from agent_forge.store.tensors import stored_bytes
from agent_forge.train.corpus import TEXT, Corpus
from agent_forge.train.fit import fit_corpus
from agent_forge.train.trainer import LossFunction

Scores = dict[str, ItemScores]  # by domain
PACKED, WHOLE = "packed", "dequantised"
LEARNED = ("strategies", "levels", "tools", "persona")  # what later phases and a chat go by
SAMPLE_PROMPTS = ("copy k m a t", "sort 52814", "max 4718:2905")


def train_network(
    ctx: PhaseContext,
    corpus: Corpus,
    model: ForgeNetwork,
    curriculum: Schedule,
    held_out: Sequence[TokenizedItem] = (),
    **options: Any,
) -> ForgeNetwork:
    """Train a network, evaluated on held-out items on the way, the corpus's and further ones; the
    options are `fit_corpus`'s."""
    items = [*corpus.held_out, *held_out]

    def evaluate() -> float:
        value = measure(model, items, threshold=EVERY_STEP).nats_per_token
        model.train()
        return value

    fit_corpus(ctx, model, corpus, curriculum, evaluate=evaluate, **options)
    return model


@dataclass(frozen=True)
class LatentModel:
    """Weights as they are trained, how they are rounded to be packed (None: they are not), and the
    steps that they took."""

    settings: ModelSettings
    state: Mapping[str, Tensor]
    packing: Packing | None
    steps: int = 0

    @classmethod
    def of(cls, network: ForgeNetwork) -> LatentModel:
        """The weights of an open network; if it was packed, such as are rounded to these."""
        state, packing = network.state_dict(), network.packing
        return cls(network.settings, packing.before(state) if packing else state, packing)

    def whole(self) -> ForgeNetwork:
        """The weights in an ordinary network: rounded, if they are to be packed."""
        network = ForgeNetwork(self.settings)
        state = self.packing.rounded(self.state) if self.packing else dict(self.state)
        network.load_state_dict(state)
        return network.eval()

    def opened(self) -> ForgeNetwork:
        """A network that computes as the file of these weights does once it is opened."""
        network = self.whole()
        if self.packing:
            round_inputs(network, self.packing.with_rounded_inputs)
            network.packing = self.packing
        return network

    def trainable(self, device: str = "cpu") -> ForgeNetwork:
        """A network that computes with rounded weights and trains those behind them."""
        network = ForgeNetwork(self.settings)
        network.load_state_dict(dict(self.state))
        if self.packing:
            compute_rounded(network, self.packing)
        return network.to(device)

    def after(self, network: ForgeNetwork, steps: int) -> LatentModel:
        """What became of these weights in a trainable network that took so many steps."""
        state = {name: tensor.detach().clone() for name, tensor in trained_state(network).items()}
        return replace(self, state=state, steps=self.steps + steps)

    def trained(
        self, ctx: PhaseContext, *, steps: int, loss: LossFunction = language_loss, **options: Any
    ) -> LatentModel:
        """These weights trained on, straight through the rounding; options of `train_network`."""
        network = self.trainable(ctx.device)
        whole = rounded_once(loss) if self.packing else loss
        train_network(ctx, model=network, steps=steps, loss=whole, **options)
        return self.after(network, steps)


def open_whole(ref: ModelRef) -> tuple[OpenedModel, ForgeNetwork]:
    """A model of ours whose weights are whole: what is packed was rounded already."""
    opened = ref.open()
    if not isinstance(opened.network, ForgeNetwork):
        text = f"{ref.path} is not a model of our own"
        raise ConfigError(text, hint="forge quantize and forge bake take models of other makers")
    if opened.network.packing:
        hint = f"give the weights of {WHOLE} beside it, or the model that it was made from"
        raise ConfigError(f"{ref.path} is packed already", hint=hint)
    return opened, opened.network


def measure_domains(ctx: PhaseContext, corpus: Corpus, model: ForgeNetwork, name: str) -> Scores:
    """The scores of a network on the unseen items of each domain, logged under its name."""
    scores = {}
    for domain, items in corpus.verdict.items():
        measured = partial(measure, model, items, threshold=EVERY_STEP)
        scores[domain] = ItemScores(**ctx.once("item scores", f"{name}/{domain}", measured))
        ctx.log(None, {f"{name}/accuracy/{domain}": scores[domain].accuracy})
        ctx.log(None, {f"{name}/nats/{domain}": scores[domain].nats_per_token})
    return scores


def compare_domains(corpus: Corpus, reference: Scores, candidate: Scores) -> Comparison:
    """Whether the candidate is better on the unseen items, domain by domain and over all."""
    sizes = {d: [len(task.answer.encode()) for task in found] for d, found in corpus.unseen.items()}
    return compare_scores([PairedScores(d, reference[d], candidate[d], sizes[d]) for d in sizes])


def save_network(
    ctx: PhaseContext,
    corpus: Corpus,
    model: ForgeNetwork,
    name: str,
    metadata: Mapping[str, Any],
    metrics: Mapping[str, Any],
    card: str = "",
    packed: PackedState | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> ModelRef:
    """Save a network with samples of its text, once its file scores what the network does; if it
    was packed, as that. Other files may lie beside it."""
    model.requires_grad_(True)
    samples = sample_texts(model, corpus)
    items = [item for found in corpus.verdict.values() for item in found[:CONFIRMED]]
    recorded = measure(model, items).loss
    return ctx.save_model(
        name,
        packed.tensors if packed else model,
        {**metadata, "samples": samples},
        config=network_config(model, packed),
        metrics=metrics,
        tokenizer_files=corpus.tokenizer.files(),
        beside=beside,
        card_text=card,
        parameters=sum(tensor.numel() for tensor in model.state_dict().values()),
        check=lambda path: confirm(path, lambda m: measure(m.model, items).loss, recorded),
    )


def save_handed_over(
    ctx: PhaseContext,
    corpus: Corpus,
    model: LatentModel,
    report: PhaseReport,
    metadata: Mapping[str, Any],
    samples: Table,
) -> PhaseResult:
    """Save a model and hand it over, with a card of all tables. A packed one has its weights in an
    ordinary network beside it; what was measured is the packed model's, and in its card alone."""
    network = model.opened().to(ctx.device)
    card = [report.card(), *map(as_markdown, [*report.tables[1:], samples])]
    about = metadata, report.metrics, "\n\n".join(card)
    if model.packing is None:
        return report.result(ctx, [save_network(ctx, corpus, network, WHOLE, *about)], network)
    packed = model.packing.pack(model.state)
    saved = save_network(ctx, corpus, network, PACKED, *about, packed=packed)
    learned = {key: value for key, value in metadata.items() if key in LEARNED}
    told = "The weights of `packed` beside it in fp32, without the rounding of inputs."
    copy = model.whole().to(ctx.device)
    whole = save_network(ctx, corpus, copy, WHOLE, learned, {}, told)
    return report.result(ctx, [saved], network, **{WHOLE: whole})


def learned_before(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a model can, of the records of its phases."""
    return {key: record[key] for key in LEARNED if key in record}


def network_config(model: ForgeNetwork, packed: PackedState | None = None) -> dict[str, Any]:
    """The config.json of a saved network."""
    config = config_dict(model.settings)
    return {**config, KEY: packed.packing.to_json()} if packed else config


def network_bytes(model: ForgeNetwork, packed: PackedState | None = None) -> int:
    """The size of a saved network: its weights and its config."""
    tensors = packed.tensors if packed else model.state_dict()
    return stored_bytes(tensors, METADATA) + len(to_json(network_config(model, packed)))


def sample_texts(model: ForgeNetwork, corpus: Corpus) -> list[dict[str, str]]:
    """What the model says to a few prompts, greedily, and how it goes on with a story."""
    encode = corpus.tokenizer.encode_chat
    chats = [encode([{"role": "user", "content": p}], reply=True) for p in SAMPLE_PROMPTS]
    opening = next(p.examples[0].completion for p in corpus.parts if p.domain == TEXT)
    start = " ".join(opening.split()[:8])
    prompts = [*chats, corpus.tokenizer.encode(start)]
    ends = frozenset((SPECIAL[END_OF_TEXT], SPECIAL[END_OF_TURN]))
    made = generate(model, prompts, SamplingSettings(max_new_tokens=60, stop_tokens=ends))
    texts = [corpus.tokenizer.decode(result.tokens) for result in made]
    shown = (*SAMPLE_PROMPTS, start)
    return [{"prompt": p, "text": text} for p, text in zip(shown, texts, strict=True)]


def sample_replies(opened: OpenedModel) -> list[dict[str, str]]:
    """What a model replies to a few prompts, greedily."""
    chat, sampling = ChatModel(opened), SamplingSettings(max_new_tokens=60)
    turns = {prompt: [{"role": "user", "content": prompt}] for prompt in SAMPLE_PROMPTS}
    return [{"prompt": p, "text": "".join(chat.reply(t, sampling))} for p, t in turns.items()]


def latency_ms(model: ForgeNetwork) -> float:
    """Milliseconds for the next token of 512, without a cache; the best of three."""
    tokens = torch.zeros(1, 512, dtype=torch.long, device=next(model.parameters()).device)
    return 1000 * min(timeit.repeat(lambda: model.predict(tokens), number=1, repeat=3))
