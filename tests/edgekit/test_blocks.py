from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

from edgekit.blocks import QuantizedBlocks


def _blocks(columns: int, block_size: int, *, affine: bool, bits: Literal[4, 8] = 4) -> QuantizedBlocks:
    rng = np.random.default_rng(0)
    high = 1 << (bits - 1)
    per_block = (5, -(-columns // block_size))
    return QuantizedBlocks(
        bits=bits,
        block_size=block_size,
        codes=rng.integers(-high, high, (5, columns)).astype(np.int8),
        scale=rng.standard_normal(per_block).astype(np.float16),
        offset=rng.standard_normal(per_block).astype(np.float16) if affine else None,
    )


def _by_definition(blocks: QuantizedBlocks) -> npt.NDArray[np.float64]:
    """The formula of the module, one element at a time."""
    values = np.empty(blocks.shape)
    for (row, column), code in np.ndenumerate(blocks.codes):
        block = column // blocks.block_size
        offset = 0.0 if blocks.offset is None else float(blocks.offset[row, block])
        values[row, column] = float(blocks.scale[row, block]) * int(code) + offset
    return values


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("columns", "block_size"), [(64, 32), (96, 64), (7, 16), (128, 128), (33, 16), (1, 32)])
def test_values_are_scale_times_code_plus_offset(
    columns: int, block_size: int, bits: Literal[4, 8], affine: bool
) -> None:
    blocks = _blocks(columns, block_size, affine=affine, bits=bits)
    values = blocks.dequantize()
    assert values.dtype == np.float32
    assert blocks.shape == values.shape == (5, columns)
    assert blocks.scheme == ("affine" if affine else "symmetric")
    np.testing.assert_allclose(values, _by_definition(blocks), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("affine", [False, True])
def test_values_are_not_rounded_to_the_scales_format(affine: bool) -> None:
    scale = np.array([[1.001]], np.float16)
    offset = np.array([[1000.0]], np.float16) if affine else None
    codes = np.array([[127, -128]], np.int8)
    blocks = QuantizedBlocks(bits=8, block_size=32, codes=codes, scale=scale, offset=offset)
    exact = np.float32(scale[0, 0]) * np.array([[127, -128]], np.float32) + np.float32(1000 if affine else 0)
    np.testing.assert_array_equal(blocks.dequantize(), exact)
    assert not np.array_equal(exact, exact.astype(np.float16))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("rows", [[0], [4, 0, 2], [1, 1, 3], []])
def test_rows_are_taken_with_their_scales(rows: list[int], affine: bool) -> None:
    blocks = _blocks(48, 32, affine=affine)
    taken = blocks.take_rows(np.array(rows, np.int64))
    assert (taken.bits, taken.block_size, taken.scheme) == (blocks.bits, blocks.block_size, blocks.scheme)
    assert taken.shape == (len(rows), 48)
    np.testing.assert_array_equal(taken.dequantize(), blocks.dequantize()[rows])


def test_dequantizing_leaves_the_blocks_alone() -> None:
    blocks = _blocks(48, 32, affine=True)
    assert blocks.offset is not None
    before = blocks.codes.copy(), blocks.scale.copy(), blocks.offset.copy()
    blocks.dequantize()[:] = 0
    for kept, part in zip(before, (blocks.codes, blocks.scale, blocks.offset), strict=True):
        np.testing.assert_array_equal(part, kept)
