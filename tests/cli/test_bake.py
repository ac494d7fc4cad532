"""`forge bake`: a prompt in the weights of models of other makers, and of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agent_forge.model.opened import open_model
from agent_forge.phases.phase6_baking import bake_prompt
from agent_forge.store.models import ModelStorage
from tests.support.command_line import Forge
from tests.support.eval_models import FAMILIES, own_model
from tests.support.tokenizers import CHAT, byte_tokenizer

LONGER = {"llama": {"max_position_embeddings": 128}, "gpt2": {"n_positions": 128}}
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT
NEVER_SHOWN = CHAT.replace("{% for m in messages %}", "{% for m in messages if m.role == 'user' %}")
QUICK = "--steps 25 --rate 0.02 --json"


def model(place: Path, kind: str, template: str | None = None, scale: float = 4.0) -> Path:
    """An untrained model that listens to what stands before."""
    torch.manual_seed(0)
    shape = AutoConfig.for_model(kind, **{**FAMILIES[kind], **LONGER[kind]})
    network = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if any(part in name for part in ("v_proj", "o_proj", "c_attn.weight", "c_proj.weight")):
                weight.mul_(scale)
    network.save_pretrained(place)
    byte_tokenizer(template).save_pretrained(place)
    return place


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("Be kind.\n")
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.txt"
    path.write_text("".join(f"ask {word}\n" for word in "abcdefghijkl"))
    return path


@pytest.mark.parametrize("kind, template", [("llama", None), ("gpt2", None), ("llama", CHAT)])
def test_a_prompt_is_baked_measured_and_written_as_an_ordinary_model(
    kind: str, template: str | None, tmp_path: Path, prompt: Path, questions: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", kind, template), tmp_path / "out"
    line = f"bake {parent} {out} --prompt {prompt} --questions {questions} {QUICK}"
    result = forge(line)
    assert result.code == 0, result.err
    told = json.loads(result.out)
    assert told["kl_after"] < 0.9 * told["kl_before"] and told["questions"] == 4
    assert told["kl_left"] == pytest.approx(told["kl_after"] / told["kl_before"])
    assert told["sentence"].startswith("baked" if told["kl_left"] <= 0.1 else "not baked")
    assert told["prompt"] == ("as system message" if template else "before the text")
    assert told["cpu_seconds"] > 0
    record = json.loads((out / "baking.json").read_text())
    assert record["prompt"] == "Be kind.\n" and record["verdict"]["kl_left"] == told["kl_left"]
    assert record["settings"]["steps"] == 25 and record["questions_learned"] == 8
    card = (out / "README.md").read_text()
    assert "base_model_relation: finetune" in card and "> Be kind." in card
    assert ("It answers without this prompt" in card) == told["baked"]
    names = [set(AutoModelForCausalLM.from_pretrained(p).state_dict()) for p in (parent, out)]
    assert names[0] == names[1]
    if kind == "gpt2":  # which has dropout
        again = tmp_path / "again"
        assert forge(line.replace(f" {out} ", f" {again} ")).code == 0
        for name in ("model.safetensors", "baking.json", "config.json"):
            assert (out / name).read_bytes() == (again / name).read_bytes()


def test_one_of_ours_is_baked(
    storage: ModelStorage, tmp_path: Path, prompt: Path, questions: Path, forge: Forge
) -> None:
    parent, out = own_model(storage, "a", 0), tmp_path / "out"
    options = f"--questions {questions} --steps 8 --lora-rank 0 --json"
    result = forge(f"bake {parent} {out} --prompt {prompt} {options}")
    assert result.code == 0, result.err
    assert json.loads(result.out)["prompt"] == "as system message"
    assert open_model(out).chats and forge(f"generate {out} hello --max-tokens 2").code == 0


def test_types_of_the_weights_stay(
    tmp_path: Path, prompt: Path, questions: Path, forge: Forge
) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "out"
    half = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.bfloat16)
    half.save_pretrained(parent)
    options = f"--questions {questions} --steps 3 --direction reverse --strength 0.5"
    result = forge(f"bake {parent} {out} --prompt {prompt} {options}")
    assert result.code == 0, result.err
    assert "ordinary text, nats a token" in result.out and "baked" in result.err
    sizes = [(place / "model.safetensors").stat().st_size for place in (parent, out)]
    assert abs(sizes[0] - sizes[1]) < 2000


@pytest.mark.parametrize("template", [NO_SYSTEM, NEVER_SHOWN])
def test_a_template_without_system_messages_gets_the_prompt_before_the_text(
    template: str, tmp_path: Path, prompt: Path, forge: Forge
) -> None:
    parent = model(tmp_path / "parent", "llama", template)
    result = forge(f"bake {parent} {tmp_path / 'out'} --prompt {prompt} --dry-run --json")
    told = json.loads(result.out)
    assert result.code == 0 and "takes no system message" in told["prompt"]
    assert told["questions_learned"] == 80 and told["questions_held_out"] == 40
    assert told["prompt_tokens"] == len("Be kind.\n\n")
    assert not (tmp_path / "out").exists()


def test_what_teaches_is_never_asked_in_the_verdict() -> None:
    for name in ("openers", "questions"):
        texts = json.loads(bake_prompt.QUESTIONS.read_text())[name]
        learned, held_out = bake_prompt.split(texts)
        assert len(texts) == len({*texts}) == 120 and len(held_out) == 40
        assert not {*learned} & {*held_out} and bake_prompt.split(texts[::-1])[1] == held_out


def test_near_copies_of_a_question_are_on_its_side() -> None:
    asked = [f"What is the {word} of Bern?" for word in ["age", "size", "name", "mayor", "river"]]
    forms = ("{}", "Question: {}", "  {} ", "{}\nAnswer:")
    texts = [form.format(q) for q in asked for form in forms] + [q.upper() for q in asked]
    learned, held_out = bake_prompt.split(texts)
    assert sorted(learned + held_out) == sorted(texts) and len(held_out) == 5
    taught = {question.casefold() for question in asked if any(question in t for t in learned)}
    assert not any(question in text.casefold() for question in taught for text in held_out)
    big = ["a", "A", "a?", "a.", "b", "c"]  # each side has something
    assert all(bake_prompt.split(big))


def test_what_cannot_be_done_is_refused_before_any_work(
    tmp_path: Path, prompt: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any, **named: Any) -> Any:
        raise AssertionError("work was begun")

    monkeypatch.setattr(bake_prompt, "bake", never)
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "out"
    contents = {"blank": b" \n", "latin": b"caf\xe9", "long": b"x" * 200, "two.txt": b"a\nb\na\n"}
    contents |= {"rows.jsonl": b'{"answer": "x"}\n', "none.jsonl": b""}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert forge(f"quantize {parent} {tmp_path / 'packed'}").code == 0
    for line, told in (
        (f"{parent} {out} --prompt {tmp_path / 'nowhere'}", "cannot read"),
        (f"{parent} {out} --prompt {tmp_path}", "not a file"),
        (f"{parent} {out} --prompt {tmp_path / 'blank'}", "no prompt to bake"),
        (f"{parent} {out} --prompt {tmp_path / 'latin'}", "not UTF-8"),
        (f"{parent} {out} --prompt {tmp_path / 'long'}", "the model reads 128"),
        (f"{parent} {out} --prompt {prompt} --questions {tmp_path / 'two.txt'}", "2 different"),
        (f"{parent} {out} --prompt {prompt} --questions {tmp_path / 'rows.jsonl'}", "'prompt'"),
        (f"{parent} {out} --prompt {prompt} --questions {tmp_path / 'none.jsonl'}", "is empty"),
        (f"{parent} {out} --prompt {prompt} --direction both", "neither forward nor reverse"),
        (f"{parent} {parent / 'inside'} --prompt {prompt}", "lies in the model it is made of"),
        (f"{parent} {tmp_path / 'packed'} --prompt {prompt}", "exists"),
        (f"{tmp_path / 'packed'} {out} --prompt {prompt}", "cannot be trained"),
        (f"{tmp_path / 'no_model'} {out} --prompt {prompt}", "no_model"),
    ):
        result = forge(f"bake {line}")
        assert result.code in (2, 4) and told in result.err, (line, result.err)
        assert not out.exists()


def test_a_file_that_says_something_else_is_not_handed_over(
    tmp_path: Path, prompt: Path, questions: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, out = model(tmp_path / "parent", "llama"), tmp_path / "out"
    stored = bake_prompt._as_stored

    def damaged(*given: Any) -> Any:
        weights = stored(*given)
        return weights.derived(lambda name: weights[name] * 1.1)

    monkeypatch.setattr(bake_prompt, "_as_stored", damaged)
    result = forge(f"bake {parent} {out} --prompt {prompt} --questions {questions} --steps 2")
    assert result.code == 1 and "does not score what was measured" in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("parent", "prompt.txt", "questions.txt")
    ]
