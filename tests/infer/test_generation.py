"""The one engine: rollouts carry the network's own log-probabilities, whatever kind it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from agent_forge.infer.generate import GeneratedText, SamplingSettings, generate, stream
from tests.support.networks import network

PROMPTS = [[5, 6, 7], [5, 6, 7, 9, 8], [5, 6], [4]]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, **shape, **heads)).eval()


def decode(tokens: Any) -> str:
    return "".join(chr(97 + t % 26) for t in tokens)


def rollouts(
    model: Any, prompts: Any, sampling: SamplingSettings, samples: int
) -> list[list[GeneratedText]]:
    how: Any = {"samples": samples, "log_probabilities": True, "decode": decode}
    made = generate(model, prompts, sampling, **how)
    assert len(made) == samples * len(prompts)
    return [made[i : i + samples] for i in range(0, len(made), samples)]


KINDS: Any = pytest.mark.parametrize("build", [network, llama], ids=["ours", "transformers"])


def by_plain_forward(
    model: nn.Module, prompt: list[int], made: GeneratedText, stop: int
) -> list[float]:
    """The log-probabilities of a rollout, from one pass over the whole text."""
    drawn = made.tokens + ([stop] if made.stopped_by == "token" else [])
    with torch.no_grad():
        out: Any = model(torch.tensor([[*prompt, *drawn]]))
    logits = (out if isinstance(out, torch.Tensor) else out.logits)[0].float().log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) - 1 + len(drawn))
    return [float(logits[place, token]) for place, token in zip(places, drawn, strict=True)]


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_rollouts_have_the_log_probabilities_of_a_plain_forward_pass(
    build: Any, temperature: float
) -> None:
    model = build()
    how = SamplingSettings(9, temperature=temperature, top_k=20, seed=3, halt_threshold=1.0)
    stop = generate(model, PROMPTS, how)[0].tokens[4]
    stops = frozenset([stop])  # so that some end early, by a token that has a probability too
    sampling = SamplingSettings(9, temperature, 20, seed=3, halt_threshold=1.0, stop_tokens=stops)
    found = rollouts(model, PROMPTS, sampling, 3)
    ended = {made.stopped_by for samples in found for made in samples}
    assert "token" in ended
    for prompt, samples in zip(PROMPTS, found, strict=True):
        for made in samples:
            expected = by_plain_forward(model, prompt, made, stop)
            assert made.log_probabilities == pytest.approx(expected, abs=1e-4)
            assert made.text == decode(made.tokens)


@KINDS
def test_samples_of_a_prompt_differ_and_the_first_is_what_generation_gives(build: Any) -> None:
    model, sampling = build(), SamplingSettings(12, temperature=2.0, seed=5)
    found = rollouts(model, PROMPTS, sampling, 4)
    single = generate(model, PROMPTS, sampling)
    assert [samples[0].tokens for samples in found] == [made.tokens for made in single]
    assert not single[0].log_probabilities
    for samples in found:
        assert len({tuple(made.tokens) for made in samples}) == 4
    again = rollouts(model, PROMPTS[2:3], sampling, 4)
    assert [m.tokens for m in again[0]] == [m.tokens for m in found[2]]


@KINDS
def test_a_stream_is_what_a_batch_gives_with_stop_strings_too(build: Any) -> None:
    model = build()
    free = generate(model, PROMPTS, SamplingSettings(12), decode=decode)
    stops = (free[0].text[5:7], free[1].text[6:9])
    for sampling in (SamplingSettings(12), SamplingSettings(12, stop_strings=stops)):
        batched = generate(model, PROMPTS, sampling, decode=decode)
        streamed = ["".join(stream(model, prompt, sampling, decode)) for prompt in PROMPTS]
        assert streamed == [made.text for made in batched]
    assert {made.stopped_by for made in batched} >= {"string"}


def test_a_network_without_a_cache_can_be_streamed() -> None:
    class Forgetful(nn.Module):
        """Reads the whole text for each token; the next one is the sum of all."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, tokens: torch.Tensor, **_: Any) -> Any:
            logits = nn.functional.one_hot(tokens.cumsum(1) % 26, 26).float()
            return type("Out", (), {"logits": logits})

    assert "".join(stream(Forgetful(), [1, 2], SamplingSettings(4), decode)) == "dgmy"
