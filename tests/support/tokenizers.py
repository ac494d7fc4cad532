"""Tokenizers for tests: one of ours, trained on made-up text, and one with a token a byte."""

from __future__ import annotations

from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agent_forge.data.tokenizer import Tokenizer

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "en", "ing", "o", "ust")]

TEXTS = [
    f"The {first}{second} of {third}{first} in {1900 + i}: {i} + {i} = {2 * i}.\n"
    for i, (first, second, third) in enumerate(
        zip(SYLLABLES * 7, (SYLLABLES * 7)[3:], (SYLLABLES * 7)[11:], strict=False)
    )
]

TOKENIZER = Tokenizer.train(TEXTS, 512)

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """A token for each byte, with a start; digits that follow a space are one token with it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(
        models.BPE({c: i for i, c in enumerate([*letters, "\u0120" + "7"])}, [("\u0120", "7")])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer
