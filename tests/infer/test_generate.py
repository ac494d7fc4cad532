"""Generation: equal to recomputing everything, independent of the batch, stopping as told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from agent_forge.errors import ConfigError
from agent_forge.infer.generate import SamplingSettings, choose, generate, stream
from tests.support.networks import network

PROMPTS = [[5, 6, 7], [9, 8, 7, 6], [1, 2, 3], [4]]


def decode(tokens: object) -> str:
    return "".join(chr(97 + t % 26) for t in tokens)  # type: ignore[attr-defined]


def test_greedy_equals_recomputing_the_whole_text() -> None:
    model = network(sw_window=6)
    (found,) = generate(model, [[5, 6, 7]], SamplingSettings(max_new_tokens=12, halt_threshold=1.0))
    text = [5, 6, 7]
    with torch.no_grad():
        for _ in range(12):
            text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert found.tokens == text[3:] and found.stopped_by == "length"
    assert found.steps == [3] * 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_does_not_depend_on_its_batch(temperature: float) -> None:
    model = network()
    sampling = SamplingSettings(max_new_tokens=8, temperature=temperature, seed=3)
    together = generate(model, PROMPTS, sampling)
    alone = [generate(model, [prompt], sampling)[0] for prompt in PROMPTS]
    assert [g.tokens for g in together] == [g.tokens for g in alone]


def test_the_seed_decides() -> None:
    model = network()

    def text(seed: int) -> list[int]:
        sampling = SamplingSettings(max_new_tokens=20, temperature=2.0, seed=seed)
        return generate(model, [[1, 2]], sampling)[0].tokens

    assert text(1) == text(1) != text(2)


def test_halting_saves_steps() -> None:
    (found,) = generate(network(), [[1]], SamplingSettings(max_new_tokens=5, halt_threshold=0.0))
    assert found.steps == [1] * 5


def draws(sampling: SamplingSettings, logits: list[float], count: int = 300) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {choose(torch.tensor(logits), sampling, generator) for _ in range(count)}


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = [3.0, 2.0, 1.0, -1.0]  # about 0.66, 0.24, 0.09, 0.01
    assert draws(SamplingSettings(temperature=1.0), logits) == {0, 1, 2, 3}
    assert draws(SamplingSettings(temperature=1.0, top_k=2), logits) == {0, 1}
    assert draws(SamplingSettings(temperature=1.0, top_p=0.8), logits) == {0, 1}
    assert draws(SamplingSettings(temperature=1.0, top_p=0.01), logits) == {0}
    assert draws(SamplingSettings(temperature=1.0, top_k=99), logits) == {0, 1, 2, 3}
    assert draws(SamplingSettings(), logits) == {0}


def test_stop_tokens_and_strings_end_it() -> None:
    model = network()
    free = generate(model, [[5, 6]], SamplingSettings(max_new_tokens=12), decode=decode)[0]
    fifth = free.tokens[4]
    cut = free.tokens.index(fifth)
    stopped = generate(
        model, [[5, 6]], SamplingSettings(max_new_tokens=12, stop_tokens=frozenset([fifth]))
    )
    assert stopped[0].tokens == free.tokens[:cut] and stopped[0].stopped_by == "token"
    word = free.text[3:6]
    sampling = SamplingSettings(max_new_tokens=12, stop_strings=(word, "@"))
    (by_string,) = generate(model, [[5, 6]], sampling, decode=decode)
    assert by_string.text == free.text[: free.text.index(word)]
    assert by_string.stopped_by == "string"


def test_a_stream_gives_the_same_text_and_never_a_piece_of_a_stop_string() -> None:
    model = network()
    free = generate(model, [[5, 6]], SamplingSettings(max_new_tokens=12), decode=decode)[0]
    assert "".join(stream(model, [5, 6], SamplingSettings(max_new_tokens=12), decode)) == free.text
    word = free.text[4:7]
    pieces = list(
        stream(model, [5, 6], SamplingSettings(max_new_tokens=12, stop_strings=(word,)), decode)
    )
    assert "".join(pieces) == free.text[: free.text.index(word)]


def test_a_stream_is_what_all_tokens_are_decoded_to() -> None:
    """Also where a later token changes how those before it read, or half a character ends it."""

    def cleaned(ids: Iterable[int]) -> str:
        text = "".join((" .", " n't", "a", "\ufffd")[i % 4] for i in ids)
        return text.replace(" .", ".").replace("a n't", "an't")

    for most in range(1, 30):
        sampling = SamplingSettings(max_new_tokens=most, temperature=1.0)
        (whole,) = generate(network(), [[5, 6]], sampling, decode=cleaned)
        pieces = list(stream(network(), [5, 6], sampling, cleaned))
        assert "".join(pieces) == whole.text == cleaned(whole.tokens)


@pytest.mark.parametrize(
    "changes",
    [
        *({"temperature": -1.0}, {"temperature": 1e-9}, {"temperature": float("nan")}),
        *({"top_k": -1}, {"top_p": 0.0}, {"max_new_tokens": 0}, {"seed": -1}, {"seed": 2**63}),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"at least|is 0, or from"):
        SamplingSettings(**changes)  # type: ignore[arg-type]


def test_bad_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        generate(network(), [[]], SamplingSettings())
    with pytest.raises(ValueError, match="decode"):
        generate(network(), [[1]], SamplingSettings(stop_strings=("x",)))


def test_a_network_that_has_to_be_told_the_positions() -> None:
    """Bamba counts from 0 again at every token that it reads with a cache."""
    from transformers import BambaConfig, BambaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    memory = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
    layers = {"num_hidden_layers": 2, "attn_layer_indices": [0, 1], "num_key_value_heads": 2}
    model = BambaForCausalLM(BambaConfig(vocab_size=26, **shape, **memory, **layers)).eval()
    text = [5, 6, 7]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
        for _ in range(12):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    pieces = stream(model, text[:3], SamplingSettings(max_new_tokens=12), decode)
    assert "".join(pieces) == decode(text[3:])


@pytest.mark.parametrize("kinds", ["lf", "fl", "llf"])
def test_a_network_whose_layers_keep_states_beside_keys(kinds: str) -> None:
    """MiniMax: linear attention, wherever it comes; many prompts at once, and one."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "head_dim": 8}
    shape |= {"num_key_value_heads": 2, "num_local_experts": 2, "num_hidden_layers": len(kinds)}
    layers = [{"l": "linear_attention", "f": "full_attention"}[kind] for kind in kinds]
    config = MiniMaxConfig(vocab_size=26, layer_types=layers, block_size=4, **shape)
    model, texts = MiniMaxForCausalLM(config).eval(), [[5, 6, 7], [3, 9], [3, 9, 1, 4, 20]]
    wanted = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape))
        for text in texts:
            whole = list(text)
            for _ in range(10):
                logits = model(torch.tensor([whole]), use_cache=False).logits
                whole.append(int(logits[0, -1].argmax()))
            wanted.append(whole[len(text) :])
    found = generate(model, texts, SamplingSettings(max_new_tokens=10))
    assert [text.tokens for text in found] == wanted
    pieces = stream(model, texts[0], SamplingSettings(max_new_tokens=10), decode)
    assert "".join(pieces) == decode(wanted[0])
