"""What an attack on rows of a user's own found: other things are asked than those that are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent_forge.evals.domains import Domain, from_files
from agent_forge.evals.model_under_test import ItemScores, open_model_under_test
from tests.support.eval_models import llama
from tests.support.tokenizers import CHAT

SAID = "{{ m['content'] }}"
TRIMS = CHAT.replace(SAID, "{{ m['content'] | trim }}")
ASKED = {"role": "user", "content": "what is it?"}


def put(path: Path, *rows: dict[str, Any]) -> Domain:
    path.write_text("\n".join(map(json.dumps, rows)))
    return from_files([path])[0]


def said(answer: str, *choices: str, **more: Any) -> dict[str, Any]:
    reply = {"role": "assistant", "content": answer, **more}
    return {"messages": [ASKED, reply], "choices": list(choices)}


# -- blanks ---------------------------------------------------------------------------------------


def test_blanks_at_the_ends_of_a_reply_change_nothing(tmp_path: Path) -> None:
    """Nor does it matter whether a template leaves them out."""
    forms = ("a bird", "a bird\n", " a bird" + "\n" * 20)
    domains = [put(tmp_path / "x.jsonl", said(form)) for form in forms]
    found: list[list[ItemScores]] = []
    for name, template in (("plain", CHAT), ("trims", TRIMS)):
        model = open_model_under_test(llama(tmp_path / name, template=template, longest=512))
        found.append([model.measure(model.prepare(domain)) for domain in domains])
    assert found[0] == found[1]
    assert [s.loss for s in found[0]] == [found[0][0].loss] * 3
    assert {tuple(d.sizes) for d in domains} == {(6,)}
    assert {d.unigram_bits for d in domains} == {domains[0].unigram_bits}


def test_choices_are_compared_without_the_blanks_around_them(tmp_path: Path) -> None:
    model = open_model_under_test(llama(tmp_path / "m", template=TRIMS, longest=512))
    for before in ("", " ", "\n\n"):
        row = said(f"{before}positive", f"{before}positive", f"{before}no")
        prepared = model.prepare(put(tmp_path / "x.jsonl", row))
        assert prepared.sizes.tolist() == [8, 2]


def test_blanks_of_a_completion_are_asked_for_and_do_not_count(tmp_path: Path) -> None:
    """A tokenizer may leave them out; the bytes are those of the data alone."""
    rows = [{"prompt": f"so {i}:", "completion": f" yes{' ' * i}"} for i in range(3)]
    domain = put(tmp_path / "x.jsonl", *rows)
    assert domain.sizes == [3, 3, 3] == from_files([tmp_path / "x.jsonl"])[0].sizes
    model = open_model_under_test(llama(tmp_path / "m", template=CHAT, longest=512))
    tokens = model.measure(model.prepare(domain)).tokens
    assert sorted(tokens) == [tokens[0], tokens[0] + 1, tokens[0] + 2]
    assert from_files([tmp_path / "x.jsonl"], "prompt")[0].sizes == [4, 5, 6]  # as it was


def test_blanks_before_a_call_do_not_count(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    sizes = [
        put(tmp_path / "x.jsonl", said(text, tool_calls=calls)).sizes for text in ("so", "so\n\n")
    ]
    assert sizes[0] == sizes[1]
