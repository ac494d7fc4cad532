"""Packed models: a safetensors file whose matrices are codes and scales.

Of a matrix NAME that a codec writes, the file holds NAME.codes (bytes) and NAME.scales (fp16, or a
byte each); all other tensors are fp16 under their own names. config.json says which codec wrote
what, in `quantization_config`, so that a packed model opens as any other: it is decoded once, as it
is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from agent_forge.errors import ConfigError, DamagedFile
from agent_forge.quant.codecs import Codec, Coded, TernaryCodec, find_codec

KEY = "quantization_config"  # of config.json, where transformers has its own
# Under a name of our own: transformers refuses a record without a `quant_method`, but skips one
# that it does not know and fills the gaps with fresh weights.
METHOD_KEY, METHOD = "packed_by", "agent_forge"
VERSION = 1
CODES, SCALES = ".codes", ".scales"
NUMBER = re.compile(r"\.\d+(?=\.)")
MOST_WEIGHTS = 1 << 40  # of one matrix


class Typed(Protocol):
    """Something with the type and shape of a tensor: one itself, or what a header says of it."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class PackedMatrix:
    """How one matrix is written. `turned`: its columns make the outputs (Conv1D of GPT-2)."""

    codec: Codec
    shape: tuple[int, int]  # as the network has it
    turned: bool = False

    @property
    def rows_columns(self) -> tuple[int, int]:
        """Its shape as the codec sees it."""
        rows, columns = self.shape
        return (columns, rows) if self.turned else (rows, columns)

    def quantise(self, weight: Tensor) -> Coded:
        return self.codec.quantise(weight.t() if self.turned else weight)

    def restore(self, coded: Coded) -> Tensor:
        weight = self.codec.restore(coded)
        return weight.t().contiguous() if self.turned else weight

    def rounded(self, weight: Tensor) -> Tensor:
        """The weight as it is after it was written and read."""
        return self.restore(self.quantise(weight)).to(weight.dtype)

    def before(self, decoded: Tensor) -> Tensor:
        """Weights that are rounded to a matrix that was read."""
        return self.codec.before(decoded.t()).t() if self.turned else self.codec.before(decoded)

    def to_json(self) -> dict[str, Any]:
        record = {"codec": self.codec.name, "shape": list(self.shape)}
        return {**record, "turned": True} if self.turned else record


def kind_of(name: str) -> str:
    """The kind of a matrix: its name without the number of its layer."""
    return NUMBER.sub("", name).removesuffix(".weight")


def kinds_of(matrices: Iterable[str]) -> dict[str, list[str]]:
    """The names of matrices by their kind."""
    kinds: dict[str, list[str]] = {}
    for name in matrices:
        kinds.setdefault(kind_of(name), []).append(name)
    return kinds


@dataclass(frozen=True)
class Packing:
    """Which matrices of a model are coded, and how; all else is fp16."""

    matrices: Mapping[str, PackedMatrix]
    activation_bits: int = 0  # of what coded linear layers are given; 0: as it is

    @property
    def with_rounded_inputs(self) -> list[str]:
        """The weights of layers that are given rounded numbers: the ternary ones."""
        return self.ternary if self.activation_bits else []

    @property
    def ternary(self) -> list[str]:
        return [n for n, m in self.matrices.items() if isinstance(m.codec, TernaryCodec)]

    def pack(self, state: Mapping[str, Tensor]) -> PackedState:
        """The packed file of weights that are not rounded yet."""
        if missing := sorted({*self.matrices} - {*state}):
            raise ConfigError(f"{missing[0]} is to be packed, and is not among the weights")
        packed: dict[str, Tensor] = {}
        for name, tensor in state.items():
            if (matrix := self.matrices.get(name)) is None:
                packed[name] = _half(name, tensor)
                continue
            coded = matrix.quantise(tensor.detach().cpu())
            packed[name + CODES] = matrix.codec.pack(coded.codes)
            packed[name + SCALES] = matrix.codec.pack_scales(_half(name, coded.scales))
        return PackedState(self, packed)

    def rounded(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model as it is after it was packed and read, without the bytes in between."""
        found = {}
        for name, tensor in state.items():
            if matrix := self.matrices.get(name):
                found[name] = matrix.rounded(tensor)
            else:
                found[name] = _half(name, tensor).to(tensor.device, tensor.dtype)
        return found

    def before(self, decoded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights that are rounded to those of a packed model that was opened."""
        of = self.matrices
        return {name: of[name].before(t) if name in of else t for name, t in decoded.items()}

    def to_json(self) -> dict[str, Any]:
        """The record for config.json."""
        return {
            METHOD_KEY: METHOD,
            "version": VERSION,
            "activation_bits": self.activation_bits,
            "matrices": {name: matrix.to_json() for name, matrix in self.matrices.items()},
        }

    # -- reading -----------------------------------------------------------------------------------

    def names(self, stored: Mapping[str, Typed], place: Any) -> list[str]:
        """The tensors that a packed file decodes to; one whose parts do not fit is refused."""
        found = []
        for name, typed in stored.items():
            own = name.removesuffix(CODES)
            if name != own and own in self.matrices:
                _check(self.matrices[own], typed, stored.get(own + SCALES), place, own)
                found.append(own)
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) in self.matrices):
                found.append(name)
        if missing := sorted({*self.matrices} - {*found}):
            raise DamagedFile(place, f"the codes of {missing[0]} are missing")
        if len({*found}) != len(found):
            raise DamagedFile(place, "a matrix is in it both packed and whole")
        return found

    def tensor(self, name: str, stored: Mapping[str, Tensor], place: Any) -> Tensor:
        """A decoded tensor of a packed file."""
        if (matrix := self.matrices.get(name)) is None:
            return stored[name]
        try:
            codes = self.codes(name, stored)
            scales = matrix.codec.unpack_scales(stored[name + SCALES])
        except ValueError as error:
            raise DamagedFile(place, f"{name}: {error}") from None
        return matrix.restore(Coded(codes, scales))

    def codes(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """The codes of a matrix; ValueError if its bytes hold anything else."""
        matrix = self.matrices[name]
        rows, columns = matrix.rows_columns
        return matrix.codec.unpack(stored[name + CODES], rows * columns).view(rows, columns)

    def unpack(self, stored: Mapping[str, Tensor], place: Any) -> dict[str, Tensor]:
        """All tensors of a packed file, decoded."""
        return {name: self.tensor(name, stored, place) for name in self.names(stored, place)}


class PackedState(NamedTuple):
    """A packing, and the tensors of its file."""

    packing: Packing
    tensors: Mapping[str, Tensor]


def packing_of(config: Mapping[str, Any], place: Any) -> Packing | None:
    """How the model of a config.json is packed; None if it is not, or not by us."""
    record = config.get(KEY)
    if not isinstance(record, Mapping) or record.get(METHOD_KEY) != METHOD:
        return None
    if record.get("version") != VERSION:
        problem = f"it is packed in version {record.get('version')!r}; {VERSION} is read"
        raise DamagedFile(place, problem, hint="a newer Agent Forge may read it")
    matrices, activations = record.get("matrices"), record.get("activation_bits")
    if not isinstance(matrices, Mapping) or activations not in (0, 8) or activations is False:
        raise DamagedFile(place, f"its {KEY} is incomplete")
    return Packing({name: _matrix(name, m, place) for name, m in matrices.items()}, activations)


def _matrix(name: str, record: Any, place: Any) -> PackedMatrix:
    shape = record.get("shape") if isinstance(record, Mapping) else None
    turned = record.get("turned", False) if isinstance(record, Mapping) else None
    sizes = shape if isinstance(shape, list) and len(shape) == 2 else [0]
    if not all(type(n) is int and n > 0 for n in sizes) or type(turned) is not bool:
        raise DamagedFile(place, f"{KEY}: {name} has no shape of two sizes")
    if sizes[0] * sizes[1] > MOST_WEIGHTS:
        raise DamagedFile(place, f"{KEY}: {name} has {sizes[0]} x {sizes[1]} weights")
    try:
        codec = find_codec(str(record.get("codec")))
    except ConfigError as error:
        raise DamagedFile(place, f"{KEY}: {name}: {error}") from None
    return PackedMatrix(codec, (sizes[0], sizes[1]), turned)


def _check(matrix: PackedMatrix, codes: Typed, scales: Typed | None, place: Any, name: str) -> None:
    """Refuse codes or scales that are not of the matrix's size."""
    (rows, columns), codec = matrix.rows_columns, matrix.codec
    count = rows * columns
    one = len(codes.shape) == 1 and codes.dtype == torch.uint8
    if not one or not codec.fits(codes.shape[0], count):
        raise DamagedFile(place, f"the codes of {name} are not the bytes of {count:,}")
    wanted = rows, codec.groups(columns)
    if scales is None or scales.dtype != codec.scale_type or tuple(scales.shape) != wanted:
        kind = str(codec.scale_type).removeprefix("torch.")
        raise DamagedFile(place, f"the scales of {name} are not {wanted[0]} x {wanted[1]} {kind}")


def _half(name: str, tensor: Tensor) -> Tensor:
    """A tensor in fp16; whole numbers as they are."""
    if not tensor.is_floating_point():
        return tensor.detach().cpu()
    half = tensor.detach().cpu().to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ConfigError(f"{name} does not fit fp16: a weight or scale is beyond 65,504")
    return half
