"""Step-coded models in the C program: computed as torch does, and never trusted."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from agent_forge.errors import ConfigError, DamagedFile, ForgeError
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.infer.native import native_decoder
from agent_forge.infer.thinking import THOUGHT_IDS
from agent_forge.model.opened import open_model
from agent_forge.quant.codecs import StepCodec, find_codec
from agent_forge.quant.entropy import HEAD, TOTAL, encode, lanes_of
from agent_forge.quant.packed import KEY
from agent_forge.store import files
from tests.support.programs import (
    ODD,
    STORIES,
    Program,
    by_torch,
    change,
    entry,
    in_steps,
    opened,
    restless,
    save,
    write,
)

TEXT = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(5)).tolist()
WEIGHTS, CONFIG = "model.safetensors", "config.json"
NAME = "embedding.weight"  # 512 x 32 weights, so that there are several lanes
Bytes = bytearray

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") and shutil.which("make")), reason="there is no cc, or no make"
)


# -- what it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "embedding", "bits", "vocab"),
    [
        ("step1.5", "step0.3", 0, 515),
        ("step3", "int4g32", 0, 515),
        ("step0.04", "step8", 8, 515),
        ("step1.5", "step0.5", 0, 6241),  # just below and above 2^17 weights in the embedding
        ("step1.5", "step0.5", 0, 6242),
    ],
)
def test_logits_are_those_of_torch(
    program: Program, tmp_path: Path, body: str, embedding: str, bits: int, vocab: int
) -> None:
    model = restless(sw_window=9, **{**ODD, "vocab_size": vocab})
    folder = save(model, tmp_path / "model", body, embedding, bits)
    wanted = by_torch(opened(folder).network, TEXT)
    assert float((program.logits(folder, TEXT) - wanted).abs().max()) < 1e-3


def test_a_model_of_several_codecs_is_read(program: Program, steps: Path) -> None:
    model = opened(steps).network
    assert model.packing is not None and model.packing.matrices == in_steps(model).matrices
    wanted = by_torch(model, TEXT)
    assert float((program.logits(steps, TEXT) - wanted).abs().max()) < 1e-3
    if decoder := native_decoder(model):
        found, _ = decoder.read(TEXT, decoder.new_cache())
        shown = torch.tensor([float(f"{logit:.6g}") for logit in found.tolist()])
        assert torch.equal(program.logits(steps, TEXT), shown)


def test_texts_are_those_of_generate(program: Program, steps: Path) -> None:
    model, prompts = opened(steps), [text[: 8 + n] for n, text in enumerate(STORIES[:20])]
    how = SamplingSettings(20, stop_tokens=model.end_tokens, banned_tokens=THOUGHT_IDS)
    wanted = generate(model.network, list(map(model.encode, prompts)), how, decode=model.decode)
    found = [program.output(steps, prompt, "--tokens", "20") for prompt in prompts]
    assert found == [f"{each.text}\n" for each in wanted] and len({*found}) > 15


# -- what it refuses -------------------------------------------------------------------------------


def edited(folder: Path, name: str, edit: Callable[[Bytes], Bytes]) -> None:
    """Change the bytes of a tensor, as many as there may be then."""
    tensors: dict[str, Tensor] = load_file(folder / WEIGHTS)
    old = tensors[name]
    new = torch.frombuffer(edit(Bytes(old.numpy().tobytes())) or Bytes(1), dtype=torch.uint8)
    tensors[name] = new.clone().reshape(-1, *old.shape[1:])
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    (folder / files.MANIFEST).unlink(missing_ok=True)


def number(kind: str, place: int, value: int, *, add: bool = False) -> Callable[[Bytes], Bytes]:
    """Write a number; `add`: to the one that is there."""

    def edit(data: Bytes) -> Bytes:
        at = place if place >= 0 else len(data) + place
        old = struct.unpack_from(kind, data, at)[0] if add else 0
        struct.pack_into(kind, data, at, (old + value) % (1 << 8 * struct.calcsize(kind)))
        return data

    return edit


def states_at(data: Bytes) -> int:
    return HEAD + 2 * (data[1] + 1)


def state(lane: int, value: int) -> Callable[[Bytes], Bytes]:
    return lambda data: number("<I", states_at(data) + 4 * lane, value)(data)


def one_code(data: Bytes) -> Bytes:
    """A single code of all slots: no words are needed, and states stay what they are."""
    lanes = lanes_of(512 * 32)
    return Bytes([5, 0, *struct.pack("<H", TOTAL), *struct.pack("<I", 1 << 16) * lanes])


def swapped(data: Bytes) -> Bytes:
    """Frequencies that add up still, but are those of other codes."""
    freq = np.frombuffer(data, "<u2", data[1] + 1, HEAD)
    first, second = int(freq.argmax()), int(freq.argmin())
    data[HEAD : HEAD + 2 * len(freq)] = freq.copy()[
        [second if i == first else first if i == second else i for i in range(len(freq))]
    ].tobytes()
    return data


CODES: dict[str, tuple[Callable[[Bytes], Bytes], str]] = {
    "a byte": (lambda data: data[:1], "cut short"),
    "a head": (lambda data: data[:HEAD], "cut short"),
    "half the frequencies": (lambda data: data[: HEAD + 5], "cut short"),
    "no states": (lambda data: data[: states_at(data)], "cut short"),
    "a state less": (lambda data: data[: states_at(data) + 4 * 7], "cut short"),
    "no words": (lambda data: data[: states_at(data) + 4 * 8], "cut short"),
    "a byte less": (lambda data: data[:-1], "cut short"),
    "a word less": (lambda data: data[:-2], "cut short"),
    "a byte more": (lambda data: data + b"a", "behind their codes"),
    "a word more": (lambda data: data + b"ab", "behind their codes"),
    "many words more": (lambda data: data + bytes(100_000), "behind their codes"),
    "zeros": (lambda data: Bytes(len(data)), "impossible"),
    "ones": (lambda data: Bytes(b"\xff" * len(data)), "impossible"),
    "lowest code": (number("b", 0, 127), "impossible"),
    "more codes": (number("B", 1, 255), "impossible"),
    "a code less": (number("B", 1, -1, add=True), ""),
    "a frequency less": (number("<H", HEAD + 20, -1, add=True), "impossible"),
    "a frequency more": (number("<H", HEAD + 20, 1, add=True), "impossible"),
    "a frequency of all": (number("<H", HEAD + 20, TOTAL), "impossible"),
    "a frequency beyond": (number("<H", HEAD, 65535), "impossible"),
    "frequencies of others": (swapped, ""),
    "state 0": (state(0, 0), "a state is impossible"),
    "state below": (state(7, (1 << 16) - 1), "a state is impossible"),
    "another state": (state(3, 0x12345678), ""),
    "the highest state": (state(0, 0xFFFFFFFF), ""),
    "the last word": (number("<H", -2, 1, add=True), "do not end"),
}


@pytest.mark.parametrize("how", CODES)
def test_damaged_codes_are_refused(
    sanitized: Program, steps: Path, tmp_path: Path, how: str
) -> None:
    folder = shutil.copytree(steps, tmp_path / "model")
    edit, message = CODES[how]
    edited(folder, f"{NAME}.codes", edit)
    said = sanitized.refusal(folder, "a", "--tokens", "3")
    assert f"{NAME}.codes" in said and message in said and said.count("\n") == 1
    with pytest.raises(DamagedFile):
        open_model(folder)


def test_codes_that_take_no_bits_are_read(sanitized: Program, steps: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(steps, tmp_path / "model")
    edited(folder, f"{NAME}.codes", one_code)
    wanted = by_torch(opened(folder).network, TEXT[:2])
    assert float((sanitized.logits(folder, TEXT[:2]) - wanted).abs().max()) < 1e-3


@pytest.mark.parametrize(("least", "most"), [(-8, 7), (-8, 8), (-9, 7), (-128, 127), (3, 3)])
def test_codes_of_any_size_are_read(
    sanitized: Program, steps: Path, tmp_path: Path, least: int, most: int
) -> None:
    folder = shutil.copytree(steps, tmp_path / "model")
    codes = np.random.default_rng(0).integers(least, most + 1, 512 * 32).astype(np.int8)
    edited(folder, f"{NAME}.codes", lambda data: Bytes(encode(codes).tobytes()))
    wanted = by_torch(opened(folder).network, TEXT[:2])
    found = sanitized.logits(folder, TEXT[:2])
    assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.abs().max())


@pytest.mark.parametrize("byte", [0, 1, 15, 16, 255])
def test_impossible_scales_are_refused(
    sanitized: Program, steps: Path, tmp_path: Path, byte: int
) -> None:
    folder = shutil.copytree(steps, tmp_path / "model")
    edited(folder, f"{NAME}.scales", number("B", 3, byte))
    if 0 < byte < 16:
        assert f"{NAME}.scales: a scale is impossible" in sanitized.refusal(folder, "a")
        with pytest.raises(DamagedFile, match="a scale is impossible"):
            open_model(folder)
    else:
        wanted = by_torch(opened(folder).network, [3])
        found = sanitized.logits(folder, [3])
        assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.abs().max())


def test_every_scale_is_that_of_python(program: Program, tmp_path: Path) -> None:
    # A state of one text: its embedding is a row of codes times its scale.
    codec = find_codec("step1.5")
    written = torch.arange(16, 256, dtype=torch.uint8)
    assert torch.equal(codec.pack_scales(codec.unpack_scales(written)), written)
    model = restless(vocab_size=512)
    folder = write(model, tmp_path / "model", in_steps(model))
    edited(folder, f"{NAME}.scales", lambda data: Bytes([*range(16, 256), *[100] * 272]))
    wanted = by_torch(opened(folder).network, TEXT[:1])
    found = program.logits(folder, TEXT[:1])
    assert float(((found - wanted) / wanted).abs().max()) < 1e-3


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("codes", "dtype", "F16"),
        ("codes", "dtype", "I8"),
        ("codes", "shape", [1, 2, 3]),
        ("codes", "shape", [7]),
        ("scales", "dtype", "I8"),
        ("scales", "dtype", "F16"),
        ("scales", "shape", [256, 2]),
        ("scales", "shape", [512]),
        ("scales", "shape", [511, 1]),
    ],
)
def test_other_types_and_shapes_are_refused(
    sanitized: Program, steps: Path, tmp_path: Path, part: str, field: str, value: object
) -> None:
    folder = shutil.copytree(steps, tmp_path / "model")
    change(WEIGHTS, entry(f"{NAME}.{part}", field, value=value))(folder)
    (folder / files.MANIFEST).unlink()
    assert f"{NAME}.{part}" in sanitized.refusal(folder, "a")
    with pytest.raises(ForgeError):
        open_model(folder)


NAMES = (
    "step1.5 step1 step01 step01.50 step0.04 step0.0400 step0.0399 step0.039 step8 step8.0 step10"
    " step8.0001 step08.0000 step99 step00 step0 step100 step008 step step. step1. step.5 step1_0"
    " step1.23456 step1.2345 step12.1234 step7.12345678 step1e0 step0x1 step+1 step-1 stepnan"
    " stepinf Step1 xstep1 step1x steps1 step1.5.5 step1,5 step1g32"
)


@pytest.mark.parametrize(
    "name", [*NAMES.split(), "step 1", "step1 ", "step1\n", "step1\0", "", "step1\t"]
)
def test_names_are_those_of_python(
    sanitized: Program, steps: Path, tmp_path: Path, name: str
) -> None:
    try:
        known = isinstance(find_codec(name), StepCodec)
    except ConfigError:
        known = False
    folder = shutil.copytree(steps, tmp_path / "model")
    change(CONFIG, entry(KEY, "matrices", NAME, "codec", value=name))(folder)
    if known:
        assert sanitized.output(folder, "--ids", "3", "--logits")
    else:
        assert f"{NAME} is in a code that is not known" in sanitized.refusal(folder, "--ids", "3")


def test_no_bytes_of_codes_make_it_read_or_write_where_it_must_not(
    sanitized: Program, steps: Path, tmp_path: Path
) -> None:
    draw, refused = random.Random(7), 0
    names = [name for name in load_file(steps / WEIGHTS) if name.endswith((".codes", ".scales"))]
    for _ in range(30):
        folder = shutil.copytree(steps, tmp_path / "model", dirs_exist_ok=True)

        def spoil(data: Bytes) -> Bytes:
            for _ in range(draw.choice([1, 3])):
                place = draw.randrange(min(len(data), draw.choice([60, 100_000])))
                data[place] = draw.randrange(256)
            return data

        name = draw.choice(names)
        edited(folder, name, spoil)
        done = sanitized.run(folder, "Once upon a time", "--tokens", "2")
        assert done.returncode in (0, 2), done.stderr.decode(errors="replace")
        refused += done.returncode == 2
        try:
            open_model(folder)
        except ForgeError:
            assert done.returncode == 2
        else:
            assert done.returncode == 0
    assert 10 < refused < 30
