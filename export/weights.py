"""How the matrices of a model are stored in a bundle.

A projection of N outputs and K inputs, K padded to Kp = ceil(K / b)·b with zero codes:

| storage    | tensors, in this order                                                                    |
|------------|-------------------------------------------------------------------------------------------|
| fp32, fp16 | weight [K, N]                                                                             |
| int8, int4 | codes [Kp, N] (int4: two per byte), scale fp16 [Kp/b, N], offset fp16 [Kp/b, N] if affine |

The embedding is stored the same way, as the projection that a tied head makes of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgekit.blocks import QuantizedBlocks, Scheme
from edgekit.errors import UnsupportedError
from edgekit.export.data_file import DataFile, Part

Precision: TypeAlias = Literal["fp32", "fp16", "int8", "int4"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8", "int4")
BITS: dict[Precision, Literal[4, 8]] = {"int8": 8, "int4": 4}
FLOAT16_MAX = 65504.0


@dataclass(frozen=True, kw_only=True)
class Storage:
    """How one matrix is stored.

    Attributes:
        precision: Number format of the weights.
        block_size: Inputs that share a scale (int8, int4 only).
        scheme: Whether blocks carry an offset (int8, int4 only).
    """

    precision: Precision
    block_size: int = 32
    scheme: Scheme = "symmetric"

    @property
    def quantized(self) -> bool:
        """Whether the matrix is stored as blocks of codes."""
        return self.precision in BITS

    def __str__(self) -> str:
        """Describes it as the manifest does: ``int4 affine block 32``."""
        return f"{self.precision} {self.scheme} block {self.block_size}" if self.quantized else self.precision


@dataclass(frozen=True, kw_only=True)
class StoredWeight:
    """A tensor of the model with a place in the data file.

    Attributes:
        name: Canonical name, such as ``layers.0.mlp.up_proj.weight``.
        shape: (rows, columns) of the matrix, or (n,) of a vector, as the model has it.
        storage: How it is stored.
        parts: The tensors of the table above, in its order.
    """

    name: str
    shape: tuple[int, ...]
    storage: Storage
    parts: tuple[ir.ExternalTensor, ...]

    @property
    def padded_columns(self) -> int:
        """Inputs including the zero codes that fill the last block."""
        if not self.storage.quantized:
            return self.shape[1]
        return -(-self.shape[1] // self.storage.block_size) * self.storage.block_size


Load: TypeAlias = Callable[[], npt.NDArray[np.float32] | QuantizedBlocks]


def store(file: DataFile, name: str, shape: tuple[int, ...], storage: Storage, load: Load) -> StoredWeight:
    """Gives a tensor of the model its place in the data file.

    Args:
        file: The data file.
        name: Canonical tensor name.
        shape: Shape in the model, (rows, columns) or (n,).
        storage: How to store it; vectors take fp32.
        load: Reads the tensor, as blocks when `storage` is quantized.
    """
    weight = StoredWeight(name=name, shape=shape, storage=storage, parts=())
    parts = file.reserve(name, _parts(weight), lambda: _encode(weight, load()))
    return dataclasses.replace(weight, parts=parts)


def check_range(name: str, values: npt.NDArray[np.float32], storage: Storage) -> None:
    """Refuses values that the storage of a tensor cannot hold.

    Args:
        name: Canonical tensor name.
        values: The tensor, finite.
        storage: How it is to be stored.

    Raises:
        UnsupportedError: A value is beyond float16, which all but fp32 is made of.
    """
    low, high = float(values.min()), float(values.max())
    largest = low if -low > high else high
    if storage.precision != "fp32" and abs(largest) > FLOAT16_MAX:
        raise UnsupportedError(
            f"{name} holds {largest:g}, and {storage.precision} reaches ±{FLOAT16_MAX:g} (float16); use precision fp32"
        )


def _parts(weight: StoredWeight) -> list[Part]:
    name, shape, storage = weight.name, weight.shape, weight.storage
    if not storage.quantized:
        return [(name, ir.DataType.FLOAT if storage.precision == "fp32" else ir.DataType.FLOAT16, shape[::-1])]
    dtype = ir.DataType.INT4 if storage.precision == "int4" else ir.DataType.INT8
    per_block = (weight.padded_columns // storage.block_size, shape[0])
    parts: list[Part] = [
        (f"{name}.codes", dtype, (weight.padded_columns, shape[0])),
        (f"{name}.scale", ir.DataType.FLOAT16, per_block),
    ]
    if storage.scheme == "affine":
        parts.append((f"{name}.offset", ir.DataType.FLOAT16, per_block))
    return parts


def _encode(weight: StoredWeight, value: npt.NDArray[np.float32] | QuantizedBlocks) -> list[npt.NDArray[Any]]:
    assert tuple(value.shape) == weight.shape, (weight.name, value.shape, weight.shape)
    if isinstance(value, QuantizedBlocks):
        codes = np.zeros((weight.padded_columns, value.shape[0]), np.int8)
        codes[: value.shape[1]] = value.codes.T
        stored = pack_int4(codes) if weight.storage.precision == "int4" else codes
        offset = [] if value.offset is None else [value.offset.T]
        return [stored, value.scale.T, *offset]
    return [value.T.astype(np.float32 if weight.storage.precision == "fp32" else np.float16)]


def read_stored(weight: StoredWeight, directory: Path) -> npt.NDArray[np.float32] | QuantizedBlocks:
    """Reads a weight back from the data file: the model's shape, blocks where it is quantized.

    Args:
        weight: A weight that was written.
        directory: Where the data file is.
    """
    arrays: list[npt.NDArray[Any]] = []
    for part in weight.parts:
        raw = np.fromfile(directory / part.location, np.uint8, part.length or 0, offset=part.offset or 0)
        shape = tuple(part.shape.numpy())
        is_int4 = part.dtype == ir.DataType.INT4
        arrays.append(unpack_int4(raw, shape) if is_int4 else raw.view(part.dtype.numpy()).reshape(shape))
    if not weight.storage.quantized:
        return arrays[0].T.astype(np.float32)
    codes, scale, *offset = arrays
    return QuantizedBlocks(
        bits=BITS[weight.storage.precision],
        block_size=weight.storage.block_size,
        codes=codes[: weight.shape[1]].T,
        scale=scale.T,
        offset=offset[0].T if offset else None,
    )


def pack_int4(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Packs codes of any shape two per byte in row-major order, the first in the low nibble (ONNX INT4).

    Args:
        codes: int8 in −8…7.

    Returns:
        shape (ceil(codes.size / 2),), uint8.
    """
    flat = codes.reshape(-1).view(np.uint8) & np.uint8(0x0F)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    packed: npt.NDArray[np.uint8] = flat[0::2] | (flat[1::2] << np.uint8(4))
    return packed


def unpack_int4(packed: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> npt.NDArray[np.int8]:
    """Undoes `pack_int4`; returns int8 codes of the given shape."""
    nibbles = np.empty(packed.size * 2, np.int8)
    nibbles[0::2] = (packed << 4).view(np.int8) >> 4
    nibbles[1::2] = packed.view(np.int8) >> 4
    return nibbles[: int(np.prod(shape))].reshape(shape)
