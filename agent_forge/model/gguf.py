"""A model as one GGUF file, which llama.cpp and Ollama run, with a Modelfile beside it.

Tensors go through one at a time. What llama.cpp would compute in another way is refused.
"""

import io
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agent_forge.errors import AlreadyExists, ConfigError, DamagedFile
from agent_forge.model.folder import MODEL_TYPE, home_of, open_weights, read_config
from agent_forge.model.gguf_tokenizer import add_tokenizer, modelfile
from agent_forge.model.load import check_tensors, completed, open_tokenizer
from agent_forge.model.opened import end_tokens_of
from agent_forge.model.weights import Weights, is_tied
from agent_forge.quant.codecs import TERNARY as TERNARY_RULES
from agent_forge.quant.packed import packing_of
from agent_forge.store import files
from agent_forge.store.tensors import TensorSpec, write_data

MODELFILE = "Modelfile"
SHAPES = ("llama", "qwen2")  # as configs and llama.cpp both call them
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
TERNARY = ("tq1_0", "tq2_0")  # of packed models: 1.69 and 2.06 bits a ternary weight
BLOCKS = {"tq1_0": 256, "tq2_0": 256, "q4_0": 32}  # weights that share a scale there
ROPES = {"default": SHAPES, "linear": SHAPES, "yarn": SHAPES, "llama3": ("llama",)}
# What llama.cpp takes for granted of a network, and of the rotation.
USUAL = {"hidden_act": "silu", "use_sliding_window": False, "mlp_bias": False}
USUAL_ROPE = {"beta_fast": 32, "beta_slow": 1, "attention_factor": None, "mscale": None}
USUAL_ROPE |= {"truncate": True, "partial_rotary_factor": 1}


class OutputTensor(NamedTuple):
    """A tensor of the file, and how to get it."""

    name: str
    spec: TensorSpec
    source: str
    heads: int = 0  # whose rows are put in the order of llama.cpp's rotation
    codes: str = ""  # the type of llama.cpp in few bits, if it is written so

    @property
    def kind(self) -> str:
        """The type, as llama.cpp calls it."""
        own = (name for name, dtype in DTYPES.items() if dtype == self.spec.dtype)
        return (self.codes or next(own)).upper()

    def nbytes(self, gguf: Any) -> int:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.kind]]
        return int(self.spec.numel // block * size)


def export_gguf(
    ref: str,
    target: Path,
    dtype: str | None,
    *,
    overwrite: bool,
    dry_run: bool,
    almost: Callable[[], object] = lambda: None,
) -> files.FileRecords:
    """Write a model and its Modelfile; returns the sizes and, once written, sums of both. `almost`
    is called when both are to be put in their places."""
    gguf, beside = _library(), _modelfile_place(target)
    for path in (target, beside):
        if (path.exists() or path.is_symlink()) and not overwrite:
            hint = "--force overwrites it; a Modelfile with lines of your own is kept beside"
            raise AlreadyExists(f"{path} exists", hint=hint)
    config, folder = read_config(ref), home_of(ref)
    if (kind := config["model_type"]) not in SHAPES:
        why = "llama.cpp has no architecture for it" if kind == MODEL_TYPE else "not supported"
        hint = f"GGUF is written of {' and '.join(SHAPES)}"
        raise ConfigError(f"{ref} is a model of type {kind!r}: {why}", hint=hint)
    weights = open_weights(ref)
    check_tensors(weights)
    weights.verify()
    for _, path in weights.settings_files():
        files.refuse_leaving(path)  # its content goes into a file that may be given away
    shape, tokenizer = completed(weights.config, ref), open_tokenizer(folder)
    kind = _dtype_name(weights, dtype)
    codes = _codes(config, ref, kind) if kind in TERNARY else {}
    large = torch.float16 if codes else DTYPES[kind]
    outputs = list(_outputs(gguf, weights, shape, large, codes))
    ends = end_tokens_of(folder, shape, tokenizer)
    writer = gguf.GGUFWriter(None, shape.model_type)
    try:
        _describe(gguf, writer, folder.name, shape, kind)
        add_tokenizer(writer, tokenizer, weights.specs[weights.embedding].shape[0], ends)
        head, told = _head(gguf, writer, outputs), modelfile(target.name, tokenizer, ends).encode()
    except (struct.error, LookupError, TypeError, ValueError) as error:
        problem = f"its config or tokenizer cannot be written as GGUF ({error})"
        raise DamagedFile(ref, problem) from error
    align, pads = gguf.GGUF_DEFAULT_ALIGNMENT, gguf.GGUFWriter.ggml_pad
    size = len(head) + sum(pads(output.nbytes(gguf), align) for output in outputs)
    records = {target.name: {"bytes": size}, beside.name: {"bytes": len(told)}}
    if not dry_run:
        files.require_space(target, size + len(told))
        with files.writing(target, replace=overwrite) as out:
            out.write(head)
            for output in outputs:
                write_data(out, _converted(gguf, weights, shape, output))
                out.write(bytes(-out.size % align))
            almost()
        records[target.name] = out.record
        if overwrite:
            files.make_way(beside, lambda path: path.read_bytes() == told)
        with files.writing(beside, replace=overwrite) as out:
            out.write(told)
        records[beside.name] = out.record
    return records


def _modelfile_place(target: Path) -> Path:
    """Where the Modelfile goes; the usual one stays if it is there and names another file."""
    usual = target.with_name(MODELFILE)
    if not usual.is_file() or usual.read_bytes().startswith(f"FROM ./{target.name}\n".encode()):
        return usual
    return target.with_suffix(f".{MODELFILE}")


def _library() -> Any:
    try:
        import gguf
    except ImportError:
        hint = "pip install -c constraints.txt -e '.[gguf]'"
        raise ConfigError("GGUF needs the package gguf (extra: gguf)", hint=hint) from None
    return gguf


def _dtype_name(weights: Weights, asked: str | None) -> str:
    """The type of the large tensors: the one asked for, or that of the embedding."""
    own = weights.specs[weights.embedding].dtype
    name = asked or next((name for name, dtype in DTYPES.items() if dtype == own), "f32")
    if name not in (*DTYPES, *TERNARY):
        raise ConfigError(f"--dtype {name} is none of {', '.join((*DTYPES, *TERNARY))}")
    return name


def _codes(config: Mapping[str, Any], ref: str, kind: str) -> dict[str, str]:
    """The types of the matrices of a packed model, where llama.cpp has one without any loss."""
    if (packing := packing_of(config, ref)) is None:
        hint = f"forge quantize {ref} OUT, then export that"
        raise ConfigError(f"{ref} is not packed: --dtype {kind} is for ternary weights", hint=hint)
    kinds = {"int4g32": "q4_0", **dict.fromkeys(TERNARY_RULES, kind)}
    return {
        name: kinds[matrix.codec.name]
        for name, matrix in packing.matrices.items()
        if matrix.codec.name in kinds
        if matrix.shape[1] % BLOCKS[kinds[matrix.codec.name]] == 0
    }


def _outputs(
    gguf: Any, weights: Weights, shape: Any, dtype: torch.dtype, codes: Mapping[str, str]
) -> Iterator[OutputTensor]:
    """The tensors of the file; those with one dimension stay in fp32, as llama.cpp needs them."""
    _refuse_other(shape, weights.label)
    arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[shape.model_type]
    table = gguf.get_tensor_name_map(arch, shape.num_hidden_layers)
    rotated = {"attn_q": shape.num_attention_heads, "attn_k": shape.num_key_value_heads}
    for source, spec in weights.specs.items():
        again = source == weights.head and is_tied(weights)  # the embedding
        if again or not source.endswith((".weight", ".bias")):  # or an old buffer
            continue
        name = table.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ConfigError(f"{weights.label}: llama.cpp has no place for the tensor {source!r}")
        kind = torch.float32 if len(spec.shape) == 1 else dtype
        heads = rotated.get(name.split(".")[-2], 0) if shape.model_type == "llama" else 0
        yield OutputTensor(name, TensorSpec(kind, spec.shape), source, heads, codes.get(source, ""))
    if _rope(shape)["rope_type"] == "llama3":
        spec = TensorSpec(torch.float32, (_width(shape) // 2,))
        yield OutputTensor("rope_freqs.weight", spec, source="")


def _refuse_other(shape: Any, place: str) -> None:
    """Refuse settings that would change what llama.cpp computes from the same weights."""
    rope = _rope(shape)
    said = {**{key: getattr(shape, key, None) for key in USUAL}, **rope}
    usual = {**USUAL, **USUAL_ROPE}
    wrong = [k for k in usual if said.get(k) not in (None, usual[k])]
    wrong += [] if shape.model_type in ROPES.get(rope["rope_type"], ()) else ["rope_type"]
    if wrong:
        listed = ", ".join(f"{key} = {said[key]!r}" for key in wrong)
        raise ConfigError(f"{place}: GGUF is not written of models with {listed}")


def _rope(shape: Any) -> Mapping[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, **(shape.rope_parameters or {})}


def _width(shape: Any) -> int:
    """The width of a head."""
    given = getattr(shape, "head_dim", None)
    return int(given or shape.hidden_size // shape.num_attention_heads)


def _describe(gguf: Any, writer: Any, name: str, shape: Any, dtype: str) -> None:
    """Put what llama.cpp has to know of a network into the file's head."""
    kinds = {name: f"MOSTLY_{name.upper()}" for name in (*DTYPES, *TERNARY)} | {"f32": "ALL_F32"}
    rope, width = _rope(shape), _width(shape)
    facts = {
        "type": "model",
        "name": name,
        "file_type": gguf.LlamaFileType[kinds[dtype]],
        "vocab_size": shape.vocab_size,
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "block_count": shape.num_hidden_layers,
        "feed_forward_length": shape.intermediate_size,
        "head_count": shape.num_attention_heads,
        "head_count_kv": shape.num_key_value_heads,
        "key_length": width,
        "value_length": width,
        "layer_norm_rms_eps": shape.rms_norm_eps,
        "rope_dimension_count": width,
        "rope_freq_base": rope["rope_theta"],
    }
    if rope["rope_type"] in ("linear", "yarn"):
        facts["rope_scaling_type"] = gguf.RopeScalingType(rope["rope_type"])
        facts["rope_scaling_factor"] = rope["factor"]
    if rope["rope_type"] == "yarn":
        before = rope.get("original_max_position_embeddings") or shape.max_position_embeddings
        facts["rope_scaling_orig_ctx_len"] = before
    for key, value in facts.items():
        getattr(writer, f"add_{key}")(value)


def _head(gguf: Any, writer: Any, outputs: list[OutputTensor]) -> bytes:
    """All that comes before the tensors."""
    for output in outputs:
        code, size = gguf.GGMLQuantizationType[output.kind], output.nbytes(gguf)
        writer.add_tensor_info(output.name, output.spec.shape, None, size, raw_dtype=code)
    head = io.BytesIO()
    writer.fout, writer.state = [head], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return head.getvalue() + bytes(-head.tell() % gguf.GGUF_DEFAULT_ALIGNMENT)


def _converted(gguf: Any, weights: Weights, shape: Any, output: OutputTensor) -> Tensor:
    """One tensor as the file holds it."""
    if not output.source:
        return _llama3_factors(shape)
    tensor, heads = weights[output.source], output.heads
    if heads:  # transformers rotates halves of a head, llama.cpp neighbours
        halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    if output.codes:
        return _coded(gguf, tensor, output)
    tensor = tensor.to(output.spec.dtype)
    if not bool(tensor.isfinite().all()):
        problem = f"{output.source} holds NaN, infinity, or what {output.spec.dtype} cannot hold"
        raise ConfigError(f"{weights.label}: {problem}", hint="try --dtype bf16")
    return tensor


def _coded(gguf: Any, tensor: Tensor, output: OutputTensor) -> Tensor:
    """A matrix of a packed model in codes of llama.cpp, which hold the same numbers."""
    values, code = tensor.float().numpy(), gguf.GGMLQuantizationType[output.kind]
    data = gguf.quants.quantize(values, code)
    if not np.array_equal(gguf.quants.dequantize(data, code), values):
        raise ConfigError(f"{output.source} cannot be written as {output.kind} without loss")
    return torch.from_numpy(data)


def _llama3_factors(shape: Any) -> Tensor:
    """By what each frequency of the rotation is divided, as Llama 3.1 does it."""
    rope, width = _rope(shape), _width(shape)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turns *= rope["original_max_position_embeddings"] / (2 * math.pi)  # in the old context
    share = ((turns - low) / (high - low)).clamp(0, 1)  # that a frequency keeps
    factors: Tensor = 1 / ((1 - share) / rope["factor"] + share)
    return factors.float()
