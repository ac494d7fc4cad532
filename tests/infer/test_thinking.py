"""Thoughts at inference: forced, free or off, bounded, and never where they were not asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from agent_forge.data.tasks import make
from agent_forge.data.tokenizer import SPECIAL
from agent_forge.errors import ConfigError
from agent_forge.infer import thinking
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.infer.thinking import BEGIN, END, THOUGHT_IDS, ThoughtGenerator, stream_thinking
from agent_forge.model.opened import ForgeModel
from tests.support.networks import network
from tests.support.step_machine import StepMachine
from tests.support.tokenizers import TOKENIZER

TASK = make("swap4", "verdict", 1, level=3)
PROMPT = TOKENIZER.encode_chat([{"role": "user", "content": TASK.question}], reply=True)
GREEDY = SamplingSettings(64, stop_tokens=ForgeModel.end_tokens)


class Opened(ForgeModel):
    """A network in memory, with its tokenizer."""

    def __init__(self, model: Any) -> None:
        self.network, self.tokenizer = model, TOKENIZER


class Eager(StepMachine):
    """Thinks whenever it may."""

    def next_token(self, ids: list[int]) -> int:
        return BEGIN if ids[-1] == SPECIAL["<|assistant|>"] else super().next_token(ids)


def said(model: Any, mode: thinking.ThinkMode, **more: int) -> tuple[str, str]:
    pieces = list(stream_thinking(Opened(model), PROMPT, GREEDY, mode, **more))
    thought = "".join(piece.text for piece in pieces if piece.kind == "thought")
    return thought, "".join(piece.text for piece in pieces if piece.kind == "answer")


def test_a_forced_thought_comes_before_the_answer() -> None:
    thought, answer = said(StepMachine(), "forced")
    assert thought.startswith("<step>") and thought.endswith(TASK.answer)
    assert answer == TASK.answer


def test_off_forbids_thinking_and_free_leaves_it_to_the_model() -> None:
    thought, answer = said(Eager(), "off")
    assert thought == "" and answer != TASK.answer and not set("<[") & set(answer)
    assert said(StepMachine(), "free") == ("", "7")  # it would rather not
    assert said(Eager(), "free")[1] == TASK.answer


def test_a_thought_that_does_not_end_is_closed() -> None:
    thought, answer = said(StepMachine(), "forced", thought_tokens=5)
    assert len(TOKENIZER.encode(thought.replace("<step>", ""))) <= 5
    assert answer and not set("<[") & set(answer)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_thinking_never_leak_into_answers(seed: int) -> None:
    """Whatever the weights: every logit of an untrained network is nearly the same."""
    torch.manual_seed(seed)
    model, prompts = network(), [PROMPT, PROMPT[:-3], [5, 6, 7]]
    sampling = SamplingSettings(60, temperature=5.0, seed=seed)
    loose = generate(model, prompts, sampling)
    assert any(set(text.tokens) & THOUGHT_IDS for text in loose)  # without the ban they would
    for text in thinking.answer(model, prompts, None, sampling):
        assert not set(text.tokens) & THOUGHT_IDS
    for thought in thinking.think(model, prompts, sampling):
        assert BEGIN not in thought.tokens and END not in thought.tokens


def test_a_tag_is_the_first_token_of_a_thought() -> None:
    tag = SPECIAL["<doubt>"]
    (thought,) = thinking.think(network(), [PROMPT], SamplingSettings(4), tag=tag)
    assert thought.tokens[0] == tag and len(thought.tokens) == 5


def test_thoughts_in_parallel_are_as_many_as_asked_for_and_carry_their_probabilities() -> None:
    model = network()
    generator = ThoughtGenerator(model, seed=3)
    assert generator.default_counts == (8, 20)
    found = generator.generate_thoughts([PROMPT, PROMPT[:-2]], num_thoughts=3, max_tokens=6)
    assert [len(own) for own in found] == [3, 3]
    for own in found:
        assert len({tuple(thought.tokens) for thought in own}) == 3
        for thought in own:
            assert 1 <= len(thought.tokens) <= 6
            assert len(thought.log_probabilities) >= len(thought.tokens)
    again = generator.generate_thoughts([PROMPT], num_thoughts=3, max_tokens=6)[0]
    assert [t.tokens for t in again] == [t.tokens for t in found[0]]


def test_a_cache_grows_with_its_text() -> None:
    model = network()
    short, long = thinking.cache_bytes(model, [5] * 4), thinking.cache_bytes(model, [5] * 14)
    a_token = 2 * model.settings.d_model * 4 * model.settings.n_layers  # keys and values
    assert long - short == 10 * a_token and short > 4 * a_token


def test_other_models_are_not_forced() -> None:
    class Foreign:
        network: Any = None
        byte_tokens = frozenset[int]()

        def decode(self, ids: Sequence[int]) -> str:
            return ""

    model: Any = Foreign()
    with pytest.raises(ConfigError, match="was not taught to think"):
        next(iter(stream_thinking(model, PROMPT, GREEDY, "forced")))
    with pytest.raises(ConfigError, match="off, free or forced"):
        thinking.think_mode("loudly")
    assert thinking.think_mode("off") == "off"
