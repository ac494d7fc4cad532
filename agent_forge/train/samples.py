"""What a trained network shows of itself for its card: a few texts, and its latency."""

from __future__ import annotations

import time

import torch

from agent_forge.data.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL
from agent_forge.infer.generate import Sampling, generate
from agent_forge.model.network import ForgeNetwork
from agent_forge.train.corpus import TEXT, Corpus

SAMPLE_PROMPTS = ("copy k m a t", "sort 52814", "max 4718:2905")


def sample_texts(model: ForgeNetwork, corpus: Corpus) -> list[dict[str, str]]:
    """What the model says to a few prompts, greedily, and how it goes on with a story."""
    encode = corpus.tokenizer.encode_chat
    chats = [encode([{"role": "user", "content": p}], reply=True) for p in SAMPLE_PROMPTS]
    opening = next(p.examples[0].completion for p in corpus.parts if p.domain == TEXT)
    start = " ".join(opening.split()[:8])
    prompts = [*chats, corpus.tokenizer.encode(start)]
    ends = frozenset((SPECIAL[END_OF_TEXT], SPECIAL[END_OF_TURN]))
    made = generate(model, prompts, Sampling(max_new_tokens=60, stop_tokens=ends))
    texts = [corpus.tokenizer.decode(result.tokens) for result in made]
    shown = (*SAMPLE_PROMPTS, start)
    return [{"prompt": p, "text": text} for p, text in zip(shown, texts, strict=True)]


def latency_ms(model: ForgeNetwork) -> float:
    """Milliseconds for the next token of 512, without a cache; the best of three."""
    tokens = torch.zeros(1, 512, dtype=torch.long, device=next(model.parameters()).device)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        model.predict(tokens)
        took.append(time.perf_counter() - began)
    return min(took) * 1000
