"""`forge generate` and `forge chat`, on our models and on any causal language model."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_forge.cli.generate import _print
from agent_forge.contract.phase import ModelRef
from agent_forge.data.tokenizer import Tokenizer
from agent_forge.errors import ConfigError, DamagedFile, NotFound
from agent_forge.infer import tool_use
from agent_forge.infer.chat import ChatModel, open_chat_model, toolbox_of
from agent_forge.infer.generate import GeneratedText, SamplingSettings
from agent_forge.infer.generate import generate as generate_ids
from agent_forge.infer.tool_use import CALL, END_CALL
from agent_forge.model.hf import config_dict
from agent_forge.store.models import ModelStorage
from tests.support.command_line import Forge
from tests.support.networks import shaken

WORDS = ["red", "green", "blue", "cat", "dog", "sun"]


@pytest.fixture
def ours(storage: ModelStorage) -> Path:
    return saved(storage, "cognate", {})


def saved(storage: ModelStorage, phase: str, record: dict[str, Any]) -> Path:
    model = shaken(0)
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 9, 300)
    storage.save_model(
        model,
        "s1",
        phase,
        "m1",
        record,
        config=config_dict(model.settings),
        tokenizer_files=tokenizer.files(),
    )
    return storage.find(f"{phase}.m1.s1")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate([*WORDS, "<unk>", "</s>"])}
    core = Core(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    shape = LlamaConfig(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    place = tmp_path / "llama"
    LlamaForCausalLM(shape).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_ours_says_what_generation_gives(ours: Path, forge: Forge) -> None:
    result = forge(f"generate {ours} red --max-tokens 6 --json")
    model, tokenizer = shaken(0), Tokenizer.load(ours)
    made = generate_ids(model, [tokenizer.encode("red")], SamplingSettings(max_new_tokens=6))[0]
    known = [i for i in made.tokens if i < tokenizer.vocab_size]
    assert result.document["text"] == tokenizer.decode(known)
    assert forge(f"generate {ours} red --max-tokens 6").out == result.document["text"] + "\n"


def test_seed_and_temperature_change_what_is_said(ours: Path, forge: Forge) -> None:
    def said(options: str) -> str:
        return forge(f"generate {ours} red --max-tokens 12 {options}").out

    warm = said("--temperature 5 --seed 1")
    assert warm == said("--temperature 5 --seed 1") != said("--temperature 5 --seed 2")
    assert said("") == said("--temperature 5 --top-k 1") == said("--temperature 5 --top-p 0.000001")


def test_a_foreign_model_speaks_greedily_as_transformers_would(foreign: Path) -> None:
    said = "".join(open_chat_model(foreign).complete("red cat", SamplingSettings(max_new_tokens=5)))
    model = LlamaForCausalLM.from_pretrained(foreign)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(foreign)
    ids = tokenizer("red cat", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=5, do_sample=False)[0, 2:]
    assert said == tokenizer.decode(made, skip_special_tokens=True)
    assert (
        "".join(
            open_chat_model(foreign).reply(
                [{"role": "user", "content": "red cat"}], SamplingSettings(5)
            )
        )
        == said
    )


def test_a_chat_remembers_its_turns(
    ours: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("red\nblue\n\n"))
    result = forge(f"chat {ours} --system sun --max-tokens 4")
    voice, turns, lines = open_chat_model(ours), [{"role": "system", "content": "sun"}], []
    for said in ("red", "blue"):
        turns.append({"role": "user", "content": said})
        lines.append("".join(voice.reply(turns, SamplingSettings(max_new_tokens=4))))
        turns.append({"role": "assistant", "content": lines[-1]})
    assert result.code == 0 and result.out == "".join(f"{line}\n" for line in lines)


def test_thoughts_are_shown_hidden_or_left_out(
    ours: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(options: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("red\n\n"))
        result = forge(f"chat {ours} --max-tokens 4 {options}")
        assert result.code == 0
        return result.out, result.err

    shown, hidden = said("--think forced"), said("--think forced --hide-thoughts")
    assert "(thinks: " in shown[1] and "thinks" not in hidden[1] and shown[0] == hidden[0]
    assert "thinks" not in said("--think off")[1]
    assert forge(f"chat {ours} --think loudly").code == 2


def test_tools_are_called_shown_and_left_out(
    ours: Path,
    storage: ModelStorage,
    forge: Forge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model says what is given; tools, the user's own among them, are real."""
    baked = saved(storage, "baking", {"tools": ["calc", "read"]})
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "stock.json").write_text('{"beet": {"code": 7697}}')
    (tmp_path / "mine.py").write_text('def calc(expression: str) -> str:\n    return "mine"\n')
    tokenizer = Tokenizer.load(baked)

    def said(call: str, options: str) -> tuple[str, str]:
        turns = iter([([CALL, *tokenizer.encode(call)], END_CALL), (tokenizer.encode("done"), 5)])

        def generate(network: Any, prompts: Any, sampling: Any) -> list[GeneratedText]:
            said, end = next(turns)
            return [GeneratedText(said, stopped_by="token", stop_token=end)]

        monkeypatch.setattr(tool_use, "generate", generate)
        monkeypatch.setattr("sys.stdin", io.StringIO("red\n\n"))
        result = forge(f"chat {baked} --think off --max-tokens 4 {options}")
        assert result.code == 0, result.err
        return result.out, result.err

    files = f"--files {tmp_path / 'files'}"
    out, err = said("calc 2*21", "")
    assert out == "done\n" and "(result: 42)" in err and '"expression": "2*21"' in err
    assert "(result: 7697)" in said("read stock.json beet code", files)[1]
    assert "(result: error: no folder" in said("read stock.json beet code", "")[1]
    assert "(result: error: " in said("clock", "")[1]  # it was not taught that one
    assert "(result: mine)" in said("calc 2*21", f"--tools {tmp_path / 'mine.py'}")[1]
    assert "calls" not in said("calc 2*21", "--no-tools")[1]
    (tmp_path / "files" / "stock.json").write_text('{"beet": {"code": "\\u001b[2J"}}')
    assert r"(result: \x1b[2J)" in said("read stock.json beet code", files)[1]
    own = toolbox_of(baked, tmp_path / "mine.py", None)
    assert own and set(own.names) == {"calc", "read"}  # no more than it was taught
    assert forge(f"chat {ours} {files}").code == 2  # it was taught none
    assert forge(f"chat {baked} --no-tools {files}").code == 2
    assert forge(f"chat {baked} --files {tmp_path / 'nowhere'}").code == 2
    assert forge(f"chat {baked} --tools {tmp_path / 'nowhere.py'}").code == 2
    record = json.loads((baked / "metadata.json").read_text())
    (baked / "metadata.json").write_text(json.dumps({**record, "tools": 5}))
    assert forge(f"chat {baked}").code == 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stdout", [Terminal, io.StringIO])
def test_an_answer_does_not_steer_a_terminal(
    stdout: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout())
    said = "a\x1b[2Jb\x9b1m\r\tc\n\u00e9"
    assert _print(iter(said)) == said
    shown = r"a\x1b[2Jb\x9b1m\r" + "\tc\n\u00e9"
    assert sys.stdout.getvalue() == (shown if stdout is Terminal else said) + "\n"  # type: ignore[attr-defined]


def test_a_prompt_may_come_from_stdin(
    ours: Path, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("red"))
    assert (
        forge(f"generate {ours} - --max-tokens 3").out
        == forge(f"generate {ours} red --max-tokens 3").out
    )


def test_what_cannot_speak_is_refused(ours: Path, tmp_path: Path, forge: Forge) -> None:
    with pytest.raises(NotFound, match="is not a folder"):
        open_chat_model(tmp_path / "nothing")
    with pytest.raises(NotFound, match=r"no config\.json"):
        open_chat_model(tmp_path)
    with pytest.raises(ConfigError, match="empty"):
        open_chat_model(ours).complete("", SamplingSettings())
    assert forge(f"generate {ours} x --top-p 2").code == 2
    (ours / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(DamagedFile):
        open_chat_model(ours)


def test_a_merged_model_of_ours_speaks(ours: Path, tmp_path: Path) -> None:
    said = "".join(open_chat_model(ours).complete("red", SamplingSettings(6)))
    copy = tmp_path / "merged"
    shutil.copytree(ours, copy)
    for name in ("metadata.json", "metrics.json", "manifest.json"):
        (copy / name).unlink()
    assert "".join(open_chat_model(copy).complete("red", SamplingSettings(6))) == said


def test_a_model_that_is_handed_over_opens_verified(ours: Path) -> None:
    ref = ModelRef("m1", ours, {})
    said = "".join(open_chat_model(ours).complete("red", SamplingSettings(6)))
    assert "".join(ChatModel(ref.open()).complete("red", SamplingSettings(6))) == said
    content = bytearray((ours / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (ours / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedFile):
        ref.open()


def test_what_is_no_text_is_refused(ours: Path, foreign: Path, tmp_path: Path) -> None:
    for place in (ours, foreign):
        with pytest.raises(ConfigError, match=r"UTF-8|surrogate"):
            "".join(open_chat_model(place).complete("\udcff", SamplingSettings(2)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a language model"):
        open_chat_model(tmp_path)


@pytest.mark.parametrize("text", ["[]", '{"model_type": "llama"}', "no json"])
def test_a_broken_foreign_model_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DamagedFile):
        open_chat_model(tmp_path)
