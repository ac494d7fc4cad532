"""The token step of packed models: native beside eager FP32 and torch's dynamic int8.

    python benchmarks/native.py [--model FOLDER]    # a trained model, for the second study

Speed: the shape of the preset 25m with random weights; one text of 128 tokens, then one token,
with logits and all recursion steps, on one thread. Ways take turns; the figure is the best of the
rounds, in CPU time, as other work on a machine only adds. Claim: native is at least 3 times as fast
as FP32. Peak memory is of a process that makes the network, packs it and keeps both.

Agreement: one text token by token, by torch with decoded weights and rounded inputs and by the
native step. Where a number lies between two of the eight-bit steps, the last bit of a sum decides
how it is rounded, and what follows differs by a hundredth. Two rows tell that from an error: torch
against itself, when it reads the text at once; and `unrounded`, the same weights without rounded
inputs. The likeliest token is compared among all but the one just read, which a network of random
weights and a tied embedding always repeats; the text is varied, as a loop would agree with itself.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from results import record
from torch import Tensor, nn

from agent_forge.data.tasks import make
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.infer.native import native_decoder
from agent_forge.model.network import ForgeNetwork, GenerationCache
from agent_forge.model.opened import ForgeModel, open_model
from agent_forge.native import backend
from agent_forge.native.decoder import NativeDecoder
from agent_forge.pipeline.config import load_config
from agent_forge.platform import peak_memory_bytes
from agent_forge.quant.layers import plan_packing, round_inputs

BENCHMARK = "native"
PAST, STEPS, ROUNDS = 128, 10, 9
TEXT = 600  # tokens that are compared
PROMPTS, CONTINUED = 25, 32
REQUIRED = 3.0
Step = Callable[[], Any]


def random_network() -> ForgeNetwork:
    """The shape of 25m, with no layer at zero."""
    torch.manual_seed(0)
    network = ForgeNetwork(load_config(preset="25m").model).eval()
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Linear) and not name.startswith("halting"):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    return network


def packed(network: ForgeNetwork, activation_bits: int = 8) -> ForgeNetwork:
    """The same network as it is after it was packed and opened."""
    packing = plan_packing(network, "ternary", "int4g32", activation_bits)
    found = copy.deepcopy(network)
    found.load_state_dict(packing.rounded(network.state_dict()))
    round_inputs(found, packing.with_rounded_inputs)
    found.packing = packing
    return found


def in_int8(network: ForgeNetwork) -> ForgeNetwork:
    """Every linear layer by torch's dynamic quantisation, and the head; only the projection, whose
    weight is used in two ways, stays."""
    head = nn.Linear(network.settings.embed_rank, network.settings.vocab_size, bias=False)
    head.weight = network.embedding.weight
    found = copy.deepcopy(network)
    projection, found.projection = found.projection, nn.Identity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize = torch.ao.quantization.quantize_dynamic
        quantize(found, {nn.Linear}, dtype=torch.qint8, inplace=True)
        quick_head = quantize(nn.Sequential(head), {nn.Linear}, dtype=torch.qint8)
    found.projection = projection
    found.logits = quick_head.forward  # type: ignore[method-assign]
    return found


# -- speed -----------------------------------------------------------------------------------------


def eager(network: ForgeNetwork) -> Step:
    past, token = network.new_cache(), torch.tensor([[7]])
    network.predict(torch.arange(PAST)[None], past, threshold=1.0)

    def step() -> None:
        layers = [copy.copy(layer) for layer in past.layers]
        cache = GenerationCache(layers, dict(past.memory), past.position)
        network.predict(token, cache, threshold=1.0)

    return step


def native(network: ForgeNetwork, plain: bool) -> Step:
    os.environ["FORGE_PLAIN_C"] = "1" if plain else "0"
    decoder = native_decoder(network)
    assert decoder is not None
    cache = decoder.new_cache()
    decoder.read(range(PAST), cache, 1.0)

    def step() -> None:
        cache.position = PAST
        decoder.read([7], cache, 1.0)

    return step


WAYS: dict[str, Callable[[ForgeNetwork], Step]] = {
    "fp32": eager,
    "int8": lambda network: eager(in_int8(network)),
    "native_avx2": lambda network: native(packed(network), plain=False),
    "native_c": lambda network: native(packed(network), plain=True),
}


def speed() -> dict[str, Any]:
    network = random_network()
    steps = {way: make(network) for way, make in WAYS.items()}
    best = dict.fromkeys(WAYS, float("inf"))
    for _ in range(ROUNDS):
        for way, step in steps.items():
            began = time.process_time()
            for _ in range(STEPS):
                step()
            best[way] = min(best[way], (time.process_time() - began) / STEPS)
    took = {f"{way}_us": round(1e6 * seconds) for way, seconds in best.items()}
    ratios = {f"{way}_ratio": round(best["fp32"] / seconds, 1) for way, seconds in best.items()}
    decoder = native_decoder(packed(network))
    assert decoder is not None
    return {
        **took,
        **ratios,
        "native_to_int8": round(best["int8"] / best["native_avx2"], 1),
        "fp32_weights_mb": round(4 * network.settings.parameters() / 1e6, 1),
        "native_weights_mb": round(decoder.weight_bytes / 1e6, 1),
    }


def memory() -> dict[str, Any]:
    """The most memory of a process that makes some steps in one way. Measured before anything else:
    on Linux a process begins with the peak of the one that started it."""
    found = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--memory-of", way]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[f"{way}_peak_mb"] = round(int(out) / 1e6)
    return found


# -- agreement -------------------------------------------------------------------------------------


@torch.no_grad()
def at_once(network: ForgeNetwork, text: Tensor) -> Tensor:
    y, _ = network.decide(network.features(text[None]).x[0])
    return network.logits(network.hidden(y))


def by_torch(network: ForgeNetwork, text: Tensor) -> Tensor:
    cache = network.new_cache()
    return torch.cat([network.predict(token[None, None], cache)[0] for token in text])


def by_native(decoder: NativeDecoder, text: Tensor) -> Tensor:
    cache = decoder.new_cache()
    return torch.stack([decoder.read([int(token)], cache)[0] for token in text])


def story(model: ForgeModel) -> Tensor:
    """Generated stories, as the model was trained on."""
    ids: list[int] = []
    for number in range(TEXT):
        task = make("story", "verdict", number, level=(20, 60))
        ids += model.encode(f"{task.question} {task.answer}")
        if len(ids) >= TEXT:
            break
    return torch.tensor(ids[:TEXT])


def compared(name: str, logits: Tensor, wanted: Tensor, text: Tensor) -> dict[str, Any]:
    apart = (logits - wanted).abs().amax(1) / wanted.abs().amax(1)
    likeliest = [each.scatter(1, text[:, None], -torch.inf).argmax(1) for each in (logits, wanted)]
    return {
        f"{name}_same": int((likeliest[0] == likeliest[1]).sum()),
        f"{name}_within_1e-3": int((apart < 1e-3).sum()),
        f"{name}_apart_median": float(f"{apart.median():.1e}"),
        f"{name}_apart_most": float(f"{apart.max():.1e}"),
    }


def agreement(network: ForgeNetwork, text: Tensor) -> dict[str, Any]:
    rounded, unrounded = packed(network), packed(network, activation_bits=0)
    quick, exact = native_decoder(rounded), native_decoder(unrounded)
    assert quick is not None and exact is not None
    wanted, plain = by_torch(rounded, text), by_torch(unrounded, text)
    likeliest = wanted.scatter(1, text[:, None], -torch.inf).argmax(1)
    return {
        "tokens": len(text),
        "different_likeliest": len(set(likeliest.tolist())),
        "backend": backend(),
        **compared("native", by_native(quick, text), wanted, text),
        **compared("torch_at_once", at_once(rounded, text), wanted, text),
        **compared("unrounded", by_native(exact, text), plain, text),
    }


def continuations(model: ForgeModel) -> dict[str, Any]:
    """Greedy texts, each going its own way from where it first differs."""
    network, sampling = packed(model.network), SamplingSettings(max_new_tokens=CONTINUED)
    tasks = [make("story", "verdict", number, level=(20, 60)) for number in range(PROMPTS)]
    prompts = [model.encode(task.question) for task in tasks]
    found = []
    for turned_off in "01":
        os.environ["FORGE_NO_NATIVE"] = turned_off
        found.append([generate(network, [prompt], sampling)[0].tokens for prompt in prompts])
    del os.environ["FORGE_NO_NATIVE"]
    pairs = list(zip(*found, strict=True))
    shared = 0
    for pair in pairs:
        both = zip(*pair, strict=False)
        shared += sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], both))
    return {
        "prompts": PROMPTS,
        "tokens": PROMPTS * CONTINUED,
        "same_texts": sum(a == b for a, b in pairs),
        "tokens_before_a_difference": shared,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, help="folder of a trained model of ours")
    parser.add_argument("--memory-of", choices=tuple(WAYS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory_of:
        step = WAYS[options.memory_of](random_network())
        for _ in range(STEPS):
            step()
        print(peak_memory_bytes())
        return
    values = {**memory(), **speed()}
    record(BENCHMARK, {"study": "speed", "preset": "25m", "past": PAST}, values)
    os.environ["FORGE_PLAIN_C"] = "0"
    text = torch.randint(0, 32768, (TEXT,), generator=torch.Generator().manual_seed(1))
    cell = {"study": "agreement", "model": "25m, random weights", "text": "random"}
    record(BENCHMARK, cell, agreement(random_network(), text))
    if options.model:
        model = open_model(options.model)
        assert isinstance(model, ForgeModel)
        cell = {"study": "agreement", "model": "tiny, trained", "text": "stories"}
        record(BENCHMARK, cell, agreement(model.network, story(model)))
        cell = {"study": "agreement", "model": "tiny, trained", "text": "greedy continuations"}
        record(BENCHMARK, cell, continuations(model))
    if values["native_avx2_ratio"] < REQUIRED:
        raise SystemExit("missed")


if __name__ == "__main__":
    main()
