"""Stored matrices in the layouts of ONNX Runtime's kernels.

| tensor | portable graph               | MatMulNBits                                                  |
|--------|------------------------------|--------------------------------------------------------------|
| codes  | [Kp, N] int4 or int8, signed | [N, Kp/b, b·bits/8] uint8, zero at 8 or 128, low nibble first |
| scale  | [Kp/b, N] fp16               | [N, Kp/b] fp32                                               |
| offset | [Kp/b, N] fp16               | [Kp/b, N] fp32, the B operand of a Gemm over block sums      |

Matrices that are multiplied with the same activation are concatenated along N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from edgekit.bundle import GRAPH_DATA
from edgekit.errors import CorruptArtifactError
from edgekit.export.data_file import Part
from edgekit.export.lowering.blocks import Lowering
from edgekit.export.weights import unpack_int4

StoredParts = Sequence[ir.Value]


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """Initializers of a quantized matrix, as in the module's table; offset is None when symmetric."""

    codes: ir.Value
    scale: ir.Value
    offset: ir.Value | None


def packed(
    state: Lowering, matrices: Sequence[StoredParts], block_size: int, factors: Sequence[float] | None = None
) -> PackedMatrix:
    """Packs the codes of one or more quantized matrices; the same matrices are packed once.

    Args:
        state: The lowering.
        matrices: The (codes, scale[, offset]) of each matrix; all of one format and one K.
        block_size: Inputs that share a scale.
        factors: What each matrix is multiplied by; 1 when None.
    """
    first, bits = matrices[0][0], 4 if matrices[0][0].dtype == ir.DataType.INT4 else 8
    rows = sum(dimension(parts[0], -1) for parts in matrices)
    blocks = dimension(first, 0) // block_size
    name = _name([parts[0] for parts in matrices])
    shapes: list[Part] = [
        (f"{name}.nbits", ir.DataType.UINT8, (rows, blocks, block_size * bits // 8)),
        (f"{name}.nbits_scale", ir.DataType.FLOAT, (rows, blocks)),
    ]
    if len(matrices[0]) == 3:
        shapes.append((f"{name}.nbits_offset", ir.DataType.FLOAT, (blocks, rows)))

    def load() -> list[npt.NDArray[np.generic]]:
        codes = np.concatenate([_packed_codes(parts[0], block_size, bits) for parts in matrices])
        scale = np.concatenate(_scaled([parts[1] for parts in matrices], factors), axis=1).T
        if len(shapes) == 2:
            return [codes, scale]
        return [codes, scale, np.concatenate(_scaled([parts[2] for parts in matrices], factors), axis=1)]

    codes, scale, *offset = state.weights(name, shapes, load)
    return PackedMatrix(codes=codes, scale=scale, offset=offset[0] if offset else None)


def second_reading(state: Lowering, value: ir.Value) -> ir.Value:
    """Returns another initializer of the same bytes in the data file.

    ONNX Runtime repacks the matrix of a product when it loads it, and lets the file's copy go unless something else
    reads that very initializer. What only gathers rows reads the file by one of its own, which is mapped: no more of it
    is held than the rows that were asked for.
    """
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    name = f"{value.name}.rows"
    return state.g.weight(
        ir.ExternalTensor(tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=name)
    )


def widened(state: Lowering, matrices: Sequence[StoredParts], factors: Sequence[float] | None = None) -> ir.Value:
    """Concatenates fp32 or fp16 matrices [K, N], each times its factor, along N as fp32."""
    values = [parts[0] for parts in matrices]
    name, columns = _name(values), sum(dimension(value, -1) for value in values)
    whole = [(f"{name}.fp32", ir.DataType.FLOAT, (dimension(values[0], 0), columns))]
    return state.weights(name, whole, lambda: [np.concatenate(_scaled(values, factors), axis=1)])[0]


def vectors(state: Lowering, values: Sequence[ir.Value], factors: Sequence[float] | None = None) -> ir.Value:
    """Concatenates fp32 vectors, each times its factor."""
    name = _name(values)
    length = sum(dimension(value, -1) for value in values)
    whole = [(f"{name}.fp32", ir.DataType.FLOAT, (length,))]
    return state.weights(name, whole, lambda: [np.concatenate(_scaled(values, factors))])[0]


def _scaled(values: Sequence[ir.Value], factors: Sequence[float] | None) -> list[npt.NDArray[np.float32]]:
    """Reads weights as float32, each times its factor."""
    return [
        _read(value).astype(np.float32) * np.float32(factor)
        for value, factor in zip(values, factors or [1.0] * len(values), strict=True)
    ]


def _packed_codes(value: ir.Value, block_size: int, bits: int) -> npt.NDArray[np.uint8]:
    """Returns shape (N, Kp / b, b · bits / 8): codes along K, shifted so that they are unsigned."""
    codes = np.ascontiguousarray(_read(value).T).view(np.uint8) + np.uint8(1 << (bits - 1))
    if bits == 4:
        codes &= np.uint8(0x0F)
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return codes.reshape(codes.shape[0], -1, block_size * bits // 8)


def _read(value: ir.Value) -> npt.NDArray[Any]:
    """Reads a weight; codes of 4 bits as int8.

    Not through onnx-ir, which keeps what it has read, with 4 bits unpacked to 8, for as long as it keeps the graph.
    """
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor), value.name
    if tensor.location != GRAPH_DATA:
        raise CorruptArtifactError(
            f"the graph keeps {tensor.name!r} in {str(tensor.location)!r}, not in {GRAPH_DATA}; export the bundle again"
        )
    raw = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset or 0)
    if raw.size != tensor.nbytes:
        raise CorruptArtifactError(f"{GRAPH_DATA} ends before {tensor.name!r}; export or copy the bundle again")
    shape = tuple(tensor.shape.numpy())
    if tensor.dtype == ir.DataType.INT4:
        return unpack_int4(raw, shape)
    return raw.view(tensor.dtype.numpy()).reshape(shape)


def dimension(value: ir.Value, axis: int) -> int:
    """Returns the size of a value of known shape along an axis."""
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size


def _name(values: Sequence[ir.Value]) -> str:
    return "|".join(str(value.name).removesuffix(".codes") for value in values)
