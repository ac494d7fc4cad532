"""A bundle: the C program computes, writes and splits texts as Python does, and trusts no file."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import regex
import torch

from agent_forge.data.tasks import FAMILIES, make
from agent_forge.data.tokenizer import END_OF_RESULT, SPECIAL, TOOL_CALL
from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile, NotFound
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.infer.native import native_decoder
from agent_forge.infer.thinking import THOUGHT_IDS, TOOL_IDS, stream_thinking
from agent_forge.native.bundle import MODEL, SOURCES, write_bundle
from agent_forge.quant.packed import KEY
from agent_forge.store import files
from tests.support.command_line import Forge
from tests.support.programs import (
    ODD,
    STORIES,
    Program,
    Spoil,
    by_torch,
    change,
    cut,
    entry,
    opened,
    put,
    restless,
    save,
)
from tests.support.tokenizers import TOKENIZER

TEXT = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(5)).tolist()
PRUNED = {**ODD, "n_heads": 2, "head_size": 14}  # heads that do not fill the width
WIDE = {"n_heads": 3, "head_size": 30}  # and that are wider together

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("make")), reason="there is no cc, or no make"
)


# -- what it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "embedding", "changes"),
    [
        ("ternary", "int4g32", {}),
        ("ternary", "int4g32", {"sw_window": 9, **ODD}),
        ("ternary_bitnet", "int4g20", {"sw_window": 6}),
        ("int3", "int8", ODD),
        ("ternary", "int4g32", PRUNED),
        ("ternary", "int4g32", WIDE),
        ("int4g32", "ternary", {}),
        ("int8", "", {}),
        ("", "", {"sw_window": 6}),
    ],
    ids=[
        *("usual", "odd sizes", "groups", "int3", "pruned", "wide heads"),
        *("ternary embedding", "int8", "fp32"),
    ],
)
def test_logits_are_those_of_torch(
    program: Program, tmp_path: Path, body: str, embedding: str, changes: Any
) -> None:
    folder = save(restless(**changes), tmp_path / "model", body, embedding, 0)
    wanted = by_torch(opened(folder).network, TEXT)
    assert float((program.logits(folder, TEXT) - wanted).abs().max()) < 1e-3


@pytest.mark.parametrize("embedding", ["int4g32", "ternary"])
def test_with_rounded_inputs_too_but_for_what_lies_between_two_roundings(
    program: Program, tmp_path: Path, embedding: str
) -> None:
    folder = save(restless(**ODD), tmp_path / "model", "ternary", embedding, 8)
    model = opened(folder).network
    apart = [
        float((program.logits(folder, [token]) - by_torch(model, [token])).abs().max())
        for token in range(100, 140)
    ]
    assert sum(each < 1e-3 for each in apart) > 35 and max(apart) < 1


def test_it_is_the_native_step_to_the_last_digit(program: Program, packed: Path) -> None:
    if (decoder := native_decoder(opened(packed).network)) is None:
        pytest.skip("the native step was not built")
    wanted, _ = decoder.read(TEXT, decoder.new_cache())
    shown = torch.tensor([float(f"{logit:.6g}") for logit in wanted.tolist()])
    assert torch.equal(program.logits(packed, TEXT), shown)


# -- what it writes --------------------------------------------------------------------------------


def test_texts_are_those_of_generate(program: Program, tmp_path: Path) -> None:
    # Whole weights: nothing lies between two roundings, whatever computes here.
    folder = save(restless(sw_window=24), tmp_path / "model", "ternary", "int4g32", 0)
    model, prompts = opened(folder), [text[: 8 + n] for n, text in enumerate(STORIES)]
    how = SamplingSettings(20, stop_tokens=model.end_tokens, banned_tokens=THOUGHT_IDS | TOOL_IDS)
    wanted = generate(model.network, list(map(model.encode, prompts)), how, decode=model.decode)
    found = [program.output(folder, prompt, "--tokens", "20") for prompt in prompts]
    assert found == [f"{each.text}\n" for each in wanted]
    assert len({*found}) > 40


def test_a_text_ends_where_the_model_ends_it(program: Program, tmp_path: Path) -> None:
    model, end, prompt = restless(), SPECIAL["<|end|>"], TEXT[:9]
    before = opened(save(model, tmp_path / "before", "ternary", "int4g32", 0))
    how = SamplingSettings(20, stop_tokens=before.end_tokens, banned_tokens=THOUGHT_IDS | TOOL_IDS)
    (text,) = generate(before.network, [prompt], how)
    new = [token for token in text.tokens if token not in prompt]
    last = next(token for token in reversed(new) if text.tokens.index(token) > 1)
    with torch.no_grad():  # what was said there is now the end
        model.embedding.weight[[end, last]] = model.embedding.weight[[last, end]]
    folder = save(model, tmp_path / "model", "ternary", "int4g32", 0)
    said = before.decode(text.tokens[: text.tokens.index(last)])
    assert program.output(folder, "--ids", " ".join(map(str, prompt))) == f"{said}\n"


@pytest.mark.parametrize("wants", ["", "[thinking]", TOOL_CALL, END_OF_RESULT])
def test_a_chat_is_that_of_python(program: Program, tmp_path: Path, wants: str) -> None:
    """Also of a model that would think, or call tools: nobody carries calls out here."""
    model, thinks = restless(), wants == "[thinking]"
    with torch.no_grad():
        model.embedding.weight[SPECIAL["[thinking]"]] *= -1
        if wants:
            model.embedding.weight[SPECIAL[wants]] *= -30 if thinks else 30
    folder = save(model, tmp_path / "model", "ternary", "int4g32", 0)
    ours, found = opened(folder), []
    for question in STORIES[:6]:
        ids = ours.encode_chat([{"role": "user", "content": question}])
        how = SamplingSettings(10, stop_tokens=ours.end_tokens)
        pieces = list(stream_thinking(ours, ids, how, "free"))
        answer = "".join(piece.text for piece in pieces if piece.kind == "answer")
        done = program.run(folder, question, "--chat", "--tokens", "10")
        assert done.stdout.decode(errors="replace") == f"{answer}\n"
        thought = [piece.text for piece in pieces if piece.kind == "thought"]
        assert done.stderr.decode(errors="replace") == "".join(f"{text}\n" for text in thought)
        found += thought
    assert bool(found) == thinks


def test_draws_depend_on_the_seed_and_are_among_the_likeliest(
    program: Program, packed: Path
) -> None:
    def drawn(*more: str) -> str:
        given = ["--ids", " ".join(map(str, TEXT[:5])), "--tokens", "12", "--temperature", "2"]
        return program.output(packed, *given, *more)

    assert drawn("--seed", "1") == drawn("--seed", "1") != drawn("--seed", "2")
    greedy = program.output(packed, "--ids", " ".join(map(str, TEXT[:5])), "--tokens", "12")
    assert drawn("--top-k", "1") == greedy != drawn("--top-k", "40")


def test_the_speed_is_told(program: Program, packed: Path) -> None:
    said = program.output(packed, "Once upon", "--bench", "--tokens", "30").splitlines()
    peak = ["peak"] if Path("/proc/self/status").exists() else []
    assert [line.split()[0] for line in said] == ["read", "wrote", *peak]
    assert said[1].startswith("wrote 30 tokens, ") and said[1].endswith(" tokens/s")


# -- texts to tokens -------------------------------------------------------------------------------


def assigned_characters(count: int) -> str:
    """Characters of all of Unicode, with what matters to how they are split between them."""
    draw, unassigned = random.Random(3), regex.compile(r"[\p{Cn}\p{Cs}]")
    points = [chr(draw.randrange(0x110000)) for _ in range(4 * count)]
    points += [chr(draw.randrange(0x3400)) for _ in range(count)]
    kept = [point for point in points if not unassigned.match(point)]
    return "".join(draw.choice(["", "a", " ", "!", "1", "'"]) + point for point in kept)


def ascii_text(count: int) -> str:
    draw = random.Random(4)
    some = "".join(draw.choice(" '  \n\tabsTtrevld19.,!") for _ in range(count))
    return some + "".join(chr(draw.randrange(128)) for _ in range(count))


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(STORIES),
        "\n".join(make(family, "verdict", 1).question for family in FAMILIES),
        Path(__file__).read_text(encoding="utf-8"),
        "it's we'll I'd they've 'tis '' 1st 12,5 <|end|>  \n\n \u00e9t\u00e9 \u4f60\u597d \u00bd",
        ascii_text(3000),
        assigned_characters(5000),
    ],
    ids=["stories", "tasks", "code", "forms", "ascii", "unicode"],
)
def test_ids_are_those_of_the_tokenizer(program: Program, packed: Path, text: str) -> None:
    said = program.output(packed, "-", "--encode", text=text)
    assert list(map(int, said.split())) == TOKENIZER.encode(text)


def test_merges_may_be_texts_as_they_were_once(
    program: Program, packed: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(packed, tmp_path / "model")
    record = json.loads((folder / "tokenizer.json").read_text())
    record["model"]["merges"] = [" ".join(merge) for merge in record["model"]["merges"]]
    (folder / "tokenizer.json").write_text(json.dumps(record))
    said = program.output(folder, STORIES[0], "--encode")
    assert list(map(int, said.split())) == TOKENIZER.encode(STORIES[0])


# -- files and options that do not fit -------------------------------------------------------------


def folder_instead(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).mkdir()


WEIGHTS, CONFIG, TOKENS = MODEL
GATE = "gate.inner.weight"
BROKEN: dict[str, Spoil] = {
    "no config": lambda folder: (folder / CONFIG).unlink(),
    "a folder as config": folder_instead,
    "empty config": put(CONFIG, b""),
    "no record": put(CONFIG, b"[1]"),
    "deep": put(CONFIG, b'{"a":' * 5000),
    "nul": put(CONFIG, b'{"a":1}\0'),
    "hex number": put(CONFIG, b'{"a": 0x10}'),
    "huge number": put(CONFIG, b'{"a": 1e999}'),
    "half a pair": put(CONFIG, rb'{"a": "\ud800x"}'),
    "open text": put(CONFIG, b'{"a": "\\u12'),
    "twice": put(CONFIG, b'{"model_type": "agent_forge", "model_type": "agent_forge"}'),
    "another model": change(CONFIG, entry("model_type", value="llama")),
    "no width": change(CONFIG, lambda record: record.pop("d_model")),
    "half a width": change(CONFIG, entry("d_model", value=64.5)),
    "huge width": change(CONFIG, entry("d_model", value=10**15)),
    "another width": change(CONFIG, entry("d_model", value=128)),
    "no heads": change(CONFIG, entry("n_heads", value=0)),
    "odd heads": change(CONFIG, entry("n_heads", value=3)),
    "odd head size": change(CONFIG, entry("head_size", value=31)),
    "larger heads": change(CONFIG, entry("head_size", value=64)),
    "huge heads": change(CONFIG, entry("head_size", value=2_000_000)),
    "more layers": change(CONFIG, entry("n_layers", value=999)),
    "more tokens": change(CONFIG, entry("vocab_size", value=2_000_000)),
    "fewer tokens": change(CONFIG, entry("vocab_size", value=300)),
    "more steps": change(CONFIG, entry("t_max", value=4)),
    "no weights of the memory": change(
        CONFIG, lambda record: record.update(surprise_weight=0, novelty_weight=0)
    ),
    "another packing": change(CONFIG, entry(KEY, "packed_by", value="somebody")),
    "a newer packing": change(CONFIG, entry(KEY, "version", value=2)),
    "activations": change(CONFIG, entry(KEY, "activation_bits", value=4)),
    "no matrices": change(CONFIG, entry(KEY, "matrices", value=3)),
    "codec": change(CONFIG, entry(KEY, "matrices", GATE, "codec", value="int9")),
    "codec of four": change(CONFIG, entry(KEY, "matrices", GATE, "codec", value="int4g32")),
    "group of none": change(CONFIG, entry(KEY, "matrices", GATE, "codec", value="int4g0")),
    "huge group": change(CONFIG, entry(KEY, "matrices", GATE, "codec", value="int4g99999")),
    "turned": change(CONFIG, entry(KEY, "matrices", GATE, "turned", value=True)),
    "another shape": change(CONFIG, entry(KEY, "matrices", GATE, "shape", value=[1, 1])),
    "whole gate": change(CONFIG, lambda record: record[KEY]["matrices"].pop(GATE)),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "no header": cut(WEIGHTS, 7),
    "half a header": cut(WEIGHTS, 900),
    "cut weights": cut(WEIGHTS, -1),
    "huge header": put(WEIGHTS, b"\xff" * 64),
    "header of 2^63": put(WEIGHTS, struct.pack("<Q", 1 << 63) + b"{}"),
    "no tensors": put(WEIGHTS, struct.pack("<Q", 2) + b"{}"),
    "no norm": change(WEIGHTS, lambda record: record.pop("norm.gain")),
    "offset": change(WEIGHTS, entry("norm.gain", "data_offsets", 1, value=10**15)),
    "offsets turned": change(WEIGHTS, entry("norm.gain", "data_offsets", value=[9, 3])),
    "negative offset": change(WEIGHTS, entry("norm.gain", "data_offsets", 0, value=-128)),
    "offset in a list": change(WEIGHTS, entry("norm.gain", "data_offsets", value=[[1], 2])),
    "one offset": change(WEIGHTS, entry("norm.gain", "data_offsets", value=[1])),
    "shape": change(WEIGHTS, entry("norm.gain", "shape", value=[63])),
    "huge shape": change(WEIGHTS, entry("norm.gain", "shape", value=[2**62, 4])),
    "no shape": change(WEIGHTS, entry("norm.gain", "shape", value=[])),
    "type": change(WEIGHTS, entry("norm.gain", "dtype", value="I64")),
    "wider type": change(WEIGHTS, entry("norm.gain", "dtype", value="F32")),
    "codes of floats": change(WEIGHTS, entry(f"{GATE}.codes", "dtype", value="F16")),
    "no scales": change(WEIGHTS, lambda record: record.pop(f"{GATE}.scales")),
    "scales": change(WEIGHTS, entry(f"{GATE}.scales", "dtype", value="BF16")),
    "no tokenizer": lambda folder: (folder / TOKENS).unlink(),
    "half a tokenizer": cut(TOKENS, 5000),
    "another tokenizer": change(TOKENS, entry("model", "type", value="Unigram")),
    "normalizer": change(TOKENS, entry("normalizer", value={"type": "NFC"})),
    "no digits": change(TOKENS, entry("pre_tokenizer", "pretokenizers", value=[])),
    "no specials": change(TOKENS, entry("added_tokens", value=[])),
    "added": change(TOKENS, entry("added_tokens", 3, "special", value=False)),
    "special id": change(TOKENS, entry("added_tokens", 3, "id", value=10**9)),
    "id beyond": change(TOKENS, entry("model", "vocab", "a", value=512)),
    "negative id": change(TOKENS, entry("model", "vocab", "a", value=-1)),
    "id of another": change(TOKENS, entry("model", "vocab", "a", value=40)),
    "no byte": change(TOKENS, lambda record: record["model"]["vocab"].pop("a")),
    "no bytes": change(TOKENS, entry("model", "vocab", "\u4f60", value=511)),
    "unknown merge": change(TOKENS, entry("model", "merges", 0, value=["q", "qqq"])),
    "merge of three": change(TOKENS, entry("model", "merges", 0, value=["a", "b", "c"])),
    "merge of one": change(TOKENS, entry("model", "merges", 0, value="a")),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_refused(sanitized: Program, copied: Path, how: str) -> None:
    BROKEN[how](copied)
    said = sanitized.refusal(copied, "a", "--tokens", "3")
    assert said.startswith(f"forge_run: {copied}/") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("part", "new"),
    [(f"{GATE}.codes", b"\xf3"), (f"{GATE}.scales", b"\0\x7c"), ("norm.gain", b"\0\x7e")],
    ids=["no trit", "infinite scale", "nan"],
)
def test_bytes_that_are_no_weights_are_refused(
    sanitized: Program, copied: Path, part: str, new: bytes
) -> None:
    content = bytearray((copied / WEIGHTS).read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    start = 8 + size + json.loads(content[8 : 8 + size])[part]["data_offsets"][0]
    content[start : start + len(new)] = new
    (copied / WEIGHTS).write_bytes(content)
    assert part in sanitized.refusal(copied, "a")


@pytest.mark.parametrize("kind", ["packed", "steps"])
def test_no_bytes_make_it_read_or_write_where_it_must_not(
    sanitized: Program, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    good: Path = request.getfixturevalue(kind)
    copied = shutil.copytree(good, tmp_path / "model")
    draw, refused = random.Random(7), 0
    for number in range(45):
        name = MODEL[number % 3]
        content = bytearray((good / name).read_bytes())
        for _ in range(draw.choice([1, 3])):  # most in the header, if it is of weights
            place = draw.randrange(min(len(content), 9000))
            content[place : place + draw.choice([0, 1, 1, 4])] = draw.randbytes(draw.choice([1, 2]))
        (copied / name).write_bytes(content)
        done = sanitized.run(copied, "Once upon a time", "--tokens", "2")
        assert done.returncode in (0, 2), done.stderr.decode(errors="replace")
        refused += done.returncode == 2
        shutil.copy(good / name, copied / name)
    assert refused > 20


def test_it_reads_and_writes_within_its_memory(sanitized: Program, packed: Path) -> None:
    assert sanitized.output(packed, STORIES[0], "--tokens", "40", "--temperature", "1")
    assert sanitized.output(packed, "-", "--chat", "--top-k", "5", "--bench", text=STORIES[1])
    said = sanitized.output(packed, "-", "--encode", text=assigned_characters(300))
    assert list(map(int, said.split())) == TOKENIZER.encode(assigned_characters(300))


@pytest.mark.parametrize(
    "given",
    [
        [],
        [""],
        ["a", "b"],
        ["a", "--ids", "1"],
        ["--ids", "1 x"],
        ["--ids", "512"],
        ["--ids", "-1"],
        ["--ids", "99999999999999999999"],
        ["a", "--tokens", "0"],
        ["a", "--tokens", "1e3"],
        ["a", "--tokens"],
        ["a", "--temperature", "nan"],
        ["a", "--temperature", "-1"],
        ["a", "--top-k", "-1"],
        ["a", "--seed", str(2**63)],
        ["a", "--unknown"],
    ],
    ids=" ".join,
)
def test_options_that_are_none_are_refused(
    sanitized: Program, packed: Path, given: list[str]
) -> None:
    assert sanitized.refusal(packed, *given).startswith("forge_run: ")


def test_a_prompt_is_utf_8(sanitized: Program, packed: Path) -> None:
    for bad in (b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80"):
        assert "UTF-8" in sanitized.refusal(packed, os.fsdecode(bad))


# -- the bundle ------------------------------------------------------------------------------------


def test_a_bundle_is_a_model_folder_with_the_program(bundle: Path, packed: Path) -> None:
    names = {path.name for path in bundle.iterdir()}
    assert names == {*MODEL, *SOURCES, "Makefile", "README.md", files.MANIFEST}
    assert {*files.verify(bundle)} == names - {files.MANIFEST}
    assert opened(bundle).network.packing == opened(packed).network.packing


def test_what_is_there_stays(bundle: Path, packed: Path) -> None:
    before = (bundle / files.MANIFEST).read_bytes()
    with pytest.raises(AlreadyExists):
        write_bundle(packed, bundle)
    assert (bundle / files.MANIFEST).read_bytes() == before


def test_only_whole_models_of_ours_are_bundled(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(NotFound):
        write_bundle(tmp_path / "nowhere", out)
    content = bytearray((copied / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (copied / WEIGHTS).write_bytes(content)
    with pytest.raises(DamagedFile):
        write_bundle(copied, out)
    (copied / files.MANIFEST).unlink()
    change(CONFIG, entry("model_type", value="llama"))(copied)
    with pytest.raises(ConfigError):
        write_bundle(copied, out)
    assert not out.exists()


def test_the_command_writes_one(packed: Path, tmp_path: Path, forge: Forge) -> None:
    out = tmp_path / "bundle"
    told = forge(f"export {packed} {out} --bundle --dry-run --json").document
    assert not out.exists() and set(told["files"]) == {*MODEL, *SOURCES}
    assert forge(f"export {packed} {out} --bundle").code == 0
    assert (out / "Makefile").is_file() and (out / "forge_run.c").is_file()
    assert forge(f"export {packed} {out} --bundle").code == 2
    assert forge(f"export {packed} {tmp_path / 'x'} --bundle --force").code == 2
