"""Tensors on disk: safetensors written as a stream through `files`, read into memory of our own.

The format is a length, a JSON header and the raw bytes, so writing it here costs forty lines and
buys three things: every byte passes the one durable writer, a model larger than memory can be
written, and equal tensors always give equal files. Reading is left to the safetensors library.
"""

import contextlib
import json
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from agent_forge.errors import DamagedFile, HostileInput, NotFound
from agent_forge.store.files import HashingWriter

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOATS_8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
SIGNED = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
UNSIGNED = {"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8}
DTYPE_OF = {**FLOATS, **FLOATS_8, **SIGNED, **UNSIGNED, "BOOL": torch.bool}
DTYPE_CODES = {dtype: code for code, dtype in DTYPE_OF.items()}
ASK_AUTHOR = "ask its author for a safetensors file"
StateDict = dict[str, torch.Tensor]
Weights = Mapping[str, torch.Tensor]
OVERHEAD_BYTES = 1 << 17  # header, metadata and card beside the weights


def tensor_bytes(tensors: Weights) -> int:
    """Return the bytes that the tensors take on disk."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def first_not_finite(tensors: Weights) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, or None."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            wide = tensor.float() if tensor.element_size() == 1 else tensor  # torch needs it so
            if not bool(wide.isfinite().all()):
                return name
    return None


def memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common that are the same memory in the same shape."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class TensorSpec(NamedTuple):
    """Type and shape of a tensor, as a file tells them before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_floating(self) -> bool:
        return self.dtype.is_floating_point


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tensor.dtype, tuple(tensor.shape))


def write_tensors(
    writer: HashingWriter, tensors: Weights, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors in the safetensors format; widest types first, so that all stay aligned."""
    for name in write_header(writer, _specs(tensors), metadata):
        write_data(writer, tensors[name])


def write_header(
    writer: HashingWriter, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> list[str]:
    """Write the header; return the order of names in which the data has to follow."""
    names, text = _header(specs, metadata)
    writer.write(len(text).to_bytes(8, "little"))
    writer.write(text)
    return names


def _specs(tensors: Weights) -> dict[str, TensorSpec]:
    return {name: spec_of(tensors[name]) for name in sorted(tensors)}


def _header(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> tuple[list[str], bytes]:
    """The order of the tensors, and the header that says where each is."""
    names = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        spec = specs[name]
        if spec.dtype not in DTYPE_CODES:
            raise TypeError(f"tensor {name!r} has type {spec.dtype}, which cannot be kept")
        span = [offset, offset := offset + spec.nbytes]
        about = {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape)}
        header[name] = {**about, "data_offsets": span}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return names, text + b" " * (-len(text) % 8)


def stored_bytes(tensors: Weights, metadata: Mapping[str, str] | None = None) -> int:
    """The size of the file that `write_tensors` would write."""
    return len(_header(_specs(tensors), metadata)[1]) + 8 + tensor_bytes(tensors)


def write_data(writer: HashingWriter, tensor: torch.Tensor) -> None:
    """Write the bytes of one tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        writer.write(flat.view(torch.uint8).numpy().data)


class MappedTensors(Mapping[str, torch.Tensor]):
    """A safetensors file that stays on the disk: `specs` from its header, tensors as views of it.

    Views lie where the file puts them: use them element by element only (see read_tensors).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _as_damage(path):
            reader: Any = safe_open(path, framework="pt")
            self._reader = reader
            slices = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            self.specs = {
                name: TensorSpec(DTYPE_OF[part.get_dtype()], tuple(part.get_shape()))
                for name, part in slices.items()
            }

    def __getitem__(self, name: str) -> torch.Tensor:
        with _as_damage(self.path):
            return self._reader.get_tensor(name)  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise DamagedFile(path, f"not readable as safetensors ({error})") from error


def read_tensors(path: Path) -> StateDict:
    """Read a safetensors file into torch's own memory."""
    # A mapped tensor may lie at another alignment and then give other bits in a matrix product.
    with _as_damage(path), safe_open(path, framework="pt") as reader:
        return {name: reader.get_tensor(name).clone() for name in reader.keys()}  # noqa: SIM118


def read_weights(path: Path, *, mapped: bool = False) -> StateDict:
    """Read someone else's state dict: safetensors, or a pickle (`mapped`: left on the disk)."""
    if not path.is_file():
        raise NotFound(f"{path} does not exist, or is not a file")
    if path.suffix not in (".pt", ".pth", ".bin", ".ckpt"):
        return read_tensors(path)
    _refuse_zip_bomb(path)
    try:
        mappable = mapped and zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except pickle.UnpicklingError as error:
        text = f"{path} holds more than tensors and was not loaded"
        raise HostileInput(text, hint=ASK_AUTHOR) from error
    except Exception as error:
        raise DamagedFile(path, f"not readable as a torch file ({error!r})") from error
    return _state_dict_of(content, path, copy=not mapped)


def _state_dict_of(content: Any, path: Path, *, copy: bool) -> StateDict:
    for key in ("model_state_dict", "state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in content.items()
    ):
        raise DamagedFile(path, "holds no state dict (names with tensors)")
    for name, tensor in content.items():
        dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_meta
        if not dense or tensor.dtype not in DTYPE_CODES:
            kind = "nested" if tensor.is_nested else "meta" if tensor.is_meta else tensor.layout
            text = f"tensor {name!r} is {kind} of {tensor.dtype}; only plain tensors are read"
            raise DamagedFile(path, text, hint=ASK_AUTHOR)
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise HostileInput(f"{path}: tensor {name!r} claims more than the file holds")
    if not copy:
        return {name: tensor.detach() for name, tensor in content.items()}
    kept, aliases = split_tied(content)
    return join_tied({name: tensor.detach().clone() for name, tensor in kept.items()}, aliases)


def _refuse_zip_bomb(path: Path) -> None:
    """torch stores its archives uncompressed; one that is compressed was made by someone else."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except Exception as error:
        raise DamagedFile(path, f"not readable as an archive ({error!r})") from error
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or sum(entry.file_size for entry in entries) > path.stat().st_size:
        raise HostileInput(f"{path} would unpack to more than it is; it was not loaded")


def split_tied(state: Weights) -> tuple[StateDict, dict[str, str]]:
    """Keep the first of the names that share memory; return the others as aliases of it."""
    kept: StateDict = {}  # the embedding, before the head: loaders look for it
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        place = memory_key(tensor)
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first.setdefault(place, name)
            kept[name] = tensor
    return kept, aliases


def join_tied(kept: Weights, aliases: Mapping[str, str]) -> StateDict:
    """Undo split_tied: aliases share the tensor of the name that was kept."""
    return {**kept, **{name: kept[target] for name, target in aliases.items()}}
