"""Golden merges: pico Llama parents, one recipe a method, and what mergekit makes of them.

    python tests/golden/merge/make.py VENV            # VENV has mergekit 0.1.5 (CPU torch)
    python tests/golden/merge/make.py VENV --folder F # the same recipes on the parents in F/parents

Run by hand, when a recipe is added. The tests read what it wrote and need no mergekit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
HIDDEN, INNER, VOCAB, LAYERS = 16, 24, 32, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
NAMES = ("base", "a", "b", "c", "wide")
BASE, A, B, C, WIDE_VOCABULARY = (f"parents/{name}" for name in NAMES)
ADDED = ("<tool>", "<end>")
WIDE = {"dtype": "float32", "out_dtype": "bfloat16"}  # mergekit computes in fp32
NARROW = {"dtype": "bfloat16"}  # mergekit rounds each step of most methods to bf16


def entry(model: str, **parameters: Any) -> dict[str, Any]:
    return {"model": model, "parameters": parameters} if parameters else {"model": model}


def part(model: str, first: int, end: int, **parameters: Any) -> dict[str, Any]:
    return {**entry(model, **parameters), "layer_range": [first, end]}


def recipe(method: str, models: list[dict[str, Any]], **rest: Any) -> dict[str, Any]:
    return {
        "merge_method": method,
        "models": models,
        **(WIDE if "dtype" not in rest else {}),
        **rest,
    }


def weighted(a: Any, b: Any, c: Any) -> list[dict[str, Any]]:
    return [entry(A, weight=a), entry(B, weight=b), entry(C, weight=c)]


def sparse(*settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry(model, **values) for model, values in zip((A, B, C), settings, strict=True)]


def interpolations() -> dict[str, dict[str, Any]]:
    """linear, slerp, multislerp, nuslerp."""
    mixed = weighted(
        [0.1, 0.9],
        [
            {"filter": "self_attn", "value": [1.0, 0.2, 0.6]},
            {"filter": "mlp", "value": 0.3},
            {"value": 0.5},
        ],
        [{"filter": "lm_head", "value": 0.9}, {"filter": "norm", "value": 0.0}],
    )
    slanted = [
        {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
        {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
        {"value": 0.5},
    ]
    pair = [entry(A, weight=0.7), entry(C, weight=0.4)]
    return {
        "linear": recipe("linear", weighted(0.5, 0.3, 0.2)),
        "linear_narrow": recipe("linear", weighted(1, 2, 0.5), **NARROW),
        "linear_unnormalized": recipe(
            "linear", weighted(0.6, 0.5, -0.2), parameters={"normalize": False}
        ),
        "linear_gradient": recipe("linear", mixed, parameters={"weight": 0.25}),
        "slerp": recipe("slerp", [entry(A), entry(BASE)], base_model=BASE, parameters={"t": 0.35}),
        "slerp_gradient": recipe(
            "slerp", [entry(B), entry(C)], base_model=B, parameters={"t": slanted}, **NARROW
        ),
        "multislerp": recipe("multislerp", weighted(0.5, 0.3, 0.4)),
        "multislerp_base": recipe("multislerp", weighted(0.5, 0.3, 0.4), base_model=BASE),
        "multislerp_unnormalized": recipe(
            "multislerp",
            weighted(0.5, [0.3, 0.6], 0.4),
            base_model=BASE,
            parameters={"normalize_weights": False},
        ),
        "nuslerp": recipe("nuslerp", pair),
        "nuslerp_base": recipe("nuslerp", pair, base_model=BASE),
        "nuslerp_rows": recipe(
            "nuslerp", pair, base_model=BASE, parameters={"nuslerp_flatten": False}
        ),
        "nuslerp_columns": recipe(
            "nuslerp", pair, parameters={"nuslerp_flatten": False, "nuslerp_row_wise": True}
        ),
    }


def arithmetic() -> dict[str, dict[str, Any]]:
    """What adds sparse or whole differences to the base."""
    settings = (
        {"weight": 1.0, "density": 0.5},
        {"weight": 0.5, "density": 0.3},
        {"weight": 0.5, "density": 0.8},
    )
    outliers = (
        {"weight": 0.8, "density": 0.7, "gamma": 0.05},
        {"weight": 0.5, "density": 0.4},
        {"weight": -0.3, "density": 0.95, "gamma": 0.1},
    )
    sloped = (
        {"weight": [0.2, 1.0], "density": [0.9, 0.4]},
        {"weight": 0.7, "density": 0.5},
        {"weight": 0.4, "density": 1.0},
    )
    return {
        "task_arithmetic": recipe("task_arithmetic", weighted(0.7, 0.4, -0.3), base_model=BASE),
        "task_arithmetic_narrow": recipe(
            "task_arithmetic", weighted(0.7, 0.4, -0.3), base_model=BASE, **NARROW
        ),
        "task_arithmetic_normalized": recipe(
            "task_arithmetic",
            weighted([0.7, 0.1], 0.4, 0.3),
            base_model=BASE,
            parameters={"normalize": True, "lambda": 0.8},
        ),
        "ties": recipe("ties", sparse(*settings), base_model=BASE),
        "ties_narrow": recipe("ties", sparse(*settings), base_model=BASE, **NARROW),
        "ties_unnormalized": recipe(
            "ties",
            sparse(*sloped),
            base_model=BASE,
            parameters={"normalize": False, "lambda": 1.3, "int8_mask": True},
        ),
        "ties_rescaled": recipe(
            "ties", sparse(*settings), base_model=BASE, parameters={"rescale": True}
        ),
        "breadcrumbs": recipe("breadcrumbs", sparse(*outliers), base_model=BASE),
        "breadcrumbs_ties": recipe(
            "breadcrumbs_ties", sparse(*outliers), base_model=BASE, parameters={"normalize": True}
        ),
        "model_stock": recipe("model_stock", [entry(A), entry(B), entry(C)], base_model=BASE),
        "model_stock_rows": recipe(
            "model_stock",
            [entry(A), entry(BASE), entry(C)],
            base_model=BASE,
            parameters={"filter_wise": True},
        ),
    }


def selections() -> dict[str, dict[str, Any]]:
    """What chooses among elements, and the mean on the sphere. DELLA's masks are random: what is
    kept of it are mean and variance of one tensor over many seeds (`moments`)."""
    every = [entry(A), entry(B), entry(C)]
    pair = {"models": [entry(A)], "base_model": BASE}
    listed = {"models": [entry(BASE), entry(B)], "base_model": BASE}
    select = {"select_topk": [0.2, 0.7]}
    plus = {"r": 0.5, "alpha": 0.4, "epsilon": 0.01}
    return {
        "arcee_fusion": recipe("arcee_fusion", **pair),
        "karcher": recipe("karcher", every),
        "karcher_short": recipe(
            "karcher", every, base_model=BASE, parameters={"max_iter": 1, "tol": 1e-3}
        ),
        "nearswap": recipe("nearswap", **listed, parameters={"t": 0.004}),
        "ram": recipe("ram", every, base_model=BASE, parameters={"epsilon": 0.008}),
        "ramplus_tl": recipe("ramplus_tl", every, base_model=BASE, parameters=plus),
        "sce": recipe("sce", every, base_model=BASE),
        "sce_selected": recipe("sce", every, base_model=BASE, parameters=select),
    }


def stacks() -> dict[str, dict[str, Any]]:
    """Slices: layers stacked, and merges whose settings come from several places."""
    scale = [{"filter": "o_proj", "value": 0.5}, {"filter": "down_proj", "value": [0.25, 1.0]}]
    return {
        "passthrough": {
            "merge_method": "passthrough",
            "slices": [{"sources": [part(A, 0, 2)]}, {"sources": [part(B, 1, 3, scale=scale)]}],
            **NARROW,
        },
        "linear_slices": {
            "merge_method": "linear",
            "slices": [
                {
                    "sources": [part(A, 0, 2, weight=0.7), part(B, 1, 3)],
                    "parameters": {"weight": [0.2, 0.9]},
                },
                {"sources": [part(B, 2, 3), part(C, 0, 1)]},
            ],
            "parameters": {"weight": [0.4, 0.6], "normalize": True},
            **WIDE,
        },
        "task_arithmetic_slices": {
            "merge_method": "task_arithmetic",
            "slices": [
                {"sources": [part(BASE, 0, 1), part(A, 0, 1, weight=0.5)]},
                {"sources": [part(B, 1, 3), part(C, 1, 3, weight=[0.1, 0.8])], "base_model": B},
            ],
            "base_model": BASE,
            "parameters": {"lambda": [0.5, 1.5]},
            **WIDE,
        },
    }


def vocabularies() -> dict[str, dict[str, Any]]:
    """Parent `wide` has two tokens more than the others, and two of theirs in exchanged places."""
    models = [entry(A, weight=0.7), entry(WIDE_VOCABULARY, weight=0.4)]
    sources = {
        "vocabulary_base": {"tokenizer_source": "base"},
        "vocabulary_union": {"tokenizer_source": "union"},
        "vocabulary_model": {"tokenizer": {"source": WIDE_VOCABULARY}},
        "vocabulary_padded": {"tokenizer": {"source": "union", "pad_to_multiple_of": 16}},
    }
    return {
        name: recipe("task_arithmetic", models, base_model=BASE, **source)
        for name, source in sources.items()
    }


def recipes() -> dict[str, dict[str, Any]]:
    return {**interpolations(), **arithmetic(), **selections(), **stacks(), **vocabularies()}


def shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama of this size."""
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"},
        **{f"self_attn.{name}_proj": (HIDDEN // 2, HIDDEN) for name in "kv"},
        **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
        "mlp.down_proj": (HIDDEN, INNER),
    }
    return {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        **{f"model.layers.{n}.{k}.weight": v for n in range(LAYERS) for k, v in layer.items()},
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocab, HIDDEN),
    }


def tokenizer(wide: bool) -> dict[str, Any]:
    """Letters without merges; the wide one knows more, and two of them in other places."""
    letters = [chr(ord("A") + i) for i in range(VOCAB)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = []
    if wide:
        letters[3], letters[4] = letters[4], letters[3]
        added = [
            {"id": VOCAB + i, "content": token, "special": True, **flags}
            for i, token in enumerate(ADDED)
        ]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    return {
        "version": "1.0",
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def make_parents(folder: Path) -> None:
    """A random base, and models a fifth of its size away from it."""
    base: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(NAMES):
        noise = torch.Generator().manual_seed(seed)
        vocab = VOCAB + len(ADDED) * (name == "wide")
        tensors = {}
        for key, shape in shapes(vocab).items():
            tensor = torch.randn(shape, generator=noise).mul_(0.01 if base else 0.05)
            tensor[:VOCAB] += base[key] if base else float("norm" in key)
            tensors[key] = tensor
        base = base or tensors
        (folder / name).mkdir(parents=True)
        config = {**CONFIG, "vocab_size": vocab}
        (folder / name / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        content = json.dumps(tokenizer(name == "wide"), ensure_ascii=False)
        (folder / name / "tokenizer.json").write_text(content + "\n")
        kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(kind) + "\n")
        narrow = {key: value.to(torch.bfloat16) for key, value in tensors.items()}
        save_file(narrow, folder / name / "model.safetensors", metadata={"format": "pt"})


DELLA = {  # one tensor of these is merged SEEDS times
    "della": {},
    "della_linear": {},
    "della_plain": {"rescale": False, "normalize": False, "lambda": 0.7},
}
DELLA_INPUTS = {"weight": [0.8, 0.5, 0.4], "density": [0.5, 0.3, 0.7], "epsilon": [0.2, 0.1, 0.25]}
DELLA_TENSOR = "model.layers.0.self_attn.k_proj.weight"
SEEDS = 4000
MOMENTS = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from mergekit import merge_methods
from mergekit.merge_methods.base import TensorGroup
torch.set_num_threads(1)
settings, inputs, tensor, seeds = json.loads(sys.argv[1])
parents = [load_file(f"parents/{n}/model.safetensors")[tensor].float() for n in ("base", *"abc")]
group, found = TensorGroup.from_tensors(parents, base_index=0), {}
for name, shared in settings.items():
    method = merge_methods.get(name.removesuffix("_plain"))
    made = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        made += method([group], parameters={**inputs, **shared})
    found[f"{name}.mean"] = torch.stack(made).mean(0)
    found[f"{name}.variance"] = torch.stack(made).var(0)
save_file(found, "della.safetensors")
"""


def moments(venv: Path, folder: Path) -> None:
    """Mean and variance of mergekit's DELLA over many seeds."""
    given = json.dumps([DELLA, DELLA_INPUTS, DELLA_TENSOR, SEEDS])
    subprocess.run([venv / "bin" / "python", "-c", MOMENTS, given], check=True, cwd=folder)


def versions(venv: Path) -> dict[str, str]:
    code = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({k: version(k) for k in sys.argv[1:]}))"
    )
    names = ("mergekit", "torch", "safetensors", "transformers")
    done = subprocess.run(
        [venv / "bin" / "python", "-c", code, *names], check=True, capture_output=True, text=True
    )
    return dict(json.loads(done.stdout))


def run(venv: Path, folder: Path, name: str) -> None:
    """One recipe through mergekit-yaml; only the tensors are kept."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [venv / "bin" / "mergekit-yaml", f"recipes/{name}.yml", scratch, "--quiet"]
        subprocess.run(
            [*command, "--num-threads", "1", "--no-copy-tokenizer", "--no-write-model-card"],
            check=True,
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        tensors = load_file(Path(scratch) / "model.safetensors")
    if name in vocabularies():  # the rest is task arithmetic as in other recipes
        tensors = {key: tensors[key] for key in ("model.embed_tokens.weight", "lm_head.weight")}
    (folder / "expected").mkdir(exist_ok=True)
    save_file(tensors, folder / "expected" / f"{name}.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path, help="a virtual environment with mergekit 0.1.5")
    parser.add_argument("--folder", type=Path, default=HERE, help="holds parents/, gets the rest")
    parser.add_argument("--only", nargs="*", help="these recipes")
    chosen = parser.parse_args()
    folder = chosen.folder
    if not (folder / "parents").exists():
        make_parents(folder / "parents")
    (folder / "recipes").mkdir(exist_ok=True)
    for name, body in recipes().items():
        if chosen.only and name not in chosen.only:
            continue
        path = folder / "recipes" / f"{name}.yml"
        path.write_text(yaml.safe_dump(body, sort_keys=False, width=100))
        run(chosen.venv.absolute(), folder, name)
        print(name, flush=True)  # noqa: T201
    if not chosen.only or "della" in chosen.only:
        moments(chosen.venv.absolute(), folder)
    files = sorted((folder / "parents").rglob("*.safetensors"))
    files += [*sorted((folder / "expected").glob("*.safetensors")), folder / "della.safetensors"]
    manifest = {
        "made_with": versions(chosen.venv),
        "sha256": {
            str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
        },
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
