"""The tensor types of GGUF files: one row of `TYPES` each, with what reads it.

Blocks of 4 to 8 bits stay blocks, with exactly the codes of the file. Where a type multiplies a scale out of two
numbers, the product is rounded to float16, and so is an offset; nothing else is. What is neither in the table nor a
float is left to `gguf.quants.dequantize`.

Source: the structs `block_q4_0` … `block_q6_K` of ggml (ggml-common.h) and their `dequantize_row_*` (ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint.base import Weight

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]


class TensorType(NamedTuple):
    """How a type stores the values of a row, and how they are read.

    Attributes:
        name: GGUF's name.
        elements: Values per block.
        size: Bytes per block.
        read: Reads rows from their bytes, shape (rows, blocks, size), contiguous: float32 values in their order, or
            blocks. Numbers beyond the range of what they are read into become infinite.
        exact: Whether blocks are read as blocks.
    """

    name: str
    elements: int
    size: int
    read: Callable[[Bytes], Weight]
    exact: bool = True


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _f64(blocks: Bytes) -> Floats:
    return blocks.view("<f8").astype(np.float32)


def _q4_0(blocks: Bytes) -> QuantizedBlocks:
    return _symmetric(4, 32, _fields(blocks[..., 2:], 4), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> QuantizedBlocks:
    return _affine(4, _fields(blocks[..., 4:], 4), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> QuantizedBlocks:
    return _symmetric(5, 32, _five_bits(blocks[..., 2:]), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> QuantizedBlocks:
    return _affine(5, _five_bits(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> QuantizedBlocks:
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(blocks), -1)
    return QuantizedBlocks(bits=8, block_size=32, codes=codes, scale=_half(blocks, 0).astype(np.float16))


def _q4_k(blocks: Bytes) -> QuantizedBlocks:
    return _affine(4, _fields(_groups(blocks[..., 16:], 4), 4), *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> QuantizedBlocks:
    codes = _fields(_groups(blocks[..., 48:], 4), 4).reshape(*blocks.shape[:2], 256)
    codes |= _fields(blocks[..., 16:48], 1) << 4
    return _affine(5, codes, *_scales_and_minima(blocks))


def _q6_k(blocks: Bytes) -> QuantizedBlocks:
    codes = _fields(_groups(blocks[..., :128], 2), 4)
    codes |= _fields(_groups(blocks[..., 128:192], 2), 2) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return _symmetric(6, 16, codes, _half(blocks, 208)[..., None] * scales)


TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4, _f32),
    1: TensorType("F16", 1, 2, _f16),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    6: TensorType("Q5_0", 32, 22, _q5_0),
    7: TensorType("Q5_1", 32, 24, _q5_1),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    12: TensorType("Q4_K", 256, 144, _q4_k),
    13: TensorType("Q5_K", 256, 176, _q5_k),
    14: TensorType("Q6_K", 256, 210, _q6_k),
    28: TensorType("F64", 1, 8, _f64),
    30: TensorType("BF16", 1, 2, _bf16),
}


def _symmetric(code_bits: int, block_size: int, fields: Bytes, scale: Floats) -> QuantizedBlocks:
    """Blocks of scale · (q − c) with q in 0 … 2c − 1; `scale` has one number per block, `fields` block_size q."""
    rows = len(fields)
    return QuantizedBlocks(
        bits=_width(code_bits),
        block_size=block_size,
        codes=_signed(fields, 1 << (code_bits - 1)),
        scale=scale.astype(np.float16).reshape(rows, -1),
    )


def _affine(code_bits: int, fields: Bytes, scale: Floats, minimum: Floats) -> QuantizedBlocks:
    """Blocks of 32: scale · q + minimum with q in 0 … 2c − 1 is scale · (q − c) + (minimum + c · scale).

    The new offset is the middle of the block, near zero, so its rounding to float16 is small; it is computed from
    the scale before that is rounded, so that the scale's own rounding counts at most c times rather than 2c − 1.
    """
    rows, centre = len(fields), 1 << (code_bits - 1)
    return QuantizedBlocks(
        bits=_width(code_bits),
        block_size=32,
        codes=_signed(fields, centre),
        scale=scale.astype(np.float16).reshape(rows, -1),
        offset=(minimum + np.float32(centre) * scale).astype(np.float16).reshape(rows, -1),
    )


def _width(code_bits: int) -> Literal[4, 8]:
    return 4 if code_bits == 4 else 8


def _signed(fields: Bytes, centre: int) -> npt.NDArray[np.int8]:
    codes = fields.reshape(len(fields), -1).view(np.int8)
    codes -= np.int8(centre)
    return codes


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at a byte of every block, shape (rows, blocks)."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view("<f2")[..., 0].astype(np.float32)


def _groups(packed: Bytes, count: int) -> Bytes:
    return packed.reshape(*packed.shape[:2], count, -1)


def _fields(packed: Bytes, width: int) -> Bytes:
    """Unpacks bytes along the last axis into fields of `width` bits: first the lowest field of every byte."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields: Bytes = packed[..., None, :] >> shifts
    fields &= np.uint8((1 << width) - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def _five_bits(packed: Bytes) -> Bytes:
    """32 fields per block from 4 bytes with their highest bits, in order, and 16 bytes with the other four."""
    fields = _fields(packed[..., 4:], 4)
    fields |= np.unpackbits(packed[..., :4], axis=-1, bitorder="little") << 4
    return fields


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales d·s and minima −dmin·m of the eight parts of 256 values, shape (rows, blocks, 8).

    Twelve bytes hold the 6-bit s and m: four with s0…s3 and, above, the high bits of s4…s7; four with m0…m3 and the
    high bits of m4…m7; four with the low nibbles of s4…s7 and m4…m7.
    """
    first, second, low = (blocks[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([first & 63, low & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, low >> 4 | second >> 6 << 4], axis=-1)
    return _half(blocks, 0)[..., None] * scales, -_half(blocks, 2)[..., None] * minima


def tensor_type(number: int) -> TensorType | None:
    """Returns the type of a number in a file's tensor table, or None for one whose values cannot be read."""
    return TYPES.get(number) or _dequantized(number)


@cache
def _dequantized(number: int) -> TensorType | None:
    """A type that the gguf package turns into floats."""
    from gguf.constants import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    quantization = _known().get(number)
    if quantization is None:
        return None
    elements, size = GGML_QUANT_SIZES[quantization]
    try:
        dequantize(np.zeros((1, size), np.uint8), quantization)
    except NotImplementedError:
        return None

    def read(blocks: Bytes) -> Floats:
        values: Floats = dequantize(blocks, quantization)
        return values

    return TensorType(quantization.name, elements, size, read, exact=False)


def type_name(number: int) -> str:
    """Names a type, whether or not it can be read."""
    known = _known().get(number)
    return f"unknown type {number}" if known is None else known.name


def readable_types() -> list[str]:
    """Names of all types that can be read, in alphabetical order."""
    types = (tensor_type(number) for number in _known())
    return sorted(type_.name for type_ in types if type_ is not None)


def _known() -> dict[int, GGMLQuantizationType]:
    from gguf.constants import GGMLQuantizationType

    return {int(member): member for member in GGMLQuantizationType}
