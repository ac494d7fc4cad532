"""Many answers at once are those that one prompt at a time gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from agent_forge.errors import ConfigError
from agent_forge.infer import generate as engine
from agent_forge.infer.generate import SamplingSettings, generate, shared_prefix
from tests.support.networks import shaken

VOCAB = 97
HEADER = (5, 17, 3, 88, 41, 2, 9, 60)


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(32 + i) for i in ids)


def llama(**shape: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.4,  # far apart, so that no two tokens are equally likely
            **shape,
        )
    ).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    shape = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4)
    return GPT2LMHeadModel(shape).eval()


def some_prompts(count: int, header: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    own = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (count,), generator=own).tolist()
    drawn = (torch.randint(VOCAB, (n,), generator=own).tolist() for n in lengths)
    return [(*header, *prompt) for prompt in drawn]


def by_transformers(model: Any, prompt: tuple[int, ...], ends: list[int]) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=0,
        )
    made: list[int] = out[0, len(prompt) :].tolist()
    return made[:-1] if made[-1] in ends else made


@pytest.mark.parametrize("header", [(), HEADER], ids=["apart", "shared beginning"])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_answers_are_those_of_transformers(
    build: Any, header: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, ends = build(), some_prompts(40, header), [7, 8, 9]
    monkeypatch.setattr(engine, "CACHED_TOKENS", 500)  # several batches
    answers = generate(
        model, prompts, SamplingSettings(20, stop_tokens=frozenset(ends)), decode=letters
    )
    assert [a.tokens for a in answers] == [by_transformers(model, p, ends) for p in prompts]
    assert {a.truncated for a in answers} == {True, False}
    assert all(a.truncated == (len(a.tokens) == 20) for a in answers)
    assert all(a.text == letters(a.tokens) for a in answers)


def test_what_prompts_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = llama(), some_prompts(12, HEADER * 5)
    monkeypatch.setattr(engine, "CACHED_TOKENS", 300)
    read: list[tuple[int, int]] = []
    logits: list[int] = []

    def forward(tokens: torch.Tensor, **named: Any) -> Any:
        out = inner(tokens, **named)
        read.append((tokens.shape[0], tokens.shape[1]))
        logits.append(out.logits.shape[1])
        return out

    inner = model.forward
    forward.__signature__ = __import__("inspect").signature(inner)  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "forward", forward)
    generate(model, prompts, SamplingSettings(3), decode=letters)
    assert read[:2] == [(1, 1), (1, len(HEADER) * 5)]  # the first shows what cache it has
    own = sum(len(prompt) - len(HEADER) * 5 for prompt in prompts)
    written = 2 * len(prompts)  # the third token is never read
    assert sum(rows * tokens for rows, tokens in read[2:]) == own + written
    assert set(logits) == {1}


def test_our_network_answers_as_it_does_alone() -> None:
    model = shaken(3)
    own = torch.Generator().manual_seed(0)
    with torch.no_grad():  # else it repeats itself, whatever it has read
        for parameter in model.parameters():
            parameter.add_(0.6 * torch.randn(parameter.shape, generator=own))
    size = model.settings.vocab_size
    prompts = [
        (1, 2, 3, *torch.randint(size, (n,), generator=own).tolist()) for n in (4, 9, 4, 30, 11, 1)
    ]
    free = generate(model, prompts, SamplingSettings(40), decode=letters)
    ends = frozenset(answer.tokens[3] for answer in free[:3])  # so that rows leave the batch
    answers = generate(model, prompts, SamplingSettings(40, stop_tokens=ends), decode=letters)
    sampling = SamplingSettings(max_new_tokens=40, stop_tokens=ends)
    alone = [generate(model, [prompt], sampling)[0] for prompt in prompts]
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    assert [a.truncated for a in answers] == [a.stopped_by == "length" for a in alone]
    assert len({len(a.tokens) for a in answers}) > 2


def test_a_stop_string_ends_an_answer_before_it() -> None:
    model, prompts = llama(), some_prompts(10)
    free = generate(model, prompts, SamplingSettings(20), decode=letters)
    stop = free[0].text[4:6]
    answers = generate(
        model, prompts, SamplingSettings(20, stop_strings=(stop, "never said")), decode=letters
    )
    assert answers[0].text == free[0].text[: free[0].text.find(stop)]
    assert not answers[0].truncated
    for before, after in zip(free, answers, strict=True):
        assert after.text == before.text.partition(stop)[0]
        assert after.truncated == (stop not in before.text)


def test_a_stop_string_within_a_thought_ends_nothing() -> None:
    model, prompts = llama(), some_prompts(1)
    (free,) = generate(model, prompts, SamplingSettings(40), decode=letters)
    end, stop = free.text[20], free.text[30:32]
    place = free.text.index(end)

    def behind(ids: Sequence[int]) -> str:
        """Nothing before the first `end`; the tail of a text does not show where it was."""
        return letters(ids).partition(end)[2] if list(ids) == free.tokens[: len(ids)] else stop

    sampling = SamplingSettings(40, stop_strings=(stop,))
    (found,) = generate(model, prompts, sampling, decode=behind)
    assert found.text == free.text[place + 1 :].partition(stop)[0]
    assert len(found.tokens) > place


def test_shared_prefix_leaves_each_prompt_a_token() -> None:
    assert shared_prefix([(1, 2, 3), (1, 2, 3)]) == 2
    assert shared_prefix([(1, 2), (1, 2, 3, 4)]) == 1
    assert shared_prefix([(1, 2, 9), (1, 2, 3, 4)]) == 2
    assert shared_prefix([(4,), (5, 6)]) == 0
    assert shared_prefix([]) == 0


def test_a_prompt_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        generate(llama(), [(1,), ()], SamplingSettings(3), decode=letters)


def test_a_network_without_a_cache_reads_all_again() -> None:
    class Forgetful(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, tokens: torch.Tensor, **_: Any) -> Any:
            logits = self.inner(tokens, use_cache=False).logits
            return type("Out", (), {"past_key_values": None, "logits": logits})

    prompts, sampling = some_prompts(4, HEADER), SamplingSettings(5)
    found, wanted = (generate(m, prompts, sampling) for m in (Forgetful(), llama()))
    assert [a.tokens for a in found] == [a.tokens for a in wanted]
