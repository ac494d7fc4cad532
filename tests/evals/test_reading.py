"""The fast reading gives what the plain one gives, or is not used; threads change no bit."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from agent_forge.evals import likelihood
from agent_forge.evals.domains import Domain, from_files
from agent_forge.evals.fitness import DomainFitness, Incumbent, shards, student
from agent_forge.evals.likelihood import Reading, plan
from agent_forge.evals.model_under_test import ModelUnderTest, open_model_under_test
from agent_forge.infer.generate import TransformersReader
from tests.support.eval_models import FAMILIES, HEADS, SIZES, WIDTHS
from tests.support.tokenizers import byte_tokenizer

WEIGHTS = {"perplexity": 0.5, "accuracy": 0.5}
WHOLE = Reading(selects=True, caches=True)
SHAPES: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "gemma2": {**SIZES, **WIDTHS, **HEADS, "final_logit_softcapping": 2.0, "sliding_window": 8},
    "granite": {**SIZES, **WIDTHS, "num_attention_heads": 2, "logits_scaling": 3.0},
    "cohere": {**SIZES, **WIDTHS, "num_attention_heads": 2, "logit_scale": 0.3},
    "phi": {**SIZES, **WIDTHS, "num_attention_heads": 2},  # its head has a bias
    "mamba": {"vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
}
DECODER = {**WIDTHS, "num_attention_heads": 2, "is_decoder": True}
UNCACHED = {"mamba"}  # its rows cannot be chosen


def model_in(place: Path, family: str = "llama") -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SHAPES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    return place


def domains(place: Path) -> list[Domain]:
    """Answers behind one beginning, choices behind prompts of two lengths, and texts."""
    begun = "All of them begin like this. "
    rows = {
        "answers": [{"prompt": f"{begun}{7 * n}=", "completion": f"{n}" * 3} for n in range(40)],
        "choices": [
            {
                "prompt": f"{10 + n} is the number of which one of them?" + " ?" * (n % 2),
                "completion": f" {n}a",
            }
            | {"choices": [f" {n}a", f" {n}bc", " no"]}
            for n in range(16)
        ],
        "texts": [{"text": "Once " + "upon a time " * (n % 4 + 1) + str(n)} for n in range(16)],
    }
    for name, own in rows.items():
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, own)))
    return from_files([place / f"{name}.jsonl" for name in rows])


@pytest.fixture
def subject(tmp_path: Path) -> ModelUnderTest:
    return replace(open_model_under_test(model_in(tmp_path / "m"), fast=True), batch_tokens=96)


@pytest.mark.parametrize("family", SHAPES)
def test_every_architecture_scores_as_by_its_plain_forward(tmp_path: Path, family: str) -> None:
    fast = open_model_under_test(model_in(tmp_path / "m", family), fast=True)
    assert fast.reading == Reading(selects=True, caches=family not in UNCACHED)
    plain = replace(fast, reading=None)
    prepared = [fast.prepare(domain) for domain in domains(tmp_path)]
    for found, wanted in zip(fast.measure_all(prepared), plain.measure_all(prepared), strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
        assert (found.right, found.tokens) == (wanted.right, wanted.tokens)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("mpt", {"d_model": 16, "n_heads": 2, "n_layers": 1, "max_seq_len": 48}),
        ("roberta", {**DECODER, "max_position_embeddings": 50, "pad_token_id": 1}),
    ],
)
def test_a_long_text_is_read_by_models_that_tell_their_limit_otherwise(
    tmp_path: Path, family: str, shape: dict[str, Any]
) -> None:
    """By another name, or with positions that begin behind the one of padding."""
    config = AutoConfig.for_model(family, vocab_size=260, **shape)
    place = tmp_path / "m"
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    byte_tokenizer().save_pretrained(place)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "upon a time " * 20}) + "\n")
    subject = open_model_under_test(place, fast=True)
    assert subject.longest == 48
    found = subject.measure(subject.prepare(from_files([tmp_path / "texts.jsonl"])[0]))
    assert sum(found.tokens) > 230 and all(map(math.isfinite, found.loss))


def test_beginnings_and_prompts_are_read_once(
    tmp_path: Path, subject: ModelUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, choices, _ = (subject.prepare(domain) for domain in domains(tmp_path))
    read: list[int] = []
    forward = TransformersReader.forward

    def counting(self: TransformersReader, tokens: Tensor, **more: Any) -> Any:
        read.append(tokens.numel())
        return forward(self, tokens, **more)

    monkeypatch.setattr(TransformersReader, "forward", counting)
    roomy = replace(subject, batch_tokens=4096)
    for prepared, most in ((answers, 0.4), (choices, 0.6)):
        read.clear()
        roomy.measure(prepared)
        assert 0 < sum(read) < most * prepared.tokens


def test_the_head_sees_asked_positions_alone(tmp_path: Path, subject: ModelUnderTest) -> None:
    prepared = subject.prepare(domains(tmp_path)[0])
    seen = 0

    def count(_: nn.Module, inputs: tuple[Tensor], __: Tensor) -> None:
        nonlocal seen
        seen += inputs[0].shape[:-1].numel()

    model: Any = subject.model
    model.lm_head.register_forward_hook(count)
    scores = replace(subject, reading=Reading(True, False)).measure(prepared)
    assert seen == sum(scores.tokens)
    assert not model.lm_head._forward_pre_hooks  # nothing stays behind


def test_a_network_that_looks_at_its_logits_is_read_the_plain_way(subject: ModelUnderTest) -> None:
    class Odd(type(subject.model)):  # type: ignore[misc]
        def forward(self, *given: Any, **more: Any) -> Any:
            out = super().forward(*given, **more)
            out.logits = out.logits * torch.arange(1, out.logits.shape[1] + 1)[:, None]
            return out

    subject.model.__class__ = Odd
    assert Reading.tried(subject.model) == Reading(False, False)


def test_batches_have_every_item_once_and_know_nothing_of_threads(
    tmp_path: Path, subject: ModelUnderTest
) -> None:
    for domain in domains(tmp_path):
        prepared = subject.prepare(domain)
        examples = prepared.example_of[prepared.answer_of].tolist()
        found = plan(prepared.items, examples, 96, WHOLE)
        met = [n for batch in found for own in batch.prompts for n in own]
        assert sorted(met) == list(range(len(prepared.items))) and len(found) > 1
        for batch in found:
            firsts = [prepared.items[own[0]].ids for own in batch.prompts]
            assert len({tuple(ids[: batch.shared]) for ids in firsts}) == 1
            for own, ids in zip(batch.prompts, firsts, strict=True):
                for item in (prepared.items[n] for n in own):
                    assert item.ids[: batch.prompt] == ids[: batch.prompt]
                    assert not any(item.asked[: batch.prompt + 1])


def bits(rows: Sequence[Sequence[float]]) -> list[str]:
    return [float(x).hex() for row in rows for x in row]


@pytest.mark.parametrize("half", [False, True])
def test_threads_change_no_bit_of_scores_and_races(
    tmp_path: Path, subject: ModelUnderTest, half: bool
) -> None:
    assert not half or likelihood.halve(subject.model)
    found = []
    for threads in (1, 2, 3):
        own = replace(subject, threads=threads)
        fitness = DomainFitness(own, domains(tmp_path), WEIGHTS, {}, mixed=half, racing=True)
        value, items, tokens = fitness.race(None)
        assert items is not None and tokens == fitness.tokens
        rows = [scores.loss for scores in items]
        ahead = Incumbent("", value, [s.right for s in items], [[x - 1 for x in r] for r in rows])
        dropped, none, few = fitness.race(ahead)
        assert none is None and few < tokens
        whole = [scores.loss for scores in fitness.measure()]
        found.append((bits([*rows, *whole, [value, dropped]]), few, fitness.name))
    assert found[0] == found[1] == found[2]


def test_in_bfloat16_the_angles_of_positions_stay(subject: ModelUnderTest) -> None:
    assert likelihood.halve(subject.model)
    assert {p.dtype for p in subject.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in subject.model.buffers()} == {torch.float32}


def test_a_network_that_needs_single_precision_keeps_it(subject: ModelUnderTest) -> None:
    model: Any = subject.model
    norm = model.model.norm
    whole = norm.weight.detach().clone()

    def needs(_: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].dtype != torch.float32:
            raise RuntimeError("expected float")

    norm.register_forward_pre_hook(needs)
    assert not likelihood.halve(model)
    assert norm.weight.dtype == torch.float32 and torch.allclose(norm.weight, whole, rtol=1e-2)


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_the_probe_says_what_is_faster(monkeypatch: pytest.MonkeyPatch, times: float) -> None:
    clock = [0.0]

    def linear(x: Tensor, _: Tensor) -> None:
        clock[0] += times if x.dtype == torch.bfloat16 else 1.0

    monkeypatch.setattr(likelihood.F, "linear", linear)
    monkeypatch.setattr(likelihood.time, "perf_counter", lambda: clock[0])
    assert likelihood.faster_in_bf16() == (times < 1)


# -- racing ---------------------------------------------------------------------------------------


def test_the_first_shard_is_small_and_enough(tmp_path: Path) -> None:
    many = domains(tmp_path)[0]
    sizes = [len(own) for own in shards(many, (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0))]
    assert sizes == [8, 0, 0, 2, 10, 20] and sum(sizes) == len(many.examples)


@pytest.mark.parametrize(("freedom", "wanted"), [(7, 1.696), (21, 1.560), (1000, 1.501)])
def test_few_items_ask_for_more_errors(freedom: int, wanted: float) -> None:
    """Beside the quantiles of scipy.stats.t at the probability of 1.5."""
    assert student(1.5, freedom) == pytest.approx(wanted, abs=2e-3)
