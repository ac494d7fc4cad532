"""Chat templates are programs of strangers: they have limits, and say what they broke."""

from __future__ import annotations

import time
from typing import Any

import pytest

from agent_forge.errors import ConfigError
from agent_forge.model.chat import render
from tests.support.tokenizers import byte_tokenizer

TALK = [{"role": "user", "content": "hi"}]
LONG = "{% for i in range(99999) %}"


def with_template(text: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = text
    return tokenizer


def test_a_template_writes_a_conversation() -> None:
    text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}<assistant>{% endif %}"
    assert render(with_template(text), TALK, reply=True) == "<user>hi<assistant>"
    assert render(with_template(text), TALK, reply=False) == "<user>hi"
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert render(with_template(marked), TALK, reply=False) == "hi"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (f"{LONG}{LONG}{{% endfor %}}{{% endfor %}}", "more than 3 s"),
        ("{{ 9 ** 99999999 % 7 }}", "powers"),
        ("{{ ('a ' * 100000000)|wordcount }}", "MemoryError"),
        ("{{ 'a' * 2000000 }}", "characters"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('no') }}", "refuses a conversation"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% endfor %}", "TemplateSyntaxError"),
    ],
)
def test_limits(template: str, told: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match=told):
        render(with_template(template), TALK, reply=True)
    assert time.monotonic() - began < 30
